"""Tests of the capability tracker: window, floor, unscorable rounds, warning, ratios and state."""

import json
import math
import random
import warnings

import pytest
import torch

from hacpo_trl.capability import CapabilityTracker

NAN, INF = float("nan"), float("inf")


def rounds(tracker, *rewards):
    for reward in rewards:
        tracker.update(torch.tensor(reward, dtype=torch.float64))
    return tracker


def quiet(tracker, *rewards):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rounds(tracker, *rewards)


def check(actual, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-12, equal_nan=True)


# -- rates and window -------------------------------------------------------------------------------------------------


def test_positive_rate_by_hand():
    # agent 0: 1 of 4 above 0, agent 1: 3 of 4; the size of a reward does not count, 0 and below is no success
    tracker = rounds(CapabilityTracker(2), [[0.2, 0.0, -1.0, 0.0], [5.0, 0.1, 1.0, 0.0]])
    check(tracker.capabilities, [0.25, 0.75])


def test_mean_reward_by_hand():
    # (.5 + 0 + 1 + .1) / 4 = .4 and (2 + 1 + 0 - .6) / 4 = .6
    tracker = rounds(CapabilityTracker(2, metric="mean_reward"), [[0.5, 0.0, 1.0, 0.1], [2.0, 1.0, 0.0, -0.6]])
    check(tracker.capabilities, [0.4, 0.6])


def test_capability_is_the_mean_over_the_rounds():
    # rates (1/4, 3/4) then (3/4, 1/4) and (1/2, 1): means (.5, 2/3)
    tracker = rounds(
        CapabilityTracker(2),
        [[1, 0, 0, 0], [1, 1, 1, 0]],
        [[1, 1, 1, 0], [1, 0, 0, 0]],
        [[1, 1, 0, 0], [1, 1, 1, 1]],
    )
    check(tracker.capabilities, [0.5, 2 / 3])


def test_every_round_weighs_the_same():
    # a round of 2 responses with rate 1 and one of 8 with rate 0: .5, and not 2 / 10
    tracker = rounds(CapabilityTracker(1), [[1, 1]], [[0] * 8])
    check(tracker.capabilities, [0.5])


def test_window_forgets():
    # window 2: after rates 1, .5, 0 the mean is that of .5 and 0
    tracker = rounds(CapabilityTracker(1, window=2), [[1, 1]], [[1, 0]])
    check(tracker.capabilities, [0.75])
    check(rounds(tracker, [[0, 0]]).capabilities, [0.25])
    # the paper's window is of 5 rounds, the newest included: one success, five rounds later none
    tracker = rounds(CapabilityTracker(1), [[1]], *[[[0]]] * 4)
    check(tracker.capabilities, [0.2])
    check(rounds(tracker, [[0]]).capabilities, [1e-8])


def test_window_of_one_round():
    tracker = rounds(CapabilityTracker(1, window=1), [[1, 1]], [[1, 0]])
    check(tracker.capabilities, [0.5])


def test_any_number_of_further_dimensions():
    rewards = torch.tensor([[1.0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0]])
    for shape in ((2, 6), (2, 2, 3), (2, 1, 3, 2)):
        tracker = CapabilityTracker(2)
        tracker.update(rewards.view(shape))
        check(tracker.capabilities, [0.5, 5 / 6])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.long, torch.bool])
def test_any_kind_of_rewards(dtype):
    tracker = CapabilityTracker(1)
    tracker.update(torch.tensor([[1, 0, 1, 1]]).to(dtype))
    check(tracker.capabilities, [0.75])


def test_rewards_with_a_graph_are_read_only():
    rewards = torch.tensor([[1.0, 0.0]], requires_grad=True)
    tracker = CapabilityTracker(1)
    tracker.update(rewards * 2)
    assert not tracker.capabilities.requires_grad


def test_window_matches_loops():
    rng = random.Random(0)
    for metric in ("positive_rate", "mean_reward"):
        for _ in range(30):
            n, window = rng.randint(1, 4), rng.randint(1, 6)
            tracker, history = CapabilityTracker(n, window, metric), []
            for _ in range(rng.randint(1, 9)):
                drawn = [[rng.choice([0.0, 1.0, 0.5]) for _ in range(4)] for _ in range(n)]
                history.append(drawn)
                quiet(tracker, drawn)
            recent = history[-window:]
            for k in range(n):
                rates = [
                    sum((r > 0) if metric == "positive_rate" else r for r in drawn[k]) / len(drawn[k])
                    for drawn in recent
                ]
                mean = sum(rates) / len(rates)
                expected = max(mean, 1e-8) if metric == "positive_rate" or mean > 0 else mean
                assert tracker.capabilities[k].item() == pytest.approx(expected, abs=1e-12)


