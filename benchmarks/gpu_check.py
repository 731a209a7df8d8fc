"""Does it work on this GPU, and how fast: ten checks, the most telling first, on one GPU of 80 GB or more.

    python benchmarks/gpu_check.py [--seconds 450] [--out gpu_check.json] [--only NAME ...]
    python benchmarks/gpu_check.py --small          # the same code on tiny models, also on a CPU

No network and no download: the agents are those of the playground, and Qwen3-shaped models of 0.6 to 4 B parameters
with random weights. Their sampling is replaced by texts of given lengths, since it is TRL's own. Every result is
printed as it comes. A check that fails prints its error and the next one runs; the exit code is 1 then. What no
longer fits into the time is named as not run.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).parent.parent
if "--worker" in sys.argv and "RANK" in os.environ:  # all ranks of a worker are on the first device
    os.environ["LOCAL_RANK"] = "0"

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Qwen3Config
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.memory import GIB, AgentShape, estimate
from hacpo_trl.playground import answer_reward, make_dataset, make_problems, shipped_agent
from hacpo_trl.reporting.round_progress import RoundProgress
from hacpo_trl.training.offload import resident_bytes

CUDA = torch.cuda.is_available()
# hidden, intermediate, layers, heads, kv heads, head width, vocabulary
SIZES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
    "4B": (2560, 9728, 36, 32, 8, 128, 151_936),
    "tiny-a": (64, 128, 2, 4, 2, 16, 512),
    "tiny-b": (96, 192, 2, 4, 2, 24, 512),
}
# Dense bfloat16 FLOP a second, from the data sheets
PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}


class Failed(Exception):
    """A check that ran, and whose figures are not what they should be.

    Args:
        reason: what is wrong.
        figures: what was measured; it is told all the same.
    """

    def __init__(self, reason: str, figures: dict[str, Any] | None = None):
        super().__init__(reason)
        self.figures = figures or {}


def settings(folder: str, **changes: Any) -> dict[str, Any]:
    """Settings of short runs, for both trainers."""
    return {
        "output_dir": folder,
        "use_cpu": not CUDA,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": 24,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,  # Adam would blow float noise up to full steps
        "max_steps": 4,
        "seed": 7,
        "temperature": 1.0,
        **changes,
    }


def text_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that depends on the text only, and that a third of all texts get."""
    return [float(hashlib.sha256(text.encode()).digest()[0] % 3 == 0) for text in completions]


def problems(count: int = 64) -> Any:
    """Prompts of several lengths."""
    return make_dataset(make_problems(["addition", "subtraction"], count, 0))


def team(models: list[Any], args: HACPOConfig, reward: Any = text_reward, **kwargs: Any) -> HACPOTrainer:
    """A quiet trainer."""
    trainer = HACPOTrainer(models, reward, args, problems(), **kwargs)
    trainer.remove_callback(RoundProgress)
    return trainer


def weights(model: Any) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()])


