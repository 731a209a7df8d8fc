"""Rollouts from vLLM servers, without vLLM: settings, requests side by side, whose log-probabilities count."""

import math
import operator
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from support.fake_vllm_server import use_fake_servers
from support.tiny_teams import all_weights, config, digit_reward, team, weights
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from hacpo_trl._contract import VLLM_ATTRIBUTES
from hacpo_trl.rollouts import own_rows
from hacpo_trl.sampling.turn_taking import Turns
from hacpo_trl.sampling.vllm_client import check_engine, connect, server_instance, usable_logprobs

NAMES = ["char", "bpe"]


def vllm_config(output_dir, names=NAMES, **changes):
    """Settings with the stand-ins of `use_fake_servers`."""
    urls = [f"http://{name}:8000" for name in names]
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_urls": urls, "beta": 0.0}
    return config(output_dir, **{**settings, **changes})


def vllm_team(monkeypatch, folders, args, names=NAMES, reward_funcs=digit_reward, server=None, **kwargs):
    servers = use_fake_servers(monkeypatch, {name: folders[name] for name in names}, **(server or {}))
    trainer = team(folders, names, args, reward_funcs, agent_names=list(names), **kwargs)
    return trainer, servers


# -- settings -------------------------------------------------------------------------------------------------------


def server_config(tmp_path, **changes):
    return config(tmp_path, **{"use_vllm": True, "vllm_mode": "server", **changes})


@pytest.mark.parametrize(
    "overrides",
    [
        None,  # both have TRL's default address
        {"a": {"vllm_server_port": 8000}, "b": {"vllm_server_port": 8000}},
        {
            "a": {"vllm_server_base_url": "http://localhost:8000"},
            "b": {"vllm_server_base_url": "http://127.0.0.1:8000/"},
        },
        {"a": {"vllm_server_host": "0.0.0.0"}, "b": {"vllm_server_base_url": "http://LOCALHOST:8000"}},
    ],
)
def test_one_server_for_two_agents_is_refused(tmp_path, overrides):
    with pytest.raises(ValueError, match="agents 'a' and 'b' would both use the vLLM server .*vllm_server_urls="):
        server_config(tmp_path, agent_overrides=overrides).check_agents(["a", "b"])


def test_equal_urls_are_refused(tmp_path):
    urls = ["http://one:8000", "http://two:8000", "http://one:8000"]
    with pytest.raises(ValueError, match="agents 'a' and 'c' would both use the vLLM server http://one:8000"):
        server_config(tmp_path, vllm_server_urls=urls).check_agents(["a", "b", "c"])


@pytest.mark.parametrize(
    "overrides",
    [
        {"a": {"vllm_group_port": 6000}, "b": {"vllm_group_port": 6000}},
        {"a": {"vllm_group_port": 51217}},  # b's own, derived
    ],
)
def test_equal_group_ports_are_refused(tmp_path, overrides):
    args = server_config(tmp_path, vllm_server_urls=["http://one:8000", "http://two:8000"], agent_overrides=overrides)
    with pytest.raises(ValueError, match="agents 'a' and 'b' would both sync .*vllm_group_port=.*agent_overrides"):
        args.check_agents(["a", "b"])


def test_every_agent_gets_its_server_and_port(tmp_path):
    args = server_config(
        tmp_path,
        vllm_server_urls=["http://one:8000", "http://two:8000", "http://three:8000"],
        vllm_group_port=6000,
        agent_overrides={"b": {"vllm_server_port": 9000, "vllm_server_host": "four"}, "c": {"vllm_group_port": 7000}},
    )
    args.check_agents(["a", "b", "c"])
    a, b, c = (args.for_agent(name, leader=i == 0, index=i) for i, name in enumerate("abc"))
    assert (a.vllm_server_base_url, a.vllm_group_port) == ("http://one:8000", 6000)
    assert (b.vllm_server_base_url, b.vllm_server_host, b.vllm_server_port) == (None, "four", 9000)
    assert (c.vllm_server_base_url, c.vllm_group_port) == ("http://three:8000", 7000)
    assert b.vllm_group_port == 6001


