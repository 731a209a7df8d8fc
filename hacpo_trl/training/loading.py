"""Around loading models: adapters on a base, references, what agents may have in common, positions."""

import contextlib
import copy
import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers import PreTrainedModel
from trl.trainer import grpo_trainer
from trl.trainer.utils import create_model_from_path

from ..config import HACPOConfig
from ..hub.origin import Origin, find_origin
from .fsdp import uses_fsdp

_REFERENCE = "ref"  # TRL's name of the frozen adapter that is the KL reference


# -- bases and adapters -------------------------------------------------------------------------------------------


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A second tree of modules over the very same parameters and buffers.

    Adapters that are put into the copy leave the original as it is; the weights of both are held once. Meant for
    frozen weights: what trains one trains the other.

    Args:
        model: a model without adapters.
    """
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})


def load_adapters(
    models: Sequence[Any], adapters: Sequence[Any], quantizations: Sequence[Any], configs: Sequence[HACPOConfig]
) -> list[Any]:
    """Loads the agents that are given by an adapter's path, and what several adapters are trained on, once.

    Agents with a new adapter (`peft_configs`) and agents that go on with a saved one share a base when it is the same
    model, loaded alike, and none of the adapters changes it; with FSDP they do not.

    Args:
        models: one per agent; those given by id or folder can share.
        adapters: configuration of a new adapter or None per agent.
        quantizations: quantization configuration or None per agent.
        configs: settings per agent.

    Returns:
        The models: a path where the agent loads it itself, else a model object.
    """
    result = list(models)
    origins: dict[int, Origin] = {}
    groups: dict[str, list[int]] = {}
    for i, model in enumerate(models):
        if not isinstance(model, str):
            continue
        origin = find_origin(model, configs[i])
        adapter = origin.adapter or adapters[i]
        if adapter is None:
            continue
        origins[i] = origin
        # FSDP cuts the parameters of every tree of modules by themselves
        alone = i if changes_base(adapter) or uses_fsdp(configs[i]) else None
        base = os.path.realpath(origin.base) if os.path.isdir(origin.base) else origin.base
        kwargs = {**(configs[i].model_init_kwargs or {}), **origin.arguments}
        groups.setdefault(repr((base, kwargs, quantizations[i], alone)), []).append(i)
    for members in groups.values():
        first = members[0]
        if len(members) < 2 and origins[first].adapter is None:
            continue
        base = _load(origins[first], quantizations[first], configs[first])
        base.requires_grad_(False)
        for i in members:
            tree = structural_copy(base) if len(members) > 1 else base
            if origins[i].adapter is not None:
                tree = _with_adapter(tree, models[i], quantizations[i], configs[i])
            result[i] = tree
    return result


def _with_adapter(base: PreTrainedModel, path: str, quantization: Any, args: HACPOConfig) -> nn.Module:
    from peft import PeftModel

    kwargs = {"revision": (args.model_init_kwargs or {}).get("revision")}
    plugin = args.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3 and quantization is None:
        kwargs["autocast_adapter_dtype"] = False  # as TRL does it for new adapters: ZeRO-3 wants one number format
    return PeftModel.from_pretrained(base, path, is_trainable=True, **kwargs)


def changes_base(adapter: Any) -> bool:
    """Whether an adapter changes weights of its base: trains its biases, or (PiSSA, OLoRA, ...) starts by taking the
    adapter's part out of them."""
    return getattr(adapter, "bias", "none") != "none" or any(
        isinstance(value, str) and value != "gaussian" for value, _ in _initializations(adapter).values()
    )


def _initializations(adapter: Any) -> dict[str, tuple[Any, Any]]:
    """The settings of how an adapter begins, each with PEFT's default."""
    fields = [field for field in dataclasses.fields(adapter) if field.name.startswith("init_")]
    return {field.name: (getattr(adapter, field.name), field.default) for field in fields}


def use_default_adapter(model: nn.Module, name: str) -> None:
    """Makes the adapter of a PeftModel the one called "default", which alone is saved into the top of a folder.

    What is left of an earlier run's KL reference is removed.

    Args:
        model: with one adapter, which trains.
        name: the agent's, for errors.

    Raises:
        ValueError: for several adapters, of which a folder could hold but one.
    """
    if _REFERENCE in model.peft_config and model.active_adapters != [_REFERENCE]:
        model.delete_adapter(_REFERENCE)
    adapter, *others = model.peft_config
    if others:
        raise ValueError(
            f"agent {name!r} has the adapters {', '.join(model.peft_config)}, and can train and save one. Remove the "
            f"others: model.delete_adapter({others[-1]!r})."
        )
    if adapter == "default":
        return
    config = model.peft_config[adapter]
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"agent {name!r} has the adapter {adapter!r} with bias={config.bias!r}, which cannot be renamed. Load it "
            "as 'default': PeftModel.from_pretrained(base, folder, is_trainable=True)."
        )
    with _default_initialization(config):
        model.add_adapter("default", config)
    model.set_adapter("default")
    _copy_adapter(model, adapter, "default")
    model.delete_adapter(adapter)


@contextlib.contextmanager
def _default_initialization(adapter: Any) -> Iterator[None]:
    """A second adapter of these settings leaves the base as it is; its values are copied."""
    initializations = _initializations(adapter)
    for name, (_, default) in initializations.items():
        setattr(adapter, name, default)
    try:
        yield
    finally:
        for name, (value, _) in initializations.items():
            setattr(adapter, name, value)


