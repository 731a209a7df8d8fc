r"""Answers as models write them, against golds, in both directions; and answers that only repeat the problem."""

import pytest

from hacpo_trl.maths.grader import judge, parse_gold
from hacpo_trl.maths.reward import MathVerifier, number_reward

# gold -> responses that give it
RIGHT = {
    "72": [
        # tags, as R1 writes them
        "<answer>72</answer>",
        "<think>5 + 7 = 12</think>\n<answer>\n72\n</answer>",
        r"<think>\boxed{5}</think><answer>72</answer>",
        "<answer> 72. </answer>",
        "<answer>144/2</answer>",
        "<answer>The answer is 72.</answer>",
        "<answer>$72$</answer>",
        r"<answer>\boxed{72}</answer>",
        "<answer>72 apples</answer>",
        "<answer>**72**</answer>",
        "<ANSWER>x = 72</ANSWER>",
        "<final_answer>72</final_answer>",
        "<answer>5</answer> No.\n<answer>72</answer>",
        r"<answer>5</answer>, or rather \boxed{72}",
        # markdown and HTML
        "The answer is `72`.",
        "It is `72`.",
        "The result is *72*.",
        "The result is ***72***.",
        "The result is __72__.",
        "The result is _72_.",
        "**Answer: 72**",
        "**Final Answer**\n\n72",
        "### Final Answer\n72",
        "**Answer:**\n\n72\n\nNote that 5 is prime.",
        "#### **72**",
        "#### `72`",
        "The answer is <b>72</b>.",
        "The answer is:\n$$\n72\n$$",
        "So answer is consistent.\n\nThus we get **72**",
        "The answer is correct.\n72",
        r"\boxed{`72`}",
        r"\boxed{**72**}",
        # fonts, colours, words in the box
        r"\boxed{\text{72}}",
        r"\boxed{\mathsf{72}}",
        r"\boxed{\color{red}{72}}",
        r"\boxed{\text{72 apples}}",
        r"\boxed{\text{Answer: } 72}",
        r"\boxed{\text{The answer is } 72}",
        # units and signs
        r"\boxed{72~\mathrm{km/h}}",
        r"\boxed{72\ \text{cm}^2}",
        r"\boxed{72 cm²}",
        r"\boxed{72°}",
        r"\boxed{€72}",
        r"\boxed{72€}",
        "The answer is “72”.",
        "Answer — 72",
        "Answer: 72 ✓",
    ],
    "12345": [
        r"\boxed{12\,345}",
        r"\boxed{12~345}",
        r"\boxed{12 345}",
        r"\boxed{12\ 345}",
        r"\boxed{12\;345}",
        "\\boxed{12\u00a0345}",
        "\\boxed{12\u2009345}",
        "\\boxed{12\u202f345}",
        r"\boxed{12{,}345}",
        r"\boxed{12\thinspace 345}",
        "The answer is 12 345.",
        "The answer is 12\u202f345.",
        "The total is 12\u2009345 people.",
        r"The total is $12\,345$.",
        r"\boxed{12\,345 \text{ people}}",
        "#### 12 345",
    ],
    "1234567.5": [r"\boxed{1\,234\,567.5}", r"\boxed{1 234 567.5}"],
    "-5": ["\\boxed{\u22125}", "The answer is \u22125."],
    r"\frac{\pi}{2}": [r"\boxed{π/2}"],
    r"5\sqrt{2}": [r"\boxed{5√2}"],
    r"\sqrt{12}": [r"\boxed{√12}"],
    "x^2": [r"\boxed{x²}"],
    "10^{-3}": [r"\boxed{10⁻³}"],
    r"9\times 10^{4}": [r"\boxed{9 × 10⁴}", r"\boxed{9·10^4}"],
    r"\frac{3}{4}": ["<answer>3/4</answer>", r"\boxed{¾}", "The answer is `3/4`.", r"\boxed{3⁄4}"],
    r"\frac{5}{2}": [r"\boxed{2½}"],
    "(3,4)": ["<answer>(3, 4)</answer>"],
    "[0, 2)": ["<answer>[0,2)</answer>"],
    r"x \le 3": [r"\boxed{x ≤ 3}"],
    r"\text{Evelyn}": [
        "<answer>Evelyn</answer>",
        "The answer is **Evelyn**.\nShe has **72** points.",
        r"\boxed{`Evelyn`}",
    ],
}

