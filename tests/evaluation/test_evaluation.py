"""Benchmarks: estimators worked by hand, tiny models on a file of additions, resuming, tables, and errors."""

import copy
import itertools
import json
import math
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hacpo_trl.cli.evaluate import main, model_names
from hacpo_trl.evaluation import answers
from hacpo_trl.evaluation.answers import evaluate_model, load_vllm, resolve_prompt_format, resolve_settings
from hacpo_trl.evaluation.scores import (
    EvaluationResult,
    average_at_k,
    group_answers,
    load_results,
    majority_at_k,
    paired_difference,
    pass_at_k,
    results_table,
)
from hacpo_trl.maths.benchmarks import BENCHMARKS
from hacpo_trl.maths.reward import MathVerifier, load_reward, math_reward, number_reward, rules_of
from hacpo_trl.playground import make_problems, shipped_agent
from hacpo_trl.texts.prompts import make_form

ROOT = Path(__file__).parents[2]
# The prompt that the playground's agents were warmed up on
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
SETTINGS = {"samples": 1, "temperature": 0.0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def additions():
    return [{"problem": p["prompt"].strip(), "answer": p["answer"]} for p in make_problems(["addition"], 12, 5)]


@pytest.fixture(scope="module")
def agent():
    folder = shipped_agent("tiny-char")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer


@pytest.fixture(scope="module")
def agent_folders(agent, tmp_path_factory):
    """Two agents with the template, as a user would have saved them."""
    root = tmp_path_factory.mktemp("models")
    for name in ("tiny-char", "tiny-bpe"):
        tokenizer = AutoTokenizer.from_pretrained(shipped_agent(name))
        tokenizer.chat_template = TEMPLATE
        AutoModelForCausalLM.from_pretrained(shipped_agent(name), dtype=torch.float32).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def additions_file(additions, tmp_path):
    (tmp_path / "additions.jsonl").write_text("\n".join(map(json.dumps, additions[:6])))
    return str(tmp_path / "additions.jsonl")


def result(correct, model="a", benchmark="toy", golds=None, **settings):
    """A result of given verdicts."""
    rows = []
    for i, row in enumerate(correct):
        rows.append(
            {
                "problem": f"p{i}",
                "answer": golds[i] if golds else str(i),
                "samples": ["?"] * len(row),
                "parsed": ["?"] * len(row),
                "correct": list(row),
                "votes": [0 if right else 1 for right in row],
                "tokens": [4] * len(row),
                "finished": [True] * len(row),
            }
        )
    n = len(correct[0])
    settings = {**SETTINGS, "samples": n, "temperature": float(n > 1), **settings}
    return EvaluationResult(model, benchmark, settings, rows)


# Estimators ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs hold the right one
        (4, 2, 2, 5 / 6),
        (4, 2, 3, 1.0),  # only 2 are wrong
        (5, 2, 2, 0.7),
        (16, 0, 16, 0.0),
        (16, 1, 16, 1.0),
        (1000, 1, 500, 0.5),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_choices():
    right = [True, True, False, False, False, False]
    for k in range(1, 7):
        choices = list(itertools.combinations(right, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_unbiased():
    # The exact expectation over c of Binomial(n, p), then a simulation; the plug-in estimate is too low
    n, k, p = 8, 4, 0.2
    true = 1 - (1 - p) ** k
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(chance)) == pytest.approx(true, abs=1e-12)
    assert sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chance)) < true - 0.03
    generator = random.Random(0)
    drawn = [pass_at_k(n, sum(generator.random() < p for _ in range(n)), k) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(true, abs=0.01)


def test_average_by_hand():
    mean, error = average_at_k([[1, 1], [1, 0], [0, 0]])
    assert mean == pytest.approx(0.5) and error == pytest.approx(0.5 / math.sqrt(3))
    mean, error = average_at_k([[True]])
    assert mean == 1.0 and math.isnan(error)


def test_average_does_not_depend_on_the_number_of_samples():
    # Repeating every answer adds no knowledge: neither the mean nor the error may move. The error that takes answers
    # for independent would halve with every fourfold repetition.
    rows = [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]
    once, repeated = average_at_k(rows), average_at_k([row * 16 for row in rows])
    assert once == pytest.approx(repeated)


@pytest.mark.parametrize("k", [1, 4, 16])
def test_average_and_its_error_are_right_for_every_k(k):
    # Many benchmarks of 40 problems of very different difficulty: the mean is the same for every k, and the error
    # says how much the means really scatter
    generator = random.Random(k)
    means, errors = [], []
    for _ in range(1500):
        difficulties = [generator.betavariate(0.3, 0.3) for _ in range(40)]
        mean, error = average_at_k([[generator.random() < p for _ in range(k)] for p in difficulties])
        means.append(mean)
        errors.append(error**2)
    mean = sum(means) / len(means)
    scatter = sum((m - mean) ** 2 for m in means) / (len(means) - 1)
    assert mean == pytest.approx(0.5, abs=0.01)
    assert sum(errors) / len(errors) == pytest.approx(scatter, rel=0.12)
    if k == 16:  # the naive error would be far too small
        assert 0.25 / (k * 40) < scatter / 5


@pytest.mark.parametrize(
    ("votes", "k", "expected"),
    [
        ([0], None, 1.0),
        ([1], None, 0.0),
        ([0, 0, 1], None, 1.0),
        ([0, 1, 1], None, 0.0),
        ([0, 1, 2], None, 1 / 3),  # a tie of three
        ([0, 0, 1, 1, 2], None, 0.5),
        ([1, 1, 2, 2, 0], None, 0.0),  # a tie without the right answer
        ([0, None, None], None, 1.0),  # silence is no vote
        ([None, None], None, 0.0),
        ([0, 1, 1, 1], 1, 0.25),
        ([0, 1, 1, 1], 2, 0.25),
        ([0, 0, 1, 1, 1, 1], 3, 0.5),  # votes 0 0 1 and 1 1 1
        ([0, 0, 1, 1, 1], 3, 1.0),  # the last two are left over
    ],
)
def test_majority_by_hand(votes, k, expected):
    assert majority_at_k(votes, k) == pytest.approx(expected)


def test_votes_are_groups_of_equal_answers():
    texts = [
        [
            r"\boxed{\frac12}",
            r"\boxed{0.25}",
            "#### 1/4",
            r"\boxed{0.5}",
            r"\boxed{7}",
            "",
            "I get 7 apples, I guess.",
        ],
        [r"\boxed{9}"] * 7,
    ]
    with MathVerifier() as verifier:
        parsed = {}
        flat = [text for row in texts for text in row]
        scores = verifier(flat, answer=["1/2"] * 7 + ["3"] * 7, log_extra=parsed.__setitem__)
        parsed = parsed["parsed_answer"]
        correct = [[bool(s) for s in scores[:7]], [bool(s) for s in scores[7:]]]
        votes = group_answers(texts, [parsed[:7], parsed[7:]], correct, verifier)
    assert votes == [[0, 1, 1, 0, 2, None, 2], [1] * 7]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k(4, 5, 1), "5 right answers of 4"),
        (lambda: pass_at_k(4, 2, 5), "k=5 must be a whole number from 1 to the 4"),
        (lambda: pass_at_k(4, 2, 0), "k=0"),
        (lambda: average_at_k([]), "at least one problem"),
        (lambda: average_at_k([[1], []]), "an answer to each"),
        (lambda: majority_at_k([], None), "k=0"),
        (lambda: majority_at_k([0, 1], 3), "k=3"),
        (lambda: results_table([]), "no results"),
        (lambda: results_table([result([[True]]), result([[True]])]), "Two results of a"),
        (lambda: paired_difference(result([[True]]), result([[True], [True]])), "same problems"),
        (lambda: paired_difference(result([[True]], golds=["7"]), result([[True]])), "1 of a's are not among"),
        (lambda: paired_difference(result([[None]]), result([[True]])), "no problem is scored"),
    ],
)
def test_errors_of_the_estimators(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Results -------------------------------------------------------------------------------------------------------------


def test_summary_and_file(tmp_path):
    one = result([[True, True, False, False], [False] * 4, [None] * 4])
    summary = one.summary()
    assert (summary["problems"], summary["unscored"], summary["average"]) == (2, 1, 0.25)
    assert list(summary["pass"]) == list(summary["majority"]) == ["2", "4"]
    assert summary["pass"]["2"][0] == pytest.approx(5 / 12) and summary["pass"]["4"][0] == 0.5
    assert summary["majority"]["4"][0] == pytest.approx(0.25)  # a tie, and nothing right
    one.problems[0]["samples"][0] = "cut inside a character: \ud83d"
    one.save(tmp_path / "deep" / "one.json")
    again = EvaluationResult.load(tmp_path / "deep" / "one.json")
    assert again.summary() == summary and again.problems[1:] == one.problems[1:]
    assert "NaN" not in (tmp_path / "deep" / "one.json").read_text()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.json"]  # no temporary file stays
    single = result([[True]])
    single.save(tmp_path / "single.json")
    assert json.loads((tmp_path / "single.json").read_text())["summary"]["average_error"] is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '{"results": [{"file": "missing.json"}]}'])
