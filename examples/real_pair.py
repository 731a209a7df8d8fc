"""Two real models of different families, SmolLM2-135M-Instruct and Gemma3-270M, learn one-digit addition together.

    python examples/real_pair.py [--models SMOLLM2 GEMMA3] [--rounds 10] [--method hacpo] [--output_dir real_pair_out]

The prompts are plain text with four worked examples, so that the base model needs no chat template; the first
number of a response counts. The sampled accuracy on held-out problems is printed before and after.
docs/real_models.md tells what one sees, and how long it takes.
"""

import argparse
import os
import random
import re
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from datasets import Dataset

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.evaluation.answers import evaluate_model
from hacpo_trl.maths.problems import to_prompts
from hacpo_trl.texts.prompts import make_form

MODELS = ["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m"]
EXAMPLES = ((3, 4), (8, 5), (2, 6), (9, 7))
FORM = make_form(
    "plain", prompt_template="".join(f"{a} + {b} = {a + b}\n" for a, b in EXAMPLES) + "{problem} =", stop=["\n"]
)


def first_number(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """1 where the first number of the first line is the answer."""
    found = [re.search(r"\d+", text.strip().split("\n")[0]) for text in completions]
    return [float(match is not None and match[0] == gold) for match, gold in zip(found, answer, strict=True)]


def make_problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All one-digit sums that are not worked out in the prompt: 56 to train on and 40 held out."""
    pairs = [(a, b) for a in range(10) for b in range(10) if (a, b) not in EXAMPLES]
    random.Random(seed).shuffle(pairs)
    rows = [{"problem": f"{a} + {b}", "answer": str(a + b)} for a, b in pairs]
    return rows[:56], rows[56:]


def measure(trainer: HACPOTrainer, problems: list[dict[str, str]], samples: int, label: str) -> None:
    """Prints every agent's sampled accuracy, asked as it is trained."""
    for agent in trainer.agents:
        result = evaluate_model(
            agent.model,
            agent.processing_class,
            problems,
            samples=samples,
            temperature=1.0,
            max_new_tokens=agent.max_completion_length,
            verifier=first_number,
            progress=False,
            **FORM.settings(),
        )
        summary = result.summary()
        print(f"{label} {agent.agent_name}: {summary['average']:.3f} ± {summary['average_error']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="Hub ids or folders")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of 8 prompts x 4 responses of each agent")
    parser.add_argument("--method", default="hacpo", choices=["hacpo", "naive", "gspo", "grpo"])
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument(
        "--successes_only", action="store_true", help="peer_advantages='positive', peer_clip_delta=0.6"
    )
    parser.add_argument("--samples", type=int, default=8, help="answers to each held-out problem, before and after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="real_pair_out")
    options = parser.parse_args()
    started = time.perf_counter()
    train, held_out = make_problems(options.seed)
    rows = train * -(-8 * options.rounds // len(train))
    successes = {"peer_advantages": "positive", "peer_clip_delta": 0.6} if options.successes_only else {}
    args = HACPOConfig(
        options.output_dir,
        method=options.method,
        max_rounds=options.rounds,
        num_generations=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,  # two updates on the own 32 responses of a round, two on the peer's
        max_completion_length=6,
        stop_texts=list(FORM.stop),  # the first line is judged; what follows would add noise to the ratios
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        report_to="none",
        seed=options.seed,
        **successes,
    )
    trainer = HACPOTrainer(options.models, first_number, args, to_prompts(Dataset.from_list(rows), FORM))
    trainer.prompt_form = FORM
    measure(trainer, held_out, options.samples, "before")
    trainer.train()
    measure(trainer, held_out, options.samples, "after")
    trainer.save_model()
    print(f"Saved to {options.output_dir}. {(time.perf_counter() - started) / 60:.1f} minutes in all.")


if __name__ == "__main__":
    main()