# -- floor ------------------------------------------------------------------------------------------------------------


def test_floor():
    tracker = rounds(CapabilityTracker(2), [[0, 0], [1, 0]])
    assert tracker.capabilities.tolist() == [1e-8, 0.5]
    # .5 / 1e-8 and its inverse are clamped
    check(tracker.ratios(), [[1.0, 0.1], [10.0, 1.0]])
    tracker = rounds(CapabilityTracker(2, floor=0.05), [[0, 0], [1, 0]])
    assert tracker.capabilities.tolist() == [0.05, 0.5]
    check(tracker.ratios(), [[1.0, 0.1], [10.0, 1.0]])
    # the floor is on the mean of the window, not on a round: (0 + 1) / 2 stays .5
    check(rounds(CapabilityTracker(1, floor=0.2), [[0, 0]], [[1, 1]]).capabilities, [0.5])


def test_floor_of_a_tiny_mean_reward():
    tracker = rounds(CapabilityTracker(2, metric="mean_reward", floor=0.01), [[1e-5, 1e-5], [0.3, 0.5]])
    check(tracker.capabilities, [0.01, 0.4])


# -- unscorable rewards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("metric", ["positive_rate", "mean_reward"])
def test_unscorable_rewards_are_left_out(bad, metric):
    # 1 of the 2 scorable, not 1 or 3 of 4
    tracker = rounds(CapabilityTracker(1, metric=metric), [[1.0, bad, 0.0, bad]])
    check(tracker.capabilities, [0.5])
    check(tracker.reward_variances, [0.25])


def test_a_round_without_scorable_responses_leaves_the_capability():
    tracker = rounds(CapabilityTracker(2), [[1, 0, 0, 0], [1, 1, 0, 0]])
    rounds(tracker, [[NAN] * 4, [1, 1, 1, 1]])
    check(tracker.capabilities, [0.25, 0.75])
    check(tracker.reward_variances, [0.1875, 0.125])  # .25 * .75; mean of .25 and 0
    rounds(tracker, [[1, 1, 1, 0], [NAN] * 4])
    check(tracker.capabilities, [0.5, 0.75])


def test_a_round_without_scorable_responses_leaves_the_capability_when_the_window_is_full():
    # rates 0 and 1 fill the window of 2: .5; a round without a reward leaves the capability as it was
    tracker = rounds(CapabilityTracker(1, window=2), [[0, 0]], [[1, 1]])
    check(tracker.capabilities, [0.5])
    check(rounds(tracker, [[NAN, NAN]]).capabilities, [0.5])


