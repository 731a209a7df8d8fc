"""Tests of the maths reward: verdicts on a golden table, hostile strings, and every place it may be called from."""

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from support.adversarial_strings import HOSTILE, KINDS, cases

from hacpo_trl.maths import reward as rewards
from hacpo_trl.maths.grader import find_answer
from hacpo_trl.maths.reward import MathVerifier, math_reward

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz_rewards
from fuzz_rewards import fuzz

ROOT = Path(__file__).parents[2]
BOX, HASH, SAY = r"Thus the answer is $\boxed{%s}$.", "We add them up.\n#### %s", "The answer is %s."

# gold, answer, equal?
TABLE = [
    ("72", "72", True),
    ("72", "73", False),
    ("72", "-72", False),
    ("72", "72.0", True),
    ("72", r"\$72", True),
    ("72", "72 dollars", True),
    ("72", "72 km/h", True),
    ("72", r"72\text{ dollars}", True),
    ("1000", "1,000", True),
    ("58,500", "58500", True),
    (r"10,\!080", "10080", True),
    (r"\$32,\!348", "32348", True),
    (r"\frac{3}{4}", "3/4", True),
    (r"\frac{3}{4}", "0.75", True),
    (r"\frac{3}{4}", r"\dfrac{6}{8}", True),
    (r"\frac{3}{4}", r"\frac{4}{3}", False),
    (r"\frac43", r"\frac{4}{3}", True),
    (r"1\frac{4}{5}", r"\frac95", True),
    (r"\frac{1}{3}", "0.333333", True),
    (r"\frac{1}{3}", "0.33", False),
    ("-3/2", "-1.5", True),
    (r"10\%", r"10\%", True),
    (r"10\%", "10", True),
    (r"10\%", "0.1", True),
    ("62.5%", r"62.5\%", True),
    (r"10\%", r"11\%", False),
    ("(1,2)", "(1,2)", True),
    ("(1,2)", "(2,1)", False),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
    ("(3,4]", r"\left(3,4\right]", True),
    ("(3,4]", "(3,4)", False),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)", True),
    (r"x \in [-2,7]", "[-2,7]", True),
    ("1, 2", "2, 1", True),
    ("1, 2", r"1 \text{ and } 2", True),
    ("1, 2", r"\{1, 2\}", True),
    ("1, 2", "1, 3", False),
    ("1, 2", "1", False),
    ("2", "1, 2", False),
    (r"3 \pm 2\sqrt{2}", r"3+2\sqrt2, 3-2\sqrt2", True),
    ("5 cm", "5", True),
    (r"15\mbox{ cm}^2", "15", True),
    (r"90^\circ", "90", True),
    (r"1950^\circ C", "1950", True),
    (r"\text{Evelyn}", "Evelyn", True),
    (r"\text{Evelyn}", r"\text{Navin}", False),
    ("listen", "silent", False),
    (r"\text{(C)}", "C", True),
    (r"\text{(C)}", "(B)", False),
    (r"\begin{pmatrix} 1/5 \\ -2 \end{pmatrix}", r"\begin{bmatrix} 0.2 \\ -2 \end{bmatrix}", True),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", False),
    ("x^2-1", "(x-1)(x+1)", True),
    ("x^2-1", "x^2+1", False),
    (r"6 - 5i", r"-5i+6", True),
    ("x=5", "5", True),
    ("x=5", "y=5", False),
    ("y = 2x + 3", "2x+3", True),
    (r"k \geqslant 2", r"2 \le k", True),
    ("4.5e33", r"4.5 \times 10^{33}", True),
    (r"8.2 \times 10^{-19}", r"8.2 \cdot 10^{-19}", True),
    (r"8.2 \times 10^{-19}", r"1.2 \times 10^{-19}", False),
    ("52_8", "52_{8}", True),
    ("52_8", "52", True),
    ("52_8", "52_9", False),
    (r"$\frac{1}{2}$,$3$", r"3, \frac12", True),
]

