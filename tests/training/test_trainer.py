"""The trainer on tiny agents: what is graded, exchanged, logged, evaluated and refused."""

import asyncio
import copy
import functools
import logging
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from support.tiny_teams import CHAT_TEMPLATE, all_weights, config, dataset, digit_reward, team, weights
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from hacpo_trl import HACPOTrainer, MathVerifier, merge_adapter
from hacpo_trl.reporting.round_progress import RoundProgress
from hacpo_trl.training.loading import fix_absolute_positions
from hacpo_trl.training.offload import resident_bytes

PAIR = ["char", "bpe"]


class Recorder:
    """A reward function that remembers what it was asked."""

    __name__ = "recorder"

    def __init__(self, reward=digit_reward):
        self.calls = []
        self.reward = reward

    def __call__(self, completions, completion_ids, prompts, **kwargs):
        self.calls.append({"completions": completions, "ids": completion_ids, "prompts": prompts, **kwargs})
        return self.reward(completions)


def test_three_agents_grade_each_response_once_and_learn_from_all(agent_folders, tmp_path):
    recorder = Recorder()
    trainer = team(agent_folders, ["char", "bpe", "mini"], config(tmp_path, skip_silent_responses=False), recorder)
    before = all_weights(trainer)
    trainer.train()
    assert len(recorder.calls) == 3 * 2  # agents x rounds
    assert all(len(call["completions"]) == 8 for call in recorder.calls)
    assert len({id(agent.model) for agent in trainer.agents}) == 3
    for old, new in zip(before, all_weights(trainer), strict=True):
        assert (old - new).abs().max() > 1e-5
    for k, agent in enumerate(trainer.agents):
        rows = [row for batch in agent._plan for row in batch]
        assert sorted(row.source for row in rows) == [0] * 8 + [1] * 8 + [2] * 8
        assert [row.source for row in rows[:8]] == [k] * 8  # own first
        # peers are mixed: the later, narrower clip ranges do not always meet the same one
        assert len({row.source for row in rows[8:16]}) == 2


def test_own_responses_keep_their_exact_ids(agent_folders, tmp_path):
    recorder = Recorder()
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1), recorder)
    trainer.train()
    for k, agent in enumerate(trainer.agents):
        own = sorted(row.completion_ids.tolist() for batch in agent._plan for row in batch if row.source == k)
        assert own == sorted(recorder.calls[k]["ids"])


def test_all_agents_answer_the_same_prompts(agent_folders, tmp_path):
    recorder = Recorder()
    trainer = team(agent_folders, PAIR, config(tmp_path), recorder, dataset(16, level="easy"))
    trainer.train()
    first, second = recorder.calls[0], recorder.calls[1]
    assert first["prompts"] == second["prompts"] and len(set(first["prompts"])) == 2
    assert first["level"] == ["easy"] * 8 and first["answer"] == second["answer"]


def test_responses_can_be_sampled_in_parts(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1, sampling_batch_size=3))
    sizes = []
    for agent in trainer.agents:
        generate = agent.model.generate

        def counted(*args, generate=generate, **kwargs):
            sizes.append(len(kwargs["input_ids"]))
            return generate(*args, **kwargs)

        agent.model.generate = counted
    trainer.train()
    assert sizes == [3, 3, 2] * 2
    assert all(
        len([r for b in agent._plan for r in b if r.source == k]) == 8 for k, agent in enumerate(trainer.agents)
    )


def test_micro_batches_wait_on_the_cpu_and_are_trimmed(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1, per_device_train_batch_size=2))
    seen = []
    for agent in trainer.agents:
        compute = agent._compute_loss

        def looked_at(model, inputs, compute=compute):
            seen.append(inputs)
            return compute(model, inputs)

        agent._compute_loss = looked_at
    trainer.train()
    assert len(seen) >= 8
    for inputs in seen:
        assert inputs["completion_mask"].sum(0).min() > 0 and inputs["prompt_mask"].sum(0).min() > 0
    rows = [row for batch in trainer._plan for row in batch]
    assert all(row.completion_ids.device.type == "cpu" for row in rows)