def test_agents_without_vllm_need_no_server(tmp_path):
    args = server_config(tmp_path, agent_overrides={"b": {"use_vllm": False}})
    args.check_agents(["a", "b"])
    assert not args.for_agent("b", leader=False, index=1).use_vllm


def test_urls_must_fit(tmp_path):
    with pytest.raises(ValueError, match="lists 1 servers for 2 agents"):
        server_config(tmp_path, vllm_server_urls=["http://one:8000"]).check_agents(["a", "b"])
    for urls in ("http://one:8000", ["one:8000"]):
        with pytest.raises(ValueError, match="must be a list of addresses"):
            server_config(tmp_path, vllm_server_urls=urls)
    with pytest.raises(ValueError, match="needs use_vllm=True and vllm_mode='server'"):
        config(tmp_path, vllm_server_urls=["http://one:8000"])
    with pytest.raises(ValueError, match="all agents have in common"):
        server_config(tmp_path, agent_overrides={"a": {"vllm_server_urls": []}}).check_agents(["a"])


@pytest.mark.parametrize("setting", [{"vllm_enable_sleep_mode": True}, {"vllm_tensor_parallel_size": 2}])
def test_what_several_engines_in_one_process_cannot_have_is_refused(tmp_path, setting):
    args = config(tmp_path, use_vllm=True, vllm_mode="colocate", **setting)
    args.check_agents(["a"])
    message = f"'a', 'b' would each have a vLLM engine .*with {next(iter(setting))}.*one server for each agent"
    with pytest.raises(ValueError, match=message):
        args.check_agents(["a", "b"])
    config(tmp_path, use_vllm=True, vllm_mode="colocate").check_agents(["a", "b"])


def test_the_samplers_log_probabilities_need_vllm(tmp_path):
    with pytest.raises(ValueError, match="source_logps='sampler' needs use_vllm=True"):
        config(tmp_path, source_logps="sampler")
    args = server_config(tmp_path, source_logps="sampler", agent_overrides={"b": {"use_vllm": False}})
    with pytest.raises(ValueError, match="agent 'b': source_logps='sampler' needs use_vllm=True"):
        args.for_agent("b", leader=False, index=1)


# -- servers --------------------------------------------------------------------------------------------------------


def test_requests_of_all_agents_are_under_way_together(monkeypatch, agent_folders, tmp_path):
    names = ["char", "bpe", "mini"]
    together = threading.Barrier(len(names), timeout=120)  # opens only when all servers have a request at once
    trainer, servers = vllm_team(
        monkeypatch, agent_folders, vllm_config(tmp_path, names), names, server={"before": together.wait}
    )
    trainer.train()
    assert [server.requests for server in servers.values()] == [2, 2, 2]
    assert [server.syncs for server in servers.values()] == [2, 2, 2]
    assert [server.group_port for server in servers.values()] == [51216, 51217, 51218]


def test_the_weights_do_not_depend_on_the_servers_speed(monkeypatch, agent_folders, tmp_path):
    results = []
    for slow in NAMES:
        trainer, servers = vllm_team(monkeypatch, agent_folders, vllm_config(tmp_path))
        servers[slow].before = lambda: time.sleep(0.1)
        trainer.train()
        results.append(all_weights(trainer))
    for a, b in zip(*results, strict=True):
        assert (a == b).all()


