"""Two processes equal one, with DDP, DeepSpeed and FSDP2 on a CPU; killed runs resume and end at the same weights."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl.reporting.run_page import completion_tables

WORKER = Path(__file__).parents[1] / "support" / "team_worker.py"
ROOT = Path(__file__).parents[2]
OVERRIDES = {"bpe": {"learning_rate": 3e-3, "max_grad_norm": 0.3, "beta": 0.05}}
# Adam blows float noise up to full steps where gradients are tiny: a large epsilon bounds it
COMMON = {
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "beta": 0.1,
    "peer_clip_delta": 0.9,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-2,
    "max_rounds": 3,
    "log_completions": True,
}


def run(folder, agent_folders, processes, *, worker=WORKER, expect=0, environment=None, **settings):
    """Runs the worker; returns each agent's saved weights and the report, with its tables of completions."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = dict(settings.pop("config", {}))
    rows = changes.pop("rows", 8)  # responses of a micro-batch on all processes together
    settings = {
        "output_dir": str(folder / "out"),
        "models": [agent_folders["char"], agent_folders["bpe"]],
        "names": ["char", "bpe"],
        "config": {
            **COMMON,
            "per_device_train_batch_size": rows // processes,
            "agent_overrides": OVERRIDES,
            **changes,
        },
        **settings,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, str(worker), str(folder / "settings.json")]
    if processes > 1:
        settings["config"].setdefault("ddp_backend", "gloo")
        (folder / "settings.json").write_text(json.dumps(settings))
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=480,  # DeepSpeed compiles an operation once on a new machine
    )
    assert (done.returncode == 0) == (expect == 0), done.stderr[-5000:]
    if expect:
        return None, None
    out = Path(settings["output_dir"])
    weights = [load(out / "final" / name) for name in settings["names"]]
    report = json.loads((out / "report.json").read_text())
    report["completions"] = [pandas.read_parquet(path) for path in completion_tables(str(out)).values()]
    return weights, report


def load(folder):
    """Weights by name, as a user loads them; of an adapter its own."""
    adapter = folder / "adapter_model.safetensors"
    return load_file(adapter) if adapter.exists() else AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same(expected, actual, atol):
    for a, b in zip(expected, actual, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(
                a[name].float(), b[name].float(), atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_same_history(expected, actual):
    for ours, theirs in zip(actual["history"][:-1], expected["history"][:-1], strict=True):
        keys = [k for k in theirs if k.startswith("pair/") or k.endswith(("/reward", "/kl", "/loss", "/entropy"))]
        assert len(keys) > 5
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], abs=2e-4), key


@pytest.fixture(scope="module")
def single(agent_folders, tmp_path_factory):
    """The runs in one process, full and with an adapter."""
    root = tmp_path_factory.mktemp("single")
    return {
        "full": run(root / "full", agent_folders, 1),
        "lora": run(root / "lora", agent_folders, 1, lora=[True, False]),
    }


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_processes_equal_one(agent_folders, tmp_path, single, kind):
    """The first steps in every update, with rows that only fill a pass where none teaches; the second does not."""
    settings = {"lora": [True, False], "config": {"skip_idle_updates": True}} if kind == "lora" else {}
    expected, expected_report = run(tmp_path / "one", agent_folders, 1, **settings) if settings else single["full"]
    weights, report = run(tmp_path / "two", agent_folders, 2, **settings)
    assert_same(expected, weights, atol=2e-5)
    assert report["capability"] == expected_report["capability"]
    assert_same_history(expected_report, report)
    assert [len(table) for table in report["completions"]] == [2 * 16] * 3
    for ours, theirs in zip(report["completions"], expected_report["completions"], strict=True):
        pandas.testing.assert_frame_equal(ours, theirs, check_exact=False, atol=1e-5)


@pytest.mark.parametrize(("method", "settings"), [("graft", {"floor": 0.0, "balance": False}), ("sgt", {})])
def test_methods_that_count_tokens_or_peers_over_the_processes(agent_folders, tmp_path, method, settings):
    """Denominators are of the whole update, whoever holds its rows; a process may have none of them."""
    changes = {"config": {"method": method, "method_settings": settings, "agent_overrides": None}}
    expected, expected_report = run(tmp_path / "one", agent_folders, 1, **changes)
    weights, report = run(tmp_path / "two", agent_folders, 2, **changes)
    assert_same(expected, weights, atol=2e-5)
    assert_same_history(expected_report, report)
    taken = [entry[key] for entry in report["history"] for key in entry if key.endswith("/taken")]
    assert max(taken) > 0