def test_files_that_are_no_results(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"\.json"):
        load_results(tmp_path / "x.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_results(tmp_path / "y.json")


def test_paired_difference_by_hand():
    before, after = result([[0], [0], [1], [1]]), result([[1], [0], [1], [1]], "b")
    difference, error = paired_difference(before, after)
    assert difference == 0.25 and error == pytest.approx(0.25)  # differences 1 0 0 0: s = 1/2, P = 4
    assert error < math.hypot(before.summary()["average_error"], after.summary()["average_error"])
    # The order of the problems and the number of answers do not matter
    after.problems.reverse()
    assert paired_difference(before, after) == (difference, pytest.approx(error))
    assert paired_difference(before, result([[1, 0], [0, 0], [1, 1], [1, 1]]))[0] == 0.125
    # Unscored problems leave both, repeated ones count as often as they stand there
    assert paired_difference(result([[0], [None], [1]]), result([[1], [1], [1]]))[0] == 0.5
    twice = [result([[0], [1], [1]], golds=["1", "1", "2"]), result([[1], [1], [1]], golds=["1", "1", "2"])]
    for one in twice:
        one.problems[1]["problem"] = "p0"
    assert paired_difference(*twice)[0] == pytest.approx(1 / 3)


def test_table():
    before = result([[False], [True]], "a")
    results = [result([[True], [True]], "a"), result([[True, False], [True, True]], "b|c")]
    results.append(result([[True], [False]], "a", "math_500", max_new_tokens=99))
    lines = results_table(results, [(before, results[0])]).splitlines()
    assert lines[0] == r"| benchmark (problems) | measure | a | b\|c |"
    assert lines[2] == "| toy (2) | greedy | 100.0 ± 0.0 |  |"
    assert lines[3] == "| toy (2) | avg@2 |  | 75.0 ± 25.0 |"
    assert lines[4] == "| toy (2) | pass@2 |  | 100.0 ± 0.0 |"
    assert lines[5] == "| toy (2) | maj@2 |  | 75.0 ± 25.0 |"
    assert lines[6] == "| MATH-500 (2) | greedy | 50.0 ± 50.0 |  |"
    assert lines[10] == "| toy | greedy | a | 50.0 ± 50.0 | 100.0 ± 0.0 | +50.0 ± 50.0 |"
    assert any("differ in temperature" in line for line in lines)
    full = results_table([r for r in results if r.model == "a"])
    assert "| mean |  | 75.0 ± 25.0 |" in full


def test_table_names_what_was_cut_or_left_out():
    one = result([[True], [None]])
    one.problems[0]["finished"] = [False]
    table = results_table([one])
    assert "50 % of the responses were cut at 8 tokens" in table and "1 problems are left out" in table


# Benchmarks ----------------------------------------------------------------------------------------------------------


def test_the_seven_benchmarks():
    assert list(BENCHMARKS) == ["math_500", "math", "gsm8k", "aime_2025", "amc_2023", "minerva", "olympiad_bench"]
    assert {name: b.samples for name, b in BENCHMARKS.items() if b.samples > 1} == {"aime_2025": 16}
    assert all(name == b.name and b.source.count("/") == 1 for name, b in BENCHMARKS.items())


def test_benchmarks_are_read_from_the_hub_as_they_stand_there(monkeypatch):
    rows = {
        "openai/gsm8k": {"question": "q", "answer": "5 + 5 = <<5+5=10>>10\n#### 10"},
        "DigitalLearningGmbH/MATH-lighteval": {"problem": "p", "solution": r"So \boxed{\frac12}.", "level": "1"},
        "Hothan/OlympiadBench": {"question": "q", "solution": ["long"], "final_answer": ["1", "2"]},
    }
    asked = []

    def load(source, name, split):
        asked.append((source, name, split))
        return [rows[source]]

    monkeypatch.setattr("hacpo_trl.maths.problems.load_dataset", load)
    answers = [BENCHMARKS[name].load()[0]["answer"] for name in ("gsm8k", "math", "olympiad_bench")]
    assert answers == ["10", r"\frac12", "1, 2"]
    assert asked[0] == ("openai/gsm8k", "main", "test")
    assert asked[2] == ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train")


def test_benchmarks_are_found_in_a_folder(tmp_path):
    (tmp_path / "math_test.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n{"problem": "x", "answer": "y"}')
    assert BENCHMARKS["math"].load(str(tmp_path), limit=1) == [{"problem": "1 + 1", "answer": "2"}]
    with pytest.raises(ValueError, match="no file for GSM8K: expected gsm8k.jsonl or gsm8k_test.jsonl"):
        BENCHMARKS["gsm8k"].load(str(tmp_path))


# Models --------------------------------------------------------------------------------------------------------------


def test_a_model_answers(agent, additions):
    model, tokenizer = agent
    options = {"instruction": "", "max_new_tokens": 64, "progress": False}
    state = torch.get_rng_state()
    one = evaluate_model(model, tokenizer, additions, **options)
    assert one.settings["prompt_format"] == "chat" and one.settings["temperature"] == 0
    assert one.summary()["average"] >= 0.4 and one.summary()["truncated"] < 0.2
    row = next(row for row in one.problems if row["correct"][0])
    assert row["parsed"] == [row["answer"]] and row["samples"][0].endswith(f"#### {row['answer']}")
    assert row["tokens"][0] == len(row["samples"][0]) + 1 and row["finished"] == [True]  # characters and the end token
    # Batches and their padding change nothing, and nothing is left behind
    other = evaluate_model(model, tokenizer, additions, batch_size=5, **options)
    assert [row["samples"] for row in other.problems] == [row["samples"] for row in one.problems]
    assert torch.equal(state, torch.get_rng_state())


def test_samples_of_a_model(agent, additions):
    model, tokenizer = agent
    model.generation_config.repetition_penalty = 9.0  # what a model's folder recommends does not count
    try:
        options = {"instruction": "", "max_new_tokens": 64, "samples": 4, "progress": False}
        one = evaluate_model(model, tokenizer, additions[:6], batch_size=7, **options)
        again = evaluate_model(model, tokenizer, additions[:6], batch_size=7, **options)
        other = evaluate_model(model, tokenizer, additions[:6], seed=1, **options)
    finally:
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    assert one.settings["temperature"] == 1.0 and one.problems == again.problems != other.problems
    assert any(len(set(row["samples"])) > 1 for row in one.problems)
    summary = one.summary()
    assert 0.1 < summary["average"] <= summary["pass"]["2"][0] <= summary["pass"]["4"][0]
    for row in one.problems:
        assert [vote == 0 for vote in row["votes"]] == row["correct"]


def test_plain_prompts_end_before_the_next_problem(agent, additions):
    model, tokenizer = agent
    options = {"instruction": "", "prompt_format": "plain", "max_new_tokens": 40, "progress": False}
    free = evaluate_model(model, tokenizer, additions[:4], stop=[], **options)
    text = free.problems[0]["samples"][0]
    stop = text[6:9]
    stopped = evaluate_model(model, tokenizer, additions[:4], stop=[stop], **options).problems[0]
    assert stopped["samples"] == [text[: text.index(stop)]] and stopped["finished"] == [True]
    assert stopped["tokens"][0] == text.index(stop) + 3 < free.problems[0]["tokens"][0]
    assert resolve_settings(tokenizer, prompt_format="plain")["stop"] == ["\nProblem:"]
    assert resolve_settings(tokenizer)["stop"] == []


def test_arguments_of_the_template(agent, additions):
    tokenizer = AutoTokenizer.from_pretrained(shipped_agent("tiny-char"))
    tokenizer.chat_template = "{% if think %}+{% endif %}" + TEMPLATE
    form = make_form("chat", chat_template_kwargs={"think": True}, system_prompt="Hi", instruction="")
    ids = answers.prompt_ids(tokenizer, additions[:1], form)
    assert tokenizer.decode(ids[0]) == f"+Hi\n{additions[0]['problem']}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples=0"),
        ({"samples": True}, "samples=True"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 0, "samples": 4}, "Greedy decoding gives 4 equal answers"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompt_format": "poem"}, "prompt_format='poem' is unknown"),
        ({"stop": "abc"}, "stop='abc'"),
        ({"stop": [""]}, "not empty"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"problems": []}, "no problems"),
        ({"problems": [{"problem": "1 + 1"}]}, "Problem 0 needs"),
        (
            {"problems": [{"problem": "1" * 600, "answer": "1"}]},
            "agent 'model': prompt 0 of .* reads 512",
        ),
    ],
)
def test_errors_of_the_settings(agent, options, message):
    model, tokenizer = agent
    problems = options.pop("problems", [{"problem": "1 + 1 = ?", "answer": "2"}])
    with pytest.raises(ValueError, match=message):
        evaluate_model(model, tokenizer, problems, **options)


