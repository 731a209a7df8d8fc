"""Worker program behind `hacpo_trl.maths.reward`: judges answers with math-verify, one JSON line per message.

It is started as ``python -m hacpo_trl.maths.grader`` and talks over its standard input and output:

- at start it writes ``{"ready": true}`` or ``{"error": "..."}``;
- it reads ``{"gold": str, "text": str, "prompt": str, "numbers_only": bool, "limit": seconds}``;
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

_TOKEN = re.compile(r"(?<!\\)\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Boxes with nothing but this in between are one answer: "$x=\boxed{1}$ or $x=\boxed{2}$".
_JOINT = re.compile(r"[\s$,;]*(?:\\text\{)?\s*(?:and|or)?\s*\}?[\s$,;]*(?:[A-Za-z]\s*=\s*)?")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_TAG = re.compile(r"<(/?)(?:final_?)?answer>", re.IGNORECASE)
_MARKER = re.compile(r"(?i:answers?)(?:\s+(?:is|are))?\s*[:=\u2013\u2014]?[\s*$]*(?:\\[\[(]\s*)?(?:is\s*:?)?([^\n]*)")
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")
# What can stand alone as a formula: no words but "and", "or", \text{...} and products such as "ab^2"; or a lone word.
_FORMULA = re.compile(
    r"(?:[^A-Za-z\\]|\\(?:text|mbox|mathrm|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\\.|(?<![A-Za-z])"
    r"(?:[A-Za-z]+(?=[-+*/^_=(){}])|(?:or|and|[A-Za-z])(?![A-Za-z])))+|[A-Za-z]+"
)
_NUMBER = r"-?\$?\d(?:[\d./]*\d)?\$?"
_NUMBERS = re.compile(rf"{_NUMBER}(?:\s*(?:,\s*(?:or|and)?|;|or|and)\s*{_NUMBER})+")
_E_NOTATION = re.compile(r"([-+]?\d+(?:\.\d*)?|[-+]?\.\d+)[eE]([-+]?\d+)")
_UNIT_WORD = re.compile(
    r"(?<=[\d}])\s+(?!percent)(?:Hz|eV|[A-Za-z]+/[A-Za-z]+|[A-Za-z]{4,}(?:\s+[A-Za-z]+)*"
    r"|(?:[kdcm]m|in|ft|yd|mi|[A-Za-z]{4,})\^\{?[23]\}?)$"
)
_BRACED = re.compile(r"\s*(?:\\left\s*)?\\(?:\{|lbrace)")
_BASE = re.compile(r"[0-9A-Za-z]+_\{?(\d+)\}?")

# -- typography: one answer as models, markdown and typesetting write it ----------------------------------------------

_THIN_SPACE = r"(?:\\[,;:! ]|\\thinspace\s?|\{\\,\}|~|[\u00a0\u2007\u2009\u202f])"
_GROUPED = re.compile(rf"(?<![\d.,c}}])\d{{1,3}}(?:{_THIN_SPACE}\d{{3}})+(?![\d/])")
_SPACED = re.compile(rf"(?<![\d.,c}}])\d{{1,3}}(?:(?:{_THIN_SPACE}| )\d{{3}})+(?![\d/])")  # for formulas only
_MARKUP = (  # each match reads a bounded number of characters
    re.compile(r"<(b|i|u|em|strong|code|span|p)>(?P<inner>[^<>]{0,200})</\1>", re.IGNORECASE),
    re.compile(r"(?<![\w)*])(\*{1,3})(?=[^\s*])(?P<inner>[^*\n]{1,200})(?<=[^\s*])\1(?![\w(*])"),
    re.compile(r"(?<![\w)}_])(_{1,2})(?=[^\s_])(?P<inner>[^_\n]{1,200})(?<=[^\s_])\1(?![\w({_])"),
)
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True))
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SIGNS = str.maketrans(
    {
        **{"−": "-", "⁄": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "±": r"\pm "},
        **{"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∈": r"\in ", "°": r"^\circ "},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
        **dict.fromkeys("\u00a0\u2007\u2009\u202f", " "),
        **dict.fromkeys("€£¥₹", ""),
    }
)
_LETTER = re.compile(r"([A-Za-z]?)\\(?:mathrm|mathit|operatorname|textrm|textit)\s*\{\s*([ei])\s*\}")
_FONT = re.compile(r"\\(?:mathsf|mathtt|boldsymbol|bm|pmb)\s*(?=\{)|\\(?:text)?color\s*\{[^{}]*\}")
_QUOTES = '"“”«»'
_SAID = re.compile(r"\s*(?:\\text\s*\{)?\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?\s*(\}?)\s*", re.IGNORECASE)
_TEXT_NUMBER = re.compile(r"\\text(?:bf|it|rm)?\s*\{\s*(\\?\$?[-+]?\d[\d.,]*(?:\s+[A-Za-z]{4,})?)\s*\}\.?")


def remove_markup(text: str) -> str:
    """Take away emphasis of markdown and HTML, thin spaces inside numbers, and the typeset minus sign."""
    text = _GROUPED.sub(_join_groups, text.replace("`", ""))
    for pattern in _MARKUP:
        text = pattern.sub(r"\g<inner>", text)
    return text.replace("−", "-")


def _join_groups(number: re.Match[str]) -> str:
    return re.sub(rf"{_THIN_SPACE}| ", "", number.group())


def _latex_signs(formula: str) -> str:
    """LaTeX for Unicode's mathematical signs."""
    formula = re.sub(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}", formula).replace("√", r"\sqrt")
    formula = _SUPERSCRIPT.sub(lambda found: f"^{{{''.join(map(_SUPERSCRIPTS.get, found.group()))}}}", formula)
    return formula.translate(_SIGNS)


