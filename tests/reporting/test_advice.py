"""What a person is told of a run that cannot teach: by numbers, each threshold from both sides."""

import math
from dataclasses import replace

import pytest
import torch

from hacpo_trl.methods import Clipped
from hacpo_trl.objective import rewards_differ
from hacpo_trl.reporting.advice import RoundSigns, advise
from hacpo_trl.reporting.update_statistics import UpdateStatistics
from hacpo_trl.training.trainer import _with_advantage

NAN = math.nan
HEALTHY = RoundSigns(
    rewards=[0.4, 0.6],
    differing=0.7,
    capabilities=[0.4, 0.6],
    heard=[0.3, 0.4],
    with_advantage=[0.7, 0.7],
    own_ratio=[1.0, 0.99],
    kl=[0.01, NAN],
    grad_norm=[1.0, 2.0],
)


def said(*rounds, loudest=10.0, rates=(1e-6, 1e-5)):
    return advise(rounds, ["a", "b"], learning_rates=rates, loudest=loudest)


def test_a_healthy_run_is_told_nothing():
    assert said(*[HEALTHY] * 10) == {} and said() == {} and HEALTHY.peers_heard == pytest.approx(0.35)


def test_peers_hardly_heard():
    """The real pair of the first day: .89 and .94 of the peers' responses had no gradient."""
    deaf = replace(HEALTHY, heard=[0.11, 0.06])
    assert said(deaf, deaf) == {}  # two rounds tell too little
    found = said(deaf, deaf, deaf)
    assert sorted(found) == [("heard", "a"), ("heard", "b")]
    assert "a hears next to nothing of its peers: 11 % of their responses had a gradient" in found["heard", "a"]
    assert "70 % have an advantage, and most of these lie outside its clip range" in found["heard", "a"]
    few = replace(deaf, with_advantage=[0.2, 0.1])  # more than half of what could teach did: the range is not to blame
    assert "Most have no advantage" in said(few, few, few)["heard", "a"]
    assert said(*[replace(HEALTHY, heard=[0.15, 0.15])] * 3) == {}
    assert said(HEALTHY, deaf, deaf) == {}  # (.3 + .11 + .11) / 3 = .173 and (.4 + .06 + .06) / 3 = .173


def test_nothing_is_said_of_peers_where_there_are_none():
    alone = replace(HEALTHY, heard=[NAN] * 2, with_advantage=[NAN] * 2, capabilities=[1e-8, 0.6])
    assert said(*[alone] * 3, loudest=None) == {} and math.isnan(alone.peers_heard)


def test_own_ratio_far_from_one():
    far = replace(HEALTHY, own_ratio=[0.38, NAN])
    assert said(far) == {}
    assert "mean ratio of its own responses is 0.38, far from 1" in (text := said(far, far)["ratio", "a"])
    assert "learning_rate (now 1e-06)" in text
    assert said(far, HEALTHY, far) == {}  # not in two rounds running
    assert ("ratio", "b") in said(*[replace(HEALTHY, own_ratio=[1.0, 1.2])] * 2)
    assert said(*[replace(HEALTHY, own_ratio=[0.91, 1.09])] * 3) == {}


def test_rewards_that_are_all_equal():
    nothing = replace(HEALTHY, differing=0.0, rewards=[0.0, 0.0], heard=[0.0, 0.0])
    assert said(nothing, nothing) == {}
    found = said(nothing, nothing, nothing)
    assert list(found) == [("equal", "")]  # that peers are not heard follows from it
    assert "nothing was learned (mean reward 0.000). Nothing is right" in found["equal", ""]
    assert "neither too easy nor too hard" in said(*[replace(nothing, rewards=[1.0, 1.0])] * 3)["equal", ""]
    assert ("equal", "") not in said(nothing, HEALTHY, nothing, nothing)


def test_an_agent_without_a_rewarded_response():
    unrewarded = replace(HEALTHY, capabilities=[1e-8, 0.3])
    text = said(unrewarded)["unrewarded", "a"]
    assert "(P = 0), so its peers' responses count up to 10 times" in text
    assert said(replace(HEALTHY, capabilities=[1e-8, 1e-8])) == {}  # the coefficient is 1 between the two
    assert said(unrewarded, loudest=None) == {}


def test_signs_of_a_destroyed_model():
    steep = replace(HEALTHY, grad_norm=[88.0, 1.0])
    assert said(steep) == {} and "gradient norm before clipping is 88" in said(steep, steep)["far", "a"]
    assert (
        "KL divergence from the model that it was is 1.5" in said(*[replace(HEALTHY, kl=[1.5, NAN])] * 2)["far", "a"]
    )
    # .575 to .010 in three rounds
    course = [replace(HEALTHY, rewards=[0.5, r]) for r in (0.575, 0.31, 0.05, 0.01)]
    assert said(*course[:3]) == {}
    assert "b: its mean reward fell from 0.443 to 0.010" in said(*course)["collapse", "b"]  # (.575 + .31) / 2
    assert said(*[replace(HEALTHY, rewards=[r, r]) for r in (0.4, 0.4, 0.11, 0.11)]) == {}  # above a quarter


def test_prompts_and_responses_that_teach():
    rewards = torch.tensor([[[1.0, 0.0], [1.0, 1.0], [0.0, NAN]], [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]])
    shares = [rewards_differ(rewards, together).double().mean().item() for together in ((0, 2), (2,))]
    assert shares[0] == pytest.approx(2 / 3)  # of the pool of prompts 1 and 2
    assert shares[1] == pytest.approx(1 / 6)  # only agent 1's group of prompt 1
    advantages = torch.tensor([[[1.0, 0.0], [0.5, 0.0]], [[0.0, 0.0], [1.0, 1.0]]])
    assert _with_advantage(advantages) == [0.5, 0.0]


def test_each_reader_gets_all_since_its_own_last_call():
    statistics = UpdateStatistics(2, 0)
    update = {
        "source": torch.tensor([0, 1]),
        "kl": None,
        "entropy": torch.zeros(2, 1),
        "mask": torch.ones(2, 1),
    }
    low, high = torch.tensor([0.9, 0.8]), torch.tensor([1.1, 1.0])

    def add(ratio):
        below, above = ratio < low, ratio > high
        clipped = Clipped(below, above, ~(below | above))
        statistics.add(ratio=ratio, advantages=torch.ones(2), clipped=clipped, **update)

    add(torch.tensor([1.0, 0.9]))
    assert statistics.drain()[1]["no_gradient"] == 0
    add(torch.tensor([1.2, 0.5]))
    whole = statistics.drain(reader="round")
    assert whole[1]["no_gradient"] == 0.5 and whole[0]["ratio_mean"] == pytest.approx(1.1)
    assert whole[0]["ratio_max"] == pytest.approx(1.2)
    assert statistics.drain()[1]["no_gradient"] == 1 and statistics.drain(reader="round") == [{}, {}]
