"""Two agents with real vLLM servers on the CPU: weights reach the samplers, killed servers are named and replaced.

`make test-vllm` runs this in an environment of its own.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="run by make test-vllm")

from cpu_vllm import SERVER_ARGUMENTS, sync_by_files
from peft import LoraConfig, get_peft_model
from support.ports import free_ports
from support.tiny_teams import all_weights, config, dataset, digit_reward
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl import HACPOTrainer
from hacpo_trl.playground import shipped_agent
from hacpo_trl.reporting.round_progress import RoundProgress
from hacpo_trl.rollouts import own_rows
from hacpo_trl.sampling.vllm_client import server_instance
from hacpo_trl.sampling.vllm_servers import serve

NAMES = ["tiny-char", "tiny-bpe"]


class Servers:
    """One real server for each agent, each of which can be killed and started again. The second is an adapter's."""

    def __init__(self, adapter):
        self.models = [shipped_agent(NAMES[0]), adapter]
        self.ports = free_ports(len(NAMES))
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.stacks = [contextlib.ExitStack() for _ in NAMES]
        self.running = [None] * len(NAMES)

    def start(self, *indices):
        """Starts some together; each can be stopped alone."""
        started = [
            serve([self.models[i]], ports=[self.ports[i]], host="127.0.0.1", seed=i, extra=SERVER_ARGUMENTS)
            for i in indices
        ]
        for i, server in zip(indices, started, strict=True):
            (self.running[i],) = self.stacks[i].enter_context(server)

    def kill(self, index):
        os.killpg(self.running[index].process.pid, signal.SIGKILL)
        self.stacks[index].close()

    def stop(self):
        for stack in self.stacks:
            stack.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    folder = str(tmp_path_factory.mktemp("adapter"))
    base = AutoModelForCausalLM.from_pretrained(shipped_agent(NAMES[1]))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(base, adapter).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shipped_agent(NAMES[1])).save_pretrained(folder)
    result = Servers(folder)
    try:
        result.start(0, 1)
        yield result
    finally:
        result.stop()


def make_team(servers, output_dir, reward_funcs=digit_reward, models=None, peft_configs=None, **changes):
    settings = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_urls": servers.urls,
        "max_rounds": 3,
        "max_completion_length": 32,
        "beta": 0.0,
        **changes,
    }
    trainer = HACPOTrainer(
        models or [shipped_agent(name) for name in NAMES],
        reward_funcs,
        config(output_dir, **settings),
        dataset(),
        agent_names=NAMES,
        peft_configs=peft_configs,
    )
    trainer.remove_callback(RoundProgress)
    return trainer


def differences(trainer, name):
    """|sampler - trainer| of the log-probabilities, the largest of every round."""
    key = f"{name}/sampling/sampling_logp_difference/max"
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.mark.parametrize("lora", [False, True])
def test_samplers_run_the_learners_weights(servers, tmp_path, monkeypatch, lora):
    sync_by_files(monkeypatch)
    changes = {}
    if lora:  # a new adapter, and one that goes on
        adapters = [LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), None]
        changes = {"models": servers.models, "peft_configs": adapters, "learning_rate": 1e-2}
    trainer = make_team(servers, tmp_path, **changes)
    info = trainer.vllm_generation.vllm_client.get_server_info()
    assert server_instance(info) is not None and "_api_process_count" in info["parallel_config"]
    before = all_weights(trainer)
    trainer.train()
    for name, old, new in zip(NAMES, before, all_weights(trainer), strict=True):
        largest = differences(trainer, name)
        print(f"{name}: |sampler - trainer| {largest}, weights moved by {(new - old).abs().max():.1e}")
        assert len(largest) == 3 and max(largest) < 1e-4
        assert (new - old).abs().max() > 1e-4


def test_the_samplers_log_probabilities_are_the_trainers(servers, tmp_path, monkeypatch):
    sync_by_files(monkeypatch)
    trainer = make_team(servers, tmp_path, source_logps="sampler", vllm_importance_sampling_correction=False)
    trainer.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    for agent in trainer.agents:
        rollout = agent.sample(inputs)
        assert (rollout.logp_sums < 0).all()
        batch = agent._collate(own_rows(rollout, agent.agent_index, torch.zeros(len(rollout))))
        with torch.no_grad():
            sums = (agent._logps_of(agent.model, batch)[0] * batch["completion_mask"]).sum(-1)
        assert (rollout.logp_sums - sums).abs().max() < 1e-3  # over up to 32 tokens


def test_a_killed_server_is_named_and_a_new_one_takes_its_place(servers, tmp_path, monkeypatch):
    sync_by_files(monkeypatch)
    trainer = make_team(servers, tmp_path, save_strategy="steps", save_steps=1)
    client = trainer.agents[1].vllm_generation.vllm_client
    post, requests = client._post, []

    def dying_post(url, **kwargs):
        requests.append(url)
        if requests.count(f"{servers.urls[1]}/v1/completions") == 2:
            servers.kill(1)
        return post(url, **kwargs)

    client._post = dying_post
    with pytest.raises(RuntimeError, match=f"agent 'tiny-bpe': its vLLM server {servers.urls[1]} failed in generate"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]  # the first round's

    servers.start(1)
    trainer = make_team(servers, tmp_path, save_strategy="steps", save_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == trainer.agents[1].state.global_step == 12
    for name in NAMES:
        largest = differences(trainer, name)
        print(f"{name}: |sampler - trainer| {largest}")
        assert len(largest) == 3 and max(largest) < 1e-4  # the log of the first round is the checkpoint's
