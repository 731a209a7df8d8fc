"""Tiny language models and a verifiable arithmetic task that need neither a download nor a GPU.

The playground exists for demonstrations and tests. It offers

* problems with written-out column arithmetic and an exact answer ([`make_problems`], [`make_split`]),
* the reward that checks the answer ([`answer_reward`]),
* causal language models of different architecture, size and tokenizer ([`SPECS`], [`build_agent`]),
* a supervised warm-up and an accuracy measurement ([`warm_up`], [`accuracy`]),
* and warmed-up agents that ship with the package ([`shipped_agent`]).

`python -m hacpo_trl.playground --out DIR` rebuilds the shipped agents from scratch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    StableLmConfig,
)

from ..sampling.vllm_client import plain_generation_config

__all__ = [
    "ANSWER_MARK",
    "SHIPPED",
    "SPECS",
    "TASKS",
    "AgentSpec",
    "ShippedRecipe",
    "accuracy",
    "answer_reward",
    "build_agent",
    "make_dataset",
    "make_problems",
    "make_split",
    "save_agent",
    "shipped_agent",
    "warm_up",
]

ANSWER_MARK = "####"
"""The final answer of a response is the text after the last occurrence of this mark."""

TASKS = ("addition", "subtraction", "multiplication")
"""Names of the known tasks."""

_AGENTS_DIR = Path(__file__).resolve().parent / "shipped"
_HELD_OUT_PARTS = 8  # one prompt in eight belongs to the held-out region of `make_split`
_MAX_POSITIONS = 512
_REPORT_PROBLEMS = 500  # held-out problems of the accuracies printed by the command line
_RISE_STEPS = 20  # steps over which the learning rate of `warm_up` rises
_SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
_PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))


# Problems ------------------------------------------------------------------------------------------------------------


def _digits_of(number: int, width: int) -> list[int]:
    """Returns `width` decimal digits of `number`, units first."""
    return [number // 10**place % 10 for place in range(width)]


def _addition(generator: random.Random, digits: tuple[int, int]) -> tuple[str, int, list[str]]:
    left, right = _operand(generator, digits), _operand(generator, digits)
    steps, carry = [], 0
    width = max(len(str(left)), len(str(right)))
    for a, b in zip(_digits_of(left, width), _digits_of(right, width), strict=True):
        steps.append(f"{a} + {b} + {carry} = {a + b + carry}")
        carry = (a + b + carry) // 10
    return f"{left} + {right}", left + right, steps


def _subtraction(generator: random.Random, digits: tuple[int, int]) -> tuple[str, int, list[str]]:
    left, right = _operand(generator, digits), _operand(generator, digits)
    left, right = max(left, right), min(left, right)
    steps, borrow = [], 0
    width = len(str(left))
    for a, b in zip(_digits_of(left, width), _digits_of(right, width), strict=True):
        top = a + 10 if a - b - borrow < 0 else a
        steps.append(f"{top} - {b} - {borrow} = {top - b - borrow}")
        borrow = int(top > a)
    return f"{left} - {right}", left - right, steps


def _multiplication(generator: random.Random, digits: tuple[int, int]) -> tuple[str, int, list[str]]:
    left, factor = _operand(generator, digits), generator.randint(2, 9)
    steps, carry = [], 0
    for a in _digits_of(left, len(str(left))):
        steps.append(f"{a} * {factor} + {carry} = {a * factor + carry}")
        carry = (a * factor + carry) // 10
    return f"{left} * {factor}", left * factor, steps


_MAKERS = {"addition": _addition, "subtraction": _subtraction, "multiplication": _multiplication}


def _operand(generator: random.Random, digits: tuple[int, int]) -> int:
    """Draws the number of digits first, so that short numbers are as frequent as long ones."""
    width = generator.randint(*digits)
    return generator.randint(10 ** (width - 1) if width > 1 else 0, 10**width - 1)


def _check_tasks(tasks: str | Sequence[str], digits: tuple[int, int]) -> list[str]:
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    unknown = [name for name in names if name not in _MAKERS]
    if unknown or not names:
        problem = f"unknown task {unknown[0]!r}" if unknown else "no task given"
        raise ValueError(f"{problem}, known tasks: {', '.join(TASKS)}")
    low, high = digits
    if not 1 <= low <= high:
        raise ValueError(f"digits must be (low, high) with 1 <= low <= high, got {digits}")
    return names


def _stream(names: list[str], seed: int | str, digits: tuple[int, int]) -> Iterator[dict[str, str]]:
    generator = random.Random(f"{seed}")
    while True:
        task = generator.choice(names)
        expression, result, steps = _MAKERS[task](generator, digits)
        yield {
            "prompt": f"{expression} = ?\n",
            "answer": str(result),
            "solution": f"{' ; '.join(steps)} {ANSWER_MARK} {result}",
            "task": task,
        }


def make_problems(
    tasks: str | Sequence[str], count: int, seed: int, *, digits: tuple[int, int] = (2, 3)
) -> list[dict[str, str]]:
    """Draws arithmetic problems with written-out solutions.

    The solutions work column by column, units first. A column of an addition is `a + b + carry = sum`, one of a
    subtraction `a - b - borrow = difference` (`a` is written with ten added where the column borrows from the next
    one), one of a multiplication `a * factor + carry = product`. Subtractions never have a negative result and
    multiplications have a factor of one digit from 2 to 9.

    Args:
        tasks: One of [`TASKS`] or several of them; each problem's task is drawn uniformly.
        count: Number of problems. The same problem may be drawn more than once.
        seed: Determines the problems completely; no global random state is read or changed.
        digits: Smallest and largest number of decimal digits of the operands.

    Returns:
        `count` dictionaries with the string values `prompt` (`"247 + 58 = ?\\n"`), `answer` (`"305"`), `solution`
        (`"7 + 8 + 0 = 15 ; 4 + 5 + 1 = 10 ; 2 + 0 + 1 = 3 #### 305"`) and `task` (`"addition"`).

    Raises:
        ValueError: If a task is unknown (the message names the known ones), if no task is given or if `digits` does
            not satisfy 1 <= smallest <= largest.
    """
    stream = _stream(_check_tasks(tasks, digits), seed, digits)
    return [next(stream) for _ in range(count)]


def _is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % _HELD_OUT_PARTS == 0


def make_split(
    tasks: str | Sequence[str], train: int, held_out: int, seed: int, *, digits: tuple[int, int] = (2, 3)
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Draws training and held-out problems that never share a prompt.

    A fixed eighth of all prompts, chosen by a checksum of the prompt, is reserved for held-out problems. The two
    lists are therefore disjoint for any two calls, also with different seeds, and no held-out problem was seen in
    the warm-up of the shipped agents.

    Args:
        tasks: One of [`TASKS`] or several of them.
        train: Number of training problems; the same problem may be drawn more than once.
        held_out: Number of held-out problems; all of them are different.
        seed: Determines the problems completely.
        digits: Smallest and largest number of decimal digits of the operands.

    Returns:
        The training problems and the held-out problems, as [`make_problems`] returns them.

    Raises:
        ValueError: As [`make_problems`], or if there are too few different problems to fill the request.
    """
    names = _check_tasks(tasks, digits)
    training = _take(names, f"{seed}-train", digits, train, held_out=False)
    return training, _take(names, f"{seed}-held-out", digits, held_out, held_out=True)


