"""Evaluation of standalone models on maths benchmarks: answers, accuracies with standard errors, tables.

`evaluate_model` lets one model answer the problems and judges its answers; `results_table` puts several results side
by side. The command line is `hacpo_trl.evaluate`.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from ._grader import find_answer
from .data import INSTRUCTION, load_problems, to_prompts
from .rewards import MathVerifier, math_reward

FORMAT = 1
"""Version of the results files."""

PLAIN_STOP = ("\nProblem:",)
"""Where answers to plain prompts end by default: base models go on with a problem of their own, whose answer would be
judged in place of the first one's."""

PROMPT_FORMATS = ("auto", "chat", "plain")

# What must agree for two results to be comparable; differences are named below the table.
_COMPARED = (
    "samples",
    "temperature",
    "top_p",
    "max_new_tokens",
    "prompt_format",
    "chat_template_kwargs",
    "system_prompt",
    "instruction",
    "stop",
)


# Benchmarks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark's problems come from and how many answers each of them gets.

    Attributes:
        name: key in `BENCHMARKS`.
        title: heading in tables.
        source: id of the data set on the Hub.
        config: its configuration, None for the only one.
        split: its split.
        problem_column: where the problem stands.
        answer_column: where the answer or the solution stands.
        samples: answers to each problem by default; with one it is decoded greedily.
        files: names that a local file of it may have, without ".jsonl".
    """

    name: str
    title: str
    source: str
    config: str | None = None
    split: str = "test"
    problem_column: str = "problem"
    answer_column: str = "answer"
    samples: int = 1
    files: tuple[str, ...] = ()

    def load(self, path: str | None = None, limit: int | None = None) -> list[dict[str, str]]:
        """Loads the problems.

        Args:
            path: a local file with problems and answers, or a folder that holds one under a name of this benchmark;
                by default they come from the Hub.
            limit: take the first problems only.

        Returns:
            Rows with "problem" and "answer".

        Raises:
            ValueError: if the folder has no file of this benchmark, or naming what cannot be read.
        """
        if path is None:
            columns = {"problem_column": self.problem_column, "answer_column": self.answer_column}
            return load_problems(self.source, split=self.split, name=self.config, limit=limit, **columns)
        return load_problems(self.find_file(path), limit=limit)

    def find_file(self, path: str) -> str:
        """The file of this benchmark in a folder; the path itself when it is no folder.

        Raises:
            ValueError: if the folder has none.
        """
        if not os.path.isdir(path):
            return path
        names = [f"{stem}.jsonl" for stem in (self.name, *self.files)]
        for name in names:
            if os.path.isfile(os.path.join(path, name)):
                return os.path.join(path, name)
        raise ValueError(f"{path} has no file for {self.title}: expected {' or '.join(names)}.")


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("math_500", "MATH-500", "HuggingFaceH4/MATH-500", files=("math500",)),
        Benchmark(
            "math",
            "MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "default",
            answer_column="solution",
            files=("math_test",),
        ),
        Benchmark("gsm8k", "GSM8K", "openai/gsm8k", "main", problem_column="question", files=("gsm8k_test",)),
        Benchmark("aime_2025", "AIME 2025", "math-ai/aime25", samples=16, files=("aime25", "aime2025")),
        Benchmark("amc_2023", "AMC 2023", "math-ai/amc23", problem_column="question", files=("amc23", "amc2023")),
        Benchmark("minerva", "Minerva", "math-ai/minervamath", problem_column="question", files=("minerva_math",)),
        Benchmark(
            "olympiad_bench",
            "OlympiadBench",
            "Hothan/OlympiadBench",
            "OE_TO_maths_en_COMP",  # open-ended, text only, mathematics, English, competition
            split="train",  # the only one there is
            problem_column="question",
            answer_column="final_answer",
            files=("olympiadbench",),
        ),
    )
}
"""The seven benchmarks of the paper by name."""


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


def _group_answers(
    texts: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], correct: Sequence[Sequence[bool]], verifier
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
            scores = verifier.score([gold for _, gold, _ in asked], [rf"\boxed{{{other}}}" for *_, other in asked])
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
            gold cannot be parsed), `votes` (see `majority_at_k`), `tokens` and `finished` (False: cut at the limit).
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
            `tokens` (mean of a response) and `truncated` (share of responses cut at the limit).
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
        key = row["problem"], row["answer"]
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


def _setting_notes(title: str, results: Sequence[EvaluationResult]) -> list[str]:
    notes = []
    for name in _COMPARED:
        values = {json.dumps(result.settings.get(name), sort_keys=True, ensure_ascii=False) for result in results}
        if len(values) > 1:
            notes.append(f"{title}: the results differ in {name} ({', '.join(sorted(values))}).")
    return notes


# Answers -------------------------------------------------------------------------------------------------------------


@dataclass
class _Response:
    text: str
    tokens: int
    finished: bool


class _StopAtText(StoppingCriteria):
    """Ends a row once one of some texts appears in its response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int) -> None:
        self.tokenizer, self.stop, self.start = tokenizer, stop, start
        self.window = max(len(text.encode()) for text in stop) + 4  # a token has at least one byte

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        tails = input_ids[:, max(self.start, input_ids.shape[1] - self.window) :]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
        return torch.tensor([any(s in text for s in self.stop) for text in texts], device=input_ids.device)


