"""The maths benchmarks that are known by name. `hacpo_trl.evaluation.answers` lets models answer them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .problems import load_problems, missing_file


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
            ValueError: if the folder has none, or there is no such path.
        """
        if not os.path.exists(path):
            raise ValueError(missing_file(path) or f"{path}: there is no such file or folder.")
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
