"""How much memory a team needs on every GPU: `python -m hacpo_trl.memory` prints tables for the paper's pairs.

Bytes for every trained parameter, on N GPUs, with AdamW:

| | weights | gradients | optimizer | reference (beta > 0) |
|---|---|---|---|---|
| one process or DDP | 4 | 4 | 8 | 4 |
| ZeRO-2 | 2 | 2 / N | 12 / N | 2 |
| ZeRO-3 | 2 / N | 2 / N | 12 / N | 2 / N |
| FSDP2 | 4 / N | 4 / N | 8 / N | 4 / N |

Without DeepSpeed TRL loads float32 weights and computes under bfloat16 autocast; Adam holds two float32 moments. With
`dtype=bfloat16` (`weight_bytes=2`) all of these are halved. DDP's buckets hold the gradients, and stay while sampling;
without gradient checkpointing gradients lie beside them, 4 more.
DeepSpeed holds bfloat16 weights and gradients, and a float32 master copy with two moments; buckets are assumed to be
small, as in examples/configs. Under ZeRO-2 TRL replicates the reference. FSDP2 holds float32 weights and computes in
bfloat16. With LoRA the frozen base costs 2 (`dtype=bfloat16`, or DeepSpeed) or 4 (TRL's default), serves as the
reference, and is held once for equal models, but under FSDP2 once for every agent.

On top comes the largest of these, for one agent at a time, because agents sample and learn in turn:

* a micro-batch: the kept activations, and the largest of one layer, the LM head, and 2 bytes a parameter that autocast
  casts (full training without DeepSpeed). The gradient of a tied LM head is kept, too: it waits for that of the
  embedding. ZeRO-3 gathers up to 10^9 parameters (`stage3_max_live_parameters`);
* DeepSpeed's step: a float32 copy of the gradients' partition, under ZeRO-3 for 10^9 parameters (`sub_group_size`);
* sampling by transformers' generate: the KV cache at full length, and 14 bytes a row and word for logits and
  probabilities. ZeRO-3 gathers all weights. Gradients are free, but for DDP's buckets and ZeRO-3's partitions;
* sending weights to a vLLM server (rank 0): two packed buffers, each of 1 GiB and at most one weight more.

FSDP2 gathers two layers at a time, and the embeddings and the head for a whole pass, with 2 bytes a parameter; their
gradients take 6 until they are reduced. TRL gathers a reference in one piece, which takes 4.

`offload_optimizer` puts the optimizer's states, under ZeRO-3 also the gradients' partitions, into the CPU's memory.
`offload_inactive` leaves on the GPU only the agent at work: the largest need of one agent counts, not the sum.
Left out: CUDA context, NCCL's buffers and fragmentation (leave 10 %), vLLM beside the training, reward models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# What flows between layers -> its bytes, and a layer's bytes a token per unit of hidden, intermediate, q and kv width
_FLOWS = {"float32": (4, 26, 12, 14, 6), "bfloat16": (2, 18, 12, 14, 6), "lora": (2, 28, 14, 14, 6)}


@dataclass(frozen=True)
class AgentShape:
    """What decides the memory of a decoder-only model. Tied weights are counted once."""

    name: str
    parameters: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = True
    adapter_parameters: int | None = None  # as counted with PEFT; None estimates those of `LORA_TARGETS`

    @classmethod
    def from_config(cls, config: Any, name: str | None = None, adapter: Any = None) -> "AgentShape":
        """From a model's transformers configuration; the parameters are counted on the meta device, exactly.

        Args:
            config: of a language model, or of one that has a language model in it.
            name: what tells the model from others; agents of equal shapes share the base of their adapters.
            adapter: the `LoraConfig` of an agent with an adapter; its parameters are counted, too.

        Raises:
            ValueError: for a model without attention, whose activations and cache are not known here.
        """
        model = _build(config)
        parameters = sum(p.numel() for p in model.parameters())
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = head is not None and head.weight is embedding.weight
        text = config.get_text_config()
        heads, hidden, layers = (
            _first(text, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        if not (heads and hidden and layers):
            raise ValueError(f"a model of the type {config.model_type!r} has no attention in all layers")
        inner = _first(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * hidden
        kv_heads = (
            1 if getattr(text, "multi_query", False) else _first(text, "num_key_value_heads", "num_kv_heads") or heads
        )
        head_dim = _first(text, "head_dim") or hidden // heads
        name = name or getattr(config, "_name_or_path", None) or "agent"
        sizes = (embedding.weight.shape[0], hidden, inner, layers, heads, kv_heads, head_dim)
        trained = None
        if adapter is not None:
            import copy

            from peft import get_peft_model

            trained = sum(
                p.numel() for p in get_peft_model(model, copy.deepcopy(adapter)).parameters() if p.requires_grad
            )
        return cls(name, parameters, *sizes, tied, trained)

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        attention = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
        return self.hidden_size, self.intermediate_size, *attention

    def lora_parameters(self, rank: int, targets: Sequence[str] = LORA_TARGETS) -> int:
        """Parameters of an adapter: rank x (inputs + outputs) of every target in every layer."""
        h, i, q, kv = self._widths
        sizes = dict(zip(LORA_TARGETS, (h + q, h + kv, h + kv, q + h, h + i, h + i, i + h), strict=True))
        return self.num_layers * rank * sum(sizes[target] for target in targets)

    def kv_bytes(self, flow: str = "bfloat16") -> int:
        """KV cache of a token: bfloat16, but float32 keys under autocast (the rotation multiplies by float32)."""
        return self.num_layers * self._widths[3] * (6 if flow == "float32" else 4)

    def activation_bytes(self, rows: int, length: int, flow: str = "bfloat16", checkpointing: bool = True) -> tuple:
        """Bytes that a micro-batch keeps, and those of the layer at work, measured with torch's MemTracker on Qwen3.

        Checkpointing keeps the input of every layer; else all keep what one has but 4 bytes x intermediate a token.
        Attention is not materialised; SDPA's mask takes 3 bytes for every row and pair of positions.
        """
        width, *factors = _FLOWS[flow]
        layer = sum(factor * size for factor, size in zip(factors, self._widths, strict=True))
        mask = 3 * rows * length**2
        if checkpointing:
            return rows * length * self.num_layers * self.hidden_size * width + mask, rows * length * layer
        freed = 4 * self.intermediate_size
        return rows * length * self.num_layers * (layer - freed) + mask, rows * length * freed

    def head_bytes(self, tokens: int, flow: str = "bfloat16", trained: bool = True) -> int:
        """TRL's fused LM head: a chunk of 4096 tokens x 32768 words, that part of the weights, float32 gradients."""
        words = min(self.vocab_size, 32768)
        gradients = self.vocab_size * self.hidden_size * (4 if flow == "float32" else 6) if trained else 0
        return 2 * words * (min(tokens, 4096) + self.hidden_size) + gradients + 4 * tokens * self.hidden_size


