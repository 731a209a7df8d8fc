"""Stop texts: responses end with the token that completes one, in training as in evaluations."""

import pytest
import torch
from support.fake_vllm_server import FakeClient, use_fake_servers
from support.tiny_teams import config, dataset, digit_reward, team
from test_responses import EXACT, tokenizer_of

from hacpo_trl import HACPOConfig
from hacpo_trl.cli.train import _parse, _task
from hacpo_trl.texts.stops import StopAtTexts, before_stop, cut_at_stop


def first_stop(tokenizer, prompt, ids, stops):
    """The slow way: as many tokens as it takes until a stop text is there."""
    start = len(tokenizer.decode(prompt, skip_special_tokens=True))
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode([*prompt, *ids[:n]], skip_special_tokens=True)[start:]
        if any(stop in text for stop in stops):
            return n
    return None


STOPS = ["\nProblem:", "\nQ", " x", "日", "12"]
RESPONSES = [
    " The sum is 5.\nProblem: 3\nProblem: 4",
    " 5",
    "\nProblem:",
    "\nProblem",
    " 日本\nQ",
    " the x",
    "",
    " 12 12",
]


@pytest.mark.parametrize("kind", EXACT)
def test_a_response_ends_with_the_token_that_completes_a_stop_text(kind):
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer("Problem: 2 + 3\nSolution:")["input_ids"]
    ids = [tokenizer("Solution:" + r)["input_ids"][len(tokenizer("Solution:")["input_ids"]) :] for r in RESPONSES]
    ids += [tokens + [tokenizer.eos_token_id] * 37 for tokens in ids]  # filled up, as generate does it
    for stops in ([stop] for stop in STOPS):
        expected = [first_stop(tokenizer, prompt, tokens, stops) for tokens in ids]
        assert cut_at_stop(tokenizer, [prompt] * len(ids), ids, stops) == expected
        for tokens, length in zip(ids, expected, strict=True):  # generate stops at the same token
            ends = [
                StopAtTexts(tokenizer, stops, len(prompt))(torch.tensor([prompt + tokens[:n]]), None).item()
                for n in range(1, len(tokens) + 1)
            ]
            assert (ends.index(True) + 1 if any(ends) else None) == length
    assert cut_at_stop(tokenizer, [prompt], ids[:1], []) == [None]


def test_the_text_before_the_first_of_them():
    assert before_stop("5\nQ: 3\nProblem:", ["\nProblem:", "\nQ:"]) == "5"
    assert before_stop("5\n", ["\nQ:"]) == "5\n"
    assert before_stop("5", []) == "5"


def test_a_stop_text_in_the_prompt_stops_nothing():
    tokenizer = tokenizer_of("qwen2")
    prompt = tokenizer("a\nProblem: b\nProblem:")["input_ids"]
    ids = tokenizer(" 5 is 12")["input_ids"]
    assert not StopAtTexts(tokenizer, ["\nProblem:"], len(prompt))(torch.tensor([prompt + ids]), None).any()
    assert cut_at_stop(tokenizer, [prompt], [ids], ["\nProblem:"]) == [None]


# -- in the trainer ---------------------------------------------------------------------------------------------------


def played(agent_folders, tmp_path, **changes):
    """One round, and its rollouts; `StopAtTexts` acts on what the tiny agents really write."""
    seen = {"rollouts": [], "graded": [], "encoded": []}

    def reward(completions, **kwargs):
        seen["graded"].append(list(completions))
        return digit_reward(completions)

    settings = {"max_rounds": 1, "max_completion_length": 24, "skip_silent_responses": False, **changes}
    trainer = team(agent_folders, ["char", "bpe"], config(tmp_path, **settings), reward)
    for agent in trainer.agents:

        def keep(inputs, sample=agent.sample):
            rollout = sample(inputs)
            seen["rollouts"].append(rollout)
            return rollout

        agent.sample = keep
    trainer.train()
    return trainer, seen


