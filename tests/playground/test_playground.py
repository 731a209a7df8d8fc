"""Tests of the playground: task, tokenizers, agents, warm-up and shipped weights."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl.playground import (
    SHIPPED,
    SPECS,
    TASKS,
    AgentSpec,
    accuracy,
    answer_reward,
    build_agent,
    make_dataset,
    make_problems,
    make_split,
    save_agent,
    shipped_agent,
    warm_up,
)
from hacpo_trl.playground import agents as playground

SMALL = AgentSpec("small", "llama", "char", hidden_size=32, num_layers=1, num_heads=2, seed=7)
TEXTS = [
    "247 + 58 = ?\n",
    "7 + 8 + 0 = 15 ; 4 + 5 + 1 = 10 #### 105",
    "  two  spaces , and don't strip .\n\n tail ",
    "Let's see: x*y >= 3 (really?) #### -12 ####\n",
    "",
]


class FixedDraws:
    """Stands in for `random.Random` and hands out chosen digits counts and operands in turn."""

    def __init__(self, *values):
        self.values = list(values)

    def randint(self, low, high):
        value = self.values.pop(0)
        assert low <= value <= high
        return value


@pytest.mark.parametrize(
    ("task", "draws", "expression", "result", "solution"),
    [
        ("addition", (3, 247, 2, 58), "247 + 58", 305, "7 + 8 + 0 = 15 ; 4 + 5 + 1 = 10 ; 2 + 0 + 1 = 3"),
        ("addition", (2, 99, 2, 99), "99 + 99", 198, "9 + 9 + 0 = 18 ; 9 + 9 + 1 = 19"),
        ("addition", (2, 12, 3, 304), "12 + 304", 316, "2 + 4 + 0 = 6 ; 1 + 0 + 0 = 1 ; 0 + 3 + 0 = 3"),
        ("subtraction", (2, 58, 3, 247), "247 - 58", 189, "17 - 8 - 0 = 9 ; 14 - 5 - 1 = 8 ; 2 - 0 - 1 = 1"),
        ("subtraction", (3, 105, 3, 100), "105 - 100", 5, "5 - 0 - 0 = 5 ; 0 - 0 - 0 = 0 ; 1 - 1 - 0 = 0"),
        ("subtraction", (3, 200, 2, 99), "200 - 99", 101, "10 - 9 - 0 = 1 ; 10 - 9 - 1 = 0 ; 2 - 0 - 1 = 1"),
        ("multiplication", (3, 247, 8), "247 * 8", 1976, "7 * 8 + 0 = 56 ; 4 * 8 + 5 = 37 ; 2 * 8 + 3 = 19"),
    ],
)
def test_solutions_match_hand_calculation(task, draws, expression, result, solution):
    assert playground._MAKERS[task](FixedDraws(*draws), (2, 3)) == (expression, result, solution.split(" ; "))


def test_problem_fields():
    for problem in make_problems(TASKS, 200, seed=1):
        assert set(problem) == {"prompt", "answer", "solution", "task"}
        assert problem["prompt"].endswith(" = ?\n")
        left, sign, right = problem["prompt"].split()[:3]
        value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
        assert problem["answer"] == str(value)
        assert value >= 0
        assert problem["solution"].endswith(f" #### {value}")


def test_problems_depend_on_the_seed_only():
    random.seed(0)
    state = random.getstate()
    assert make_problems("addition", 20, seed=3) == make_problems(["addition"], 20, seed=3)
    assert make_problems("addition", 20, seed=3) != make_problems("addition", 20, seed=4)
    assert make_problems("addition", 20, seed=3)[:5] == make_problems("addition", 5, seed=3)
    assert random.getstate() == state


def test_digits_bound_the_operands():
    for problem in make_problems(("addition", "subtraction"), 200, seed=1, digits=(1, 2)):
        left, _, right = problem["prompt"].split()[:3]
        assert max(int(left), int(right)) <= 99
    with pytest.raises(ValueError, match="low"):
        make_problems("addition", 1, seed=0, digits=(3, 2))


@pytest.mark.parametrize("tasks", ["division", ["addition", "division"], []])
def test_unknown_task_names_the_known_ones(tasks):
    with pytest.raises(ValueError, match="addition, subtraction, multiplication"):
        make_problems(tasks, 1, seed=0)


def test_split_is_disjoint_across_seeds():
    train, held_out = make_split(("addition", "subtraction"), 3000, 300, seed=1)
    other_train, other_held_out = make_split(("addition", "subtraction"), 3000, 300, seed=2)
    assert (len(train), len(held_out)) == (3000, 300)
    assert len({problem["prompt"] for problem in held_out}) == 300
    assert train != other_train
    assert held_out != other_held_out
    seen = {problem["prompt"] for problem in train + other_train}
    assert not seen & {problem["prompt"] for problem in held_out + other_held_out}


def test_split_refuses_more_than_there_is():
    with pytest.raises(ValueError, match="too few different held-out problems"):
        make_split("addition", 10, 100, seed=0, digits=(1, 1))


def test_dataset_columns():
    problems = make_problems("addition", 5, seed=0)
    dataset = make_dataset(problems)
    assert dataset.column_names == ["prompt", "answer"]
    assert dataset[3] == {"prompt": problems[3]["prompt"], "answer": problems[3]["answer"]}


def test_reward_of_solutions_and_broken_ones():
    problems = make_problems(TASKS, 100, seed=2)
    answers = [problem["answer"] for problem in problems]
    solutions = [problem["solution"] for problem in problems]
    assert answer_reward(solutions, answers, task=None, trainer_state=None) == [1.0] * 100
    assert answer_reward([text + "0" for text in solutions], answers) == [0.0] * 100
    assert answer_reward([text.replace("####", "###") for text in solutions], answers) == [0.0] * 100
    chats = [[{"role": "assistant", "content": text}] for text in solutions]
    assert answer_reward(chats, answers) == [1.0] * 100


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("#### 12", 1.0),
        ("####12\n", 1.0),
        ("#### 13 #### 12", 1.0),
        ("#### 12 #### 13", 0.0),
        ("#### 12 ####", 0.0),
        ("#### 012", 0.0),
        ("#### 12 .", 0.0),
        ("12", 0.0),
        ("", 0.0),
        ("####", 0.0),
        ("\x00\ud800 #### ١٢", 0.0),
    ],
)
def test_reward_of_odd_texts(text, reward):
    assert answer_reward([text], ["12"]) == [reward]


def test_reward_of_empty_chats():
    assert answer_reward([[], [{"role": "assistant", "content": None}]], ["1", "1"]) == [0.0, 0.0]


@pytest.mark.parametrize("name", SPECS)
def test_tokenizer_round_trip(name):
    _, tokenizer = build_agent(SPECS[name])
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert not {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id} & set(ids)
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer.padding_side == "left"


def test_unknown_characters():
    _, char = build_agent(SPECS["tiny-char"])
    assert char("1é2")["input_ids"][1] == char.unk_token_id
    assert len(char("1é2")["input_ids"]) == 3
    _, bpe = build_agent(SPECS["tiny-bpe"])
    assert bpe.decode(bpe("1é2")["input_ids"]) == "1é2"


def test_tokenizers_differ():
    text = "247 + 58 = ?\n7 + 8 + 0 = 15 ; 4 + 5 + 1 = 10 ; 2 + 0 + 1 = 3 #### 305"
    ids = [tuple(build_agent(spec)[1](text)["input_ids"]) for spec in SPECS.values()]
    assert len(set(ids)) == len({len(one) for one in ids}) == len(SPECS)
    assert len(ids[0]) == len(text) > 1.5 * len(ids[1])
    assert len({spec.architecture for spec in SPECS.values()}) == len(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_build_is_reproducible_and_leaves_the_rng(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, tokenizer = build_agent(SPECS[name])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, _ = build_agent(SPECS[name])
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 256
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    for setting in ("do_sample", "temperature", "top_k", "top_p"):
        assert not getattr(model.generation_config, setting)


def test_build_depends_on_the_seed():
    one, _ = build_agent(SMALL)
    other, _ = build_agent(replace(SMALL, seed=8))
    assert not torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "rnn"}, "llama, olmo2, stablelm"),
        ({"tokenizer": "word"}, "bpe, char"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "259"),
        ({"num_heads": 3}, "multiple"),
    ],
)
def test_build_refuses_bad_specs(change, message):
    with pytest.raises(ValueError, match=message):
        build_agent(replace(SMALL, **change))


@pytest.mark.parametrize("name", SPECS)
def test_save_and_reload(name, tmp_path):
    model, tokenizer = build_agent(SPECS[name])
    path = save_agent(model, tokenizer, tmp_path / "agent")
    assert path == str(tmp_path / "agent")
    reloaded = AutoModelForCausalLM.from_pretrained(path)
    reloaded_tokenizer = AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert reloaded_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert reloaded_tokenizer.padding_side == "left"
    assert reloaded_tokenizer.pad_token_id == tokenizer.pad_token_id
    assert reloaded_tokenizer.eos_token_id == tokenizer.eos_token_id
    inputs = tokenizer(["247 + 58 = ?\n", "1 + 1 = ?\n"], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        logits = reloaded(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    assert torch.equal(logits, expected)


def test_save_notices_a_tokenizer_that_changes(tmp_path, monkeypatch):
    model, tokenizer = build_agent(SMALL)
    _, other = build_agent(SPECS["tiny-bpe"])
    monkeypatch.setattr(playground.AutoTokenizer, "from_pretrained", lambda path: other)
    with pytest.raises(RuntimeError, match="differently"):
        save_agent(model, tokenizer, tmp_path)


def test_warm_up_lowers_the_loss():
    model, tokenizer = build_agent(SMALL)
    model.eval()
    before = torch.get_rng_state()
    problems = make_problems("addition", 100, seed=0)
    settings = {"steps": 40, "batch_size": 16, "learning_rate": 5e-3, "seed": 0, "progress": False}
    losses = warm_up(model, tokenizer, problems, **settings)
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert not model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert warm_up(build_agent(SMALL)[0], tokenizer, problems, **settings) == pytest.approx(losses, rel=1e-3)
    with pytest.raises(ValueError, match="at least one"):
        warm_up(model, tokenizer, [], **settings)


def test_warm_up_trains_the_response_only():
    model, tokenizer = build_agent(SMALL)
    problem = make_problems("addition", 1, seed=0)[0]
    prompt = tokenizer(problem["prompt"])["input_ids"]
    response = tokenizer(problem["solution"])["input_ids"] + [tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(response)).item()
    losses = warm_up(model, tokenizer, [problem], steps=1, batch_size=3, learning_rate=0.0, seed=0, progress=False)
    assert losses == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_accuracy_leaves_rng_and_mode(sampled, training):
    model, tokenizer = build_agent(SMALL)
    model.train(training)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    problems = make_problems("addition", 8, seed=0)
    assert accuracy(model, tokenizer, problems, sampled=sampled, batch_size=4, max_new_tokens=8) == 0.0
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training is training


def test_accuracy_refuses_right_padding_and_no_problems():
    model, tokenizer = build_agent(SMALL)
    with pytest.raises(ValueError, match="at least one"):
        accuracy(model, tokenizer, [])
    tokenizer.padding_side = "right"
    with pytest.raises(ValueError, match="left"):
        accuracy(model, tokenizer, make_problems("addition", 1, seed=0))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_agents_are_in_the_documented_range(name):
    recipe = SHIPPED[name]
    path = shipped_agent(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    _, built = build_agent(SPECS[name])
    assert tokenizer(TEXTS[1])["input_ids"] == built(TEXTS[1])["input_ids"]
    assert model.dtype == torch.float32
    _, held_out = make_split(recipe.tasks, 0, 200, seed=123)
    sampled = accuracy(model, tokenizer, held_out, sampled=True, seed=1)
    assert recipe.sampled[0] <= sampled <= recipe.sampled[1]
    assert accuracy(model, tokenizer, held_out, sampled=True, seed=1, batch_size=200) == sampled
    greedy = accuracy(model, tokenizer, held_out)
    assert recipe.greedy[0] <= greedy <= recipe.greedy[1]
    assert abs(accuracy(model, tokenizer, held_out, batch_size=64) - greedy) <= 0.01


def test_unknown_shipped_agent_names_the_shipped_ones():
    with pytest.raises(ValueError, match="tiny-char, tiny-bpe"):
        shipped_agent("huge")


def test_shipped_size():
    sizes = [file.stat().st_size for file in Path(shipped_agent("tiny-char")).parent.rglob("*") if file.is_file()]
    assert max(sizes) < 2**20
    assert sum(sizes) < 2_500_000


def test_command_line_rebuilds(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SPECS, "tiny-char", replace(SMALL, name="tiny-char"))
    monkeypatch.setitem(SHIPPED, "tiny-char", replace(SHIPPED["tiny-char"], steps=2, batch_size=2))
    monkeypatch.setattr(playground, "_REPORT_PROBLEMS", 4)
    playground.main(["--out", str(tmp_path), "--name", "tiny-char"])
    assert "held-out accuracy greedy 0.000" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-char").dtype == torch.float16
    assert AutoTokenizer.from_pretrained(tmp_path / "tiny-char")("12")["input_ids"]