def test_a_chat_needs_a_template():
    tokenizer = AutoTokenizer.from_pretrained(shipped_agent("tiny-bpe"))
    assert resolve_prompt_format(tokenizer) == "plain"
    with pytest.raises(ValueError, match="chat template"):
        resolve_prompt_format(tokenizer, "chat")


# vLLM ----------------------------------------------------------------------------------------------------------------


def test_vllm_is_asked_for_the_same(agent, additions, monkeypatch):
    """A stand-in for the engine; what it is given and how its answers are read."""
    _, tokenizer = agent
    asked = []

    class Engine:
        def generate(self, prompts, params, use_tqdm):
            asked.append((prompts, params))
            outs = [[("#### 1", "stop"), ("#### 2", "length")] for _ in prompts]
            one = types.SimpleNamespace
            return [
                one(outputs=[one(text=t, token_ids=[1, 2, 3], finish_reason=why) for t, why in out]) for out in outs
            ]

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(SamplingParams=dict, LLM=lambda **kw: Engine()))
    problems = [{**additions[0], "answer": "2"}, {**additions[1], "answer": "7"}]
    one = evaluate_model(load_vllm("model"), tokenizer, problems, samples=2, instruction="", top_p=0.9)
    prompts, params = asked[0]
    assert tokenizer.decode(prompts[0]["prompt_token_ids"]) == additions[0]["problem"] + "\n"
    assert {k: params[k] for k in ("n", "temperature", "top_p", "max_tokens")} == {
        "n": 2,
        "temperature": 1.0,
        "top_p": 0.9,
        "max_tokens": 2048,
    }
    assert one.problems[0]["correct"] == [False, True] and one.problems[0]["finished"] == [True, False]
    assert one.summary()["average"] == 0.25 and one.problems[1]["votes"] == [1, 2]