def test_logs_of_agents_and_pairs(agent_folders, tmp_path):
    recorder = Recorder()
    trainer = team(
        agent_folders, PAIR, config(tmp_path, peer_clip_delta=0.9, beta=0.1, max_rounds=1, num_iterations=2), recorder
    )
    trainer.train()
    history = trainer.state.log_history
    first = history[0]
    rewards = [torch.tensor(digit_reward(call["completions"])) for call in recorder.calls]
    for name, values in zip(PAIR, rewards, strict=True):
        assert first[f"{name}/reward"] == pytest.approx(values.mean().item())
        assert first[f"{name}/capability"] == pytest.approx((values > 0).double().mean().item())
        for key in ("loss", "grad_norm", "learning_rate", "entropy", "kl", "completions/mean_length"):
            assert f"{name}/{key}" in first
        for key in ("clip_ratio/low_mean", "clip_ratio/high_mean", "ratio_mean"):
            assert f"{name}/{key}" in first
    assert first["reward"] == pytest.approx(torch.stack(rewards).mean().item())
    assert first["loss"] == pytest.approx((first["char/loss"] + first["bpe/loss"]) / 2)
    capability = {name: first[f"{name}/capability"] for name in PAIR}
    assert first["pair/bpe->char/coefficient"] == pytest.approx(capability["bpe"] / capability["char"])
    assert first["pair/char->bpe/coefficient"] == pytest.approx(capability["char"] / capability["bpe"])
    assert len(history) == 9  # 2 passes x 2 sources x 2 updates, and the summary
    for step, entry in enumerate(history[:-1]):
        learning_from_peers = step % 4 >= 2
        for pair in ("pair/bpe->char", "pair/char->bpe"):
            for key in ("ratio_mean", "ratio_max", "effective_sample_size", "no_gradient", "below_range"):
                assert (f"{pair}/{key}" in entry) == learning_from_peers
            if f"{pair}/ratio_mean" in entry:
                assert 0 < entry[f"{pair}/effective_sample_size"] <= 1 + 1e-9
                assert entry[f"{pair}/ratio_max"] >= entry[f"{pair}/ratio_mean"]
    assert {"time/sampling", "time/grading", "time/reencoding", "time/updating"} <= set(first)
    assert "time/sampling" not in history[1] and history[1]["time/updating"] > 0
    assert first["time/updating"] == pytest.approx(first["char/time/updating"] + first["bpe/time/updating"])


@pytest.mark.parametrize("method", ["gspo", "grpo"])
def test_the_baselines_share_nothing(agent_folders, tmp_path, method):
    """Side by side gives every agent what it gets alone, but for the random numbers; no pair is logged."""
    trainer = team(agent_folders, PAIR, config(tmp_path, method=method, max_rounds=1))
    trainer.train()
    assert all(row.source == k for k, agent in enumerate(trainer.agents) for b in agent._plan for row in b)
    assert not [key for entry in trainer.state.log_history for key in entry if key.startswith("pair/")]
    assert trainer.state.global_step == 2
    alone = team(agent_folders, ["char"], config(tmp_path, method=method, max_rounds=1))
    alone.train()
    # The leader draws first, so that its responses are those of a lone agent; the order of its rows is drawn later
    assert sorted(r.completion_ids.tolist() for b in alone._plan for r in b) == sorted(
        r.completion_ids.tolist() for b in trainer._plan for r in b
    )


def test_a_search_for_settings_is_refused():
    match = (
        "hyperparameter_search is not supported.*HACPOTrainer from the models' paths for every trial.*'eval_reward'"
    )
    with pytest.raises(ValueError, match=match):
        HACPOTrainer.hyperparameter_search(None, n_trials=2)


def test_settings_of_single_agents(agent_folders, tmp_path):
    overrides = {"bpe": {"learning_rate": 1e-9, "max_grad_norm": 1e-3, "lr_scheduler_type": "linear", "beta": 0.0}}
    trainer = team(agent_folders, PAIR, config(tmp_path, agent_overrides=overrides, beta=0.1, skip_idle_updates=False))
    before = all_weights(trainer)
    norms = []
    clip = trainer.agents[1]._clip_grad_norm

    def clipped(model):
        norm = clip(model)
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        return norm

    trainer.agents[1]._clip_grad_norm = clipped
    trainer.train()
    after = all_weights(trainer)
    assert (after[0] - before[0]).abs().max() > 1e-4
    assert 0 < (after[1] - before[1]).abs().max() < 1e-7
    assert max(norms) == pytest.approx(1e-3, rel=1e-2)
    rates = [entry["bpe/learning_rate"] for entry in trainer.state.log_history if "bpe/learning_rate" in entry]
    assert rates[0] == pytest.approx(1e-9) and rates[-1] == pytest.approx(1e-9 / 8)
    assert "bpe/kl" not in trainer.state.log_history[0] or trainer.state.log_history[0]["bpe/kl"] == 0.0
    assert trainer.agents[1].ref_model is None and trainer.agents[0].ref_model is not None


