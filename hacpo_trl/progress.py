"""What a person sees while a team trains: one bar, and one line a round."""

import time
from typing import TYPE_CHECKING

from tqdm.auto import tqdm
from transformers import TrainerCallback

if TYPE_CHECKING:
    from .trainer import HACPOTrainer

_PHASES = {"sampling": "sample", "grading": "grade", "reencoding": "re-encode", "updating": "update"}


class RoundProgress(TrainerCallback):
    """Takes the place of the Trainer's bar and log print-outs: a line a round instead of a hundred numbers a step.

    The line tells every agent's mean reward in the round, in brackets its capability, and where the time went. With
    `disable_tqdm=True` the lines come without the bar.

    Args:
        trainer: the leader of the team.
    """

    def __init__(self, trainer: "HACPOTrainer"):
        self.trainer = trainer
        self.bar: tqdm | None = None
        self._timings: dict[str, float] = {}
        self._started = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Opens the bar."""
        if not state.is_world_process_zero:
            return
        size = self.trainer.updates_per_round
        self._timings = self._totals()
        self._started = time.perf_counter()
        tqdm.write(
            "Every round: each agent's mean reward, in brackets its capability P over the last "
            f"{self.trainer.capability.window} rounds, then the seconds."
        )
        self.bar = tqdm(
            total=-(-state.max_steps // size),
            initial=state.global_step // size,
            desc="rounds",
            unit="round",
            dynamic_ncols=True,
            disable=args.disable_tqdm,
        )

    def on_step_end(self, args, state, control, **kwargs):
        """Prints a line behind each round."""
        if self.bar is None or state.global_step % self.trainer.updates_per_round:
            return
        self.bar.update(1)
        self.bar.write(self._line(state.global_step // self.trainer.updates_per_round))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Prints every agent's reward in an evaluation."""
        if not state.is_world_process_zero or not metrics:
            return
        rewards = [f"{key}={value:.3f}" for key, value in metrics.items() if key.endswith("reward")]
        tqdm.write("evaluation: " + ", ".join(rewards))

    def on_train_end(self, args, state, control, **kwargs):
        """Closes the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _totals(self) -> dict[str, float]:
        return {key: sum(agent.timings[key] for agent in self.trainer.agents) for key in _PHASES}

    def _line(self, number: int) -> str:
        trainer, now = self.trainer, time.perf_counter()
        capabilities = trainer.capability.capabilities.tolist()
        agents = "  ".join(
            f"{name} {reward:.3f} (P {capability:.3f})"
            for name, reward, capability in zip(trainer.agent_names, trainer.round_rewards, capabilities, strict=True)
        )
        totals = self._totals()
        spent = "  ".join(
            f"{label} {totals[key] - self._timings[key]:.1f} s"
            for key, label in _PHASES.items()
            if totals[key] - self._timings[key] >= 0.05
        )
        other = now - self._started - sum(totals.values()) + sum(self._timings.values())
        spent += f"  other {other:.1f} s" if other >= 0.5 else ""  # evaluating, saving, logging
        line = f"round {number}: {agents} | {now - self._started:.1f} s: {spent}"
        self._timings, self._started = totals, now
        return line