def _take(names: list[str], seed: str, digits: tuple[int, int], count: int, *, held_out: bool) -> list[dict[str, str]]:
    """Takes `count` problems from one side of the split, without repetition on the held-out side."""
    taken: list[dict[str, str]] = []
    seen: set[str] = set()
    misses = 0
    for problem in _stream(names, seed, digits):
        if len(taken) >= count:
            break
        if _is_held_out(problem["prompt"]) != held_out or (held_out and problem["prompt"] in seen):
            misses += 1
            if misses > 20_000:
                side = "held-out" if held_out else "training"
                raise ValueError(f"too few different {side} problems of {names} with digits {digits} for {count}")
            continue
        misses = 0
        seen.add(problem["prompt"])
        taken.append(problem)
    return taken


def make_dataset(problems: Sequence[dict[str, str]]) -> Dataset:
    """Turns problems into a dataset for a trainer.

    Args:
        problems: Problems as [`make_problems`] returns them.

    Returns:
        A dataset with one row per problem and the plain text columns `prompt` and `answer`.
    """
    return Dataset.from_dict({key: [problem[key] for problem in problems] for key in ("prompt", "answer")})


def answer_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """Rewards responses whose final answer is exactly right.

    Args:
        completions: Responses, each a string or a list of chat messages (`[{"role": "assistant", "content": ...}]`)
            of which the last one counts.
        answer: Expected answers, one per response.
        **kwargs: Further dataset columns and trainer arguments, ignored.

    Returns:
        One number per response: 1.0 if the text after the last `####` equals the answer (surrounding white space
        aside), 0.0 otherwise, also where the mark is missing.

    Raises:
        ValueError: If the numbers of responses and answers differ.
    """
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        if not isinstance(completion, str):
            completion = (completion[-1].get("content") if completion else "") or ""
        _, mark, final = completion.rpartition(ANSWER_MARK)
        rewards.append(float(bool(mark) and final.strip() == str(expected).strip()))
    return rewards


