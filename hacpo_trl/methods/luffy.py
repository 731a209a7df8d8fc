"""LUFFY: one right response of a peer joins each group; its tokens count by a shaped probability, without a ratio.

arXiv 2504.14945v5 and its code. There the response is a strong teacher's; here, as GRAFT's authors did, a peer's. One
response a prompt for every prompt that a peer solves is our form for peers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import group_advantages
from .base import Counts, Method, Pool, Rows, Signal, TokenClip, check
from .sgt import draw_right


@dataclass(frozen=True)
class Luffy(TokenClip, Method):
    """Foreign tokens with f(pi) = pi / (pi + gamma), compared with the union of own and foreign.

    Args:
        gamma: of the shaping; the gradient's weight is largest where pi = gamma.
        own_clip: clip the ratio of own tokens. The paper's final form does not.
        scale: divide the advantage by the union's standard deviation. The paper's experiments do not.
    """

    gamma: float = 0.1
    own_clip: bool = False
    scale: bool = False

    name: ClassVar[str] = "luffy"
    title: ClassVar[str] = "LUFFY"
    about: ClassVar[str] = (
        "one right answer of a peer joined each group of an agent's answers, its tokens weighed by a shaped "
        "probability."
    )
    papers: ClassVar[tuple[str, ...]] = ("LUFFY", "GRPO")
    selects: ClassVar[bool] = True
    order: ClassVar[str] = "with_prompt"
    counts_tokens: ClassVar[bool] = False

    def __post_init__(self):
        check(self, "gamma", self.gamma > 0, "positive; the paper's value is 0.1")

    def signal(self, pool: Pool) -> Signal:
        """r - mean over the learner's group and the foreign response."""
        count, prompts, _ = pool.rewards.shape
        drawn = draw_right(pool, torch.ones(count, prompts, dtype=torch.bool))
        advantages = torch.zeros(count, *pool.rewards.shape).to(pool.rewards)
        for k in range(count):
            foreign = torch.where(drawn[k], pool.rewards, -torch.inf).amax((0, 2))  # (B,), -inf without one
            union = torch.cat([pool.rewards[k], foreign[:, None]], dim=1)[None]  # (1, B, G + 1)
            found = group_advantages(union, epsilon=pool.epsilon, scale=self.scale)[0]
            advantages[k] = torch.where(drawn[k], found[:, -1:], 0.0)
            advantages[k, k] = found[:, :-1]
        return Signal(advantages, torch.ones_like(advantages), drawn | pool.own)

    def objective(self, rows: Rows) -> Tensor:
        """Own: sum_t rho_t A, clipped on request. Foreign: sum_t f(pi_t) A."""
        own = self.token_terms(rows) if self.own_clip else torch.exp(rows.token_ratio) * rows.advantages[:, None]
        logps = torch.where(rows.mask.bool(), rows.logps, torch.zeros_like(rows.logps))
        probability = torch.exp(logps)
        shaped = probability / (probability + self.gamma) * rows.advantages[:, None]
        return rows.sum_tokens(torch.where(rows.is_own[:, None], own, shaped))

    def clips(self, rows: Rows) -> Tensor:
        """See `TokenClip`: foreign tokens are never clipped, own ones on request."""
        return rows.is_own & self.own_clip

    def can_clip_peers(self) -> bool:
        """See `Method`."""
        return False

    def denominators(self, counts: Counts) -> tuple[float, float]:
        """The update's responses times the longest that one can be: a constant, as in the authors' code."""
        return counts.rows * counts.longest, counts.rows * counts.longest
