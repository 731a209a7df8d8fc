"""Real vLLM engines of two agents in the trainer's process (`vllm_mode="colocate"`), on the CPU.

`make test-vllm` runs this in an environment of its own, in a process of its own: an engine stays until its end.
"""

import os

import pytest

pytest.importorskip("vllm", reason="run by make test-vllm")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import cpu_vllm  # noqa: F401  (lets vLLM load new weights on a CPU)
import trl.generation.vllm_generation
from support.tiny_teams import all_weights, config, dataset, digit_reward

from hacpo_trl import HACPOTrainer
from hacpo_trl.playground import AgentSpec, build_agent, save_agent, shipped_agent
from hacpo_trl.reporting.round_progress import RoundProgress

STABLELM = AgentSpec("stablelm", "stablelm", "bpe", hidden_size=64, num_layers=2, num_heads=2, vocab_size=320, seed=5)


@pytest.fixture(autouse=True)
def engines_for_a_cpu(monkeypatch):
    llm = trl.generation.vllm_generation.LLM
    settings = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    monkeypatch.setattr("trl.generation.vllm_generation.LLM", lambda **kwargs: llm(**{**kwargs, **settings}))


def make_team(models, output_dir, **changes):
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 256,
        "max_rounds": 3,
        "max_completion_length": 32,
        "beta": 0.0,
        **changes,
    }
    names = [f"agent-{i}" for i in range(len(models))]
    trainer = HACPOTrainer(models, digit_reward, config(output_dir, **settings), dataset(), agent_names=names)
    trainer.remove_callback(RoundProgress)
    return trainer


def test_two_awake_engines_run_their_learners_weights(tmp_path):
    trainer = make_team([shipped_agent("tiny-char"), save_agent(*build_agent(STABLELM), tmp_path / "b")], tmp_path)
    before = all_weights(trainer)
    trainer.train()
    for agent, old, new in zip(trainer.agents, before, all_weights(trainer), strict=True):
        key = f"{agent.agent_name}/sampling/sampling_logp_difference/max"
        largest = [entry[key] for entry in trainer.state.log_history if key in entry]
        print(f"{agent.agent_name}: |sampler - trainer| {largest}")
        assert len(largest) == 3 and max(largest) < 1e-4
        assert (new - old).abs().max() > 1e-4


def test_an_architecture_that_vllm_runs_by_transformers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="agent 'agent-0': vLLM has no implementation of Olmo2.*vllm_mode='server'"):
        make_team([shipped_agent("tiny-bpe")], tmp_path)