def resolve_prompt_format(tokenizer: PreTrainedTokenizerBase, prompt_format: str = "auto") -> str:
    """Whether prompts become chats or plain text.

    Args:
        tokenizer: the model's.
        prompt_format: "chat", "plain", or "auto": chat if the tokenizer has a template.

    Returns:
        "chat" or "plain".

    Raises:
        ValueError: if the format is unknown, or a chat is wanted without a template.
    """
    if prompt_format not in PROMPT_FORMATS:
        raise ValueError(f"prompt_format={prompt_format!r} is unknown; use 'auto', 'chat' or 'plain'.")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prompt_format == "auto":
        return "chat" if has_template else "plain"
    if prompt_format == "chat" and not has_template:
        raise ValueError("prompt_format='chat' needs a tokenizer with a chat template; use 'plain' or 'auto'.")
    return prompt_format


def resolve_settings(
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_new_tokens: int = 2048,
    prompt_format: str = "auto",
    chat_template_kwargs: dict[str, Any] | None = None,
    system_prompt: str | None = None,
    instruction: str = INSTRUCTION,
    stop: Sequence[str] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Checks the settings of an evaluation and fills in the defaults; for the arguments see `evaluate_model`.

    Returns:
        All of them by name: what determines the answers, apart from the model and the problems.

    Raises:
        ValueError: naming a setting that makes no sense.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r} must be a whole number of at least 1.")
    temperature = float(samples > 1) if temperature is None else float(temperature)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} must be 0 (greedy) or a positive number.")
    if temperature == 0 and samples > 1:
        raise ValueError(f"Greedy decoding gives {samples} equal answers; use temperature > 0 or samples=1.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r} must be above 0 and at most 1.")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1.")
    resolved = resolve_prompt_format(tokenizer, prompt_format)
    if stop is None:
        stop = PLAIN_STOP if resolved == "plain" else ()
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop={stop!r} must be a list of texts that are not empty.")
    return {
        "samples": samples,
        "temperature": temperature,
        "top_p": float(top_p) if temperature else 1.0,  # greedy decoding has no use for it
        "max_new_tokens": max_new_tokens,
        "prompt_format": resolved,
        "chat_template_kwargs": dict(chat_template_kwargs or {}) if resolved == "chat" else {},
        "system_prompt": system_prompt or None,
        "instruction": instruction,
        "stop": list(stop),
        "seed": seed,
    }


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[dict[str, str]], settings: dict[str, Any]
) -> list[list[int]]:
    chat = settings["prompt_format"] == "chat"
    prompts = to_prompts(
        problems, chat=chat, system_prompt=settings["system_prompt"], instruction=settings["instruction"]
    )["prompt"]
    if not chat:
        return tokenizer(list(prompts))["input_ids"]
    texts = [
        tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, **settings["chat_template_kwargs"]
        )
        for prompt in prompts
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has written them


def _end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a response: a chat model has an end of turn besides the end of text."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [] if known is None else [known] if isinstance(known, int) else list(known)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(ids))


@contextmanager
def _plain_generation_config(model: Any):
    """Hides the model's sampling defaults: generate() fills in whatever the settings leave open (repetition penalties,
    top_k, ...), and models that were trained together must not be decoded differently."""
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


