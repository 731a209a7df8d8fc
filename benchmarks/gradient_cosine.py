"""Do peers' responses pull a learner where its own pull it? The cosine of the two gradients, over a training run.

    python benchmarks/gradient_cosine.py --out results --settings skill model

Trains one team as `compare_methods.py` does. Every few rounds, before an update, every agent answers the same fixed
prompts, and for every learner and source the gradient of the objective over the source's responses is taken at the
learner's weights of that moment (update index 0; nothing is updated). Reported is the cosine to the gradient of the
learner's own responses, of all peer's responses and of those with a positive advantage alone. A random direction has
the cosine 0, with a standard deviation of about one over the square root of the number of parameters.
"""

import argparse
import json
import os
import shutil
import warnings
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
from compare_methods import build_agent_folder, make_trainer
from compare_settings import ARMS, GENERATIONS, LONG, PROMPTS, SETTINGS, UPDATE_ROWS, task_of
from plots import pyplot, save
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils import logging

from hacpo_trl import HACPOTrainer
from hacpo_trl.playground import make_dataset, make_split

EVERY = 2  # rounds between two measurements


def gradient(agent, rows) -> torch.Tensor:
    """The gradient of the objective over some responses, flat; zero without responses."""
    parameters = [p for p in agent.model.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in parameters))
    for start in range(0, len(rows), UPDATE_ROWS):
        batch = agent._collate(rows[start : start + UPDATE_ROWS])
        batch |= {"update_index": 0, "is_first": False}
        gradients = torch.autograd.grad(-agent._compute_loss(agent.model, batch), parameters)
        total += torch.cat([g.flatten() for g in gradients])
    return total


def cosine(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """None where one of them is zero."""
    norms = (a.norm() * b.norm()).item()
    return (a @ b).item() / norms if norms > 0 else None


@torch.random.fork_rng()
def probe(trainer: HACPOTrainer, pool: list[dict[str, str]]) -> list[dict]:
    """Cosines of all pairs at the agents' present weights; leaves weights and random numbers as they are."""
    inputs = [problem for problem in pool for _ in range(GENERATIONS)]
    torch.manual_seed(0)
    rollouts = [agent.sample(inputs) for agent in trainer.agents]
    rewards = torch.stack([r.rewards for r in rollouts]).view(len(rollouts), -1, GENERATIONS)
    saved = trainer.capability.state_dict()
    trainer.capability.update(rewards)
    signal = [part.flatten(2) for part in trainer._signal(rewards)]
    trainer.capability.load_state_dict(saved)
    entries = []
    for k, learner in enumerate(trainer.agents):
        learner.begin_round(rollouts, *(part[k] for part in signal))
        learner.plan_updates()
    for learner in trainer.agents:
        learner.measure(set(range(len(rollouts[0]))), all_rows=True)
    for k, learner in enumerate(trainer.agents):
        rows = [row for batch in learner._plan for row in batch]
        own = gradient(learner, [row for row in rows if row.source == k])
        for j, source in enumerate(trainer.agents):
            if j == k:
                continue
            theirs = [row for row in rows if row.source == j]
            better = [row for row in theirs if row.advantage > 0]
            entries.append(
                {
                    "learner": learner.agent_name,
                    "source": source.agent_name,
                    "all": cosine(own, gradient(learner, theirs)),
                    "positive": cosine(own, gradient(learner, better)),
                }
            )
        for reader in ("log", "round"):  # what was looked at here is no part of the run's reports
            learner.drain_statistics(reader)
    return entries


def run(folder: Path, setting: str, arm: str, seed: int) -> list[dict]:
    """Trains a team and probes it on the way."""
    agents, rounds = SETTINGS[setting].agents, SETTINGS[setting].rounds
    for name in agents:
        build_agent_folder(folder, name)
    pool, _ = make_split(task_of(agents), PROMPTS, 0, seed=999)
    pool = list(make_dataset(pool))
    trainer = make_trainer(folder, agents, arm, rounds, seed)
    entries: list[dict] = []
    bar = tqdm(total=rounds, desc=setting, unit="round")

    class Probe(TrainerCallback):
        """Looks at the gradients before a round begins, and after the last one."""

        def look(self, done: int) -> None:
            entries.extend({"round": done, **entry} for entry in probe(trainer, pool))

        def on_step_begin(self, args, state, control, **kwargs):
            done, rest = divmod(state.global_step, trainer.updates_per_round)
            if rest == 0 and done % EVERY == 0:
                self.look(done)

        def on_step_end(self, args, state, control, **kwargs):
            done, rest = divmod(state.global_step, trainer.updates_per_round)
            if rest == 0:
                bar.update()
                if done == rounds:
                    self.look(done)

    trainer.add_callback(Probe())
    trainer.train()
    bar.close()
    shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
    return entries


def plot(results: dict[str, list[dict]], path: Path) -> None:
    """Cosine over rounds of every pair, one column a setting."""
    plt = pyplot()
    colors = ("#1f5fa8", "#d1622b", "#2c8a4b", "#8e44ad", "#a4343a", "#5d6d7e")
    figure, axes = plt.subplots(2, len(results), figsize=(3.6 * len(results), 5.2), sharex="col", squeeze=False)
    titles = {"all": "all peer's responses", "positive": "its positive advantages"}
    for column, (setting, entries) in enumerate(results.items()):
        pairs = sorted({(e["source"], e["learner"]) for e in entries})
        for row, (kind, title) in enumerate(titles.items()):
            axis = axes[row][column]
            for color, pair in zip(colors, pairs, strict=False):
                chosen = [e for e in entries if (e["source"], e["learner"]) == pair and e[kind] is not None]
                axis.plot(
                    [e["round"] for e in chosen],
                    [e[kind] for e in chosen],
                    color=color,
                    label=f"{pair[0]} → {pair[1]}",
                )
            axis.axhline(0, color="black", linewidth=0.7)
            axis.set_title(f"{setting}: {title}", fontsize=9)
            axis.grid(alpha=0.25)
        axes[0][column].legend(frameon=False, fontsize=7)
        axes[1][column].set_xlabel("round")
    axes[0][0].set_ylabel("cosine to the own gradient")
    axes[1][0].set_ylabel("cosine to the own gradient")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of agents, figures (JSON) and the plot")
    pairs = [name for name, setting in SETTINGS.items() if len(setting.agents) == 2 and setting.rounds <= LONG]
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=pairs, help="default: the usual pairs")
    parser.add_argument("--arm", choices=[arm for arm in ARMS if not ARMS[arm].alone], default="hacpo")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    results: dict[str, list[dict]] = {}
    for name in options.settings:
        results[name] = run(options.out, name, options.arm, options.seed)
        (options.out / "gradient_cosine.json").write_text(json.dumps(results, indent=1))
    plot(results, options.out / "gradient_cosine.png")
    for setting, entries in results.items():
        for pair in sorted({(e["source"], e["learner"]) for e in entries}):
            chosen = [e for e in entries if (e["source"], e["learner"]) == pair]
            line = f"{setting:<6} {pair[0]} -> {pair[1]}"
            for kind in ("all", "positive"):
                values = [e[kind] for e in chosen if e[kind] is not None]
                if values:
                    line += f"   {kind}: mean {mean(values):+.3f}, least {min(values):+.3f}, last {values[-1]:+.3f}"
            print(line)


if __name__ == "__main__":
    main()