# gold -> responses that do not
WRONG = {
    "72": [
        "<answer>73</answer>",
        "<answer>72</answer> no, <answer>73</answer>",
        r"<answer>72</answer>, or rather \boxed{73}",
        r"<think>\boxed{72}</think><answer>5</answer>",
        "<answer>5 or 72</answer>",
        "<answer>71, 72</answer>",
        "<answer></answer>",
        "<think>It is 72</think><answer>unknown</answer>",
        "The answer is `73`.",
        "**Answer:**\n\n5\n\n(72 was my first guess.)",
        "### Final Answer\n5\n\n72 is even.",
        "So answer is consistent.\n**73**",
        r"\boxed{7\,2}",
        r"\boxed{7 2}",
        r"\boxed{\text{72 or 73}}",
        r"\boxed{\text{not 72}}",
        r"\boxed{72²}",
        r"\boxed{72½}",
        r"\boxed{\{72, 73\}}",
        r"\boxed{\text{Answer: } 73}",
        "\\boxed{\u221272}",
        r"\boxed{72 000}",
        "<answer>72 000</answer>",
        r"\boxed{√72}",
    ],
    "12345": [
        r"\boxed{12\,346}",
        r"\boxed{12\,34}",
        r"\boxed{12 345 678}",
        r"\boxed{12, 345}",
        r"\boxed{1\,2345}",
        r"\boxed{123\,45}",
    ],
    "0": [r"\boxed{12\,000}", r"\boxed{12 000}"],
    "12": [r"\boxed{12\,345}", "\\boxed{12\u2009345}"],
    "345": [r"\boxed{12\,345}", "The answer is 12\u2009345.", "The total is 12\u2009345 people."],
    "600": [r"\boxed{2\,300}", r"\boxed{2 300}"],
    r"\text{6 am}": [r"\boxed{\text{6 pm}}"],
}

SUM = "What is 23 + 45?"

# problem, gold, response, whether it is right
ECHOES = [
    *((SUM, "68", response, False) for response in (
        r"\boxed{23 + 45}", "23 + 45", "The answer is 23+45.", "#### 23 + 45", "<answer>23 + 45</answer>", "$23+45$",
        r"\boxed{(23)+(45)}", r"\boxed{45+23}", r"\boxed{23+45=}", r"\boxed{x = 23+45}",
        r"\boxed{23 + 45 \text{ apples}}", r"\boxed{23\,+\,45}",
    )),
    *((SUM, "68", response, True) for response in (
        r"\boxed{68}", r"\boxed{23+45=68}", r"\boxed{68 = 23+45}", "23 + 45 = 68", r"\boxed{20+48}",
    )),
    ("What is 23 plus 45?", "68", r"\boxed{23 + 45}", False),
    ("What is 5 times 3?", "15", r"\boxed{5 \times 3}", False),
    ("Divide: 144 divided by 2.", "72", r"\boxed{\frac{144}{2}}", False),
    (r"Evaluate $\dfrac{144}{2}$.", "72", r"\boxed{144/2}", False),
    ("How many?", "72", r"\boxed{144/2}", True),
    ("1,200 + 300", "1500", r"\boxed{1200+300}", False),
    ("What is $-5 + 8$?", "3", r"\boxed{-5+8}", False),
    ("Which is smaller, -5 or 8?", "-5", r"\boxed{-5}", True),
    ("What is |-5|?", "5", r"\boxed{|-5|}", False),
    (r"Compute $\sqrt{49}$.", "7", r"\boxed{\sqrt{49}}", False),
    ("What is $5!$?", "120", r"\boxed{5!}", False),
    ("How many bytes?", "1024", r"\boxed{2^{10}}", True),
    ("Add 13 + 4.", "7", r"\boxed{3+4}", True),  # not an expression of this problem
    (r"Simplify $\sqrt{50}$.", r"5\sqrt{2}", r"\boxed{\sqrt{50}}", False),
    (r"Simplify $\sqrt{50}$.", r"5\sqrt{2}", r"\boxed{5\sqrt2}", True),
    ("Which is larger, $2^3$ or $3^2$?", "3^2", r"\boxed{3^2}", True),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", r"\boxed{x^2-5x+6}", False),
    ("Factor $x^2-5x+6$.", "(x-2)(x-3)", r"\boxed{(x-3)(x-2)}", True),
    ("Write 6/8 in lowest terms.", "3/4", r"\boxed{\frac{6}{8}}", False),
    ("Write 6/8 in lowest terms.", "3/4", r"\boxed{\frac{3}{4}}", True),
    ("A coin falls on heads with 1/2.", r"\frac{1}{2}", r"\boxed{1/2}", True),
    (r"One root is $1+\sqrt{2}$.", r"1 \pm \sqrt{2}", r"\boxed{1+\sqrt2, 1-\sqrt2}", True),
    ("A line is y = 3x-7.", "y=3x-7", r"\boxed{3x-7}", True),
    ("Solve $2x+1>7$.", "x>3", r"\boxed{2x+1>7}", False),
]  # fmt: skip


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(timeout=60, workers=1) as verifier:
        yield verifier


