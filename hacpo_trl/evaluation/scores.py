"""Accuracies of a model's answers, with standard errors, and tables of several results.

The estimators (avg@k, pass@k, maj@k), the results file, and the tables that put models side by side.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..maths.benchmarks import BENCHMARKS
from ..maths.grader import find_answer

FORMAT = 1
"""Version of the results files."""

# What must agree for two results to be comparable; differences are named below the table.
_COMPARED = (
    "samples",
    "temperature",
    "top_p",
    "max_new_tokens",
    "prompt_format",
    "prompt_template",
    "chat_template_kwargs",
    "system_prompt",
    "stop",
    "reward",
    "rules",
)


# Estimators ----------------------------------------------------------------------------------------------------------


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def _check_k(n: int, k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= n:
        raise ValueError(f"k={k!r} must be a whole number from 1 to the {n} samples of a problem.")


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k answers is right, estimated without bias from n answers.

    The share of all choices of k of the n answers that hold a right one, 1 - C(n-c, k) / C(n, k). Its expectation is
    1 - (1 - p)^k for a model that answers rightly with probability p, which 1 - (1 - c/n)^k would underestimate.

    Args:
        n: answers to the problem.
        c: how many of them are right.
        k: answers that a user would draw.

    Raises:
        ValueError: if c is not between 0 and n, or k not between 1 and n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} right answers of {n}: expected a number from 0 to {n}.")
    _check_k(n, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def average_at_k(correct: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Accuracy averaged over all answers, and its standard error.

    The expectation does not depend on the number of answers a problem gets (k): each of them is right with that
    problem's own probability, however many there are. More answers only shrink the noise of each problem's mean.

    The standard error is that of the mean over problems, s / sqrt(P) with s the standard deviation of the P problems'
    means. Answers to the same problem are not independent trials of the benchmark's accuracy: they share the problem's
    difficulty. The formula sqrt(a (1 - a) / (k P)) that takes them for independent shrinks towards 0 as k grows,
    though the P problems remain the same few; with answers that always agree (a model at temperature 0, say) it would
    be too small by a factor of sqrt(k). The problems' means carry both sources of noise, the choice of problems and
    the sampling of answers, in the right proportion for any k.

    Args:
        correct: for each problem, whether its answers are right; every problem weighs the same.

    Returns:
        Accuracy in [0, 1] and standard error (nan for a single problem).

    Raises:
        ValueError: if there is no problem, or one without answers.
    """
    if not correct or not all(len(row) for row in correct):
        raise ValueError("An accuracy needs at least one problem, and an answer to each.")
    return _mean_and_error([sum(map(bool, row)) / len(row) for row in correct])


def majority_at_k(votes: Sequence[int | None], k: int | None = None) -> float:
    """Chance that the most frequent of k answers to a problem is right.

    A tie is broken by lot, so a right answer that shares the first place with one other counts one half. With k = 1,
    and with k = 2, this is the average accuracy of the answers as long as each of them votes.

    Args:
        votes: for each answer the group of equal answers that it belongs to: 0 for the right answer, any other number
            for a wrong one, None for a response without an answer, which does not vote.
        k: answers in a vote, by default all. With fewer, the mean over the consecutive votes of k answers; answers
            left over do not count.

    Returns:
        A number in [0, 1]; 0 when nobody votes.

    Raises:
        ValueError: if k is not between 1 and the number of answers.
    """
    k = len(votes) if k is None else k
    _check_k(len(votes), k)
    scores = []
    for start in range(0, len(votes) - k + 1, k):
        counts = Counter(vote for vote in votes[start : start + k] if vote is not None)
        most = max(counts.values(), default=0)
        winners = [group for group, count in counts.items() if count == most]
        scores.append(float(0 in winners) / max(1, len(winners)))
    return sum(scores) / len(scores)


