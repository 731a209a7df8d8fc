"""Checks and puts in order what a user passes for a team of agents, before any weights are loaded."""

import copy
import itertools
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.processing_utils import ProcessorMixin
from trl.trainer.utils import get_config_model_id

from ..config import HACPOConfig
from ..hub.origin import find_origin, missing_folder
from ..maths.reward import check_columns
from ..methods import METHODS
from ..texts.prompt_check import PromptChecker, Reader, check_prompts
from .loading import check_trainable

# Folders of the run itself: checkpoints, kept completions, TensorBoard's files
_RESERVED = re.compile(r"checkpoint-\d+|completions|runs", re.IGNORECASE)


def _is_path(model: Any) -> bool:
    return isinstance(model, (str, os.PathLike))


def load_config(model: str | os.PathLike, args: HACPOConfig) -> PretrainedConfig:
    """The configuration of a model, for an adapter that of its base.

    Args:
        model: Hub id or folder.
        args: the agent's settings.
    """
    origin = find_origin(model, args)
    return AutoConfig.from_pretrained(origin.base, **origin.arguments)


def per_agent(value: Any, num_agents: int, name: str, *, default: Any = None) -> list[Any]:
    """One value per agent from a single value for all or a list.

    Raises:
        ValueError: when a list has another length.
    """
    if isinstance(value, (list, tuple)):
        if len(value) != num_agents:
            raise ValueError(f"{name} lists {len(value)} values for {num_agents} agents; give one for each, or one.")
        return list(value)
    return [default if value is None else value] * num_agents


def numbered(names: Sequence[str]) -> list[str]:
    """Names that differ, also where case does not count: "a", "a" become "a-1", "a-2"."""
    names, taken = list(names), {name.lower() for name in names}
    for name in list(names):
        alike = [i for i, other in enumerate(names) if other.lower() == name.lower()]
        if len(alike) == 1:
            continue
        candidates = (f"{name}-{n}" for n in itertools.count(1))
        for i in alike:
            names[i] = next(candidate for candidate in candidates if candidate.lower() not in taken)
            taken.add(names[i].lower())
    return names


