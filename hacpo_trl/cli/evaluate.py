"""Command line of the evaluation: one or many standalone models on maths benchmarks.

    python examples/evaluate_math.py out/model-a out/model-b --benchmarks math_500 gsm8k aime_2025
    python examples/evaluate_math.py out/model-a --data_dir data --before base/model-a --engine vllm

Agents are asked in the form in which they were trained (hacpo_prompt.json in their folder), and so are the models
before them, unless options say otherwise. Every result is a JSON file in --output_dir, with all answers; `results.md`
there holds the table and `results.json` an overview. A result that is there already, of the same model, problems,
settings and reward functions, is used again.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import is_async_callable

from ..evaluation.answers import (
    PROMPT_FORMATS,
    check_problems,
    check_whole,
    evaluate_model,
    judged_by,
    load_vllm,
    resolve_settings,
)
from ..evaluation.scores import (
    FORMAT,
    EvaluationResult,
    format_average,
    load_results,
    paired_difference,
    results_table,
    write_whole,
)
from ..hub.origin import missing_folder
from ..maths.benchmarks import BENCHMARKS
from ..maths.problems import load_problems, missing_file
from ..maths.reward import load_reward, math_reward, weighted_sum
from ..texts.prompts import INSTRUCTION, PROMPT_FILE, PromptForm, make_form, read_form, with_newlines
from .console import end_interrupted, show_slow_bars_only

DTYPES = ("auto", "bfloat16", "float16", "float32")


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    known = ", ".join(f"{b.name} ({b.source})" for b in BENCHMARKS.values())
    parser = argparse.ArgumentParser(
        prog="hacpo evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="Hub ids or folders, also of adapters")
    add("--names", nargs="+", help="names of the models in tables (default: their last part)")
    add(
        "--benchmarks",
        nargs="+",
        default=list(BENCHMARKS),
        metavar="NAME[=FILE]",
        help=f"benchmarks, from the Hub or a local file, or files of other problems; default: all of {known}",
    )
    add("--data_dir", help="folder of local files, <name>.jsonl with problem and answer, instead of the Hub")
    add("--limit", type=int, help="use the first problems only")
    add(
        "--before",
        nargs="+",
        default=[],
        metavar="MODEL|JSON",
        help="what the models were before: a model for each, one for all, or results files (results.json)",
    )
    add("--output_dir", default="evaluation", help="where results go (default: %(default)s)")
    add("--overwrite", action="store_true", help="evaluate again what is there already")
    add("--samples", type=int, help="answers to each problem (default: 16 for AIME, else 1)")
    add("--temperature", type=float, help="0 is greedy (default: 0 for one answer, 1 for several)")
    add("--top_p", type=float, default=1.0)
    add("--max_new_tokens", type=int, default=2048, help="longest response (default: %(default)s)")
    add("--seed", type=int, default=0)
    add(
        "--prompt_format",
        choices=PROMPT_FORMATS,
        help="default: as each model was trained; where that is not known: auto, chat if all of them have a template",
    )
    add("--prompt_template", help="text with {problem} in it, where \\n is a new line (default: as trained)")
    add("--instruction", help=f"stands behind every problem (default: as trained, or {INSTRUCTION!r})")
    add("--system_prompt", help="first message of the chat, or first line of the text (default: as trained)")
    add("--chat_template_kwargs", help="JSON, such as '{\"enable_thinking\": false}' (default: as trained)")
    add("--stop", nargs="*", help="texts that end a response (default: as trained; plain prompts: '\\nProblem:')")
    add(
        "--reward_funcs",
        nargs="+",
        default=["math_reward"],
        help="what judges, as in training: math_reward, number_reward, module.function or file.py:function; a sum "
        "above 0 is right (default: math_reward)",
    )
    add("--reward_weights", nargs="+", type=float, help="one for each of the reward functions")
    add("--engine", default="transformers", choices=("transformers", "vllm"))
    add("--dtype", default="auto", choices=DTYPES, help="auto: bfloat16 on a GPU that has it, else float32")
    add("--device", help="such as cuda:1 (default: the GPU if there is one); not for vllm")
    add("--batch_size", type=int, default=32, help="responses generated together; not for vllm")
    add(
        "--engine_kwargs",
        default="{}",
        help="JSON, more arguments of vllm.LLM or from_pretrained, such as '{\"tensor_parallel_size\": 4}' or "
        '\'{"attn_implementation": "flash_attention_2"}\'',
    )
    add("--trust_remote_code", action="store_true")
    add("--no_progress", action="store_true", help="no bars")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments, by default the program's.

    Returns:
        0, or 130 after Ctrl-C. What goes wrong by the user's doing ends the program with a sentence.
    """
    options = build_parser().parse_args(argv)
    show_slow_bars_only()
    try:
        run(options)
    except (ValueError, ImportError) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        return end_interrupted(
            "evaluate", f"What is finished is in {options.output_dir}; the same command goes on from there."
        )
    return 0


