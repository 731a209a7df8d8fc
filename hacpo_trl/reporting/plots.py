"""Tables and plots of a run. Plots need matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLORS = ("#1f5fa8", "#d1622b", "#2c8a4b", "#8e44ad", "#a4343a", "#5d6d7e")
_LIGHT = 0.35


@dataclass
class Evaluation:
    """Accuracy of one agent before and after a run.

    Attributes:
        agent: its name.
        kind: how it answered, "greedy" or "sampled".
        before: accuracy before the run, in [0, 1].
        after: accuracy after it.
        count: problems that were answered.
    """

    agent: str
    kind: str
    before: float
    after: float
    count: int

    @property
    def error(self) -> float:
        """Standard error of `after`, from the number of problems."""
        return math.sqrt(max(self.after * (1 - self.after), 0.0) / self.count)


def accuracy_table(evaluations: Sequence[Evaluation]) -> str:
    """A table of accuracies before and after, as plain text."""
    width = max([len(e.agent) for e in evaluations] + [5])
    lines = [f"{'agent':<{width}}  answers   before   after    change"]
    for e in evaluations:
        change = 100 * (e.after - e.before)
        lines.append(f"{e.agent:<{width}}  {e.kind:<8}  {e.before:6.3f}   {e.after:6.3f}   {change:+5.1f} points")
    return "\n".join(lines)


def plot_run(
    history: Sequence[dict[str, Any]], agents: Sequence[str], evaluations: Sequence[Evaluation], path: str, title: str
) -> None:
    """Draws a run: rewards over rounds, accuracies before and after, and what the agents made of each other.

    Args:
        history: `trainer.state.log_history`.
        agents: names, the leader's first.
        evaluations: accuracies, or none.
        path: where the picture goes; the ending names the format.
        title: stands above it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 3 if evaluations else 2
    figure, axes = plt.subplots(1, columns, figsize=(4.6 * columns, 3.9), layout="constrained")
    figure.suptitle(title)

    _plot_rewards(axes[0], history, agents)
    if evaluations:
        _plot_accuracies(axes[1], evaluations, agents)
    _plot_ratios(axes[-1], history, agents)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _series(history: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in history if entry.get(key) is not None]


def _smooth(values: Sequence[float], span: int = 5) -> list[float]:
    windows = (values[max(0, i - span + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _plot_rewards(axis, history, agents) -> None:
    for color, name in zip(COLORS, agents, strict=False):
        rewards = _series(history, f"{name}/reward")
        rounds = range(1, len(rewards) + 1)
        axis.plot(rounds, rewards, color=color, alpha=_LIGHT, linewidth=1)
        axis.plot(rounds, _smooth(rewards), color=color, linewidth=2, label=name)
    axis.set(title="Reward of the round's responses", xlabel="round", ylabel="mean reward (thick: of 5 rounds)")
    axis.legend(frameon=False)


def _plot_accuracies(axis, evaluations, agents) -> None:
    colors = dict(zip(agents, COLORS, strict=False))
    for i, e in enumerate(evaluations):
        axis.bar(i - 0.2, e.before, 0.38, color=colors[e.agent], alpha=_LIGHT)
        axis.bar(i + 0.2, e.after, 0.38, color=colors[e.agent], yerr=e.error, capsize=3)
        axis.text(i + 0.2, e.after + e.error + 0.015, f"{100 * (e.after - e.before):+.0f}", ha="center")
    axis.set_xticks(range(len(evaluations)), [f"{e.agent}\n{e.kind}" for e in evaluations])
    axis.set_ylim(0, min(1.0, max(max(e.after, e.before) for e in evaluations) + 0.15))
    axis.set(title=f"Accuracy on {evaluations[0].count} held-out problems", ylabel="accuracy (light: before)")


def _plot_ratios(axis, history, agents) -> None:
    number = 0
    for source in agents:
        for learner in agents:
            # a dict: the last entry of a round counts
            ratios = _series(history, f"pair/{source}->{learner}/ratio_mean")
            silent = _series(history, f"pair/{source}->{learner}/no_gradient")
            if not ratios or not silent:
                continue
            color = COLORS[number % len(COLORS)]
            per_round = max(1, round(len(ratios) / max(1, len(_series(history, f"{agents[0]}/reward")))))
            means = [sum(ratios[i : i + per_round]) / per_round for i in range(0, len(ratios), per_round)]
            axis.plot(range(1, len(means) + 1), means, color=color, label=f"{source} → {learner}")
            number += 1
    axis.axhline(1.0, color="gray", linewidth=1, linestyle=":")
    axis.set(title="Importance ratio of peers' responses", xlabel="round", ylabel="mean raw ratio")
    if number:
        axis.legend(frameon=False, title="source → learner")