def test_sleeping_agents_train_the_same_weights(monkeypatch, agent_folders, tmp_path):
    """They sample one after the other, and sync what is awake."""
    results = []
    for offload in (False, True):
        trainer, servers = vllm_team(
            monkeypatch, agent_folders, vllm_config(tmp_path, offload_inactive_agents=offload, beta=0.1)
        )
        trainer.train()
        for agent, server in zip(trainer.agents, servers.values(), strict=True):
            agent.activate()
            results.append(weights(agent.model))
            assert server.syncs == 2
    for a, b in zip(results[:2], results[2:], strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("lora", [False, True])
def test_the_servers_run_the_learners_weights(monkeypatch, agent_folders, tmp_path, lora):
    """Also those of adapters: after updates, sampler and trainer agree on what every response's probability is."""
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None
    args = vllm_config(tmp_path, max_rounds=3, learning_rate=1e-2)
    trainer, servers = vllm_team(monkeypatch, agent_folders, args, peft_configs=adapters)
    before = [
        server.model.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone() for server in servers.values()
    ]
    trainer.train()
    for agent, server, old in zip(trainer.agents, servers.values(), before, strict=True):
        differences = [
            entry[f"{agent.agent_name}/sampling/sampling_logp_difference/max"]
            for entry in trainer.state.log_history
            if f"{agent.agent_name}/sampling/sampling_logp_difference/max" in entry
        ]
        assert len(differences) == 3 and max(differences) < 1e-4
        assert (server.model.state_dict()["model.layers.0.self_attn.q_proj.weight"] - old).abs().max() > 1e-3


def test_a_server_that_fails_is_named(monkeypatch, agent_folders, tmp_path):
    args = vllm_config(tmp_path, max_rounds=3, save_strategy="steps", save_steps=1)
    trainer, servers = vllm_team(monkeypatch, agent_folders, args)

    def dies():
        if servers["bpe"].requests == 2:
            raise OSError("connection refused")

    servers["bpe"].before = dies
    with pytest.raises(
        RuntimeError, match="agent 'bpe': its vLLM server http://bpe:8000 failed in generate: .*refused"
    ):
        trainer.train()
    assert (tmp_path / "checkpoint-4" / "bpe").is_dir()
    trainer, _ = vllm_team(monkeypatch, agent_folders, args)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 12 and trainer.agents[1].state.global_step == 12


@pytest.mark.parametrize(("request_number", "method"), [(2, "generate"), (None, "update_named_params")])
def test_a_server_that_was_started_anew_is_not_gone_on_with(
    monkeypatch, agent_folders, tmp_path, request_number, method
):
    """While the client tried again, or between two rounds: it has other weights, and nothing would fail."""
    trainer, servers = vllm_team(monkeypatch, agent_folders, vllm_config(tmp_path, max_rounds=3))

    def restarts():
        if servers["bpe"].requests == request_number:
            servers["bpe"].instance = "second"

    servers["bpe"].before = restarts
    if request_number is None:

        def reward(completions, **kwargs):
            servers["bpe"].instance = "second"
            return digit_reward(completions)

        trainer.agents[1].reward_funcs = [reward]
    with pytest.raises(RuntimeError, match=f"agent 'bpe': .* failed in {method}: it was started anew"):
        trainer.train()
    assert servers["bpe"].requests == (request_number or 1)


def test_servers_of_several_processes_are_not_told_apart():
    assert server_instance({"instance_id": "1", "parallel_config": {"_api_process_count": 1}}) == "1"
    assert server_instance({"instance_id": "1", "parallel_config": {"_api_process_count": 2}}) is None
    assert server_instance({}) is None


def test_a_server_that_is_not_there_is_named(monkeypatch, agent_folders, tmp_path):
    use_fake_servers(monkeypatch, {"char": agent_folders["char"]})
    with pytest.raises(ConnectionError, match="agent 'bpe': .*http://bpe:8000"):
        team(agent_folders, NAMES, vllm_config(tmp_path), agent_names=NAMES)


@pytest.mark.parametrize("is_main", [True, False])
def test_the_turn_is_handed_on_between_the_same_collectives_on_all_processes(monkeypatch, is_main):
    """With two agents; the process with the client and those without must keep one order."""
    events, turns = [], Turns()

    def agent(name):
        def gather(value):
            events.append(f"{running[0]} gathers")
            return value * 2

        def broadcast(objects, from_process):
            events.append(f"{running[0]} broadcasts")
            objects[0] = ([[1], [1]], [[2], [2]], [[[-1.0]], [[-1.0]]], None)

        def answer(**kwargs):
            return {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[[-1.0]]]}

        monkeypatch.setattr(vllm_generation, "gather_object", gather)
        monkeypatch.setattr(vllm_generation, "broadcast_object_list", broadcast)
        generation = object.__new__(VLLMGeneration)
        client = SimpleNamespace(base_url=name, get_server_info=dict)
        for method in ("generate", "update_named_params", "reset_prefix_cache"):
            setattr(client, method, answer if method == "generate" else lambda: None)
        accelerator = SimpleNamespace(is_main_process=is_main, process_index=0 if is_main else 1)
        vars(generation).update(
            dict.fromkeys("temperature top_p top_k min_p repetition_penalty structured_outputs_regex".split()),
            mode="server", accelerator=accelerator, max_completion_length=1, logprobs=0, generation_kwargs={},
            vllm_client=client,
        )  # fmt: skip

        def out_of_turn(function):
            value = turns.pause(function)
            running[0] = name
            return value

        connect(generation, name, out_of_turn)

        def sample():
            running[0] = name
            generation.generate(prompts=[[1]], images=None, num_generations=1)
            assert generation.accelerator is accelerator

        return sample

    running = [None]
    turns.run([agent("a"), agent("b")])
    gathers = ["a gathers", "a gathers", "b gathers", "b gathers"]  # prompts and images
    assert events == [*gathers, "a broadcasts", "b broadcasts"]