@torch.no_grad()
def _generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    settings: dict[str, Any],
    batch_size: int,
    progress: bool,
    label: str,
) -> list[list[_Response]]:
    """Answers with transformers. Prompts of similar length share a batch, so that little is spent on padding."""
    ends, samples, stop = _end_ids(model, tokenizer), settings["samples"], settings["stop"]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    greedy = settings["temperature"] == 0
    chosen = {} if greedy else {"temperature": settings["temperature"], "top_p": settings["top_p"], "top_k": 0}
    # The longest first: what does not fit into memory fails at once. Samples of one prompt stay neighbours.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    requests = [i for i in order for _ in range(samples)]
    responses: list[list[_Response]] = [[] for _ in prompts]
    on_cuda = model.device.type == "cuda"
    was_training = model.training
    model.eval()
    bar = tqdm(total=len(requests), desc=label, unit="answer", disable=not progress, dynamic_ncols=True)
    try:
        with torch.random.fork_rng(devices=[model.device] if on_cuda else []), _plain_generation_config(model), bar:
            for start in range(0, len(requests), batch_size):
                # By batch, so that it does not matter which batches ran before
                torch.manual_seed(settings["seed"] * 1_000_003 + start)
                chunk = requests[start : start + batch_size]
                width = max(len(prompts[i]) for i in chunk)
                ids = [[pad] * (width - len(prompts[i])) + prompts[i] for i in chunk]
                mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chunk]
                output = model.generate(
                    input_ids=torch.tensor(ids, device=model.device),
                    attention_mask=torch.tensor(mask, device=model.device),
                    generation_config=GenerationConfig(
                        max_new_tokens=int(min(settings["max_new_tokens"], room - width)),
                        do_sample=not greedy,
                        eos_token_id=ends or None,
                        pad_token_id=pad,
                        **chosen,
                    ),
                    stopping_criteria=StoppingCriteriaList([_StopAtText(tokenizer, stop, width)] if stop else []),
                )
                for i, row in zip(chunk, output[:, width:].tolist(), strict=True):
                    responses[i].append(_read_response(tokenizer, row, ends, pad, stop))
                bar.update(len(chunk))
    finally:
        model.train(was_training)
    return responses


def _read_response(
    tokenizer: PreTrainedTokenizerBase, row: list[int], ends: Sequence[int], pad: int, stop: Sequence[str]
) -> _Response:
    end = next((i for i, token in enumerate(row) if token in ends), None)
    tokens = len(row) if end is None else end + 1
    text = tokenizer.decode(row if end is None else row[:end], skip_special_tokens=True)
    found = [position for position in (text.find(s) for s in stop) if position >= 0]
    if found and end is None:  # ended by the text, then filled up
        while tokens and row[tokens - 1] == pad:
            tokens -= 1
    return _Response(text[: min(found)] if found else text, tokens, end is not None or bool(found))


def _generate_vllm(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], settings: dict[str, Any], progress: bool
) -> list[list[_Response]]:
    from vllm import SamplingParams

    params = SamplingParams(
        n=settings["samples"],
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        top_k=0,
        max_tokens=settings["max_new_tokens"],
        stop=settings["stop"] or None,
        seed=settings["seed"],
    )
    outputs = model.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=progress)
    return [
        [_Response(one.text, len(one.token_ids), one.finish_reason != "length") for one in output.outputs]
        for output in outputs
    ]


