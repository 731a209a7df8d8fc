"""HACPO: capability-aware advantages, a discrepancy coefficient, a one-sided clip and damping for peers' responses.

Zhang et al., "Heterogeneous Agent Collaborative Reinforcement Learning", arXiv 2603.02604, eq. (5)-(6), (56)-(59).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective import capability_aware_advantages, capability_coefficients, hacpo_objective, peer_clip_lower
from .base import Method, Pool, Rows, SequenceClip, Signal


@dataclass(frozen=True)
class Hacpo(SequenceClip, Method):
    """The paper's form.

    Args:
        alpha: exponent of the damping of peers' responses of low ratio.
        delta: width of the peers' clip range at a round's first update; None: no clip.
        delta_step: by how much every update narrows it.
        baseline: see `objective.BASELINES`.
        coefficient: whether a peer's response is scaled by P of the peer / P of the learner.
        peer_advantages: "all", or "positive": nothing is learned from peers' responses with a negative advantage.
    """

    alpha: float = 1.0
    delta: float | None = 0.2
    delta_step: float = 0.025
    baseline: str = "capability"
    coefficient: bool = True
    peer_advantages: str = "all"

    name: ClassVar[str] = "hacpo"
    title: ClassVar[str] = "HACPO"
    about: ClassVar[str] = (
        "on every prompt all agents answer, each answer is graded once, and every agent learns from the answers of "
        "all, each weighed by what its writer and its reader can do."
    )
    papers: ClassVar[tuple[str, ...]] = ("HACPO", "GSPO")
    config_fields: ClassVar[dict[str, str]] = {
        "alpha": "alpha",
        "delta": "peer_clip_delta",
        "delta_step": "peer_clip_step",
        "baseline": "baseline",
        "coefficient": "capability_coefficient",
        "peer_advantages": "peer_advantages",
    }

    def signal(self, pool: Pool) -> Signal:
        """Eq. (5)-(6) and the coefficient c(k <- j)."""
        advantages = capability_aware_advantages(
            pool.rewards,
            pool.capabilities.to(pool.rewards),
            epsilon=pool.epsilon,
            ratio_bounds=pool.ratio_bounds,
            baseline=self.baseline,
            max_reward=pool.max_reward,
            reward_variances=None if pool.reward_variances is None else pool.reward_variances.to(pool.rewards),
        )
        if self.peer_advantages == "positive":
            advantages = torch.where(pool.own, advantages, advantages.clamp(min=0))
        coefficients = capability_coefficients(pool.capabilities, pool.ratio_bounds)  # (N, N) float64
        if not self.coefficient:
            coefficients = torch.ones_like(coefficients)
        weights = coefficients[:, :, None, None].expand(advantages.shape)
        return Signal(advantages, weights, torch.ones_like(advantages, dtype=torch.bool))

    def objective(self, rows: Rows) -> Tensor:
        """Eq. (56)-(59)."""
        low, high = rows.clip_range
        return hacpo_objective(
            rows.ratio,
            rows.advantages,
            self.own_formula(rows),
            rows.weights,
            rows.update_index,
            epsilon_low=low,
            epsilon_high=high,
            delta=self.delta,
            delta_step=self.delta_step,
            alpha=self.alpha,
        )

    def ranges(self, rows: Rows) -> tuple[tuple[float, float], tuple[float, float]]:
        """See `SequenceClip`."""
        low, high = rows.clip_range
        peers = (-1.0, torch.inf)
        if self.delta is not None:
            peers = (peer_clip_lower(rows.update_index, self.delta, self.delta_step), 1.0)
        return (1 - low, 1 + high), peers

    def can_clip_peers(self) -> bool:
        """See `Method`."""
        return self.delta is not None

    def scales_peers(self) -> bool:
        """See `Method`."""
        return self.coefficient
