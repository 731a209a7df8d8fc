"""Gap sharing (ours): peers' successes, weighted by how much better the peer is at this very prompt.

HACPO's form with three changes: only successes of peers are learned from, the clip range is wider, and a response's
weight holds max(0, success rate of the peer on this prompt - that of the learner). Where agents are equally good the
weight is small, and the run is close to GSPO; where a peer can do what the learner cannot, it is large.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Pool, Signal, check
from .hacpo import Hacpo


@dataclass(frozen=True)
class Gap(Hacpo):
    """HACPO on peers' successes, weighted by the prompt's gap.

    Args:
        power: exponent of the gap; 0 takes it as 1 wherever it is positive.
        prior: responses of rate .5 that are added to each agent's on a prompt, since few responses make a rough rate.
        alpha: see `Hacpo`, as the others.
    """

    delta: float | None = 0.6
    peer_advantages: str = "positive"
    power: float = 1.0
    prior: float = 0.0

    name: ClassVar[str] = "gap"
    title: ClassVar[str] = "gap sharing"
    about: ClassVar[str] = (
        "on every prompt all agents answer, each answer is graded once, and every agent learns from the right answers "
        "of those who solve the prompt more often than itself."
    )
    config_fields: ClassVar[dict[str, str]] = {}

    def __post_init__(self):
        check(self, "power", self.power >= 0, "at least 0")
        check(self, "prior", self.prior >= 0, "at least 0")

    def signal(self, pool: Pool) -> Signal:
        """HACPO's, with the gap in the weights."""
        signal = super().signal(pool)
        known = torch.isfinite(pool.rewards).sum(-1).double()  # (N, B)
        rate = (pool.right.sum(-1) + 0.5 * self.prior) / (known + self.prior)  # NaN without a scorable response
        gap = torch.nan_to_num(rate[None] - rate[:, None]).clamp(min=0)  # (N learners, N sources, B)
        factor = torch.where(gap > 0, gap.pow(self.power), torch.zeros_like(gap))[..., None]
        weights = torch.where(pool.own, signal.weights, signal.weights * factor)
        silent = ~pool.own & (factor == 0)
        return signal._replace(
            advantages=torch.where(silent, torch.zeros_like(signal.advantages), signal.advantages), weights=weights
        )
