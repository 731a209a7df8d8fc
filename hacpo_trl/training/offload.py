"""Sleeping agents: the states of all agents but one are parked in the CPU's memory.

An agent's states are its weights and buffers, its reference model, its gradients and what its optimizer keeps. They
come back before anything of the agent runs (`HACPOAgent.activate`), after the one before has been parked, so that a
device holds one agent at a time.

States move by storage, so that tensors which are views of each other stay so. Every storage has one buffer in the
CPU's memory for the whole run; beside a GPU it is pinned, since a GPU copies ordinary memory in small steps through a
pinned buffer of its driver. What is frozen is copied to the CPU once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import logging
from trl import GRPOTrainer

logger = logging.get_logger(__name__)

_SMALLEST_PIECE = 2**20


@dataclass
class _Buffer:
    """The place of one storage in the CPU's memory."""

    pieces: list[Tensor]
    holds_frozen: bool = False  # what never changes needs no second copy

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass
class _Parked:
    """A storage that is away, and the tensors that lie in it: each with its offset, shape and strides."""

    buffer: _Buffer
    device: torch.device
    tensors: list[tuple[Tensor, int, torch.Size, tuple[int, ...]]] = field(default_factory=list)


class Residency:
    """Keeps the states of one agent of a team on the device at a time.

    Args:
        shared: ids of the parameters and buffers that several agents hold (a base of several adapters): they stay.
    """

    def __init__(self, shared: set[int]):
        self.shared = shared
        self.agents: list[GRPOTrainer] = []
        self._parked: dict[int, list[_Parked]] = {}  # by agent
        # By the first tensor of a storage. Optimizer states are replaced when a run resumes: the buffers go with them
        self._buffers = WeakTensorKeyDictionary()

    def register(self, agent: GRPOTrainer) -> None:
        """Takes an agent in, awake; the others go to sleep."""
        for other in self.agents:
            self._park(other)
        self.agents.append(agent)

    def wake(self, agent: GRPOTrainer) -> None:
        """Parks all other agents, then brings this one's states to its device."""
        if agent not in self.agents:  # still being built
            return
        for other in self.agents:
            if other is not agent:
                self._park(other)
        parked = self._parked.pop(id(agent), None)
        if parked is None:
            return
        for entry in parked:
            storage = torch.UntypedStorage(entry.buffer.nbytes, device=entry.device)
            for part, piece in _pairs(storage, entry.buffer):
                part.copy_(piece, non_blocking=True)
            for tensor, offset, shape, strides in entry.tensors:
                tensor.data = _empty_like(tensor).set_(storage, offset, shape, strides)
        if (buckets := _buckets(agent)) is not None:
            buckets.restore()
        if _has_zero3_engine(agent):
            agent.model_wrapped.reload_states()
        _wait(agent.accelerator.device)

    def resident_bytes(self) -> int:
        """Bytes of all agents' states on their devices."""
        return resident_bytes(self.agents)

    def _park(self, agent: GRPOTrainer) -> None:
        if id(agent) in self._parked:
            return
        device = agent.accelerator.device
        if _has_zero3_engine(agent):
            agent.model_wrapped.offload_states(include=_engine_states(agent), pin_memory=_is_pinned(device))
        storages: dict[int, dict[int, tuple[Tensor, bool]]] = {}
        for tensor, frozen in _movable(agent, self.shared):
            if tensor.numel():
                storages.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = (tensor, frozen)
        parked = []
        for members in storages.values():
            tensors = [tensor for tensor, _ in members.values()]
            storage, frozen = tensors[0].untyped_storage(), all(frozen for _, frozen in members.values())
            buffer = self._buffers.get(tensors[0])
            if buffer is None or buffer.nbytes != storage.nbytes():
                buffer = self._buffers[tensors[0]] = _Buffer(_allocate(storage.nbytes(), _is_pinned(storage.device)))
            if not (frozen and buffer.holds_frozen):
                for part, piece in _pairs(storage, buffer):
                    piece.copy_(part, non_blocking=True)
                buffer.holds_frozen = frozen
            places = [(t, t.storage_offset(), t.shape, t.stride()) for t in tensors]
            parked.append(_Parked(buffer, storage.device, places))
        _wait(device)
        for entry in parked:
            for tensor, *_ in entry.tensors:
                tensor.data = _empty_like(tensor)
        if (buckets := _buckets(agent)) is not None:
            buckets.release()
        self._parked[id(agent)] = parked


