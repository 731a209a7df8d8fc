"""What the updates of a round cost: seconds and tokens, with and without what saves them, and beside GRPOTrainer.

    python benchmarks/update_cost.py --out results                 # an hour, most of it for the team "25M"
    python benchmarks/update_cost.py --out results --quick         # seconds: one small team, one round

All arms of a team start from the same weights and see the same prompts; they run in turn, so that a drifting machine
speed hits all. "Updates" is the time of everything but sampling and grading: the passes for log-probabilities that
ratios compare with, screening, and the updates themselves. Seconds are those of the processor (one thread), so that
other work on the machine does not count. Tokens are those that pass through the model outside of
sampling, with their padding. An older release can be measured by the same script, with PYTHONPATH set to its folder:
settings that it does not have are left out.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
from transformers import PrinterCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.playground import (
    AgentSpec,
    answer_reward,
    build_agent,
    make_dataset,
    make_problems,
    save_agent,
    shipped_agent,
)
from hacpo_trl.reporting.round_progress import RoundProgress

ARMS = {
    "plain": {"micro_batches": "rows", "screen_peers": "off"},
    "by tokens": {"micro_batches": "tokens", "screen_peers": "off"},
    "screening": {"micro_batches": "rows", "screen_peers": "on"},
    "defaults": {},
}
"""Settings by arm."""

_LARGE = dict(hidden_size=512, num_layers=8, num_heads=8)
TEAMS = {
    "one": ("tiny-char",),
    "two": ("tiny-char", "tiny-bpe"),
    "four": ("tiny-char", "tiny-bpe", "tiny-char", "tiny-bpe"),
    "25M": (
        AgentSpec("large-llama", "llama", "bpe", vocab_size=320, seed=1, **_LARGE),
        AgentSpec("large-olmo", "olmo2", "char", seed=2, **_LARGE),
    ),
}
"""Shipped agents by name, or random ones by their make."""


def settings(team: str, quick: bool, rounds: int) -> dict:
    """What HACPOConfig and GRPOConfig have in common."""
    large = team == "25M"
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1000,
        "num_generations": 4 if quick or large else 8,
        "per_device_train_batch_size": 4 if quick or large else 16,
        "gradient_accumulation_steps": 2 if quick or large else 4,
        "steps_per_generation": 4 if quick or large else 8,
        "max_completion_length": 256 if large else 24 if quick else 72,
        "learning_rate": 1e-4,
        "top_k": 0,
        "seed": 1,
    }


class Tokens:
    """Counts what passes through a model outside of sampling."""

    def __init__(self):
        self.seen = {"forward": 0, "backward": 0, "padding": 0}

    def watch(self, model: torch.nn.Module) -> None:
        """Counts a model's tokens from now on."""

        def count(module, args, kwargs):
            ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
            if kwargs.get("past_key_values") is None and not kwargs.get("use_cache"):
                self.seen["backward" if torch.is_grad_enabled() else "forward"] += ids.numel()
                self.seen["padding"] += ids.numel() - int(mask.sum())

        model.register_forward_pre_hook(count, with_kwargs=True)


def load(agents: tuple, folder: Path) -> list[str]:
    """The agents' folders."""
    paths = []
    for agent in agents:
        if isinstance(agent, str):
            paths.append(str(shipped_agent(agent)))
        else:
            target = folder / agent.name
            paths.append(str(target) if target.is_dir() else str(save_agent(*build_agent(agent), target)))
    return paths


def hacpo(paths: list[str], arm: str, common: dict, rounds: int, out: str) -> dict[str, float]:
    """Seconds of updates and tokens of a run."""
    known = {field.name for field in dataclasses.fields(HACPOConfig)}
    changes = {name: value for name, value in ARMS[arm].items() if name in known}
    args = HACPOConfig(out, max_rounds=rounds, beta=0.001, **changes, **common)
    trainer = HACPOTrainer(paths, reward, args, prompts(common, rounds))
    trainer.remove_callback(RoundProgress)
    tokens, spent = Tokens(), [0.0]
    for agent in trainer.agents:
        tokens.watch(agent.model)
        for name in ("_generate", "_calculate_rewards"):
            setattr(agent, name, _timed(getattr(agent, name), spent))
    started = time.process_time()
    trainer.train()
    return {"seconds": time.process_time() - started - spent[0], **tokens.seen}