@pytest.mark.parametrize(("table", "score"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_answers_in_other_clothes(verifier, table, score):
    rows = [(gold, text) for gold, texts in table.items() for text in texts]
    scores = verifier.score([gold for gold, _ in rows], [text for _, text in rows])
    assert [row for row, found in zip(rows, scores, strict=True) if found != score] == []


def test_an_expression_of_the_problem_given_back_scores_0(verifier):
    problems, golds, texts, right = zip(*ECHOES, strict=True)
    scores = verifier.score(golds, texts, problems)
    assert [row for row, score in zip(ECHOES, scores, strict=True) if score != row[3]] == []


def test_trl_passes_the_problem_as_text_or_chat(verifier):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": SUM}]}]
    texts = [r"\boxed{23+45}"] * 3
    assert verifier(prompts=[SUM, chat, "Add."], completions=texts, answer=["68"] * 3) == [0.0, 0.0, 1.0]
    assert verifier(texts, ["68"] * 3) == [1.0] * 3  # without a problem there is nothing to repeat
    with pytest.raises(ValueError, match="3 completions but 1 prompts"):
        verifier.score(["68"] * 3, texts, [SUM])


def test_number_reward_takes_numbers_only():
    table = {"68": ["68", "x = 68", "40+28 = 68"], r"\frac{3}{4}": ["3/4"], r"5\sqrt{2}": [r"\sqrt{50}"]}
    for gold, answers in table.items():
        for answer in answers:
            assert judge(parse_gold(gold), gold, rf"\boxed{{{answer}}}", numbers_only=True)[0], answer
    for gold, answer in [("68", "40+28"), ("1024", "2^{10}"), ("72", "144/2"), ("7", r"\sqrt{49}"), ("0.5", "1/2")]:
        assert judge(parse_gold(gold), gold, rf"\boxed{{{answer}}}")[0]
        assert not judge(parse_gold(gold), gold, rf"\boxed{{{answer}}}", numbers_only=True)[0], answer
    assert number_reward.__name__ == "number_reward" and number_reward.numbers_only


def test_list_golds_are_joined(verifier):
    texts = [r"\boxed{2, 1}", r"\boxed{1}"]
    assert verifier.score([["1", "2"]] * 2, texts) == verifier.score(["1, 2"] * 2, texts) == [1.0, 0.0]
    assert verifier(texts, [["1", "2"], ("1",)]) == [1.0, 1.0]
    with pytest.warns(UserWarning, match="cannot be parsed"):
        assert verifier.score([[]], texts[:1]) == [None]
