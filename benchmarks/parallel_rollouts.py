"""How long the sampling phase of two agents with a server each takes, against that of one agent with one server.

The servers are stand-ins that sleep for a fixed time and answer nonsense; all else is the trainer's own way through
TRL's client, so the difference is what the trainer makes agents wait for each other. Exits with 1 above 1.15.

    python benchmarks/parallel_rollouts.py [--seconds 4] [--repeats 3]
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from trl.generation import vllm_generation

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.playground import answer_reward, make_dataset, make_problems, shipped_agent
from hacpo_trl.reporting.round_progress import RoundProgress

LIMIT = 1.15


class SleepingClient:
    """Takes the place of TRL's VLLMClient."""

    seconds = 0.0

    def __init__(self, base_url, group_port, connection_timeout):
        self.base_url = base_url

    def init_communicator(self, device):
        """There are no weights to sync."""

    def update_named_params(self, metadata, named_params):
        """Goes through all weights, as the real one does."""
        for _ in named_params:
            pass

    def reset_prefix_cache(self):
        """There is no cache."""

    def get_server_info(self):
        """What the trainer looks at."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(self, prompts, features=None, *, n, max_tokens, **kwargs):
        """Sleeps, then answers every prompt with the same tokens."""
        time.sleep(self.seconds)
        count = len(prompts) * n
        tokens = list(range(10, 10 + max_tokens))
        return {
            "prompt_ids": prompts,
            "completion_ids": [tokens] * count,
            "logprobs": [[[-1.0]] * max_tokens] * count,
        }


def make_team(count: int, output_dir: str) -> HACPOTrainer:
    """Equal agents, each with a stand-in server."""
    args = HACPOConfig(
        output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=32,
        beta=0.0,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_urls=[f"http://stand-in-{i}:8000" for i in range(count)],
    )
    prompts = make_dataset(make_problems(["addition"], 64, 0))
    trainer = HACPOTrainer([shipped_agent("tiny-char")] * count, answer_reward, args, prompts)
    trainer.remove_callback(RoundProgress)
    return trainer


def sampling_seconds(trainer: HACPOTrainer, repeats: int, *, together: bool) -> float:
    """Median wall seconds of the sampling phase of a round."""
    inputs = next(iter(trainer.get_train_dataloader()))
    functions = [functools.partial(agent.sample, inputs) for agent in trainer.agents]
    functions[0]()  # the first sync and the first pass warm up
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        if together:
            trainer.turns.run(functions)
        else:
            for function in functions:
                function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a server takes")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    SleepingClient.seconds = options.seconds
    vllm_generation.VLLMClient = SleepingClient
    vllm_generation.is_vllm_available = lambda *args, **kwargs: True
    with tempfile.TemporaryDirectory() as folder:
        alone, team = make_team(1, folder), make_team(2, folder)
        one = sampling_seconds(alone, options.repeats, together=True)
        in_turn = sampling_seconds(team, options.repeats, together=False)
        together = sampling_seconds(team, options.repeats, together=True)
    print(f"stand-in servers that sleep {options.seconds:g} s; median of {options.repeats} sampling phases")
    print(f"one agent, one server      {one:6.2f} s")
    print(f"two agents, in turn        {in_turn:6.2f} s  {in_turn / one:.2f} times one")
    print(f"two agents, side by side   {together:6.2f} s  {together / one:.2f} times one (limit {LIMIT})")
    return 0 if together <= LIMIT * one else 1


if __name__ == "__main__":
    sys.exit(main())
