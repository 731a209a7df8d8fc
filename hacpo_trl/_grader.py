"""Worker program behind `hacpo_trl.rewards`: judges answers with math-verify, one JSON line per message.

It is started as ``python -m hacpo_trl._grader`` and talks over its standard input and output:

- at start it writes ``{"ready": true}`` or ``{"error": "..."}``;
- it reads ``{"gold": str, "text": str, "limit": seconds}``;
- it writes ``{"gold": bool}`` (can the gold be parsed?) as soon as that is known, then, if it can,
  ``{"equal": bool, "answer": str}``. Two lines let the reader of a killed worker tell a bad gold from a bad answer.

It exits when its input closes. Its caller kills it when it takes too long; nothing here needs to be interruptible.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 4 << 30
"""Address space a worker may use, in bytes; a larger expression fails inside the worker only."""

PLAIN_CHARS = 2000
"""Characters at the end of a text that are searched when it has neither a box nor a ``####`` line."""

_TOKEN = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Boxes with nothing but this in between are one answer: "$x=\boxed{1}$ or $x=\boxed{2}$".
_JOINT = re.compile(r"[\s$,;]*(?:\\text\{)?\s*(?:and|or)?\s*\}?[\s$,;]*(?:[A-Za-z]\s*=\s*)?")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_MARKER = re.compile(r"(?i:answers?)(?:\s+(?:is|are))?\s*[:=]?[\s*]*(?:is\s*:?)?([^\n]*)")
# What can stand alone as a formula: no words but "and", "or", \text{...} and products such as "ab^2"; or a lone word.
_FORMULA = re.compile(
    r"(?:[^A-Za-z\\]|\\(?:text|mbox|mathrm|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|(?<![A-Za-z])"
    r"(?:[A-Za-z]+(?=[-+*/^_=(){}])|(?:or|and|[A-Za-z])(?![A-Za-z])))+|[A-Za-z]+"
)
_NUMBER = r"-?\$?\d(?:[\d./]*\d)?\$?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:\s*(?:,\s*(?:or|and)?|;|or|and)\s*{_NUMBER})+")
_E_NOTATION = re.compile(r"([-+]?\d+(?:\.\d*)?|[-+]?\.\d+)[eE]([-+]?\d+)")
_UNIT_WORD = re.compile(r"(?<=[\d}])\s+(?!percent)(?:Hz|eV|[A-Za-z]+/[A-Za-z]+|[A-Za-z]{4,}(?:\s+[A-Za-z]+)*)$")
_BASE = re.compile(r"[0-9A-Za-z]+_\{?(\d+)\}?")


def find_answer(text: str) -> tuple[str, bool]:
    r"""Pick the part of a text that is its answer, in time linear in the length of the text.

    The last complete ``\boxed{...}`` decides when there is one (boxes joined only by commas, "and" or "or" are one
    list); else the last line with ``#### answer``; else what follows the last "answer is" or "answer:" if it reads as
    one formula; else an enumeration such as "3, 4 or 5" that holds the last number (so that listing candidates is not
    the same as naming one); else the last `PLAIN_CHARS` characters, for math-verify to search.

    Args:
        text: The response.

    Returns:
        The answer and whether it is bare, i.e. one formula without any prose around it.
    """
    boxes: list[tuple[int, int, int]] = []
    open_braces: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        found = token.group()
        if found == "{":
            open_braces.append(None)
        elif found == "}":
            opened = open_braces.pop() if open_braces else None
            if opened:
                boxes.append((*opened, token.start()))
        elif found[-1] == "{" and len(found) > 2:
            open_braces.append((token.start(), token.end()))
    if boxes:
        boxes.sort()  # by start: of nested boxes the innermost is the last
        start, inner, end = boxes.pop()
        parts = [text[inner:end].strip()]
        while boxes and 0 < start - boxes[-1][2] < 40 and _JOINT.fullmatch(text, boxes[-1][2] + 1, start):
            start, inner, end = boxes.pop()
            parts.insert(0, text[inner:end].strip())
        return ", ".join(dict.fromkeys(parts)), True
    text = text.rstrip()
    hashes = _HASHES.findall(text)
    if hashes:
        return hashes[-1].rstrip(" .*"), True
    tail = text[-PLAIN_CHARS:]
    marked = _MARKER.findall(tail)
    formula = marked[-1].lstrip(" *:").rstrip(" .*") if marked else ""
    if formula and _FORMULA.fullmatch(formula):
        return formula, True
    numbers = list(_NUMBERS.finditer(tail))
    if numbers and not re.search(r"\d", tail[numbers[-1].end() :]):
        listed = numbers[-1].group()
        if re.search("or|and", listed) or len(re.findall(r"[,;]", listed)) > 1:
            return listed, True
    return tail, False