def group_answers(
    texts: Sequence[Sequence[str]],
    answers: Sequence[Sequence[str]],
    correct: Sequence[Sequence[bool]],
    equal: Callable[[Sequence[str], Sequence[str]], Sequence[float | None]],
) -> list[list[int | None]]:
    """Groups each problem's answers by equality: 0 right, 1, 2, ... wrong, None without an answer.

    Right answers equal the gold and so each other. Of the wrong ones, the first that is not yet in a group founds one
    and is the gold for the others that are not: equality as the verifier has it is not quite transitive, and so the
    order of the answers can matter where it is lenient.
    """
    votes: list[list[int | None]] = []
    open_answers: list[dict[str, list[int]]] = []  # of each problem: distinct wrong answers and where they stand
    for row_texts, row_answers, row_correct in zip(texts, answers, correct, strict=True):
        votes.append([0 if right else None for right in row_correct])
        waiting: dict[str, list[int]] = {}
        for i, (text, answer, right) in enumerate(zip(row_texts, row_answers, row_correct, strict=True)):
            if not right and (vote := _vote_of(text, answer)):
                waiting.setdefault(vote, []).append(i)
        open_answers.append(waiting)
    number = 0
    while any(open_answers):
        number += 1
        asked: list[tuple[int, str, str]] = []  # one question to the verifier for all problems: fewer round trips
        for problem, waiting in enumerate(open_answers):
            if not waiting:
                continue
            founder = next(iter(waiting))
            for i in waiting.pop(founder):
                votes[problem][i] = number
            asked.extend((problem, founder, other) for other in waiting)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's answer that cannot be parsed stands for itself
            scores = equal([gold for _, gold, _ in asked], [rf"\boxed{{{other}}}" for *_, other in asked])
        for (problem, _, other), score in zip(asked, scores, strict=True):
            if score:
                for i in open_answers[problem].pop(other):
                    votes[problem][i] = number
    return votes


def _vote_of(text: str, answer: str) -> str | None:
    """What a wrong response votes for: its answer, or the last number of prose, which is what math-verify looks at."""
    found, bare = find_answer(text)
    if bare:
        return answer.strip() or found.strip() or None
    number = ""
    for word in found.split():
        word = word.strip("$*.,;:()[]{}=\"'")
        if any(character.isdigit() for character in word):
            number = word
    return number or None


# Results -------------------------------------------------------------------------------------------------------------