def _build(config: Any):
    """A model without memory, of the class that TRL would load."""
    import torch
    import transformers

    own = [getattr(transformers, name, None) for name in config.architectures or ()]
    auto = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    with torch.device("meta"):
        for cls in own:
            if cls is not None:
                return cls._from_config(config)
        for cls in auto:
            if type(config) in cls._model_mapping:
                return cls.from_config(config)
    raise ValueError(f"transformers has no language model of the type {config.model_type!r}")


def _first(config: Any, *names: str) -> int | None:
    """The first of some settings that has a value."""
    return next((value for value in (getattr(config, name, None) for name in names) if value), None)


_SHAPES = (
    AgentShape("Qwen3-1.7B", 1_720_574_976, 151_936, 2048, 6144, 28, 16, 8, 128),
    AgentShape("Qwen3-4B", 4_022_468_096, 151_936, 2560, 9728, 36, 32, 8, 128),
    AgentShape("Llama-3.2-3B", 3_212_749_824, 128_256, 3072, 8192, 28, 24, 8, 128),
)
PAPER_MODELS = {shape.name: shape for shape in _SHAPES}
PAPER_PAIRS = (("Qwen3-1.7B", "Qwen3-4B"), ("Qwen3-4B", "Llama-3.2-3B"))


@dataclass
class AgentMemory:
    """Bytes of one agent on every GPU."""

    name: str
    weights: float
    optimizer: float
    reference: float
    gradients: float
    idle_gradients: float  # what of the gradients stays while sampling
    activations: float
    logits: float
    kv_row: float  # KV cache and logits of one sampled row
    kv_cache: float
    gathered: float  # while sampling: ZeRO-3's weights, or autocast's casts
    learning: float  # peak on top of weights, optimizer, reference and gradients
    sending: float  # buffers for a vLLM server


