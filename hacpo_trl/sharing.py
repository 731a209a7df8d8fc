"""One base model for several adapters: module trees of their own over the same frozen parameters."""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path

from .config import HACPOConfig


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A second tree of modules over the very same parameters and buffers.

    Adapters that are put into the copy leave the original as it is; the weights of both are held once. Meant for
    frozen weights: what trains one trains the other.

    Args:
        model: a model without adapters.
    """
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})


def share_bases(
    models: Sequence[Any], adapters: Sequence[Any], quantizations: Sequence[Any], configs: Sequence[HACPOConfig]
) -> list[Any]:
    """Loads a base that several adapters are trained on once, and gives each of their agents a tree over it.

    Args:
        models: one per agent; those given by id or folder can share.
        adapters: adapter configuration or None per agent.
        quantizations: quantization configuration or None per agent.
        configs: settings per agent.

    Returns:
        The models, with what is shared replaced by a model object.
    """
    groups: dict[str, list[int]] = {}
    for i, model in enumerate(models):
        if isinstance(model, str) and adapters[i] is not None:
            key = repr((model, configs[i].model_init_kwargs, configs[i].trust_remote_code, quantizations[i]))
            groups.setdefault(key, []).append(i)
    result = list(models)
    for members in groups.values():
        if len(members) < 2:
            continue
        first = members[0]
        base = _load(models[first], quantizations[first], configs[first])
        base.requires_grad_(False)
        for i in members:
            result[i] = structural_copy(base)
    return result


def shared_tensors(models: Sequence[Any]) -> set[int]:
    """Ids of the parameters and buffers that stand in more than one of some models."""
    counts = Counter(
        tensor_id
        for model in models
        if not isinstance(model, str)
        for tensor_id in {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    )
    return {tensor_id for tensor_id, count in counts.items() if count > 1}


def _load(path: str, quantization: Any, args: HACPOConfig) -> PreTrainedModel:
    """Loads as GRPOTrainer does."""
    kwargs = dict(args.model_init_kwargs or {})
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    if args.distributed_state.distributed_type in (DistributedType.MULTI_GPU, DistributedType.DEEPSPEED):
        kwargs["device_map"] = None
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    if args.deepspeed_plugin is not None:
        args.deepspeed_plugin.set_deepspeed_weakref()
    return create_model_from_path(path, **kwargs)
