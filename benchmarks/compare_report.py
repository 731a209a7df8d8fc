"""Tables and plots of the runs of `compare_methods.py`."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from compare_settings import ARMS, SETTINGS, arms_of, rounds_of, run_file, run_fingerprint
from plots import pyplot, save

COLORS = {
    "gspo": "#5d6d7e",
    "gspo-x2": "#1a1a1a",
    "grpo": "#b0b8c0",
    "naive": "#d1622b",
    "hacpo": "#1f5fa8",
    "positive-wide": "#8e44ad",
    "own-positive-wide": "#2c8a4b",
    "hacpo-half-rate": "#6fb1e8",
}
"""Methods of the curves; the others stand in the bar plot only."""

PAIR_COLORS = {
    "naive": "#d1622b",
    "hacpo": "#1f5fa8",
    "own": "#a4343a",
    "positive": "#b8860b",
    "positive-wide": "#8e44ad",
    "own-positive-wide": "#2c8a4b",
}
"""Methods whose pairs are drawn."""


class Results:
    """The results of one setting: `(arm, seed) -> agent -> points`."""

    def __init__(self, folder: Path, setting: str):
        self.setting = setting
        self.agents = SETTINGS[setting].agents
        self.rounds = SETTINGS[setting].rounds
        self.runs: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
        self.pairs: dict[tuple[str, int], dict[str, dict[str, list[float]]]] = {}
        self.seconds: dict[Path, float] = {}
        for arm in arms_of(setting):
            seed = 0
            while (found := self._read(folder, arm, seed, ARMS[arm].alone)) is not None:
                self.runs[arm, seed] = found
                seed += 1
        self.arms = [arm for arm in ARMS if (arm, 0) in self.runs]

    def _read(self, folder: Path, arm: str, seed: int, alone: bool) -> dict[str, list[dict[str, Any]]] | None:
        points: dict[str, list[dict[str, Any]]] = {}
        for team in [(name,) for name in self.agents] if alone else [self.agents]:
            path = run_file(folder, self.setting, team, arm, seed)
            if not path.is_file():
                return None
            run = json.loads(path.read_text())
            if run["fingerprint"] != run_fingerprint(team, arm, rounds_of(self.setting, team)):
                return None
            self.seconds[path] = run["seconds"]
            for name in team:
                points[name] = [p for p in run["agents"][name]["points"] if p["round"] <= self.rounds]
            if not alone:
                self.pairs[arm, seed] = run["pairs"]
        return points

    def seeds(self, arm: str) -> list[int]:
        """The seeds that an arm was run with."""
        return [seed for name, seed in self.runs if name == arm]

    def last(self, arm: str, seed: int, agent: str | None, kind: str, task: str = "all") -> float:
        """Accuracy at the end, of one agent or (None) the mean of the team."""
        names = self.agents if agent is None else (agent,)
        return mean(self.runs[arm, seed][name][-1][kind][task] for name in names)

    def start(self, agent: str | None, kind: str, task: str = "all") -> float:
        """Accuracy before training; it is that of every run."""
        names = self.agents if agent is None else (agent,)
        run = next(iter(self.runs.values()))
        return mean(run[name][0][kind][task] for name in names)

    def values(self, arm: str, agent: str | None, kind: str, task: str = "all") -> list[float]:
        """Accuracies at the end, of every seed."""
        return [self.last(arm, seed, agent, kind, task) for seed in self.seeds(arm)]

    def differences(self, arm: str, other: str, agent: str | None, kind: str) -> list[float]:
        """Accuracy minus that of another arm with the same seed, for the seeds that both have."""
        common = [seed for seed in self.seeds(arm) if (other, seed) in self.runs]
        return [self.last(arm, seed, agent, kind) - self.last(other, seed, agent, kind) for seed in common]

    def mean_differences(self, arm: str, other: str, agent: str | None = None) -> list[float]:
        """The mean of the greedy and the sampled difference to another arm, for the seeds that both have."""
        both = [self.differences(arm, other, agent, kind) for kind in ("greedy", "sampled")]
        return [mean(pair) for pair in zip(*both, strict=True)]


def estimate(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error over seeds; NaN where there are too few."""
    if not values:
        return math.nan, math.nan
    return mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _cell(values: Sequence[float], sign: bool = False) -> str:
    center, error = estimate(values)
    if math.isnan(center):
        return "–"
    spread = "" if math.isnan(error) else f" ± {100 * error:.1f}"
    return f"{100 * center:{'+' if sign else ''}.1f}{spread}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join(["---"] * len(head)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def accuracy_table(results: Results) -> str:
    """Accuracy at the end of every arm: greedy and sampled of every agent, and the team's mean."""
    head = ["method", "seeds", *(f"{name} greedy / sampled" for name in results.agents), "team greedy / sampled"]
    who = (*results.agents, None)
    rows = [["before", "", *(_pair(lambda kind, a=a: [results.start(a, kind)]) for a in who)]]
    for arm in results.arms:
        cells = [_pair(lambda kind, a=a, arm=arm: results.values(arm, a, kind)) for a in who]
        rows.append([arm, str(len(results.seeds(arm))), *cells])
    return _table(head, rows)