# -- the answer in a text ---------------------------------------------------------------------------------------------


def find_answer(text: str, numeric: bool = False) -> tuple[str, bool]:
    r"""Pick the part of a text that is its answer, in time linear in the length of the text.

    The last complete ``\boxed{...}`` or ``<answer>...</answer>`` decides when there is one (boxes joined only by
    commas, "and" or "or" are one list; a tag holds a formula, or a text that is searched); else the last line with
    ``#### answer``; else what follows the last "answer is" or "answer:" if it reads as one formula; else an
    enumeration such as "3, 4 or 5" that holds the last number (so that listing candidates is not the same as naming
    one); else the last `PLAIN_CHARS` characters, for math-verify to search.

    Args:
        text: The response.
        numeric: The gold holds a number. A lone word ("the answer is consistent") is then no answer where a formula in
            bold type, or alone in the last line, stands behind it.

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
    boxes.sort()  # by start: of nested boxes the innermost is the last
    tagged = _last_tag(text)
    if tagged and not (boxes and boxes[-1][0] > tagged.stop):
        inside = text[tagged].strip()
        formula = remove_markup(inside)
        return (formula, True) if _FORMULA.fullmatch(formula) or not formula else find_answer(inside, numeric)
    if boxes:
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
    tail = _TAG.sub(" ", text[-PLAIN_CHARS:])
    formula = _announced(tail, numeric)
    if formula and _FORMULA.fullmatch(formula):
        return formula, True
    tail = remove_markup(tail)
    numbers = list(_NUMBERS.finditer(tail))
    if numbers and not re.search(r"\d", tail[numbers[-1].end() :]):
        listed = numbers[-1].group()
        if re.search("or|and", listed) or len(re.findall(r"[,;]", listed)) > 1:
            return listed, True
    return tail, False


def _last_tag(text: str) -> slice | None:
    """The inside of the last complete answer tag."""
    tags = list(_TAG.finditer(text))
    for opening, closing in zip(tags[-2::-1], tags[:0:-1], strict=True):
        if closing[1] and not opening[1]:
            return slice(opening.end(), closing.start())
    return None


def _announced(text: str, numeric: bool) -> str:
    """What stands behind the last "answer is" or "answer:"; "" without one."""
    marked = list(_MARKER.finditer(text))
    if not marked:
        return ""
    formula = remove_markup(marked[-1][1]).lstrip(" *:").rstrip(" .*✓✔✅")
    if numeric and re.fullmatch("[A-Za-z]{2,}", formula):
        rest = text[marked[-1].end() :]
        for stated in [*_BOLD.findall(rest), rest.rsplit("\n", 1)[-1]][::-1]:
            stated = remove_markup(stated).strip(" *:.")
            if re.search(r"\d", stated) and _FORMULA.fullmatch(stated):
                return stated
    return formula


def clean(formula: str) -> str:
    r"""Rewrite the spellings of a bare formula that math-verify 0.9 misreads.

    Markup, thin spaces in numbers ("12\,345", "12 345"), Unicode's signs, fonts, colours and quotation marks go. So do
    dollar signs and ``\(...\)`` (``\$`` would leave a stray backslash); "4.5e33" is a power of ten and not a multiple
    of Euler's number, which may be upright; "72 dollars" is a number with a unit and not the product 72*d*o*l*...;
    "1950^\circ C" is in degrees; a lone word is a name (so that "listen" is not "silent").
    """
    formula = _SPACED.sub(_join_groups, remove_markup(formula))
    formula = _latex_signs(re.sub("~(?!=)", " ", _FONT.sub("", formula)))
    formula = _LETTER.sub(lambda found: f"{found[1]} {found[2]}" if found[1] else found[2], formula)
    formula = (
        re.sub(r"\\\$|\$|(?<!\\)\\[()\[\]]|\\q?quad\b|^\s*(?:\*+|\\approx\b)|\*+\s*$", "", formula)
        .strip()
        .rstrip(".")
        .strip(_QUOTES + " \n")
    )
    power = _E_NOTATION.fullmatch(formula)
    if power:
        return rf"{power[1]} \times 10^{{{int(power[2])}}}"
    if re.fullmatch("[A-Za-z]{4,}", formula):
        return rf"\text{{{formula}}}"
    formula = re.sub(r"_\{\s*\\(max|min)\s*\}", r"_{\1}", formula)
    formula = re.sub(r"(\^\{?\\circ\}?)\s*[CF]$", r"\1", formula)
    return _UNIT_WORD.sub("", formula)


def clean_answer(formula: str, gold: str) -> str:
    r"""As `clean`, and take a number out of what only a response puts around it: "Answer: 72", ``\text{72 apples}``.

    Args:
        formula: The answer.
        gold: The cleaned gold; where it is a text itself, texts are left alone.
    """
    said = _SAID.match(formula)
    if said and bool(said[1]) == (r"\text" in said.group()) and formula[said.end() :].strip():
        formula = formula[said.end() :]
    number = _TEXT_NUMBER.fullmatch(formula.strip())
    return clean(number[1] if number and not gold.startswith(r"\text") else formula)


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
        scale: Compare the ratio of two numbers with 1 where the gold is below 1e-3. math-verify compares numbers to so
            many decimals that 8e-19 would equal 1e-19.
    """
    from math_verify import verify
    from sympy import Eq, Integer

    if scale and gold and answer:
        value = answer[0].rhs if isinstance(answer[0], Eq) else answer[0]
        if _is_number(gold[0]) and _is_number(value):
            if _is_tiny(gold[0]):
                return verify(Integer(1), value.doit() / gold[0].doit(), timeout_seconds=None)
        elif type(gold[0]) is type(value):
            members, others = _members(gold[0]), _members(value)
            if len(members) == len(others) and any(map(_is_tiny, members)):
                return all(is_equal([g], [a]) for g, a in zip(members, others, strict=True))
    return verify(gold, answer, timeout_seconds=None)


