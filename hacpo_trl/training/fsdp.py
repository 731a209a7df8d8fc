"""FSDP2 for a team: what cannot work is refused, and every agent has a plugin and shards of its own.

accelerate keeps one FSDP plugin in a state that the whole process shares, and changes it for the model that it
prepares. Here each agent builds its own and puts it there before it runs (`HACPOAgent.activate`). Weights, gradients,
optimizer and reference model are sharded over all processes.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, is_peft_model, parse_flag_from_env
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from trl import GRPOTrainer

from ..config import HACPOConfig

_EXAMPLE = "examples/configs/fsdp2.yaml"


def uses_fsdp(args: HACPOConfig) -> bool:
    """Whether the arguments (`fsdp=True`) or accelerate's launcher ask for FSDP."""
    return bool(args.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")


def check_fsdp(
    configs: Sequence[HACPOConfig], adapters: Sequence[Any], quantizations: Sequence[Any], optimizers: Any = None
) -> None:
    """Checks what FSDP is asked for, by the arguments or by the launcher, before anything is loaded.

    Args:
        configs: settings per agent.
        adapters: adapter configuration or None per agent.
        quantizations: quantization configuration or None per agent.
        optimizers: what the user passed, see `HACPOTrainer`.

    Raises:
        ValueError: for what does not work, with what does.
    """
    if not uses_fsdp(configs[0]):
        return
    args = configs[0]
    if args.deepspeed_plugin is not None:
        raise ValueError("FSDP and DeepSpeed are both switched on. Use one: examples/configs has a file for each.")
    version = (args.fsdp_plugin_args or {}).get("fsdp_version", int(os.environ.get("FSDP_VERSION", "1")))
    xla = args.fsdp and args.fsdp_config["xla"]
    if version != 2 or xla:
        which = "PyTorch/XLA" if xla else f"version {version}"
        raise ValueError(
            f"FSDP of {which} is not supported, version 2 is: set fsdp_version: 2 in accelerate's file (see "
            f"{_EXAMPLE}), FSDP_VERSION=2 in the environment, or fsdp=True and fsdp_config={{'version': 2}}."
        )
    if args.offload_inactive_agents:
        raise ValueError(
            "offload_inactive_agents=True does not work with FSDP, whose shards cannot be parked. Use ZeRO-3 "
            "(examples/configs/zero3.yaml), or leave the setting off."
        )
    kind = args.distributed_state.distributed_type
    if kind in (DistributedType.NO, DistributedType.MULTI_CPU):
        where = "this process was started without a launcher" if kind == DistributedType.NO else "these run on CPUs"
        raise ValueError(
            f"FSDP shards over processes with a GPU each, and {where}: accelerate would not shard anything. Start "
            f"with accelerate launch --config_file {_EXAMPLE} ..., or leave FSDP off."
        )
    if any(quantization is not None for quantization in quantizations):
        raise ValueError(
            "Quantized models are not supported with FSDP: their packed weights are not sharded. Use adapters on an "
            "unquantized base (dtype=bfloat16), or DDP (examples/configs/ddp.yaml)."
        )
    given = optimizers if isinstance(optimizers, list) else [optimizers]
    if any(
        isinstance(part, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
        for pair in given
        if pair is not None
        for part in pair
    ):
        raise ValueError(
            "optimizers holds an optimizer or scheduler object, which knows the weights before they are sharded. With "
            "FSDP pass (optimizer class, arguments), e.g. (torch.optim.AdamW, {'lr': 1e-6})."
        )
    for agent_args, adapter in zip(configs, adapters, strict=True):
        _check_plugin(agent_args, own_plugin(agent_args), reference=agent_args.beta != 0.0 and adapter is None)


def _check_plugin(args: HACPOConfig, plugin: FullyShardedDataParallelPlugin, *, reference: bool) -> None:
    if plugin.cpu_ram_efficient_loading and reference:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading loads weights in the main process only, and TRL does not hand on those of "
            "the reference model: the other processes would have an empty one. Set it to false, or beta=0."
        )
    if plugin.activation_checkpointing and args.gradient_checkpointing:
        raise ValueError(
            "FSDP's fsdp_activation_checkpointing and gradient_checkpointing (on by default) are both on, and every "
            "layer would be computed three times. Leave the first off, or set gradient_checkpointing=False."
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ValueError(
            "With FSDP load_best_model_at_end loads FSDP's own files, which save_only_model=True does not write. Set "
            "save_only_model=False."
        )
    if args.save_only_model and plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT:
        raise ValueError(
            "save_only_model=True does not go with fsdp_state_dict_type: SHARDED_STATE_DICT. Use FULL_STATE_DICT."
        )


def own_plugin(args: HACPOConfig) -> FullyShardedDataParallelPlugin:
    """A plugin of one agent, from its arguments or from what the launcher left in the environment.

    With bf16 or fp16 the weights are gathered and the layers computed in that type, and gradients are reduced in
    float32. accelerate's policy would also round what the model returns, log-probabilities, to 8 bits: more than
    GSPO's clip range.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.mixed_precision)
    return FullyShardedDataParallelPlugin(
        **(args.fsdp_plugin_args or {}),
        mixed_precision_policy=dtype and MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )


class FSDPAgent(GRPOTrainer):
    """Changes in GRPOTrainer: with FSDP2 it has a plugin of its own. Without FSDP it changes nothing.

    Attributes:
        fsdp_plugin: its plugin, or None without FSDP.
    """

    fsdp_plugin: FullyShardedDataParallelPlugin | None = None

    def __init__(self, model, reward_funcs, args: HACPOConfig, **kwargs):
        accumulation = args.accelerator_config.gradient_accumulation_kwargs or {}
        if uses_fsdp(args):
            # TRL does it for DDP and DeepSpeed: "auto" would spread every process's model over all GPUs
            args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
            # Gradients that wait for the last micro-batch are held whole, in float32, by every process
            accumulation = {"sync_each_batch": True, **accumulation}
        # Trainer writes into what would else be one object of all agents
        args.accelerator_config = copy.copy(args.accelerator_config)
        args.accelerator_config.gradient_accumulation_kwargs = {**accumulation}
        super().__init__(model, reward_funcs, args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """See `Trainer.create_accelerator_and_postprocess`."""
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            self.fsdp_plugin = own_plugin(self.args)
            self.restore_plugin()

    def restore_plugin(self) -> None:
        """Makes this agent's plugin the process's current one."""
        if self.fsdp_plugin is not None:
            self.accelerator.state.fsdp_plugin = self.fsdp_plugin

    def reshard(self) -> None:
        """Frees the whole weights that a pass without gradients leaves gathered in the last layers."""
        if self.fsdp_plugin is not None:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `Trainer.save_model`. Whole weights are written whatever the type of FSDP's own files."""
        with self._whole_weights():
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.fsdp_plugin is not None and state_dict and not is_peft_model(self.model):
            for copied, source in self.model.all_tied_weights_keys.items():
                state_dict[copied] = state_dict[source]  # gathered twice; written once when it is one tensor
        super()._save(output_dir, state_dict)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        plugin = self.fsdp_plugin
        if plugin is None:
            yield
            return
        kind, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
        try:
            yield
        finally:
            plugin.state_dict_type = kind

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """See `Trainer.evaluate`.

        Raises:
            ValueError: with FSDP before training.
        """
        if self.fsdp_plugin is not None and not isinstance(self.model, FSDPModule):
            raise ValueError(
                "FSDP2 shards a model together with its optimizer, when training starts: before it nothing can be "
                "evaluated. Use eval_on_start=True, or hacpo evaluate."
            )
        return super().evaluate(*args, **kwargs)