@dataclass
class TeamMemory:
    """Bytes of a team on every GPU."""

    agents: list[AgentMemory]
    offload_inactive: bool

    def _bases(self):
        for agent in self.agents:
            present = [agent] if self.offload_inactive else self.agents
            held = sum(a.weights + a.optimizer + a.reference for a in present)
            yield agent, held + sum(a.gradients for a in present), held + sum(a.idle_gradients for a in present)

    @property
    def total(self) -> float:
        """The peak."""
        return max(
            max(learn + a.learning, idle + max(a.kv_cache, a.sending) + a.gathered) for a, learn, idle in self._bases()
        )

    def rows_to_sample(self, limit: float) -> int:
        """Rows of full length that transformers' generate can sample at once within `limit` bytes."""
        return max(0, int(min((limit - idle - a.gathered) // a.kv_row for a, _, idle in self._bases())))


def estimate(
    agents: Sequence[AgentShape],
    num_gpus: int,
    *,
    zero_stage: int = 0,
    fsdp: bool = False,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] = LORA_TARGETS,
    offload_inactive: bool = False,
    offload_optimizer: bool = False,
    reference: bool = True,
    micro_batch: int = 8,
    length: int = 5120,
    sample_rows: int = 0,
    checkpointing: bool = True,
    weight_bytes: int = 4,
) -> TeamMemory:
    """Estimates the memory on every GPU; the module's docstring has the formulas.

    Args:
        agents: the team, see `AgentShape.from_config` and `PAPER_MODELS`.
        num_gpus: N.
        zero_stage: 2 or 3, or 0 without DeepSpeed.
        fsdp: whether FSDP2 shards, instead of DeepSpeed.
        lora_rank: rank of the adapters, or None for full training.
        lora_targets: adapted modules; by default all linear ones.
        offload_inactive: whether only the agent at work is on the GPU.
        offload_optimizer: whether DeepSpeed keeps the optimizer on the CPU.
        reference: whether beta > 0, so that full agents have a frozen copy.
        micro_batch: `per_device_train_batch_size`.
        length: most tokens of a prompt and its response.
        sample_rows: responses that transformers' generate samples at once on a GPU
            (`per_device_train_batch_size * steps_per_generation`); 0 for a vLLM server.
        checkpointing: `gradient_checkpointing`.
        weight_bytes: of a weight as it is loaded: 4 by TRL's default, 2 with `dtype=bfloat16`. Adapters have 4;
            DeepSpeed has its own.

    Raises:
        ValueError: for another ZeRO stage, an optimizer offloaded without DeepSpeed, or FSDP2 with one of them.
    """
    if zero_stage not in (0, 2, 3) or (offload_optimizer and not zero_stage):
        raise ValueError(f"zero_stage={zero_stage} is not 0, 2 or 3, or is 0 with offload_optimizer=True.")
    if fsdp and (zero_stage or offload_inactive):
        raise ValueError("fsdp=True goes neither with a zero_stage nor with offload_inactive=True.")
    full, plain = lora_rank is None, zero_stage == 0 and not fsdp
    ddp = plain and num_gpus > 1
    autocast = plain and weight_bytes == 4
    flow = "lora" if plain and not full else "float32" if autocast else "bfloat16"
    width = 2 if zero_stage else weight_bytes if plain and full else 4
    share = 1.0 if plain else 1 / num_gpus
    base_width = 2 if zero_stage else 4 if fsdp and full else weight_bytes
    weight_share = share if zero_stage == 3 or fsdp else 1.0
    sharded = zero_stage == 3 and num_gpus > 1
    result, bases = [], set()
    for shape in agents:
        total = shape.parameters
        trained = total if full else shape.adapter_parameters or shape.lora_parameters(lora_rank, lora_targets)
        base = 0 if full or (shape in bases and not fsdp) else base_width * total
        weights = (width * trained + base) * weight_share
        bases.add(shape)
        optimizer = 0 if offload_optimizer else (12 if zero_stage else 2 * width) * trained * share
        frozen = (weight_bytes if fsdp else width) * total * weight_share if reference and full else 0
        gradients = (
            0
            if zero_stage == 3 and offload_optimizer
            else (1 if checkpointing or not ddp else 2) * width * trained * share
        )
        idle = width * trained if ddp else gradients if zero_stage == 3 else 0
        kept, layer = shape.activation_bytes(micro_batch, length, flow, checkpointing)
        head = shape.head_bytes(micro_batch * length, flow, full)
        row = length * shape.kv_bytes(flow) + 14 * shape.vocab_size
        cast = 2 * total if autocast and full else 0
        table = shape.vocab_size * shape.hidden_size
        tied = width * table if full and shape.tied else 0
        sending = 0 if sample_rows else min(base_width * total, 2 * (GIB + base_width * table))
        live, gathered = (2 * min(total, 10**9), 2 * total) if sharded else (0, cast)
        whole = 0  # what is gathered of a reference
        if fsdp:
            ends = table * (1 if shape.tied else 2)
            layer_parameters = (total - ends) / shape.num_layers
            gathered = 2 * (ends + 2 * layer_parameters)
            live = gathered + (6 * max(ends, layer_parameters) if full else 0)
            whole, tied = 4 * total if reference and full else 0, 0
        step = 4 * share * min(trained, 10**9 if zero_stage == 3 else trained)
        step = step if zero_stage and not offload_optimizer else 0
        learning = max(kept + max(layer + tied, head, cast) + live, step, whole)
        held, work = (weights, optimizer, frozen, gradients, idle), (kept + layer, head, row, sample_rows * row)
        result.append(AgentMemory(shape.name, *held, *work, gathered, learning, sending))
    return TeamMemory(result, offload_inactive)


SETUPS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
    "ZeRO-3, optimizer offload": {"zero_stage": 3, "offload_optimizer": True},
    "FSDP2": {"fsdp": True},
    "LoRA, DDP": {"lora_rank": 16, "weight_bytes": 2},
}


def table(agents: Sequence[AgentShape], gpus: Sequence[int] = (1, 2, 4, 8), limit: float = 72 * GIB, **kwargs) -> str:
    """A Markdown table of all setups: GiB on every GPU, bold where it fits, and rows that generate can sample at once.

    `limit` is what is usable of a GPU, by default 80 GiB less 10 %; `kwargs` are other arguments of `estimate`.
    """
    lines = ["| setup | offload_inactive_agents | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in gpus) + " |"]
    lines.append("|---|---|" + "---|" * len(gpus))
    for name, setup in SETUPS.items():
        for offload in (False,) if setup.get("fsdp") else (False, True):
            cells = []
            for n in gpus:
                team = estimate(agents, n, offload_inactive=offload, **{**kwargs, **setup})
                size, rows = f"{team.total / GIB:.0f}", team.rows_to_sample(limit)
                cells.append(f"**{size}** ({rows})" if team.total <= limit else size)
            lines.append(f"| {name} | {'yes' if offload else 'no'} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for pair in PAPER_PAIRS:
        print(f"\n{' + '.join(pair)}: GiB on every GPU (rows to sample at once)\n")
        print(table([PAPER_MODELS[name] for name in pair]))
