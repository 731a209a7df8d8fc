"""What the last rounds tell about a run that cannot teach: sentences, each with what to try.

Pure functions of numbers. The thresholds are rules of thumb; docs/troubleshooting.md has them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 3
"""Rounds that a warning looks back on. A single round tells little."""

HARDLY_HEARD = 0.15
"""Below this share of the peers' responses with a gradient, peers teach next to nothing."""

RATIO_OFF = 0.1
"""The own responses' mean ratio is this far from 1 only where an update moved the agent much too far."""

LARGE_KL = 1.0
LARGE_GRAD_NORM = 30.0
"""Of the KL divergence of a token, and of the gradient before it is clipped."""

COLLAPSE = 0.25
"""A mean reward that fell to this part of the best one of earlier rounds."""


@dataclass
class RoundSigns:
    """The numbers of one round. (N,) lists, by agent; nan where there is nothing to measure.

    Attributes:
        rewards: (N,) mean reward.
        differing: share of the prompts whose responses' rewards differ, so that something can be learned from them.
        capabilities: (N,) P.
        heard: (N,) share of the peers' responses in which the learner's update had a gradient.
        with_advantage: (N,) share of the peers' responses that have an advantage for the learner.
        own_ratio: (N,) mean raw ratio of the own responses.
        kl: (N,) mean divergence from the reference.
        grad_norm: (N,) the largest of the round, before clipping.
    """

    rewards: list[float]
    differing: float
    capabilities: list[float]
    heard: list[float]
    with_advantage: list[float]
    own_ratio: list[float]
    kl: list[float]
    grad_norm: list[float]

    @property
    def peers_heard(self) -> float:
        """Mean of `heard` over the learners; nan where nothing is shared."""
        return _mean(self.heard)


def advise(
    history: Sequence[RoundSigns],
    names: Sequence[str],
    *,
    learning_rates: Sequence[float],
    loudest: float | None = None,
    window: int = 5,
    floor: float = 1e-8,
) -> dict[tuple[str, str], str]:
    """Warnings about the newest round, seen together with those before it.

    Args:
        history: of all rounds so far, the newest last.
        names: of the agents.
        learning_rates: (N,) of the settings.
        loudest: the largest capability coefficient, or None where peers' responses have none.
        window: rounds that P is a mean of.
        floor: P of an agent without a rewarded response.

    Returns:
        Sentences, by a key that stays the same from round to round: what is warned of, and the agent or "".
    """
    found: dict[tuple[str, str], str] = {}
    if not history:
        return found
    recent, last = history[-WINDOW:], history[-1]
    whole = len(recent) == WINDOW
    if whole and all(signs.differing == 0 for signs in recent):
        found["equal", ""] = _all_equal(recent)
    for k, name in enumerate(names):
        if whole and not any(signs.differing == 0 for signs in recent):
            heard = _mean([signs.heard[k] for signs in recent])
            if heard < HARDLY_HEARD:
                found["heard", name] = _hardly_heard(name, heard, _mean([s.with_advantage[k] for s in recent]))
        if _lasting(abs(signs.own_ratio[k] - 1) > RATIO_OFF for signs in recent):
            found["ratio", name] = (
                f"{name}: the mean ratio of its own responses is {last.own_ratio[k]:.2f}, far from 1: an update moves "
                f"it so far that most of what it sampled is out of date. Try a lower learning_rate (now "
                f"{learning_rates[k]:g}), a warm-up, or fewer updates a round."
            )
        for what, values, limit in (
            ("KL divergence from the model that it was", [s.kl[k] for s in recent], LARGE_KL),
            ("gradient norm before clipping", [s.grad_norm[k] for s in recent], LARGE_GRAD_NORM),
        ):
            if _lasting(value > limit for value in values):
                found["far", name] = (
                    f"{name}: its {what} is {values[-1]:.3g}, as of a model that is being destroyed. Read some of its "
                    f"responses (log_completions=True), and try a lower learning_rate (now {learning_rates[k]:g})."
                )
        collapse = _collapse([signs.rewards[k] for signs in history])
        if collapse is not None:
            found["collapse", name] = (
                f"{name}: its mean reward fell from {collapse:.3f} to {last.rewards[k]:.3f}. Start again from an "
                f"earlier checkpoint with a lower learning_rate (now {learning_rates[k]:g}); if its responses became "
                "long or empty, look at the reward function, too."
            )
        others = [p for p in last.capabilities if p > floor * 1.001]
        if loudest is not None and last.capabilities[k] <= floor * 1.001 and others:
            found["unrewarded", name] = (
                f"{name}: not one of its responses was rewarded in the last {window} rounds (P = 0), so its peers' "
                f"responses count up to {loudest:g} times. Try easier problems, show the form of the answer in the "
                "prompt, set capability_ratio_bounds nearer to 1 (such as 0.5 2), or capability_coefficient=False."
            )
    return found


def _lasting(signs) -> bool:
    """Whether something holds for the last two rounds."""
    signs = list(signs)[-2:]
    return len(signs) == 2 and all(signs)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _all_equal(recent: Sequence[RoundSigns]) -> str:
    means = [_mean(signs.rewards) for signs in recent]
    start = (
        f"In the last {len(recent)} rounds all responses to a prompt got the same reward, so nothing was learned "
        f"(mean reward {means[-1]:.3f}). "
    )
    if max(means) <= 0:
        return start + (
            "Nothing is right: look at the responses (log_completions=True) and at the reward function, check "
            "max_completion_length, or take easier problems; hacpo train --dry_run --sample_problems 8 tries some."
        )
    return start + "Take other problems, neither too easy nor too hard, or more num_generations."


def _hardly_heard(name: str, heard: float, with_advantage: float) -> str:
    start = f"{name} hears next to nothing of its peers: {100 * heard:.0f} % of their responses had a gradient. "
    if heard < 0.5 * with_advantage:
        return start + (
            f"{100 * with_advantage:.0f} % have an advantage, and most of these lie outside its clip range. Try "
            'peer_clip_delta=0.6 with peer_advantages="positive", length_normalization="shared" for different '
            "tokenizers, or a lower learning_rate."
        )
    return start + (
        "Most have no advantage: all responses to a prompt got the same reward, or peer_advantages leaves them out. "
        "Try problems that are neither too easy nor too hard, or more num_generations."
    )


def _collapse(rewards: Sequence[float]) -> float | None:
    """The best mean of two rounds, if the last two are both far below it."""
    if len(rewards) < 3 or not all(math.isfinite(reward) for reward in rewards[-2:]):
        return None
    earlier = [_mean(rewards[i : i + 2]) for i in range(len(rewards) - 2)]
    best = max((mean for mean in earlier if not math.isnan(mean)), default=0.0)
    return best if best > 0 and max(rewards[-2:]) <= COLLAPSE * best else None