def _is_number(part: Any) -> bool:
    from sympy import Expr

    return isinstance(part, Expr) and bool(part.is_number)


def _is_tiny(part: Any) -> bool:
    from sympy import Float

    size = abs(part.evalf(15)) if _is_number(part) else None
    return isinstance(size, Float) and bool(0 < size < 1e-3)


def _members(part: Any) -> list[Any]:
    """The numbers of a pair or, by size, of a set; nothing where not all are numbers."""
    from sympy import FiniteSet, Interval, Tuple, re

    if not isinstance(part, (FiniteSet, Interval, Tuple)):
        return []
    members = [part.start, part.end] if isinstance(part, Interval) and part.is_open else list(part.args)
    if not all(map(_is_number, members)):
        return []
    # By sympy's numbers: floats would turn tiny ones into 0
    return sorted(members, key=lambda member: re(member.evalf(15))) if isinstance(part, FiniteSet) else members


def _set_for_pair(gold: Any, gold_text: str, answer: Any, answer_text: str) -> bool:
    r"""Whether one is ``\{0, 1\}`` and the other a pair or an interval (0, 1), which math-verify takes for equal."""
    from sympy import FiniteSet, Interval, Tuple

    return any(
        isinstance(one, FiniteSet) and len(one) > 1 and isinstance(other, (Interval, Tuple)) and _BRACED.match(text)
        for one, text, other in ((gold, gold_text, answer), (answer, answer_text, gold))
    )


# -- answers that only repeat the problem -----------------------------------------------------------------------------

_SYMBOL = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\?[A-Za-z]+|[^\s\w]")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(\{[^{}]*\}|\w)\s*(\{[^{}]*\}|\w)")
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|q?quad|thinspace)(?![A-Za-z])|\\[,;:! ()\[\]]|\^\s*\{?\s*\\circ\s*\}?|\\?[$%]"
    r"|(?<=\d),(?=\d{3})"
)
_SAME = {r"\times": "*", r"\cdot": "*", "times": "*", r"\div": "/", "over": "/", "plus": "+", "minus": "-"}
_BINARY = frozenset("+-*/^") | {r"\pm"}
_FUNCTIONS = frozenset(
    r"""! | \sqrt sqrt \log log \ln ln \exp exp \sin \cos \tan \cot \sec \csc \binom \dbinom \tbinom \lfloor \lceil
    \sum \prod \int \gcd gcd \lcm lcm \det \max \min \bmod \mod mod""".split()
)