def test_optimizers_once_for_all_and_per_agent(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1), optimizers=(torch.optim.SGD, {"lr": 0.1}))
    trainer.train()
    assert all(isinstance(agent.optimizer.optimizer, torch.optim.SGD) for agent in trainer.agents)

    model = AutoModelForCausalLM.from_pretrained(agent_folders["char"])
    own = torch.optim.Adagrad(model.parameters(), lr=0.01)
    trainer = HACPOTrainer(
        [model, agent_folders["bpe"]],
        digit_reward,
        config(tmp_path, max_rounds=1),
        dataset(),
        optimizers=[(own, None), None],
    )
    trainer.train()
    assert trainer.optimizer.optimizer is own
    assert isinstance(trainer.agents[1].optimizer.optimizer, torch.optim.AdamW)


def test_rewards_async_weighted_and_from_a_model(agent_folders, tmp_path):
    async def slow(completions, **kwargs):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    tokenizer = AutoTokenizer.from_pretrained(agent_folders["char"])
    judge_config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    judge_config._name_or_path = "judges/judge"
    judge = LlamaForSequenceClassification(judge_config)
    trainer = team(
        agent_folders,
        PAIR,
        config(tmp_path, reward_weights=[1.0, 0.5, 0.25], max_rounds=1, max_reward=5.0),
        [digit_reward, slow, judge],
        reward_processing_classes=[None, None, tokenizer],
    )
    trainer.train()
    first = trainer.state.log_history[0]
    for name in PAIR:
        assert first[f"{name}/rewards/slow/mean"] == 2.0
        expected = first[f"{name}/rewards/digit_reward/mean"] + 0.5 * 2.0 + 0.25 * first[f"{name}/rewards/judge/mean"]
        assert first[f"{name}/reward"] == pytest.approx(expected, abs=1e-5)
    assert trainer.agents[1].reward_funcs[2] is trainer.reward_funcs[2]  # loaded once


def test_a_prepared_reward_model_keeps_its_name_for_all_agents(agent_folders, tmp_path, monkeypatch):
    """DeepSpeed's engine around it has a dict as config."""

    class Engine(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.config = module, {"train_batch_size": 1}

        def forward(self, **kwargs):
            return self.module(**kwargs)

    prepare = Accelerator.prepare_model

    def prepare_model(self, model, **kwargs):
        return Engine(model) if isinstance(model, LlamaForSequenceClassification) else prepare(self, model, **kwargs)

    monkeypatch.setattr(Accelerator, "prepare_model", prepare_model)
    tokenizer = AutoTokenizer.from_pretrained(agent_folders["char"])
    judge_config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    judge_config._name_or_path = "judges/judge"
    trainer = team(
        agent_folders, PAIR, config(tmp_path, max_rounds=1), LlamaForSequenceClassification(judge_config),
        reward_processing_classes=tokenizer,
    )  # fmt: skip
    assert isinstance(trainer.agents[1].reward_funcs[0], Engine)
    trainer.train()
    for name in PAIR:
        assert f"{name}/rewards/judge/mean" in trainer.state.log_history[0]


def test_attention_can_differ_by_agent(agent_folders, tmp_path):
    overrides = {"char": {"model_init_kwargs": {"attn_implementation": "eager"}}}
    trainer = team(agent_folders, PAIR, config(tmp_path, beta=0.1, agent_overrides=overrides))
    for agent, expected in zip(trainer.agents, ["eager", "sdpa"], strict=True):
        for model in (agent.model, agent.ref_model):
            assert model.config._attn_implementation == expected


# Names that our own functions, or Python's, give to what they take
COLUMNS = "name function graded self func args kwargs logged answer columns call completion column values".split()


def test_columns_may_have_any_name_and_functions_one_name(agent_folders, tmp_path):
    """Every column arrives under its name, in sync and async functions; functions of one name are told apart."""
    seen, lock, states = [], asyncio.Semaphore(1), []

    def grade(completions, weight, **columns):
        seen.append(columns)
        columns["log_extra"]("note", [str(weight)] * len(completions))
        return [weight] * len(completions)

    async def judge(completions, **columns):
        seen.append(columns)
        states.append(columns["trainer_state"])
        async with lock:  # with one holder and one waiter it is bound to the loop
            await asyncio.sleep(0)
            return [1.0] * len(completions)

    functions = (
        functools.partial(grade, weight=2.0),
        functools.partial(grade, weight=3.0),
        judge,
        functools.partial(judge),
    )
    columns = [name for name in COLUMNS if name not in ("answer", "completion")]
    data = dataset(**{name: f"a {name}" for name in columns})
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1, log_completions=True), functions, data)
    names = ["grade-1", "grade-2", "judge-1", "judge-2"]
    assert [agent.reward_func_names for agent in trainer.agents] == [names, names]
    trainer.train()
    assert len(seen) == len(functions) * len(PAIR)
    for given in seen:
        assert {name: given[name][0] for name in columns} == {name: f"a {name}" for name in columns}
    assert [state is trainer.state for state in states] == [True] * 4  # its log is the team's; a peer's is empty
    assert trainer.agents[1].async_loop is trainer.async_loop
    first = trainer.state.log_history[0]
    for agent in PAIR:
        assert [first[f"{agent}/rewards/{name}/mean"] for name in names] == [2.0, 3.0, 1.0, 1.0]
    table = pq.read_table(tmp_path / "completions" / "round_00001.parquet")
    assert set(table["rewards/grade-2"].to_pylist()) == {3.0}
    assert set(table["note"].to_pylist()) == {"2.0"} and set(table["note/grade-2"].to_pylist()) == {"3.0"}


