"""Which device and stream an agent works on, whatever accelerate hands out; tried without a GPU."""

import threading
from types import SimpleNamespace

import pytest
import torch

from hacpo_trl.sampling.turn_taking import Turns
from hacpo_trl.training.agent import HACPOAgent


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", []),  # without a launcher: the only GPU
        ("cuda:1", [("cuda", torch.device("cuda:1"))]),
        ("xpu", []),
        ("xpu:0", [("xpu", torch.device("xpu:0"))]),
        ("mps", []),
        ("mps:0", []),
        ("cpu", []),
        ("meta", []),
    ],
)
def test_the_device_is_set_where_it_has_an_index(monkeypatch, device, expected):
    calls = []
    for name in ("cuda", "xpu"):
        check = torch.cuda._utils._get_device_index  # what set_device calls first, also on a build without GPUs

        def set_device(device, name=name, check=check):
            assert device.index is not None and (name != "cuda" or check(device) == device.index)
            calls.append((name, device))

        monkeypatch.setattr(getattr(torch, name), "set_device", set_device)
    agent = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device(device)),
        is_deepspeed_enabled=False,
        restore_plugin=lambda: None,
        residency=None,
    )
    HACPOAgent.activate(agent)
    assert calls == expected


def test_threads_work_on_the_callers_stream_after_one_synchronisation(monkeypatch):
    """With a stand-in for torch.cuda, whose current stream is one of the thread, as the real one is."""
    streams, events = threading.local(), []

    def set_stream(stream):
        streams.current = stream

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: getattr(streams, "current", "the first device's own"))
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronised"))
    set_stream("the training's, on cuda:1")
    turns = Turns()

    def sample(name):
        def work():
            events.append((name, torch.cuda.current_stream()))
            turns.pause(lambda: None)
            return torch.cuda.current_stream()

        return work

    assert turns.run([sample("a"), sample("b")]) == ["the training's, on cuda:1"] * 2
    assert events == ["synchronised", *((name, "the training's, on cuda:1") for name in "ab")]
