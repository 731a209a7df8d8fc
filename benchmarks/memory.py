"""What a team holds: adapters on one base, and sleeping agents. Counts the bytes of tensors, on any device.

Without a GPU the CPU stands for the device: a parked agent's tensors on it are empty, its contents lie elsewhere. With
one, the allocator's peak is printed, too.

    python benchmarks/memory.py
"""

import os
import tempfile
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore", category=FutureWarning)

import torch
from peft import LoraConfig
from transformers.utils import logging

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.playground import answer_reward, make_dataset, make_problems, shipped_agent
from hacpo_trl.reporting.round_progress import RoundProgress
from hacpo_trl.training.offload import resident_bytes

MIB = 2**20


def settings(folder: str, **changes) -> HACPOConfig:
    """A short run of one round."""
    return HACPOConfig(
        folder,
        **{
            "use_cpu": not torch.cuda.is_available(),
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 32,
            "max_rounds": 2,
            "learning_rate": 1e-4,
            "beta": 0.001,
            **changes,
        },
    )


def watched_run(trainer: HACPOTrainer) -> int:
    """Trains; returns the peak of the resident bytes, looked at before every step, when gradients are full."""
    trainer.remove_callback(RoundProgress)
    peak = 0

    def watch(function):
        def watched(*args, **kwargs):
            nonlocal peak
            peak = max(peak, resident_bytes(trainer.agents))
            return function(*args, **kwargs)

        return watched

    for agent in trainer.agents:
        agent._clip_grad_norm = watch(agent._clip_grad_norm)
        agent._generate_and_score_completions = watch(agent._generate_and_score_completions)
    trainer.train()
    return peak


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    data = make_dataset(make_problems(["addition"], 64, 0))
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        held = {}
        for count in (1, 4):
            trainer = HACPOTrainer(
                [shipped_agent("tiny-bpe")] * count, answer_reward, settings(folder), data, peft_configs=adapter,
                agent_names=[f"agent{i}" for i in range(count)],
            )  # fmt: skip
            tensors = {p.data_ptr(): p.nbytes for agent in trainer.agents for p in agent.model.parameters()}
            held[count] = sum(tensors.values())
        print("parameters of LoRA agents on one base (tiny-bpe, rank 4 on q_proj and v_proj):")
        print(f"  one agent   {held[1] / MIB:8.3f} MiB\n  four agents {held[4] / MIB:8.3f} MiB")
        print(f"  ratio       {held[4] / held[1]:8.3f}")

        peaks, largest = {}, 0
        for offload in (False, True):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            trainer = HACPOTrainer(
                [shipped_agent(name) for name in ("tiny-char", "tiny-bpe")], answer_reward,
                settings(folder, offload_inactive_agents=offload), data,
            )  # fmt: skip
            peaks[offload] = watched_run(trainer)
            if cuda:
                print(f"  allocator's peak, sleeping {offload}: {torch.cuda.max_memory_allocated() / MIB:.1f} MiB")
            for agent in trainer.agents:
                agent.activate()
                gradients = sum(p.nbytes for p in agent.model.parameters() if p.requires_grad)
                largest = max(largest, resident_bytes([agent]) + gradients)
        print("states on the device (weights, gradients, Adam, reference) of two full agents (tiny-char, tiny-bpe):")
        print(f"  largest agent alone {largest / MIB:8.3f} MiB")
        print(
            f"  peak, all awake     {peaks[False] / MIB:8.3f} MiB\n  peak, sleeping      {peaks[True] / MIB:8.3f} MiB"
        )
        print(f"  sleeping / largest  {peaks[True] / largest:8.3f}")


if __name__ == "__main__":
    main()
