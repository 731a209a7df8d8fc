"""What a dry run shows of the task: one prompt as every agent reads it, and on request how well the agents answer."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..config import HACPOConfig
from ..evaluation.answers import evaluate_model, prompt_ids
from ..texts.prompts import PromptForm

_TEACHES = 0.25
"""With a smaller share of problems that have both right and wrong responses, a task is called hardly learnable."""


def show_prompt(name: str, tokenizer: PreTrainedTokenizerBase, form: PromptForm, problem: dict[str, Any]) -> str:
    """A prompt as an agent reads it, with its special tokens and the tokens before the response.

    Args:
        name: of the agent.
        tokenizer: its own.
        form: how problems become its prompts.
        problem: a row with "problem".
    """
    ids = prompt_ids(tokenizer, [problem], form)[0]
    last = " ".join(repr(tokenizer.decode([token])) for token in ids[-4:])
    text = "\n".join(f"    | {line}" for line in f"{tokenizer.decode(ids)}⟦response⟧".split("\n"))
    return f"the first prompt as {name} reads it: {len(ids)} tokens, the last ones {last}\n{text}"


def sample_team(
    models: Sequence[str],
    names: Sequence[str],
    configs: Sequence[HACPOConfig],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    form: PromptForm,
    problems: Sequence[dict[str, Any]],
    reward: Callable[..., Sequence[float | None]],
    say: Callable[[str], None] = print,
) -> str:
    """Lets every agent answer some problems as in training, one agent after the other, with transformers' generate.

    Args:
        models: Hub ids or folders.
        names: of the agents.
        configs: settings per agent.
        tokenizers: one per agent.
        form: how problems become prompts.
        problems: rows with "problem" and what the reward function reads.
        reward: judges the responses.
        say: takes the line of each agent as soon as it is known.

    Returns:
        What `verdict` says.
    """
    width = max(5, *map(len, names))
    shown = f"{len(problems)} problems x {configs[0].num_generations} responses of each agent, as in training:"
    say(f"{shown}\n  {'agent':{width}}  mean reward  all right  all wrong  s a response  tokens  cut")
    rewards, cut, grading = [], [], 0.0

    def timed(**columns: Any) -> Sequence[float | None]:
        nonlocal grading
        started = time.perf_counter()
        scores = reward(**columns)
        grading += time.perf_counter() - started
        return scores

    for model, name, args, tokenizer in zip(models, names, configs, tokenizers, strict=True):
        policy, grading = _load(model, args), 0.0
        result = evaluate_model(
            policy,
            tokenizer,
            problems,
            samples=args.num_generations,
            temperature=args.temperature,
            max_new_tokens=args.max_completion_length,
            seed=args.seed,
            batch_size=args.sampling_batch_size or args.rows_per_round,
            verifier=timed,
            progress=False,
            **form.for_agent(args.chat_template_kwargs).settings(),
        )
        del policy
        summary = result.summary()
        own = [row.get("rewards", row["correct"]) for row in result.problems]
        rewards.append([[math.nan if r is None else float(r) for r in row] for row in own])
        cut.append(summary["truncated"])
        groups = [row["correct"] for row in result.scored]
        right, wrong = (sum(row.count(kind) == len(row) for row in groups) for kind in (True, False))
        shares = [100 * count / max(1, len(groups)) for count in (right, wrong)]
        known = [r for row in rewards[-1] for r in row if not math.isnan(r)]
        mean = sum(known) / len(known) if known else math.nan
        seconds = (result.seconds - grading) / (len(problems) * args.num_generations)
        say(
            f"  {name:{width}}  {mean:11.3f}  {shares[0]:7.0f} %  {shares[1]:7.0f} %  {seconds:12.2f}  "
            f"{summary['tokens']:6.0f}  {100 * cut[-1]:.0f} %"
        )
    return verdict(names, rewards, cut)


def verdict(names: Sequence[str], rewards: Sequence[Sequence[Sequence[float]]], cut: Sequence[float]) -> str:
    """Whether a team can learn a task, from a sample of its responses.

    A problem teaches where its responses' rewards differ: with equal ones every advantage is 0.

    Args:
        names: of the agents.
        rewards: (N, B, G), nan for what cannot be scored.
        cut: (N,) share of each agent's responses that were cut at the length limit.
    """
    table = torch.tensor(rewards, dtype=torch.float64)  # (N, B, G)
    known = torch.isfinite(table)
    if not known.any():
        return "Learnable? No: not one response could be scored. Look at the reward function and the answers."
    lowest = table.where(known, torch.inf).amin((0, 2))  # (B,)
    highest = table.where(known, -torch.inf).amax((0, 2))
    teaches = ((highest > lowest).sum() / (highest >= lowest).sum()).item()  # of those with a scorable response
    never = [name for name, own, scored in zip(names, table, known, strict=True) if not (own[scored] > 0).any()]
    if not any(cut):
        long = ""
    else:
        long = f" Up to {100 * max(cut):.0f} % of an agent's responses were cut: try a larger max_completion_length."
    if len(never) == len(names):
        return (
            "Learnable? No: not one response was rewarded, so every advantage is 0. Take easier problems, show the "
            f"form of the answer in the prompt, or check that the reward function can read these answers.{long}"
        )
    share = f"on {100 * teaches:.0f} % of the problems some responses are better than others"
    if teaches == 0:
        return f"Learnable? No: on every problem all responses got the same reward. Take harder problems.{long}"
    if teaches < _TEACHES:
        mean = table[known].mean() / max(table[known].max().item(), 1e-8)
        kind = "harder" if mean > 0.5 else "easier"
        text = f"Learnable? Hardly: only {share}, and only these teach. Take {kind} problems, or more num_generations."
        text += long
    else:
        text = f"Learnable? Yes: {share}."
    if never:
        text += (
            f" Never rewarded: {', '.join(never)}. Such an agent learns from the others' responses only, and its P of "
            "0 weighs these up to ten times. Teach it the form of the answer first, or set capability_ratio_bounds "
            "nearer to 1."
        )
    return text


def _load(model: str, args: HACPOConfig) -> Any:
    """The policy as the run loads it, without adapters and quantization."""
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    kwargs.setdefault("dtype", torch.bfloat16 if args.bf16 else torch.float32)
    return AutoModelForCausalLM.from_pretrained(model, **kwargs).to(args.device)