def resolve_rewards(reward_funcs: Any, args: HACPOConfig) -> list[Any]:
    """The reward functions as a list.

    Args:
        reward_funcs: a function, a reward model (a name or a module), or a list or tuple of them.
        args: settings of the team.

    Raises:
        ValueError: when there is none, for what is none, and when `reward_weights` has another length.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    if not functions or functions == [None]:
        raise ValueError("reward_funcs is missing: responses have to be graded, e.g. by hacpo_trl.math_reward.")
    for i, function in enumerate(functions):
        if isinstance(function, type) or not (isinstance(function, str) or callable(function)):
            what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)[:80]
            raise ValueError(
                f"reward_funcs[{i}] is {what}; it must be a function that takes completions, or a reward model. Pass "
                "one, or a list of them."
            )
    weights = args.reward_weights
    if weights is not None and len(weights) != len(functions):
        raise ValueError(
            f"reward_weights={weights!r} has {len(weights)} numbers for {len(functions)} reward functions; give one "
            "for each."
        )
    return functions


def resolve_names(models: Sequence[Any], agent_names: Sequence[str] | None) -> list[str]:
    """Names of the agents: as given, or the last part of each model's id, numbered where models are alike.

    Raises:
        ValueError: for names that are equal, empty, or no good as a folder.
    """
    if agent_names is None:
        names = []
        for i, model in enumerate(models):
            path = os.fspath(model) if _is_path(model) else get_config_model_id(model.config)
            parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip(".-") for part in str(path).split("/") if part]
            parts = [part for part in parts if not _RESERVED.fullmatch(part)]
            names.append(parts[-1] if parts and parts[-1] else f"agent-{i}")
        return numbered(names)
    if isinstance(agent_names, str) or not all(isinstance(name, str) for name in agent_names):
        raise ValueError(f"agent_names={agent_names!r} must be a list of texts, one for each model.")
    names = list(agent_names)
    if len(names) != len(models):
        raise ValueError(f"agent_names has {len(names)} names for {len(models)} models; give one for each.")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"agent name {name!r} cannot be a folder: use letters, digits, '.', '_' and '-', e.g. "
                f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('.-') or 'agent'!r}."
            )
        if _RESERVED.fullmatch(name):
            raise ValueError(f"agent name {name!r} is that of a folder of the run itself; try 'agent-{name}'.")
    double = sorted({name for name in names if [n.lower() for n in names].count(name.lower()) > 1})
    if double:
        raise ValueError(
            f"agent_names must differ (also on file systems that ignore case), but {', '.join(double)} stand twice; "
            f"try {', '.join(f'{name}-{i + 1}' for i, name in enumerate(names))}."
        )
    return names


def check_models(
    models: Sequence[Any], names: Sequence[str], configs: Sequence[HACPOConfig], adapters: Sequence[Any]
) -> None:
    """Finds out whether every model is there, from its small config file alone, and whether model objects can train.

    Args:
        models: one per agent.
        names: of the agents.
        configs: settings per agent.
        adapters: configuration of a new adapter or None per agent.

    Raises:
        ValueError: naming every model that cannot be loaded, or an agent that could not train.
    """
    if not models:
        raise ValueError("models is empty; give at least one model, e.g. models=['Qwen/Qwen3-1.7B-Base'].")
    objects = [id(model) for model in models if not _is_path(model)]
    if len(set(objects)) < len(objects):
        raise ValueError(
            "models holds the same model object twice, and both agents would train the same weights. Pass its path "
            "twice, or a copy.deepcopy of it."
        )
    as_they_are = [i for i, model in enumerate(models) if not _is_path(model) and adapters[i] is None]
    check_trainable([models[i] for i in as_they_are], [names[i] for i in as_they_are])
    problems = []
    for model, name, args, adapter in zip(models, names, configs, adapters, strict=True):
        if not _is_path(model):
            _check_reference(model, name, args, adapter)
            continue
        path = os.fspath(model)
        reason = missing_folder(path)
        if reason is None:
            try:
                origin = find_origin(path, args)
                missing = missing_folder(origin.base)
                if missing is not None:
                    raise ValueError(f"its base {origin.base!r}: {missing}")
                AutoConfig.from_pretrained(origin.base, **origin.arguments)
            except ImportError:
                raise
            except Exception as error:  # whatever it is, it is this model's problem and is told as such
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            else:
                if origin.adapter is not None and adapter is not None:
                    raise ValueError(
                        f"agent {name!r}: {path!r} is an adapter already, which goes on training, and peft_configs "
                        "holds another one for it. Put None in its place (in `hacpo train` leave --use_peft out), or "
                        "make a whole model of it: hacpo_trl.merge_adapter(folder, output_dir)."
                    )
                _check_reference(model, name, args, origin.adapter or adapter)
        if reason is not None:
            problems.append(f"- {name}: {path!r}: {reason}")
    if problems:
        raise ValueError(
            "These models cannot be loaded (nothing was loaded yet); check the spelling of ids and paths, and access "
            "rights on the Hub:\n" + "\n".join(problems)
        )


def _check_reference(model: Any, name: str, args: HACPOConfig, adapter: Any) -> None:
    """Refuses agents whose start could not be kept as the KL reference."""
    if args.beta == 0:
        return
    adapters = [adapter] if adapter is not None else list(getattr(model, "peft_config", {}).values())
    for config in adapters:
        if getattr(config, "bias", "none") != "none":
            raise ValueError(
                f"agent {name!r}: its adapter trains biases of the base (bias={config.bias!r}), so the base is no KL "
                f"reference any more. Use beta=0 (now {args.beta:g}), or bias='none'."
            )
    if not adapters and not _is_path(model) and any(hasattr(p, "ds_tensor") for p in model.parameters()):
        raise ValueError(
            f"agent {name!r}: its model object is split by ZeRO-3 already, and cannot be copied for the KL reference. "
            "Pass its path, or use beta=0."
        )


def load_tokenizers(
    models: Sequence[Any],
    processing_classes: Sequence[PreTrainedTokenizerBase | None],
    names: Sequence[str],
    configs: Sequence[HACPOConfig],
) -> list[PreTrainedTokenizerBase]:
    """The tokenizer of every agent, each with an end and a padding token.

    Raises:
        ValueError: for a processor of images, a tokenizer that is not there, or one without an end token.
    """
    tokenizers = []
    for model, tokenizer, name, args in zip(models, processing_classes, names, configs, strict=True):
        if isinstance(tokenizer, ProcessorMixin):
            raise ValueError(
                f"agent {name!r}: processors of images are not supported, since responses are exchanged as text. Pass "
                "its tokenizer: processing_classes=[processor.tokenizer, ...]."
            )
        if tokenizer is None:
            path = os.fspath(model) if _is_path(model) else get_config_model_id(model.config)
            if not path:
                raise ValueError(
                    f"agent {name!r}: the model object comes from no path, so its tokenizer cannot be found. Pass "
                    "processing_classes=[tokenizer, ...]."
                )
            try:
                tokenizer = _load_tokenizer(path, args)
            except Exception as error:
                raise ValueError(f"agent {name!r}: no tokenizer could be loaded from {path!r}: {error}") from error
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"agent {name!r}: its tokenizer has no end token, so no response could ever end. Set one of its "
                "vocabulary, e.g. tokenizer.eos_token = '</s>'."
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizers.append(tokenizer)
    sizes = [_vocab_size(model, args) for model, args in zip(models, configs, strict=True)]
    for i, (tokenizer, size) in enumerate(zip(tokenizers, sizes, strict=True)):
        if processing_classes[i] is not None and size is not None and len(tokenizer) > size:
            raise ValueError(
                f"agent {names[i]!r}: its tokenizer has {len(tokenizer)} tokens, but its model only {size}; is it "
                "another model's? processing_classes are in the order of the models; None loads each model's own."
            )
        if size is not None:
            _check_ids(models[i], tokenizer, size, names[i], configs[i])
        sharing = [j for j in range(i) if tokenizers[j] is tokenizer]
        if sharing and sizes[sharing[0]] != size:
            raise ValueError(
                f"agents {names[sharing[0]]!r} and {names[i]!r} got the same tokenizer, but their models have "
                "different vocabularies. Pass a list with one for each, or None to load each model's own."
            )
    return tokenizers


def _load_tokenizer(path: str, args: HACPOConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that lies with a model; with an adapter that has none, its base's."""
    origin = find_origin(path, args)
    sides = {"truncation_side": "left", "padding_side": "left"}
    if origin.adapter is not None:
        arguments = {**origin.arguments, "revision": (args.model_init_kwargs or {}).get("revision")}
        try:
            return AutoTokenizer.from_pretrained(path, **sides, **arguments)
        except (OSError, ValueError):
            pass
    return AutoTokenizer.from_pretrained(origin.base, **sides, **origin.arguments)


