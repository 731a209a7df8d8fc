"""A model's answers to maths problems, judged.

`evaluate_model` lets one model answer the problems of a benchmark and judges its answers; `scores.results_table` puts
several results side by side. The command line is `hacpo_trl.cli.evaluate`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.utils import find_adapter_config_file
from trl.trainer.utils import get_callable_name

from ..maths.reward import MathVerifier, check_columns, math_reward, rules_of
from ..sampling.vllm_client import plain_generation_config
from ..texts.prompt_check import PromptChecker, Reader
from ..texts.prompts import INSTRUCTION, PromptForm, form_of_settings, make_form
from ..texts.stops import StopAtTexts, before_stop, cut_at_stop
from .scores import EvaluationResult, group_answers

PROMPT_FORMATS = ("auto", "chat", "plain")


@dataclass
class _Response:
    text: str
    tokens: int
    finished: bool


def resolve_prompt_format(tokenizer: PreTrainedTokenizerBase, prompt_format: str = "auto") -> str:
    """Whether prompts become chats or plain text.

    Args:
        tokenizer: the model's.
        prompt_format: "chat", "plain", or "auto": chat if the tokenizer has a template.

    Returns:
        "chat" or "plain".

    Raises:
        ValueError: if the format is unknown, or a chat is wanted without a template.
    """
    if prompt_format not in PROMPT_FORMATS:
        raise ValueError(f"prompt_format={prompt_format!r} is unknown; use 'auto', 'chat' or 'plain'.")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prompt_format == "auto":
        return "chat" if has_template else "plain"
    if prompt_format == "chat" and not has_template:
        raise ValueError("prompt_format='chat' needs a tokenizer with a chat template; use 'plain' or 'auto'.")
    return prompt_format


def resolve_settings(
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_new_tokens: int = 2048,
    prompt_format: str = "auto",
    prompt_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    system_prompt: str | None = None,
    instruction: str = INSTRUCTION,
    stop: Sequence[str] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Checks the settings of an evaluation and fills in the defaults; for the arguments see `evaluate_model`.

    Returns:
        All of them by name: what determines the answers, apart from the model and the problems.

    Raises:
        ValueError: naming a setting that makes no sense.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r} must be a whole number of at least 1.")
    temperature = float(samples > 1) if temperature is None else float(temperature)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature!r} must be 0 (greedy) or a positive number.")
    if temperature == 0 and samples > 1:
        raise ValueError(f"Greedy decoding gives {samples} equal answers; use temperature > 0 or samples=1.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r} must be above 0 and at most 1.")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1.")
    form = make_form(
        resolve_prompt_format(tokenizer, prompt_format),
        prompt_template=prompt_template,
        instruction=instruction,
        system_prompt=system_prompt,
        stop=stop,
        chat_template_kwargs=chat_template_kwargs,
    )
    return {
        "samples": samples,
        "temperature": temperature,
        "top_p": float(top_p) if temperature else 1.0,  # greedy decoding has no use for it
        "max_new_tokens": max_new_tokens,
        **form.settings(),
        "seed": seed,
    }


def check_problems(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[dict[str, Any]],
    form: PromptForm,
    *,
    model_name: str,
    benchmark: str,
    positions: int | None = None,
) -> None:
    """Refuses what a model cannot be asked, before it answers anything.

    Args:
        tokenizer: the model's.
        problems: rows with "problem" and the columns for the reward function.
        form: how they become prompts.
        model_name: for messages.
        benchmark: for messages.
        positions: the longest text that the model reads, in tokens, or None.

    Raises:
        ValueError: naming the row and the model, see `PromptChecker`; for a column with a name that reward functions
            know as something else.
    """
    check_columns((column for column in problems[0] if column != "prompt"), benchmark)
    reader = Reader(model_name, tokenizer, form.chat_template_kwargs, positions or None)
    PromptChecker(benchmark, [reader]).fitting(_render_all(problems, form), 0)


def _render_all(problems: Sequence[dict[str, Any]], form: PromptForm) -> list[Any]:
    prompts = []
    for i, row in enumerate(problems):
        try:
            prompts.append(form.render(row["problem"]))
        except ValueError as error:
            raise ValueError(f"Problem {i}: {error}") from None
    return prompts


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[dict[str, Any]], form: PromptForm
) -> list[list[int]]:
    """The tokens of every problem's prompt, as a trainer makes them.

    Args:
        tokenizer: the model's.
        problems: rows with "problem".
        form: how they become prompts.

    Raises:
        ValueError: for a problem that does not fit the form, naming it.
    """
    prompts = _render_all(problems, form)
    if form.prompt_format == "plain":
        return tokenizer(prompts)["input_ids"]
    texts = [
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **form.chat_template_kwargs)
        for prompt in prompts
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]  # the template has written them


def _end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a response: a chat model has an end of turn besides the end of text."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [] if known is None else [known] if isinstance(known, int) else list(known)
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(ids))


@torch.no_grad()
def _generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    settings: dict[str, Any],
    batch_size: int,
    progress: bool,
    label: str,
) -> list[list[_Response]]:
    """Answers with transformers. Prompts of similar length share a batch, so that little is spent on padding."""
    ends, samples, stop = _end_ids(model, tokenizer), settings["samples"], settings["stop"]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    greedy = settings["temperature"] == 0
    chosen = {} if greedy else {"temperature": settings["temperature"], "top_p": settings["top_p"], "top_k": 0}
    # The longest first: what does not fit into memory fails at once. Samples of one prompt stay neighbours.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    requests = [i for i in order for _ in range(samples)]
    responses: list[list[_Response]] = [[] for _ in prompts]
    on_cuda = model.device.type == "cuda"
    was_training = model.training
    model.eval()
    bar = tqdm(total=len(requests), desc=label, unit="answer", disable=not progress, dynamic_ncols=True)
    try:
        with torch.random.fork_rng(devices=[model.device] if on_cuda else []), plain_generation_config(model), bar:
            for start in range(0, len(requests), batch_size):
                # By batch, so that it does not matter which batches ran before
                torch.manual_seed(settings["seed"] * 1_000_003 + start)
                chunk = requests[start : start + batch_size]
                width = max(len(prompts[i]) for i in chunk)
                ids = [[pad] * (width - len(prompts[i])) + prompts[i] for i in chunk]
                mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chunk]
                output = model.generate(
                    input_ids=torch.tensor(ids, device=model.device),
                    attention_mask=torch.tensor(mask, device=model.device),
                    generation_config=GenerationConfig(
                        max_new_tokens=int(min(settings["max_new_tokens"], room - width)),
                        do_sample=not greedy,
                        eos_token_id=ends or None,
                        pad_token_id=pad,
                        **chosen,
                    ),
                    stopping_criteria=StoppingCriteriaList([StopAtTexts(tokenizer, stop, width)] if stop else []),
                )
                for i, row in zip(chunk, output[:, width:].tolist(), strict=True):
                    responses[i].append(_read_response(tokenizer, prompts[i], row, ends, stop))
                bar.update(len(chunk))
    finally:
        model.train(was_training)
    return responses


def _read_response(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], row: list[int], ends: Sequence[int], stop: Sequence[str]
) -> _Response:
    end = next((i for i, token in enumerate(row) if token in ends), None)
    row = row if end is None else row[: end + 1]
    (cut,) = cut_at_stop(tokenizer, [prompt], [row], stop)  # what follows has filled up the row
    text = tokenizer.decode(row[:end] if cut is None else row[:cut], skip_special_tokens=True)
    tokens = len(row) if cut is None else cut
    return _Response(before_stop(text, stop), tokens, end is not None or cut is not None)


def _generate_vllm(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], settings: dict[str, Any], progress: bool
) -> list[list[_Response]]:
    from vllm import SamplingParams

    params = SamplingParams(
        n=settings["samples"],
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        top_k=0,
        max_tokens=settings["max_new_tokens"],
        stop=settings["stop"] or None,
        seed=settings["seed"],
    )
    outputs = model.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=progress)
    return [
        [_Response(one.text, len(one.token_ids), one.finish_reason != "length") for one in output.outputs]
        for output in outputs
    ]


def _grade(
    reward: Callable[..., Sequence[float | None]],
    problems: Sequence[dict[str, Any]],
    form: PromptForm,
    responses: Sequence[Sequence[_Response]],
) -> tuple[list[float | None], list[str]]:
    """Rewards of all responses, None where they cannot be scored, and the answers that the function read.

    The function is called as GRPOTrainer calls it: with every column of the problems, and chats as lists of messages.
    """
    rows = [(problem, response) for problem, row in zip(problems, responses, strict=True) for response in row]
    chat = form.prompt_format == "chat"
    extra: dict[str, list[Any]] = {}
    columns = {
        key: [problem.get(key) for problem, _ in rows] for key in problems[0] if key not in ("problem", "prompt")
    }
    scores = reward(
        prompts=[form.render(problem["problem"]) for problem, _ in rows],
        completions=[[{"role": "assistant", "content": r.text}] if chat else r.text for _, r in rows],
        **columns,
        trainer_state=None,
        log_extra=extra.__setitem__,
        log_metric=lambda name, value: None,
    )
    numbers = [None if score is None or math.isnan(float(score)) else float(score) for score in scores]
    if len(numbers) != len(rows):
        raise ValueError(f"The reward function returned {len(numbers)} rewards for {len(rows)} responses.")
    return numbers, [str(answer) for answer in extra.get("parsed_answer", [""] * len(rows))]


def judged_by(functions: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None) -> dict[str, str]:
    """What judged a result, as a part of its settings.

    Args:
        functions: reward functions.
        weights: see `weighted_sum`.

    Returns:
        "reward", their names and weights as a person reads them, and "rules", see `rules_of`.
    """
    factors = [""] * len(functions) if weights is None else [f"{weight:g} x " for weight in weights]
    parts = [factor + get_callable_name(function) for factor, function in zip(factors, functions, strict=True)]
    return {"reward": " + ".join(parts), "rules": rules_of(functions)}


def _same_text(golds: Sequence[str], texts: Sequence[str]) -> list[float]:
    """Equality of answers for a reward function that tells none: equal texts are in one group already."""
    return [0.0] * len(golds)


def check_whole(model: str) -> None:
    """Whether a vLLM engine can load a model.

    Args:
        model: Hub id or folder.

    Raises:
        ValueError: for an adapter.
    """
    try:
        adapter = find_adapter_config_file(model)
    except OSError:  # neither a folder nor an id; loading tells
        return
    if adapter is not None:
        raise ValueError(
            f"{model} is an adapter, and the engine 'vllm' takes whole models. Make one of it, "
            f"hacpo_trl.merge_adapter({model!r}, {model.rstrip('/') + '-merged'!r}), or use the engine 'transformers'."
        )


def load_vllm(model: str, **kwargs: Any) -> Any:
    """Loads a model into a vLLM engine.

    Args:
        model: Hub id or folder of a whole model (`merge_adapter` merges an adapter).
        **kwargs: arguments of `vllm.LLM`.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: see `check_whole`.
    """
    check_whole(model)
    try:
        from vllm import LLM
    except ImportError as error:
        raise ImportError(
            f"The engine 'vllm' needs the package vllm, which cannot be imported ({error}). Run pip install "
            "'vllm>=0.31,<0.32' 'transformers>=5.17,<5.18', or use the engine 'transformers'."
        ) from error
    return LLM(model=model, **kwargs)


def evaluate_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[dict[str, str]],
    *,
    samples: int = 1,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_new_tokens: int = 2048,
    prompt_format: str = "auto",
    prompt_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    system_prompt: str | None = None,
    instruction: str = INSTRUCTION,
    stop: Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    verifier: Callable[..., Sequence[float | None]] | None = None,
    model_name: str = "model",
    benchmark: str = "problems",
    progress: bool = True,
) -> EvaluationResult:
    """Lets a model answer problems and judges its answers.

    Args:
        model: a causal language model of transformers on any device, or a `vllm.LLM` (see `load_vllm`). Sampling
            defaults of its generation configuration are not used; its end tokens are.
        tokenizer: its tokenizer.
        problems: rows with "problem" and "answer", as `Benchmark.load` and `load_problems` return them. Rows of a
            training set serve as well: "prompt" stands for "problem", and all columns go to the verifier.
        samples: answers to each problem.
        temperature: 0 decodes greedily. By default 0 for one answer and 1, as in training, for several.
        top_p: sample from the most likely tokens that have this probability together.
        max_new_tokens: longest response. With transformers it also ends where the model's positions do.
        prompt_format: "chat", "plain", or "auto": chat if the tokenizer has a template. An agent that was trained in
            another form is asked in it by `**read_form(folder).settings()`.
        prompt_template: the problem takes the place of "{problem}" in it; see `PromptForm`.
        chat_template_kwargs: arguments of the chat template, such as {"enable_thinking": False}.
        system_prompt: first message of the chat, or first line of the text.
        instruction: stands behind every problem, where there is no prompt_template.
        stop: texts that end a response and do not belong to it; by default see `make_form`.
        seed: of the sampling. With transformers, samples also depend on batch_size.
        batch_size: responses that transformers generate together.
        verifier: judges the answers: any reward function of a trainer's that is not async. A reward above 0 is right.
            By default `math_reward`: the gold is parsed first and the answer is compared with it, so that several
            parts, intervals, matrices, units and texts are read as the gold reads.
        model_name: name in tables.
        benchmark: key in `BENCHMARKS`, or another name.
        progress: whether to show a bar.

    Returns:
        The answers and numbers. Problems whose gold cannot be parsed are in it, but leave all numbers.

    Raises:
        ValueError: naming a setting that makes no sense, a problem that is none, or a prompt too long for the model.
    """
    settings = resolve_settings(
        tokenizer,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        prompt_format=prompt_format,
        prompt_template=prompt_template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        instruction=instruction,
        stop=stop,
        seed=seed,
    )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be a whole number of at least 1.")
    problems = [row if "problem" in row else {**row, "problem": row.get("prompt")} for row in problems]
    if not problems:
        raise ValueError("There are no problems to evaluate on.")
    for i, row in enumerate(problems):
        missing = verifier is None and not isinstance(row.get("answer"), str)
        if missing or not isinstance(row["problem"], (str, list)):
            raise ValueError(f"Problem {i} needs the texts 'problem' and 'answer', it has {sorted(row)}.")
    started = time.perf_counter()
    form = form_of_settings(settings)
    local = isinstance(model, torch.nn.Module)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) if local else None
    check_problems(tokenizer, problems, form, model_name=model_name, benchmark=benchmark, positions=positions)
    prompts = prompt_ids(tokenizer, problems, form)
    if local:
        label = f"{model_name}: {benchmark}"
        responses = _generate(model, tokenizer, prompts, settings, batch_size, progress, label)
    else:
        responses = _generate_vllm(model, tokenizer, prompts, settings, progress)

    reward = math_reward if verifier is None else verifier
    scores, found = _grade(reward, problems, form, responses)

    def by_problem(values: Sequence[Any]) -> list[list[Any]]:
        return [list(values[i : i + samples]) for i in range(0, len(values), samples)]

    texts, answers = by_problem([response.text for row in responses for response in row]), by_problem(found)
    rewards = by_problem(scores)
    correct = [[None if all(r is None for r in row) else (r or 0) > 0 for r in row] for row in rewards]
    if samples > 1:
        equal = reward.score if isinstance(reward, MathVerifier) else _same_text
        votes = group_answers(texts, answers, correct, equal)
    else:
        votes = [[0 if row[0] else 1] for row in correct]
    graded = any(score not in (None, 0, 1) for score in scores)  # more than right or wrong
    rows = []
    for i, problem in enumerate(problems):
        rows.append(
            {
                "problem": problem["problem"],
                "answer": problem.get("answer", ""),
                "samples": texts[i],
                "parsed": answers[i],
                "correct": correct[i],
                **({"rewards": rewards[i]} if graded else {}),
                "votes": votes[i],
                "tokens": [response.tokens for response in responses[i]],
                "finished": [response.finished for response in responses[i]],
            }
        )
    settings |= judged_by([reward])
    return EvaluationResult(model_name, benchmark, settings, rows, time.perf_counter() - started)