def test_math_reward_takes_any_column():
    columns = {name: ["x"] for name in COLUMNS if name != "answer"}
    with MathVerifier(workers=1) as verifier:
        assert verifier(completions=[r"\boxed{2}"], answer=["2"], **columns) == [1.0]


@pytest.mark.parametrize(
    "name", ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
)
def test_columns_that_trl_puts_something_else_into(agent_folders, tmp_path, name):
    with pytest.raises(ValueError, match=f"train_dataset has the column '{name}'.*rename_column"):
        team(agent_folders, PAIR, config(tmp_path), train_dataset=dataset(**{name: "x"}))


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
def test_unscorable_rewards_do_no_harm(agent_folders, tmp_path, bad):
    def reward(completions, **kwargs):
        return [bad if i % 3 == 0 else float(i % 2) for i in range(len(completions))]

    trainer = team(agent_folders, PAIR, config(tmp_path), reward)
    trainer.train()
    assert all(torch.isfinite(w).all() for w in all_weights(trainer))
    for k, agent in enumerate(trainer.agents):
        for row in [row for batch in agent._plan for row in batch if row.source == k]:
            assert row.advantage == row.advantage
    assert trainer.state.log_history[0]["char/capability"] == pytest.approx(3 / 5)  # rows 1, 5 and 7 of 1, 2, 4, 5, 7


def test_all_rewards_unscorable(agent_folders, tmp_path):
    def reward(completions, **kwargs):
        return [None] * len(completions)

    trainer = team(agent_folders, PAIR, config(tmp_path, beta=0.0), reward)
    before = all_weights(trainer)
    trainer.train()
    for a, b in zip(before, all_weights(trainer), strict=True):
        assert torch.equal(a, b)


def test_rewards_of_the_wrong_length(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path), lambda completions, **kw: [1.0])
    with pytest.raises(ValueError, match="returned 1 rewards, but 8 were expected"):
        trainer.train()


def test_a_reward_above_the_maximum_is_reported(agent_folders, tmp_path, caplog):
    logging.getLogger("transformers").addHandler(caplog.handler)
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1), lambda completions, **kw: [3.0, 1.0] * 4)
    trainer.train()
    assert "above max_reward=1" in caplog.text


def test_empty_and_broken_responses(agent_folders, tmp_path):
    """Agents that stop at once, or that write bytes which are no UTF-8."""
    trainer = team(agent_folders, ["bpe", "char"], config(tmp_path, peer_clip_delta=None, max_rounds=1))
    writer, reader = trainer.agents
    tokenizer = writer._tokenizer
    broken = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    assert "\ufffd" in tokenizer.decode(broken)
    outputs = [[tokenizer.eos_token_id], broken, broken + [tokenizer.eos_token_id], [5] * 10] * 2
    writer._generate_single_turn = lambda *args, **kwargs: (copy.deepcopy(outputs), None)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["pair/bpe->char/unreadable"] == 0.5
    rows = [row for batch in reader._plan for row in batch if row.source == 0]
    assert all(torch.isfinite(w).all() for w in all_weights(trainer))
    assert all(len(row.completion_ids) for row in rows)


def test_text_that_the_learner_cannot_encode(agent_folders, tmp_path):
    trainer = team(agent_folders, ["bpe", "char"], config(tmp_path, max_rounds=1, skip_silent_responses=False))
    writer, reader = trainer.agents
    foreign = writer._tokenizer("12 = 你好", add_special_tokens=False)["input_ids"]
    writer._generate_single_turn = lambda *args, **kwargs: ([foreign] * 8, None)
    trainer.train()
    assert trainer.state.log_history[0]["pair/bpe->char/unreadable"] == 1.0
    assert all(row.advantage == 0 for batch in reader._plan for row in batch if row.source == 0)


