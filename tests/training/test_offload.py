"""Parking and waking by hand-made agents: views, tied weights, late optimizer states, buffers that are used again."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hacpo_trl.training import offload
from hacpo_trl.training.offload import Residency, resident_bytes


class Model(nn.Module):
    """Two matrices that are views of one storage, a tied head, a transposed and a frozen matrix, a buffer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        fused = torch.randn(6, 4)
        self.q, self.k = nn.Parameter(fused[:4]), nn.Parameter(fused[4:])
        self.embedding = nn.Parameter(torch.randn(5, 4))
        self.head = nn.Parameter(self.embedding.data)  # another parameter over the same memory
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("table", torch.randn(2))

    def forward(self):
        parts = (self.q, self.k, self.embedding, self.turned)
        return sum(p.pow(2).sum() for p in parts) + self.frozen.sum() * self.table.sum()


def agent(seed, reference=False):
    model = Model(seed)
    return SimpleNamespace(
        model=model,
        model_wrapped=model,
        ref_model=Model(seed).requires_grad_(False) if reference else None,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        args=SimpleNamespace(sync_ref_model=False),
        is_deepspeed_enabled=False,
        buckets=None,
    )


def step(agent):
    agent.model().backward()
    agent.optimizer.step()
    agent.optimizer.zero_grad()


def state(agent):
    """Copies of everything that has to come back."""
    tensors = [*agent.model.parameters(), *agent.model.buffers()]
    tensors += [v for s in agent.optimizer.state.values() for v in s.values()]
    return [t.detach().clone() for t in tensors]


def assert_equal(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride()


def test_a_night_changes_nothing():
    residency, a, b = Residency(set()), agent(1, reference=True), agent(2)
    pairs = [(a, agent(1)), (b, agent(2))]  # each with one that never sleeps
    residency.register(a)
    residency.register(b)
    assert resident_bytes([a]) == 0 and a.model.q.numel() == 0
    for _ in range(3):  # the optimizer's states appear between two nights
        for one, sleepless in pairs:
            residency.wake(one)
            assert residency.resident_bytes() == resident_bytes([one]) > 0
            assert_equal(state(one), state(sleepless))
            step(one)
            step(sleepless)
            assert_equal(state(one), state(sleepless))
    # what was one memory still is
    for model in (a.model, b.model):
        residency.wake(a if model is a.model else b)
        assert model.head.data_ptr() == model.embedding.data_ptr()
        assert model.k.data_ptr() == model.q.data_ptr() + model.q.nbytes


def test_what_is_shared_stays():
    a, b = agent(1), agent(2)
    b.model.frozen = a.model.frozen
    residency = Residency({id(a.model.frozen)})
    for one in (a, b):
        residency.register(one)
    assert a.model.frozen.numel() == 7 and a.model.q.numel() == 0


def test_buffers_are_allocated_once_and_frozen_tensors_copied_once(monkeypatch):
    allocated, copied = [], []
    allocate, pairs = offload._allocate, offload._pairs
    monkeypatch.setattr(offload, "_allocate", lambda n, pinned: allocated.append(n) or allocate(n, pinned))
    monkeypatch.setattr(offload, "_pairs", lambda s, buffer: copied.append(s.nbytes()) or pairs(s, buffer))
    residency, a, b = Residency(set()), agent(1), agent(2)
    residency.register(a)
    residency.register(b)
    # fused 24 numbers, embedding and head 20, turned 12, frozen 7, table 2
    assert sorted(allocated) == sorted(copied) == [4 * n for n in (2, 7, 12, 20, 24)]
    residency.wake(a)
    step(a)
    copied.clear(), allocated.clear()
    residency.wake(b)  # now a has two moments for every trained parameter but the head, which has no gradient
    assert sorted(allocated) == sorted(2 * [4 * n for n in (16, 8, 20, 12)])
    copied.clear(), allocated.clear()
    residency.wake(a)
    residency.wake(b)
    assert not allocated
    assert copied.count(4 * 7) == 2  # a's and b's way to the device: neither was copied to the CPU again


def test_buffers_of_replaced_optimizer_states_are_given_back():
    residency, a, b = Residency(set()), agent(1), agent(2)
    residency.register(a)
    step(a)
    residency.register(b)
    residency.wake(a)
    kept = len(residency._buffers)
    a.optimizer.load_state_dict(a.optimizer.state_dict() | {"state": {}})
    gc.collect()
    assert len(residency._buffers) == kept - 8
    before = state(a)
    residency.wake(b)
    residency.wake(a)
    assert_equal(before, state(a))


def test_pinned_pieces_waste_nothing(monkeypatch):
    sizes = []
    monkeypatch.setattr(offload, "_pinned", lambda n: sizes.append(n) or torch.empty(n, dtype=torch.uint8))
    mib = 2**20
    assert sum(p.numel() for p in offload._allocate(13 * mib + 5, True)) == 13 * mib + 5
    assert sizes == [8 * mib, 4 * mib, mib, 5]
    sizes.clear()
    offload._allocate(100, True)
    offload._allocate(mib, True)
    offload._allocate(7 * mib, False)
    assert sizes == [100, mib]


def test_states_come_back_out_of_several_pieces(monkeypatch):
    """As beside a GPU: every storage in pieces."""
    monkeypatch.setattr(offload, "_is_pinned", lambda device: True)
    monkeypatch.setattr(offload, "_SMALLEST_PIECE", 4)
    monkeypatch.setattr(offload, "_pinned", lambda n: torch.empty(n, dtype=torch.uint8))
    residency, a, b = Residency(set()), agent(1), agent(2)
    residency.register(a)
    step(a)
    before = state(a)
    residency.register(b)
    assert max(len(buffer.pieces) for buffer in residency._buffers.values()) > 1
    residency.wake(a)
    assert_equal(before, state(a))


def test_without_pinned_memory_it_says_so(monkeypatch):
    def refuse(nbytes):
        raise RuntimeError("CUDA error: out of memory\nmore")

    told = []
    monkeypatch.setattr(offload, "_pinned", refuse)
    monkeypatch.setattr(offload.logger, "warning_once", told.append)
    assert [p.numel() for p in offload._allocate(3000, True)] == [3000]
    assert len(told) == 1 and "pinned memory" in told[0] and "(CUDA error: out of memory)" in told[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_and_shape_come_back(dtype):
    residency, a, b = Residency(set()), agent(1), agent(2)
    a.model.to(dtype)
    residency.register(a)
    before = state(a)
    residency.register(b)
    residency.wake(a)
    assert a.model.q.dtype == dtype
    assert_equal(before, state(a))