def test_vllm_is_refused_with_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="needs the package vllm.*use the engine 'transformers'"):
        load_vllm("model")
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=None))
    (tmp_path / "adapter_config.json").write_text("{}")
    match = r"is an adapter.*hacpo_trl.merge_adapter\(.*-merged'\), or use the engine 'transformers'"
    with pytest.raises(ValueError, match=match):
        load_vllm(str(tmp_path))


# Command line --------------------------------------------------------------------------------------------------------


def run(*arguments):
    return main([*map(str, arguments), "--instruction", "", "--max_new_tokens", "48", "--no_progress"])


def test_side_by_side_resumed_and_compared(agent_folders, additions_file, tmp_path, capsys, monkeypatch):
    out, models = tmp_path / "out", [agent_folders / "tiny-char", agent_folders / "tiny-bpe"]
    common = ["--benchmarks", additions_file, "--output_dir", out]
    assert run(*models, *common) == 0
    table = (out / "results.md").read_text()
    assert (
        "| benchmark (problems) | measure | tiny-char | tiny-bpe |" in table and "| additions (6) | greedy |" in table
    )
    overview = json.loads((out / "results.json").read_text())["results"]
    files = [out / entry["file"] for entry in overview]
    assert [entry["model"] for entry in overview] == ["tiny-char", "tiny-bpe"] and all(f.is_file() for f in files)
    stored = EvaluationResult.load(files[0])
    assert stored.settings["engine"] == "transformers" and len(stored.problems) == 6
    capsys.readouterr()

    # The same again loads no model; other settings, or a folder that was written anew, do
    with monkeypatch.context() as patch:
        patch.setattr("hacpo_trl.cli.evaluate._load_model", lambda *_: pytest.fail("the model is not needed"))
        run(*models, *common)
        assert capsys.readouterr().out.count("already in") == 2 and (out / "results.md").read_text() == table
    run(models[0], *common, "--limit", 3)
    assert "already in" not in capsys.readouterr().out
    files[0].write_text(files[0].read_text()[:-20])  # as a full disk would leave it
    os.utime(models[1] / "model.safetensors", ns=(1, 1))
    run(*models, *common)
    assert "already in" not in capsys.readouterr().out
    run(models[0], *common, "--overwrite")
    assert "already in" not in capsys.readouterr().out

    # Before and after: one base for all, and a file
    run(models[0], *common, "--before", models[1])
    table = (out / "results.md").read_text()
    assert "difference ± paired s.e." in table and "| additions | greedy | tiny-bpe → tiny-char |" in table
    run(models[1], *common, "--before", out / "results.json")
    assert "tiny-char → tiny-bpe" in (out / "results.md").read_text()
    with pytest.raises(SystemExit, match="Evaluate both on the same problems"):
        run(models[0], *common, "--limit", 3, "--before", files[1])


