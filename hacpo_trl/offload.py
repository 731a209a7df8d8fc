"""Sleeping agents: the states of all agents but one are parked in the CPU's memory.

An agent's states are its weights and buffers, its reference model, its gradients and what its optimizer keeps. They
come back before anything of the agent runs (`HACPOAgent.activate`), after the one before has been parked, so that a
device holds one agent at a time.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .agent import HACPOAgent


class Residency:
    """Sees to it that one agent of a team is awake.

    Args:
        shared: ids of the parameters and buffers that several agents hold (a base of several adapters): they stay.
    """

    def __init__(self, shared: set[int]):
        self.shared = shared
        self.agents: list[HACPOAgent] = []
        self._parked: dict[int, dict[int, Tensor]] = {}  # agent -> tensor -> its contents on the CPU
        self._kept: dict[int, Tensor] = {}  # contents of frozen tensors, which need no second copy

    def register(self, agent: "HACPOAgent") -> None:
        """Takes an agent in, awake; the others go to sleep."""
        for other in self.agents:
            self._park(other)
        self.agents.append(agent)

    def wake(self, agent: "HACPOAgent") -> None:
        """Parks all other agents, then brings this one's states to its device."""
        if agent not in self.agents:  # still being built
            return
        for other in self.agents:
            if other is not agent:
                self._park(other)
        parked = self._parked.pop(id(agent), None)
        if parked is None:
            return
        for tensor, _ in _movable(agent, self.shared):
            if id(tensor) in parked:
                tensor.data = parked[id(tensor)].to(tensor.device, copy=True)
        if _has_zero3_engine(agent):
            agent.model_wrapped.reload_states()

    def resident_bytes(self) -> int:
        """Bytes of all agents' states on their devices."""
        return resident_bytes(self.agents)

    def _park(self, agent: "HACPOAgent") -> None:
        if id(agent) in self._parked:
            return
        parked: dict[int, Tensor] = {}
        if _has_zero3_engine(agent):
            agent.model_wrapped.offload_states(
                include=_engine_states(agent), pin_memory=agent.accelerator.device.type == "cuda"
            )
        for tensor, frozen in _movable(agent, self.shared):
            if tensor.numel() == 0 or id(tensor) in parked:
                continue
            kept = self._kept.get(id(tensor)) if frozen else None
            contents = tensor.data.to("cpu", copy=True) if kept is None else kept
            if frozen:
                self._kept[id(tensor)] = contents
            parked[id(tensor)] = contents
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._parked[id(agent)] = parked


def resident_bytes(agents: "list[HACPOAgent]") -> int:
    """Bytes of the states that some agents have on their devices, gradients included; what is shared counts once."""
    seen: dict[int, int] = {}
    for agent in agents:
        tensors = [tensor for tensor, _ in _movable(agent, set())]
        tensors += [p.grad for p in agent.model.parameters() if p.grad is not None]
        for tensor in tensors:
            if tensor.numel():
                seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(seen.values())


def _movable(agent: "HACPOAgent", shared: set[int]) -> Iterator[tuple[Tensor, bool]]:
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


def _optimizer_tensors(agent: "HACPOAgent") -> Iterator[Tensor]:
    optimizer: Any = agent.optimizer
    if optimizer is None:
        return
    if _has_zero3_engine(agent):
        yield from agent.model_wrapped.optimizer.fp32_partitioned_groups_flat
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _has_zero3_engine(agent: "HACPOAgent") -> bool:
    return agent.is_deepspeed_enabled and hasattr(agent.model_wrapped, "offload_states")


def _engine_states(agent: "HACPOAgent") -> list[Any]:
    """What DeepSpeed itself moves; the optimizer's tensors are moved here, since it moves those of FusedAdam only."""
    from accelerate.utils import is_peft_model
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    states = [State.lp_grads, State.contiguous_grad_buffer]
    # With frozen weights in the model DeepSpeed mistakes their shards for parts of its buffer of trained ones. That
    # buffer is as small as the adapter, and stays.
    return states if is_peft_model(agent.model) else [State.lp_params, *states]
