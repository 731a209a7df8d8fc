"""F-TIS: all agents' groups, with a truncated importance weight and a filter of far-off failures.

arXiv 2605.22537 (Gensyn, TU Delft, Neuchatel), from two accounts of it; its text was not found. There the weight is
one number a token, which needs one vocabulary; ours is one number a response, min(s, C), and the filter's bound grows
with the response's length.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import group_advantages
from .base import Clipped, Method, Pool, Rows, Signal, check


@dataclass(frozen=True)
class FTis(Method):
    """Every group with its writer's advantages; min(s, C) weighs, failures with log s < -g are left out.

    Args:
        cap: C, the largest importance weight.
        divergence_per_token: g of the filter, for each token of the response.
    """

    cap: float = 2.0
    divergence_per_token: float = 0.17

    name: ClassVar[str] = "f_tis"
    title: ClassVar[str] = "F-TIS (sequence form)"
    about: ClassVar[str] = (
        "every agent learned from the answers of all by a truncated importance weight, but not from failures that it "
        "finds improbable."
    )
    papers: ClassVar[tuple[str, ...]] = ("F-TIS", "GRPO")
    order: ClassVar[str] = "shuffled"
    clip_range: ClassVar[tuple[float, float]] = (0.2, 0.2)
    beta: ClassVar[float] = 0.0

    def __post_init__(self):
        check(self, "cap", self.cap > 0, "positive; the paper's value is 2")
        check(self, "divergence_per_token", self.divergence_per_token >= 0, "at least 0, e.g. 0.17")

    def signal(self, pool: Pool) -> Signal:
        """All groups, each with the mean and the spread of its writer."""
        by_source = group_advantages(pool.rewards, epsilon=pool.epsilon)
        advantages = by_source[None].expand(len(by_source), *by_source.shape)
        return Signal(advantages, torch.ones_like(advantages), torch.ones_like(advantages, dtype=torch.bool))

    def objective(self, rows: Rows) -> Tensor:
        """min(s, C) * mean_t q_t A with q_t = pi / sg(pi); the weight carries no gradient."""
        keep = rows.mask.bool()
        logps = torch.where(keep, rows.logps, torch.zeros_like(rows.logps))
        unit = torch.where(keep, torch.exp(logps - logps.detach()), torch.zeros_like(logps))  # 1 in value
        weight = rows.ratio.detach().clamp(max=self.cap) * self._heard(rows)
        return weight * rows.advantages * unit.sum(-1) / rows.lengths

    def clipped(self, rows: Rows, slack: float = 0.0) -> Clipped:
        """Below: filtered. Above: held at the cap, which takes no gradient away."""
        heard = self._heard(rows, slack)
        return Clipped(~heard, rows.ratio > self.cap, heard)

    def _heard(self, rows: Rows, slack: float = 0.0) -> Tensor:
        far = rows.ratio.detach() < math.exp(-self.divergence_per_token) - slack
        return ~(far & (rows.advantages < 0) & ~rows.is_own)