def clean(formula: str) -> str:
    r"""Rewrite the few spellings of a bare formula that math-verify 0.9 misreads.

    Dollar signs and ``\(...\)`` go (``\$`` would leave a stray backslash); "4.5e33" is a power of ten and not a
    multiple of Euler's number; "72 dollars" is a number with a unit and not the product 72*d*o*l*...; "1950^\circ C"
    is in degrees; a lone word is a name (so that "listen" is not "silent").
    """
    formula = (
        re.sub(r"\\\$|\$|(?<!\\)\\[()\[\]]|\\q?quad\b|^\s*(?:\*+|\\approx\b)|\*+\s*$", "", formula)
        .strip()
        .rstrip(".")
        .strip()
    )
    power = _E_NOTATION.fullmatch(formula)
    if power:
        return rf"{power[1]} \times 10^{{{int(power[2])}}}"
    if re.fullmatch("[A-Za-z]{4,}", formula):
        return rf"\text{{{formula}}}"
    formula = re.sub(r"_\{\s*\\(max|min)\s*\}", r"_{\1}", formula)
    formula = re.sub(r"(\^\{?\\circ\}?)\s*[CF]$", r"\1", formula)
    return _UNIT_WORD.sub("", formula)


def parse_formula(formula: str) -> list[Any]:
    """Parse a bare formula with math-verify: an expression and the text, the text alone, or nothing."""
    from math_verify import LatexExtractionConfig, parse

    # In a box math-verify takes the whole of it as one answer, where it would search the parts of "$1$, $2$".
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(rf"\boxed{{{formula}}}", config, parsing_timeout=None) if formula else []


def parse_prose(text: str) -> tuple[list[Any], str]:
    """Let math-verify search a text for its last formula or number: an expression or nothing, and it as written."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    config = [LatexExtractionConfig(), ExprExtractionConfig()]
    parsed = parse(text, config, fallback_mode="first_match", parsing_timeout=None)
    found = [part for part in parsed if not isinstance(part, str)]  # texts alone are never equal to an answer
    return found, parsed[-1] if found and isinstance(parsed[-1], str) else ""


@lru_cache(maxsize=256)
def parse_gold(gold: str) -> list[Any]:
    """Parse a gold answer; empty when math-verify makes no expression of it (then only a copy could match)."""
    parsed = parse_formula(clean(gold))
    return parsed if any(not isinstance(part, str) for part in parsed) else []


def is_equal(gold: list[Any], answer: list[Any], scale: bool = True) -> bool:
    """Ask math-verify whether an answer equals the gold (the order matters: it follows the gold's form).

    Args:
        gold: Parsed gold.
        answer: Parsed answer.
        scale: Bring a gold number below 1e-3 to the order of 1 first, and the answer with it. math-verify compares
            numbers to so many decimals, so that 8e-19 would equal 1e-19.
    """
    from math_verify import verify
    from sympy import Eq, Expr, Integer

    if scale and gold and answer and isinstance(gold[0], Expr) and gold[0].is_number:
        try:
            size = abs(complex(gold[0].evalf(15)))
        except (TypeError, ValueError, OverflowError):
            size = 0.0
        if 0 < size < 1e-3:
            value = answer[0].rhs if isinstance(answer[0], Eq) else answer[0]
            factor = Integer(10) ** -math.floor(math.log10(size))
            if isinstance(value, Expr) and value.is_number:
                return verify(gold[0].doit() * factor, value.doit() * factor, timeout_seconds=None)
    return verify(gold, answer, timeout_seconds=None)


def judge(gold: list[Any], gold_text: str, text: str) -> tuple[bool, str]:
    """Judge one response.

    Args:
        gold: Parsed gold.
        gold_text: The gold as written.
        text: The response.

    Returns:
        Whether the answer in it equals the gold, and that answer as written; "" when there is none.
    """
    found, bare = find_answer(text)
    if not bare:
        parsed, read = parse_prose(found)
        return is_equal(gold, parsed, scale="%" not in gold_text + found), read[:200]
    formula = clean(found)
    bases = _BASE.fullmatch(clean(gold_text)), _BASE.fullmatch(formula)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:  # math-verify drops the base: 52_8 would equal 52_9
        return False, found[:200]
    return is_equal(gold, parse_formula(formula), scale="%" not in gold_text + formula), found[:200]


def main() -> None:
    """Serve requests until the input closes."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies

    def reply(**message: Any) -> None:
        sink.write(json.dumps(message) + "\n")
        sink.flush()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes the input
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    except (ImportError, ValueError, OSError):
        pass  # no such limits here: the time limit still holds
    try:
        import logging

        logging.disable(logging.ERROR)  # math-verify warns that its own time limits are off
        # Loads everything, so that the first response's time limit does not pay for it.
        if not is_equal(parse_gold("1"), parse_formula("1")):
            raise RuntimeError("math-verify does not find that 1 equals 1")
    except Exception as error:
        return reply(error=f"{type(error).__name__}: {error}")
    reply(ready=True)
    for line in source:
        job = json.loads(line)
        if hasattr(signal, "alarm"):  # a parent that was itself killed cannot stop a hopeless computation
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(math.ceil(job["limit"]) + 5)
        try:
            gold = parse_gold(job["gold"])
        except Exception:
            gold = []
        reply(gold=bool(gold))
        if gold:
            try:
                equal, answer = judge(gold, job["gold"], job["text"])
            except Exception:
                equal, answer = False, ""
            reply(equal=bool(equal), answer=answer)
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
