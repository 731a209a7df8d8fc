"""The memory estimate against hand-worked numbers and torch itself; the example configurations can be loaded."""

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaConfig,
    Qwen3Config,
)
from trl import ModelConfig, TrlParser
from trl.trainer.utils import add_fused_lm_head

from hacpo_trl import HACPOConfig, memory
from hacpo_trl.cli.train import _memory, main
from hacpo_trl.memory import GIB, PAPER_MODELS, PAPER_PAIRS, SETUPS, AgentShape, estimate, table
from hacpo_trl.playground import shipped_agent
from hacpo_trl.training.arguments import resolve_names

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
    agent = estimate([shape], 1).agents[0]
    assert agent.weights == sum(p.nbytes for p in model.parameters())
    assert agent.gradients == sum(p.grad.nbytes for p in model.parameters())
    moments = [t for s in optimizer.state.values() for key, t in s.items() if key != "step"]
    assert agent.optimizer == sum(t.nbytes for t in moments)
    for autocast, flow in ((True, "float32"), (False, "bfloat16")):
        model = model.float() if autocast else model.bfloat16()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            layers = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values.layers
        assert sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) == 5 * shape.kv_bytes(flow)


def test_lora_parameters_are_those_of_peft():
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

    assert parts() == (4000, 4000, 8000, 4000)  # gradients lie in DDP's buckets
    assert parts(checkpointing=False) == (4000, 8000, 8000, 4000)  # and beside them
    assert parts(weight_bytes=2) == (2000, 2000, 4000, 2000)
    assert parts(zero_stage=2) == (2000, 500, 3000, 2000)
    assert parts(zero_stage=3) == (500, 500, 3000, 500)
    assert parts(zero_stage=3, reference=False) == (500, 500, 3000, 0)
    assert parts(zero_stage=3, offload_optimizer=True) == (500, 0, 0, 500)
    assert parts(zero_stage=2, offload_optimizer=True) == (2000, 500, 0, 2000)
    assert parts(fsdp=True) == (1000, 1000, 2000, 1000)
    # rank 1: q 16, k 12, v 12, o 16, gate 24, up 24, down 24 = 128; no reference
    assert TINY.lora_parameters(1) == 128
    assert parts(lora_rank=1) == (4000 + 512, 512, 1024, 0)  # TRL loads the base in float32
    assert parts(lora_rank=1, weight_bytes=2) == (2000 + 512, 512, 1024, 0)
    assert parts(lora_rank=1, zero_stage=3) == ((2000 + 256) / 4, 64, 384, 0)
    assert parts(lora_rank=1, fsdp=True, weight_bytes=2) == ((2000 + 512) / 4, 128, 256, 0)
    assert parts(fsdp=True, weight_bytes=2) == (1000, 1000, 2000, 500)  # trained weights are float32


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
    one, two = estimate([TINY, TINY], 1, lora_rank=1, weight_bytes=2).agents
    assert one.weights == 2512 and two.weights == 512
    one, two = estimate([TINY, TINY], 1, lora_rank=1, fsdp=True, weight_bytes=2).agents
    assert one.weights == two.weights == 2512


def test_what_fsdp_gathers_by_hand():
    """The embeddings, tied to the head, have 400 parameters, and the layer the other 600."""
    small = {"micro_batch": 1, "length": 1, "fsdp": True}
    kept, layer = TINY.activation_bytes(1, 1)
    work = kept + max(layer, TINY.head_bytes(1))
    agent = estimate([TINY], 4, reference=False, **small).agents[0]
    assert agent.gathered == 2 * (400 + 2 * 600) and agent.idle_gradients == 0
    assert agent.learning == work + agent.gathered + 6 * 600
    untied = estimate([replace(TINY, tied=False)], 4, reference=False, **small).agents[0]
    assert untied.learning == work + 2 * (800 + 2 * 200) + 6 * 800
    deep = AgentShape("deep", 6400, 50, 8, 16, 10, 2, 1, 4)  # the reference is gathered in one piece
    assert estimate([deep], 4, **small).agents[0].learning == 4 * 6400
    with pytest.raises(ValueError, match="fsdp"):
        estimate([TINY], 4, offload_inactive=True, **small)


