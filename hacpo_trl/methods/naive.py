"""Naive sharing, an ablation of HACPO: every response counts as the learner's own.

Zhang et al., arXiv 2603.02604: the plain mean of the pool, no coefficient, no damping, GSPO's clip for all.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Rows
from .hacpo import Hacpo


@dataclass(frozen=True)
class Naive(Hacpo):
    """HACPO with w = 1, c = 1 and the own formula for all responses.

    Args:
        peer_advantages: see `Hacpo`.
    """

    baseline: str = "pooled"
    coefficient: bool = False

    name: ClassVar[str] = "naive"
    title: ClassVar[str] = "naive sharing"
    about: ClassVar[str] = (
        "an ablation of HACPO: on every prompt all agents answer, each answer is graded once, and every agent learns "
        "from the answers of all as if they were its own."
    )
    config_fields: ClassVar[dict[str, str]] = {"peer_advantages": "peer_advantages"}

    def can_clip_peers(self) -> bool:
        """See `Method`."""
        return True

    def own_formula(self, rows: Rows) -> Tensor:
        """See `SequenceClip`."""
        return torch.ones_like(rows.is_own)
