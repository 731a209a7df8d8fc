"""What a person sees while a team trains: one bar, and one line a round."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm
from transformers import TrainerCallback

from .advice import RoundSigns, advise

_PHASES = {"sampling": "sample", "grading": "grade", "reencoding": "re-encode", "updating": "update"}

_RECENT = 20
"""The time left is reckoned from this many rounds: later responses are longer or shorter than the first ones."""


@dataclass(frozen=True)
class WatchedTeam:
    """What `RoundProgress` shows and judges.

    Attributes:
        names: of the agents.
        updates_per_round: of the leader.
        learning_rates: of the agents.
        shares: whether agents learn from each other.
        window: rounds of the capability.
        loudest: the largest factor by which a peer's capability raises its advantages, None where none does.
        floor: the least capability.
        signs: sums up the round that ends now; all processes have to call it.
        timings: seconds of each agent by phase, of the whole run.
    """

    names: Sequence[str]
    updates_per_round: int
    learning_rates: Sequence[float]
    shares: bool
    window: int
    loudest: float | None
    floor: float
    signs: Callable[[], RoundSigns]
    timings: Sequence[Mapping[str, float]]


class RoundProgress(TrainerCallback):
    """Takes the place of the Trainer's bar and log print-outs: a line a round instead of a hundred numbers a step.

    The line tells every agent's mean reward in the round, in brackets its capability, where the time went and how much
    of it is left; where agents learn from each other, also how much of the peers' responses taught something. Below it
    stand warnings of a run that cannot teach, each of them once. With `disable_tqdm=True`, and where the output is no
    terminal, the lines come without the bar.

    Args:
        watch: describes the team; called when a run begins.
    """

    def __init__(self, watch: Callable[[], WatchedTeam]):
        self.watch = watch
        self.team: WatchedTeam
        self.bar: tqdm | None = None
        self._signs: list[RoundSigns] = []
        self._said: set[tuple[str, str]] = set()  # every warning comes once
        self._timings: dict[str, float] = {}
        self._ends: deque[float] = deque(maxlen=_RECENT + 1)  # when the last rounds ended; the first entry: the start

    def on_train_begin(self, args, state, control, **kwargs):
        """Opens the bar."""
        self.team = self.watch()
        if not state.is_world_process_zero:
            return
        size = self.team.updates_per_round
        self._timings = self._totals()
        self._ends.clear()
        self._ends.append(time.perf_counter())
        shared = "the share of the peers' responses that taught something, " if self.team.shares else ""
        _say(
            "Every round: each agent's mean reward, in brackets its capability P over the last "
            f"{self.team.window} rounds, {shared}then the time of the round, what it went into, and "
            "what is left of the run."
        )
        notebook = "ipykernel" in sys.modules  # draws its own bars, and its stderr is no terminal
        self.bar = tqdm(
            total=-(-state.max_steps // size),
            initial=state.global_step // size,
            desc="rounds",
            unit="round",
            dynamic_ncols=True,
            disable=args.disable_tqdm or not (notebook or sys.stderr.isatty()),
        )

    def on_step_end(self, args, state, control, **kwargs):
        """Prints a line behind each round."""
        size = self.team.updates_per_round
        if state.global_step % size:
            return
        self._signs.append(self.team.signs())  # all processes take part
        if self.bar is None:
            return
        self.bar.update(1)
        _say(self._line(state.global_step // size, -(-state.max_steps // size)))
        for key, sentence in self._advice().items():
            if key not in self._said:
                self._said.add(key)
                _say(f"Warning: {sentence}")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Prints every agent's reward in an evaluation."""
        if not state.is_world_process_zero or not metrics:
            return
        rewards = [
            f"{key}={value:.3f}" for key, value in metrics.items() if key.endswith("reward") and value is not None
        ]
        _say("evaluation: " + ", ".join(rewards))

    def on_train_end(self, args, state, control, **kwargs):
        """Closes the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _advice(self) -> dict[tuple[str, str], str]:
        team = self.team
        return advise(
            self._signs,
            team.names,
            learning_rates=team.learning_rates,
            loudest=team.loudest,
            window=team.window,
            floor=team.floor,
        )

    def _totals(self) -> dict[str, float]:
        return {key: sum(timings[key] for timings in self.team.timings) for key in _PHASES}

    def _line(self, number: int, rounds: int) -> str:
        now, signs = time.perf_counter(), self._signs[-1]
        agents = "  ".join(
            f"{name} {reward:.3f} (P {capability:.3f})"
            for name, reward, capability in zip(self.team.names, signs.rewards, signs.capabilities, strict=True)
        )
        totals = self._totals()
        seconds = {label: totals[key] - self._timings[key] for key, label in _PHASES.items()}
        whole = now - self._ends[-1]
        # Evaluating, saving, logging; several agents' phases can run at once and then take more than the whole
        seconds["other"] = max(whole - sum(seconds.values()), 0.0)
        spent = max(whole, sum(seconds.values())) or 1.0
        shares = "  ".join(f"{name} {100 * s / spent:.0f} %" for name, s in seconds.items() if s / spent >= 0.005)
        self._timings = totals
        self._ends.append(now)
        a_round = (now - self._ends[0]) / (len(self._ends) - 1)
        heard = signs.peers_heard
        peers = "" if math.isnan(heard) else f" | peers heard {100 * heard:.0f} %"
        left = f" | {duration(a_round * (rounds - number))} left" if number < rounds else ""
        return f"round {number}/{rounds}: {agents}{peers} | {duration(whole)}: {shares}{left}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: "4.9 s", "1 min 40 s", "2 h 5 min", "3 d 4 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def _say(line: str) -> None:
    """Prints above the bar, at once: where the output is a file or a pipe it would wait for more."""
    tqdm.write(line)
    sys.stdout.flush()