def grpo(paths: list[str], common: dict, rounds: int, out: str) -> dict[str, float]:
    """The same of one GRPOTrainer for each agent, with as many updates as the agent makes in the team."""
    total = {"seconds": 0.0, "forward": 0, "backward": 0, "padding": 0}
    updates = len(paths) * common["steps_per_generation"] // common["gradient_accumulation_steps"]
    for path in paths:
        args = GRPOConfig(
            out, max_steps=updates * rounds, num_iterations=len(paths), epsilon=3e-4, epsilon_high=4e-4, beta=0.001,
            loss_type="grpo", importance_sampling_level="sequence", disable_dropout=True, **common,
        )  # fmt: skip
        trainer = GRPOTrainer(path, reward, args, prompts(common, rounds))
        trainer.remove_callback(PrinterCallback)
        tokens, spent = Tokens(), [0.0]
        tokens.watch(trainer.model)
        for name in ("_generate", "_calculate_rewards"):
            setattr(trainer, name, _timed(getattr(trainer, name), spent))
        started = time.process_time()
        trainer.train()
        total["seconds"] += time.process_time() - started - spent[0]
        for name, value in tokens.seen.items():
            total[name] += value
    return total


def _timed(function, spent: list[float]):
    def call(*args, **kwargs):
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.process_time() - started

    return call


def reward(prompts, completions, **columns):
    """That of the playground; random agents, which are never right, get a point for an even length."""
    found = answer_reward(prompts=prompts, completions=completions, **columns)
    return found if any(found) else [float(len(text) % 2) for text in completions]


def prompts(common: dict, rounds: int):
    """Prompts of all rounds."""
    rows = common["per_device_train_batch_size"] * common["steps_per_generation"]
    return make_dataset(make_problems(["addition"], rounds * rows // common["num_generations"], 0))


def measure(team: str, folder: Path, quick: bool, rounds: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Results of all arms, each as often as it was run."""
    common, paths = settings(team, quick, rounds), load(TEAMS[team], folder)
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as out:
        for _ in range(repeats):
            for arm in ARMS:
                torch.manual_seed(0)
                results.setdefault(arm, []).append(hacpo(paths, arm, common, rounds, out))
            torch.manual_seed(0)
            results.setdefault("GRPOTrainer", []).append(grpo(paths, common, rounds, out))
    return results


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """All results as a table in Markdown."""
    lines = [
        "| team | arm | seconds of updates | against plain | tokens without gradient | with gradient | padding |",
        "|---|---|---|---|---|---|---|",
    ]
    for team, arms in results.items():
        plain = [run["seconds"] for run in arms["plain"]]
        for arm, runs in arms.items():
            share = statistics.median(run["seconds"] / base for run, base in zip(runs, plain, strict=True))
            last = runs[-1]
            whole = last["forward"] + last["backward"]
            lines.append(
                f"| {team} | {arm} | {statistics.median(run['seconds'] for run in runs):.2f} | {share:.2f} | "
                f"{last['forward']:,} | {last['backward']:,} | {100 * last['padding'] / max(whole, 1):.0f} % |"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results (JSON)")
    parser.add_argument("--teams", nargs="+", choices=TEAMS, default=list(TEAMS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every arm; the medians count")
    parser.add_argument("--quick", action="store_true", help="one round of one small team, once")
    options = parser.parse_args(arguments)
    if options.quick:
        options.teams, options.rounds, options.repeats = ["two"], 1, 1
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for team in options.teams:
        results[team] = measure(team, options.out, options.quick, options.rounds, options.repeats)
        (options.out / "update_cost.json").write_text(json.dumps(results, indent=1))
        print(table({team: results[team]}), flush=True)


if __name__ == "__main__":
    main()
