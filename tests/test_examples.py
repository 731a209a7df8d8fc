"""The scripts run as a user starts them, and what they write is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hacpo_trl.playground import make_problems, shipped_agent
from hacpo_trl.reporting.plots import Evaluation, accuracy_table

ROOT = Path(__file__).parent.parent


def run_script(name, *arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def test_quickstart(tmp_path):
    done = run_script("quickstart.py", "--rounds", 1, "--held_out", 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tiny-char  greedy" in done.stdout and "round 1/1: tiny-char" in done.stdout
    assert (tmp_path / "quickstart_out" / "quickstart.png").stat().st_size > 10_000
    for name in ("tiny-char", "tiny-bpe"):
        assert (tmp_path / "quickstart_out" / name / "model.safetensors").exists()


def test_real_pair_trains_saves_and_measures_with_the_same_stop_texts(tmp_path):
    models = shipped_agent("tiny-char"), shipped_agent("tiny-bpe")
    done = run_script("real_pair.py", "--models", *models, "--rounds", 1, "--samples", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "before tiny-bpe" in done.stdout and "after tiny-bpe" in done.stdout
    for name in ("tiny-char", "tiny-bpe"):
        folder = tmp_path / "real_pair_out" / name
        trained = torch.load(folder / "training_args.bin", weights_only=False).stop_texts
        assert trained == json.loads((folder / "hacpo_prompt.json").read_text())["stop"] == ["\n"]


def test_train_math_on_a_local_file(tmp_path):
    rows = [{"problem": p["prompt"].strip(), "answer": p["answer"]} for p in make_problems(["addition"], 8, 0)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(
        f"models: [{shipped_agent('tiny-char')}, {shipped_agent('tiny-bpe')}]\n"
        "dataset: train.jsonl\noutput_dir: out\nagent_names: [a, b]\nmax_rounds: 1\nnum_generations: 4\n"
        "per_device_train_batch_size: 4\nmax_completion_length: 16\nuse_cpu: true\nbf16: false\n"
        "gradient_checkpointing: false\nreport_to: none\nsave_strategy: 'no'\npeer_clip_delta: 0.5\n"
        'agent_overrides: \'{"b": {"learning_rate": 1e-7}}\'\n'
    )
    done = run_script("train_math.py", "--config", "run.yaml", "--alpha", 0.5, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Prompts: plain" in done.stdout and "round 1/1: a" in done.stdout
    assert (tmp_path / "out" / "a" / "model.safetensors").exists()
    assert (tmp_path / "out" / "b" / "tokenizer.json").exists()


def test_dry_run_prints_the_plan(tmp_path):
    rows = [{"problem": p["prompt"].strip(), "answer": p["answer"]} for p in make_problems(["addition"], 16, 0)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [
        "train", "--dry_run", "--models", shipped_agent("tiny-char"), shipped_agent("tiny-bpe"), "--output_dir", "out",
        "--dataset", "train.jsonl", "--use_cpu", "--num_generations", "4", "--per_device_train_batch_size", "4",
        "--gradient_accumulation_steps", "2", "--agent_overrides", '{"tiny-bpe": {"learning_rate": 5e-7}}',
        "--push_to_hub", "--hub_model_id", "me/team", "--max_completion_length", "64",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "hacpo_trl.cli", *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "4 prompts x 4 responses = 16 of each agent" in done.stdout
    assert "updates of an agent: 4, each on 8" in done.stdout
    assert "2 on its own responses" in done.stdout and "at most: 32 of each agent" in done.stdout
    assert "tiny-bpe" in done.stdout and "5e-07" in done.stdout
    assert "16 problems, 4 rounds, 16 updates of an agent" in done.stdout
    assert "pushed to the Hub: tiny-char to me/team-tiny-char, tiny-bpe to me/team-tiny-bpe" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arguments", "message"), [([], "Which models"), (["--models", "x"], "Which problems")])
def test_train_math_asks_for_what_is_missing(tmp_path, arguments, message):
    done = run_script("train_math.py", "--output_dir", "out", "--use_cpu", "--bf16", "false", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and f"hacpo train: error: {message}" in done.stderr


def test_table_of_accuracies():
    table = accuracy_table([Evaluation("a", "greedy", 0.25, 0.5, 100)])
    assert table.splitlines()[1].split() == ["a", "greedy", "0.250", "0.500", "+25.0", "points"]
    assert Evaluation("a", "greedy", 0.25, 0.5, 100).error == pytest.approx(0.05)