def symbols(text: str) -> list[str]:
    r"""The symbols of a formula or a problem, without typography: ``\dfrac{1}{2}``, ``\frac12`` and 1/2 are alike.

    Brackets and braces go as well; words are symbols, and "plus", "times", "divided by" are the operators.
    """
    text = _LAYOUT.sub("", _latex_signs(remove_markup(text)))
    text = re.sub(r"\b(?:multiplied|divided) by\b", lambda found: "times" if found[0][0] == "m" else "over", text)
    for _ in range(8):  # from the inside out
        text, count = _FRACTION.subn(r" \1/\2 ", text)
        if not count:
            break
    found = [_SAME.get(symbol, symbol) for symbol in _SYMBOL.findall(text.replace("**", "^"))]
    return [symbol for symbol in found if symbol not in "(){}[]" and symbol not in (r"\text", r"\mathrm")]


def _parts(formula: list[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for symbol in formula:
        parts.append([]) if symbol == separator else parts[-1].append(symbol)
    return [part for part in parts if part]


def _is_unevaluated(formula: list[str]) -> bool:
    """Whether there is something to work out: a function, or an operator between two operands."""
    operands = zip(formula, formula[1:], formula[2:], strict=False)
    between = any(b in _BINARY and a not in _BINARY and c != "," and a not in ",=<>" for a, b, c in operands)
    return between or not _FUNCTIONS.isdisjoint(formula)


def leaves_the_work(answer: str, gold: str, prompt: str, numbers_only: bool = False) -> bool:
    r"""Whether an answer only gives back an expression of the problem: "23 + 45" to "What is 23 + 45?".

    It does if it is not written as the gold is, holds something to work out (an operator between two operands, a root,
    a factorial, ...), and stands in the prompt: symbol by symbol, apart from brackets and typography, and where the
    gold is a number also in another order ("45 + 23"). Of an equation the last side counts unless the gold is an
    equation, too; a list does if all its members stand in the prompt.

    Args:
        answer: The formula that was taken for the answer.
        gold: The gold.
        prompt: The problem, with whatever else was in the prompt.
        numbers_only: Where the gold is a number, an expression need not stand in the prompt.
    """
    given = symbols(re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}", " ", answer))
    given = given[: len(given) - (given[-1:] == ["?"])]
    wanted = symbols(gold)
    if not _is_unevaluated(given):
        return False
    as_gold = [wanted, *(part for side in _parts(wanted, "=") for part in [side, *_parts(side, ",")])]
    sides = _parts(given, "=")
    if any(sorted(side) == sorted(form) for side in [given, *sides] for form in as_gold):
        return False
    problem = symbols(prompt)
    number = not any(map(_is_unevaluated, as_gold)) and not re.search("[A-Za-z]", "".join(wanted))

    def stands_in_problem(part: list[str]) -> bool:
        windows = (problem[i : i + len(part)] for i in range(len(problem) - len(part) + 1))
        return any(window == part or number and sorted(window) == sorted(part) for window in windows)

    said = given if "=" in wanted or len(sides) < 2 else sides[-1]
    members = _parts(said, ",")
    return any(map(_is_unevaluated, members)) and (numbers_only and number or all(map(stands_in_problem, members)))


def judge(
    gold: list[Any], gold_text: str, text: str, prompt: str = "", numbers_only: bool = False
) -> tuple[bool, str]:
    """Judge one response.

    Args:
        gold: Parsed gold.
        gold_text: The gold as written.
        text: The response.
        prompt: The problem; an expression of it given back is wrong.
        numbers_only: Where the gold is a number, any expression that is still to be worked out is wrong.

    Returns:
        Whether the answer in it equals the gold, and that answer as written; "" when there is none.
    """
    found, bare = find_answer(text, numeric=re.search(r"\d", gold_text) is not None)
    wanted = clean(gold_text)
    if bare:
        formula, read = clean_answer(found, wanted), found
        bases = _BASE.fullmatch(wanted), _BASE.fullmatch(formula)
        if bases[0] and bases[1] and bases[0][1] != bases[1][1]:  # math-verify drops the base: 52_8 would equal 52_9
            return False, found[:200]
        parsed = parse_formula(formula)
    else:
        parsed, read = parse_prose(found)
        formula = read
    equal = (
        is_equal(gold, parsed, scale="%" not in gold_text + found)
        and not _set_for_pair(gold[0], wanted, parsed[0], formula)
        and not leaves_the_work(formula, wanted, prompt, numbers_only)
    )
    return equal, read[:200]


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
                equal, answer = judge(gold, job["gold"], job["text"], job["prompt"], job["numbers_only"])
            except Exception:
                equal, answer = False, ""
            reply(equal=bool(equal), answer=answer)
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