def test_pad_token_that_is_the_end_token(agent_folders, tmp_path):
    tokenizers = [AutoTokenizer.from_pretrained(agent_folders[name]) for name in PAIR]
    for tokenizer in tokenizers:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1), processing_classes=tokenizers)
    end = tokenizers[0].eos_token_id
    trainer._generate_single_turn = lambda *args, **kwargs: ([[7, 8, end], [9, 9, 9, 9, end]] * 4, None)
    seen = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (seen.append(inputs), compute(model, inputs))[1]
    trainer.train()
    lengths = sorted(n for inputs in seen[:2] for n in inputs["completion_mask"].sum(-1).tolist())
    assert lengths == [3] * 4 + [5] * 4  # the end token is learned, the padding is not


def chat_dataset(count=8):
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{i} + {i} = ?"}], "answer": str(2 * i)} for i in range(count)]
    )


def test_chats_in_each_agents_own_template(agent_folders, tmp_path):
    tokenizers = [AutoTokenizer.from_pretrained(agent_folders[name]) for name in PAIR]
    tokenizers[0].chat_template = CHAT_TEMPLATE
    tokenizers[1].chat_template = (
        "{% if polite %}Please. {% endif %}{% for m in messages %}<{{ m['content'] }}>{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    overrides = {"bpe": {"chat_template_kwargs": {"polite": True}}}
    recorder = Recorder(lambda completions: [float(len(c[0]["content"]) % 2) for c in completions])
    trainer = team(
        agent_folders,
        PAIR,
        config(tmp_path, max_rounds=1, agent_overrides=overrides),
        recorder,
        chat_dataset(),
        processing_classes=tokenizers,
    )
    trainer.train()
    question = recorder.calls[0]["prompts"][0][0]["content"]
    prompts = [
        {agent._tokenizer.decode(row.prompt_ids) for batch in agent._plan for row in batch} for agent in trainer.agents
    ]
    end = [tokenizer.eos_token for tokenizer in tokenizers]
    assert f"user: {question}{end[0]}assistant: " in prompts[0]
    assert f"Please. <{question}>{end[1]}:" in prompts[1]
    assert all(role["role"] == "assistant" for call in recorder.calls for (role,) in call["completions"])


def test_adapters_and_full_agents_in_one_team(agent_folders, tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    args = config(tmp_path, beta=0.1, peer_clip_delta=0.9, learning_rate=1e-2)
    trainer = team(agent_folders, PAIR, args, peft_configs=[adapter, None])
    lora, full = trainer.agents
    base = {n: p.clone() for n, p in lora.model.named_parameters() if not p.requires_grad}
    before = all_weights(trainer)
    trainer.train()
    assert lora.ref_model is None and full.ref_model is not None
    kls = [entry["char/kl"] for entry in trainer.state.log_history if "char/kl" in entry]
    assert kls[0] == 0 < kls[-1]  # against the base, with the adapter off
    assert all(torch.equal(p, base[n]) for n, p in lora.model.named_parameters() if n in base)
    for a, b in zip(before, all_weights(trainer), strict=True):
        assert (a - b).abs().max() > 1e-5
    trainer.save_model()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(agent_folders["char"]), tmp_path / "char")
    assert torch.equal(weights(loaded), weights(lora.model))
    merge_adapter(str(tmp_path / "char"), str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("1 + 2", return_tensors="pt")
    torch.testing.assert_close(merged(**ids).logits, loaded(**ids).logits, atol=1e-4, rtol=1e-4)


def test_quantized_bases(agent_folders, tmp_path):
    """QLoRA beside a full agent; two adapters on one 4-bit base hold it once."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = HACPOTrainer(
        [agent_folders["char"], agent_folders["char"], agent_folders["bpe"]],
        digit_reward,
        config(tmp_path, beta=0.1, peer_clip_delta=0.9),
        dataset(),
        peft_configs=[adapter, adapter, None],
        quantization_configs=[quantization, quantization, None],
        agent_names=["a", "b", "full"],
    )
    trainer.remove_callback(RoundProgress)
    before = all_weights(trainer)
    trainer.train()
    first, second = ({id(p) for p in agent.model.parameters()} for agent in trainer.agents[:2])
    assert any(p.dtype == torch.uint8 for p in trainer.model.parameters())  # two 4-bit weights in a byte
    assert first & second and first - second
    for old, new in zip(before, all_weights(trainer), strict=True):
        assert (old - new).abs().max() > 1e-6
    trainer.save_model()
    assert (tmp_path / "a" / "adapter_model.safetensors").exists()


def test_adapters_on_one_base_hold_it_once(agent_folders, tmp_path):
    """Four agents on one base take little more than one, and train exactly as on bases of their own."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    names = ["a", "b", "c", "d"]

    def train(folders, folder):
        trainer = HACPOTrainer(
            [folders[name] for name in names],
            digit_reward,
            config(tmp_path / folder, beta=0.1, peer_clip_delta=0.9),
            dataset(),
            peft_configs=adapter,
            agent_names=names,
        )
        trainer.remove_callback(RoundProgress)
        trainer.train()
        return trainer

    def held(agents):
        tensors = {p.data_ptr(): p.numel() * p.element_size() for agent in agents for p in agent.model.parameters()}
        return sum(tensors.values())

    shared = train(dict.fromkeys(names, agent_folders["char"]), "shared")
    assert held(shared.agents) <= 1.15 * held(shared.agents[:1])
    copies = {name: shutil.copytree(agent_folders["char"], tmp_path / f"base_{name}") for name in names}
    apart = train({name: str(path) for name, path in copies.items()}, "apart")
    assert held(apart.agents) > 3.5 * held(apart.agents[:1])
    for a, b in zip(all_weights(shared), all_weights(apart), strict=True):
        assert torch.equal(a, b)
    assert len({tuple(w.tolist()) for w in all_weights(shared)}) == 4  # each has an adapter of its own


def test_a_peft_model_is_compared_with_its_own_start(agent_folders, tmp_path):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(agent_folders["char"])
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    tokenizer = AutoTokenizer.from_pretrained(agent_folders["char"])
    trainer = HACPOTrainer(
        [model, agent_folders["bpe"]],
        digit_reward,
        config(tmp_path, beta=0.1, max_rounds=1),
        dataset(),
        processing_classes=[tokenizer, None],
        agent_names=["lora", "full"],
    )
    trainer.train()
    assert trainer.state.log_history[0]["lora/kl"] == pytest.approx(0.0, abs=1e-6)  # first update: still the start


def test_model_objects_without_a_path_have_a_reference(agent_folders, tmp_path):
    models = [AutoModelForCausalLM.from_pretrained(agent_folders[name]) for name in PAIR]
    tokenizers = [AutoTokenizer.from_pretrained(agent_folders[name]) for name in PAIR]
    for model in models:
        model.config._name_or_path = ""
    start = [weights(model) for model in models]
    trainer = HACPOTrainer(
        models, digit_reward, config(tmp_path, beta=0.1), dataset(), processing_classes=tokenizers, agent_names=PAIR
    )
    trainer.train()
    for agent, old in zip(trainer.agents, start, strict=True):
        assert torch.equal(weights(agent.ref_model), old)
        assert agent.model.config._name_or_path == ""


def test_absolute_positions_do_not_count_the_padding(agent_folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(agent_folders["char"])
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=1, n_inner=16, **ends)
    ).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.ones_like(ids)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    padded_mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), mask], 1)
    alone = model(input_ids=ids, attention_mask=mask).logits
    assert not torch.allclose(model(input_ids=padded, attention_mask=padded_mask).logits[:, 3:], alone, atol=1e-4)
    fix_absolute_positions(model)
    torch.testing.assert_close(model(input_ids=padded, attention_mask=padded_mask).logits[:, 3:], alone)

    model.generation_config.eos_token_id = tokenizer.eos_token_id
    trainer = HACPOTrainer(
        [model, agent_folders["bpe"]],
        digit_reward,
        config(tmp_path, max_rounds=1),
        dataset(),
        processing_classes=[tokenizer, None],
        agent_names=["gpt2", "bpe"],
    )
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["gpt2/ratio_mean"] == pytest.approx(1.0, abs=1e-5)  # the same log-probs whatever the padding