def run(options: argparse.Namespace) -> str:
    """Evaluates what the options say and writes the results.

    Returns:
        The table.

    Raises:
        ValueError: if options, models or problems make no sense.
        ImportError: if the engine is not installed.
    """
    if not options.models:
        raise ValueError("Which models? Give one or more Hub ids or folders.")
    if options.names and len(options.names) != len(options.models):
        raise ValueError(f"{len(options.names)} names for {len(options.models)} models: give one for each.")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit {options.limit}: use at least 1.")
    template_kwargs, engine_kwargs = (
        None if options.chat_template_kwargs is None else _read_object(options, "chat_template_kwargs"),
        _read_object(options, "engine_kwargs"),
    )
    names = options.names or model_names(options.models)
    if len(set(names)) < len(names):
        raise ValueError(f"Names of the models must differ: {', '.join(names)}. Use --names.")
    options = argparse.Namespace(
        **{**vars(options), "chat_template_kwargs": template_kwargs, "engine_kwargs": engine_kwargs}
    )
    rewards = [load_reward(name) for name in options.reward_funcs]
    if options.reward_weights is not None and len(options.reward_weights) != len(rewards):
        raise ValueError(
            f"--reward_weights has {len(options.reward_weights)} numbers for {len(rewards)} reward functions; give "
            "one for each."
        )
    options.rewards = rewards
    before = _read_before(options, names)
    missing = {model: missing_folder(model) for model in (*options.models, *before) if isinstance(model, str)}
    missing = {model: reason for model, reason in missing.items() if reason is not None}
    if missing:
        raise ValueError("\n".join(f"{model}: {reason}." for model, reason in missing.items()))
    if options.engine == "vllm":
        for model in (*options.models, *before):
            if isinstance(model, str):
                check_whole(model)
    problems = _load_problems(options)
    tokenizers = {m: _load(AutoTokenizer, m, options) for m in (*options.models, *before) if isinstance(m, str)}
    forms = _find_forms(names, tokenizers, before, options)

    results, files, pairs = [], [], []
    for name, model, form in zip(names, options.models, forms, strict=True):
        for result, path in _evaluate(model, name, tokenizers[model], form, problems, options):
            results.append(result)
            files.append(path)
    evaluated: dict[tuple[str, str], list[tuple[EvaluationResult, Path]]] = {}
    for i, name in enumerate(names):
        earlier = before[i]
        if isinstance(earlier, str):
            tokenizer, form = tokenizers[earlier], forms[i]
            if form.prompt_format == "chat":  # what the agent was asked is what its base is asked
                tokenizer.chat_template = tokenizers[options.models[i]].chat_template
            case = earlier, _digest([form.settings(), tokenizer.chat_template])
            if case not in evaluated:  # one base of several models
                label = _before_name(earlier, name, names)
                evaluated[case] = _evaluate(earlier, label, tokenizer, form, problems, options)
            earlier = [result for result, _ in evaluated[case]]
        for result in [r for r in results if r.model == name]:
            match = [e for e in earlier if e.benchmark == result.benchmark]
            if earlier and not match:
                print(f"{name}: nothing before on {result.title}.")
            for one in match:
                paired_difference(one, result)  # refuses other problems
                pairs.append((one, result))

    table = results_table(results, pairs)
    output = Path(options.output_dir)
    overview = [
        {
            "model": result.model,
            "benchmark": result.benchmark,
            "file": path.name,
            "summary": json.loads(path.read_text(encoding="utf-8"))["summary"],
        }
        for result, path in zip(results, files, strict=True)
    ]
    write_whole(output / "results.json", json.dumps({"format": FORMAT, "results": overview}, indent=1) + "\n")
    write_whole(output / "results.md", table)
    print(f"\n{table}\nTable: {output / 'results.md'}. Overview: {output / 'results.json'}.")
    return table


