r"""Verifiable rewards: a maths reward for TRL trainers built on math-verify.

`math_reward` is what to pass to a trainer, or `number_reward`, which takes no sum for a number; `MathVerifier` makes
one with limits of your choice. An answer is sought in this order: the last complete ``\boxed{...}`` or
``<answer>...</answer>``, the last ``#### answer`` line, what follows the last "answer is" or "answer:", the last
formula or number. Only one answer counts: a list of candidates is compared as a list. An expression of the problem
given back ("What is 23 + 45?", "23 + 45") scores 0.
"""

from __future__ import annotations

import asyncio
import atexit
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple

MAX_CHARS = 20_000
"""Only this many characters at the end of a response are searched for its answer."""

MAX_GOLD_CHARS = 5_000
"""A longer gold counts as one that cannot be parsed."""

# What TRL passes to reward functions besides the columns. It would put a column of that name aside, or fail
_GRADING_ARGUMENTS = frozenset("prompts completions completion_ids trainer_state log_extra log_metric".split())

START_SECONDS = 120.0
"""How long a worker may take to start (it imports sympy, which is slow on a busy file system)."""


class _Verdict(NamedTuple):
    score: float | None  # None: the gold cannot be scored
    answer: str  # the answer as found in the response
    timed_out: bool


# math-verify limits time with SIGALRM, which works in main threads only, so it runs without limits in processes that
# can be killed. pebble and other pools build on multiprocessing: it imports __main__ anew under "spawn", is unsafe
# under "fork" with threads or CUDA, and is forbidden in daemonic processes. Hence plain subprocesses and pipes.
class _Worker:
    """One grader process."""

    def __init__(self) -> None:
        package = Path(__file__).resolve().parent.parent
        paths = filter(None, [str(package.parent), os.environ.get("PYTHONPATH")])
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),  # finds the package wherever it lies
            "PYTHONSAFEPATH": "1",  # no module in the current directory may shadow a library
            "PYTHONHASHSEED": "0",  # sympy's order of terms, and so rare verdicts, would differ between workers
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", f"{package.name}.maths.grader"]
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env)
        replies, _ = self.exchange(None, START_SECONDS, 1)
        if not replies or "ready" not in replies[0]:
            self.kill()
            why = replies[0].get("error") if replies else "it ended or hung without a word"
            raise RuntimeError(
                f"The math grader process does not start: {why}. Check that math-verify is installed "
                f"(pip install 'math-verify[antlr4_13_2]') and that `{' '.join(command)}` runs."
            )

    def exchange(self, message: dict[str, Any] | None, seconds: float, lines: int) -> tuple[list[dict], bool]:
        """Send a message, read up to `lines` replies (fewer if the process dies) and say if `seconds` ran out."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self.process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        replies: list[dict] = []
        with suppress(OSError, ValueError):  # the process is gone: a broken pipe, an empty or half-written line
            if message is not None:
                self.process.stdin.write(json.dumps(message).encode("ascii") + b"\n")
                self.process.stdin.flush()
            while len(replies) < lines:
                replies.append(json.loads(self.process.stdout.readline()))
                if replies[-1].get("gold") is False:
                    break
        timer.cancel()
        timer.join()  # so that a limit reached just now is seen below, not by the next request
        return replies, expired.is_set()

    def kill(self) -> None:
        """End the process at once and collect it."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with suppress(OSError):  # closing flushes
            self.process.stdin.close()

    def forget(self) -> None:
        """Let go of the process in a forked child: it belongs to the parent."""
        null = os.open(os.devnull, os.O_RDWR)
        for pipe in (self.process.stdin, self.process.stdout):
            if not pipe.closed:
                os.dup2(null, pipe.fileno())  # no flush of half-written requests into the parent's pipe
        os.close(null)
        self.process.returncode = 0