class GradientBuckets:
    """DDP's buckets of gradients: the gradients are views of them (`gradient_as_bucket_view=True`).

    DDP allocates them when a model is wrapped, again at the second forward pass, and shows them as gradients only: so
    gradients of zero pass backward twice, right after the wrapping. All processes have to build them together.

    Args:
        ddp: a wrapped model that has not passed backward yet, not with `static_graph`.
    """

    def __init__(self, ddp: DistributedDataParallel):
        self.parameters = [p for p in ddp.parameters() if p.requires_grad]
        self.all_used = not ddp.find_unused_parameters
        for _ in range(2):
            ddp.reducer._rebuild_buckets()  # as every forward pass does
            nothing = torch.stack([p.sum().float() * 0 for p in self.parameters]).sum()
            ddp.reducer.prepare_for_backward([nothing])
            nothing.backward()
            self.gradients = [p.grad for p in self.parameters]
            ddp.zero_grad()
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage() for g in self.gradients}
        self.sizes = [(storage, storage.nbytes()) for storage in storages.values()]

    def attach(self) -> None:
        """Makes the buckets hold the gradients from an update's first micro-batch on, in place of tensors beside them.

        Not where a parameter may go without a gradient: there no gradient and one of zeros are two things.
        """
        if self.all_used and all(p.grad is None for p in self.parameters):
            for storage, _ in self.sizes:
                _as_bytes(storage).zero_()
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient

    def release(self) -> None:
        """Frees the memory of the buckets; between updates they hold nothing."""
        for storage, _ in self.sizes:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocates what `release` freed."""
        for storage, size in self.sizes:
            storage.resize_(size)


def resident_bytes(agents: list[GRPOTrainer]) -> int:
    """Bytes of the states that some agents have on their devices, gradients included; what is shared counts once."""
    seen: dict[int, int] = {}
    for agent in agents:
        tensors = [tensor for tensor, _ in _movable(agent, set())]
        tensors += [p.grad for p in agent.model.parameters() if p.grad is not None]
        storages = [tensor.untyped_storage() for tensor in tensors]
        buckets = _buckets(agent)
        storages += [storage for storage, _ in buckets.sizes] if buckets is not None else []
        seen.update((storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes())
    return sum(seen.values())


def _buckets(agent: GRPOTrainer) -> GradientBuckets | None:
    """DDP's buckets, which an agent keeps as its attribute `buckets`."""
    return getattr(agent, "buckets", None)


def _movable(agent: GRPOTrainer, shared: set[int]) -> Iterator[tuple[Tensor, bool]]:
    """An agent's tensors that are moved one by one, each with whether it never changes."""
    engine = _has_zero3_engine(agent)
    for tensor in [*agent.model.parameters(), *agent.model.buffers()]:
        if id(tensor) in shared:
            continue
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if hasattr(tensor, "ds_tensor"):  # sharded: what is held is the shard
            if not engine or frozen:  # the shards of trained weights lie in a buffer of the engine, which moves it
                yield tensor.ds_tensor, frozen
        else:
            yield tensor, frozen
    if agent.ref_model is not None:
        for tensor in [*agent.ref_model.parameters(), *agent.ref_model.buffers()]:
            yield getattr(tensor, "ds_tensor", tensor), not agent.args.sync_ref_model
    yield from ((tensor, False) for tensor in _optimizer_tensors(agent) if tensor.dim() > 0)  # not the step counts


def _optimizer_tensors(agent: GRPOTrainer) -> Iterator[Tensor]:
    optimizer: Any = agent.optimizer
    if optimizer is None:
        return
    if _has_zero3_engine(agent):
        yield from getattr(agent.model_wrapped.optimizer, "fp32_partitioned_groups_flat", ())  # ZeRO-2 has none
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _allocate(nbytes: int, pinned: bool) -> list[Tensor]:
    """Memory of the CPU for `nbytes` bytes.

    Torch rounds pinned memory up to a power of two, which would waste up to half of it: so it comes in pieces of such
    sizes, and only a last one below 1 MiB is rounded.
    """
    if not pinned:
        return [torch.empty(nbytes, dtype=torch.uint8)]
    pieces = []
    try:
        while nbytes:
            size = nbytes if nbytes < _SMALLEST_PIECE else 1 << (nbytes.bit_length() - 1)
            pieces.append(_pinned(size))
            nbytes -= size
    except RuntimeError as error:
        logger.warning_once(
            "offload_inactive_agents: the system gives no more pinned memory, so states of sleeping agents move "
            f"through ordinary memory, which takes several times as long ({str(error).splitlines()[0]})."
        )
        pieces.append(torch.empty(nbytes, dtype=torch.uint8))
    return pieces


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _is_pinned(device: torch.device) -> bool:
    return device.type == "cuda"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pairs(storage: torch.UntypedStorage, buffer: _Buffer) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a storage, each with the piece of its buffer."""
    yield from zip(_as_bytes(storage).split([p.numel() for p in buffer.pieces]), buffer.pieces, strict=True)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _has_zero3_engine(agent: GRPOTrainer) -> bool:
    return agent.is_deepspeed_enabled and hasattr(agent.model_wrapped, "offload_states")


def _engine_states(agent: GRPOTrainer) -> list[Any]:
    """What DeepSpeed itself moves; the optimizer's tensors are moved here, since it moves those of FusedAdam only."""
    from accelerate.utils import is_peft_model
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    states = [State.lp_grads, State.contiguous_grad_buffer]
    # With frozen weights in the model DeepSpeed mistakes their shards for parts of its buffer of trained ones. That
    # buffer is as small as the adapter, and stays.
    return states if is_peft_model(agent.model) else [State.lp_params, *states]