def _vocab_size(model: Any, args: HACPOConfig) -> int | None:
    """How many tokens have an embedding."""
    if not _is_path(model):
        embeddings = model.get_input_embeddings()
        return getattr(embeddings, "num_embeddings", None) or getattr(
            model.config.get_text_config(), "vocab_size", None
        )
    try:
        config = load_config(model, args)
    except Exception:  # `check_models` tells
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


def positions_of(model: Any, args: HACPOConfig) -> int | None:
    """The longest text that a model reads, in tokens; None where it has no limit."""
    try:
        config = load_config(model, args) if _is_path(model) else model.config
    except Exception:  # `check_models` tells
        return None
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _check_ids(model: Any, tokenizer: PreTrainedTokenizerBase, size: int, name: str, args: HACPOConfig) -> None:
    """Refuses padding and end tokens that the model has no embedding for."""
    if _is_path(model):
        origin = find_origin(model, args)
        config = load_config(model, args)
        try:
            generation = GenerationConfig.from_pretrained(origin.base, **origin.arguments)
        except OSError:  # many folders have none
            generation = None
    else:
        config, generation = model.config, model.generation_config
    # What a model's config says counts only where it has no generation_config
    settings = ("config", config.get_text_config()) if generation is None else ("generation_config", generation)
    for where, owner in (("tokenizer", tokenizer), settings):
        for kind in ("pad_token_id", "eos_token_id"):
            value = getattr(owner, kind, None)
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if number is None or number < size:
                    continue
                if where == "tokenizer":
                    other = "pad_token" if kind == "pad_token_id" else "eos_token"
                    remedy = (
                        f"Set tokenizer.{other} to a token that the model knows"
                        + (", such as its end token" if kind == "pad_token_id" else "")
                        + " (and pass it in processing_classes), or give the model more embeddings: "
                        "model.resize_token_embeddings(len(tokenizer)), then save it."
                    )
                else:
                    remedy = f"Correct {kind} there."
                token = f" ({tokenizer.convert_ids_to_tokens(number)!r})" if where == "tokenizer" else ""
                raise ValueError(
                    f"agent {name!r}: the {kind} of its {where}, {number}{token}, is outside of its model's {size} "
                    f"embeddings. {remedy}"
                )


