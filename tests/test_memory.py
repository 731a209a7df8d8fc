"""The memory estimate against hand-worked numbers and torch itself; the example configurations can be loaded."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from trl import ModelConfig, TrlParser
from trl.trainer.utils import add_fused_lm_head

from hacpo_trl import HACPOConfig
from hacpo_trl.memory import GIB, PAPER_MODELS, PAPER_PAIRS, SETUPS, AgentShape, estimate, table
from hacpo_trl.team import resolve_names

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIGS = EXAMPLES / "configs"
RUNS = ("state_pair", "size_pair", "model_pair")
LAUNCHES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in RUNS)

# 1000 parameters, h = 8, i = 16, one layer, q width 8, kv width 4
TINY = AgentShape("tiny", 1000, 50, 8, 16, 1, 2, 1, 4)
OTHER = AgentShape("other", 3000, 50, 8, 16, 1, 2, 1, 4)


def config(shape):
    kind = LlamaConfig if "Llama" in shape.name else Qwen3Config
    return kind(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_shapes_of_the_paper_are_those_of_the_built_models(name):
    assert AgentShape.from_config(config(PAPER_MODELS[name]), name) == PAPER_MODELS[name]


def test_bytes_are_those_of_torch():
    shape = AgentShape("small", 0, 100, 64, 96, 2, 4, 2, 16)
    model = AutoModelForCausalLM.from_config(config(shape))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    shape = AgentShape.from_config(model.config)
    memory = estimate([shape], 1).agents[0]
    assert memory.weights == sum(p.nbytes for p in model.parameters())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters())
    moments = [t for s in optimizer.state.values() for key, t in s.items() if key != "step"]
    assert memory.optimizer == sum(t.nbytes for t in moments)
    for autocast, flow in ((True, "float32"), (False, "bfloat16")):
        model = model.float() if autocast else model.bfloat16()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            layers = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values.layers
        assert sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) == 5 * shape.kv_bytes(flow)


def test_lora_parameters_are_those_of_peft():
    peft = pytest.importorskip("peft")
    shape = AgentShape("small", 0, 100, 64, 96, 2, 4, 2, 16)
    model = AutoModelForCausalLM.from_config(config(shape))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    assert shape.lora_parameters(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    # q: 64 + 64, v: 64 + 32; two layers of rank 4
    assert shape.lora_parameters(4, ("q_proj", "v_proj")) == 2 * 4 * (128 + 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_of_a_tracked_step(dtype):
    """One step on fake tensors, at a size where activations outweigh what autocast casts."""
    rows, length, autocast = 64, 512, dtype == torch.float32
    shape = AgentShape("fake", 0, 1024, 1024, 3072, 4, 8, 4, 128)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config(shape), dtype=dtype, attn_implementation="sdpa")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        add_fused_lm_head(model.train(), outputs=("log_probs", "entropy"))
        ids = torch.zeros(rows, length, dtype=torch.long)

        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(input_ids=ids, labels=ids, fused_lm_head=True)
            (-output.log_probs.mean()).backward()

        step()  # from the second micro-batch on there are gradients all along
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            step()
    peak = {str(key): value for key, value in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()}
    measured = peak["Total"] - 2 * sum(p.nbytes for p in model.parameters())
    kept, layer = shape.activation_bytes(rows, length, "float32" if autocast else "bfloat16")
    assert kept + layer - 3 * rows * length**2 == pytest.approx(measured, rel=0.05)


def test_partition_by_hand():
    def parts(**kwargs):
        a = estimate([TINY], 4, **kwargs).agents[0]
        return a.weights, a.gradients, a.optimizer, a.reference

    assert parts() == (4000, 8000, 8000, 4000)  # gradients twice: DDP's buckets
    assert parts(zero_stage=2) == (2000, 500, 3000, 2000)
    assert parts(zero_stage=3) == (500, 500, 3000, 500)
    assert parts(zero_stage=3, reference=False) == (500, 500, 3000, 0)
    assert parts(zero_stage=3, offload_optimizer=True) == (500, 0, 0, 500)
    assert parts(zero_stage=2, offload_optimizer=True) == (2000, 500, 0, 2000)
    # rank 1: q 16, k 12, v 12, o 16, gate 24, up 24, down 24 = 128; the base in bfloat16, no reference
    assert TINY.lora_parameters(1) == 128
    assert parts(lora_rank=1) == (2000 + 512, 1024, 1024, 0)
    assert parts(lora_rank=1, zero_stage=3) == ((2000 + 256) / 4, 64, 384, 0)


def test_activations_logits_and_cache_by_hand():
    # a layer: 18 * 8 + 12 * 16 + 14 * 8 + 6 * 4 = 472 a token; kept: 2 * 8 a token; mask: 3 * 2 * 100
    assert TINY.activation_bytes(2, 10) == (20 * 16 + 600, 20 * 472)
    assert TINY.activation_bytes(2, 10, checkpointing=False) == (20 * (472 - 64) + 600, 20 * 64)
    # chunk 2 * 50 * 20, weights 2 * 50 * 8, gradients 6 * 50 * 8 and 4 * 20 * 8
    assert TINY.head_bytes(20) == 2000 + 800 + 2400 + 640
    assert TINY.kv_bytes() == 16 and TINY.kv_bytes("float32") == 24


def test_totals_by_hand():
    small = {"micro_batch": 1, "length": 1, "zero_stage": 2}
    # held and gradients: 2 + 12 + 2 + 2 bytes on one GPU; the larger agent's step takes 4 more
    assert estimate([TINY, OTHER], 1, **small).total == 18 * 4000 + 4 * 3000
    assert estimate([TINY, OTHER], 1, offload_inactive=True, **small).total == (18 + 4) * 3000
    sampling = estimate([TINY, OTHER], 1, sample_rows=1000, **small)
    row = 16 + 14 * 50
    assert sampling.total == 16 * 4000 + 1000 * row  # without gradients
    assert sampling.rows_to_sample(16 * 4000 + 7.5 * row) == 7
    assert sampling.rows_to_sample(0) == 0


def test_agents_of_one_model_share_the_frozen_base():
    one, two = estimate([TINY, TINY], 1, lora_rank=1).agents
    assert one.weights == 2512 and two.weights == 512


def test_refuses_what_does_not_exist():
    for wrong in ({"zero_stage": 1}, {"offload_optimizer": True}):
        with pytest.raises(ValueError, match="zero_stage"):
            estimate([TINY], 1, **wrong)


def test_table():
    lines = table([PAPER_MODELS[name] for name in PAPER_PAIRS[0]], gpus=(1, 8)).splitlines()
    assert lines[0] == "| setup | offload_inactive_agents | 1 GPU | 8 GPUs |"
    assert len(lines) == 2 + 2 * len(SETUPS)
    team = estimate([PAPER_MODELS[name] for name in PAPER_PAIRS[0]], 8, zero_stage=3)
    assert f"**{team.total / GIB:.0f}** ({team.rows_to_sample(72 * GIB)})" in lines[6]


# -- the configurations in examples/configs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHES)
def test_accelerate_reads(name, monkeypatch):
    loaded = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert loaded.num_processes == {"single_gpu": 1, "zero3_two_nodes": 16}.get(name, 8)
    if not name.startswith("zero"):
        assert loaded.mixed_precision == "bf16"
        return
    pytest.importorskip("deepspeed")
    # What accelerate launch passes on; with a JSON file it refuses settings that stand in both
    monkeypatch.chdir(EXAMPLES.parent)
    fields = ",".join(loaded.deepspeed_config)
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", fields)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", loaded.deepspeed_config["deepspeed_config_file"])
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", str(loaded.deepspeed_config["zero3_init_flag"]))
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.zero_stage == (2 if name == "zero2" else 3)
    assert plugin.offload_optimizer_device == ("cpu" if name == "zero3_offload" else "none")
    assert plugin.deepspeed_config["bf16"]["enabled"] is True
    # Left open, so that every agent fills in its own
    for key in ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu"):
        assert plugin.deepspeed_config[key] == "auto"
    assert plugin.zero3_init_flag == (name != "zero2")
    assert plugin.zero3_save_16bit_model == (name != "zero2")


@pytest.fixture(scope="module")
def script_arguments():
    spec = importlib.util.spec_from_file_location("train_math", EXAMPLES / "train_math.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ScriptArguments


@pytest.mark.parametrize("name", RUNS)
def test_runs_have_the_recipe_of_the_paper(name, script_arguments, tmp_path):
    parser = TrlParser((script_arguments, HACPOConfig, ModelConfig))
    arguments = ["--config", str(CONFIGS / f"{name}.yaml"), "--use_cpu", "true", "--output_dir", str(tmp_path)]
    script, args, _ = parser.parse_args_and_config(arguments)
    assert len(script.models) == 2 and script.dataset == "DigitalLearningGmbH/MATH-lighteval"
    names = resolve_names(script.models, script.agent_names)
    args.check_agents(names)
    gpus = 8
    assert gpus * args.rows_per_round == 128 * 8 and args.num_generations == 8
    assert gpus * args.per_device_train_batch_size * args.gradient_accumulation_steps == 512
    assert args.updates_per_round(2) == 4
    assert (args.learning_rate, args.lr_scheduler_type, args.num_train_epochs) == (1e-6, "constant", 1)
    assert args.max_completion_length == 4096 and args.bf16
    agents = [args.for_agent(n, leader=i == 0) for i, n in enumerate(names)]
    assert agents[0].vllm_server_port != agents[1].vllm_server_port
    assert agents[0].vllm_group_port != agents[1].vllm_group_port
    thinking = [(a.chat_template_kwargs or {}).get("enable_thinking") for a in agents]
    assert thinking == [False, False if name == "size_pair" else None]


def test_every_configuration_is_tested():
    assert set(LAUNCHES) == {"single_gpu", "ddp", "zero2", "zero3", "zero3_offload", "zero3_two_nodes"}
    for path in CONFIGS.glob("*.json"):
        assert "zero_optimization" in json.loads(path.read_text())
    for name in (*LAUNCHES, *RUNS):
        assert isinstance(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), dict), name
    assert os.path.isdir(CONFIGS)
