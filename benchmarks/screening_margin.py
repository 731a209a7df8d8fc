"""How far outside of the clip range must a peer's response be before screening may leave it out, in bfloat16?

    python benchmarks/screening_margin.py            # about two minutes on one core
    python benchmarks/screening_margin.py --quick    # seconds

Screening finds a response's ratio in one micro-batch and the update runs it in another one, in which bfloat16 rounds
otherwise. Here a random model of 12 layers reads responses of 4 to 96 tokens whose ratios lie evenly between 0.7 and
1.1, half of them inside of the clip range [0.8, 1]. For several margins: how many responses are run, how many are left
out although they have a gradient where they stood in the plan, and the distance of the gradient from that of all
responses as they stood in the plan, over its length. The same distance is given for all responses in other
micro-batches: what rounding does by itself.
"""

import argparse
import json
import os
import random
import tempfile
import warnings
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch
from transformers.utils import logging

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.objective import in_range, sequence_log_ratio
from hacpo_trl.playground import AgentSpec, build_agent, make_dataset, make_problems, save_agent
from hacpo_trl.rollouts import Row, plan_update

MARGINS = (0.0, 1e-4, 1e-3, 5e-3, 0.02, 0.05)
RANGE = (0.8, 1.0)


def make_learner(folder: str, layers: int, width: int, batch: int, steps: int) -> Any:
    """A learner of a team of two, whose update has `steps` micro-batches of `batch` responses."""
    spec = AgentSpec("learner", "llama", "char", hidden_size=width, num_layers=layers, num_heads=2, seed=1)
    path = str(save_agent(*build_agent(spec), os.path.join(folder, "learner")))
    args = HACPOConfig(
        os.path.join(folder, "out"), use_cpu=True, bf16=True, gradient_checkpointing=False, report_to="none",
        num_generations=4, per_device_train_batch_size=batch, gradient_accumulation_steps=steps, beta=0.0,
        max_rounds=1, save_strategy="no", max_completion_length=96,
    )  # fmt: skip
    data = make_dataset(make_problems(["addition"], batch * steps, 0))
    return HACPOTrainer([path, path], lambda completions, **_: [0.0] * len(completions), args, data).agents[0]


@torch.no_grad()
def log_ratios(agent: Any, rows: list[Row]) -> torch.Tensor:
    """(R,) log of the ratios of a micro-batch."""
    inputs = agent._collate(rows)
    with torch.autocast("cpu", torch.bfloat16):
        logps, _, _ = agent._logps_of(agent.model, inputs)
    return sequence_log_ratio(logps, inputs["completion_mask"], inputs["source_logp"])


def make_rows(agent: Any, count: int, seed: int) -> list[Row]:
    """A peer's responses, whose ratios, each alone in a micro-batch, lie evenly between 0.7 and 1.1."""
    draw = random.Random(seed)
    ids = agent.processing_class("0123456789 +=;#")["input_ids"]
    rows = []
    for i in range(count):
        prompt, response = (
            torch.tensor([draw.choice(ids) for _ in range(draw.randint(low, high))])
            for low, high in ((4, 48), (4, 96))
        )
        row = Row(1, prompt, response, advantage=draw.choice((-1.0, 1.0)), logp_sums=torch.zeros(1))
        row.logp_sums = log_ratios(agent, [row]) - torch.tensor(0.7 + 0.4 * (i + 0.5) / count).log()
        rows.append(row)
    draw.shuffle(rows)
    return rows


def gradient(agent: Any, batches: list[list[Row]]) -> torch.Tensor:
    """The gradient of an update's loss, flat."""
    agent.model.zero_grad()
    for rows in batches:
        inputs = agent._collate(rows) | {"update_index": 0, "is_first": False}
        with torch.autocast("cpu", torch.bfloat16):
            loss = agent._compute_loss(agent.model, inputs)
        loss.backward()
    return torch.cat([p.grad.flatten().double() for p in agent.model.parameters()])


def measure(quick: bool, seed: int) -> list[dict[str, Any]]:
    """One entry for every margin, and one for all responses in other micro-batches."""
    batch, steps, layers, width = (4, 4, 2, 32) if quick else (8, 16, 12, 64)
    with tempfile.TemporaryDirectory() as folder:
        agent = make_learner(folder, layers, width, batch, steps)
        agent.model.train()
        rows = make_rows(agent, batch * steps, seed)
        plan = plan_update(rows, [], steps, steps, "rows")
        ratios = torch.cat([log_ratios(agent, micro_batch) for micro_batch in plan]).exp()
        planned = [row for micro_batch in plan for row in micro_batch]
        ranges = ((0.0, 0.0), RANGE)
        nothing = torch.zeros(len(planned)), torch.zeros(len(planned), dtype=torch.bool)
        whole = gradient(agent, plan)

        def distance(batches: list[list[Row]]) -> float:
            return ((gradient(agent, batches) - whole).norm() / whole.norm()).item()

        entries = []
        for margin in MARGINS:
            stays = in_range(ratios, *nothing, *ranges, margin).tolist()
            kept = [row for row, stay in zip(planned, stays, strict=True) if stay]
            needed = -(-len(kept) // batch)
            batches = plan_update(kept, [], needed, needed, "rows")
            again = torch.cat([log_ratios(agent, micro_batch) for micro_batch in batches]).exp()
            alone = torch.cat([log_ratios(agent, [row]) for row in planned]).exp()
            missed = in_range(alone, *nothing, *ranges) & ~torch.tensor(stays)
            entries.append(
                {
                    "margin": margin,
                    "run": len(kept),
                    "inside in the update": int(in_range(again, *(n[: len(kept)] for n in nothing), *ranges).sum()),
                    "left out though inside when alone": int(missed.sum()),
                    "largest change of a ratio": (alone - ratios).abs().max().item(),
                    "distance": distance(batches),
                }
            )
        random.Random(seed).shuffle(rows)
        others = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        entries.append({"margin": "all run, in other micro-batches", "run": len(rows), "distance": distance(others)})
        return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer responses")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for seed in range(1 if options.quick else options.seeds):
        for entry in measure(options.quick, seed):
            print(json.dumps(entry))


if __name__ == "__main__":
    main()