# Agents --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AgentSpec:
    """Describes a tiny causal language model and its tokenizer.

    Attributes:
        name: Name of the agent.
        architecture: `"llama"`, `"olmo2"` or `"stablelm"`.
        tokenizer: `"char"` (one token per printable ASCII character or newline) or `"bpe"` (byte-level BPE trained on
            the text of the arithmetic tasks).
        hidden_size: Width of the model, a multiple of `num_heads`.
        num_layers: Number of transformer layers.
        num_heads: Number of attention heads.
        vocab_size: Number of tokens of a BPE tokenizer, at least 259 (bytes and special tokens); ignored for `"char"`.
        seed: Seed of the random weights.
    """

    name: str
    architecture: str
    tokenizer: str
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int = 0
    seed: int = 0


SPECS: dict[str, AgentSpec] = {
    spec.name: spec
    for spec in (
        AgentSpec("tiny-char", "llama", "char", hidden_size=64, num_layers=6, num_heads=2, seed=1),
        AgentSpec("tiny-bpe", "olmo2", "bpe", hidden_size=96, num_layers=4, num_heads=3, vocab_size=448, seed=2),
        AgentSpec("mini-bpe", "stablelm", "bpe", hidden_size=64, num_layers=3, num_heads=4, vocab_size=320, seed=3),
    )
}
"""The built-in agents by name. They differ in architecture, size and tokenizer."""

_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "olmo2": Olmo2Config,
    "stablelm": StableLmConfig,
}