def test_without_any_reward_the_capability_is_unknown_and_ratios_are_one():
    tracker = CapabilityTracker(2)
    assert tracker.capabilities.shape == tracker.reward_variances.shape == (2,)
    assert tracker.capabilities.isnan().all() and tracker.reward_variances.isnan().all()
    assert torch.equal(tracker.ratios(), torch.ones(2, 2, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds(tracker, [[NAN, NAN], [1, 0]])
    check(tracker.capabilities, [NAN, 0.5])
    assert torch.equal(tracker.ratios(), torch.ones(2, 2, dtype=torch.float64))
    rounds(tracker, [[1, 1], [1, 0]])
    check(tracker.ratios(), [[1.0, 2.0], [0.5, 1.0]])


# -- a mean reward that is not positive -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[0.0, 0.0], [-1.0, 0.5]])
def test_mean_reward_that_is_not_positive_counts_as_ratio_one_and_warns_once(bad):
    tracker = CapabilityTracker(3, metric="mean_reward")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            rounds(tracker, [bad, [0.2, 0.2], [0.4, 0.8]])
    assert len(caught) == 1
    assert "not positive" in str(caught[0].message) and "positive_rate" in str(caught[0].message)
    assert caught[0].filename == __file__  # the line of whoever called update
    check(tracker.capabilities, [sum(bad) / 2, 0.2, 0.6])
    expected = [[1, 1, 1], [1, 1, 1 / 3], [1, 3, 1]]
    check(tracker.ratios(), expected)


def test_no_warning_without_cause():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds(CapabilityTracker(2), [[-1.0, 0.0], [0.0, 1.0]])  # the rate has a floor
        rounds(CapabilityTracker(2, metric="mean_reward"), [[0.1, 0.0], [-1.0, 1.5]])


# -- ratios and variances ---------------------------------------------------------------------------------------------


def test_ratios_by_hand():
    # rates .75 and .25: the strong learner scales the weak source's rewards by 3
    tracker = rounds(CapabilityTracker(2), [[1, 1, 1, 0], [1, 0, 0, 0]])
    check(tracker.ratios(), [[1.0, 3.0], [1 / 3, 1.0]])


def test_ratios_are_clamped():
    rewards = [[1.0] * 40, [1.0] + [0.0] * 39]  # 1 / (1 / 40) = 40
    check(rounds(CapabilityTracker(2), rewards).ratios(), [[1.0, 10.0], [0.1, 1.0]])
    tracker = rounds(CapabilityTracker(2, ratio_bounds=(0.25, 5.0)), rewards)
    check(tracker.ratios(), [[1.0, 5.0], [0.25, 1.0]])


def test_reward_variances_by_hand():
    # round 0: (1, 0, 0, 0): .1875, (2, 0): mean 1, variance 1; round 1: 0 and (1, 0, 1, 0): .25
    # means .09375 and .625; between rounds nothing is added
    tracker = rounds(CapabilityTracker(2), [[1, 0, 0, 0], [2, 0, 2, 0]], [[1, 1, 1, 1], [1, 0, 1, 0]])
    check(tracker.reward_variances, [0.09375, 0.625])
    tracker = rounds(CapabilityTracker(1, window=1), [[1, 0]], [[0.5, 0.5]])
    check(tracker.reward_variances, [0.0])


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["positive_rate", "mean_reward"])
def test_state_goes_through_json(metric):
    rng = random.Random(1)
    first = CapabilityTracker(2, window=3, metric=metric)
    for _ in range(5):
        quiet(first, [[rng.random() - 0.2 for _ in range(4)] for _ in range(2)])
    quiet(first, [[NAN] * 4, [1.0, 0.0, 1.0, 0.0]])
    second = CapabilityTracker(2, window=3, metric=metric)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(4):  # goes on alike, the window included
        torch.testing.assert_close(second.capabilities, first.capabilities, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(second.reward_variances, first.reward_variances, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(second.ratios(), first.ratios())
        more = [[rng.random() for _ in range(4)] for _ in range(2)]
        quiet(first, more)
        quiet(second, more)
    assert all(len(rounds) == 3 for rounds in second.state_dict()["rates"])


def test_state_of_a_new_tracker():
    second = rounds(CapabilityTracker(2), [[1, 0], [1, 1]])
    second.load_state_dict(json.loads(json.dumps(CapabilityTracker(2).state_dict())))
    assert second.capabilities.isnan().all()


def test_state_is_a_copy():
    tracker = rounds(CapabilityTracker(1), [[1, 0]])
    state = tracker.state_dict()
    other = CapabilityTracker(1)
    other.load_state_dict(state)
    state["rates"][0][0] = 0.9
    state["rates"].append([0.1])
    check(tracker.capabilities, [0.5])
    check(other.capabilities, [0.5])


def test_a_longer_state_is_cut_to_the_window():
    long = rounds(CapabilityTracker(1, window=4), [[0, 0]], [[0, 0]], [[1, 0]], [[1, 1]])
    short = CapabilityTracker(1, window=2)
    short.load_state_dict(long.state_dict())
    check(short.capabilities, [0.75])  # the newest two


def test_state_of_other_agents_is_refused():
    state = rounds(CapabilityTracker(3), [[1], [0], [1]]).state_dict()
    with pytest.raises(ValueError, match="of 3 agents, not of 2"):
        CapabilityTracker(2).load_state_dict(state)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_agents": 0}, "num_agents=0 must be at least 1"),
        ({"window": 0}, "window=0 must be at least 1 round"),
        ({"metric": "accuracy"}, "metric='accuracy' is unknown; use one of positive_rate, mean_reward"),
        ({"floor": 0.0}, "floor=0.0 must be positive"),
        ({"floor": -1.0}, "floor=-1.0 must be positive"),
        ({"ratio_bounds": (0.0, 10.0)}, "ratio_bounds"),
        ({"ratio_bounds": (2.0, 10.0)}, "ratio_bounds"),
        ({"ratio_bounds": (0.1, 0.9)}, "ratio_bounds"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        CapabilityTracker(**{"num_agents": 2, **settings})


@pytest.mark.parametrize("shape", [(2,), (3, 4), ()])
def test_shape_of_the_rewards_is_checked(shape):
    tracker = CapabilityTracker(2)
    with pytest.raises(ValueError, match=r"\(2 agents, responses \.\.\.\), got \("):
        tracker.update(torch.zeros(shape))
    assert math.isnan(tracker.capabilities[0])  # nothing was taken in
