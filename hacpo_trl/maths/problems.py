"""Maths data sets with a final answer: from the Hub or from local files, in the form that the trainer takes."""

import csv
import difflib
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow
import pyarrow.parquet
from datasets import Dataset, load_dataset

from ..texts.prompts import PromptForm

logger = logging.getLogger(__name__)

_PROBLEM_COLUMNS = ("problem", "question", "prompt", "query", "instruction", "input")
_ANSWER_COLUMNS = ("final_answer", "answer", "gold", "target", "expected_answer", "solution", "output")

_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
_OTHER_ENDINGS = (".txt", ".tsv", ".xlsx", ".xls", ".zip", ".gz", ".ndjson", ".arrow")  # files, but none that we read
_SHOWN = 6  # so many files are listed in an error
_FIRST_ROWS = 1000  # that tell which columns there are


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
) -> list[dict[str, Any]]:
    """Reads problems and final answers.

    Args:
        source: a local file (.jsonl, .json, .csv or .parquet) or the id of a data set on the Hub.
        split: split of a data set on the Hub.
        name: configuration of a data set on the Hub, such as "main" of openai/gsm8k.
        problem_column: where the problem stands; by default the first of problem, question, prompt, ...
        answer_column: where the answer or the solution stands; by default the first of final_answer, answer, ...
        limit: take the first problems only.

    Returns:
        Rows with "problem", a text or a list of messages as it stands there, and "answer". Rows without a problem or
        an answer are left out, and which they are is logged.

    Raises:
        ValueError: naming file, line and column of what cannot be read.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"{limit} is no number of problems to take from {source}; use at least 1, or None for all.")
    places, rows = _read_file(source) if os.path.isfile(source) else _read_hub(source, split, name)
    if not rows:
        raise ValueError(f"{source} is empty: it has no rows.")
    columns = list(dict.fromkeys(column for row in rows[:_FIRST_ROWS] for column in row))
    problem = _column(columns, problem_column, _PROBLEM_COLUMNS, "problem", source)
    answer = _column(columns, answer_column, [c for c in _ANSWER_COLUMNS if c != problem], "answer", source)
    problems, left_out = [], []
    for place, row in zip(places, rows, strict=True):
        text, final = row.get(problem), extract_answer(row.get(answer))
        if text is not None and not isinstance(text, str) and not _is_chat(text) and text == text:  # NaN: nothing
            kind = "a number" if isinstance(text, (int, float)) else f"of type {type(text).__name__}"
            raise ValueError(
                f"{source}, {place}: the problem in column {problem!r} is {text!r:.80}, {kind} and not text. Put "
                "it in quotes, or name another column with problem_column."
            )
        if text and text == text and final is not None and (not isinstance(text, str) or text.strip()):
            problems.append({"problem": text, "answer": final})
            if limit is not None and len(problems) == limit:
                break
        else:
            left_out.append(place)
    if not problems:
        raise ValueError(f"{source}: none of the {len(rows)} rows has both {problem!r} and {answer!r}.")
    if left_out:
        logger.warning(
            "%s: %d of %d rows have no %r or no %r and are left out: %s%s.",
            source, len(left_out), len(rows), problem, answer, ", ".join(left_out[:5]), ", ..." * (len(left_out) > 5),
        )  # fmt: skip
    return problems


def _is_chat(problem: Any) -> bool:
    """Whether a problem is a list of messages."""
    return (
        isinstance(problem, list)
        and len(problem) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in problem)
    )


def is_local(source: str) -> bool:
    """Whether a source of problems is, or was meant to be, a file or a folder and not the id of a data set."""
    return os.path.exists(source) or missing_file(source) is not None


def missing_file(source: str) -> str | None:
    """Why a source of problems is a file that is not there; None for what is there, and for what may be an id.

    "data/train" could be either. Where a folder "data" with files of problems is, it is a file there.
    """
    if os.path.exists(source):
        return None
    folder, name = os.path.split(source)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    beside = sorted(file for file in beside if file.lower().endswith(_ENDINGS))
    plain = name.lower().endswith(_ENDINGS + _OTHER_ENDINGS) or source.startswith(("/", "./", "../", "~"))
    if not plain and source.count("/") < 2 and not (folder and beside):
        return None
    near = difflib.get_close_matches(name, beside, n=1)
    hint = f" Did you mean {os.path.join(folder, near[0])}?" if near else ""
    if not near and folder and beside:
        hint = f" {folder} holds {', '.join(beside[:_SHOWN])}{', ...' * (len(beside) > _SHOWN)}."
    return f"{source}: there is no such file.{hint}"


def _read_file(path: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The rows of a file, and where each stands."""
    ending = os.path.splitext(path)[1].lower()
    if ending == ".jsonl":
        return _read_json_lines(path)
    if ending == ".json":
        rows = _read_json(path)
    elif ending == ".csv":
        return _read_csv(path)
    elif ending == ".parquet":
        if not os.path.getsize(path):
            raise ValueError(f"{path} is empty.")
        try:
            rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: no Parquet file that can be read: {error}") from error
    else:
        raise ValueError(
            f"{path}: cannot read {ending or 'a file without an ending'}; use .jsonl, .json, .csv or .parquet."
        )
    return [f"row {number}" for number in range(1, len(rows) + 1)], rows