@contextlib.contextmanager
def _local_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds the random generators of the CPU and of `device` inside the block only."""
    on_cuda = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _char_tokenizer() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS.values(), *_PRINTABLE))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@functools.lru_cache(maxsize=8)
def _bpe_tokenizer_json(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = [problem["prompt"] + problem["solution"] for problem in make_problems(TASKS, 4000, seed=0)]
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer.to_str()


def _build_tokenizer(spec: AgentSpec) -> PreTrainedTokenizerFast:
    if spec.tokenizer == "char":
        backend = _char_tokenizer()
    elif spec.tokenizer == "bpe":
        if spec.vocab_size < 256 + len(_SPECIAL_TOKENS):
            raise ValueError(f"vocab_size of a BPE tokenizer must be at least 259, got {spec.vocab_size}")
        backend = Tokenizer.from_str(_bpe_tokenizer_json(spec.vocab_size))
    else:
        raise ValueError(f"unknown tokenizer {spec.tokenizer!r}, known: bpe, char")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=_MAX_POSITIONS,
        **_SPECIAL_TOKENS,
    )


def build_agent(spec: AgentSpec) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Builds an agent with random weights.

    Args:
        spec: Description of the agent. The same description always gives the same weights and the same tokenizer.

    Returns:
        The model (float32, on the CPU, in evaluation mode) and its tokenizer. The tokenizer pads on the left, adds no
        special tokens of its own and restores every text exactly; its pad, end-of-sequence and unknown tokens are
        distinct. Of a character tokenizer, characters other than printable ASCII and newline become the unknown
        token. The global random state is left as it was.

    Raises:
        ValueError: If the architecture or the tokenizer is unknown or the sizes do not fit.
    """
    if spec.architecture not in _CONFIGS:
        raise ValueError(f"unknown architecture {spec.architecture!r}, known: {', '.join(sorted(_CONFIGS))}")
    if spec.hidden_size % spec.num_heads:
        raise ValueError(f"hidden_size {spec.hidden_size} is not a multiple of num_heads {spec.num_heads}")
    tokenizer = _build_tokenizer(spec)
    config = _CONFIGS[spec.architecture](
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=2 * spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_heads,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with _local_rng(spec.seed):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model.eval(), tokenizer


def save_agent(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike[str]) -> str:
    """Saves an agent to a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    `AutoTokenizer` may choose another tokenizer class by the type of the model, so the tokenizer is loaded back and
    compared.

    Args:
        model: Model to save, with the dtype it has.
        tokenizer: Its tokenizer.
        path: Folder to write, created where it is missing.

    Returns:
        The folder as a string.

    Raises:
        RuntimeError: If the saved tokenizer comes back with other token ids or decodes them differently.
    """
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    reloaded = AutoTokenizer.from_pretrained(path)
    sample = "".join(problem["prompt"] + problem["solution"] for problem in make_problems(TASKS, 4, seed=0))
    for text in (sample, _PRINTABLE, "  two  spaces ,  and a full stop ."):
        ids = tokenizer(text)["input_ids"]
        again = reloaded(text)["input_ids"]
        if ids != again or tokenizer.decode(ids) != reloaded.decode(again):
            raise RuntimeError(
                f"the tokenizer saved to {os.fspath(path)} loads as {type(reloaded).__name__} and encodes or decodes "
                f"differently from the saved {type(tokenizer).__name__}"
            )
    return os.fspath(path)


# Warm-up and accuracy ------------------------------------------------------------------------------------------------


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[dict[str, str]],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    progress: bool = True,
) -> list[float]:
    """Trains a model on written-out solutions, in place.

    Uses AdamW without weight decay, a learning rate that rises linearly over the first 20 steps and then stays
    constant, and gradients clipped to norm 1. A shorter run is therefore the beginning of a longer one. The prompt is
    tokenized apart from the response, as in generation.

    Args:
        model: Model to train, on any device; its training or evaluation mode is restored.
        tokenizer: Its tokenizer.
        problems: Problems with `prompt` and `solution`; every step draws `batch_size` of them with replacement.
        steps: Number of optimizer steps.
        batch_size: Problems per step.
        learning_rate: Learning rate after the rise.
        seed: Seed of the order of the problems.
        progress: Whether to show a progress bar.

    Returns:
        The mean cross-entropy in nats per token of the response, its end-of-sequence token included, for each step.

    Raises:
        ValueError: If there are no problems.
    """
    if not problems:
        raise ValueError("warm_up needs at least one problem")
    generator = random.Random(seed)
    encoded = []
    for problem in problems:
        prompt = tokenizer(problem["prompt"])["input_ids"]
        response = tokenizer(problem["solution"])["input_ids"] + [tokenizer.eos_token_id]
        encoded.append((prompt + response, [-100] * len(prompt) + response))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _RISE_STEPS))
    losses = []
    was_training = model.training
    model.train()
    try:
        bar = tqdm(range(steps), desc="warm-up", disable=not progress)
        for _ in bar:
            batch = generator.choices(encoded, k=batch_size)
            width = max(len(ids) for ids, _ in batch)
            ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in batch])
            labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in batch])
            mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
            output = model(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                labels=labels.to(model.device),
                use_cache=False,
            )
            optimizer.zero_grad()
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(output.loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    finally:
        optimizer.zero_grad()
        model.train(was_training)
    return losses


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[dict[str, str]],
    *,
    sampled: bool = False,
    batch_size: int = 256,
    max_new_tokens: int = 96,
    seed: int = 0,
) -> float:
    """Measures the share of problems that a model answers correctly with one response each.

    Args:
        model: Model to measure, on any device; its training or evaluation mode is restored.
        tokenizer: Its tokenizer, which must pad on the left.
        problems: Problems with `prompt` and `answer`.
        sampled: Whether to sample at temperature 1 from the whole distribution instead of decoding greedily.
        batch_size: Prompts that are continued together.
        max_new_tokens: Longest response in tokens; a response ends earlier at the end-of-sequence token.
        seed: Seed of the sampling. The global random state is left as it was.

    Returns:
        Mean reward of [`answer_reward`], between 0 and 1.

    Raises:
        ValueError: If there are no problems or the tokenizer does not pad on the left.
    """
    if not problems:
        raise ValueError("accuracy needs at least one problem")
    if tokenizer.padding_side != "left":
        raise ValueError(f"accuracy needs a tokenizer that pads on the left, not on the {tokenizer.padding_side}")
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampled,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}),
    )
    reward = 0.0
    was_training = model.training
    model.eval()
    try:
        with _local_rng(seed, model.device), plain_generation_config(model):
            for start in range(0, len(problems), batch_size):
                batch = problems[start : start + batch_size]
                inputs = tokenizer([problem["prompt"] for problem in batch], padding=True, return_tensors="pt")
                output = model.generate(
                    input_ids=inputs["input_ids"].to(model.device),
                    attention_mask=inputs["attention_mask"].to(model.device),
                    generation_config=settings,
                )
                responses = output[:, inputs["input_ids"].shape[1] :]
                texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
                reward += sum(answer_reward(texts, [problem["answer"] for problem in batch]))
    finally:
        model.train(was_training)
    return reward / len(problems)


