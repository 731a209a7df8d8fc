"""Around loading models: one base for several adapters, references of unsaved models, positions without padding."""

import contextlib
import copy
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path, get_config_model_id

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


@contextlib.contextmanager
def loadable_reference(model: Any, args: HACPOConfig) -> Iterator[None]:
    """Lets TRL load the reference model of a model object that was never saved, by a copy on disk for the moment."""
    unsaved = (
        args.beta != 0.0
        and not isinstance(model, str)
        and not is_peft_model(model)
        and not get_config_model_id(model.config)
    )
    if not unsaved:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="hacpo_reference_") as folder:
        model.save_pretrained(folder)
        model.config._name_or_path = folder
        try:
            yield
        finally:
            model.config._name_or_path = ""


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
