"""How strong is each agent at the moment? The windowed capability of HACPO. Needs only torch."""

import math
import warnings
from collections import deque
from typing import Any

import torch
from torch import Tensor

from .objective import capability_ratios

METRICS = ("positive_rate", "mean_reward")


class CapabilityTracker:
    """Capability P_k of every agent: its mean reward rate over the last rounds (arXiv 2603.02604, section 3).

    Args:
        num_agents: N.
        window: number K of rounds that the mean runs over, the newest included.
        metric: "positive_rate", the share of responses with a reward above 0, or "mean_reward".
        floor: smallest capability of an agent whose rate is 0 (or, for "mean_reward", positive but tiny).
        ratio_bounds: clamp of the ratios.

    Raises:
        ValueError: for settings that make no sense.
    """

    def __init__(
        self,
        num_agents: int,
        window: int = 5,
        metric: str = "positive_rate",
        floor: float = 1e-8,
        ratio_bounds: tuple[float, float] = (0.1, 10.0),
    ):
        if num_agents < 1:
            raise ValueError(f"num_agents={num_agents} must be at least 1.")
        if window < 1:
            raise ValueError(f"window={window} must be at least 1 round; the paper's value is 5.")
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r} is unknown; use one of {', '.join(METRICS)}.")
        if floor <= 0:
            raise ValueError(f"floor={floor} must be positive, e.g. 1e-8.")
        capability_ratios(torch.ones(1), ratio_bounds)  # checks the bounds
        self.num_agents = num_agents
        self.window = window
        self.metric = metric
        self.floor = floor
        self.ratio_bounds = tuple(ratio_bounds)
        # of every agent its last rounds with a scorable response
        self._rates: list[deque[float]] = [deque(maxlen=window) for _ in range(num_agents)]
        self._variances: list[deque[float]] = [deque(maxlen=window) for _ in range(num_agents)]
        self._warned = False

    def update(self, rewards: Tensor) -> None:
        """Takes the rewards of one round into the window.

        Args:
            rewards: (N, ...), any number of further dimensions. Rewards that are not finite (unscorable) are left
                out; a round in which an agent has no scorable response leaves its capability as it was.
        """
        if rewards.dim() < 2 or rewards.shape[0] != self.num_agents:
            raise ValueError(
                f"rewards must have the shape ({self.num_agents} agents, responses ...), got {tuple(rewards.shape)}."
            )
        rewards = rewards.detach().to("cpu", torch.float64).flatten(1)
        for row, rates, variances in zip(rewards, self._rates, self._variances, strict=True):
            row = row[torch.isfinite(row)]
            if len(row):
                rates.append(((row > 0).double() if self.metric == "positive_rate" else row).mean().item())
                variances.append(row.var(correction=0).item())
        if not self._warned and bool((self.capabilities <= 0).any()):
            self._warned = True
            warnings.warn(
                "The mean reward of an agent is not positive, so capability ratios with it have no meaning and count "
                "as 1. Use capability_metric='positive_rate', or rewards that are not negative.",
                stacklevel=2,
            )

    @property
    def capabilities(self) -> Tensor:
        """(N,) float64. NaN for an agent without a scorable response in the window."""
        mean = _means(self._rates)
        floored = mean.clamp(min=self.floor)  # keeps NaN
        return floored if self.metric == "positive_rate" else torch.where(mean > 0, floored, mean)

    @property
    def reward_variances(self) -> Tensor:
        """(N,) float64, mean over the window of each agent's reward variance within a round."""
        return _means(self._variances)

    def ratios(self) -> Tensor:
        """(N learners, N sources) float64: P_k / P_j, clamped; 1 where a capability is not a positive number."""
        return capability_ratios(self.capabilities, self.ratio_bounds)

    def state_dict(self) -> dict[str, Any]:
        """The window as plain numbers, fit for JSON."""
        return {"rates": [list(r) for r in self._rates], "variances": [list(v) for v in self._variances]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Raises:
            ValueError: when the state holds another number of agents.
        """
        if len(state["rates"]) != self.num_agents:
            raise ValueError(f"The capability state is of {len(state['rates'])} agents, not of {self.num_agents}.")
        self._rates = [deque(rates, maxlen=self.window) for rates in state["rates"]]
        self._variances = [deque(variances, maxlen=self.window) for variances in state["variances"]]


def _means(windows: list[deque[float]]) -> Tensor:
    """(N,) float64, NaN for an empty window."""
    return torch.tensor([sum(w) / len(w) if w else math.nan for w in windows], dtype=torch.float64)
