"""Ctrl-C: all threads end, the newest checkpoint is named, status 130, no traceback, no abort.

The commands run in processes of their own that get a real SIGINT, as the terminal sends it, while they sample or
update: what they sample or update is repeated without end until then.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.tiny_teams import config, team

from hacpo_trl.cli.console import end_interrupted
from hacpo_trl.playground import shipped_agent
from hacpo_trl.sampling.turn_taking import Turns, agents_are_running

ROOT = Path(__file__).parents[2]
MODELS = [shipped_agent("tiny-char"), shipped_agent("tiny-bpe")]
SMALL = "--use_cpu --bf16 false --num_generations 4 --per_device_train_batch_size 4 --report_to none".split()
SMALL += "--max_completion_length 16 --max_rounds 3 --reward_funcs grader.reward --output_dir out".split()

# Announces and then repeats without end a method of an agent, from the given round on
GRADER = """
import threading
from hacpo_trl.training.agent import HACPOAgent

def repeat(name, first_step):
    method = getattr(HACPOAgent, name)
    def repeated(self, *args, **kwargs):
        if self.team_state().global_step >= first_step:
            print("now", flush=True)
            assert (threading.current_thread() is threading.main_thread()) == (name == "_compute_loss")
            while True:
                method(self, *args, **kwargs)
        return method(self, *args, **kwargs)
    setattr(HACPOAgent, name, repeated)

repeat({name!r}, {first_step})

def reward(completions, **columns):
    return [float(len(completion) % 2) for completion in completions]
"""


def command(*options):
    return ["train", "--models", *MODELS, "--dataset", "ok.jsonl", *SMALL, *options]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A run that samples, after a checkpoint, and one that updates, before one; side by side."""
    cases = {
        "sampling": ("_generate_single_turn", 8, command("--save_steps", "8")),
        "updating": ("_compute_loss", 0, command()),
    }
    running = {}
    for case, (method, first_step, arguments) in cases.items():
        folder = tmp_path_factory.mktemp(case)
        rows = [{"problem": f"1 + {i}?", "answer": str(1 + i)} for i in range(8)]
        (folder / "ok.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "grader.py").write_text(GRADER.format(name=method, first_step=first_step))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        arguments = [sys.executable, "-m", "hacpo_trl.cli", *arguments]
        process = subprocess.Popen(arguments, cwd=folder, env=environment, start_new_session=True, **pipes)
        running[case] = process, folder
    yield running
    for process, _ in running.values():
        process.kill()
        process.communicate()


def interrupt(process):
    """Sends SIGINT to the whole group, as a terminal does, when the moment has come.

    Returns:
        The status, the lines of the output, and those of the error stream.
    """
    lines = []
    for line in process.stdout:
        if line == "now\n":
            break
        lines.append(line)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "terminate called" not in err, err
    return process.returncode, lines + out.splitlines(), err.splitlines()


def test_while_sampling_it_names_the_newest_checkpoint(processes):
    process, folder = processes["sampling"]
    status, shown, lines = interrupt(process)
    assert status == 130
    # Nothing but our own lines, from the first on: no warning, no bar, no notice of a library
    starts = [line.split(" ")[0] for line in shown]
    assert starts[:4] == ["Prompts:", "Loading", "Every", "round"] and set(starts[4:]) <= {"round", "Warning:"}, shown
    assert lines[0] == "" and lines[1:] == [
        "hacpo train: interrupted. 2 rounds done. The newest checkpoint is out/checkpoint-8. To go on from it, run "
        "the same command with --resume_from_checkpoint out/checkpoint-8"
    ]
    assert (folder / "out" / "checkpoint-8" / "hacpo_state.json").exists()


def test_while_updating_without_a_checkpoint(processes):
    status, _, lines = interrupt(processes["updating"][0])
    assert status == 130
    assert lines[-1] == (
        "hacpo train: interrupted. 0 rounds done. There is no checkpoint yet: --save_strategy is 'steps', "
        "--save_steps 500, and a round has 4 updates. --save_strategy steps --save_steps 4 saves every round."
    )


def test_a_trainer_raises_the_interrupt_when_all_threads_have_ended(agent_folders, tmp_path):
    trainer = team(agent_folders, ["char", "bpe"], config(tmp_path, max_rounds=3, save_strategy="steps", save_steps=4))
    generate = type(trainer)._generate_single_turn

    def endless(agent, *args, **kwargs):
        if trainer.state.global_step >= 4:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                generate(agent, *args, **kwargs)
        return generate(agent, *args, **kwargs)

    for agent in trainer.agents:
        agent._generate_single_turn = functools.partial(endless, agent)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not agents_are_running()
    assert trainer.last_checkpoint == str(tmp_path / "checkpoint-4")
    for agent in trainer.agents:
        del agent._generate_single_turn
    trainer.train(resume_from_checkpoint=trainer.last_checkpoint)
    assert trainer.state.global_step == 12


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_wait_for_their_threads():
    turns, ended = Turns(), []

    def works():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                turns.check()
        finally:
            threading.Event().wait(0.2)  # in the midst of something
            ended.append("works")

    def waits():
        try:
            turns.pause(lambda: None)
        finally:
            ended.append("waits")

    with pytest.raises(KeyboardInterrupt):
        turns.run([works, waits])
    assert "works" in ended and not agents_are_running()
    assert turns.run([lambda: 1, lambda: 2]) == [1, 2]


def test_a_second_interrupt_does_not_wait(monkeypatch):
    turns, release = Turns(), threading.Event()

    def hangs():
        os.kill(os.getpid(), signal.SIGINT)
        while not turns._stopped:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        release.wait()

    with pytest.raises(KeyboardInterrupt):
        turns.run([hangs, lambda: None])
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    with pytest.raises(SystemExit, match="130"):  # not in the ordinary way
        end_interrupted("train", "", at_once=agents_are_running())
    release.set()


def test_outside_of_a_thread_nothing_is_checked():
    turns = Turns()
    turns._stop()
    turns.check()