def check_dataset(
    dataset: Any,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    names: Sequence[str],
    configs: Sequence[HACPOConfig],
    *,
    models: Sequence[Any] = (),
    evaluation: bool = False,
) -> Any:
    """Looks at the columns and at every prompt.

    Args:
        dataset: the prompts to train on, or to evaluate on.
        tokenizers: one per agent.
        names: of the agents.
        configs: settings per agent.
        models: one per agent, for the number of tokens that each reads.
        evaluation: whether it is a data set for evaluation.

    Returns:
        The data set without prompts longer than `max_prompt_length`. A stream checks its rows while it is read.

    Raises:
        TypeError: for something that is no data set.
        ValueError: for a data set without prompts, with too few of them, with images, or with a prompt that
            `PromptChecker` refuses.
    """
    what, args = "eval_dataset" if evaluation else "train_dataset", configs[0]
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"{what} must be a datasets.Dataset or IterableDataset, got {type(dataset).__name__}. A list of dicts "
            "becomes one by datasets.Dataset.from_list(rows)."
        )
    first = next(iter(dataset), None)
    if first is None and isinstance(dataset, IterableDataset):
        raise ValueError(f"{what} is an empty stream; check its file and split.")
    columns = dataset.column_names or list(first or ())  # a stream may not know its columns beforehand
    if "prompt" not in columns:
        raise ValueError(
            f"{what} has no column 'prompt', only {', '.join(columns) or 'none'}. Rename the column that holds the "
            "problem: dataset.rename_column('problem', 'prompt')."
        )
    check_columns(columns, what)
    images = sorted({"image", "images"} & set(columns))
    if images:
        raise ValueError(f"{what} has the column {images[0]!r}: images are not supported. Remove the column.")
    if evaluation:
        _check_eval_batches(args)
    if first is None:
        raise ValueError(f"{what} has 0 prompts.")
    positions = [positions_of(*pair) for pair in zip(models, configs, strict=True)] if models else [None] * len(names)
    readers = [
        Reader(name, tokenizer, config.chat_template_kwargs or {}, most, config.max_completion_length)
        for name, tokenizer, config, most in zip(names, tokenizers, configs, positions, strict=True)
    ]
    checker = PromptChecker(what, readers, args.max_prompt_length)
    if not evaluation:
        _check_count(dataset, what, args)
    checker.fitting([first["prompt"]], 0)  # of a stream, too
    dataset = check_prompts(dataset, checker)
    if not evaluation:
        _check_count(dataset, what, args)
    elif isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError(f"{what}: max_prompt_length={args.max_prompt_length} leaves no prompt; use a larger one.")
    return dataset


def _check_count(dataset: Any, what: str, args: HACPOConfig) -> None:
    needed = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"{what} has {len(dataset)} prompts, but a round takes {needed} (generation_batch_size="
            f"{args.generation_batch_size} / num_generations={args.num_generations}). Use more prompts, or a smaller "
            "round: a smaller per_device_train_batch_size or steps_per_generation (now "
            f"{args.per_device_train_batch_size} and {args.steps_per_generation})."
        )


def _check_eval_batches(args: HACPOConfig) -> None:
    generations = args.num_generations_eval or args.num_generations
    rows = args.per_device_eval_batch_size * args.world_size
    if rows % generations:
        raise ValueError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} on {args.world_size} processes does not "
            f"hold whole groups of {generations} responses. Try per_device_eval_batch_size="
            f"{-(-args.per_device_eval_batch_size // generations) * generations}, or num_generations_eval=1."
        )


