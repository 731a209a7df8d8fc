"""What a person sees while a team trains."""

import io
import math
import re
import sys
import time

import pytest
from support.tiny_teams import config, dataset, digit_reward, team

from hacpo_trl import HACPOTrainer
from hacpo_trl.reporting.advice import RoundSigns
from hacpo_trl.reporting.round_progress import RoundProgress, duration

PAIR = ["char", "bpe"]
NUMBER = r"(\d\.\d{3}|nan)"
LINE = re.compile(
    rf"round (\d+)/(\d+): char {NUMBER} \(P {NUMBER}\)  bpe {NUMBER} \(P {NUMBER}\)(?: \| peers heard (\d+) %)? \| "
    r"([^:|]+): ([^|]+?)(?: \| (.+) left)?"
)


def train(folders, args, **kwargs):
    trainer = HACPOTrainer([folders[name] for name in PAIR], digit_reward, args, dataset(), **kwargs)
    trainer.train()
    return trainer


class Output(io.StringIO):
    """A pipe or a terminal; remembers what had been written when it was flushed."""

    def __init__(self, terminal=False):
        super().__init__()
        self.terminal, self.flushed = terminal, ""

    def isatty(self):
        return self.terminal

    def flush(self):
        self.flushed = self.getvalue()


def test_a_line_a_round_without_a_terminal(agent_folders, tmp_path, monkeypatch):
    out, err = Output(), Output()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    trainer = train(agent_folders, config(tmp_path, max_rounds=3, disable_tqdm=False))
    lines = [LINE.fullmatch(line) for line in out.getvalue().splitlines() if line.startswith("round ")]
    assert all(lines) and [line.group(1, 2) for line in lines] == [("1", "3"), ("2", "3"), ("3", "3")]
    assert [line[10] is None for line in lines] == [False, False, True]  # after the last round nothing is left
    for line, entry in zip(lines, trainer.state.log_history[::4], strict=False):
        assert float(line[3]) == pytest.approx(entry["char/reward"], abs=6e-4)
        assert float(line[4]) == pytest.approx(entry["char/capability"], abs=6e-4)
        assert float(line[5]) == pytest.approx(entry["bpe/reward"], abs=6e-4)
        assert "sample " in line[9] and "update " in line[9]
        assert sum(map(int, re.findall(r"(\d+) %", line[9]))) == pytest.approx(100, abs=3)  # rounded
    assert "rounds:" not in err.getvalue()  # no bar
    assert out.flushed == out.getvalue()  # nothing waits in a buffer


def test_how_much_of_the_peers_responses_was_heard(agent_folders, tmp_path, capsys):
    """The share of a whole round, though the log is written after each of its updates."""
    trainer = train(agent_folders, config(tmp_path, max_rounds=1, logging_steps=4, peer_clip_delta=0.9))
    entry = trainer.state.log_history[0]
    heard = 1 - (entry["pair/char->bpe/no_gradient"] + entry["pair/bpe->char/no_gradient"]) / 2
    assert 0 < heard < 1 and f"| peers heard {100 * heard:.0f} % |" in capsys.readouterr().out
    train(agent_folders, config(tmp_path, max_rounds=1, logging_steps=1, peer_clip_delta=0.9))
    assert f"| peers heard {100 * heard:.0f} % |" in capsys.readouterr().out
    train(agent_folders, config(tmp_path, max_rounds=3, method="gspo", learning_rate=0.0))
    assert "peers" not in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True], ids=["file", "terminal"])
def test_warnings_stand_below_the_line_once(agent_folders, tmp_path, monkeypatch, terminal):
    out, err = Output(terminal), Output(terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    trainer = HACPOTrainer(
        [agent_folders[name] for name in PAIR],
        lambda completions, **_: [0.0] * len(completions),
        config(tmp_path, max_rounds=5, disable_tqdm=False),
        dataset(),
    )
    trainer.train()
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("round ", "Warning: "))]
    assert [line.split()[0] for line in lines] == ["round"] * 3 + ["Warning:"] + ["round"] * 2
    assert lines[3].startswith("Warning: In the last 3 rounds all responses to a prompt got the same reward")
    assert out.flushed == out.getvalue()


def test_a_bar_in_a_terminal(agent_folders, tmp_path, monkeypatch):
    err = Output(terminal=True)
    monkeypatch.setattr(sys, "stderr", err)
    train(agent_folders, config(tmp_path, max_rounds=1, disable_tqdm=False))
    assert "rounds:" in err.getvalue() and "1/1" in err.getvalue()


def test_evaluations_of_several_data_sets_are_printed(agent_folders, tmp_path, capsys):
    args = config(tmp_path, max_rounds=1, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4)
    trainer = train(agent_folders, args, eval_dataset={"a": dataset(2), "b": dataset(1)})
    overall = next(entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation: ")]
    assert [line.split()[1].split("_")[1][0] for line in lines[:2]] == ["a", "b"]
    assert f"eval_reward={overall:.3f}" in lines[2]


def test_the_time_left_is_that_of_the_last_rounds(agent_folders, tmp_path, monkeypatch):
    """Rounds of 100 s at first, of 10 s later: after 5 rounds it is a mean, after 30 the first ones are forgotten."""
    trainer = team(agent_folders, PAIR, config(tmp_path))
    progress, now = RoundProgress(trainer._watched), [0.0]
    progress._signs.append(RoundSigns([0.5] * 2, 1.0, [0.5] * 2, [math.nan] * 2, [math.nan] * 2, [], [], []))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    state = type("State", (), {"is_world_process_zero": True, "global_step": 0, "max_steps": 4 * 100})()
    progress.on_train_begin(trainer.args, state, None)
    left = []
    for number in range(1, 31):
        now[0] += 100.0 if number <= 4 else 10.0
        trainer.timings["sampling"] += 2.5
        line = progress._line(number, 100)
        left.append(LINE.fullmatch(line)[10])
    assert left[0] == duration(99 * 100.0)
    assert left[4] == duration(95 * 410 / 5)
    assert left[29] == duration(70 * 10.0) == "11 min 40 s"
    assert "10 s: sample 25 %  other 75 % |" in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (4.92, "4.9 s"), (59.4, "59 s"), (59.7, "1 min 0 s"), (100, "1 min 40 s"), (3599.6, "1 h 0 min")]
    + [(7500, "2 h 5 min"), (86399, "1 d 0 h"), (100 * 3600, "4 d 4 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
