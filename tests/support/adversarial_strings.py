r"""Strings that a grader of maths answers must survive, for tests/maths/test_reward.py and benchmarks/fuzz_rewards.py.

`HOSTILE` are the known bad ones; `cases` makes any number of random and adversarial ones from a seed: nested braces
and fractions, towers of powers and factorials, matrices, intervals, percents, prose, Unicode with NULs and lone
surrogates, bait for regular expressions, LaTeX that expands itself.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "((9!)!)!",
    "10^{10^{10}}",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^{k}}",
    r"\int_0^1 x^{x^{x^{x}}} \sin(x^{x}) dx",
    r"\binom{10^9}{5\cdot 10^8}",
    "\\frac{1}{" * 3000 + "2" + "}" * 3000,
    "{" * 9000 + "}" * 9000,
    "(" * 9000,
    r"\boxed{" * 2800,
    r"\sqrt" * 4000,
    "x^" * 9000 + "2",
    "$" * 9001,
    "1 " * 9000,
    r"\def\a{\a\a}\a",
    "\\" * 15_001,
    "\x00\x01" * 100,
    "\ud800" * 100,
    "٣\u202e\ufeff𝟟",
    "+".join(f"x_{{{i}}}" for i in range(2000)),
    r"\begin{pmatrix}" + "1&" * 3000 + r"\end{pmatrix}",
]

FRAGMENTS = (
    [" ", "\n"]
    + r"""
