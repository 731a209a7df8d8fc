"""Two tiny agents with different architectures and tokenizers learn arithmetic together, on a CPU, in minutes.

    hacpo quickstart [--rounds 24] [--output_dir quickstart_out]

It prints each agent's accuracy on held-out problems before and after, writes a plot, and saves both agents.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from ..config import HACPOConfig
from ..methods import METHODS
from ..playground.agents import accuracy, answer_reward, make_dataset, make_split, shipped_agent
from ..reporting.plots import Evaluation, accuracy_table, plot_run
from ..sampling.turn_taking import agents_are_running
from ..training.trainer import HACPOTrainer
from .console import end_interrupted, show_slow_bars_only

AGENTS = ["tiny-char", "tiny-bpe"]
TASKS = ["addition", "subtraction"]
KINDS = {"greedy": False, "sampled": True}


def measure(trainer: HACPOTrainer, problems: list[dict[str, str]]) -> dict[tuple[str, str], float]:
    """Accuracy of every agent, greedy and sampled."""
    return {
        (agent.agent_name, kind): accuracy(agent.model, agent.processing_class, problems, sampled=sampled)
        for agent in trainer.agents
        for kind, sampled in KINDS.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `hacpo quickstart`.

    Args:
        arguments: by default those of the process.

    Returns:
        The exit code, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        "hacpo quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=24, help="rounds of 32 prompts x 8 responses of each agent")
    parser.add_argument("--method", default="hacpo", choices=list(METHODS))
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held_out", type=int, default=500, help="held-out problems")
    parser.add_argument("--output_dir", default="quickstart_out")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        sentence = "It saves its agents at its end. With --rounds 4 it is shorter."
        return end_interrupted("quickstart", sentence, at_once=agents_are_running())


def _run(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    show_slow_bars_only()

    train, held_out = make_split(TASKS, 32 * options.rounds, options.held_out, seed=options.seed)
    args = HACPOConfig(
        options.output_dir,
        method=options.method,
        max_rounds=options.rounds,
        num_generations=8,
        per_device_train_batch_size=128,  # two updates on the own 256 responses of a round, two on the peer's
        steps_per_generation=2,
        learning_rate=options.learning_rate,
        beta=0.0,
        max_completion_length=64,
        seed=options.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = HACPOTrainer(
        models=[shipped_agent(name) for name in AGENTS],
        reward_funcs=answer_reward,
        args=args,
        train_dataset=make_dataset(train),
    )
    print(f"Measuring {' and '.join(AGENTS)} on {options.held_out} held-out problems ...", flush=True)
    before = measure(trainer, held_out)
    trainer.train()
    after = measure(trainer, held_out)
    trainer.save_model()

    evaluations = [
        Evaluation(name, kind, before[name, kind], after[name, kind], options.held_out)
        for name in AGENTS
        for kind in KINDS
    ]
    print(f"\n{accuracy_table(evaluations)}\n")
    agents = f"Agents: {', '.join(os.path.join(options.output_dir, name) for name in AGENTS)}."
    plot = os.path.join(options.output_dir, "quickstart.png")
    title = f"{options.method}: {options.rounds} rounds of 32 prompts x 8 responses"
    try:
        plot_run(trainer.state.log_history, AGENTS, evaluations, plot, title)
    except ImportError:
        print(f"No plot, since there is no matplotlib (pip install matplotlib). {agents}")
    else:
        print(f"Plot: {plot}. {agents}")
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