def test_sleeping_agents_under_ddp(agent_folders, tmp_path, single):
    """Gradients lie in DDP's buckets and nowhere else, and those of an agent that sleeps are not on the device."""
    settings = {"offload_inactive_agents": True, "gradient_checkpointing": True}
    weights, report = run(tmp_path, agent_folders, 2, config=settings)
    assert_same(single["full"][0], weights, atol=2e-5)
    assert all(report["memory"]["gradients"]) and len(report["memory"]["gradients"]) == 2 * 6
    largest = max(sum(w.nbytes for w in agent.values()) for agent in weights)
    # weights, gradients, two moments and the reference: five times the weights, those of the tied head counted twice
    assert report["memory"]["peak"] <= 5 * largest


def test_groups_may_straddle_processes(agent_folders, tmp_path):
    """One prompt with 16 responses, 8 of them on each process. Many are too long for one of the learners."""
    overrides = {**OVERRIDES, "bpe": {**OVERRIDES["bpe"], "max_completion_length": 6}}
    settings = {"num_generations": 16, "agent_overrides": overrides}
    expected, one = run(tmp_path / "one", agent_folders, 1, config=settings)
    weights, two = run(tmp_path / "two", agent_folders, 2, config=settings)
    assert_same(expected, weights, atol=2e-5)
    assert one["capability"] == two["capability"]
    told = [log["pair/char->bpe/truncated"] for log in one["history"] if "pair/char->bpe/truncated" in log]
    assert 0.1 < min(told) < 1, told
    for ours, theirs in zip(two["history"][:-1], one["history"][:-1], strict=True):
        for key in (k for k in theirs if k.startswith("pair/")):
            assert ours[key] == pytest.approx(theirs[key], abs=2e-4, rel=1e-4), key


@pytest.fixture(scope="module")
def zero_environment(tmp_path_factory):
    """Environment of a DeepSpeed run on the CPU, by ZeRO stage."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path.home() / ".cache" / "torch_extensions"))
    for lock in folder.glob("**/deepspeed_shm_comm/lock"):
        if time.time() - lock.stat().st_mtime > 600:  # of a build that was killed: torch would wait for it for ever
            lock.unlink(missing_ok=True)

    def environment(stage):
        path = tmp_path_factory.mktemp("deepspeed") / f"zero{stage}.json"
        zero = {"stage": stage, "overlap_comm": False}
        if stage == 3:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        names = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        path.write_text(json.dumps({**dict.fromkeys(names, "auto"), "zero_optimization": zero}))
        return {
            "DS_ACCELERATOR": "cpu",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # for ninja
        }

    return environment


ZERO = {"use_cpu": False}


@pytest.mark.parametrize(("stage", "kind"), [(3, "full"), (3, "lora"), (2, "full")])
def test_zero_equals_one_process(agent_folders, tmp_path, single, zero_environment, stage, kind):
    lora = {"lora": [True, False]} if kind == "lora" else {}
    weights, report = run(tmp_path, agent_folders, 2, environment=zero_environment(stage), config=ZERO, **lora)
    expected, expected_report = single[kind]
    assert_same(expected, weights, atol=1e-4)
    assert report["capability"] == expected_report["capability"]
    leader, peer = report["engines"]
    assert leader["gradient_clipping"] == 1.0 and peer["gradient_clipping"] == 0.3
    assert leader["gradient_accumulation_steps"] == peer["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_sleeping_agents_under_zero_3(agent_folders, tmp_path, single, zero_environment, kind):
    lora = {"lora": [True, False]} if kind == "lora" else {}
    settings = {**ZERO, "offload_inactive_agents": True, "save_strategy": "steps", "save_steps": 2}
    weights, _ = run(tmp_path, agent_folders, 2, environment=zero_environment(3), config=settings, **lora)
    assert_same(single[kind][0], weights, atol=1e-4)
    assert (tmp_path / "out" / "checkpoint-6" / "bpe").exists()


def test_sleeping_agents_need_zero_3(agent_folders, tmp_path, zero_environment):
    settings = {**ZERO, "offload_inactive_agents": True}
    run(tmp_path, agent_folders, 2, expect=1, environment=zero_environment(2), config=settings)


def test_a_shared_base_under_zero_3(agent_folders, tmp_path, zero_environment):
    """A saved adapter, which goes on training, and a new one on one sharded base: as in one process."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(agent_folders["bpe"]), adapter)
    model.save_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(agent_folders["bpe"]).save_pretrained(tmp_path / "one")
    settings = {
        "models": [str(tmp_path / "one"), agent_folders["bpe"]],
        "names": ["one", "bpe"],
        "lora": [False, True],
    }
    expected, _ = run(tmp_path / "single", agent_folders, 1, **settings)
    weights, report = run(
        tmp_path / "zero", agent_folders, 2, environment=zero_environment(3), **settings, config=ZERO
    )
    assert_same(expected, weights, atol=1e-4)
    assert report["shared_parameters"] > 0
    with pytest.raises(AssertionError):  # it has moved
        assert_same([load(tmp_path / "one")], weights[:1], atol=1e-3)