class MathVerifier:
    """Judges answers to maths problems in killable worker processes; callable as a TRL reward function.

    Works in any thread, in event loops (it blocks), in daemonic processes and after a fork. Workers start when first
    needed, hold no GPU, are limited to 4 GiB each and end with this process.

    Args:
        timeout: Seconds one response may take; then its score is 0.0. A gold that takes longer cannot be scored.
        workers: Largest number of worker processes, i.e. of responses judged at once.
        numbers_only: Where the gold is a number, the answer has to be one, too: "40 + 28" or "2^{10}" score 0.

    Attributes:
        timeouts: How many responses ran out of time so far.

    Raises:
        ValueError: If a limit is not positive.
    """

    thread_safe = True  # it may grade several agents' responses at once, outside of the main thread

    def __init__(self, timeout: float = 5.0, workers: int = 2, *, numbers_only: bool = False) -> None:
        if not 0 < timeout <= 3600:
            raise ValueError(f"timeout={timeout!r} must be between 0 and 3600 seconds; 5.0 suits most answers.")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ValueError(f"workers={workers!r} must be a whole number of at least 1; 2 suits most machines.")
        self.timeout, self.workers, self.timeouts, self.numbers_only = float(timeout), workers, 0, numbers_only
        self.__name__ = "number_reward" if numbers_only else "math_reward"  # TRL names the reward's metrics after this
        self._bad_golds: set[str] = set()  # not tried again
        self._named_golds: set[str] = set()  # warned about
        self._reset()
        _INSTANCES.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._live: set[_Worker] = set()
        # One entry per allowed worker; None: not started. Last in first out, so that few rows start few workers.
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.workers):
            self._slots.put(None)

    def __reduce__(self) -> tuple[Any, ...]:  # pickled without its workers
        return functools.partial(type(self), numbers_only=self.numbers_only), (self.timeout, self.workers)

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, after the responses that are being judged. A later call starts new ones."""
        with self._lock:
            for worker in [self._slots.get() for _ in range(self.workers)]:
                self._end(worker)
                self._slots.put(None)

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.kill()
            self._live.discard(worker)

    def _judge(self, gold: str, text: str, prompt: str) -> _Verdict:
        if not gold.strip() or len(gold) > MAX_GOLD_CHARS or gold in self._bad_golds:
            return _Verdict(None, "", False)
        job = {
            "gold": gold,
            "text": text[-MAX_CHARS:],
            "prompt": prompt[-MAX_CHARS:],
            "numbers_only": self.numbers_only,
            "limit": self.timeout,
        }
        worker = self._slots.get()
        try:
            # Again if the worker died (perhaps of something else) or the gold, judged for good, took too long.
            for _ in range(2):
                if worker is None:
                    worker = _Worker()
                    self._live.add(worker)
                replies, expired = worker.exchange(job, self.timeout, 2)
                done = len(replies) == 2 or (replies and not replies[0]["gold"])
                if expired or not done:
                    self._end(worker)
                    worker = None
                if done or (expired and replies):
                    break
        finally:
            self._slots.put(worker)
        if not replies or not replies[0]["gold"]:
            self._bad_golds.add(gold)
            return _Verdict(None, "", expired)
        verdict = replies[1] if len(replies) == 2 else {"equal": False, "answer": ""}
        return _Verdict(float(verdict["equal"]), verdict["answer"], expired and len(replies) < 2)

    def _judge_all(
        self, golds: Sequence[Any], texts: Sequence[str], prompts: Sequence[str | Sequence[dict[str, Any]]] | None
    ) -> list[_Verdict]:
        for what, values in (("answers", golds), ("prompts", texts if prompts is None else prompts)):
            if len(values) != len(texts):
                raise ValueError(
                    f"{len(texts)} completions but {len(values)} {what}: each completion needs those of its own "
                    "problem, so repeat them once for every completion of a problem."
                )
        golds = [_gold_text(gold) for gold in golds]
        problems = [""] * len(texts) if prompts is None else [_prompt_text(prompt) for prompt in prompts]
        with ThreadPoolExecutor(min(self.workers, len(golds) or 1)) as threads:
            verdicts = list(threads.map(self._judge, golds, texts, problems))
        with self._lock:
            self.timeouts += sum(verdict.timed_out for verdict in verdicts)
        for gold, verdict in zip(golds, verdicts, strict=True):
            if verdict.score is None and gold not in self._named_golds:
                self._named_golds.add(gold)
                why = "took too long to parse" if verdict.timed_out else "cannot be parsed as a maths answer"
                warnings.warn(f"The answer {gold[:200]!r} {why}; its rows are not scored.", stacklevel=3)
        return verdicts

    def score(
        self, golds: Sequence[str | Sequence[str]], texts: Sequence[str], prompts: Sequence[Any] | None = None
    ) -> list[float | None]:
        r"""Judge responses against gold answers.

        Args:
            golds: Gold answers, bare: "72", "\frac{3}{4}", "(1,2)", "\text{Evelyn}"; dollar signs do no harm. A list
                of answers, ["1", "2"], is the same as "1, 2".
            texts: Responses, as many as golds. Only the last `MAX_CHARS` characters of each are read.
            prompts: The problems, as texts or chats: an expression of the problem given back scores 0, though
                math-verify evaluates "23 + 45". Without them it scores what its value scores.

        Returns:
            For each row 1.0 if the answer equals the gold, 0.0 if not, None if the gold cannot be parsed (one warning
            per gold).

        Raises:
            ValueError: If the numbers of golds and texts differ.
            RuntimeError: If a worker cannot start, e.g. because math-verify is missing.
        """
        return [verdict.score for verdict in self._judge_all(golds, texts, prompts)]

    def __call__(
        self,
        /,  # a column may be called "self"
        completions: Sequence[str | Sequence[dict[str, Any]]],
        answer: Sequence[str | Sequence[str]] | None = None,
        *,
        prompts: Sequence[str | Sequence[dict[str, Any]]] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Reward completions whose answer equals the gold.

        Args:
            completions: Responses, each a string or a conversation whose last message counts.
            answer: Gold answers, one per completion: the data set's `answer` column.
            prompts: What was asked, one per completion; TRL passes them. See `score`.
            log_extra: Set by TRL; receives the answers found, as the column "parsed_answer".
            **kwargs: Other columns, ignored.

        Returns:
            1.0, 0.0 or None (gold not parseable: TRL leaves the row out) per completion.

        Raises:
            ValueError: If `answer` is missing, is not one per completion, or a completion has an unknown form.
        """
        if answer is None or isinstance(answer, str):
            raise ValueError(
                "math_reward got no list of answers: the data set needs an `answer` column with the final answer of "
                "each problem as a string. Rename yours with dataset.rename_column('solution', 'answer')."
            )
        verdicts = self._judge_all(answer, [_text_of(completion) for completion in completions], prompts)
        if log_extra is not None:
            log_extra("parsed_answer", [verdict.answer for verdict in verdicts])
        return [verdict.score for verdict in verdicts]