@dataclass
class EvaluationResult:
    """A model's answers to the problems of a benchmark.

    Attributes:
        model: name of the model, the heading of its column.
        benchmark: key in `BENCHMARKS`, or another name.
        settings: how the answers were made; see `evaluate_model`.
        problems: for each problem a dictionary with `problem`, `answer` (the gold) and, a list with an entry for each
            answer, `samples` (the responses), `parsed` (the answer found in each), `correct` (None for all when the
            gold cannot be parsed), `rewards` (only of a reward function that tells more than right or wrong), `votes`
            (see `majority_at_k`), `tokens` and `finished` (False: cut at the limit).
        seconds: time it took.
        key: identifies model, problems and settings; an evaluation with the same key need not be run again.
    """

    model: str
    benchmark: str
    settings: dict[str, Any]
    problems: list[dict[str, Any]]
    seconds: float = 0.0
    key: str = ""
    _summary: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def samples(self) -> int:
        """Answers to each problem."""
        return self.settings["samples"]

    @property
    def scored(self) -> list[dict[str, Any]]:
        """Problems whose gold can be parsed: the others leave all numbers."""
        return [row for row in self.problems if row["correct"][0] is not None]

    @property
    def title(self) -> str:
        """Heading of the benchmark."""
        return BENCHMARKS[self.benchmark].title if self.benchmark in BENCHMARKS else self.benchmark

    def summary(self) -> dict[str, Any]:
        """The numbers of this result.

        Returns:
            `problems` (scored), `unscored`, `samples`, `average` and `average_error` (see `average_at_k`), `pass` and
            `majority` (by k, as text: JSON has no other keys; each a pair of mean and standard error over problems),
            `reward` (mean and standard error, None where there is only right or wrong), `tokens` (mean of a response)
            and `truncated` (share of responses cut at the limit).
        """
        if self._summary is None:
            rows, n = self.scored, self.samples
            average, error = average_at_k([row["correct"] for row in rows]) if rows else (math.nan, math.nan)
            passes, majorities = {}, {}
            for k in sorted({n} | {2**i for i in range(1, n.bit_length()) if 2**i <= n}) if n > 1 else ():
                passes[str(k)] = _mean_and_error([pass_at_k(n, sum(row["correct"]), k) for row in rows])
                majorities[str(k)] = _mean_and_error([majority_at_k(row["votes"], k) for row in rows])
            total = max(1, n * len(self.problems))
            self._summary = {
                "problems": len(rows),
                "unscored": len(self.problems) - len(rows),
                "samples": n,
                "average": average,
                "average_error": error,
                "pass": passes,
                "majority": majorities,
                "reward": _mean_reward(rows),
                "tokens": sum(sum(row["tokens"]) for row in self.problems) / total,
                "truncated": sum(row["finished"].count(False) for row in self.problems) / total,
            }
        return self._summary

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, whole or not at all."""
        content = {"format": FORMAT, **{k: v for k, v in asdict(self).items() if k != "_summary"}}
        content = {**{k: v for k, v in content.items() if k != "problems"}, "summary": _without_nan(self.summary())}
        write_whole(path, json.dumps({**content, "problems": self.problems}, ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvaluationResult:
        """Reads what `save` wrote.

        Raises:
            ValueError: if the file is none of these.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"{path}: version {content['format']} of the format, this is version {FORMAT}.")
            names = ("model", "benchmark", "settings", "problems", "seconds", "key")
            return cls(**{name: content[name] for name in names})
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}.") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: no results of an evaluation ({type(error).__name__}: {error}). Expected a file that "
                "evaluate_math.py wrote."
            ) from None


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file by renaming, so that a killed run leaves no half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Models emit lone surrogates when a character is cut at the token limit; they cannot be written as they are
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _mean_reward(rows: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Mean over problems of the mean reward, and its standard error; None where the rewards are right or wrong."""
    if not rows or "rewards" not in rows[0]:
        return None
    known = [[reward for reward in row["rewards"] if reward is not None] for row in rows]
    return _mean_and_error([sum(rewards) / len(rewards) for rewards in known])


def _without_nan(value: Any) -> Any:
    """The same with None for nan, which is no JSON."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def load_results(path: str | os.PathLike[str]) -> list[EvaluationResult]:
    """Reads results.

    Args:
        path: the file of one result, or an overview (`results.json`) that names the files of several.

    Raises:
        ValueError: if a file cannot be read or holds something else.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no JSON: {error}.") from None
    if isinstance(content, dict) and isinstance(content.get("results"), list):
        return [EvaluationResult.load(path.parent / entry["file"]) for entry in content["results"]]
    return [EvaluationResult.load(path)]


def paired_difference(before: EvaluationResult, after: EvaluationResult) -> tuple[float, float]:
    """Gain in accuracy and its standard error, problem by problem.

    Both results are of the same problems, so the error is that of the mean of the problems' differences: what makes a
    problem hard for both cancels. It is mostly smaller than the errors of the two accuracies suggest.

    Args:
        before: a result.
        after: another of the same problems; the number of answers may differ.

    Raises:
        ValueError: if the problems are not the same, or none of them is scored in both.
    """
    means = [_means_by_problem(result) for result in (before, after)]
    for a, b, unknown in ((before, after, means[0].keys() - means[1]), (after, before, means[1].keys() - means[0])):
        if unknown:
            raise ValueError(
                f"{after.title}: {before.model} answered {len(before.problems)} problems and {after.model} "
                f"{len(after.problems)}, and {len(unknown)} of {a.model}'s are not among {b.model}'s. Evaluate both "
                "on the same problems (the same file and limit)."
            )
    differences = [
        mean - means[0][key] for key, mean in means[1].items() if mean is not None and means[0][key] is not None
    ]
    if not differences:
        raise ValueError(f"{after.title}: no problem is scored for both {before.model} and {after.model}.")
    return _mean_and_error(differences)


def _means_by_problem(result: EvaluationResult) -> dict[tuple[str, str, int], float | None]:
    """Accuracy on each problem, None where it is not scored. Data sets repeat some problems: hence a count."""
    means: dict[tuple[str, str, int], float | None] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for row in result.problems:
        problem = row["problem"].strip() if isinstance(row["problem"], str) else json.dumps(row["problem"])
        key = problem, row["answer"]
        verdicts = row["correct"]
        means[*key, seen[key]] = None if verdicts[0] is None else sum(verdicts) / len(verdicts)
        seen[key] += 1
    return means


def _percent(mean: float, error: float = math.nan, sign: str = "") -> str:
    if math.isnan(mean):
        return "–"
    return f"{100 * mean:{sign}.1f}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    return ["| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:])]


def results_table(
    results: Sequence[EvaluationResult], pairs: Sequence[tuple[EvaluationResult, EvaluationResult]] = ()
) -> str:
    """A Markdown table of all models side by side, and one of before and after.

    Accuracies are percentages ± standard error (see `average_at_k`). "mean" is the mean over the benchmarks, where
    every model has all of them; its error takes the benchmarks as given and their problems as drawn independently.

    Args:
        results: of any models and benchmarks; rows and columns come in the order of first appearance.
        pairs: results before and after.

    Raises:
        ValueError: if there are no results, two for the same cell, or a pair that cannot be compared.
    """
    if not results:
        raise ValueError("There are no results to show.")
    models = list(dict.fromkeys(result.model for result in results))
    benchmarks = list(dict.fromkeys(result.benchmark for result in results))
    cells: dict[tuple[str, str], EvaluationResult] = {}
    for result in results:
        if (result.benchmark, result.model) in cells:
            raise ValueError(f"Two results of {result.model} on {result.title}: give the models different names.")
        cells[result.benchmark, result.model] = result

    rows, notes = [], []
    for benchmark in benchmarks:
        present = [cells.get((benchmark, model)) for model in models]
        known = [result for result in present if result]
        title = known[0].title
        counts = sorted({result.summary()["problems"] for result in known})
        label = f"{title} ({', '.join(map(str, counts))})"
        kinds = list(dict.fromkeys(_kind(result) for result in known))
        for kind in kinds:
            rows.append([label, kind, *(format_average(r) if r and _kind(r) == kind else "" for r in present)])
        if any(result.summary()["reward"] for result in known):
            rows.append([label, "mean reward", *(_reward(r) if r else "" for r in present)])
        sampled = sorted({result.samples for result in known if result.samples > 1})
        for measure in ("pass", "majority"):
            for k in sampled:
                values = [
                    _percent(*r.summary()[measure][str(k)]) if r and str(k) in r.summary()[measure] else ""
                    for r in present
                ]
                rows.append([label, f"{'pass' if measure == 'pass' else 'maj'}@{k}", *values])
        for result in known:
            summary = result.summary()
            if summary["truncated"] >= 0.05:
                limit = result.settings["max_new_tokens"]
                share = f"{100 * summary['truncated']:.0f} %"
                notes.append(f"{result.model}, {title}: {share} of the responses were cut at {limit} tokens.")
            if summary["unscored"]:
                notes.append(f"{title}: {summary['unscored']} problems are left out, their answers cannot be parsed.")
        notes.extend(_setting_notes(title, known))
    if len(benchmarks) > 1 and len(cells) == len(models) * len(benchmarks):
        means = []
        for model in models:
            summaries = [cells[benchmark, model].summary() for benchmark in benchmarks]
            mean = sum(s["average"] for s in summaries) / len(summaries)
            error = math.sqrt(sum(s["average_error"] ** 2 for s in summaries)) / len(summaries)
            means.append(_percent(mean, error))
        rows.append(["mean", "", *means])
    lines = _markdown(["benchmark (problems)", "measure", *models], rows, left=2)

    if pairs:
        rows = []
        for before, after in pairs:
            difference, error = paired_difference(before, after)
            label = after.model if after.model == before.model else f"{before.model} → {after.model}"
            measures = list(dict.fromkeys((_kind(before), _kind(after))))
            changed = _percent(difference, error, "+")
            rows.append(
                [after.title, " → ".join(measures), label, format_average(before), format_average(after), changed]
            )
            if before.summary()["reward"] or after.summary()["reward"]:
                rows.append([after.title, "mean reward", label, _reward(before), _reward(after), ""])
            notes.extend(_setting_notes(f"{after.title}, before and after", [before, after]))
        header = ["benchmark", "measure", "model", "before", "after", "difference ± paired s.e."]
        lines += ["", *_markdown(header, rows, left=3)]
    if notes:
        lines += ["", *(f"- {note}" for note in dict.fromkeys(notes))]
    return "\n".join(lines) + "\n"


def _kind(result: EvaluationResult) -> str:
    return "greedy" if result.settings["temperature"] == 0 else f"avg@{result.samples}"


def format_average(result: EvaluationResult) -> str:
    """Accuracy and standard error of a result, as percentages."""
    return _percent(result.summary()["average"], result.summary()["average_error"])


def _reward(result: EvaluationResult) -> str:
    """Mean reward and standard error, where a reward function tells more than right or wrong."""
    mean, error = result.summary()["reward"] or (math.nan, math.nan)
    return "–" if math.isnan(mean) else f"{mean:.3f} ± {error:.3f}"


def _setting_notes(title: str, results: Sequence[EvaluationResult]) -> list[str]:
    notes = []
    for name in _COMPARED:
        if name == "rules" and len({result.settings.get("reward") for result in results}) > 1:
            continue  # other functions have other rules
        values = {json.dumps(result.settings.get(name), sort_keys=True, ensure_ascii=False) for result in results}
        if len(values) > 1:
            notes.append(f"{title}: the results differ in {name} ({', '.join(sorted(values))}).")
    return notes
