"""What a round of HACPO costs: its own work as a share, and two agents against two GRPOTrainers.

A round of HACPO with two agents and two GRPOTrainers with `num_iterations=2` sample as many responses and take as many
updates. They run in turn, a pair at a time, so that a drifting machine speed hits both; the medians count.

    python benchmarks/round_cost.py [--rounds 3] [--pairs 3]      # about 3 minutes on an idle machine
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.playground import answer_reward, make_dataset, make_problems, shipped_agent
from hacpo_trl.reporting.round_progress import RoundProgress

AGENTS = ("tiny-char", "tiny-bpe")
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 4,
    "num_generations": 8,
    "per_device_train_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_completion_length": 64,
    "learning_rate": 1e-4,
    "beta": 0.001,
    "top_k": 0,
}


class Stopwatch:
    """Adds up the seconds spent inside functions."""

    def __init__(self):
        self.seconds = 0.0

    def time(self, function):
        """The function, its seconds added."""

        def timed(*args, **kwargs):
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def hacpo_seconds(rounds: int, skip: bool, output_dir: str) -> tuple[float, float, dict[str, float]]:
    """Wall seconds of a run of HACPO, those of its own work, and those of the phases of its log."""
    args = HACPOConfig(output_dir, max_rounds=rounds, skip_silent_responses=skip, **COMMON)
    trainer = HACPOTrainer([shipped_agent(name) for name in AGENTS], answer_reward, args, prompts(rounds))
    trainer.remove_callback(RoundProgress)
    own = Stopwatch()
    trainer._signal = own.time(trainer._signal)  # advantages
    for agent in trainer.agents:
        agent.begin_round = own.time(agent.begin_round)  # re-encoding
        agent.plan_updates = own.time(agent.plan_updates)
        agent._collate = own.time(agent._collate)  # batching
        agent.statistics.add = own.time(agent.statistics.add)
        agent.drain_statistics = own.time(agent.drain_statistics)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    phases: dict[str, float] = {}
    for entry in trainer.state.log_history:
        for key, value in entry.items():
            if key.startswith("time/"):
                phases[key[5:]] = phases.get(key[5:], 0.0) + value
    return seconds, own.seconds, phases


def grpo_seconds(rounds: int, output_dir: str) -> float:
    """Wall seconds of two GRPOTrainers with two passes over their responses."""
    total = 0.0
    for name in AGENTS:
        args = GRPOConfig(
            output_dir, max_steps=4 * rounds, num_iterations=2, epsilon=3e-4, epsilon_high=4e-4, loss_type="grpo",
            importance_sampling_level="sequence", lr_scheduler_type="constant", **COMMON,
        )  # fmt: skip
        trainer = GRPOTrainer(shipped_agent(name), answer_reward, args, prompts(rounds))
        trainer.remove_callback(PrinterCallback)
        started = time.perf_counter()
        trainer.train()
        total += time.perf_counter() - started
    return total


def prompts(rounds: int):
    """Enough prompts for a run, the same for all."""
    return make_dataset(make_problems(["addition"], 32 * rounds, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a run")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as output_dir:
        hacpo_seconds(1, True, output_dir)  # warm up
        for _ in range(options.pairs):
            skipping, own, phases = hacpo_seconds(options.rounds, True, output_dir)
            complete, _, _ = hacpo_seconds(options.rounds, False, output_dir)
            rows.append((skipping, complete, grpo_seconds(options.rounds, output_dir), phases, own))
            print(
                "seconds: HACPO {:.1f}, without skipping {:.1f}, two GRPOTrainers {:.1f}".format(*rows[-1]), flush=True
            )

    def line(label: str, values: list[float], unit: str) -> None:
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{label:<62}{middle:8.3f} {unit:<3} ({low:.3f} to {high:.3f})")

    print(f"{options.rounds} rounds of 32 prompts x 8 responses, agents {', '.join(AGENTS)}, one thread, median:")
    line("HACPO, a round", [r[0] / options.rounds for r in rows], "s")
    line("HACPO with skip_silent_responses=False, a round", [r[1] / options.rounds for r in rows], "s")
    line("two GRPOTrainers with num_iterations=2, a round", [r[2] / options.rounds for r in rows], "s")
    line("HACPO / two GRPOTrainers", [r[0] / r[2] for r in rows], "x")
    line("HACPO with skip_silent_responses=False / two GRPOTrainers", [r[1] / r[2] for r in rows], "x")
    for phase in ("sampling", "grading", "reencoding", "updating"):
        line(f"share of {phase}", [100 * r[3][phase] / r[0] for r in rows], "%")
    line("share of HACPO's own work (re-encoding, advantages, batching)", [100 * r[4] / r[0] for r in rows], "%")


if __name__ == "__main__":
    main()