def _text_of(completion: str | Sequence[dict[str, Any]]) -> str:
    """Text of a completion: itself, or its last message's content (which may be None or a list of parts)."""
    try:
        content = completion if isinstance(completion, str) or not completion else completion[-1]["content"]
        if content is None or isinstance(content, str):
            return content or ""
        return "".join(part.get("text") or "" for part in content)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"A completion is {type(completion).__name__} {str(completion)[:80]!r}; it must be a string or a list of "
            'messages such as [{"role": "assistant", "content": "..."}].'
        ) from error


def _gold_text(gold: Any) -> str:
    """A gold as one text; several answers are joined, as `hacpo train` does it."""
    if isinstance(gold, (list, tuple)):
        return ", ".join(_gold_text(part) for part in gold)
    return "" if gold is None else str(gold)


def _prompt_text(prompt: str | Sequence[dict[str, Any]]) -> str:
    """Text of a prompt: itself, or what the messages of a chat say."""
    return prompt if isinstance(prompt, str) else "\n".join(_text_of([message]) for message in prompt)


_INSTANCES: weakref.WeakSet[MathVerifier] = weakref.WeakSet()  # let go in forked children, ended at exit


def _forget_all() -> None:
    for instance in list(_INSTANCES):
        for worker in instance._live:
            worker.forget()
        instance._reset()


@atexit.register
def _close_all() -> None:
    for instance in list(_INSTANCES):
        for worker in list(instance._live):  # not close(): a thread may still be waiting for a verdict
            worker.kill()


if hasattr(os, "register_at_fork"):  # runs before anything else in the child, so no os.getpid() check is needed
    os.register_at_fork(after_in_child=_forget_all)

