"""Every private name of other packages that this one overrides, calls or reads, in one place.

`tests/test_contract.py` fails with a sentence when one of them moves or takes other arguments, and when any file uses
or overrides one that is not listed. `check_versions` warns when an untested release is installed.
"""

import warnings
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# What the tests ran with; the same ranges stand in setup.cfg
TESTED = {"trl": ">=1.16.0,<1.17", "transformers": ">=5.17.0,<5.25", "accelerate": ">=1.15.0,<2"}

# class -> method -> the arguments that we pass or take, in order
METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "trl.GRPOTrainer": {
        "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
        "_compute_loss": ("model", "inputs"),
        "_generate": ("prompts",),
        "_generate_and_score_completions": ("inputs",),
        "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
        "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
        "_get_train_sampler": ("dataset",),
        "_log_completion_extra": ("column", "values"),
        "_prepare_inputs": ("generation_batch",),
        "_save_checkpoint": ("model", "trial"),
        "training_step": ("model", "inputs", "num_items_in_batch"),
    },
    "transformers.Trainer": {
        "_build_accelerator_args": (),
        "_clip_grad_norm": ("model",),
        "_finish_current_push": (),
        "_get_grad_norm": ("model", "grad_norm"),
        "_get_learning_rate": (),
        "_get_output_dir": ("trial",),
        "_issue_warnings_after_load": ("load_result",),
        "_init_training_state": (
            "max_steps",
            "num_update_steps_per_epoch",
            "num_train_epochs",
            "resume_from_checkpoint",
            "trial",
        ),
        "_inner_training_loop": ("batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
        "_load_best_model": (),
        "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
        "_maybe_log_save_evaluate": ("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval"),
        "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
        "_push_from_checkpoint": ("checkpoint_folder",),
        "_save": ("output_dir", "state_dict"),
        "_save_optimizer_and_scheduler": ("output_dir",),
        "_save_scaler": ("output_dir",),
        "create_accelerator_and_postprocess": (),
    },
    "trl.generation.vllm_generation.VLLMGeneration": {
        "__init__": ("model", "accelerator", "processing_class", "mode"),
        "generate": ("prompts", "images", "num_generations", "profiler"),
        "sync_weights": (),
    },
    "trl.generation.vllm_client.VLLMClient": {
        "__init__": ("base_url", "host", "server_port", "group_port", "connection_timeout"),
        "generate": ("prompts", "features", "n"),
        "get_server_info": (),
        "reset_prefix_cache": (),
        "update_named_params": ("metadata", "named_params"),
    },
    "accelerate.state.AcceleratorState": {
        "_reset_state": ("reset_partial_state",),
        "select_deepspeed_plugin": ("name",),
    },
    "accelerate.state.GradientState": {"_set_sync_gradients": ("sync_gradients",)},
    "accelerate.utils.DeepSpeedPlugin": {"set_deepspeed_weakref": ()},
}

# class -> what its objects have, and has no signature or is a property; `GradientBuckets` uses torch's reducer
MEMBERS: dict[str, tuple[str, ...]] = {
    "argparse.ArgumentParser": ("_actions", "_option_string_actions"),
    "accelerate.state.AcceleratorState": ("deepspeed_plugins",),
    "torch.distributed.Reducer": ("_rebuild_buckets", "prepare_for_backward"),
    "torch.distributed.fsdp.FSDPModule": ("reshard",),
    "transformers.AutoModelForCausalLM": ("_model_mapping",),
    "transformers.PreTrainedConfig": ("_name_or_path",),
    "transformers.PreTrainedModel": ("_from_config", "_tied_weights_keys", "all_tied_weights_keys"),
}

# file of an installed package -> what stands in it: what only objects have, and packages that take long to import
SOURCES: dict[str, tuple[str, ...]] = {
    "torch/nn/parallel/distributed.py": (
        "self.reducer = dist.Reducer(",
        "self.reducer._rebuild_buckets()",
        "self.reducer.prepare_for_backward(",
        "self.find_unused_parameters = ",
        "self.static_graph = ",
    ),
    "accelerate/accelerator.py": ("self.deepspeed_config = ", "self.scaler = ", "def optimizer_step_was_skipped("),
    "deepspeed/runtime/engine.py": (
        "def offload_states(self,",
        "include: Container[OffloadStateTypeEnum]",
        "def reload_states(self,",
    ),
    "deepspeed/runtime/zero/offload_config.py": ("lp_params = ", "lp_grads = ", "contiguous_grad_buffer = "),
    "deepspeed/runtime/zero/partition_parameters.py": ("param.ds_tensor = ",),
    "deepspeed/runtime/zero/stage3.py": ("self.fp32_partitioned_groups_flat = ",),
    "vllm/config/parallel.py": ("_api_process_count: ",),
}

# What TRL looks at to decide on passes for log-probabilities while it samples: `HACPOAgent.without_logp_passes` sets
# them so that it makes none. The responses' old, reference and correcting log-probabilities come from `measure`.
STEERS_LOGP_PASSES = ("num_iterations", "vllm_importance_sampling_correction", "beta")

# Attributes of a trainer object that we read or set
ATTRIBUTES = (
    "_logs",
    "_metrics",
    "_step",
    "_tokenizer",
    "aux_loss_enabled",
    "entropy_coef",
    "reward_func_names",
    "router_aux_loss_coef",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_mode",
    *STEERS_LOGP_PASSES,
)

# ... and of one with an async reward function
ASYNC_ATTRIBUTES = ("async_loop", "async_loop_thread")

# ... and of one with use_vllm=True
VLLM_ATTRIBUTES = (
    "_last_loaded_step",
    "vllm_generation",
    "vllm_generation.accelerator",
    "vllm_generation.vllm_client",
)

# module -> functions and constants that are no public API
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "trl.data_utils": ("is_conversational",),
    "trl.trainer.grpo_trainer": ("create_model_from_path",),
    "trl.models.utils": ("disable_gradient_checkpointing",),
    "trl.trainer.utils": (
        "create_model_from_path",
        "get_callable_name",
        "get_config_model_id",
        "is_async_callable",
        "shutdown_event_loop_in_daemon",
        "use_adapter",
    ),
    "transformers.trainer": ("TRAINER_STATE_NAME",),
    "transformers.trainer_utils": ("get_last_checkpoint", "rotate_checkpoints"),
}


def hush_renamed() -> None:
    """Ignores transformers' warnings of names that TRL 1.16 still calls in every round, and no user can change."""
    warnings.filterwarnings(
        "ignore",
        r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated and will be removed in v6",
        FutureWarning,
        r"transformers\.modeling_utils",
    )


def check_versions() -> None:
    """Warns of installed releases that were not tested."""
    for package, tested in TESTED.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if not SpecifierSet(tested).contains(installed, prereleases=True):
            warnings.warn(
                f"hacpo_trl was tested with {package}{tested}, and {installed} is installed. It relies on private "
                f"parts of {package} that may have moved: install a tested release, pip install '{package}{tested}'.",
                stacklevel=3,
            )