def test_every_agent_is_evaluated_alone(agent_folders, tmp_path):
    datasets = {"a": dataset(4), "b": dataset(2)}
    trainer = team(agent_folders, PAIR, config(tmp_path, per_device_eval_batch_size=4), eval_dataset=datasets)
    metrics = trainer.evaluate()
    for name in ("a", "b"):
        each = [metrics[f"eval_{name}_{agent}/reward"] for agent in PAIR]
        assert metrics[f"eval_{name}_reward"] == pytest.approx(sum(each) / 2)
    alone = trainer.evaluate(dataset(4))
    assert {"eval_reward", "eval_char/reward", "eval_bpe/completions/mean_length", "eval_bpe/loss"} <= set(alone)
    assert not [key for key in alone if key.startswith("eval_a")]
    assert trainer.state.log_history[-1]["eval_reward"] == alone["eval_reward"]
    trainer.train()  # evaluation leaves no trace that training stumbles over
    assert trainer.state.global_step == 8


def test_a_second_run_with_the_same_trainer(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1))
    trainer.train()
    once = all_weights(trainer)
    trainer.train()
    assert [agent.state.global_step for agent in trainer.agents] == [4, 4]
    assert all((a - b).abs().max() > 0 for a, b in zip(once, all_weights(trainer), strict=True))


