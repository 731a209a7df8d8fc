"""GSPO and GRPO: the agents train side by side on the same prompts and share nothing. The loss is TRL's.

Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071; Shao et al., "DeepSeekMath", arXiv 2402.03300.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..objective import capability_aware_advantages, group_advantages
from .base import Method, Pool, Signal


@dataclass(frozen=True)
class Gspo(Method):
    """Every agent alone, with the ratio and the clip of whole responses."""

    name: ClassVar[str] = "gspo"
    title: ClassVar[str] = "GSPO"
    about: ClassVar[str] = (
        "the agents trained side by side on the same prompts and learned from their own answers only."
    )
    papers: ClassVar[tuple[str, ...]] = ("GSPO",)
    trains_on_peers: ClassVar[bool] = False
    pools_rewards: ClassVar[bool] = False

    def signal(self, pool: Pool) -> Signal:
        """Every agent's own group."""
        by_source = group_advantages(pool.rewards, epsilon=pool.epsilon)  # (N, B, G)
        advantages = torch.where(pool.own, by_source[None], torch.zeros_like(by_source))
        taken = pool.own.expand(advantages.shape)
        return Signal(advantages, torch.ones_like(advantages), taken)


@dataclass(frozen=True)
class Grpo(Gspo):
    """Every agent alone, with the ratio and the clip of tokens."""

    name: ClassVar[str] = "grpo"
    title: ClassVar[str] = "GRPO"
    papers: ClassVar[tuple[str, ...]] = ("GRPO",)
    level: ClassVar[str] = "token"
    clip_range: ClassVar[tuple[float, float]] = (0.2, 0.2)


@dataclass(frozen=True)
class Xgrpo(Grpo):
    """GRPO on own responses with the mean and the spread of all agents' rewards.

    After XGRPO of arXiv 2605.07244 ("peers move the baseline only"); its formula was not found, this is our reading:
    a group that fails where a peer succeeds is pushed down, one that succeeds where a peer fails is pushed up.
    """

    name: ClassVar[str] = "xgrpo"
    title: ClassVar[str] = "XGRPO (our reading)"
    about: ClassVar[str] = (
        "the agents trained on the same prompts and learned from their own answers only, each compared with the mean "
        "of all agents' answers."
    )
    papers: ClassVar[tuple[str, ...]] = ("SGT", "GRPO")
    pools_rewards: ClassVar[bool] = True
    beta: ClassVar[float] = 0.0

    def signal(self, pool: Pool) -> Signal:
        """Eq. (6) with w = 1, own responses only."""
        advantages = capability_aware_advantages(
            pool.rewards,
            torch.ones(len(pool.rewards)).to(pool.rewards),
            epsilon=pool.epsilon,
            baseline="pooled",
            max_reward=pool.max_reward,
        )
        own = pool.own.expand(advantages.shape)
        return Signal(torch.where(own, advantages, torch.zeros_like(advantages)), torch.ones_like(advantages), own)