def qwen(size: str) -> Any:
    """A model of that size with random weights, in float32."""
    hidden, inner, layers, heads, kv_heads, width, words = SIZES[size]
    config = Qwen3Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def canned(trainer: Any, mean: int) -> None:
    """Replaces a trainer's sampling by texts whose lengths go from half to one and a half times the mean."""
    tokenizer = trainer.processing_class
    digits = [tokenizer(str(d), add_special_tokens=False)["input_ids"][-1] for d in range(10)]
    draw = random.Random(getattr(trainer, "agent_index", 0))

    def generate(prompt_ids, *args, **kwargs):
        lengths = [draw.randint(mean // 2, mean + mean // 2 - 1) for _ in prompt_ids]
        return [[draw.choice(digits) for _ in range(n)] + [tokenizer.eos_token_id] for n in lengths], None

    trainer._generate_single_turn = generate


def close(name: str, difference: float, limit: float, figures: dict[str, Any] | None = None) -> None:
    if not difference <= limit:
        raise Failed(f"{name} differ by {difference:.2e}, more than {limit:g}", figures)


# -- the checks: each returns its figures ---------------------------------------------------------------------------


def playground(folder: str, small: bool) -> dict[str, Any]:
    """Two playground agents train and save without a launcher."""
    args = HACPOConfig(**settings(folder, bf16=None if CUDA else False, learning_rate=1e-5, max_completion_length=48))
    names = ["tiny-char", "tiny-bpe"]
    started = time.perf_counter()
    trainer = team([shipped_agent(name) for name in names], args, answer_reward, agent_names=names)
    before = [weights(agent.model) for agent in trainer.agents]
    trainer.train()
    trainer.save_model()
    seconds = time.perf_counter() - started
    moved = [(weights(a.model) - b).abs().max().item() for a, b in zip(trainer.agents, before, strict=True)]
    saved = [AutoModelForCausalLM.from_pretrained(os.path.join(folder, name), dtype=torch.float32) for name in names]
    for agent, model in zip(trainer.agents, saved, strict=True):
        close("saved and trained weights", (weights(model) - weights(agent.model)).abs().max().item(), 1e-2)
    if not all(0 < change < 1 for change in moved):
        raise Failed(f"weights moved by {moved}")
    return {"seconds": seconds, "device": str(trainer.accelerator.device), "bf16": args.bf16, "moved": moved}


def _one_agent_settings(folder: str, bf16: bool, **changes: Any) -> dict[str, Any]:
    common = settings(folder, bf16=bf16, gradient_accumulation_steps=2, steps_per_generation=4, beta=0.1)
    common |= {"num_iterations": 1, "per_device_train_batch_size": 4, "epsilon": 0.2, "epsilon_high": 0.2}
    return {**common, **changes}


def _change_by_hacpo(common: dict[str, Any]) -> torch.Tensor:
    """By how much one agent's weights change in a run."""
    trainer = team([shipped_agent("tiny-bpe")], HACPOConfig(**common, advantage_epsilon=1e-4))  # TRL's epsilon
    before = weights(trainer.model)
    trainer.train()
    return weights(trainer.model) - before


def _change_by_trl(common: dict[str, Any]) -> torch.Tensor:
    args = HACPOConfig(**common)
    shared = """importance_sampling_level loss_type use_bias_correction_kl disable_dropout top_k top_p
    lr_scheduler_type""".split()
    same = {name: getattr(args, name) for name in shared}
    trainer = GRPOTrainer(shipped_agent("tiny-bpe"), text_reward, GRPOConfig(**common, **same), problems())
    trainer.remove_callback(PrinterCallback)
    before = weights(trainer.model)
    trainer.train()
    return weights(trainer.model) - before


def float32(folder: str, small: bool) -> dict[str, Any]:
    """One agent equals GRPOTrainer, in float32."""
    common = _one_agent_settings(folder, False)
    ours, theirs = _change_by_hacpo(common), _change_by_trl(common)
    difference, moved = (ours - theirs).abs().max().item(), ours.abs().max().item()
    close("weights of one agent and GRPOTrainer", difference, 1e-5)
    if moved < 1e-4:
        raise Failed(f"weights moved by {moved:.1e} only: too little to compare")
    return {"difference": difference, "moved": moved}


def bfloat16(folder: str, small: bool) -> dict[str, Any]:
    """The same under bfloat16 autocast; and at a round's first update no response is outside a clip range of 3e-4.

    GRPOTrainer pads its micro-batches to the round's longest response, HACPOTrainer to their own, and bfloat16 rounds
    otherwise at another padding. So the two are as far from each other as rounding is large: GRPOTrainer in bfloat16
    and in float32. In one round at a small learning rate, in which differences do not grow.
    """
    one_round = {"max_steps": 2, "learning_rate": 1e-4}
    common = _one_agent_settings(os.path.join(folder, "a"), True, **one_round)
    ours, theirs = _change_by_hacpo(common), _change_by_trl(common)
    exact = _change_by_trl({**common, "bf16": False})
    difference, rounding = (
        ((ours - theirs).norm() / theirs.norm()).item(),
        ((theirs - exact).norm() / exact.norm()).item(),
    )
    args = HACPOConfig(
        **settings(os.path.join(folder, "b"), bf16=True, steps_per_generation=2, num_iterations=2, max_steps=8)
    )
    trainer = team([shipped_agent("tiny-bpe")], args)
    trainer.train()
    shares, ratios = [], []
    for number, entry in enumerate(e for e in trainer.state.log_history if "loss" in e):
        if number % trainer.updates_per_round == 0:
            shares += [v for k, v in entry.items() if k.endswith("clip_ratio/region_mean")]
            ratios += [v for k, v in entry.items() if k.endswith("ratio_mean") and "clip" not in k]
    if not shares:
        raise Failed("no share of clipped responses was logged")
    figures = {"difference_over_movement": difference, "rounding_over_movement": rounding}
    figures |= {"moved": ours.abs().max().item(), "clipped_at_first_update": shares, "ratio_mean": ratios}
    if max(shares) > 0:
        raise Failed("responses were clipped at a round's first update", figures)
    close("changes of one agent and GRPOTrainer, over their length,", difference, min(2 * rounding, 0.1), figures)
    return figures


def _launch(folder: str, kind: str, processes: int, seconds: float, **environment: str) -> str:
    """Runs the worker; returns the folder of its agents."""
    out = os.path.join(folder, kind)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launcher, os.path.abspath(__file__), "--worker", kind, "--out", out]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    bins = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for ninja
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths, "PATH": bins, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except BaseException:  # too late, or the budget is spent: the ranks go with their launcher
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        lines = [line.split("]:")[-1].strip() for line in errors.splitlines()]  # without the number of the rank
        told = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
        raise Failed(told[0] if told else "\n".join(lines[-5:]))
    return out


def _alone(folder: str) -> str:
    """The worker's run in this process."""
    out = os.path.join(folder, "one")
    worker("one", out)
    return out


def _compare_workers(one: str, other: str, limit: float) -> dict[str, Any]:
    differences = []
    for name in ("tiny-char", "tiny-bpe"):
        a, b = (load_file(os.path.join(path, name, "model.safetensors")) for path in (one, other))
        differences.append(max((a[key].float() - b[key].float()).abs().max().item() for key in a))
    close("weights", max(differences), limit)
    return {"difference": max(differences)}


def ranks(folder: str, small: bool) -> dict[str, Any]:
    """Two processes on one device, by gloo, equal one."""
    return _compare_workers(_alone(folder), _launch(folder, "two", 2, 200), 2e-5)


def _zero_config(folder: str) -> str:
    path = os.path.join(folder, "zero3.json")
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": 3, "overlap_comm": False, "stage3_gather_16bit_weights_on_model_save": True}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**dict.fromkeys(keys, "auto"), "zero_optimization": zero}, file)
    return path


def zero3(folder: str, small: bool) -> dict[str, Any]:
    """DeepSpeed ZeRO-3 on one device equals a run without it."""
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": _zero_config(folder)}
    if not CUDA:
        environment["DS_ACCELERATOR"] = "cpu"
    return _compare_workers(_alone(folder), _launch(folder, "zero3", 1, 300, **environment), 1e-4)


def fsdp2(folder: str, small: bool) -> dict[str, Any]:
    """FSDP2 equals a run without it, or is refused in words."""
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    environment |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    environment |= {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    try:
        out = _launch(folder, "fsdp2", 1, 200, **environment)
    except Failed as error:
        if str(error).startswith("ValueError: ") and "FSDP" in str(error):
            return {"refused": str(error)}
        raise
    return _compare_workers(_alone(folder), out, 1e-4)


def _pair(folder: str, sizes: list[str], rows: int, length: int, mean: int, **changes: Any) -> HACPOTrainer:
    """A team of random models that reads texts of given lengths instead of sampling."""
    common = settings(folder, bf16=CUDA, gradient_checkpointing=True, beta=0.0, learning_rate=1e-6, max_steps=-1)
    common |= {"per_device_train_batch_size": rows, "max_completion_length": length, "num_generations": 4}
    tokenizer = AutoTokenizer.from_pretrained(shipped_agent("tiny-bpe"))
    args = HACPOConfig(
        **{**common, "max_rounds": 1, "peer_clip_delta": None, "skip_silent_responses": False, **changes}
    )
    models = [qwen(size) for size in sizes]
    names = [f"{size}-{i}" for i, size in enumerate(sizes)]
    tokenizers = [tokenizer] + [AutoTokenizer.from_pretrained(shipped_agent("tiny-bpe")) for _ in sizes[1:]]
    trainer = team(models, args, processing_classes=tokenizers, agent_names=names)
    for agent in trainer.agents:
        canned(agent, mean)
    return trainer


def _roomy() -> bool:
    """Whether the device holds more than 80 GB."""
    return CUDA and torch.cuda.get_device_properties(0).total_memory > 100 * GIB


def memory(folder: str, small: bool) -> dict[str, Any]:
    """The peak against the planner, with all agents awake and with one at a time; and how fast agents change."""
    rows, mean = (4, 30) if small else (4, 1000)
    length = mean + mean // 2
    figures: dict[str, Any] = {}
    for asleep in (False, True):
        sizes = ["tiny-a", "tiny-b"] if small else ["1.7B", "4B"] if asleep and _roomy() else ["0.6B", "1.7B"]
        trainer = _pair(os.path.join(folder, str(asleep)), sizes, rows, length, mean, offload_inactive_agents=asleep)
        shapes = [
            AgentShape.from_config(agent.model.config, size) for agent, size in zip(trainer.agents, sizes, strict=True)
        ]
        plan = estimate(
            shapes, 1, offload_inactive=asleep, reference=False, micro_batch=rows, length=length, sample_rows=1
        )
        present = [max(plan.agents, key=lambda a: a.weights)] if asleep else plan.agents
        states = sum(a.weights + a.optimizer + a.gradients for a in present)
        peak = 0
        for agent in trainer.agents:
            clip = agent._clip_grad_norm

            def watched(model, clip=clip, agents=trainer.agents):
                nonlocal peak
                peak = max(peak, resident_bytes(agents))
                return clip(model)

            agent._clip_grad_norm = watched
        if CUDA:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):  # with all moments from the second run on
            trainer.train()
        key = "asleep" if asleep else "awake"
        figures[f"{key}_states_GiB"], figures[f"{key}_states_planned_GiB"] = peak / GIB, states / GIB
        if CUDA:
            allocated = torch.cuda.max_memory_allocated()
            figures[f"{key}_peak_GiB"], figures[f"{key}_peak_planned_GiB"] = allocated / GIB, plan.total / GIB
            figures[f"{key}_peak_over_planned"] = allocated / plan.total
        if asleep:
            figures |= _nights(trainer)
        del trainer, agent, clip, watched
        gc.collect()
    for key in ("awake", "asleep"):  # at the end, so that everything is measured
        ratio = figures[f"{key}_states_GiB"] / figures[f"{key}_states_planned_GiB"]
        close(f"bytes of states, {key}, as a share of the planned", abs(ratio - 1), 0.05, figures)
        if CUDA:
            close(f"peak and plan, {key}", abs(figures[f"{key}_peak_over_planned"] - 1), 0.1, figures)
    return figures


def _nights(trainer: HACPOTrainer) -> dict[str, Any]:
    """GB a second of changing between the agents, both ways together."""
    first, second = trainer.agents
    moved = seconds = 0.0
    for number in range(3):
        for agent in (first, second):
            before = resident_bytes(trainer.agents)
            if CUDA:
                torch.cuda.synchronize()
            started = time.perf_counter()
            trainer.residency.wake(agent)
            if CUDA:
                torch.cuda.synchronize()
            if number:  # the first time allocates
                seconds += time.perf_counter() - started
                moved += before + resident_bytes(trainer.agents)
    return {"park_and_wake_GB_per_second": moved / 1e9 / seconds, "park_and_wake_pinned": CUDA}


def speed(folder: str, small: bool) -> dict[str, Any]:
    """A round of two agents against two GRPOTrainers: seconds of updates and of the rest, and the share of the peak.

    Operations are two a parameter and token, without those of attention.
    """
    # 54 GB of states; on 80 GB a micro-batch of four has too many logits
    size, mean, rows, total = ("tiny-a", 20, 4, 8) if small else ("1.7B", 1500, 4 if _roomy() else 2, 64)
    batches = {"gradient_accumulation_steps": total // rows // 2, "steps_per_generation": total // rows}
    figures = _round_of_two(os.path.join(folder, "hacpo"), size, rows, mean, batches)
    _free()
    figures["two_grpo_trainers_seconds"] = 2 * _round_of_trl(os.path.join(folder, "trl"), size, rows, mean, batches)
    figures["over_two_grpo_trainers"] = figures["round_seconds"] / figures["two_grpo_trainers_seconds"]
    peak = next((p for name, p in PEAKS.items() if CUDA and name in torch.cuda.get_device_name()), None)
    figures["share_of_peak"] = figures["flop_a_second"] / peak if peak else None
    return figures


def _now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def _free() -> None:
    gc.collect()
    if CUDA:
        with contextlib.suppress(RuntimeError):  # of a device that an error has stopped
            torch.cuda.empty_cache()


def _round_of_two(folder: str, size: str, rows: int, mean: int, batches: dict[str, int]) -> dict[str, Any]:
    """Figures of the second round: the first one warms up."""
    trainer = _pair(folder, [size] * 2, rows, mean + mean // 2, mean, **batches, max_rounds=2)
    tokens: list[int] = []
    marks: list[tuple[float, float]] = []
    start, begin = trainer._start_round, trainer.begin_round

    def updating() -> float:
        return sum(agent.timings["updating"] for agent in trainer.agents)

    def start_round(inputs):
        marks.append((_now(), updating()))
        start(inputs)

    def begin_round(rollouts, *args, **kwargs):
        pairs = [pair for r in rollouts for pair in zip(r.prompt_ids, r.completion_ids, strict=True)]
        tokens.append(sum(len(prompt) + len(response) for prompt, response in pairs))
        return begin(rollouts, *args, **kwargs)

    trainer._start_round, trainer.begin_round = start_round, begin_round
    trainer.train()
    seconds, updates = _now() - marks[-1][0], updating() - marks[-1][1]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    # Both agents: all responses forward, backward at twice the cost, and the forward again in between. The second
    # update's half of the own responses has a pass for old log-probabilities, the first update finds them itself.
    operations = 2 * parameters * (0.5 * tokens[-1] + 2 * 4 * tokens[-1])
    return {
        "tokens_of_both": tokens[-1],
        "round_seconds": seconds,
        "updating_seconds": updates,
        "sampling_and_rest_seconds": seconds - updates,
        "flop_a_second": operations / seconds,
    }


def _round_of_trl(folder: str, size: str, rows: int, mean: int, batches: dict[str, int]) -> float:
    """Seconds of a GRPOTrainer's second round, with as many responses and updates as an agent of a team of two."""
    common = settings(folder, bf16=CUDA, gradient_checkpointing=True, beta=0.0, learning_rate=1e-6, max_steps=8)
    common |= {"per_device_train_batch_size": rows, "max_completion_length": mean + mean // 2, "num_iterations": 2}
    tokenizer = AutoTokenizer.from_pretrained(shipped_agent("tiny-bpe"))
    args = GRPOConfig(**common, **batches)
    trainer = GRPOTrainer(qwen(size), text_reward, args, problems(), processing_class=tokenizer)
    canned(trainer, mean)
    marks: list[float] = []
    generate = trainer._generate_and_score_completions

    def marked(inputs):
        marks.append(_now())
        return generate(inputs)

    trainer._generate_and_score_completions = marked
    trainer.train()
    if len(marks) != 2:
        raise Failed(f"{len(marks)} rounds instead of 2")
    return _now() - marks[-1]


def resume(folder: str, small: bool) -> dict[str, Any]:
    """A run that stops after its first round and resumes equals one that does not stop."""
    folders, ends = [shipped_agent(name) for name in ("tiny-char", "tiny-bpe")], []
    for name, rounds in (("whole", [2]), ("parts", [1, 2])):
        for number, count in enumerate(rounds):
            common = settings(os.path.join(folder, name), max_steps=-1, save_strategy="steps", save_steps=1)
            trainer = team(folders, HACPOConfig(**common, max_rounds=count))
            trainer.train(resume_from_checkpoint=number > 0)
        ends.append([weights(agent.model) for agent in trainer.agents])
    difference = max((a - b).abs().max().item() for a, b in zip(*ends, strict=True))
    close("weights", difference, 1e-5 if CUDA else 0.0)
    return {"difference": difference}


# Name -> check, and seconds that it may need on a GPU; the most telling first
CHECKS = {
    "playground": (playground, 40),
    "float32": (float32, 30),
    "bfloat16": (bfloat16, 40),
    "ranks": (ranks, 70),
    "memory": (memory, 110),
    "speed": (speed, 110),
    "resume": (resume, 40),
    "zero3": (zero3, 90),
    "fsdp2": (fsdp2, 60),
}


def worker(kind: str, out: str) -> None:
    """A run whose responses depend on the prompt, its place in the group and the agent only."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    common = settings(out, max_steps=4, beta=0.1, peer_clip_delta=0.9, per_device_train_batch_size=8 // processes)
    # All responses of a round in one update: which of them share an update would depend on the number of processes
    common |= {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
    if kind in ("zero3", "fsdp2", "two"):
        common["ddp_backend"] = "gloo" if kind == "two" or not CUDA else "nccl"
        common["use_cpu"] = not CUDA and kind != "zero3"
    names = ["tiny-char", "tiny-bpe"]
    args = HACPOConfig(**common, shuffle_dataset=False)
    trainer = team([shipped_agent(name) for name in names], args, agent_names=names)
    for agent in trainer.agents:

        def generate(prompt_ids, images, fields, generations, agent=agent, **kwargs):
            responses = []
            for i, ids in enumerate(prompt_ids):
                place = (agent.accelerator.process_index * len(prompt_ids) + i) % agent.num_generations
                digest = hashlib.sha256(f"{agent.agent_name} {place} {list(ids)}".encode()).digest()
                text = "".join("0123456789 +=;"[d % 14] for d in digest[: 4 + digest[31] % 16])
                responses.append([*agent.processing_class(text)["input_ids"], agent.processing_class.eos_token_id])
            return responses, None

        agent._generate_single_turn = generate
    trainer.train()
    trainer.save_model()


@contextlib.contextmanager
def _limit(seconds: float):
    """Ends what takes longer than is left."""

    def late(*_):
        raise TimeoutError(f"took longer than the {seconds:.0f} s that were left")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "[" + ", ".join(map(_shown, value)) + "]" if isinstance(value, list) else str(value)


def _write(out: str | None, device: str, small: bool, results: dict[str, Any]) -> None:
    """After every check: what is known stays, whatever comes."""
    if out:
        told = {"device": device, "torch": torch.__version__, "small": small, "checks": results}
        with open(out, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=2)


def run(checks: list[str], seconds: float, small: bool, out: str | None) -> int:
    """Runs checks within a time; returns 0, or 1 where one failed."""
    started, results = time.monotonic(), {}
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    print(f"{device}, torch {torch.__version__}, {seconds:.0f} s", flush=True)
    for name in checks:
        check, needed = CHECKS[name]
        left, began = seconds - (time.monotonic() - started), time.monotonic()
        if left < (1 if small else needed):
            results[name] = {"status": "not run", "figures": {}}
            print(f"{name}: not run, {max(left, 0):.0f} s are left and it may need {needed}", flush=True)
            _write(out, device, small, results)
            continue
        try:
            with tempfile.TemporaryDirectory() as folder, _limit(left):
                figures = check(folder, small)
            results[name] = {"status": "refused" if "refused" in figures else "passed", "figures": figures}
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            results[name] = {"status": "failed", "figures": getattr(error, "figures", {}), "error": reason}
            if not isinstance(error, Failed):
                results[name]["traceback"] = traceback.format_exc()
                traceback.print_exc()
        _free()
        result = results[name]
        result["seconds"] = time.monotonic() - began
        told = [result["error"]] if "error" in result else []
        told = ", ".join(told + [f"{key} {_shown(value)}" for key, value in result["figures"].items()])
        print(f"{name}: {result['status']} in {result['seconds']:.1f} s: {told}", flush=True)
        _write(out, device, small, results)
    counts = {s: sum(r["status"] == s for r in results.values()) for s in ("passed", "refused", "failed", "not run")}
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return int(counts["failed"] > 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--small", action="store_true", help="tiny models in every check")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if args.worker:
        worker(args.worker, args.out)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
            sys.stdout.flush()
            os._exit(0)  # now and then a thread of gloo aborts the interpreter's own way out
        return 0
    return run([name for name in CHECKS if name in args.only], args.seconds, args.small or not CUDA, args.out)


if __name__ == "__main__":
    sys.exit(main())