def test_only_successes_of_peers_teach(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path, peer_advantages="positive", skip_silent_responses=False))
    trainer.train()
    rows = [(k, row) for k, agent in enumerate(trainer.agents) for batch in agent._plan for row in batch]
    assert min(row.advantage for k, row in rows if row.source == k) < 0
    assert min(row.advantage for k, row in rows if row.source != k) == 0
    assert max(row.advantage for k, row in rows if row.source != k) > 0


@pytest.mark.parametrize("overflow", ["truncate", "drop"])
def test_responses_beyond_the_learners_limit(agent_folders, tmp_path, overflow):
    overrides = {"char": {"max_completion_length": 4}}
    trainer = team(
        agent_folders,
        PAIR,
        config(
            tmp_path,
            agent_overrides=overrides,
            peer_overflow=overflow,
            skip_silent_responses=False,
            skip_idle_updates=False,
            max_rounds=1,
        ),
    )
    trainer.train()
    rows = [row for batch in trainer._plan for row in batch if row.source == 1]
    assert max(len(row.completion_ids) for row in rows) == 4
    assert trainer.state.log_history[0]["pair/bpe->char/truncated"] > 0.5
    if overflow == "drop":
        assert all(row.advantage == 0 for row in rows if len(row.completion_ids) == 4)
    else:
        assert any(row.advantage != 0 for row in rows if len(row.completion_ids) == 4)


def test_truncated_responses_can_be_masked(agent_folders, tmp_path):
    trainer = team(
        agent_folders,
        PAIR,
        config(tmp_path, mask_truncated_completions=True, skip_silent_responses=False, max_rounds=1, beta=0.1),
    )
    trainer.train()
    for k, agent in enumerate(trainer.agents):
        end = agent._end_id
        for row in [row for batch in agent._plan for row in batch]:
            if row.source == k:
                assert row.masked == (row.completion_ids[-1].item() != end)
            elif row.completion_ids[-1].item() != end:
                assert row.advantage == 0
    assert all(torch.isfinite(w).all() for w in all_weights(trainer))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("tools", [print], "tools is not supported"),
        ("rollout_func", print, "rollout_func is not supported"),
        ("environment_factory", object, "environment_factory is not supported"),
    ],
)
def test_what_cannot_be_shared_is_refused(agent_folders, tmp_path, argument, value, message):
    with pytest.raises(ValueError, match=message):
        team(agent_folders, PAIR, config(tmp_path), **{argument: value})


