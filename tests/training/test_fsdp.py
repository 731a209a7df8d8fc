"""What is refused with FSDP, and the plugin of an agent; runs are in test_processes.py."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from support.tiny_teams import config, dataset
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from trl import ModelConfig

from hacpo_trl import HACPOTrainer
from hacpo_trl.cli.train import ScriptArguments, describe
from hacpo_trl.training.fsdp import check_fsdp, own_plugin, uses_fsdp


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """transformers and accelerate write into it."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_STATE_DICT_TYPE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def on_gpus(folder, fsdp_config=None, **changes):
    """Settings as in one of several processes with GPUs."""
    args = config(folder, **{"fsdp": True, "fsdp_config": dict(fsdp_config or {}), **changes})
    args.distributed_state = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU)
    return args


def check(args, adapter=None, quantization=None, optimizers=None):
    check_fsdp([args], [adapter], [quantization], optimizers)


def test_what_works_is_not_refused(tmp_path):
    check(on_gpus(tmp_path))
    check(on_gpus(tmp_path, {"state_dict_type": "SHARDED_STATE_DICT"}), optimizers=(torch.optim.SGD, {"lr": 0.1}))
    check(on_gpus(tmp_path, {"cpu_ram_efficient_loading": True}, beta=0.1), adapter=object())
    check(on_gpus(tmp_path, {"cpu_ram_efficient_loading": True}, beta=0.0))
    check(config(tmp_path, offload_inactive_agents=True))  # no FSDP, nothing to check


def test_what_does_not_work_is_refused(tmp_path):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases = [
        ("version 1 is not supported", on_gpus(tmp_path, {"version": 1}), {}),
        ("XLA is not supported", on_gpus(tmp_path, {"xla": True}), {}),
        ("cannot be parked", on_gpus(tmp_path, offload_inactive_agents=True), {}),
        ("Quantized", on_gpus(tmp_path), {"quantization": object()}),
        ("optimizer or scheduler object", on_gpus(tmp_path), {"optimizers": (optimizer, None)}),
        ("optimizer or scheduler object", on_gpus(tmp_path), {"optimizers": [(optimizer, None)]}),
        ("would have an empty one", on_gpus(tmp_path, {"cpu_ram_efficient_loading": True}, beta=0.1), {}),
        (
            "computed three times",
            on_gpus(tmp_path, {"activation_checkpointing": True}, gradient_checkpointing=True),
            {},
        ),
        ("SHARDED_STATE_DICT", on_gpus(tmp_path, {"state_dict_type": "SHARDED_STATE_DICT"}, save_only_model=True), {}),
    ]
    for message, args, changes in cases:
        with pytest.raises(ValueError, match=message):
            check(args, **changes)


def test_the_launchers_settings_count(tmp_path, monkeypatch):
    args = on_gpus(tmp_path, fsdp=None, fsdp_config=None)
    assert not uses_fsdp(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="version 1 is not supported"):  # accelerate's default
        check(args)
    monkeypatch.setenv("FSDP_VERSION", "2")
    check(args)
    assert own_plugin(args).state_dict_type == StateDictType.SHARDED_STATE_DICT
    args.deepspeed_plugin = object()
    with pytest.raises(ValueError, match="both switched on"):
        check(args)


@pytest.mark.parametrize("launched", [False, True])
def test_the_run_and_its_dry_run_refuse_the_same(agent_folders, tmp_path, monkeypatch, launched):
    """Without a GPU accelerate would not shard, and would not say so."""
    changes = {} if launched else {"fsdp": True}
    if launched:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
    args = config(tmp_path, **changes)
    models = [agent_folders["char"], agent_folders["bpe"]]
    message = "this process was started without a launcher"
    with pytest.raises(ValueError, match=message):
        HACPOTrainer(models, lambda completions, **kwargs: [0.0] * len(completions), args, dataset())
    with pytest.raises(ValueError, match=message):
        describe(ScriptArguments(models=models, dataset="x"), args, ModelConfig())
    args.distributed_state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    with pytest.raises(ValueError, match="these run on CPUs"):
        check(args)


def test_every_agent_has_a_plugin_that_rounds_no_log_probability(tmp_path):
    args = on_gpus(tmp_path, use_cpu=True, bf16=True)
    one, two = own_plugin(args), own_plugin(args)
    assert one is not two
    assert one.mixed_precision_policy == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None
    )
    one.set_mixed_precision("bf16")  # accelerate does, where there is none
    assert one.mixed_precision_policy.output_dtype is None
    assert own_plugin(on_gpus(tmp_path)).mixed_precision_policy is None
