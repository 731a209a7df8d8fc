"""SAPO: a share of an agent's groups is replaced by groups of the others, drawn at random, as if it had written them.

arXiv 2509.08721 (Gensyn's swarm), from accounts of it and the code of the open swarm; its text was not found. How own
groups are chosen and how the two kinds are mixed is our reading.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import group_advantages
from .base import Method, Pool, Signal, TokenClip, check


@dataclass(frozen=True)
class Sapo(TokenClip, Method):
    """I own groups and J of the others, I + J the number of prompts of a round.

    Args:
        peer_share: J / (I + J).
        informative_only: draw among groups with unlike rewards; False, as in the open swarm, among all.
    """

    peer_share: float = 0.5
    informative_only: bool = True

    name: ClassVar[str] = "sapo"
    title: ClassVar[str] = "SAPO"
    about: ClassVar[str] = "an agent learned from some of its own groups of answers and from as many of its peers'."
    papers: ClassVar[tuple[str, ...]] = ("SAPO", "GRPO")
    views_peers: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    order: ClassVar[str] = "merged"
    clip_range: ClassVar[tuple[float, float]] = (0.2, 0.28)

    def __post_init__(self):
        check(self, "peer_share", 0 <= self.peer_share <= 1, "between 0 and 1; the paper's best is 0.5")

    def signal(self, pool: Pool) -> Signal:
        """Every group with its writer's mean and spread."""
        count, prompts, _ = pool.rewards.shape
        by_source = group_advantages(pool.rewards, epsilon=pool.epsilon)
        wanted = round(prompts * self.peer_share) if count > 1 else 0
        taken = torch.zeros(count, count, prompts, dtype=torch.bool)
        for k in range(count):
            others = torch.ones(count, prompts, dtype=torch.bool)
            others[k] = False
            if self.informative_only:
                others &= pool.mixed
            draw = torch.rand(count, prompts, generator=pool.generator)
            foreign = _highest(torch.where(others, draw, -1.0).flatten(), min(wanted, int(others.sum())))
            taken[k] = foreign.view(count, prompts)
            own = torch.rand(prompts, generator=pool.generator) + pool.mixed[k]
            taken[k, k] = _highest(own, prompts - wanted)
        taken = taken[..., None].expand(count, *pool.rewards.shape)
        advantages = by_source[None].expand(taken.shape)
        return Signal(torch.where(taken, advantages, 0.0), torch.ones_like(advantages), taken)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Marks the `count` highest of (n,) scores."""
    marked = torch.zeros(len(scores), dtype=torch.bool)
    marked[scores.topk(count).indices] = True
    return marked