def model_names(models: Sequence[str]) -> list[str]:
    """Short names: the last parts of the paths, as many as tell the models apart."""
    parts = [re.split(r"[/\\]+", model.rstrip("/\\")) for model in models]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(part[-depth:]) if names.count(n) > 1 else n for part, n in zip(parts, names, strict=True)]
    return names


def _read_object(options: argparse.Namespace, name: str) -> dict[str, Any]:
    text = getattr(options, name)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{name} {text}: no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"--{name} {text}: expected an object {{...}}.")
    return value


def _before_name(model: str, after: str, names: Sequence[str]) -> str:
    name = model_names([model])[0]
    return name if name not in names else f"{model_names([model])[0]} (before)"


def _read_before(options: argparse.Namespace, names: Sequence[str]) -> list[str | list[EvaluationResult]]:
    """For each model the one before it, or its results."""
    given = options.before
    if not given:
        return [[] for _ in names]
    are_files = [entry.endswith(".json") for entry in given]
    if not any(are_files):
        if len(given) not in (1, len(names)):
            raise ValueError(
                f"--before names {len(given)} models for {len(names)}: give one for each, or one for all."
            )
        return list(given) * (len(names) if len(given) == 1 else 1)
    if not all(are_files):
        raise ValueError("--before: give either models or results files (.json), not both.")
    found = [result for entry in given for result in load_results(entry)]
    owners = list(dict.fromkeys(result.model for result in found))
    if len(owners) == 1:
        return [found for _ in names]
    missing = [name for name in names if name not in owners]
    if missing:
        raise ValueError(
            f"--before: the files hold results of {', '.join(owners)}, none of {', '.join(missing)}. Evaluate both "
            "under the same --names."
        )
    return [[result for result in found if result.model == name] for name in names]


def _load_problems(options: argparse.Namespace) -> dict[str, tuple[list[dict[str, str]], int]]:
    """Problems and default number of answers, by benchmark."""
    problems: dict[str, tuple[list[dict[str, str]], int]] = {}
    for entry in options.benchmarks:
        name, _, path = entry.partition("=")
        if name in BENCHMARKS:
            benchmark = BENCHMARKS[name]
            rows, samples = benchmark.load(path or options.data_dir, options.limit), benchmark.samples
        elif path or os.path.isfile(entry):
            name = name if path else Path(entry).stem
            rows, samples = load_problems(path or entry, limit=options.limit), 1
        else:
            raise ValueError(
                missing_file(entry)
                or f"{entry!r} is neither a benchmark nor a file. The benchmarks are {', '.join(BENCHMARKS)}."
            )
        if name in problems:
            raise ValueError(f"--benchmarks names {name} twice.")
        problems[name] = rows, samples
    return problems


def _find_forms(
    names: Sequence[str], tokenizers: dict[str, Any], before: Sequence[Any], options: argparse.Namespace
) -> list[PromptForm]:
    """How every model is asked: as the options say, else as it was trained, else all of them alike."""
    saved = [None if options.prompt_format else read_form(model) for model in options.models]
    chosen = options.prompt_format or "auto"
    if chosen == "auto":  # as `hacpo train` decides: for all models together
        open_ones = [pair for *pair, form in zip(options.models, before, saved, strict=True) if form is None]
        with_template = [bool(tokenizers[m].chat_template) for pair in open_ones for m in pair if isinstance(m, str)]
        chosen = "chat" if all(with_template) else "plain"
    forms = []
    for name, trained in zip(names, saved, strict=True):
        given = {
            "system_prompt": options.system_prompt,
            "stop": None if options.stop is None else tuple(map(with_newlines, options.stop)),
            "chat_template_kwargs": options.chat_template_kwargs,
            "prompt_template": None if options.prompt_template is None else with_newlines(options.prompt_template),
            "instruction": options.instruction,
        }
        given = {key: value for key, value in given.items() if value is not None}
        if trained is None:
            form, why = make_form(chosen, **given), "prompts"
            why = why if options.prompt_format else f"no {PROMPT_FILE} in its folder; prompts"
        else:
            form, why = trained, "prompts as in training"
            if "prompt_template" in given or "instruction" in given:
                kept = {"system_prompt": form.system_prompt, "chat_template_kwargs": form.chat_template_kwargs}
                form = make_form(form.prompt_format, **{**kept, **given})
            else:
                form = replace(form, **given)
            why = "prompts, other than in training" if form != trained else why
        print(f"{name}: {why}: {form}")
        forms.append(form)
    return forms