def test_the_parts_of_trl_that_lead_to_a_server_are_there(monkeypatch, agent_folders, tmp_path):
    trainer, _ = vllm_team(monkeypatch, agent_folders, vllm_config(tmp_path))
    for path in VLLM_ATTRIBUTES:
        assert operator.attrgetter(path)(trainer) is not None, f"a trainer with vLLM has no {path} any more"


def test_an_engine_that_changed_the_trainers_model_is_refused(monkeypatch):
    class Changed(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Changed(1, 1))
    check_engine(model, "a")
    monkeypatch.setattr(Changed, "__module__", "vllm.compilation.wrapper")
    with pytest.raises(ValueError, match="agent 'a': vLLM has no implementation of Changed.*vllm_mode='server'"):
        check_engine(model, "a")


# -- log-probabilities ----------------------------------------------------------------------------------------------


def sampled_rollouts(trainer):
    """What all agents sample in a first round, with the log-probabilities that its losses compare with."""
    inputs = next(iter(trainer.get_train_dataloader()))
    rollouts = [agent.sample(inputs) for agent in trainer.agents]
    for agent in trainer.agents:
        ones = torch.ones(2, len(rollouts[0]))
        agent.begin_round(rollouts, ones, ones, ones.bool())
        agent.plan_updates()
    for agent, peer in zip(trainer.agents, reversed(trainer.agents), strict=True):
        agent.measure(peer.heard(agent.agent_index), all_rows=True)
    return rollouts


@torch.no_grad()
def trainers_sums(agent, rollout):
    """(R,) log-probability of every response under the agent's weights, in one batch."""
    batch = agent._collate(own_rows(rollout, agent.agent_index, torch.zeros(len(rollout))))
    return (agent._logps_of(agent.model, batch)[0] * batch["completion_mask"]).sum(-1)


def corrections(agent):
    """The own responses' corrections by their place in the rollout."""
    rows = {row.index: row for row in agent._own_rows}
    return [rows[i].per_token["importance_sampling_ratio"] for i in range(len(rows))]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_own_responses_are_corrected_for_the_sampler(monkeypatch, agent_folders, tmp_path, mode):
    args = vllm_config(tmp_path, vllm_importance_sampling_mode=mode)
    shift = {"logprobs": lambda values: [value + 0.05 for value in values]}  # the sampler is more sure than it may
    trainer, _ = vllm_team(monkeypatch, agent_folders, args, server=shift)
    rollouts = sampled_rollouts(trainer)
    agent, rollout = trainer, rollouts[0]
    for ids, ratio in zip(rollout.completion_ids, corrections(agent), strict=True):
        exponent = -0.05 * (len(ids) if mode.startswith("sequence") else 1)
        assert torch.allclose(ratio, torch.full_like(ratio, math.exp(exponent)), atol=1e-4)
    # peers compare with the training weights
    assert torch.allclose(rollout.logp_sums, trainers_sums(agent, rollout), atol=1e-4)
    assert rollout.peer_logp_sums is rollout.logp_sums

    rows = [row for step in agent._plan for row in step if row.source == 0][:1]
    batch = {**agent._collate(rows), "update_index": 0, "is_first": False}
    corrected = agent._compute_loss(agent.model, dict(batch))
    factor = batch.pop("importance_sampling_ratio")[0, 0]
    assert torch.allclose(corrected, agent._compute_loss(agent.model, batch) * factor, atol=1e-6)
    assert corrected != 0 and factor < 0.96


