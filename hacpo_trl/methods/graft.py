"""GRAFT: a group in which the learner fails wholly is replaced by a peer's group that holds both kinds.

arXiv 2609.37868v1 (KAIST, AITRICS). For more than two agents, and what happens to ties, our reading (docs/methods.md).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import group_advantages
from .base import Method, Pool, Signal, TokenClip, check

_PROMPTS = ("ranked", "random")


@dataclass(frozen=True)
class Graft(TokenClip, Method):
    """Replaces failed groups, as many in both directions of a pair.

    Args:
        floor: a peer's response with an importance ratio of at most this before the first update is left out.
        gate: weigh it by min(s, 1); False is the paper's ablation "no gate" (with floor=0: no weight at all).
        balance: take as many groups in both directions of a pair. Without, all candidates are taken.
        prompts: "ranked" (those that the peer solves most often), or "random": the paper's control.
        success_only: take a peer's right responses only, with the advantages of the whole group.
        pooled: keep the failed group beside the peer's; mean and spread over both.
    """

    floor: float = 0.8
    gate: bool = True
    balance: bool = True
    prompts: str = "ranked"
    success_only: bool = False
    pooled: bool = False

    name: ClassVar[str] = "graft"
    title: ClassVar[str] = "GRAFT"
    about: ClassVar[str] = (
        "where all answers of an agent to a prompt failed, it learned from the group of answers of a peer that "
        "succeeded in part, as many groups in both directions."
    )
    papers: ClassVar[tuple[str, ...]] = ("GRAFT", "GRPO")
    views_peers: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    order: ClassVar[str] = "peers_last"
    clip_range: ClassVar[tuple[float, float]] = (0.2, 0.28)

    def __post_init__(self):
        fine = 0 <= self.floor < 1 or self.floor == torch.inf
        check(self, "floor", fine, "in [0, 1); the paper's value is 0.8")
        check(self, "prompts", self.prompts in _PROMPTS, f"one of {', '.join(_PROMPTS)}")

    def signal(self, pool: Pool) -> Signal:
        """Own groups as in GRPO; a selected group with its own writer's advantages in the place of the failed one."""
        groups = self.select(pool)  # (N, N, B)
        own = pool.own
        by_source = group_advantages(pool.rewards, epsilon=pool.epsilon)  # (N, B, G)
        advantages = by_source[None].expand(len(groups), *by_source.shape).clone()
        taken = groups[..., None] | own.expand_as(advantages)
        if self.pooled:
            for k, j, b in groups.nonzero().tolist():
                both = torch.cat([pool.rewards[k, b], pool.rewards[j, b]])[None, None]
                pooled = group_advantages(both, epsilon=pool.epsilon)[0, 0]
                advantages[k, k, b], advantages[k, j, b] = pooled.chunk(2)
        else:
            replaced = groups.any(1)  # (N, B)
            taken = taken & ~(own & replaced[:, None, :, None])
        if self.success_only:
            taken = taken & (own | pool.right[None])
        return Signal(torch.where(taken, advantages, 0.0), torch.ones_like(advantages), taken)

    def select(self, pool: Pool) -> Tensor:
        """(N learners, N sources, B) which groups are taken.

        A candidate prompt of a pair: all of the learner's responses are wrong, and the peer's group holds a right one
        and unlike rewards. It goes to the peer with the most right responses (a draw where several have as many). Of
        m = the smaller number of candidates of the two directions the m with the most right responses are taken, and
        all that tie with the m-th.
        """
        right = pool.right.sum(-1)  # (N, B)
        fails = (right == 0) & torch.isfinite(pool.rewards).any(-1)
        helps = (right > 0) & pool.mixed
        candidates = fails[:, None] & helps[None] & ~torch.eye(len(right), dtype=torch.bool)[:, :, None]
        draw = torch.rand(candidates.shape, generator=pool.generator)
        score = torch.where(candidates, right[None] + draw, -torch.ones_like(draw))  # (N, N, B), draw breaks ties
        candidates = candidates & (score == score.amax(1, keepdim=True))
        if not self.balance:
            return candidates
        selected = torch.zeros_like(candidates)
        for k in range(len(right)):
            for j in range(k):
                m = min(int(candidates[k, j].sum()), int(candidates[j, k].sum()))
                for learner, source in ((k, j), (j, k)):
                    rank = right[source].double() if self.prompts == "ranked" else draw[learner, source].double()
                    rank = torch.where(candidates[learner, source], rank, -1.0)
                    if m:
                        selected[learner, source] = candidates[learner, source] & (rank >= rank.topk(m).values[-1])
        return selected

    def admit(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """1[s > floor] min(s, 1)."""
        weights = ratio.clamp(max=1.0) if self.gate else torch.ones_like(ratio)
        return torch.where(ratio > self.floor, weights, torch.zeros_like(weights))