def load_vllm(model: str, **kwargs: Any) -> Any:
    """Loads a model into a vLLM engine.

    Args:
        model: Hub id or folder of a whole model (`merge_adapter` merges an adapter).
        **kwargs: arguments of `vllm.LLM`.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: if the folder holds an adapter alone.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise ImportError(
            f"The engine 'vllm' needs the package vllm, which cannot be imported ({error}). Install it with pip "
            "install 'hacpo_trl[vllm]' or use the engine 'transformers'."
        ) from error
    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        raise ValueError(
            f"{model} holds an adapter alone. Merge it first (hacpo_trl.merge_adapter) or use the engine "
            "'transformers'."
        )
    return LLM(model=model, **kwargs)


def evaluate_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[dict[str, str]],
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_new_tokens: int = 2048,
    prompt_format: str = "auto",
    chat_template_kwargs: dict[str, Any] | None = None,
    system_prompt: str | None = None,
    instruction: str = INSTRUCTION,
    stop: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    verifier: MathVerifier | Callable | None = None,
    model_name: str = "model",
    benchmark: str = "problems",
    progress: bool = True,
) -> EvaluationResult:
    """Lets a model answer problems and judges its answers.

    Args:
        model: a causal language model of transformers on any device, or a `vllm.LLM` (see `load_vllm`). Sampling
            defaults of its generation configuration are not used; its end tokens are.
        tokenizer: its tokenizer.
        problems: rows with "problem" and "answer", as `Benchmark.load` and `load_problems` return them.
        samples: answers to each problem.
        temperature: 0 decodes greedily. By default 0 for one answer and 1, as in training, for several.
        top_p: sample from the most likely tokens that have this probability together.
        max_new_tokens: longest response. With transformers it also ends where the model's positions do.
        prompt_format: "chat", "plain", or "auto": chat if the tokenizer has a template.
        chat_template_kwargs: arguments of the template, such as {"enable_thinking": False}.
        system_prompt: first message of the chat, or first line of the text.
        instruction: stands behind every problem.
        stop: texts that end a response and do not belong to it; by default `PLAIN_STOP` for plain prompts.
        seed: of the sampling. With transformers, samples also depend on batch_size.
        batch_size: responses that transformers generate together.
        verifier: judges the answers, by default `math_reward`: the gold is parsed first and the answer is compared
            with it, so that several parts, intervals, matrices, units and texts are read as the gold reads.
        model_name: name in tables.
        benchmark: key in `BENCHMARKS`, or another name.
        progress: whether to show a bar.

    Returns:
        The answers and numbers. Problems whose gold cannot be parsed are in it, but leave all numbers.

    Raises:
        ValueError: naming a setting that makes no sense, a problem that is none, or a prompt too long for the model.
    """
    settings = resolve_settings(
        tokenizer,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        prompt_format=prompt_format,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        instruction=instruction,
        stop=stop,
        seed=seed,
    )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be a whole number of at least 1.")
    if not problems:
        raise ValueError("There are no problems to evaluate on.")
    for i, row in enumerate(problems):
        if not isinstance(row.get("problem"), str) or not isinstance(row.get("answer"), str):
            raise ValueError(f"Problem {i} needs the texts 'problem' and 'answer', it has {sorted(row)}.")
    started = time.perf_counter()
    prompts = _prompt_ids(tokenizer, problems, settings)
    if isinstance(model, torch.nn.Module):
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        if len(prompts[longest]) >= room:
            raise ValueError(
                f"Problem {longest} has a prompt of {len(prompts[longest])} tokens, but {model_name} reads {room} in "
                "all."
            )
        label = f"{model_name}: {benchmark}"
        responses = _generate(model, tokenizer, prompts, settings, batch_size, progress, label)
    else:
        responses = _generate_vllm(model, tokenizer, prompts, settings, progress)

    verifier = math_reward if verifier is None else verifier
    parsed: dict[str, list[str]] = {}
    flat = [response.text for row in responses for response in row]
    scores = verifier(
        flat, answer=[row["answer"] for row in problems for _ in range(samples)], log_extra=parsed.__setitem__
    )
    found = parsed.get("parsed_answer", [""] * len(flat))

    def by_problem(values: Sequence[Any]) -> list[list[Any]]:
        return [list(values[i : i + samples]) for i in range(0, len(values), samples)]

    texts, answers = by_problem(flat), by_problem(found)
    correct = by_problem([None if score is None else bool(score) for score in scores])
    if samples > 1:
        votes = _group_answers(texts, answers, correct, verifier)
    else:
        votes = [[0 if row[0] else 1] for row in correct]
    rows = []
    for i, problem in enumerate(problems):
        rows.append(
            {
                "problem": problem["problem"],
                "answer": problem["answer"],
                "samples": texts[i],
                "parsed": answers[i],
                "correct": correct[i],
                "votes": votes[i],
                "tokens": [response.tokens for response in responses[i]],
                "finished": [response.finished for response in responses[i]],
            }
        )
    return EvaluationResult(model_name, benchmark, settings, rows, time.perf_counter() - started)