math_reward = MathVerifier(workers=min(4, os.cpu_count() or 1))
"""The reward function for a trainer's `reward_funcs`: a `MathVerifier` with 5 seconds a response, shared by all."""

number_reward = MathVerifier(workers=min(4, os.cpu_count() or 1), numbers_only=True)
"""As `math_reward`, but where the gold is a number, an expression that is still to be worked out scores 0."""


def load_reward(name: str) -> Callable[..., Any]:
    """Finds a reward function by its name, for `hacpo train --reward_funcs`.

    Args:
        name: "math_reward", "number_reward", "module.function" (the current folder is searched first), or
            "path/to/file.py:function".

    Returns:
        The function, or another object that can be called.

    Raises:
        ValueError: If there is no such file, module or function, if importing it fails, or if it cannot be called.
    """
    place, _, function = name.rpartition(":" if ":" in name else ".")
    if not place and name in ("math_reward", "number_reward"):
        return globals()[name]
    if not place or not function:
        raise ValueError(
            f"reward_funcs: {name!r} is unknown; use math_reward, number_reward, module.function or file.py:function."
        )
    if place.endswith(".py") and not os.path.isfile(place):
        raise ValueError(f"reward_funcs: {name!r}: there is no file {place!r} in {os.getcwd()}.")
    try:
        module = _load_file(place) if place.endswith(".py") else _load_module(place)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"reward_funcs: {place!r} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if found is None:
        near = difflib.get_close_matches(function, vars(module), n=1)
        raise ValueError(
            f"reward_funcs: {place!r} has no function {function!r}.{f' Did you mean {near[0]}?' if near else ''}"
        )
    if isinstance(found, type) or not callable(found):
        raise ValueError(f"reward_funcs: {name!r} is a {type(found).__name__}, not a function that takes completions.")
    return found


def check_columns(columns: Iterable[str], what: str) -> None:
    """Refuses columns whose names stand for something else in the call of a reward function.

    Args:
        columns: names of a data set's columns.
        what: the data set, for the message.

    Raises:
        ValueError: naming the column.
    """
    taken = sorted(_GRADING_ARGUMENTS & set(columns))
    if taken:
        raise ValueError(
            f"{what} has the column {taken[0]!r}, but TRL gives reward functions something else under this name. "
            f"Rename it: dataset.rename_column({taken[0]!r}, 'my_{taken[0]}')."
        )


def rules_of(functions: Sequence[Callable[..., Any]]) -> str:
    """A digest of the sources by which reward functions judge: verdicts of another version are not comparable.

    It covers the file that a function stands in; of `MathVerifier` the grader and the release of math-verify.

    Args:
        functions: reward functions.
    """
    digest = hashlib.sha256()
    for function in functions:
        if isinstance(function, MathVerifier):
            settings = (function.numbers_only, function.timeout, version("math-verify"))
            files = [Path(__file__), Path(__file__).with_name("grader.py")]
        else:
            while isinstance(function, functools.partial):
                digest.update(repr((function.args, function.keywords)).encode())
                function = function.func
            code = function if inspect.isroutine(function) else type(function)
            settings = (getattr(function, "__qualname__", type(function).__qualname__),)
            try:
                files = [Path(inspect.getsourcefile(code))]
            except TypeError:  # compiled, or typed in
                files = []
        digest.update(repr(settings).encode())
        for file in files:
            digest.update(file.read_bytes() if file.is_file() else str(file).encode())
    return digest.hexdigest()[:12]


def weighted_sum(
    functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None
) -> Callable[..., Any]:
    """One reward function of several, as a trainer adds them up: what one leaves unscored counts as 0.

    Args:
        functions: sync or async.
        weights: by default all 1.
    """

    def total(**columns: Any) -> list[float | None]:
        results = [function(**columns) for function in functions]
        results = [asyncio.run(result) if inspect.iscoroutine(result) else result for result in results]
        factors = [1.0] * len(functions) if weights is None else weights
        return [
            None
            if all(score is None for score in row)
            else sum(f * (s or 0.0) for f, s in zip(factors, row, strict=True))
            for row in zip(*results, strict=True)
        ]

    return total


def _load_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module.__name__, module)  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())  # which an installed command does not search
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(os.getcwd())
