"""Tiny agents and short runs shared by the tests. CPU, no network, one thread."""

import torch

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.playground import AgentSpec, make_dataset, make_problems
from hacpo_trl.reporting.round_progress import RoundProgress

torch.set_num_threads(1)

SPECS = {
    "char": AgentSpec("char", "llama", "char", hidden_size=32, num_layers=1, num_heads=2, seed=1),
    "bpe": AgentSpec("bpe", "olmo2", "bpe", hidden_size=32, num_layers=2, num_heads=2, vocab_size=320, seed=2),
    "mini": AgentSpec("mini", "stablelm", "bpe", hidden_size=32, num_layers=1, num_heads=2, vocab_size=300, seed=3),
}

# A template with an end token of its own behind every message
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def digit_reward(completions, **kwargs):
    """A reward that depends on the text only and that random agents get in part of the cases."""
    return [float(sum(map(ord, _text(c))) % 3 == 0) for c in completions]


def _text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def config(output_dir, **changes):
    """Short runs of 2 prompts x 4 responses a round and agent, in float32."""
    settings = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 10,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,  # Adam would blow float noise up to full steps
        "max_rounds": 2,
        "seed": 7,
    }
    return HACPOConfig(**{**settings, **changes})


def dataset(count=16, **columns):
    """Arithmetic prompts, plus constant columns."""
    data = make_dataset(make_problems(["addition"], count, 0))
    for name, value in columns.items():
        data = data.add_column(name, [value] * count)
    return data


def team(folders, names, args, reward_funcs=digit_reward, train_dataset=None, **kwargs):
    """A trainer of the named tiny agents."""
    trainer = HACPOTrainer(
        [folders[name] for name in names],
        reward_funcs,
        args,
        dataset() if train_dataset is None else train_dataset,
        **kwargs,
    )
    trainer.remove_callback(RoundProgress)
    return trainer


def weights(model):
    """A copy of all parameters as one vector."""
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def all_weights(trainer):
    """One vector for each agent."""
    return [weights(agent.model) for agent in trainer.agents]