@pytest.mark.parametrize("correction", [True, False])
def test_source_logps_of_the_sampler(monkeypatch, agent_folders, tmp_path, correction):
    args = vllm_config(tmp_path, source_logps="sampler", vllm_importance_sampling_correction=correction)
    shift = {"logprobs": lambda values: [value + 0.05 for value in values]}
    trainer, _ = vllm_team(monkeypatch, agent_folders, args, server=shift)
    forwards = []
    for agent in trainer.agents:
        logps = agent._get_per_token_logps_and_entropies
        agent._get_per_token_logps_and_entropies = lambda *a, logps=logps, **k: forwards.append(1) or logps(*a, **k)
    rollouts = sampled_rollouts(trainer)
    assert len(forwards) == (4 if correction else 0)  # the passes over the own responses are saved
    for agent, rollout in zip(trainer.agents, rollouts, strict=True):
        trainers = trainers_sums(agent, rollout)
        samplers = trainers + 0.05 * torch.tensor([float(len(ids)) for ids in rollout.completion_ids])
        assert torch.allclose(rollout.peer_logp_sums, samplers, atol=1e-4)
        assert torch.allclose(rollout.logp_sums, trainers if correction else samplers, atol=1e-4)
        assert ("importance_sampling_ratio" in agent._own_rows[0].per_token) == correction


def test_an_exact_sampler_trains_the_same_weights_as_the_trainers_log_probabilities(
    monkeypatch, agent_folders, tmp_path
):
    results = []
    for source, correction in (("trainer", True), ("trainer", False), ("sampler", True), ("sampler", False)):
        args = vllm_config(tmp_path, source_logps=source, vllm_importance_sampling_correction=correction)
        trainer, _ = vllm_team(monkeypatch, agent_folders, args)
        trainer.train()
        results.append(all_weights(trainer))
    start = all_weights(vllm_team(monkeypatch, agent_folders, vllm_config(tmp_path))[0])
    for other in results[1:]:
        for first, second, old in zip(results[0], other, start, strict=True):
            assert (first - second).abs().max() < 1e-5 < 1e-4 < (first - old).abs().max()


def test_usable_logprobs():
    for bad in (None, math.nan, math.inf, -math.inf, -9999.0):
        values, unusable = usable_logprobs([[-1.0, -2.0], [-1.0, bad], []])
        assert values[0] == [-1.0, -2.0] and values[2] == [] and unusable == 1
        assert all(math.isnan(value) for value in values[1])


@pytest.mark.parametrize("source", ["trainer", "sampler"])
@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, -9999.0])
def test_log_probabilities_that_are_not_finite_reach_no_loss(
    monkeypatch, agent_folders, tmp_path, source, correction, bad
):
    count = [0]

    def spoil(values):
        count[0] += 1
        return [*values[:-1], bad] if count[0] % 3 == 0 else [value + 0.05 for value in values]

    args = vllm_config(tmp_path, max_rounds=1, source_logps=source, vllm_importance_sampling_correction=correction)
    trainer, _ = vllm_team(monkeypatch, agent_folders, args, server={"logprobs": spoil})
    rollout = sampled_rollouts(trainer)[0]
    spoilt = torch.tensor([(i + 1) % 3 == 0 for i in range(len(rollout))])
    peers = rollout.peer_logp_sums
    assert torch.isfinite(peers).all() and torch.isfinite(rollout.logp_sums).all()
    assert torch.allclose(peers[spoilt], trainers_sums(trainer, rollout)[spoilt], atol=1e-4)
    if correction:
        for i, ratio in enumerate(corrections(trainer)):
            assert (ratio == 1).all() == spoilt[i]
    trainer.train()
    for vector in all_weights(trainer):
        assert torch.isfinite(vector).all()


def test_a_server_with_other_log_probabilities_is_refused_as_source(monkeypatch, agent_folders, tmp_path):
    with pytest.raises(ValueError, match="agent 'char': .*http://char:8000 runs with --logprobs-mode raw_logprobs"):
        vllm_team(
            monkeypatch, agent_folders, vllm_config(tmp_path, source_logps="sampler"), server={"mode": "raw_logprobs"}
        )
