"""No warnings that a user can do nothing about. What a whole run shows is in test_interrupts.py."""

import logging
import warnings

import pytest
from support.tiny_teams import config, team

from hacpo_trl.cli import console


def test_a_trainer_warns_of_no_names_that_trl_uses(agent_folders, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        team(agent_folders, ["char", "bpe"], config(tmp_path, max_rounds=1, gradient_checkpointing=True)).train()
        warnings.warn("of a user's own", FutureWarning, stacklevel=1)
    assert [str(w.message) for w in caught if w.category is FutureWarning] == ["of a user's own"]


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_of_one_agent(tmp_path, name):
    both = {n: n for n in ("gradient_checkpointing", "activation_checkpointing")}
    args = config(tmp_path, gradient_checkpointing=True, agent_overrides={"b": {name: False}})
    read = [
        [getattr(args.for_agent(agent, leader=False), n, args.gradient_checkpointing) for n in both] for agent in "ab"
    ]
    assert read == [[True, True], [False, False]]


def test_what_is_held_back_is_told_where_it_matters(caplog, monkeypatch):
    name = "one.library"
    monkeypatch.setattr(console, "_HELD", {name: console._Held("Failed to load CPU gemm_4bit_forward")})
    logger = logging.getLogger(name)
    console.start_quietly()
    console.start_quietly()
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "why")
    logger.warning("another")
    assert [r.message for r in caplog.records] == ["another"]
    console.tell_held(name)
    assert caplog.messages == ["another", "Failed to load CPU gemm_4bit_forward from kernels-community: why"]
    logger.warning("Failed to load CPU gemm_4bit_forward again")
    assert len(caplog.records) == 3


def test_quick_bars_are_not_shown(capsys):
    from transformers.utils import logging as theirs

    console.show_slow_bars_only()
    try:
        assert list(theirs.tqdm(range(3), disable=False)) == [0, 1, 2]
        assert capsys.readouterr().err == ""
    finally:
        theirs.set_tqdm_hook(None)
