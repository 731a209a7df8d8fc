"""Tests of the comparison of methods: what is run, what is taken for done, and the statistics of its tables."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import baseline_error
import compare_methods
import compare_report
import compare_settings
import gradient_cosine
from compare_settings import ARMS, SETTINGS, options_of, rounds_of, run_file, run_fingerprint
from support.tiny_teams import all_weights, config, dataset, team

from hacpo_trl import HACPOConfig
from hacpo_trl.playground import shipped_agent

TASKS = ("addition", "subtraction")


def write_run(folder, setting, agents, arm, seed, finals, fingerprint=None, rounds=None):
    """A result with accuracies 0.1 before and `finals[agent]` (greedy, sampled) after."""
    rounds = rounds or [0, SETTINGS[setting].rounds]
    last = SETTINGS[setting].rounds

    def point(agent, done):
        values = (0.1, 0.1) if done == 0 else finals[agent] if done == last else (0.9, 0.9)
        kinds = dict(zip(("greedy", "sampled"), values, strict=True))
        return {"round": done, "responses": 128 * done} | {
            kind: {"all": value, **dict.fromkeys(TASKS, value)} for kind, value in kinds.items()
        }

    run = {
        "fingerprint": fingerprint or run_fingerprint(agents, arm, rounds_of(setting, agents)),
        "agents": {agent: {"points": [point(agent, done) for done in rounds]} for agent in agents},
        "seconds": 360.0,
        "pairs": {f"{agents[0]}->{agents[-1]}": {"ratio_mean": [0.2, 0.4, 0.6, 0.8], "repelling": [0.5] * 4}},
    }
    path = run_file(folder, setting, agents, arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run))


def test_every_arm_is_a_valid_configuration_and_the_main_ones_have_five_seeds(tmp_path):
    for arm in ARMS:
        args = HACPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options_of(arm))
        assert args.rows_per_round == 128 * ARMS[arm].times, arm
        passes = 2 if arm == "gspo-two-passes" else 1
        assert args.updates_per_round(1) == 2 * ARMS[arm].times * passes, arm
        assert args.updates_per_round(2) == args.updates_per_round(1) * args.updates_factor(2), arm
        assert args.updates_factor(2) == 1 or not ARMS[arm].alone, arm
    assert all(ARMS[arm].seeds == 5 for arm in ("gspo", "gspo-x2", "hacpo"))
    assert all(ARMS[arm].seeds >= 3 for arm in ARMS)


def test_arms_do_not_follow_a_changed_default(monkeypatch):
    # every field that an arm or another arm sets is written out, so that a new default changes no arm
    named = {key for arm in ARMS.values() for key in arm.options}
    written_by_the_runner = {"num_iterations"}
    assert named - {"capability_coefficient", "method"} - written_by_the_runner <= options_of("hacpo").keys()


def test_twice_the_responses_at_the_same_prompts():
    once, twice = options_of("gspo"), options_of("gspo-x2")
    assert twice["num_generations"] == 2 * once["num_generations"]
    assert twice["steps_per_generation"] == 2 * once["steps_per_generation"]
    assert twice["per_device_train_batch_size"] == once["per_device_train_batch_size"]


def test_plan_asks_for_what_is_missing(tmp_path):
    arms = ["gspo", "hacpo"]
    jobs = compare_methods.plan(tmp_path, ["skill"], arms, 2)
    assert len(jobs) == 2 * 2 + 2  # two agents alone, one team; two seeds
    assert [job[3] for job in jobs] == sorted(job[3] for job in jobs)
    team = SETTINGS["skill"].agents
    done = dict.fromkeys(team, (0.5, 0.5))
    write_run(tmp_path, "skill", team, "hacpo", 0, done)
    write_run(tmp_path, "skill", team, "hacpo", 1, done, fingerprint="of other settings")
    write_run(tmp_path, "skill", team[:1], "gspo", 1, done)
    left = compare_methods.plan(tmp_path, ["skill"], arms, 2)
    assert set(jobs) - set(left) == {("skill", team, "hacpo", 0), ("skill", team[:1], "gspo", 1)}
    assert len(compare_methods.plan(tmp_path, ["skill"], ["hacpo"], 3)) == 2


def test_settings_share_the_runs_of_an_agent_alone(tmp_path):
    both = compare_methods.plan(tmp_path, ["skill", "four"], ["gspo"], 1)
    assert len(both) == 4  # llama-add and olmo-sub are in both
    assert rounds_of("four", ("olmo-sub",)) == SETTINGS["skill"].rounds > SETTINGS["four"].rounds
    assert run_file(tmp_path, "four", ("olmo-sub",), "gspo", 0) == run_file(
        tmp_path, "skill", ("olmo-sub",), "gspo", 0
    )


def test_long_settings_have_runs_of_their_own_of_agents_alone(tmp_path, monkeypatch):
    long = compare_settings.Setting(SETTINGS["skill"].agents, "a test", rounds=compare_settings.LONG + 8)
    monkeypatch.setitem(SETTINGS, "long", long)
    assert rounds_of("long", ("olmo-sub",)) == long.rounds and rounds_of("skill", ("olmo-sub",)) < long.rounds
    assert run_file(tmp_path, "long", ("olmo-sub",), "gspo", 0) != run_file(
        tmp_path, "skill", ("olmo-sub",), "gspo", 0
    )


def test_arms_of_a_setting():
    assert "hacpo-half-rate" in compare_settings.arms_of("four")
    assert "hacpo-half-rate" not in compare_settings.arms_of("skill")
    assert "shared-length" in compare_settings.arms_of("model")
    assert "shared-length" not in compare_settings.arms_of("size")  # one tokenizer: nothing changes


def test_every_agent_is_measured_at_the_end_of_every_setting():
    for name, setting in SETTINGS.items():
        assert setting.rounds % compare_methods.EVERY == 0, name


def test_changed_settings_change_the_fingerprint(monkeypatch):
    team = SETTINGS["skill"].agents
    before = run_fingerprint(team, "hacpo", 24)
    assert before == run_fingerprint(team, "hacpo", 24)
    assert before != run_fingerprint(team, "wide", 24) and before != run_fingerprint(team, "hacpo", 25)
    monkeypatch.setattr(compare_settings, "LEARNING_RATE", 2e-4)
    assert before != run_fingerprint(team, "hacpo", 24)


def test_estimate():
    assert compare_report.estimate([0.1, 0.2, 0.3]) == pytest.approx((0.2, 0.1 / math.sqrt(3)))
    center, error = compare_report.estimate([0.4])
    assert center == 0.4 and math.isnan(error)
    assert all(math.isnan(value) for value in compare_report.estimate([]))


def test_differences_are_paired_by_seed(tmp_path):
    team = SETTINGS["skill"].agents
    a, b = team
    for seed, (low, high) in enumerate([(0.2, 0.4), (0.3, 0.7)]):  # team 0.3 and 0.5, greedy
        write_run(tmp_path, "skill", (a,), "gspo", seed, {a: (low, 0.5)})
        write_run(tmp_path, "skill", (b,), "gspo", seed, {b: (high, 0.5)})
    for seed, values in enumerate([(0.3, 0.5), (0.4, 0.8), (0.0, 0.0)]):  # team 0.4, 0.6, and one without a partner
        write_run(tmp_path, "skill", team, "hacpo", seed, {a: (values[0], 0.6), b: (values[1], 0.6)})
    results = compare_report.Results(tmp_path, "skill")
    assert results.arms == ["gspo", "hacpo"] and results.seeds("hacpo") == [0, 1, 2]
    assert results.values("gspo", None, "greedy") == pytest.approx([0.3, 0.5])
    assert results.differences("hacpo", "gspo", None, "greedy") == pytest.approx([0.1, 0.1])
    assert results.differences("hacpo", "gspo", a, "sampled") == pytest.approx([0.1, 0.1])
    assert results.start(a, "greedy") == 0.1
    text = compare_report.write_report(tmp_path, ["skill"])
    assert "7 runs, 0.7 core hours" in text
    assert "| gspo | 2 | -10.0 ± 0.0 |" in text  # against HACPO
    assert "| hacpo | 2 | +10.0 ± 0.0 / +10.0 ± 0.0 |" in text
    assert "| hacpo | 2 | +10.0 ± 0.0 |" in text  # team's mean of greedy and sampled
    assert "| hacpo | 2 | +10.0 ± 0.0 | +10.0 ± 0.0 | +10.0 ± 0.0 |" in text  # of each agent and the team
    assert "0.20 → 0.80" not in text and "0.20 → 0.40" not in text  # quarters of 24 rounds: six rounds each
    assert (tmp_path / "tables.md").read_text() == text
    assert {path.name for path in tmp_path.glob("*.png")} == {"skill.png", "skill_pairs.png", "ablations.png"}


def test_a_shared_run_is_read_at_the_settings_own_length(tmp_path):
    agents = SETTINGS["four"].agents
    for agent in agents:
        rounds = [0, 8, 16, 24] if rounds_of("four", (agent,)) == 24 else [0, 8, 16]
        write_run(tmp_path, "four", (agent,), "gspo", 0, {agent: (0.4, 0.3)}, rounds=rounds)
    results = compare_report.Results(tmp_path, "four")
    assert results.values("gspo", None, "greedy") == pytest.approx([0.4])  # not the 0.9 of round 24


def test_results_of_other_settings_are_not_read(tmp_path):
    team = SETTINGS["skill"].agents
    write_run(tmp_path, "skill", team, "hacpo", 0, dict.fromkeys(team, (0.5, 0.5)), fingerprint="other")
    assert compare_report.Results(tmp_path, "skill").arms == []
    assert "no results" in compare_report.write_report(tmp_path, ["skill"])


def test_a_run_writes_its_points(tmp_path, monkeypatch):
    small = compare_settings.Setting(("one", "two"), "a test", rounds=2)
    for name, shipped in (("one", "tiny-bpe"), ("two", "tiny-bpe")):
        spec = compare_settings.AgentSpec(name, "olmo2", "bpe", 96, 4, 3, 448)
        monkeypatch.setitem(compare_settings.AGENTS, name, compare_settings.Recipe(spec, 0.2))
        target = tmp_path / "agents" / name
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(Path(shipped_agent(shipped)))
    monkeypatch.setitem(compare_settings.SETTINGS, "tiny", small)
    for module in (compare_settings, compare_methods):
        monkeypatch.setattr(module, "PROMPTS", 2)
        monkeypatch.setattr(module, "GENERATIONS", 4)
        monkeypatch.setattr(module, "HELD_OUT", 8)
    monkeypatch.setattr(compare_settings, "UPDATE_ROWS", 4)
    monkeypatch.setattr(compare_methods, "ROUNDS", 2)
    monkeypatch.setattr(compare_methods, "EVERY", 1)
    monkeypatch.setattr(
        compare_methods, "_start", lambda folder, name: {"greedy": {"all": 0.0}, "sampled": {"all": 0.0}}
    )
    compare_methods.train(tmp_path, "tiny", ("one", "two"), "hacpo", 0)
    run = json.loads(run_file(tmp_path, "tiny", ("one", "two"), "hacpo", 0).read_text())
    assert set(run["agents"]) == {"one", "two"} and set(run["pairs"]) == {"one->two", "two->one"}
    for entry in run["agents"].values():
        assert [(p["round"], p["responses"]) for p in entry["points"]] == [(0, 0), (1, 8), (2, 16)]
        assert len(entry["rewards"]) == 2 and entry["points"][-1]["samples"] == compare_settings.MEAN_OF
        assert entry["points"][1]["samples"] == 1
    assert run["fingerprint"] == run_fingerprint(("one", "two"), "hacpo", 2)
    assert compare_methods.plan(tmp_path, ["tiny"], ["hacpo"], 1) == []


def test_simulated_baselines():
    # where skills are in proportion the capability baseline has no bias for the weak learner and pooling has:
    # with chances .6 and .15 on average the pool's mean is .375
    rows = {
        (r["learner"], r["baseline"]): r
        for r in baseline_error.simulate("scaled", 4.0, generations=8, prompts=4000, seed=0)
    }
    assert abs(rows["weak", "capability"]["bias"]) < 4 * rows["weak", "capability"]["bias_error"]
    assert rows["weak", "pooled"]["bias"] == pytest.approx(0.225, abs=0.01)
    assert rows["strong", "pooled"]["bias"] == pytest.approx(-0.225, abs=0.01)
    assert rows["weak", "min_variance"]["rmse"] < rows["weak", "capability"]["rmse"] < rows["weak", "own"]["rmse"]


def test_a_probe_of_the_gradients_leaves_the_run_as_it_is(agent_folders, tmp_path):
    trainer = team(agent_folders, ["char", "bpe"], config(tmp_path, peer_clip_delta=0.9))
    before, state = all_weights(trainer), torch.get_rng_state()
    entries = gradient_cosine.probe(trainer, list(dataset(2)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, all_weights(trainer), strict=True))
    assert [(e["source"], e["learner"]) for e in entries] == [("bpe", "char"), ("char", "bpe")]
    assert any(e["all"] is not None for e in entries)
    assert all(agent.drain_statistics(reader) == [{}, {}] for agent in trainer.agents for reader in ("log", "round"))