def _copy_adapter(model: nn.Module, source: str, target: str) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if source in parts:
            twin = tensors.get(".".join(target if part == source else part for part in parts))
            if twin is not None:
                twin.data = tensor.data.clone()  # in its number format, too


def shared_tensors(models: Sequence[Any]) -> set[int]:
    """Ids of the parameters and buffers that stand in more than one of some models."""
    counts = Counter(
        tensor_id
        for model in models
        if not isinstance(model, str)
        for tensor_id in {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    )
    return {tensor_id for tensor_id, count in counts.items() if count > 1}


def _load(origin: Origin, quantization: Any, args: HACPOConfig) -> PreTrainedModel:
    """Loads as GRPOTrainer does."""
    kwargs = {**(args.model_init_kwargs or {}), **origin.arguments}
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    if args.distributed_state.distributed_type in (DistributedType.MULTI_GPU, DistributedType.DEEPSPEED):
        kwargs["device_map"] = None
    if args.deepspeed_plugin is not None:
        args.deepspeed_plugin.set_deepspeed_weakref()
    return create_model_from_path(origin.base, **kwargs)


# -- the KL reference: the policy at the start of the training -----------------------------------------------------


@contextlib.contextmanager
def reference_of(model: Any) -> Iterator[None]:
    """While GRPOTrainer builds an agent: its KL reference is the model that was passed, as it is.

    GRPOTrainer would load the folder that a model object says to come from, which holds other weights once it was
    trained, resized or otherwise changed in memory, and would start an adapter's copy as a new one.

    Args:
        model: a path, for which GRPOTrainer does the right thing, or a model object.
    """
    if isinstance(model, str):
        yield
        return
    if is_peft_model(model):
        with _default_initialization(model.peft_config["default"]):
            yield
        return
    load = grpo_trainer.create_model_from_path
    grpo_trainer.create_model_from_path = lambda *args, **kwargs: copy.deepcopy(model)
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = load


def keep_start(model: nn.Module) -> None:
    """Keeps the start of an adapter, frozen, as the KL reference, unless it starts as its base does.

    Then the base alone, with the adapter off, is the reference.

    Args:
        model: a PeftModel, before its first update.
    """
    config = model.peft_config["default"]
    if _REFERENCE not in model.peft_config:
        if all(value in (default, "gaussian") for value, default in _initializations(config).values()):
            return
        with _default_initialization(config):
            model.add_adapter(_REFERENCE, config)
    _copy_adapter(model, "default", _REFERENCE)


# -- what trains ---------------------------------------------------------------------------------------------------


def check_trainable(models: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Every agent has weights of its own that train.

    Args:
        models: one per agent.
        names: of the agents.

    Raises:
        ValueError: for an agent without trainable weights, and for two agents one of which trains what the other
            holds.
    """
    trained: list[set[tuple[str, int]]] = []
    for model, name in zip(models, names, strict=True):
        trained.append({key for p in model.parameters() if p.requires_grad for key in _keys(p)})
        if not trained[-1]:
            remedy = (
                "Load the adapter with PeftModel.from_pretrained(..., is_trainable=True)."
                if is_peft_model(model)
                else "Set requires_grad on what shall train, or give it an adapter in peft_configs."
            )
            raise ValueError(f"agent {name!r} has no trainable weights, so it cannot learn. {remedy}")
    for i, model in enumerate(models):
        held = {key for p in model.parameters() for key in _keys(p)}
        for j, name in enumerate(names):
            if i != j and held & trained[j]:
                raise ValueError(
                    f"agent {name!r} would train weights that agent {names[i]!r} holds, too. Give each agent a model "
                    "of its own: its path, or a copy.deepcopy of the model."
                )


def _keys(parameter: nn.Parameter) -> Iterator[tuple[str, int]]:
    """What two parameters that are one have in common: the object, or the memory behind it."""
    yield "object", id(parameter)
    tensor = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3 holds the shard, FSDP a local part
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.numel():  # agents that sleep have none
        yield "memory", tensor.untyped_storage().data_ptr()


def check_optimizer(optimizer: Any, model: nn.Module, name: str) -> None:
    """An optimizer that was passed belongs to the agent's weights.

    Raises:
        ValueError: when it holds none of those that train.
    """
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if optimizer is not None and not any(
        id(p) in trained for group in optimizer.param_groups for p in group["params"]
    ):
        raise ValueError(
            f"agent {name!r}: its optimizer holds none of its trainable weights. Optimizers are in the order of the "
            "agents; for a new adapter pass the class with its arguments, e.g. (torch.optim.AdamW, {'lr': 1e-5})."
        )


# -- positions -----------------------------------------------------------------------------------------------------


def fix_absolute_positions(model: nn.Module) -> None:
    """Gives models with learned absolute positions (GPT-2's kind) positions that do not count the padding.

    TRL passes no positions, and padding on the left would shift them: the log-probabilities of a response would
    depend on which others share its micro-batch.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    if not any(name.rsplit(".", 1)[-1] == "wpe" for name, _ in base.named_modules()):
        return

    def add_positions(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        if kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None and mask is not None:
            kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        return args, kwargs

    base.register_forward_pre_hook(add_positions, with_kwargs=True)
