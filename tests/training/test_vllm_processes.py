"""Rollouts from (stand-ins for) vLLM servers in two processes: only the first one talks to the servers."""

import time

import pytest
from test_processes import ZERO, assert_same, run, zero_environment  # noqa: F401  (a fixture)

VLLM = {"use_vllm": True, "vllm_mode": "server", "learning_rate": 1e-3}


def vllm_settings(names, **changes):
    return {**VLLM, "vllm_server_urls": [f"http://{name}:8000" for name in names], **changes}


@pytest.mark.parametrize(("stage", "kind"), [(None, "full"), (3, "full"), (3, "shared base")])
def test_two_processes_equal_one(agent_folders, tmp_path, zero_environment, stage, kind):  # noqa: F811
    """No server answers before all have been asked, and the weights that they get are whole."""
    names = ["char", "bpe"] if kind == "full" else ["one", "bpe"]
    settings = {"vllm": True, "names": names}
    if kind == "shared base":
        settings.update(models=[agent_folders["bpe"]] * 2, lora=[True, True])
    expected, _ = run(tmp_path / "one", agent_folders, 1, config=vllm_settings(names), **settings)
    zero = {"environment": zero_environment(stage)} if stage else {}
    config = vllm_settings(names, **(ZERO if stage else {}))
    weights, report = run(tmp_path / "two", agent_folders, 2, config=config, **settings, **zero)
    assert_same(expected, weights, atol=1e-4)
    for name in names:
        key = f"{name}/sampling/sampling_logp_difference/max"
        differences = [entry[key] for entry in report["history"] if key in entry]
        assert len(differences) == 3 and max(differences) < 1e-4


def test_a_server_that_fails_stops_all_processes(agent_folders, tmp_path):
    started = time.monotonic()
    run(tmp_path, agent_folders, 2, expect=1, vllm="bpe fails", config=vllm_settings(["char", "bpe"]))
    assert time.monotonic() - started < 90