def test_one_bad_path_among_three_loads_nothing(agent_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    folders = {**agent_folders, "lost": str(tmp_path / "lost")}
    with pytest.raises(ValueError, match=r"cannot be loaded \(nothing was loaded yet\)(.|\n)*- lost: "):
        team(folders, ["char", "lost", "bpe"], config(tmp_path))


def test_a_data_set_without_answers_says_so(agent_folders, tmp_path):
    from hacpo_trl import math_reward

    trainer = team(agent_folders, PAIR, config(tmp_path), math_reward, dataset().remove_columns("answer"))
    with pytest.raises(ValueError, match="answer"):
        trainer.train()


def test_chats_without_a_template_are_refused(agent_folders, tmp_path):
    with pytest.raises(ValueError, match="tokenizer of agent 'char' has no chat template"):
        team(agent_folders, PAIR, config(tmp_path), train_dataset=chat_dataset())


def test_sleeping_agents_learn_the_same(agent_folders, tmp_path):
    """One agent at a time is on the device, the weights and checkpoints are those of a run without sleep."""
    results, peaks = [], []
    for offload in (False, True):
        folder = tmp_path / str(offload)
        settings = {"beta": 0.1, "peer_clip_delta": 0.9, "save_strategy": "steps", "save_steps": 4}
        trainer = team(agent_folders, PAIR, config(folder, offload_inactive_agents=offload, **settings))
        peak = 0
        for agent in trainer.agents:
            update = agent._clip_grad_norm

            def watched(model, update=update, agents=trainer.agents):
                nonlocal peak
                peak = max(peak, resident_bytes(agents))
                return update(model)

            agent._clip_grad_norm = watched
        trainer.train()
        peaks.append(peak)
        resumed = team(
            agent_folders, PAIR, config(folder, offload_inactive_agents=offload, **{**settings, "max_rounds": 3})
        )
        resumed.train(resume_from_checkpoint=True)
        resumed.save_model()
        results.append([weights(AutoModelForCausalLM.from_pretrained(folder / name)) for name in PAIR])
        largest = 0
        for agent in resumed.agents:
            agent.activate()
            largest = max(largest, resident_bytes([agent]))
            assert torch.isfinite(weights(agent.model)).all() and len(weights(agent.model))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    gradients = max(p.numel() * 4 for p in [torch.empty(len(r)) for r in results[0]])
    assert peaks[1] <= 1.2 * (largest + gradients) < peaks[0]


def test_sleeping_adapters_leave_a_shared_base_awake(agent_folders, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    results = []
    for offload in (False, True):
        trainer = HACPOTrainer(
            [agent_folders["char"]] * 2,
            digit_reward,
            config(tmp_path / str(offload), offload_inactive_agents=offload, beta=0.1),
            dataset(),
            peft_configs=adapter,
            agent_names=["a", "b"],
        )
        trainer.remove_callback(RoundProgress)
        trainer.train()
        for agent in trainer.agents:
            agent.activate()
            results.append(weights(agent.model))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_a_stream_of_prompts_by_rounds(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path), train_dataset=dataset(16).to_iterable_dataset())
    trainer.train()
    assert [agent.state.global_step for agent in trainer.agents] == [8, 8]


@pytest.mark.parametrize("result", [None, "text", 3.0])
def test_rewards_that_are_no_list(agent_folders, tmp_path, result):
    def grader(completions, **kwargs):
        return result

    trainer = team(agent_folders, PAIR, config(tmp_path), grader)
    with pytest.raises(TypeError, match="'grader' returned"):
        trainer.train()


def test_what_is_passed_instead_of_settings(agent_folders, tmp_path):
    with pytest.raises(TypeError, match="HACPOConfig.*not dict"):
        team(agent_folders, PAIR, {"output_dir": "x"})
    for functions, message in [
        (None, "reward_funcs is missing"),
        ([], "reward_funcs is missing"),
        ([digit_reward, 3], r"reward_funcs\[1\] is 3; it must be a function"),
        (MathVerifier, r"reward_funcs\[0\] is the class MathVerifier"),
    ]:
        with pytest.raises(ValueError, match=message):
            team(agent_folders, PAIR, config(tmp_path), functions)
    with pytest.raises(ValueError, match="has 2 numbers for 1 reward functions"):
        team(agent_folders, PAIR, config(tmp_path, reward_weights=[1, 2]))


def test_no_card_names_a_model_that_it_does_not_know(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1, save_strategy="steps", save_steps=4))
    trainer.train()
    assert not (tmp_path / "README.md").exists() and not (tmp_path / "bpe").exists()
    card = (tmp_path / "checkpoint-4" / "bpe" / "README.md").read_text()
    assert "base_model" not in card and "`bpe` (a local olmo2 model)" in card and "2603.02604" in card


def test_a_round_without_rewards_has_no_ratios(agent_folders, tmp_path):
    """A pass may not be empty, but the response that fills it is no statistic."""
    trainer = team(
        agent_folders, PAIR, config(tmp_path, max_rounds=1), lambda completions, **_: [0.0] * len(completions)
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "pair/bpe->char/no_gradient" in entry]
    assert len(entries) == 2  # the updates on the peer's responses
    for entry in entries:
        assert entry["pair/bpe->char/no_gradient"] == entry["pair/char->bpe/no_gradient"] == 1.0
        assert not [key for key in entry if key.startswith("pair/") and "ratio" in key]


def test_a_gradient_that_is_not_finite_is_told(agent_folders, tmp_path, monkeypatch):
    trainer = team(agent_folders, PAIR, config(tmp_path, max_rounds=1))
    told = []
    for agent in trainer.agents:
        monkeypatch.setattr(agent, "_warn_once", lambda message, name=agent.agent_name: told.append((name, message)))
    monkeypatch.setattr(trainer.agents[1], "_get_grad_norm", lambda *_, **__: torch.tensor(float("inf")))
    trainer.train()
    assert {name for name, message in told if "is not finite" in message} == {"bpe"}