# completion, score against the gold 72
COMPLETIONS = [
    ("", 0.0),
    ("I do not know.", 0.0),
    ("The answer is 72.", 1.0),
    ("**Answer:** 72", 1.0),
    ("answer = 72", 1.0),
    (r"\boxed{\approx 72}", 1.0),
    ("So x = 70 + 2 = 72", 1.0),
    (r"Hence \[ x = 72 \]", 1.0),
    ("She has 72 apples.", 1.0),
    ("5\n#### 72", 1.0),
    ("#### 72\nThe answer is 5.", 1.0),
    ("#### 5\n#### 72", 1.0),
    ("#### 72\n#### 5", 0.0),
    (r"\boxed{72}, which is more than 5.", 1.0),
    (r"\boxed{5} is wrong, the corrected value is \boxed{72}", 1.0),
    (r"\boxed{72} is wrong, the corrected value is \boxed{5}", 0.0),
    (r"\boxed{5}, \boxed{72}", 0.0),
    (r"\boxed{5} or \boxed{72}", 0.0),
    (r"\boxed{5, 6, 72}", 0.0),
    (r"\boxed{5 \text{ or } 72}", 0.0),
    (r"\boxed{5}" + "\n#### 72\nThe answer is 72.", 0.0),
    ("It is 5, 6, or 72.", 0.0),
    ("It is 5 or 72.", 0.0),
    ("The answer is 5, 6, 72.", 0.0),
    ("The answer is 5 or 72.", 0.0),
    (r"\boxed{72} \boxed{7", 1.0),  # cut off while repeating itself
    (r"\boxed{72", 0.0),
    (r"\fbox{72}", 1.0),
    (r"\boxed{\boxed{72}}", 1.0),
    ("x" * 100_000 + r"\boxed{72}", 1.0),
    (r"\boxed{72}" + "x" * 100_000, 0.0),  # beyond the part that is read
]


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(timeout=5.0, workers=2) as made:
        yield made


def running(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in open_stat(pid)]