# Shipped agents ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShippedRecipe:
    """How a shipped agent was warmed up, and the accuracy to expect.

    Attributes:
        tasks: Tasks of the warm-up and of the accuracies.
        steps: Optimizer steps of [`warm_up`].
        batch_size: Problems per step.
        learning_rate: Learning rate of [`warm_up`].
        seed: Seed of the problems and of their order.
        sampled: Lower and upper bound of the accuracy of sampled responses on a few hundred held-out problems.
        greedy: Lower and upper bound of the accuracy of greedy responses on a few hundred held-out problems.
    """

    tasks: tuple[str, ...]
    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    sampled: tuple[float, float]
    greedy: tuple[float, float]


SHIPPED: dict[str, ShippedRecipe] = {
    "tiny-char": ShippedRecipe(("addition", "subtraction"), 720, 64, 3e-3, 11, (0.3, 0.53), (0.47, 0.7)),
    "tiny-bpe": ShippedRecipe(("addition", "subtraction"), 600, 64, 2e-3, 12, (0.11, 0.3), (0.32, 0.56)),
}
"""Warm-up recipes of the shipped agents by name."""


def shipped_agent(name: str) -> str:
    """Returns the folder of a warmed-up agent that ships with the package.

    The weights are stored as float16; load them with `AutoModelForCausalLM.from_pretrained(path,
    dtype=torch.float32)` and the tokenizer with `AutoTokenizer.from_pretrained(path)`.

    Args:
        name: A key of [`SHIPPED`].

    Returns:
        The folder inside the installed package.

    Raises:
        ValueError: If no agent of this name ships; the message names those that do.
        FileNotFoundError: If the installation lacks the folder.
    """
    if name not in SHIPPED:
        raise ValueError(f"no shipped agent is named {name!r}, there are: {', '.join(SHIPPED)}")
    path = _AGENTS_DIR / name
    if not (path / "model.safetensors").is_file():
        raise FileNotFoundError(f"{path} lacks the agent; rebuild it with `python -m hacpo_trl.playground`")
    return str(path)


def _build_shipped(name: str, out: Path) -> None:
    """Warms up one shipped agent, saves it and prints its accuracy."""
    recipe = SHIPPED[name]
    model, tokenizer = build_agent(SPECS[name])
    training, held_out = make_split(recipe.tasks, 20_000, _REPORT_PROBLEMS, recipe.seed)
    started = time.perf_counter()
    losses = warm_up(
        model,
        tokenizer,
        training,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
    )
    seconds = time.perf_counter() - started
    path = save_agent(copy.deepcopy(model).half(), tokenizer, out / name)
    (out / name / "model.safetensors").chmod(0o644)  # written for its owner only, but a package is for everyone
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    print(
        f"{name}: {model.num_parameters()} parameters, warm-up {seconds:.0f} s, last loss {losses[-1]:.3f}, "
        f"held-out accuracy greedy {accuracy(model, tokenizer, held_out):.3f}, "
        f"sampled {accuracy(model, tokenizer, held_out, sampled=True):.3f}, saved to {path}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Rebuilds the shipped agents from scratch; the command line of the module."""
    parser = argparse.ArgumentParser(
        prog="python -m hacpo_trl.playground", description="Rebuilds the shipped agents from scratch."
    )
    parser.add_argument("--out", type=Path, default=_AGENTS_DIR, help="folder to write (default: inside the package)")
    parser.add_argument("--name", choices=list(SHIPPED), action="append", help="only this agent (may be repeated)")
    options = parser.parse_args(arguments)
    for name in options.name or SHIPPED:
        _build_shipped(name, options.out)