@pytest.mark.parametrize(
    ("kill", "left", "stage"),
    [
        ("sampling 2 bpe", "checkpoint-4", None),  # in the last round, before anybody learned from it
        ("updating 5", "checkpoint-4", None),  # the peer has made an update that the leader has not
        ("saving 4", "checkpoint-2", None),
        ("saving 4", "checkpoint-2", 3),
        ("updating 5", "checkpoint-4", 3),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(
    agent_folders, tmp_path, single, zero_environment, kill, left, stage
):
    environment = zero_environment(stage) if stage else None
    saving = {"save_strategy": "steps", "save_steps": 2, **(ZERO if stage else {})}
    run(tmp_path, agent_folders, 2, expect=1, kill=kill, config=saving, environment=environment)
    checkpoints = sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*"))
    assert checkpoints[-1] == left
    weights, report = run(tmp_path, agent_folders, 2, resume=True, config=saving, environment=environment)
    expected, expected_report = single["full"]
    assert_same(expected, weights, atol=1e-4 if stage else 2e-5)
    assert report["capability"] == expected_report["capability"]
    for ours, theirs in zip(report["completions"], expected_report["completions"], strict=True):
        pandas.testing.assert_frame_equal(ours, theirs, check_exact=False, atol=1e-5)


FSDP = {
    # What `accelerate launch` makes of fsdp2.yaml, and the arguments
    "launcher": (
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        },
        {},
    ),
    "arguments": (
        {},
        {
            "fsdp": True,
            "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"},
            "gradient_checkpointing": True,
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": False}},
        },
    ),
}


@pytest.mark.parametrize(("by", "kind"), [("launcher", "lora"), ("arguments", "full")])
def test_fsdp_equals_one_process(agent_folders, tmp_path, single, by, kind):
    """Two processes that hold half of everything; saved, resumed, generating, and giving vLLM whole weights."""
    environment, settings = FSDP[by]
    lora = {"lora": [True, False]} if kind == "lora" else {}
    settings = {**settings, "use_cpu": False, "save_strategy": "steps", "save_steps": 2}
    worker = WORKER.with_name("fsdp_worker.py")
    weights, report = run(tmp_path, agent_folders, 2, worker=worker, fsdp=environment, config=settings, **lora)
    expected, expected_report = single[kind]
    assert_same(expected, weights, atol=2e-5)
    assert report["capability"] == expected_report["capability"]
    out, names = tmp_path / "out", ["char", "bpe"]

    def saved(folder):
        return [load(out / folder / name) for name in names]

    assert_same(weights, saved("resumed"), atol=0)
    assert_same(saved("checkpoint-2"), saved("best"), atol=0)
    with pytest.raises(AssertionError):
        assert_same(weights, saved("best"), atol=1e-3)
    for rank in range(2):
        told = json.loads((out / f"fsdp-{rank}.json").read_text())
        assert told["plugins"] == 2
        assert told["held"] == pytest.approx([0.5, 0.5], abs=0.01)
        assert told["reference held"] == [None if kind == "lora" else pytest.approx(0.5, abs=0.01), 0.5]
        for name, tokens in zip(names, told["greedy"], strict=True):
            whole = whole_model(out / "final" / name)
            prompt = AutoTokenizer.from_pretrained(out / "final" / name)(f"{12 + rank} + 7 =", return_tensors="pt")
            length = 3 + 6 * rank
            ours = whole.generate(**prompt, do_sample=False, min_new_tokens=length, max_new_tokens=length)
            assert ours[0].tolist() == tokens
            synced = torch.load(out / f"synced-{name}-{rank}.pt")
            assert whole.state_dict().keys() - synced.keys() == {"lm_head.weight"}  # tied
            for key, value in synced.items():
                torch.testing.assert_close(value, whole.state_dict()[key], atol=1e-6, rtol=0)
        if by == "arguments":  # float32 log-probabilities that no policy has rounded; weights handed on whole
            assert told["bf16"]["types"] == ["(torch.float32, False)"]
            assert all(math.isfinite(value) for value in told["bf16"]["history"].values())
            initial = [load(Path(agent_folders[name])) for name in names]
            assert_same(initial, saved("bf16"), atol=0)


def whole_model(folder):
    if (folder / "adapter_model.safetensors").exists():
        return AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_failing_rank_stops_the_run_at_once(agent_folders, tmp_path):
    started = time.monotonic()
    run(tmp_path, agent_folders, 2, expect=1, fail_on_rank=1)
    assert time.monotonic() - started < 90
