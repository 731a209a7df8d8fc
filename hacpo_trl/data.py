"""Maths data sets with a final answer: from the Hub or from local files, in the form that the trainer takes."""

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, load_dataset

logger = logging.getLogger(__name__)

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

_PROBLEM_COLUMNS = ("problem", "question", "prompt", "query", "instruction", "input")
_ANSWER_COLUMNS = ("final_answer", "answer", "gold", "target", "expected_answer", "solution", "output")


def extract_answer(text: Any) -> str | None:
    """The final answer of a reference solution.

    Args:
        text: a solution that ends in "#### 72" (GSM8K) or holds "\\boxed{72}" (MATH), or a bare answer.

    Returns:
        What follows the last "####", or stands in the last whole box, or the text itself; None for nothing.
    """
    if text is None or isinstance(text, (list, dict, float)) and text != text:
        return None
    if isinstance(text, (list, tuple)):
        text = ", ".join(map(str, text))
    text = str(text).strip()
    if "####" in text:
        text = text.rsplit("####", 1)[1].strip()
    else:
        boxed = _last_boxed(text)
        text = text if boxed is None else boxed
    return text or None


def _last_boxed(text: str) -> str | None:
    for command in ("\\boxed", "\\fbox"):
        start = text.rfind(command + "{")
        if start < 0:
            continue
        depth = 0
        for i in range(start + len(command), len(text)):
            if text[i] == "\\":
                continue
            escaped = text[i - 1] == "\\"
            depth += (text[i] == "{" and not escaped) - (text[i] == "}" and not escaped)
            if depth == 0:
                return text[start + len(command) + 1 : i].strip()
    return None


def load_problems(
    source: str,
    *,
    split: str = "train",
    name: str | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
    limit: int | None = None,
) -> list[dict[str, str]]:
    """Reads problems and final answers.

    Args:
        source: a local file (.jsonl, .json, .csv or .parquet) or the id of a data set on the Hub.
        split: split of a data set on the Hub.
        name: configuration of a data set on the Hub, such as "main" of openai/gsm8k.
        problem_column: where the problem stands; by default the first of problem, question, prompt, ...
        answer_column: where the answer or the solution stands; by default the first of final_answer, answer, ...
        limit: take the first problems only.

    Returns:
        Rows with "problem" and "answer". Rows without a problem or an answer are left out, and their number is logged.

    Raises:
        ValueError: naming file, line and column of what cannot be read.
    """
    rows = _read_file(source) if os.path.isfile(source) else _read_hub(source, split, name)
    columns = list(rows[0]) if rows else []
    problem = _column(columns, problem_column, _PROBLEM_COLUMNS, "problem", source)
    answer = _column(columns, answer_column, [c for c in _ANSWER_COLUMNS if c != problem], "answer", source)
    problems = []
    for row in rows:
        text, final = row.get(problem), extract_answer(row.get(answer))
        if isinstance(text, str) and text.strip() and final is not None:
            problems.append({"problem": text.strip(), "answer": final})
            if limit is not None and len(problems) == limit:
                break
    else:
        if len(problems) < len(rows):
            logger.warning(
                "%s: %d of %d rows have no problem or no answer.", source, len(rows) - len(problems), len(rows)
            )
    if not problems:
        raise ValueError(f"{source}: none of the {len(rows)} rows has both {problem!r} and {answer!r}.")
    return problems


def _read_file(path: str) -> list[dict[str, Any]]:
    ending = os.path.splitext(path)[1].lower()
    if ending == ".jsonl":
        with open(path, encoding="utf-8", newline="\n") as file:  # other line separators may stand inside a problem
            lines = file.read().split("\n")
        rows = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, column {error.colno}: no JSON: {error.msg}.") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected an object {{...}}, got {type(row).__name__}.")
            rows.append(row)
        return rows
    if ending == ".json":
        with open(path, encoding="utf-8") as file:
            try:
                rows = json.load(file)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}.") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: expected a list of objects. One object a line is JSON Lines: name it .jsonl.")
        return rows
    if ending in (".csv", ".parquet"):
        return list(load_dataset(ending[1:], data_files=path, split="train"))
    raise ValueError(
        f"{path}: cannot read {ending or 'a file without an ending'}; use .jsonl, .json, .csv or .parquet."
    )


def _read_hub(source: str, split: str, name: str | None) -> list[dict[str, Any]]:
    if os.path.splitext(source)[1].lower() in (".jsonl", ".json", ".csv", ".parquet"):
        raise ValueError(f"{source}: there is no such file.")
    try:
        return list(load_dataset(source, name, split=split))
    except Exception as error:
        raise ValueError(
            f"{source!r} is no local file, and could not be loaded from the Hub (split {split!r}, configuration "
            f"{name!r}): {error}"
        ) from error


def _column(columns: Sequence[str], given: str | None, known: Sequence[str], what: str, source: str) -> str:
    if given is not None:
        if given not in columns:
            raise ValueError(f"{source}: there is no column {given!r}; the columns are {', '.join(columns)}.")
        return given
    for candidate in known:
        if candidate in columns:
            return candidate
    raise ValueError(
        f"{source}: which column holds the {what}? The columns are {', '.join(columns) or 'none'}; name one with "
        f"{what}_column."
    )


def to_prompts(
    problems: Sequence[dict[str, str]],
    *,
    chat: bool,
    system_prompt: str | None = None,
    instruction: str = INSTRUCTION,
) -> Dataset:
    """Makes prompts of problems.

    Args:
        problems: rows with "problem" and "answer".
        chat: as a chat, for agents with chat templates, or as a plain text that base models go on writing.
        system_prompt: first message of the chat, or first line of the text.
        instruction: stands behind every problem.

    Returns:
        Columns "prompt" and "answer".
    """
    rows = []
    for row in problems:
        if chat:
            content = f"{row['problem']}\n\n{instruction}" if instruction else row["problem"]
            prompt: Any = [{"role": "user", "content": content}]
            if system_prompt:
                prompt.insert(0, {"role": "system", "content": system_prompt})
        else:
            parts = [system_prompt, f"Problem: {row['problem']}", instruction, "Solution:"]
            prompt = "\n".join(part for part in parts if part)
        rows.append({"prompt": prompt, "answer": row["answer"]})
    return Dataset.from_list(rows)