def _evaluate(
    source: str,
    name: str,
    tokenizer: Any,
    form: PromptForm,
    problems: dict[str, tuple[list[dict[str, Any]], int]],
    options: argparse.Namespace,
) -> list[tuple[EvaluationResult, Path]]:
    """A model's results on all benchmarks; the model is loaded only if one of them is missing."""
    identity = {"engine": options.engine, "dtype": options.dtype, "model": _fingerprint(source)}
    identity |= {"engine_kwargs": options.engine_kwargs, "chat_template": tokenizer.chat_template}
    judge = judged_by(options.rewards, options.reward_weights)
    usual = options.rewards == [math_reward] and options.reward_weights is None
    others = [] if usual else [judge["reward"]]
    plan = []  # all settings are checked before the first answer
    for benchmark, (rows, samples) in problems.items():
        asked = {
            "samples": samples if options.samples is None else options.samples,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_new_tokens": options.max_new_tokens,
            "seed": options.seed,
            **form.settings(),
        }
        try:
            key = _digest([identity, resolve_settings(tokenizer, **asked), rows, FORMAT, *others])
            check_problems(tokenizer, rows, form, model_name=name, benchmark=benchmark)
        except ValueError as error:
            raise ValueError(f"{name}, {benchmark}: {error}") from None
        plan.append((benchmark, rows, asked, key))

    results: list[tuple[EvaluationResult, Path]] = []
    # Such as it is, `MathVerifier` also tells which answers are equal
    alone = options.reward_weights is None and len(options.rewards) == 1 and not is_async_callable(options.rewards[0])
    model = None
    for benchmark, rows, asked, key in plan:
        safe = re.sub(r"[^\w.-]+", "_", f"{name}--{benchmark}")
        path = Path(options.output_dir) / f"{safe}--{key[:10]}.json"
        result = None if options.overwrite else _reuse(path, key, judge["rules"])
        if result is None:
            if model is None:
                model = _load_model(source, options)
            result = evaluate_model(
                model,
                tokenizer,
                rows,
                batch_size=options.batch_size,
                model_name=name,
                benchmark=benchmark,
                progress=not options.no_progress,
                verifier=options.rewards[0] if alone else weighted_sum(options.rewards, options.reward_weights),
                **asked,
            )
            result.key = key
            result.settings |= judge | {"engine": options.engine, "dtype": options.dtype, "model": source}
            result.save(path)
            done = f"{result.seconds:.0f} s"
        else:
            result.model, result.benchmark = name, benchmark
            done = f"already in {path}"
        count = f"{result.summary()['problems']} problems x {result.samples}"
        print(f"{name}: {result.title} {format_average(result)} % ({count}; {done})", flush=True)
        results.append((result, path))
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return results


def _reuse(path: Path, key: str, rules: str) -> EvaluationResult | None:
    """The result in a file, if it is the one that is asked for."""
    if not path.is_file():
        return None
    try:
        result = EvaluationResult.load(path)
    except ValueError as error:
        print(f"{error} It is evaluated again.")
        return None
    if result.key != key:
        return None
    if result.settings.get("rules") != rules:
        print(f"{path} was judged by other rules: the reward function has changed since. It is evaluated again.")
        return None
    return result


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _fingerprint(source: str) -> list[Any]:
    """Tells a model from one that was saved later to the same folder; of the Hub only the id counts."""
    if not os.path.isdir(source):
        return [source]
    files = sorted(entry.name for entry in os.scandir(source) if entry.is_file())
    stats = [(name, os.stat(os.path.join(source, name))) for name in files]
    return [os.path.realpath(source), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]


def _load(factory: Any, source: str, options: argparse.Namespace, **kwargs: Any) -> Any:
    try:
        return factory.from_pretrained(source, trust_remote_code=options.trust_remote_code, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be loaded: {error}") from error


def _load_model(source: str, options: argparse.Namespace) -> Any:
    if options.engine == "vllm":
        settings = {"dtype": options.dtype, "seed": options.seed, "trust_remote_code": options.trust_remote_code}
        return load_vllm(source, **settings, **options.engine_kwargs)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(options.device or found or "cpu")
    if options.dtype == "auto":
        bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        dtype = torch.bfloat16 if bfloat16 else torch.float32
    else:
        dtype = getattr(torch, options.dtype)
    model = _load(AutoModelForCausalLM, source, options, dtype=dtype, **options.engine_kwargs)
    return model if "device_map" in options.engine_kwargs else model.to(device)


if __name__ == "__main__":
    sys.exit(main())