def resolve_optimizers(optimizers: Any, num_agents: int) -> list[tuple[tuple[Any, Any], tuple[type, dict] | None]]:
    """What each agent gets: (optimizer, scheduler), and a class with arguments to build an optimizer from.

    Args:
        optimizers: None; (optimizer class, keyword arguments) for all; or one such pair or one (optimizer, scheduler)
            per agent.
        num_agents: N.

    Raises:
        ValueError: for one optimizer object for several agents.
    """
    hint = (
        "Pass a list with one (optimizer, scheduler) for each agent, or (optimizer class, arguments) for all: "
        "(torch.optim.SGD, {'lr': 0.1})."
    )
    if optimizers is not None and not isinstance(optimizers, (list, tuple)):
        raise ValueError(f"optimizers={optimizers!r:.80} is neither a pair nor a list of pairs. {hint}")
    pairs = list(optimizers) if isinstance(optimizers, list) else [optimizers] * num_agents
    result: list[tuple[tuple[Any, Any], tuple[type, dict] | None]] = []
    objects = []
    for pair in per_agent(pairs, num_agents, "optimizers"):
        pair = (None, None) if pair is None else pair
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ValueError(f"optimizers holds {pair!r:.80}, which is no pair. {hint}")
        if isinstance(pair[0], type):
            result.append(((None, None), (pair[0], dict(pair[1] or {}))))
        else:
            objects += [id(part) for part in pair if part is not None]
            result.append((pair, None))
    if len(set(objects)) < len(objects):
        raise ValueError(
            f"optimizers gives one object to several agents, but it belongs to one agent's weights. {hint}"
        )
    return result


def resolve_peft_configs(peft_configs: Any, models: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """A copy of the adapter configuration for each agent: PEFT writes the base model's name into it.

    Raises:
        ValueError: for an adapter on top of a model that has one.
    """
    result = []
    for config, model, name in zip(per_agent(peft_configs, len(models), "peft_configs"), models, names, strict=True):
        if config is not None and not _is_path(model) and is_peft_model(model):
            raise ValueError(
                f"agent {name!r} is a PeftModel already, and peft_configs holds another adapter for it. Put None in "
                "its place: peft_configs=[None, ...]."
            )
        result.append(copy.deepcopy(config))
    return result


def refuse(**unsupported: Any) -> None:
    """Refuses what GRPOTrainer takes and shared rollouts cannot have.

    Raises:
        ValueError: for anything that is set.
    """
    reasons = {
        "tools": "a tool's output is tied to the tokens of the agent that called it, and cannot be exchanged as text",
        "environment_factory": "an environment's turns are tied to the agent that played them",
        "rollout_func": "the trainer has to know the exact tokens and probabilities of what each agent samples",
    }
    for name, value in unsupported.items():
        if value:
            raise ValueError(f"{name} is not supported: {reasons[name]}. Train such an agent with TRL's GRPOTrainer.")


def check_offload(configs: Sequence[HACPOConfig], quantizations: Sequence[Any]) -> None:
    """Checks what `offload_inactive_agents` cannot move.

    Raises:
        ValueError: for DeepSpeed below ZeRO-3 and for quantized models.
    """
    for args in configs:
        plugin = args.deepspeed_plugin
        if plugin is not None and plugin.zero_stage != 3:
            raise ValueError(
                f"offload_inactive_agents=True needs ZeRO-3, not ZeRO-{plugin.zero_stage}: DeepSpeed cannot move the "
                "states of the lower stages. Use examples/configs/zero3.yaml, or no DeepSpeed."
            )
    if any(quantization is not None for quantization in quantizations):
        raise ValueError(
            "offload_inactive_agents=True cannot move quantized weights. Agents with adapters on the same quantized "
            "model hold it once anyway; leave the setting off."
        )


def warn_if_alone(names: Sequence[str], args: HACPOConfig) -> None:
    """Says when a setting of the team cannot act because there is one agent only."""
    # HACPO alone is GSPO, and the default: nobody has asked for sharing by it
    if len(names) == 1 and args.method != "hacpo" and METHODS[args.method].pools_rewards:
        warnings.warn(
            f"method={args.method!r} with one agent: there is nobody to share with, it learns from its own responses.",
            stacklevel=4,
        )