def open_stat(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def pids_of(verifier):
    return [worker.process.pid for worker in verifier._live]


@pytest.mark.parametrize("form", [BOX, HASH, SAY], ids=["boxed", "hashes", "said"])
def test_golden_table(verifier, form):
    got = verifier.score([gold for gold, _, _ in TABLE], [form % answer for _, answer, _ in TABLE])
    wrong = [(row, score) for row, score in zip(TABLE, got, strict=True) if score != float(row[2])]
    assert not wrong


def test_which_answer_counts(verifier):
    got = verifier.score(["72"] * len(COMPLETIONS), [text for text, _ in COMPLETIONS])
    wrong = [(text[-60:], score) for (text, want), score in zip(COMPLETIONS, got, strict=True) if score != want]
    assert not wrong


def test_gold_comes_first(verifier):
    assert verifier.score(["1<x<2", "(1,2)"], [BOX % "(1,2)", BOX % "1<x<2"]) == [1.0, 0.0]


def test_several_boxes_make_a_list(verifier):
    texts = [r"$x=\boxed{1}$ or $x=\boxed{2}$", r"\boxed{2}, \boxed{1}", r"\boxed{1}", r"\boxed{1}, \boxed{1}"]
    assert verifier.score(["1, 2"] * 4, texts) == [1.0, 1.0, 0.0, 0.0]


def test_unscorable_golds_are_none_and_named_once(verifier):
    golds = ["", None, "t(0,4]", "t(0,4]", "9^{9^{9^{9}}}" * 1000, "3"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert verifier.score(golds, [BOX % "3"] * 6) == [None] * 5 + [1.0]
        verifier.score(golds, [BOX % "3"] * 6)
    texts = [str(warning.message) for warning in caught]
    assert sum("t(0,4]" in text for text in texts) == 1
    assert len(texts) == 3


def test_trl_call_forms(verifier):
    assert verifier.__name__ == math_reward.__name__ == "math_reward"
    text = BOX % r"\frac{3}{4}"
    talks = [
        text,
        [{"role": "assistant", "content": text}],
        [{"role": "assistant", "content": "5"}, {"role": "assistant", "content": text}],
        [{"role": "assistant", "content": [{"type": "text", "text": text}]}],
        [{"role": "assistant", "content": None}],
        [],
    ]
    logged = {}
    got = verifier(
        prompts=["?"] * 6, completions=talks, answer=["0.75"] * 6, level=[1] * 6, log_extra=logged.__setitem__
    )
    assert got == [1.0] * 4 + [0.0] * 2
    assert logged == {"parsed_answer": [r"\frac{3}{4}"] * 4 + [""] * 2}


def test_the_answers_that_were_found(verifier):
    """As written, from the same pass as the verdict: what a table of completions shows."""
    texts = [
        BOX % r"\frac{1}{2}",
        HASH % "1,000",
        "The answer is 3/4.",
        "She has 72 apples left",
        r"so $x^2-1$ it is",
        "?",
    ]
    logged = {}
    verifier(texts, ["1"] * 6, log_extra=logged.__setitem__)
    assert logged["parsed_answer"] == [r"\frac{1}{2}", "1,000", "3/4", "72", "x^2-1", ""]


def test_errors_say_what_to_do():
    with MathVerifier() as verifier:
        with pytest.raises(ValueError, match="needs an `answer` column"):
            verifier(["1"])
        with pytest.raises(ValueError, match="2 completions but 1 answers"):
            verifier(["1", "2"], ["1"])
        with pytest.raises(ValueError, match="must be a string or a list of messages"):
            verifier([[{"text": "1"}]], ["1"])
        assert not verifier._live  # nothing was started for any of this
    for wrong in ({"timeout": 0}, {"timeout": float("nan")}, {"workers": 0}, {"workers": 1.5}):
        with pytest.raises(ValueError, match="suits most"):
            MathVerifier(**wrong)


def test_hostile_strings_cost_no_more_than_the_limit_and_nothing_after():
    limit = 0.5
    with MathVerifier(timeout=limit, workers=1) as verifier:
        assert verifier.score(["72"], [BOX % "72"]) == [1.0]
        for text in [BOX.replace("%s", text) for text in HOSTILE] + HOSTILE[::2]:
            start = time.monotonic()
            assert verifier.score(["72"], [text]) == [0.0]
            assert time.monotonic() - start < limit + 10  # with the start of a worker on a busy machine
        assert verifier.timeouts > 0
        start = time.monotonic()
        assert verifier.score(["72"], ["7" * 10_000_000]) == [0.0]
        assert time.monotonic() - start < limit + 10
        verifier.timeout = 5.0
        assert verifier.score(["72", "72"], [BOX % "72", BOX % "73"]) == [1.0, 0.0]


def test_hostile_golds_are_not_scored():
    with MathVerifier(timeout=0.5, workers=1) as verifier, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for gold in HOSTILE:
            start = time.monotonic()
            assert verifier.score([gold], [BOX % "72"])[0] in (None, 0.0)
            assert time.monotonic() - start < 10


def test_a_worker_that_dies_is_replaced(verifier):
    verifier.score(["1"], ["1"])
    for worker in list(verifier._live):
        worker.process.kill()
    assert verifier.score(["1"] * 4, [BOX % "1", BOX % "2"] * 2) == [1.0, 0.0] * 2


def test_workers_1_and_4_agree(verifier):
    golds, texts = [row[0] for row in TABLE], [BOX % row[1] for row in TABLE]
    with MathVerifier(workers=1) as one, MathVerifier(workers=4) as four:
        assert one.score(golds, texts) == four.score(golds, texts)
        assert 1 == len(one._live) and 1 < len(four._live) <= 4


def test_close_ends_the_workers_and_a_later_call_starts_new_ones():
    verifier = MathVerifier(workers=2)
    verifier.score(["1"] * 4, ["1"] * 4)
    pids = pids_of(verifier)
    assert running(pids)
    verifier.close()
    assert not running(pids) and not verifier._live
    assert verifier.score(["1"], ["1"]) == [1.0]
    verifier.close()
    verifier.close()


def test_pickles_without_workers(verifier):
    verifier.score(["1"], ["1"])
    copy = pickle.loads(pickle.dumps(verifier))
    assert (copy.timeout, copy.workers, copy._live) == (5.0, 2, set())


def test_threads_share_the_workers(verifier):
    results = {}

    def call(i):
        results[i] = verifier.score(["1", "2"] * 5, [BOX % "1"] * 10)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: [1.0, 0.0] * 5 for i in range(6)}
    assert len(verifier._live) <= 2


def test_asyncio(verifier):
    async def main():
        here = verifier.score(["1"], [BOX % "1"])
        return here, await asyncio.gather(*(asyncio.to_thread(verifier.score, ["1"], [BOX % i]) for i in range(3)))

    assert asyncio.run(main()) == ([1.0], [[0.0], [1.0], [0.0]])


def _score_in_child(verifier, pipe):
    pipe.send((verifier.score(["1", "1"], [BOX % "1", BOX % "9^{9^{9^{9}}}"]), pids_of(verifier)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_daemonic_process(method):
    with MathVerifier(timeout=2.0, workers=2) as verifier:
        assert verifier.score(["1"], ["1"]) == [1.0]
        mine = pids_of(verifier)
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=_score_in_child, args=(verifier, theirs), daemon=True)
        child.start()
        assert ours.poll(60)
        got, pids = ours.recv()
        child.join(30)
        assert got == [1.0, 0.0]
        assert not set(pids) & set(mine)  # a child never talks to its parent's workers
        for _ in range(100):
            if not running(pids):
                break
            time.sleep(0.05)
        assert not running(pids)
        assert pids_of(verifier) == mine and verifier.score(["1"], ["1"]) == [1.0]


@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_workers_end_with_their_parent(end, tmp_path):
    code = (
        "import os; from hacpo_trl.maths.reward import math_reward\n"
        "assert math_reward(['1'], ['1']) == [1.0]\n"
        "print(*[worker.process.pid for worker in math_reward._live], flush=True)\n" + end
    )
    (tmp_path / "json.py").write_text("raise ImportError('a module in the current directory')")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=subprocess.PIPE, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 1
    for _ in range(100):
        if not running(pids):
            break
        time.sleep(0.05)
    assert not running(pids)


def test_workers_see_no_gpu_and_have_a_memory_limit(verifier):
    verifier.score(["1"], ["1"])
    pid = pids_of(verifier)[0]
    if not os.path.exists(f"/proc/{pid}/limits"):
        pytest.skip("needs /proc")
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"CUDA_VISIBLE_DEVICES=" in file.read().split(b"\0")
    with open(f"/proc/{pid}/limits") as file:
        limits = next(line for line in file if line.startswith("Max address space"))
    assert limits.split()[3] == str(4 << 30)


def test_import_is_light():
    code = "import sys, hacpo_trl.maths.reward; print([m for m in ('torch', 'trl', 'sympy') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == "[]"


def test_find_answer_is_linear():
    texts = [r"\boxed{" * 3000, r"\boxed{1}" * 2000, r"\boxed{1}" + " " * 18_000 + r"x\boxed{2}", "\\" * 20_000]
    texts += ["{" * 20_000, "answer " * 2800, "answer" + " " * 19_000, "1," * 9000, "1" * 20_000, "#" * 20_000]
    for text in texts:
        start = time.process_time()
        find_answer(text)
        assert time.process_time() - start < 1.0, text[:20]


def test_random_and_hostile_strings():
    """The first strings of benchmarks/fuzz_rewards.py."""
    result = fuzz(1500, seed=0, limit=1.0, progress=False)
    assert result["failures"] == [] and result["wrong_checks"] == 0
    assert sum(result["scores"].values()) == 1500 and set(result["scores"]) <= {"0.0", "1.0", "None"}
    assert result["grader_peak_mib"] < 4096
    assert {case.kind for case in cases(20_000)} == set(KINDS)


def test_the_fuzz_finds_what_is_wrong(monkeypatch):
    """A grader that dies, a call that raises and a string that takes too long are all counted."""
    exchange, calls = rewards._Worker.exchange, []

    def broken(self, message, seconds, lines):
        if message is not None and message["gold"] != "72":  # not the sane checks in between
            calls.append(message)
            if len(calls) % 4 == 1:  # the next call is the same string, for the second time
                self.process.kill()
            elif len(calls) % 4 == 3:
                raise OverflowError("too large")
        return exchange(self, message, seconds, lines)

    with monkeypatch.context() as patched:
        patched.setattr(rewards._Worker, "exchange", broken)
        result = fuzz(20, limit=5.0, progress=False)
    assert {failure["error"] for failure in result["failures"]} == {
        "the grader process died",
        "OverflowError: too large",
    }
    assert result["crashes"] == len(result["failures"]) and result["over_the_limit"] == 0
    monkeypatch.setattr(fuzz_rewards, "GRACE", -5.0)
    result = fuzz(3, limit=5.0, start=2, progress=False)
    assert result["over_the_limit"] == 3 and [f["number"] for f in result["failures"]] == [2, 3, 4]