\boxed{ \frac{ \sqrt{ \text{ \left( \right) \{ \} { } ( ) [ ] $ $$ \( \) \[ \] #### ^ _ ^{ _{ + - * / = < > \le
\in \cup \pm \pi \infty \sin \log \sum \int_0^1 \begin{pmatrix} \end{pmatrix} \\ & , ; . ! % \% 0 1 2 7 72 0.5 1e5 x y
z e i and or answer is The \circ \cdot \times | \binom{ \lim_{x\to0} \overline{ ' " é ∞""".split()
)

_ATOMS = ["0", "1", "2", "-3", "7", "72", "0.5", "1e5", "x", "y", r"\pi", "e", "i", r"\sqrt{2}", r"\frac{1}{3}", "n!"]
_WORDS = "so we get the answer is thus hence therefore final value equals about and or not 5 72 apples 3/4 50%".split()
_ODD = "\x00\x01\x7f\u200b\u202e\ufeff\u0660\u0663\u00b2\u00bd\u221a\u2212\u221e\u4e94\U0001d7df\U0001f600\ud800\udfff"


class Case(NamedTuple):
    """One string to judge: `text` against `gold`; `kind` says what the string is like."""

    kind: str
    gold: str
    text: str


def _fragments(rng: random.Random) -> str:
    return "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 25)))


def _formula(rng: random.Random, depth: int = 0) -> str:
    """A formula that is well formed, mostly."""
    if depth > 3 or rng.random() < 0.35:
        return rng.choice(_ATOMS)
    one, two = _formula(rng, depth + 1), _formula(rng, depth + 1)
    form = rng.choice(
        [r"\frac{%s}{%s}", "(%s)+%s", "%s-%s", r"%s\cdot %s", "{%s}^{%s}", r"\sqrt[%s]{%s}", "%s=%s", r"%s \le %s"]
        + [r"\log_{%s}(%s)", r"%s \pm %s", r"\binom{%s}{%s}", "|%s|%s", r"\left(%s\right)/%s"]
    )
    return form % (one, two)


def _unicode(rng: random.Random) -> str:
    def letter() -> str:
        if rng.random() < 0.3:
            return rng.choice(_ODD)
        return chr(rng.randrange(0x20, rng.choice([0x7F, 0x2FF, 0x110000])))

    return "".join(letter() for _ in range(rng.randint(1, 40)))


def _nested(rng: random.Random) -> str:
    opening, closing = rng.choice(
        [
            ("{", "}"),
            ("(", ")"),
            ("[", "]"),
            (r"\frac{1}{", "}"),
            (r"\sqrt{", "}"),
            (r"\left(", r"\right)"),
            ("|", "|"),
        ]
        + [(r"\text{", "}"), (r"\boxed{", "}"), ("$", "$"), (r"\begin{pmatrix}", r"\end{pmatrix}"), ("x^{", "}")]
    )
    depth = int(10 ** rng.uniform(0, 3))
    missing = rng.choice([0, 0, 1, depth])  # some are not closed
    return opening * depth + rng.choice(_ATOMS) + closing * (depth - missing)


def _digits(rng: random.Random) -> str:
    length = int(10 ** rng.uniform(0, 4.3))
    text = "".join(rng.choices("0123456789", k=min(length, 50))) * (length // 50 + 1)
    return (
        rng.choice(["", "-", "0.", "1e", "1,", "."]) + text[:length] + rng.choice(["", ".5", "%", r"\%", "e9", "_2"])
    )


def _matrix(rng: random.Random) -> str:
    rows, columns = rng.randint(1, 6), rng.randint(1, 6)
    name = rng.choice(["pmatrix", "bmatrix", "vmatrix", "array", "cases"])
    body = r" \\ ".join(
        " & ".join(rng.choice(_ATOMS) for _ in range(max(columns + rng.choice([0, 0, 0, -1]), 1))) for _ in range(rows)
    )
    return rf"\begin{{{name}}} {body} " + rng.choice([rf"\end{{{name}}}", r"\end{matrix}", ""])


def _interval(rng: random.Random) -> str:
    ends = [*_ATOMS, r"\infty"]
    parts = [
        f"{rng.choice('([])')}{rng.choice(_ATOMS)}, {rng.choice(ends)}{rng.choice(')]([')}"
        for _ in range(rng.randint(1, 4))
    ]
    return rng.choice([r" \cup ", ",", r" \cap ", r" \setminus "]).join(parts)


def _number(rng: random.Random) -> str:
    number = rng.choice([str(rng.randint(-999, 99999)), f"{rng.uniform(-50, 50):.{rng.randint(1, 12)}f}"])
    units = ["", "%", r"\%", r"\%%", r"^\circ", r"\text{ cm}^2", " dollars", "e-400", "e400", "_8", r"\$", "/0", "//"]
    return rng.choice(["", "$", r"\$", "+-", "."]) + number + rng.choice(units)


def _prose(rng: random.Random) -> str:
    words = rng.choices(_WORDS, k=rng.randint(3, 60))
    return " ".join(words) + rng.choice(["", ".", " " + rng.choice(_ATOMS), "\n#### " + rng.choice(_ATOMS)])


def _bait(rng: random.Random) -> str:
    """The same piece over and over: what makes a careless regular expression take forever."""
    piece = rng.choice(
        [
            "answer is ",
            "answer",
            "1,",
            "1 or ",
            "a=",
            " ",
            "\t",
            "####",
            "#### ",
            "$1$ ",
            r"\boxed{1}",
            r"\boxed{1} or ",
        ]
        + ["\\", "\\\\", "$", "{}", "1/", "-", "1.", "ab^", r"\text{a}", "%", ",", "(1,2),", "x=1, ", r"\ ", "A", "é"]
    )
    end = rng.choice(["", "!", "x", "\n", r"\boxed{72}", "}", "\x00"])
    return piece * int(10 ** rng.uniform(0.5, 3.6)) + end


def _bomb(rng: random.Random) -> str:
    """LaTeX that would expand itself, or read files."""
    name = rng.choice("abcde")
    return rng.choice(
        [
            rf"\def\{name}{{\{name}\{name}}}\{name}",
            rf"\newcommand{{\{name}}}{{{_formula(rng)}\{name}}}\{name}",
            rf"\let\{name}=\{name} \{name}",
            rf"\input{{/etc/passwd}} {_formula(rng)}",
            rf"\csname {name}\endcsname^^41^^",
            rf"\loop\iftrue {_formula(rng)}\repeat",
            rf"\verb|{_fragments(rng)}|",
            f"import os; os._exit({rng.randint(0, 9)})",
            f"__import__('os').kill(0, {rng.randint(0, 1)})",
            f"lambda: {_formula(rng)}",
        ]
    )


def _tower(rng: random.Random) -> str:
    """Small to write, hopeless to compute."""
    n = rng.randint(2, 9)
    return rng.choice(
        [
            "^{".join([str(n)] * rng.randint(3, 9)) + "}" * 8,
            "(" * 5 + str(n) + "!)" * rng.randint(2, 5),
            rf"{n}^{{{rng.randint(10**6, 10**12)}}}",
            rf"\binom{{10^{n}}}{{5\cdot 10^{n - 1}}}",
            rf"\sum_{{k=1}}^{{10^{{{n}}}}} \frac{{1}}{{k^{{k}}}}",
            rf"\prod_{{k=1}}^{{10^{{{n}}}}} k",
            rf"\int_0^{n} x^{{x^{{x}}}} \sin(x^{{x}}) dx",
            rf"\lim_{{x\to\infty}} (1+\frac{{{n}}}{{x}})^{{x^{{x}}}}",
            rf"{rng.randint(10**4, 10**6)}" + "!" * rng.randint(1, 4),
            "+".join(rf"\sqrt{{{i}}}" for i in range(2, rng.randint(10, 60))),
            f"(x+y+z)^{{{rng.randint(20, 400)}}}",
            rf"\sin({rng.randint(10, 99)}^{{{rng.randint(50, 5000)}}})",
            r"\frac{1}{" * (depth := rng.randint(200, 3000)) + "2" + "}" * depth,
        ]
    )


def _known(rng: random.Random) -> str:
    return rng.choice([*HOSTILE, "7" * 10_000_000])


# kind -> how many of 1000 strings, and what makes one. Hopeless ones cost their whole time limit: few of them
KINDS: dict[str, tuple[float, Callable[[random.Random], str]]] = {
    "fragments": (380, _fragments),
    "unicode": (170, _unicode),
    "interval": (110, _interval),
    "number": (90, _number),
    "bomb": (80, _bomb),
    "formula": (80, _formula),
    "matrix": (45, _matrix),
    "prose": (28, _prose),
    "nested": (5, _nested),
    "digits": (5, _digits),
    "bait": (5.5, _bait),
    "tower": (1, _tower),
    "known": (0.5, _known),
}
_WRAPPINGS = ["%s", "%s", r"\boxed{%s}", r"Thus the answer is $\boxed{%s}$.", "The answer is %s.", "\n#### %s", "$%s$"]
_GOLDS = ["72", r"\frac{3}{4}", "(1,2)", "x^2-1", r"10\%", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(3,4]", "1, 2"]


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Random and adversarial strings; the same for the same seed.

    Most are answers to a sane gold, one in twenty is a gold itself, with the answer 72.

    Args:
        count: how many.
        seed: of the random numbers.
    """
    rng = random.Random(seed)
    kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    for _ in range(count):
        kind = rng.choices(kinds, weights)[0]
        text = KINDS[kind][1](rng)
        if rng.random() < 0.05:
            yield Case(kind, text, r"\boxed{72}")
        else:
            yield Case(kind, rng.choice(_GOLDS), rng.choice(_WRAPPINGS).replace("%s", text))
