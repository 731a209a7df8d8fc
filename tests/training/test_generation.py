"""What decides what an agent samples: the run's settings and its own seed, and nothing of its model's folder."""

import json

import pytest
import torch
from peft import LoraConfig
from support.fake_vllm_server import use_fake_servers
from support.tiny_teams import config, dataset, digit_reward, team
from transformers import AutoModelForCausalLM, GenerationConfig
from trl import GRPOTrainer

from hacpo_trl import HACPOTrainer
from hacpo_trl.config import _SAMPLER_KEYS

# Whatever of the keys that generation_kwargs may not set a model's folder can hold, with a value that acts
LEAKS = {
    "min_p": 0.5,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.2,
    "eta_cutoff": 0.5,
    "top_h": 0.3,
    "encoder_repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[i] for i in range(20, 60)],
    "sequence_bias": [[[30], 20.0]],
    "suppress_tokens": list(range(20, 60)),
    "begin_suppress_tokens": list(range(4, 90)),
    "forced_bos_token_id": 30,
    "forced_eos_token_id": 30,
    "min_length": 40,
    "min_new_tokens": 7,
    "num_beams": 3,
    "penalty_alpha": 0.6,
    "guidance_scale": 5.0,
    "exponential_decay_length_penalty": [1, 5.0],
    "num_return_sequences": 2,
    "repetition_penalty": 3.0,
    "temperature": 3.0,
    "top_p": 0.2,
    "top_k": 2,
    "do_sample": False,
}
INERT = {
    *("repetition_penalty", "temperature", "top_p", "top_k", "do_sample"),  # TRL passes values of its own
    *("forced_bos_token_id", "penalty_alpha"),  # act on empty prompts, and beside a top_k, only
}
UNUSED = {"watermarking_config", "dola_layers", "num_beam_groups"}  # need code that is not in transformers, or tensors


def test_the_table_is_complete():
    known = {key for key in _SAMPLER_KEYS if hasattr(GenerationConfig(), key)}
    assert known - UNUSED == set(LEAKS)


@pytest.fixture(scope="module")
def agent(agent_folders, tmp_path_factory):
    trainer = team(agent_folders, ["char"], config(tmp_path_factory.mktemp("run"), max_completion_length=8))
    trainer.model_wrapped.train()
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = [
        20,
        21,
    ]  # responses of a few tokens, and long ones
    return trainer


@pytest.mark.parametrize("key", LEAKS)
def test_a_models_own_settings_do_not_change_what_is_sampled(agent, key):
    prompts = agent._tokenizer([row["prompt"] for row in dataset(2)] * 2)["input_ids"]
    plain = agent.model.generation_config

    def sample(generate):
        torch.manual_seed(0)
        return generate(agent, prompts, None, {}, 4)[0]

    expected = sample(type(agent)._generate_single_turn)
    own = GenerationConfig(**{**plain.to_dict(), "do_sample": True, key: LEAKS[key]})
    agent.model.generation_config = own
    try:
        assert sample(type(agent)._generate_single_turn) == expected
        assert agent.model.generation_config is own
        try:
            leaked = sample(GRPOTrainer._generate_single_turn)
        except Exception:  # some cannot be combined with what TRL sets
            leaked = None
        assert (leaked == expected) == (key in INERT)
    finally:
        agent.model.generation_config = plain


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_is_saved_with_its_own_settings_and_ends_on_its_end_tokens(agent_folders, tmp_path, lora):
    """A model object, whose settings stand in no folder."""
    model = AutoModelForCausalLM.from_pretrained(agent_folders["char"], dtype=torch.float32)
    ends = [model.generation_config.eos_token_id, 22]  # "2"
    model.generation_config = GenerationConfig(eos_token_id=ends, no_repeat_ngram_size=1, min_new_tokens=9)
    adapter = LoraConfig(r=2, target_modules=["q_proj"]) if lora else None
    args = config(tmp_path, max_rounds=1, max_completion_length=24)
    trainer = HACPOTrainer([model], digit_reward, args, dataset(), agent_names=["a"], peft_configs=[adapter])
    inputs = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(1)
    rollout = trainer.sample(inputs)
    for ids, finished in zip(rollout.completion_ids, rollout.finished, strict=True):
        assert finished == (ids[-1] in ends) and not set(ids[:-1].tolist()) & set(ends)
    assert any(ids[-1] == 22 for ids in rollout.completion_ids)
    assert any(len(ids) < 9 for ids in rollout.completion_ids)
    assert any(len(ids) > len(set(ids.tolist())) for ids in rollout.completion_ids)
    if lora:
        base = trainer.model.get_base_model()
        assert base.generation_config is model.generation_config
        assert base.generation_config.no_repeat_ngram_size == 1
        return
    trainer.save_model()
    saved = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert saved["no_repeat_ngram_size"] == 1 and saved["eos_token_id"] == ends


# -- seeds ----------------------------------------------------------------------------------------------------------


def lora_team(folder, output_dir, names=("a", "b"), **changes):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return HACPOTrainer(
        [folder] * len(names), digit_reward, config(output_dir, **changes), dataset(), agent_names=list(names),
        peft_configs=adapter,
    )  # fmt: skip


def adapter_of(agent):
    return torch.cat([p.flatten() for name, p in agent.model.named_parameters() if "lora_A" in name])


def first_responses(trainer):
    inputs = next(iter(trainer.get_train_dataloader()))
    return [[ids.tolist() for ids in agent.sample(inputs).completion_ids] for agent in trainer.agents]


def test_adapters_on_one_base_start_differently_and_the_same_in_every_run(agent_folders, tmp_path):
    first, again = (lora_team(agent_folders["char"], tmp_path / str(i)) for i in range(2))
    a, b = map(adapter_of, first.agents)
    assert (a != b).float().mean() > 0.99
    assert torch.equal(adapter_of(again.agents[0]), a) and torch.equal(adapter_of(again.agents[1]), b)
    assert [agent.args.seed for agent in first.agents] == [7, 7]  # the team's
    responses = first_responses(first)
    assert responses[0] != responses[1]
    torch.testing.assert_close(adapter_of(lora_team(agent_folders["char"], tmp_path / "alone", ["a"])), a)


def test_other_agents_adapters_do_not_move_the_random_numbers_of_the_run(agent_folders, tmp_path):
    """After building, a team's random state is that of an agent alone."""
    states = []
    for names in (["char"], ["char", "bpe"]):
        team(agent_folders, names, config(tmp_path / "-".join(names)))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_servers_with_one_seed_are_warned_of(monkeypatch, agent_folders, tmp_path, seeds, recwarn):
    names = ["a", "b"]
    servers = use_fake_servers(monkeypatch, {name: agent_folders["char"] for name in names})
    for server, seed in zip(servers.values(), seeds, strict=True):
        server.seed(seed)
    urls = [f"http://{name}:8000" for name in names]
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_urls": urls, "beta": 0.0}
    trainer = lora_team(agent_folders["char"], tmp_path, **settings)
    responses = first_responses(trainer)
    warned = [str(w.message) for w in recwarn if "agents 'a' and 'b': their servers serve" in str(w.message)]
    assert len(warned) == (responses[0] == responses[1]) == (seeds[0] == seeds[1])