def test_a_tied_head_and_the_buffers_of_a_server():
    sizes = {"micro_batch": 100, "length": 10}
    tied, untied = (estimate([replace(TINY, tied=t)], 1, **sizes).agents[0] for t in (True, False))
    layer = 1000 * (26 * 8 + 12 * 16 + 14 * 8 + 6 * 4)  # of 1000 tokens, more than the head needs
    assert untied.learning == 1000 * 8 * 4 + 3 * 100 * 10**2 + layer
    assert tied.learning == untied.learning + 4 * 50 * 8  # the head's gradient waits for the embedding's
    # 4000 bytes of weights are less than a buffer; Qwen3-4B fills two, each of 1 GiB and the embeddings in float32
    assert estimate([TINY], 1).agents[0].sending == 4000
    large = PAPER_MODELS["Qwen3-4B"]
    assert estimate([large], 1).agents[0].sending == 2 * (GIB + 4 * 151_936 * 2560)
    assert estimate([large], 1, sample_rows=1).agents[0].sending == 0


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}
OLD = {"vocab_size": 100, "n_layer": 2, "n_head": 4}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# type -> settings, and what is read of them: vocabulary, hidden, intermediate, layers, heads, kv heads, head width
FAMILIES = {
    "gemma3_text": (LLAMA, (100, 64, 96, 2, 4, 2, 16)),
    "gemma3": ({"text_config": LLAMA, "vision_config": VISION}, (100, 64, 96, 2, 4, 2, 16)),
    "llama4": ({"text_config": {**LLAMA, "num_local_experts": 2}}, (100, 64, 96, 2, 4, 2, 16)),
    "mistral3": (
        {"text_config": {"model_type": "mistral", **LLAMA}, "vision_config": {"model_type": "pixtral", **VISION}},
        (100, 64, 96, 2, 4, 2, 16),
    ),
    "gpt2": ({**OLD, "n_embd": 64}, (100, 64, 256, 2, 4, 4, 16)),
    "gptj": ({**OLD, "n_embd": 64, "rotary_dim": 8}, (100, 64, 256, 2, 4, 4, 16)),
    "bloom": ({**OLD, "hidden_size": 64}, (100, 64, 256, 2, 4, 4, 16)),
    "opt": (
        {
            "vocab_size": 100,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 64,
        },
        (100, 64, 96, 2, 4, 4, 16),
    ),
    "falcon": (
        {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        (100, 64, 256, 2, 4, 1, 16),
    ),
    "mpt": ({"vocab_size": 100, "d_model": 64, "n_layers": 2, "n_heads": 4}, (100, 64, 256, 2, 4, 4, 16)),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_with_other_names(kind):
    settings, sizes = FAMILIES[kind]
    config = AutoConfig.for_model(kind, **settings)
    shape = AgentShape.from_config(config)
    read = (shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers)
    assert (*read, shape.num_heads, shape.num_kv_heads, shape.head_dim) == sizes
    cls = AutoModelForImageTextToText if kind == "mistral3" else AutoModelForCausalLM
    model = cls.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.tied == (model.lm_head.weight is model.get_input_embeddings().weight)
    adapter = peft.LoraConfig(r=4, target_modules="all-linear")
    trained = AgentShape.from_config(config, adapter=adapter).adapter_parameters
    assert trained == sum(p.numel() for p in peft.get_peft_model(model, adapter).parameters() if p.requires_grad) > 0
    assert estimate([shape], 1).total > 0


def test_no_estimate_is_no_failure(tmp_path, capsys):
    with pytest.raises(ValueError, match="'mamba' has no attention"):
        AgentShape.from_config(AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=100))
    problems = tmp_path / "train.jsonl"
    problems.write_text("\n".join('{"problem": "1 + 1", "answer": "2"}' for _ in range(8)))
    run = [
        "--dataset",
        str(problems),
        "--dry_run",
        "--use_cpu",
        "--bf16",
        "false",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    run += ["--per_device_train_batch_size", "8", "--num_generations", "8", "--max_completion_length", "64"]
    tokenizer = AutoTokenizer.from_pretrained(shipped_agent("tiny-char"))
    for kind, expected in (("mamba", "no estimate (a model of the type 'mamba'"), ("gpt2", "GiB")):
        folder = tmp_path / kind
        tokenizer.save_pretrained(folder)
        sizes = FAMILIES.get(kind, ({"hidden_size": 64, "vocab_size": 100},))[0]
        AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=1).save_pretrained(folder)
        assert main(["--models", str(folder), *run]) == 0
        assert expected in capsys.readouterr().out


def test_the_plan_knows_precision_adapter_and_offload(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(memory, "estimate", lambda shapes, gpus, **kwargs: seen.append((shapes, kwargs)) or 1 / 0)
    folder = tmp_path / "model"
    AutoConfig.for_model("qwen3", **LLAMA).save_pretrained(folder)
    config = HACPOConfig(str(tmp_path), use_cpu=True, bf16=False, model_init_kwargs={"dtype": "bfloat16"})
    config.deepspeed_plugin = SimpleNamespace(zero_stage=3, offload_optimizer_device="cpu")
    script = SimpleNamespace(models=[str(folder)] * 2)
    told = _memory(script, config, ModelConfig(use_peft=True, lora_r=2, lora_target_modules=["q_proj", "v_proj"]))
    assert told == "no estimate (division by zero)"
    ((shapes, kwargs),) = seen
    assert shapes[0] == shapes[1]  # one base
    assert shapes[0].adapter_parameters == 2 * 2 * (64 + 64 + 64 + 32)
    assert kwargs["offload_optimizer"] is True and kwargs["weight_bytes"] == 2 and kwargs["lora_rank"] == 2
    config.deepspeed_plugin, config.model_init_kwargs = None, {}
    _memory(script, config, ModelConfig())
    assert seen[1][1]["offload_optimizer"] is False and seen[1][1]["weight_bytes"] == 4


def test_refuses_what_does_not_exist():
    for wrong in ({"zero_stage": 1}, {"offload_optimizer": True}):
        with pytest.raises(ValueError, match="zero_stage"):
            estimate([TINY], 1, **wrong)


def test_table():
    lines = table([PAPER_MODELS[name] for name in PAPER_PAIRS[0]], gpus=(1, 8)).splitlines()
    assert lines[0] == "| setup | offload_inactive_agents | 1 GPU | 8 GPUs |"
    assert len(lines) == 2 + 2 * len(SETUPS) - 1  # agents do not sleep under FSDP2
    team = estimate([PAPER_MODELS[name] for name in PAPER_PAIRS[0]], 8, zero_stage=3)
    assert f"**{team.total / GIB:.0f}** ({team.rows_to_sample(72 * GIB)})" in lines[6]


# -- the configurations in examples/configs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHES)
def test_accelerate_reads(name, monkeypatch):
    loaded = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert loaded.num_processes == {"single_gpu": 1, "zero3_two_nodes": 16}.get(name, 8)
    if not name.startswith("zero"):
        assert loaded.mixed_precision == "bf16"
        if name == "fsdp2":
            _check_fsdp_plugin(loaded.fsdp_config, monkeypatch)
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


def _check_fsdp_plugin(settings, monkeypatch):
    """What accelerate launch passes on."""
    for key, value in settings.items():
        monkeypatch.setenv(key.upper(), str(value).lower() if isinstance(value, bool) else str(value))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy and plugin.transformer_cls_names_to_wrap is None
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    assert not plugin.cpu_ram_efficient_loading and not plugin.activation_checkpointing


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
    assert set(LAUNCHES) == {"single_gpu", "ddp", "fsdp2", "zero2", "zero3", "zero3_offload", "zero3_two_nodes"}
    for path in CONFIGS.glob("*.json"):
        assert "zero_optimization" in json.loads(path.read_text())
    for name in (*LAUNCHES, *RUNS):
        assert isinstance(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), dict), name
    assert os.path.isdir(CONFIGS)