@pytest.mark.parametrize("sampler", ["generate", "vllm"])
@pytest.mark.parametrize("masking", [False, True])
def test_training_stops_at_the_texts(agent_folders, tmp_path, monkeypatch, sampler, masking):
    vllm = {}
    sent = []
    if sampler == "vllm":
        use_fake_servers(monkeypatch, {name: agent_folders[name] for name in ("char", "bpe")})
        generate = FakeClient.generate
        monkeypatch.setattr(
            FakeClient,
            "generate",
            lambda self, *a, **k: (sent.append(k["generation_kwargs"]), generate(self, *a, **k))[1],
        )
        urls = ["http://char:8000", "http://bpe:8000"]
        vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_urls": urls}
    stops = ["+", "1", " 2"]
    trainer, seen = played(
        agent_folders, tmp_path, stop_texts=stops, mask_truncated_completions=masking, log_completions=True,
        num_completions_to_print=0, **vllm,
    )  # fmt: skip
    assert sent == [{"stop": stops}] * len(sent) and bool(sent) == bool(vllm)
    stopped = 0
    for k, (agent, rollout) in enumerate(zip(trainer.agents, seen["rollouts"], strict=True)):
        tokenizer = agent._tokenizer
        texts = rollout.for_peers.texts
        for i, ids in enumerate(rollout.completion_ids):
            ids = ids.tolist()
            expected = first_stop(tokenizer, rollout.prompt_ids[i].tolist(), ids, stops)
            ended = ids[-1] in agent.eos_token_ids
            assert expected in (None, len(ids)), "nothing stands behind the stop text"
            assert rollout.finished[i] == (ended or expected is not None)
            assert rollout.masked[i] == (masking and not rollout.finished[i])
            assert rollout.for_peers.ended[i] == ended
            assert rollout.texts[i] == before_stop(texts[i], stops)
            stopped += expected is not None
        assert seen["graded"][k] == rollout.texts
        # the peer reads the stop text, and no end token behind it
        learner = trainer.agents[1 - k]
        for row in (row for batch in learner._plan for row in batch if row.source == k):
            written = learner._tokenizer.decode(row.completion_ids, skip_special_tokens=True)
            index = next((i for i, text in enumerate(texts) if text == written), None)
            if index is not None:
                ends = row.completion_ids[-1].item() in learner.eos_token_ids
                assert ends == rollout.for_peers.ended[index] or len(row.completion_ids) == 24
        log = trainer.state.log_history[0]
        done = sum(rollout.finished) / len(rollout)
        assert log[f"{agent.agent_name}/completions/clipped_ratio"] == pytest.approx(1 - done)
        lengths = [len(ids) for ids, end in zip(rollout.completion_ids, rollout.finished, strict=True) if end]
        name = f"{agent.agent_name}/completions/"
        assert log[name + "mean_terminated_length"] == pytest.approx(sum(lengths) / len(lengths))
        assert log[name + "max_terminated_length"] == max(lengths)
    assert stopped >= 4


def test_without_stop_texts_nothing_changes(agent_folders, tmp_path):
    weights = []
    for stops in (None, [], ["never written, by anybody"]):
        trainer, _ = played(agent_folders, tmp_path, stop_texts=stops)
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


def test_generate_is_the_models_own_again(agent_folders, tmp_path):
    trainer, _ = played(agent_folders, tmp_path, stop_texts=["1"])
    assert all("generate" not in vars(agent.model) for agent in trainer.agents)


def test_a_sampling_batch_of_its_own_length_stops_too(agent_folders, tmp_path):
    trainer, seen = played(agent_folders, tmp_path, stop_texts=["+", "1"], sampling_batch_size=3)
    for rollout in seen["rollouts"]:
        assert all(text.count("1") + text.count("+") <= 1 for text in rollout.for_peers.texts)


def test_evaluation_in_training_stops_at_the_texts(agent_folders, tmp_path):
    graded = []

    def reward(completions, **kwargs):
        graded.extend(completions)
        return digit_reward(completions)

    args = config(tmp_path, stop_texts=["1"], per_device_eval_batch_size=4)
    trainer = team(agent_folders, ["char"], args, reward, eval_dataset=dataset(4))
    trainer.evaluate()
    assert graded and not any("1" in text for text in graded)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["\nQ:", [""], ["a", "a"], [1]])
def test_what_are_no_stop_texts(wrong):
    with pytest.raises(ValueError, match="stop_texts=.* must be a list of different texts"):
        HACPOConfig("x", use_cpu=True, bf16=False, stop_texts=wrong)


@pytest.mark.parametrize("key", ["stop", "stop_strings"])
def test_stops_of_the_engines_own_are_refused(key):
    with pytest.raises(ValueError, match=f"may not set {key}: .* Use stop_texts"):
        HACPOConfig("x", use_cpu=True, bf16=False, generation_kwargs={key: ["\n"]})


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ([], ["\nProblem:"]),
        (["--stop_texts", r"\nQ:", "END"], ["\nQ:", "END"]),
        (["--stop_texts"], []),
        (["--prompt_template", "Q: {problem}\\nA:"], ["\nQ:"]),
    ],
)
def test_the_command_line_stops_plain_prompts_by_itself(agent_folders, tmp_path, options, stops):
    problems = tmp_path / "train.jsonl"
    problems.write_text('{"problem": "1 + 1", "answer": "2"}\n' * 4)
    script, args, model_args = _parse(
        ["--models", str(agent_folders["char"]), str(agent_folders["bpe"]), "--dataset", str(problems)]
        + ["--output_dir", str(tmp_path / "out"), "--use_cpu", "--bf16", "false", *options]
    )
    task = _task(script, args, model_args)
    assert args.stop_texts == list(task.form.stop) == stops
    assert all(c.stop_texts == stops for c in task.configs)
