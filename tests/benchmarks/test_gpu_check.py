"""benchmarks/gpu_check.py in its small mode: every check runs here, too, and what goes wrong is told."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("gpu_check", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(check, tmp_path, *names):
    out = tmp_path / "results.json"
    code = check.main(["--small", "--out", str(out), "--only", *names])
    written = json.loads(out.read_text())["checks"]
    errors = {name: result.get("error") for name, result in written.items()}
    assert code == 0 and set(errors.values()) == {None}, errors
    return {name: result["figures"] for name, result in written.items()}


def test_in_one_process(check, tmp_path):
    figures = results(check, tmp_path, "playground", "float32", "bfloat16", "memory", "speed")
    assert figures["float32"]["difference"] <= 1e-5
    rounded = figures["bfloat16"]
    assert 0 < rounded["difference_over_movement"] < 0.05 and rounded["clipped_at_first_update"] == [0.0, 0.0]
    memory = figures["memory"]
    assert memory["awake_states_GiB"] == pytest.approx(memory["awake_states_planned_GiB"], rel=0.01)
    assert memory["asleep_states_GiB"] < 0.8 * memory["awake_states_GiB"]
    assert memory["park_and_wake_GB_per_second"] > 0
    assert figures["speed"]["updating_seconds"] > 0 and figures["speed"]["over_two_grpo_trainers"] > 0


def test_in_two_processes(check, tmp_path):
    assert results(check, tmp_path, "ranks")["ranks"]["difference"] <= 2e-5


def test_a_failure_is_told_and_the_next_check_runs(check, tmp_path, monkeypatch, capsys):
    def broken(folder, small):
        raise ValueError("this one is broken")

    def wrong(folder, small):
        raise check.Failed("the figures are wrong", {"seconds": 3.0})

    def endless(folder, small):
        while True:
            time.sleep(0.01)

    def refused(folder, small):
        return {"refused": "ValueError: FSDP is not supported"}

    checks = {"broken": (broken, 1), "refused": (refused, 1), "endless": (endless, 1), "late": (refused, 1)}
    checks = {"wrong": (wrong, 1), **checks}
    monkeypatch.setattr(check, "CHECKS", checks)
    out = tmp_path / "results.json"
    assert check.run(list(checks), 5, True, str(out)) == 1
    written = {name: result["status"] for name, result in json.loads(out.read_text())["checks"].items()}
    assert written == {
        "wrong": "failed",
        "broken": "failed",
        "refused": "refused",
        "endless": "failed",
        "late": "not run",
    }
    told = capsys.readouterr().out
    assert "Failed: the figures are wrong, seconds 3" in told
    assert "broken: failed" in told and "ValueError: this one is broken" in told
    assert "endless: failed" in told and "TimeoutError" in told and "late: not run" in told
    assert "1 refused, 3 failed, 1 not run" in told


def test_checks_fit_into_their_time(check):
    """The order is that of what they tell; the first ones always fit."""
    assert list(check.CHECKS)[:4] == ["playground", "float32", "bfloat16", "ranks"]
    assert sum(needed for _, needed in list(check.CHECKS.values())[:6]) <= 450
