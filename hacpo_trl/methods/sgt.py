"""SGT, success-gated transfer: where the learner fails wholly, one right response of a peer is learned.

arXiv 2605.07244 (Mutual RL). Which responses and lambda are the authors'; their text was not found, so the mean over
the update's rescued responses, the draw among several peers and the missing schedule are our reading.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import group_advantages
from .base import Counts, Method, Pool, Rows, Signal, TokenClip, check


def draw_right(pool: Pool, prompts: Tensor) -> Tensor:
    """Draws one right response of a peer for every learner and prompt, uniformly over all peers' right ones.

    Args:
        pool: the round's.
        prompts: (N learners, B) bool, where one is wanted.

    Returns:
        (N learners, N sources, B, G) bool, at most one for each learner and prompt.
    """
    count, _, generations = pool.rewards.shape
    draw = torch.rand(pool.rewards.shape, generator=pool.generator)  # one draw for all learners would favour nobody
    drawn = torch.zeros(count, *pool.rewards.shape, dtype=torch.bool)
    for k in range(count):
        fits = pool.right & prompts[k, :, None]
        fits[k] = False
        scores = torch.where(fits, draw, -1.0).transpose(0, 1).flatten(1)  # (B, N * G)
        best = scores.argmax(1)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen[torch.arange(len(best)), best] = scores.amax(1) >= 0
        drawn[k] = chosen.unflatten(1, (count, generations)).transpose(0, 1)
    return drawn


@dataclass(frozen=True)
class Sgt(TokenClip, Method):
    """GRPO on own responses plus the negative log-likelihood of rescued prompts' right responses.

    Args:
        weight: lambda.
        mean_over: "rescued": the likelihood is a mean over the update's rescued responses; "rows": a sum over them,
            divided by the number of all the update's responses.
    """

    weight: float = 0.1
    mean_over: str = "rescued"

    name: ClassVar[str] = "sgt"
    title: ClassVar[str] = "SGT"
    about: ClassVar[str] = (
        "where all answers of an agent to a prompt failed and a peer had a right one, it learned from that answer by "
        "its likelihood."
    )
    papers: ClassVar[tuple[str, ...]] = ("SGT", "GRPO")
    selects: ClassVar[bool] = True
    order: ClassVar[str] = "with_prompt"

    def __post_init__(self):
        check(self, "weight", self.weight >= 0, "at least 0; the paper's value is 0.1")
        check(self, "mean_over", self.mean_over in ("rescued", "rows"), "rescued or rows")

    def signal(self, pool: Pool) -> Signal:
        """Own groups as in GRPO; a rescued response counts 1, whatever its reward."""
        fails = (pool.right.sum(-1) == 0) & torch.isfinite(pool.rewards).any(-1)  # (N, B)
        rescued = draw_right(pool, fails)
        by_source = group_advantages(pool.rewards, epsilon=pool.epsilon)
        advantages = torch.where(pool.own, by_source[None], rescued.to(by_source))
        return Signal(advantages, torch.full_like(advantages, self.weight), rescued | pool.own)

    def objective(self, rows: Rows) -> Tensor:
        """Own: mean_t min(rho_t A, clip(rho_t) A). Rescued: lambda * mean_t log pi."""
        likelihood = rows.weights * rows.advantages * rows.sum_tokens(rows.logps)
        return torch.where(rows.is_own, rows.sum_tokens(self.token_terms(rows)), likelihood) / rows.lengths

    def clips(self, rows: Rows) -> Tensor:
        """See `TokenClip`: a rescued response is never clipped."""
        return rows.is_own

    def can_clip_peers(self) -> bool:
        """See `Method`."""
        return False

    def denominators(self, counts: Counts) -> tuple[float, float]:
        """Own: responses of the update. Rescued: those of the update, or the same."""
        return counts.rows, max(counts.peers, 1e-9) if self.mean_over == "rescued" else counts.rows