def _read_text(path: str) -> str:
    with open(path, "rb") as file:
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        place = f"{path}, line {before.count(10) + 1}, column {column}"
        raise ValueError(
            f"{place}: the byte 0x{content[error.start]:02x} is no UTF-8. Save the file as UTF-8; of Latin-1 "
            "`iconv -f latin1 -t utf-8` makes it."
        ) from None
    text = text.removeprefix("\ufeff")  # what some editors put in front
    if not text.strip():
        raise ValueError(f"{path} is empty.")
    return text


def _read_json_lines(path: str) -> tuple[list[str], list[dict[str, Any]]]:
    places, rows = [], []
    for number, line in enumerate(_read_text(path).split("\n"), 1):  # other separators may stand inside a problem
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, column {error.colno}: no JSON: {error.msg}.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected an object {{...}}, got {type(row).__name__}.")
        places.append(f"line {number}")
        rows.append(row)
    return places, rows


def _read_json(path: str) -> list[dict[str, Any]]:
    text = _read_text(path)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if _is_object(text.strip().split("\n")[0]):
            raise ValueError(f"{path}: one object a line is JSON Lines: name it .jsonl.") from None
        raise ValueError(f"{path}, line {error.lineno}, column {error.colno}: {error.msg}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects. One object a line is JSON Lines: name it .jsonl.")
    return rows


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _read_csv(path: str) -> tuple[list[str], list[dict[str, Any]]]:
    text = _read_text(path)
    places, rows, before = [], [], 0
    usual = csv.field_size_limit(sys.maxsize)  # a solution may be longer than a field usually is
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header: list[str] | None = None
        try:
            for fields in reader:
                line, before = before + 1, reader.line_num
                if not fields:
                    continue
                if header is None:
                    header = [field.strip() for field in fields]
                    continue
                if len(fields) > len(header):
                    raise ValueError(
                        f"{path}, line {line}: {len(fields)} fields, but the header has {len(header)} columns "
                        f"({', '.join(header)}). A text with a comma stands in double quotes."
                    )
                places.append(f"line {line}")
                rows.append(dict(zip(header, fields, strict=False)))
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {before + 1}: no CSV: {error}. A double quote inside a quoted text is written twice."
            ) from None
    finally:
        csv.field_size_limit(usual)
    return places, rows


def _read_hub(source: str, split: str, name: str | None) -> tuple[list[str], list[dict[str, Any]]]:
    missing = missing_file(source)
    if missing is not None:
        raise ValueError(missing)
    try:
        rows = list(load_dataset(source, name, split=split))
    except Exception as error:
        raise ValueError(
            f"{source!r} is no local file, and could not be loaded from the Hub (split {split!r}, configuration "
            f"{name!r}): {error}"
        ) from error
    return [f"row {number}" for number in range(1, len(rows) + 1)], rows


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


def gold_column(row: dict[str, Any]) -> str | None:
    """The column of a data set's answers, from one of its rows: "answer", else the first that is known by name."""
    return next((column for column in ("answer", *_ANSWER_COLUMNS) if column in row), None)


def to_prompts(problems: Sequence[dict[str, Any]], form: PromptForm) -> Dataset:
    """Makes prompts of problems.

    Args:
        problems: rows with "problem" and "answer".
        form: the prompts' form, such as `make_form("chat")`.

    Returns:
        Columns "prompt" and "answer".

    Raises:
        ValueError: for a problem that does not fit the form.
    """
    return Dataset.from_list([{"prompt": form.render(row["problem"]), "answer": row["answer"]} for row in problems])