def _pair(values: Callable[[str], list[float]], sign: bool = False) -> str:
    return f"{_cell(values('greedy'), sign)} / {_cell(values('sampled'), sign)}"


def difference_table(results: Results, other: str, *, combined: bool = False) -> str:
    """Paired differences to another arm, in points, of every agent and of the team.

    Args:
        results: of one setting.
        other: the arm that is subtracted.
        combined: the mean of greedy and sampled instead of both.
    """

    def cell(arm: str, agent: str | None) -> str:
        if combined:
            return _cell(results.mean_differences(arm, other, agent), sign=True)
        return _pair(lambda kind: results.differences(arm, other, agent, kind), sign=True)

    what = "" if combined else " greedy / sampled"
    rows = []
    for arm in results.arms:
        count = len(results.differences(arm, other, None, "greedy"))
        if arm != other and count:
            rows.append([arm, str(count), *(cell(arm, agent) for agent in (*results.agents, None))])
    return _table([f"minus {other}", "seeds", *(f"{name}{what}" for name in (*results.agents, "team"))], rows)


def task_table(results: Results) -> str:
    """Greedy accuracy of every agent by task."""
    tasks = [task for task in next(iter(results.runs.values()))[results.agents[0]][0]["greedy"] if task != "all"]
    head = ["method", *(f"{name}: {task}" for name in results.agents for task in tasks)]
    rows = [["before", *(_cell([results.start(a, "greedy", t)]) for a in results.agents for t in tasks)]]
    for arm in results.arms:
        rows.append([arm, *(_cell(results.values(arm, a, "greedy", t)) for a in results.agents for t in tasks)])
    return _table(head, rows)


def pair_table(results: Results) -> str:
    """What the pairs made of each other: the mean of every metric over the first and the last quarter of the run."""
    names = ("ratio_mean", "below_range", "above_range", "repelling", "no_gradient")
    arms = [arm for arm in results.arms if (arm, 0) in results.pairs]
    pairs = sorted({pair for key in results.pairs for pair in results.pairs[key]})
    rows = []
    quarter = max(1, results.rounds // 4)
    for arm in arms:
        for pair in pairs:
            cells = []
            for name in names:
                series = [results.pairs[arm, seed].get(pair, {}).get(name, []) for seed in results.seeds(arm)]
                series = [values for values in series if values]
                if series:
                    first = mean(mean(values[:quarter]) for values in series)
                    final = mean(mean(values[-quarter:]) for values in series)
                    cells.append(f"{first:.2f} → {final:.2f}")
                else:
                    cells.append("–")
            rows.append([arm, pair, *cells])
    return _table(["method", "source->learner", *names], rows)


def summary_table(everything: Sequence[Results], other: str) -> str:
    """The team's paired difference to another arm in every setting, mean of greedy and sampled, in points."""
    head = [f"minus {other}", "seeds", *(results.setting for results in everything)]
    rows = []
    for arm in ARMS:
        values = [results.mean_differences(arm, other) for results in everything]
        counts = sorted({len(v) for v in values if v})
        if arm != other and counts:
            seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            rows.append([arm, seeds, *(_cell(v, sign=True) for v in values)])
    return _table(head, rows)


def write_report(folder: Path, settings: Sequence[str]) -> str:
    """Writes `tables.md` and the plots of the settings that have results. Returns the tables."""
    everything = [results for name in settings if (results := Results(folder, name)).arms]
    if not everything:
        return "There are no results yet."
    seconds = {path: value for results in everything for path, value in results.seconds.items()}
    parts = ["# Comparison of methods"]
    parts.append(f"{len(seconds)} runs, {sum(seconds.values()) / 3600:.1f} core hours. Points of accuracy.")
    parts.append(
        _table(["method", "kind", "what it is"], [[name, arm.group, arm.about] for name, arm in ARMS.items()])
    )
    for other in ("gspo", "gspo-x2", "hacpo", "naive"):
        if any(other in results.arms for results in everything):
            parts += [f"## Team's mean, difference to {other}", summary_table(everything, other)]
    for results in everything:
        about = SETTINGS[results.setting].about
        parts += [f"## {results.setting}: {about} ({', '.join(results.agents)}; {results.rounds} rounds)"]
        parts.append(accuracy_table(results))
        others = [other for other in ("gspo", "gspo-x2") if other in results.arms]
        parts += [difference_table(results, other, combined=True) for other in others]
        parts += [difference_table(results, other) for other in others]
        if len(next(iter(results.runs.values()))[results.agents[0]][0]["greedy"]) > 2:
            parts.append(task_table(results))
        if results.pairs:
            parts.append(pair_table(results))
        plot_curves(results, folder / f"{results.setting}.png")
        if results.pairs:
            plot_pairs(results, folder / f"{results.setting}_pairs.png")
    plot_bars(everything, folder / "ablations.png")
    text = "\n\n".join(parts) + "\n"
    (folder / "tables.md").write_text(text)
    return text


def plot_curves(results: Results, path: Path) -> None:
    """Sampled and greedy accuracy of every agent over the responses that it sampled, with the standard error."""
    plt = pyplot()
    count = len(results.agents)
    figure, axes = plt.subplots(2, count, figsize=(3.4 * count, 5.6), squeeze=False, sharex=True)
    for column, agent in enumerate(results.agents):
        for row, kind in enumerate(("greedy", "sampled")):
            axis = axes[row][column]
            for arm in (arm for arm in results.arms if arm in COLORS):
                runs = [results.runs[arm, seed][agent] for seed in results.seeds(arm)]
                x = [point["responses"] for point in runs[0]]
                stats = [estimate([run[i][kind]["all"] for run in runs]) for i in range(len(x))]
                y = [center for center, _ in stats]
                error = [0.0 if math.isnan(e) else e for _, e in stats]
                axis.plot(x, y, color=COLORS[arm], marker="o", markersize=2.5, label=arm)
                low = [c - e for c, e in zip(y, error, strict=True)]
                high = [c + e for c, e in zip(y, error, strict=True)]
                axis.fill_between(x, low, high, color=COLORS[arm], alpha=0.13, linewidth=0)
            axis.set_title(f"{agent}, {kind}", fontsize=9)
            axis.grid(alpha=0.25)
        axes[1][column].set_xlabel("responses sampled by the agent")
    axes[0][0].set_ylabel("held-out accuracy")
    axes[1][0].set_ylabel("held-out accuracy")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"{results.setting}: {SETTINGS[results.setting].about}")
    save(figure, path, rect=(0, 0.07, 1, 1))


