"""One self-contained HTML page about a run: `hacpo report RUN_DIR`.

The page holds the curves of all agents, heat maps of what the agents made of each other's responses, prompts that only
one agent got right, and the settings. It needs matplotlib and pandas.
"""

import html
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from .plots import COLORS

RUN_FILE = "hacpo_run.json"
COMPLETIONS = "completions"  # the folder of the tables, see completion_tables.py

# metric -> title and unit of the curves
_CURVES = {
    "reward": "Mean reward",
    "capability": "Capability P",
    "completions/mean_length": "Length of responses (tokens)",
    "completions/clipped_ratio": "Share of responses cut at the limit",
    "entropy": "Entropy of a token",
    "kl": "KL divergence from the start",
    "grad_norm": "Gradient norm",
    "clip_ratio/region_mean": "Own responses held by the clip",
    "loss": "Loss",
}

# metric of a pair -> title, lowest and highest colour (None: of the data)
_MAPS = {
    "ratio_mean": ("Mean raw importance ratio", 0.0, 1.5),
    "no_gradient": ("Share without gradient", 0.0, 1.0),
    "coefficient": ("Capability coefficient", 0.0, None),
    "unreadable": ("Share that the learner cannot read", 0.0, 1.0),
}

_SHOWN_PROMPTS = 3  # of the last round
_FEW = 10  # curves of so many values have markers
_TICKS = 16  # at most so many updates are named below a heat map

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { margin-bottom: 0; } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; }
svg { max-width: 100%; height: auto; } .quiet { color: #777; }
table { border-collapse: collapse; margin: 1em 0; } td, th { padding: .25em .8em; border-bottom: 1px solid #eee;
text-align: left; vertical-align: top; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; background: #f6f6f4; padding: .6em; margin: .3em 0; max-height: 16em; overflow: auto; }
.verdict { margin: 0 0 .6em .6em; }
.right { border-left: 4px solid #2c8a4b; } .wrong { border-left: 4px solid #a4343a; }
"""


def write_page(run_dir: str, output: str | None = None) -> str:
    """Writes the page of a run.

    Args:
        run_dir: the run's output folder.
        output: where the page goes, by default `run_dir/report.html`.

    Returns:
        Where the page is.

    Raises:
        ValueError: when the folder holds no run.
    """
    history, run = _load(run_dir)
    agents = run["agents"]
    pairs = [(s, k) for k in agents for s in agents if s != k and run["shares_rollouts"]]
    sections = [
        ("Last figures", _summary(history, agents)),
        ("Curves", _curves(history, agents)),
        ("Who learned from whom", _heat_maps(history, pairs) if pairs else _quiet("The agents shared nothing.")),
        ("Where the time went", _times(history)),
        ("Responses of the last round", _responses(run_dir, agents)),
        ("Right by one agent only", _lonely_successes(run_dir, agents)),
        ("Settings", _settings(run)),
    ]
    body = "".join(f"<h2>{title}</h2>\n{content}\n" for title, content in sections)
    title = f"{run['method']}: {', '.join(agents)}"
    rounds = len(_rounds(history, agents))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f'<p class="quiet">{rounds} rounds logged, {history[-1]["step"]} updates of an agent</p>{body}</body></html>'
    )
    output = output or os.path.join(run_dir, "report.html")
    with open(output, "w", encoding="utf-8") as file:
        file.write(page)
    return output


def _load(run_dir: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if not os.path.isdir(run_dir):
        raise ValueError(f"{run_dir!r} is no folder; name the output_dir of a run.")
    run_file = os.path.join(run_dir, RUN_FILE)
    if not os.path.isfile(run_file):
        raise ValueError(f"{run_dir!r} holds no run of HACPOTrainer: {RUN_FILE} is missing.")
    with open(run_file, encoding="utf-8") as file:
        run = json.load(file)
    checkpoints = sorted(
        (name for name in os.listdir(run_dir) if re.fullmatch(r"checkpoint-\d+", name)),
        key=lambda name: int(name.split("-")[1]),
        reverse=True,
    )
    for place in [
        run_dir,
        *(os.path.join(run_dir, name) for name in checkpoints),
    ]:  # a running one has checkpoints only
        path = os.path.join(place, "trainer_state.json")
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                history = json.load(file)["log_history"]
            if history:
                return history, run
    raise ValueError(f"{run_dir!r} has logged nothing yet: there is no trainer_state.json with a history.")


def completion_tables(run_dir: str) -> dict[int, str]:
    """The tables of what the agents wrote, see `hacpo_trl.reporting.completion_tables`.

    Args:
        run_dir: the run's output folder.

    Returns:
        Round -> path, the first round first; nothing when no completions were kept.
    """
    folder = os.path.join(run_dir, COMPLETIONS)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [match for match in map(re.compile(r"round_(\d+)\.parquet").fullmatch, names) if match]
    return dict(sorted((int(match[1]), os.path.join(folder, match[0])) for match in matches))


def _rounds(history: Sequence[dict[str, Any]], agents: Sequence[str]) -> list[dict[str, Any]]:
    return [entry for entry in history if f"{agents[0]}/reward" in entry]


def _series(history: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    entries = [entry for entry in history if entry.get(key) is not None]
    return [entry["step"] for entry in entries], [entry[key] for entry in entries]


def _svg(figure: Any) -> str:
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue().split("?>", 1)[1].split('dtd">', 1)[-1]  # an HTML page wants the element alone


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ImportError("The page of a run needs matplotlib: pip install matplotlib pandas") from error

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _quiet(text: str) -> str:
    return f'<p class="quiet">{html.escape(text)}</p>'


def _evaluations(history: Sequence[dict[str, Any]], agents: Sequence[str]) -> list[str]:
    """What "eval_" and "<agent>/reward" have between them in the log: "" or the name of a data set with "_"."""
    keys = dict.fromkeys(key for entry in history for key in entry if re.fullmatch(r"eval_[^/]*/reward", key))
    prefixes = []
    for name in (key.removeprefix("eval_").removesuffix("/reward") for key in keys):
        owner = max((agent for agent in agents if name == agent or name.endswith(f"_{agent}")), key=len, default=None)
        if owner is not None:
            prefixes.append(name.removesuffix(owner))
    return sorted(set(prefixes))


def _evaluation_title(prefix: str) -> str:
    return f"reward in evaluation{f' on {prefix[:-1]}' if prefix else ''}"


def _summary(history: Sequence[dict[str, Any]], agents: Sequence[str]) -> str:
    metrics = {"reward": "reward", "capability": "capability", "completions/mean_length": "length", "kl": "KL"}
    columns = {title: [f"{agent}/{metric}" for agent in agents] for metric, title in metrics.items()}
    for prefix in _evaluations(history, agents):
        columns[_evaluation_title(prefix)] = [f"eval_{prefix}{agent}/reward" for agent in agents]
    cells = {title: [_change(_series(history, key)[1]) for key in keys] for title, keys in columns.items()}
    cells = {title: texts for title, texts in cells.items() if any(texts)}  # with beta 0 there is no KL
    head = "".join(f"<th>{html.escape(title)}</th>" for title in ("agent", *cells))
    rows = []
    for i, agent in enumerate(agents):
        numbers = "".join(f'<td class="number">{texts[i]}</td>' for texts in cells.values())
        rows.append(f"<tr><td>{html.escape(agent)}</td>{numbers}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{_quiet('First and last logged value.')}"


def _change(values: Sequence[float]) -> str:
    """First and last value, if there are two; the smallest P, 1e-8, is not shown as 0."""
    texts = []
    for value in (*values[:1], *values[1:][-1:]):
        text = f"{value:.3f}"
        texts.append(f"{value:.0e}".replace("e-0", "e-") if value and not float(text) else text)
    return " → ".join(texts)


def _curves(history: Sequence[dict[str, Any]], agents: Sequence[str]) -> str:
    plt = _pyplot()
    shown = {m: t for m, t in _CURVES.items() if any(_series(history, f"{a}/{m}")[0] for a in agents)}
    panels = [(title, [f"{agent}/{metric}" for agent in agents]) for metric, title in shown.items()]
    for prefix in _evaluations(history, agents):
        panels.append((f"Mean {_evaluation_title(prefix)}", [f"eval_{prefix}{agent}/reward" for agent in agents]))
    rows = -(-len(panels) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(12, 3 * rows), layout="constrained", squeeze=False)
    for axis, (title, keys) in zip(axes.flat, panels, strict=False):
        for color, agent, key in zip(itertools.cycle(COLORS), agents, keys, strict=False):
            steps, values = _series(history, key)
            marker = "o" if len(steps) <= _FEW else None  # a single value draws no line
            axis.plot(steps, values, color=color, label=agent, linewidth=1.5, marker=marker, markersize=4)
        axis.set_title(title, fontsize=10)
        axis.xaxis.set_major_locator(plt.MaxNLocator("auto", integer=True, min_n_ticks=1))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.supxlabel("update", fontsize=9)
    return _svg(figure)


def _heat_maps(history: Sequence[dict[str, Any]], pairs: Sequence[tuple[str, str]]) -> str:
    plt = _pyplot()
    names = [f"{source} → {learner}" for source, learner in pairs]
    figure, axes = plt.subplots(
        len(_MAPS), 1, figsize=(12, len(_MAPS) * (1.1 + 0.32 * len(pairs))), layout="constrained", squeeze=False
    )
    for axis, (metric, (title, low, high)) in zip(axes.flat, _MAPS.items(), strict=True):
        keys = [f"pair/{source}->{learner}/{metric}" for source, learner in pairs]
        series = [dict(zip(*_series(history, key), strict=True)) for key in keys]
        steps = sorted(set().union(*series))
        if not steps:
            axis.set_visible(False)
            continue
        grid = [[values.get(step, float("nan")) for step in steps] for values in series]
        image = axis.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high)
        axis.set_yticks(range(len(names)), names, fontsize=9)
        shown = range(0, len(steps), -(-len(steps) // _TICKS))
        axis.set_xticks(shown, [str(steps[i]) for i in shown], fontsize=9)
        axis.set_xlabel("update", fontsize=9)
        axis.set_title(title, fontsize=10)
        figure.colorbar(image, ax=axis, pad=0.01)
    note = "source → learner. A ratio far from 1 and a high share without gradient: the learner cannot use the source."
    return _svg(figure) + _quiet(note)


def _times(history: Sequence[dict[str, Any]]) -> str:
    totals = {
        phase: sum(entry.get(f"time/{phase}", 0.0) for entry in history)
        for phase in ("sampling", "grading", "reencoding", "updating")
    }
    whole = sum(totals.values()) or 1.0
    numbers = '<td class="number">{:.1f} s</td><td class="number">{:.1f} %</td>'
    rows = "".join(f"<tr><td>{p}</td>{numbers.format(s, 100 * s / whole)}</tr>" for p, s in totals.items())
    return f"<table>{rows}</table>"


def _responses(run_dir: str, agents: Sequence[str]) -> str:
    """The first prompts of the last round, and the best response of every agent."""
    tables = completion_tables(run_dir)
    if not tables:
        return _quiet("No completions were kept. Run with log_completions=True.")
    number = max(tables)
    groups = _by_prompt(tables[number])
    shown = [_answers(f"round {number}", group, agents) for group in groups[:_SHOWN_PROMPTS]]
    return _quiet("Some prompts, and each agent's best response.") + "".join(shown)


def _lonely_successes(run_dir: str, agents: Sequence[str], limit: int = 12) -> str:
    parts: list[str] = []
    tables = completion_tables(run_dir)
    if not tables:
        return _quiet("No completions were kept. Run with log_completions=True.")
    for number in reversed(tables):  # what the agents can do now, not at the start
        for group in _by_prompt(tables[number]):
            winners = group.loc[group["right"], "agent"].unique()
            if len(winners) == 1 and group["agent"].nunique() > 1:
                parts.append(_answers(f"<b>only {html.escape(winners[0])}</b>, round {number}", group, agents))
            if len(parts) == limit:
                return "".join(parts)
    return "".join(parts) or _quiet("In the kept completions there is no prompt that only one agent got right.")


def _by_prompt(path: str) -> list[Any]:
    """A table of completions, cut into one for each prompt."""
    import pandas

    table = pandas.read_parquet(path)
    table["prompt"] = table["prompt"].map(readable)
    table["right"] = table["reward"] > 0
    return [group for _, group in table.groupby("prompt", sort=False)]


def _answers(heading: str, group: Any, agents: Sequence[str]) -> str:
    """A prompt, its gold, and each agent's best response with what the reward function read in it."""
    first = group.iloc[0]
    gold = f"; gold: <code>{html.escape(readable(first['gold']))}</code>" if "gold" in group else ""
    parts = [f"<p>{heading}{gold}</p><pre>{html.escape(first['prompt'])}</pre>"]
    for agent in agents:
        answers = group[group["agent"] == agent]
        if answers.empty:
            continue
        best = answers.sort_values("right", ascending=False, kind="stable").iloc[0]
        verdict = [f"reward {readable(best['reward'])}" if best["reward"] == best["reward"] else "not scored"]
        if best.get("parsed_answer") is not None:
            verdict.append(f"read as {best['parsed_answer']!r}" if best["parsed_answer"] else "no answer found")
        parts.append(
            f'<pre class="{"right" if best["right"] else "wrong"}">{html.escape(agent)}: '
            f'{html.escape(best["completion"])}</pre><p class="quiet verdict">{html.escape(", ".join(verdict))}</p>'
        )
    return "".join(parts)


def readable(value: Any) -> str:
    """A value of a table as a person reads it: chats by message, numbers in few digits, nothing for null."""
    if isinstance(value, str):
        return value
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return f"[{value['role']}] {value['content']}" if "role" in value and "content" in value else str(value)
    if isinstance(value, Iterable):
        parts = list(value)
        return ("\n" if any(isinstance(part, dict) for part in parts) else ", ").join(map(readable, parts))
    return str(value)


def _settings(run: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(json.dumps(value))}</td></tr>"
        for name, value in sorted(run["settings"].items())
    )
    models = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(model))}</td></tr>"
        for name, model in zip(run["agents"], run["models"], strict=True)
    )
    return f"<table>{models}</table><details><summary>All settings</summary><table>{rows}</table></details>"
