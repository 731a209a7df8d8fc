"""What tests share: one thread, no network, and the folders of the tiny agents."""

import os
import signal

# A shell without job control starts what runs in its background with Ctrl-C ignored, and children inherit that: the
# tests of interrupts would wait for ever
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from support.tiny_teams import SPECS

from hacpo_trl.playground import build_agent, make_problems, save_agent, warm_up


@pytest.fixture(scope="session")
def agent_folders(tmp_path_factory):
    """Folders of the tiny agents, by name."""
    root = tmp_path_factory.mktemp("agents")
    problems = make_problems(["addition"], 64, 1)
    folders = {}
    for name, spec in SPECS.items():
        model, tokenizer = build_agent(spec)
        # Just enough for readable text: what random BPE agents write is broken UTF-8, of no use to their peers
        warm_up(model, tokenizer, problems, steps=40, batch_size=16, learning_rate=1e-2, seed=0, progress=False)
        folders[name] = save_agent(model, tokenizer, root / name)
    return folders