def plot_bars(everything: Sequence[Results], path: Path) -> None:
    """Team's difference to GSPO of all but the controls, one panel a setting: mean of greedy and sampled."""
    plt = pyplot()
    groups = {"method": "#1f5fa8", "ablation": "#d1622b", "candidate": "#2c8a4b"}
    figure, axes = plt.subplots(
        1, len(everything), figsize=(2.6 * len(everything) + 1.6, 5.6), sharex=True, sharey=True, squeeze=False
    )
    run = {arm for results in everything for arm in results.arms} - {"gspo"}
    names = [name for name, arm in ARMS.items() if name in run and arm.group in groups]
    for axis, results in zip(axes[0], everything, strict=True):
        for y, arm in enumerate(reversed(names)):
            if arm in results.arms and "gspo" in results.arms:
                center, error = estimate(results.mean_differences(arm, "gspo"))
                error = None if math.isnan(error) else 100 * error
                axis.barh(y, 100 * center, xerr=error, color=groups[ARMS[arm].group], alpha=0.85, height=0.7)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(results.setting)
        axis.set_xlabel("points over GSPO")
        axis.grid(axis="x", alpha=0.25)
    axes[0][0].set_yticks(range(len(names)), list(reversed(names)))
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, alpha=0.85) for color in groups.values()]
    figure.legend(handles, list(groups), loc="upper center", ncols=3, frameon=False)
    save(figure, path, rect=(0, 0, 1, 0.94))


def plot_pairs(results: Results, path: Path) -> None:
    """Raw ratio and share of repelling responses of every pair over the rounds, mean over seeds.

    The ratio is that of the responses that ran: with successes only, of the successes.
    """
    plt = pyplot()
    arms = [arm for arm in PAIR_COLORS if (arm, 0) in results.pairs]
    pairs = sorted({pair for key in results.pairs for pair in results.pairs[key]})[:4]
    figure, axes = plt.subplots(2, len(pairs), figsize=(3.4 * len(pairs), 5), squeeze=False, sharex=True)
    labels = {"ratio_mean": "mean raw ratio", "repelling": "share that repels"}
    for column, pair in enumerate(pairs):
        for row, (name, label) in enumerate(labels.items()):
            axis = axes[row][column]
            for arm in arms:
                runs = [results.pairs[arm, seed].get(pair, {}).get(name, []) for seed in results.seeds(arm)]
                runs = [run for run in runs if run]
                if runs:
                    length = min(map(len, runs))
                    y = [mean(run[i] for run in runs) for i in range(length)]
                    axis.plot(range(1, length + 1), y, color=PAIR_COLORS[arm], label=arm)
            axis.set_title(pair, fontsize=9)
            axis.grid(alpha=0.25)
            axes[row][0].set_ylabel(label)
        axes[1][column].set_xlabel("round")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(f"{results.setting}: what the pairs make of each other")
    save(figure, path, rect=(0, 0.05, 1, 1))