def test_the_script(agent_folders, additions_file, tmp_path):
    command = [sys.executable, ROOT / "examples" / "evaluate_math.py", agent_folders / "tiny-char", "--limit", "2"]
    command += ["--benchmarks", f"gsm8k={additions_file}", "--samples", "2", "--max_new_tokens", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "| GSM8K (2) | avg@2 |" in done.stdout and "answer" in done.stderr
    assert (tmp_path / "evaluation" / "results.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Which models"),
        (["{m}", "--names", "a", "b"], "2 names for 1 models"),
        (["{m}", "{m}", "--names", "a", "a"], "must differ"),
        (["{m}", "--limit", "0"], "at least 1"),
        (["{m}", "--benchmarks", "trivia"], "neither a benchmark nor a file"),
        (["{m}", "--benchmarks", "{f}", "{f}"], "twice"),
        (["{m}", "--benchmarks", "gsm8k", "--data_dir", "{d}"], "no file for GSM8K"),
        (["{m}", "--benchmarks", "{f}", "--samples", "4", "--temperature", "0"], "additions: Greedy decoding"),
        (["{m}", "--benchmarks", "{f}", "--chat_template_kwargs", "[]"], "expected an object"),
        (["{m}", "--benchmarks", "{f}", "--engine_kwargs", "{"], "no JSON"),
        (["{m}", "--benchmarks", "{f}", "--before", "x", "y"], "one for each, or one for all"),
        (["{m}", "--benchmarks", "{f}", "--before", "x", "y.json"], "not both"),
        (["{m}", "--benchmarks", "{f}", "--before", "y.json"], "y.json: cannot be read"),
        (["{d}/nothing", "--benchmarks", "{f}"], "nothing: there is no such folder"),
        (["{m}", "--benchmarks", "{f}", "--before", "{d}/nothing"], "nothing: there is no such folder"),
        (["{m}/config.json", "--benchmarks", "{f}"], "config.json: is a file; give the folder"),
        (["{m}", "--benchmarks", "gsm8k={f}l"], "there is no such file"),
        (["{m}", "--benchmarks", "gsm8k", "--data_dir", "typo"], "typo: there is no such file or folder"),
        (["{m}", "--reward_funcs", "maths"], "'maths' is unknown; use math_reward"),
        (["{m}", "--reward_funcs", "math_reward", "--reward_weights", "1", "2"], "2 numbers for 1 reward functions"),
        (["{m}", "--benchmarks", "typo.jsonl"], "typo.jsonl: there is no such file"),
        (["{m}", "--benchmarks", "{f}", "--engine", "vllm"], "needs the package vllm"),
    ],
)
def test_errors_of_the_command_line(arguments, message, agent_folders, additions_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    places = {"{m}": str(agent_folders / "tiny-char"), "{f}": additions_file, "{d}": str(tmp_path)}
    for place, value in places.items():
        arguments = [argument.replace(place, value) for argument in arguments]
    with pytest.raises(SystemExit, match=message):
        run(*arguments, "--output_dir", tmp_path / "out")


REWARDS = """
def even(completions, log_extra, **columns):
    ends = [chat[0]["content"][-1:] for chat in completions]
    log_extra("parsed_answer", ends)
    return [float(end in "02468") for end in ends]

async def long(completions, answer, **columns):
    return [len(chat[0]["content"]) / 100 for chat in completions]
"""


def test_reward_functions_of_ones_own_judge_as_in_training(
    agent_folders, additions_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS)
    common = [agent_folders / "tiny-char", "--benchmarks", additions_file, "--output_dir", "out", "--reward_funcs"]
    options = ["mine.py:even", "mine.py:long", "--reward_weights", "2", "0.5"]
    assert run(*common, *options) == 0
    (path,) = (tmp_path / "out").glob("*--*.json")
    result = EvaluationResult.load(path)
    assert result.settings["reward"] == "2 x even + 0.5 x long"
    for row in result.problems:
        (text,) = row["samples"]
        assert row["rewards"] == [pytest.approx(2 * (text[-1] in "02468") + 0.5 * len(text) / 100)]
        assert row["parsed"] == [text[-1]] and row["correct"] == [True]  # a sum above 0 is right
    assert "mean reward" in (tmp_path / "out" / "results.md").read_text()
    capsys.readouterr()
    run(*common, "mine.py:even")
    assert "already in" not in capsys.readouterr().out and len(list((tmp_path / "out").glob("*--*.json"))) == 2
    run(*common, "mine.py:even")
    assert "already in" in capsys.readouterr().out


def test_what_was_judged_by_other_rules_is_judged_again(agent_folders, additions_file, tmp_path, capsys, monkeypatch):
    arguments = [agent_folders / "tiny-char", "--benchmarks", additions_file, "--output_dir", tmp_path]
    run(*arguments)
    (path,) = tmp_path.glob("*--*.json")
    stored = json.loads(path.read_text())
    assert stored["settings"]["reward"] == "math_reward" and stored["settings"]["rules"] == rules_of([math_reward])
    del stored["settings"]["rules"]  # as release 0.1.0 wrote it
    stored["problems"][0]["correct"] = [None]
    path.write_text(json.dumps(stored))
    capsys.readouterr()
    run(*arguments)
    said = capsys.readouterr().out
    assert f"{path} was judged by other rules" in said and "already in" not in said
    assert EvaluationResult.load(path).problems[0]["correct"] != [None]


def test_rules_follow_the_source(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "other.py").write_text(REWARDS.replace("100", "10"))
    one, again, two, other = (
        rules_of([load_reward(f"{tmp_path}/{name}")])
        for name in ("mine.py:even", "mine.py:even", "mine.py:long", "other.py:even")
    )
    assert one == again and len({one, two, other, rules_of([math_reward]), rules_of([number_reward])}) == 5
    assert rules_of([MathVerifier(workers=1)]) == rules_of([math_reward])
    assert rules_of([len]) != rules_of([max])


def test_prompts_are_checked_before_anything_is_answered(agent):
    model, tokenizer = agent
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('no') }}{% endif %}{{ m['content'] }}"
        "{% endfor %}"
    )
    problems = [{"problem": text, "answer": "2"} for text in ("1 + 1 = ?", "bad", "1 + 1 = ?")]
    options = {"model_name": "me", "benchmark": "sums", "instruction": "", "progress": False}
    with pytest.raises(ValueError, match="The chat template of agent 'me' cannot render prompt 1 of sums"):
        evaluate_model(model, tokenizer, problems, prompt_format="chat", **options)
    room = model.config.max_position_embeddings
    long = [problems[0], {"problem": "1 " * room, "answer": "2"}]
    with pytest.raises(ValueError, match=rf"agent 'me': prompt 1 of sums has \d+ tokens, but its model reads {room}"):
        evaluate_model(model, tokenizer, long, prompt_format="plain", **options)
    with pytest.raises(ValueError, match="sums: prompt 1 is empty"):
        evaluate_model(
            model, tokenizer, [problems[0], {"problem": "", "answer": "2"}], prompt_format="plain",
            prompt_template="{problem}", **options,
        )  # fmt: skip
    with pytest.raises(ValueError, match="sums has the column 'completions', but TRL gives"):
        evaluate_model(model, tokenizer, [{**problems[0], "completions": 1}], prompt_format="plain", **options)


def test_names_of_models():
    assert model_names(["out/a", "Qwen/Qwen3-4B"]) == ["a", "Qwen3-4B"]
    assert model_names(["x/a/", "y/a", "b"]) == ["x/a", "y/a", "b"]
    assert model_names(["1/x/a", "2/x/a"]) == ["1/x/a", "2/x/a"]
