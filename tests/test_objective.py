"""Tests of HACPO's equations: hand-worked numbers, an independent loop reference, limits, gradients and errors.

The reference below was written from the paper's equations in plain Python floats; it shares nothing with the package.
"""

import math
import random

import pytest
import torch

from hacpo_trl.objective import (
    BASELINES,
    capability_aware_advantages,
    capability_ratios,
    hacpo_objective,
    k3_divergence,
    peer_clip_lower,
    sequence_log_ratio,
)

NAN, INF = float("nan"), float("inf")
EPS = 1e-6


def f64(values, **kwargs):
    return torch.tensor(values, dtype=torch.float64, **kwargs)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, f64(expected), rtol=tolerance, atol=tolerance)


# -- the loop reference -----------------------------------------------------------------------------------------------


def ref_ratio(own, peer, low=0.1, high=10.0):
    """w(k, j) = P_k / P_j, clamped; 1 where that has no meaning."""
    if not (math.isfinite(own) and math.isfinite(peer) and own > 0 and peer > 0):
        return 1.0
    return min(max(own / peer, low), high)


def ref_variances(rewards, capabilities, max_reward=1.0, given=None):
    """v_j: P (1 - P) with P in [0.02, 0.98] for binary rewards, else as given or measured, with the same floor."""
    good = [[r for prompt in agent for r in prompt if math.isfinite(r)] for agent in rewards]
    binary = all(r == 0 or r == max_reward for agent in good for r in agent)
    rates = all(math.isfinite(p) and 0 <= p <= 1 for p in capabilities)
    result = []
    for j, agent in enumerate(good):
        if binary and rates:
            p = min(max(capabilities[j], 0.02), 0.98)
            result.append(p * (1 - p) * max_reward**2)
            continue
        if given is not None:
            v = given[j]
        elif agent:
            mean = sum(agent) / len(agent)
            v = sum((r - mean) ** 2 for r in agent) / len(agent)
        else:
            v = 0.0
        result.append(max(v, 0.02 * 0.98 * max_reward**2))
    return result


def ref_advantages(
    rewards, capabilities, baseline="capability", given=None, max_reward=1.0, bounds=(0.1, 10.0), eps=EPS
):
    """Equations (5) and (6) with their guards: rewards[agent][prompt][response] to advantages[learner][agent][..]."""
    n, prompts = len(rewards), len(rewards[0])
    variances = ref_variances(rewards, capabilities, max_reward, given)
    result = [[[[0.0] * len(rewards[j][b]) for b in range(prompts)] for j in range(n)] for _ in range(n)]
    for b in range(prompts):
        good = [[r for r in rewards[j][b] if math.isfinite(r)] for j in range(n)]
        pool = [r for group in good for r in group]
        if not pool or all(r == pool[0] for r in pool):
            continue  # no signal in this prompt
        mean = sum(pool) / len(pool)
        sigma = math.sqrt(sum((r - mean) ** 2 for r in pool) / (len(pool) - 1))
        for k in range(n):
            own = sum(good[k]) / len(good[k]) if good[k] else None
            mu = 0.0
            for j in range(n):
                w = 1.0 if baseline == "pooled" else ref_ratio(capabilities[k], capabilities[j], *bounds)
                for r in good[j]:
                    mu += w * r / len(pool)
            if baseline == "own" and own is not None:  # without own rewards the paper's baseline stands in
                mu = own
            if baseline == "min_variance":
                top = bottom = 0.0
                for j in range(n):
                    if good[j]:
                        w = ref_ratio(capabilities[k], capabilities[j], *bounds)
                        weight = 1.0 / (w * w * variances[j])
                        top += weight * w * sum(good[j]) / len(good[j])
                        bottom += weight
                mu = top / bottom
            if mu > max_reward:
                mu = max_reward if own is None else own
            for j in range(n):
                for g, r in enumerate(rewards[j][b]):
                    if math.isfinite(r):
                        result[k][j][b][g] = (r - mu) / (sigma + eps)
    return result


def ref_log_ratio(new, new_mask, old_mean, clamp=10.0):
    """log s of one response from its per-token log-probabilities and the source's mean; and its token count."""
    kept = [x for x, m in zip(new, new_mask, strict=True) if m]
    value = (sum(kept) / len(kept) if kept else 0.0) - old_mean
    return min(max(value, -clamp), clamp), len(kept) if abs(value) <= clamp else 0


def ref_lower(m, delta=0.2, step=0.025):
    return min(1.0, 1.0 - delta + m * step)


def ref_own(s, a, low=3e-4, high=4e-4):
    """J and dJ/ds of an own response."""
    plain, held = s * a, min(max(s, 1.0 - low), 1.0 + high) * a
    return (plain, a) if plain <= held else (held, 0.0)


def ref_peer(s, a, c, lower, alpha=1.0):
    """J and dJ/ds of a peer's response: clip, then the power, which is not differentiated; lower None is no clip."""
    if lower is None:
        return s * s**alpha * c * a, s**alpha * c * a
    held = min(max(s, lower), 1.0)
    return held * held**alpha * c * a, held**alpha * c * a if lower <= s <= 1.0 else 0.0


# -- capability ratios ------------------------------------------------------------------------------------------------


def test_ratios_by_hand():
    # rows are learners: w(0, 1) = .6 / .3 = 2, w(1, 0) = .3 / .6 = .5, w(0, 2) = .6 / .15 = 4, w(1, 2) = 2
    close(capability_ratios(f64([0.6, 0.3, 0.15])), [[1, 2, 4], [0.5, 1, 2], [0.25, 0.5, 1]])


def test_ratios_and_coefficients_are_clamped():
    # .9 / .01 = 90 -> 10 and .01 / .9 = .0111 -> .1; the coefficient P_j / P_k = 1 / w has the same clamp
    ratios = capability_ratios(f64([0.9, 0.01]))
    close(ratios, [[1, 10], [0.1, 1]])
    close(1 / ratios, [[1, 0.1], [10, 1]])
    # bounds (.5, 4): .9 / .3 = 3 stays, .3 / .9 -> .5, .9 / .1 = 9 -> 4, .3 / .1 = 3 stays, .1 / .3 = .333 -> .5
    close(capability_ratios(f64([0.9, 0.3, 0.1]), (0.5, 4.0)), [[1, 3, 4], [0.5, 1, 3], [0.5, 0.5, 1]])


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.0, -0.3])
def test_ratio_with_a_meaningless_capability_is_one(bad):
    close(capability_ratios(f64([0.6, bad, 0.2])), [[1, 1, 3], [1, 1, 1], [1 / 3, 1, 1]])


@pytest.mark.parametrize("bounds", [(0.0, 10.0), (-1.0, 10.0), (2.0, 10.0), (0.1, 0.5), (NAN, 10.0), (10.0, 0.1)])
def test_ratio_bounds_are_checked(bounds):
    with pytest.raises(ValueError, match=r"ratio_bounds=\(.*0 < low <= 1 <= high"):
        capability_ratios(f64([0.5, 0.5]), bounds)
    with pytest.raises(ValueError, match="ratio_bounds"):
        capability_aware_advantages(f64([[[1, 0]], [[1, 0]]]), f64([0.5, 0.5]), ratio_bounds=bounds)


# -- advantages by hand -----------------------------------------------------------------------------------------------


def test_capability_baseline_by_hand():
    # P = (.6, .3): w(0, 1) = 2, w(1, 0) = .5; N G = 8, sums 3 and 1
    # mu_0 = (3 + 2 * 1) / 8 = .625, mu_1 = (.5 * 3 + 1) / 8 = .3125
    # sigma: 4 ones among 8, mean .5, sum of squares 8 * .25 = 2, / 7, root = .534522
    sigma = 0.5345224838248488 + EPS
    actual = capability_aware_advantages(f64([[[1, 1, 1, 0]], [[1, 0, 0, 0]]]), f64([0.6, 0.3]))
    assert actual.shape == (2, 2, 1, 4)
    up_0, down_0, up_1, down_1 = 0.375 / sigma, -0.625 / sigma, 0.6875 / sigma, -0.3125 / sigma
    close(actual[0], [[[up_0, up_0, up_0, down_0]], [[up_0, down_0, down_0, down_0]]])
    close(actual[1], [[[up_1, up_1, up_1, down_1]], [[up_1, down_1, down_1, down_1]]])
    assert up_0 == pytest.approx(0.70156, abs=1e-5) and down_1 == pytest.approx(-0.58463, abs=1e-5)


def test_pooled_baseline_by_hand():
    # mu = 4 / 8 for both learners, sigma = sqrt(2 / 7)
    rewards = f64([[[1, 1, 1, 0]], [[1, 0, 0, 0]]])
    actual = capability_aware_advantages(rewards, f64([0.6, 0.3]), baseline="pooled")
    up = 0.5 / (math.sqrt(2 / 7) + EPS)
    close(actual, [[[[up, up, up, -up]], [[up, -up, -up, -up]]]] * 2)


def test_own_baseline_by_hand():
    # mu_0 = 3 / 4, mu_1 = 1 / 4; sigma stays the pool's sqrt(2 / 7)
    rewards = f64([[[1, 1, 1, 0]], [[1, 0, 0, 0]]])
    actual = capability_aware_advantages(rewards, f64([0.6, 0.3]), baseline="own")
    s = math.sqrt(2 / 7) + EPS
    close(actual[0, 1, 0], [0.25 / s, -0.75 / s, -0.75 / s, -0.75 / s])
    close(actual[1, 0, 0], [0.75 / s, 0.75 / s, 0.75 / s, -0.25 / s])


def test_min_variance_baseline_by_hand():
    # P = (.5, .25): v = (.25, .1875)
    # learner 0: w = (1, 2), 1 / (w^2 v) = (4, 4/3), lambda = (3/4, 1/4)
    #            mu_0 = 3/4 * 1 * .75 + 1/4 * 2 * .25 = .6875
    # learner 1: w = (1/2, 1), 1 / (w^2 v) = (16, 16/3), lambda = (3/4, 1/4)
    #            mu_1 = 3/4 * .5 * .75 + 1/4 * 1 * .25 = .34375
    rewards = f64([[[1, 1, 1, 0]], [[1, 0, 0, 0]]])
    actual = capability_aware_advantages(rewards, f64([0.5, 0.25]), baseline="min_variance")
    s = math.sqrt(2 / 7) + EPS
    close(actual[0, :, 0, 0], [0.3125 / s, 0.3125 / s])
    close(actual[1, :, 0, 0], [0.65625 / s, 0.65625 / s])
    close(actual[1, :, 0, 3], [-0.34375 / s, -0.34375 / s])


def test_min_variance_takes_the_given_variances_for_other_rewards():
    # rewards in quarters, P equal, so w = 1; v = (.1, .3): lambda = (3/4, 1/4)
    # means .5 and .25: mu = .375 + .0625 = .4375; pool mean .375, deviations (.625, -.375, -.125, -.125),
    # squares .390625 + .140625 + .015625 * 2 = .5625, / 3 = .1875
    rewards, variances = f64([[[1, 0]], [[0.25, 0.25]]]), f64([0.1, 0.3])
    actual = capability_aware_advantages(rewards, f64([0.5, 0.5]), baseline="min_variance", reward_variances=variances)
    s = math.sqrt(0.1875) + EPS
    close(actual[0, 0, 0], [0.5625 / s, -0.4375 / s])
    close(actual[0, 1, 0], [-0.1875 / s, -0.1875 / s])
    # without them those of the rewards count: .25 and 0, floored at .02 * .98 = .0196
    # lambda = (4, 1/.0196) / (4 + 1/.0196), mu = (4 * .5 + .25 / .0196) / (4 + 1 / .0196) = 14.755102 / 55.020408
    actual = capability_aware_advantages(rewards, f64([0.5, 0.5]), baseline="min_variance")
    close(actual[1, 0, 0, :1], [(1 - 0.26817507418397624) / s])


def test_min_variance_clamps_the_rates():
    # P = (1, .5): v_0 = .98 * .02 = .0196 and not 0, v_1 = .25; w(0, 1) = 2
    # learner 0: 1 / (w^2 v) = (1/.0196, 1) = (51.020408, 1), mu_0 = (51.020408 * .5 + 1 * 2 * .5) / 52.020408
    rewards = f64([[[1, 0]], [[1, 0]]])
    actual = capability_aware_advantages(rewards, f64([1.0, 0.5]), baseline="min_variance")
    s = math.sqrt(1 / 3) + EPS
    close(actual[0, 0, 0], [(1 - 0.5096116123970184) / s, -0.5096116123970184 / s])


@pytest.mark.parametrize("baseline", BASELINES)
def test_single_agent_by_hand(baseline):
    # GRPO: mean 1/4, squares .5625 + 3 * .0625 = .75, / 3 = .25, root .5: A = .75 / .5 and -.25 / .5
    actual = capability_aware_advantages(f64([[[0, 1, 0, 0]]]), f64([0.8]), baseline=baseline, epsilon=0.0)
    close(actual, [[[[-0.5, 1.5, -0.5, -0.5]]]])


def test_epsilon_is_added_to_the_deviation():
    # (1, 0): mean .5, squares .25 + .25, / 1, root .70711; with epsilon = 1 - .70711: A = +-.5 / 1
    actual = capability_aware_advantages(f64([[[1, 0]]]), f64([0.8]), epsilon=1 - math.sqrt(0.5))
    close(actual, [[[[0.5, -0.5]]]])
    assert capability_aware_advantages(f64([[[1, 0]]]), f64([0.8]))[0, 0, 0, 0] == pytest.approx(
        0.5 / (math.sqrt(0.5) + 1e-6), abs=1e-12
    )


def test_prompts_are_apart():
    # prompt 0: (1, 0), (0, 0): sum 1, mean .25, squares .75, / 3, root .5; prompt 1: (1, 1), (1, 0), mirrored
    rewards = f64([[[1, 0], [1, 1]], [[0, 0], [1, 0]]])
    actual = capability_aware_advantages(rewards, f64([0.5, 0.5]), epsilon=0.0)
    close(actual[0], [[[1.5, -0.5], [0.5, 0.5]], [[-0.5, -0.5], [0.5, -1.5]]])


# -- guards one by one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_no_advantage(baseline, value, dtype):
    # with w = (1, 3) the baseline of learner 0 is far from the common reward; the advantage is 0 all the same
    rewards = torch.full((2, 3, 7), value, dtype=dtype)
    actual = capability_aware_advantages(rewards, f64([0.9, 0.3]), baseline=baseline)
    assert actual.dtype == dtype
    assert torch.equal(actual, torch.zeros(2, 2, 3, 7, dtype=dtype))


def test_one_group_all_right_and_one_all_wrong_is_informative():
    # only the pool counts for this guard: (1, 1), (0, 0) has a signal, mu = .5, squares 1, / 3
    actual = capability_aware_advantages(f64([[[1, 1]], [[0, 0]]]), f64([0.5, 0.5]), epsilon=0.0)
    up = 0.5 / math.sqrt(1 / 3)
    close(actual[0], [[[up, up]], [[-up, -up]]])


def test_baseline_above_the_largest_reward_becomes_the_own_mean():
    # P = (.9, .1), w(0, 1) = 9: mu_0 = (1 + 9 * 2) / 4 = 4.75 > 1 -> own mean 1/2
    # w(1, 0) = 1/9 : mu_1 = (1/9 + 2) / 4 = .527777...
    # sigma: 3 ones of 4: mean .75, squares 3 * .0625 + .5625 = .75, / 3, root .5
    rewards = f64([[[1, 0]], [[1, 1]]])
    actual = capability_aware_advantages(rewards, f64([0.9, 0.1]), epsilon=0.0)
    close(actual[0], [[[1, -1]], [[1, 1]]])
    close(actual[1, 0, 0], [(1 - 19 / 36) / 0.5, -19 / 18])
    # the learner has only its own prompt's mean: a second prompt does not change the first
    more = f64([[[1, 0], [0, 0]], [[1, 1], [0, 1]]])
    close(capability_aware_advantages(more, f64([0.9, 0.1]), epsilon=0.0)[0, :, 0], [[1, -1], [1, 1]])


def test_min_variance_baseline_has_the_same_guard():
    # P = (.9, .1): both v are .09, w(0, 1) = 9, lambda_0 = (81, 1) / 82
    # means .5 and 1: mu_0 = (81 * .5 + 9 * 1) / 82 = 49.5 / 82, below 1
    # sigma: 3 ones of 4, root of .25
    actual = capability_aware_advantages(
        f64([[[1, 0]], [[1, 1]]]), f64([0.9, 0.1]), baseline="min_variance", epsilon=0.0
    )
    close(actual[0, 0, 0], [(1 - 49.5 / 82) / 0.5, -99 / 82])
    # means 1 and .5: mu_0 = (81 * 1 + 9 * .5) / 82 = 1.0427 > 1 -> own mean 1: a success of either is worth 0
    actual = capability_aware_advantages(
        f64([[[1, 1]], [[1, 0]]]), f64([0.9, 0.1]), baseline="min_variance", epsilon=0.0
    )
    close(actual[0], [[[0, 0]], [[0, -2]]])


def test_baseline_at_the_largest_reward_stays():
    # P = (.75, .25), w(0, 1) = 3: mu_0 = (1 + 3 * 1) / 4 = 1, not above 1: a success has advantage 0
    actual = capability_aware_advantages(f64([[[1, 0]], [[1, 0]]]), f64([0.75, 0.25]))
    close(actual[0, :, 0, 0], [0.0, 0.0])


def test_guard_follows_max_reward():
    # as above with w = 9: mu_0 = 4.75 is below max_reward = 5 and stays
    rewards = f64([[[1, 0]], [[1, 1]]])
    actual = capability_aware_advantages(rewards, f64([0.9, 0.1]), max_reward=5.0, epsilon=0.0)
    close(actual[0], [[[-7.5, -9.5]], [[-7.5, -7.5]]])
    actual = capability_aware_advantages(rewards, f64([0.9, 0.1]), max_reward=4.5, epsilon=0.0)
    close(actual[0], [[[1, -1]], [[1, 1]]])


def test_ratio_bounds_reach_the_baseline():
    # w(0, 1) = 9 clamped to 2: mu_0 = (1 + 2 * 1) / 4 = .75; w(1, 0) = 1/9 clamped to .5: mu_1 = (.5 + 1) / 4 = .375
    rewards = f64([[[1, 0]], [[1, 0]]])
    actual = capability_aware_advantages(rewards, f64([0.9, 0.1]), ratio_bounds=(0.5, 2.0))
    s = math.sqrt(1 / 3) + EPS
    close(actual[0, 0, 0], [0.25 / s, -0.75 / s])
    close(actual[1, 0, 0], [0.625 / s, -0.375 / s])
    # the default clamp: .9 / .01 -> 10, mu_1 of learner 1 with .1: (.1 + 1) / 4 = .275
    actual = capability_aware_advantages(rewards, f64([0.9, 0.01]))
    close(actual[1, 0, 0], [0.725 / s, -0.275 / s])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_unscorable_leaves_baseline_and_spread(bad):
    # scorable (1, 0) and (1): P = (.5, .25), w(0, 1) = 2: mu_0 = (1 + 2) / 3 = 1; w(1, 0) = .5: mu_1 = 1.5 / 3 = .5
    # sigma: (1, 0, 1): mean 2/3, squares 2/3, / 2 = 1/3
    s = math.sqrt(1 / 3)
    rewards = f64([[[1, 0, bad]], [[bad, 1, bad]]])
    actual = capability_aware_advantages(rewards, f64([0.5, 0.25]), epsilon=0.0)
    close(actual[0], [[[0, -1 / s, 0]], [[0, 0, 0]]])
    close(actual[1], [[[0.5 / s, -0.5 / s, 0]], [[0, 0.5 / s, 0]]])


@pytest.mark.parametrize("baseline", BASELINES)
def test_equal_but_for_the_unscorable_gives_no_advantage(baseline):
    actual = capability_aware_advantages(f64([[[1, NAN]], [[1, INF]]]), f64([0.9, 0.3]), baseline=baseline)
    assert torch.equal(actual, torch.zeros(2, 2, 1, 2, dtype=torch.float64))


@pytest.mark.parametrize("baseline", BASELINES)
def test_one_or_no_scorable_response_gives_no_advantage(baseline):
    rewards = f64([[[NAN, 1], [NAN, NAN]], [[NAN, INF], [-INF, NAN]]])
    actual = capability_aware_advantages(rewards, f64([0.9, 0.3]), baseline=baseline)
    assert torch.equal(actual, torch.zeros(2, 2, 2, 2, dtype=torch.float64))


def test_a_source_without_scorable_responses_leaves_the_weighted_mean():
    # only agent 1 counts: learner 1: mu = .5 with any lambda; learner 0: w = 2, mu = 2 * .5 = 1; sigma = sqrt(.5)
    rewards = f64([[[NAN, NAN]], [[1, 0]]])
    for baseline in ("min_variance", "capability"):
        actual = capability_aware_advantages(rewards, f64([0.6, 0.3]), baseline=baseline, epsilon=0.0)
        close(actual[0], [[[0, 0]], [[0, -1 / math.sqrt(0.5)]]])
        close(actual[1], [[[0, 0]], [[0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)]]])


@pytest.mark.parametrize("max_reward", [INF, 0.0])
def test_min_variance_is_finite_whatever_max_reward(max_reward):
    # rewards without an upper bound, and penalties only: the largest reward scales the floor of the variances
    rewards = f64([[[-1, -1]], [[-0.5, 0]]])
    actual = capability_aware_advantages(rewards, f64([0.5, 0.5]), baseline="min_variance", max_reward=max_reward)
    assert torch.isfinite(actual).all()


# -- vectorised against the loop reference ----------------------------------------------------------------------------


def random_case(rng, n, binary, broken):
    """Random rewards, capabilities, given variances and the largest reward."""
    prompts, group = rng.randint(1, 5), rng.randint(1, 8)
    max_reward = rng.choice([1.0, 1.0, 2.0, 0.75])
    rate = [[rng.random() for _ in range(prompts)] for _ in range(n)]

    def draw(j, b):
        if binary:
            return max_reward if rng.random() < rate[j][b] else 0.0
        return rng.choice([rng.uniform(-0.5, max_reward), max_reward, 0.0, max_reward / 4])

    rewards = [[[draw(j, b) for _ in range(group)] for b in range(prompts)] for j in range(n)]
    if broken:
        share = rng.choice([0.1, 0.4])
        for j in range(n):
            for b in range(prompts):
                for g in range(group):
                    if rng.random() < share:
                        rewards[j][b][g] = rng.choice([NAN, INF, -INF])
        for b in range(prompts):
            kind = rng.choice(["as is", "as is", "none", "one", "agent"])
            keep = (rng.randrange(n), rng.randrange(group))
            for j in range(n):
                for g in range(group):
                    if kind == "none" or (kind == "one" and (j, g) != keep) or (kind == "agent" and j == keep[0]):
                        rewards[j][b][g] = NAN
            if kind == "one":
                rewards[keep[0]][b][keep[1]] = max_reward
        if rng.random() < 0.2:  # an agent without any scorable response
            rewards[rng.randrange(n)] = [[NAN] * group for _ in range(prompts)]
    capabilities = [rng.choice([rng.random(), rng.random(), rng.random() * 0.05]) for _ in range(n)]
    if broken and rng.random() < 0.3:
        capabilities[rng.randrange(n)] = rng.choice([NAN, 0.0, INF, 1.7, 1.0])
    given = [rng.uniform(0.0, 0.5) for _ in range(n)] if rng.random() < 0.5 else None
    return rewards, capabilities, given, max_reward


@pytest.mark.parametrize("broken", [False, True], ids=["clean", "broken"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "graded"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_match_the_loops(baseline, n, binary, broken):
    rng = random.Random(f"{baseline} {n} {binary} {broken}")
    informative = 0
    for _ in range(60):
        rewards, capabilities, given, max_reward = random_case(rng, n, binary, broken)
        bounds = rng.choice([(0.1, 10.0), (0.1, 10.0), (0.5, 3.0), (1.0, 1.0)])
        expected = ref_advantages(rewards, capabilities, baseline, given, max_reward, bounds)
        actual = capability_aware_advantages(
            f64(rewards),
            f64(capabilities),
            ratio_bounds=bounds,
            baseline=baseline,
            max_reward=max_reward,
            reward_variances=None if given is None else f64(given),
        )
        assert torch.isfinite(actual).all()
        close(actual, expected)
        informative += int((actual != 0).any())
    assert informative >= 10  # the comparison was not one of zeros


def test_every_guard_is_met_by_the_random_cases():
    rng = random.Random(5)
    above = alone = 0
    for _ in range(300):
        rewards, capabilities, _, max_reward = random_case(rng, 3, True, True)
        guarded = ref_advantages(rewards, capabilities, max_reward=max_reward)
        above += guarded != ref_advantages(rewards, capabilities, max_reward=1e9)
        for b in range(len(rewards[0])):
            alone += sum(math.isfinite(r) for agent in rewards for r in agent[b]) == 1
    assert above > 20 and alone > 20


@pytest.mark.parametrize("baseline", BASELINES)
def test_single_precision_is_near_double(baseline):
    rng = random.Random(11)
    for _ in range(20):
        rewards, capabilities, _, _ = random_case(rng, 3, True, False)
        common = {"baseline": baseline, "max_reward": 1.0}
        rewards = (f64(rewards) > 0).double()
        double = capability_aware_advantages(rewards, f64(capabilities), **common)
        single = capability_aware_advantages(rewards.float(), f64(capabilities), **common)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


def test_arguments_are_left_alone():
    rewards, capabilities, variances = f64([[[1, NAN]], [[0.5, 0]]]), f64([0.5, NAN]), f64([0.0, NAN])
    copies = [t.clone() for t in (rewards, capabilities, variances)]
    for baseline in BASELINES:
        capability_aware_advantages(rewards, capabilities, baseline=baseline, reward_variances=variances)
    for now, before in zip((rewards, capabilities, variances), copies, strict=True):
        assert torch.equal(now.nan_to_num(9), before.nan_to_num(9))


# -- limits and invariances -------------------------------------------------------------------------------------------


def random_rewards(seed, *shape, graded=False):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(*shape, dtype=torch.float64, generator=generator)
    return draws if graded else (draws < 0.4).double()


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("baseline", BASELINES)
def test_single_agent_is_grpo(baseline, graded):
    rewards = random_rewards(1, 1, 40, 6, graded=graded)
    expected = (rewards[0] - rewards[0].mean(-1, keepdim=True)) / (rewards[0].std(-1, keepdim=True) + EPS)
    actual = capability_aware_advantages(rewards, f64([0.37]), baseline=baseline)
    torch.testing.assert_close(actual[0, 0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("graded", [False, True])
def test_equal_capabilities_are_plain_pooling(graded):
    rewards = random_rewards(2, 3, 30, 4, graded=graded)
    plain = capability_aware_advantages(rewards, f64([0.1, 0.5, 0.9]), baseline="pooled")
    torch.testing.assert_close(capability_aware_advantages(rewards, f64([0.37] * 3)), plain, rtol=1e-12, atol=1e-12)
    unequal = capability_aware_advantages(rewards, f64([0.1, 0.5, 0.9]))
    assert not torch.allclose(unequal, plain, atol=1e-3)
    for k in range(1, 3):  # pooling has the same baseline for every learner
        assert torch.equal(plain[0], plain[k])


@pytest.mark.parametrize("graded", [False, True])
def test_min_variance_with_equal_agents_is_the_capability_baseline(graded):
    rewards = random_rewards(3, 3, 30, 4, graded=graded)
    variances = f64([0.2] * 3)
    one = capability_aware_advantages(rewards, f64([0.37] * 3), baseline="min_variance", reward_variances=variances)
    torch.testing.assert_close(one, capability_aware_advantages(rewards, f64([0.37] * 3)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
def test_permuting_agents_permutes_the_result(baseline):
    rewards = random_rewards(4, 4, 25, 5, graded=True)
    rewards[random_rewards(5, 4, 25, 5, graded=True) < 0.15] = NAN
    capabilities, variances, order = f64([0.2, 0.05, 0.9, 0.5]), f64([0.05, 0.1, 0.2, 0.3]), torch.tensor([2, 0, 3, 1])
    before = capability_aware_advantages(rewards, capabilities, baseline=baseline, reward_variances=variances)
    after = capability_aware_advantages(
        rewards[order], capabilities[order], baseline=baseline, reward_variances=variances[order]
    )
    torch.testing.assert_close(after, before[order][:, order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
def test_prompts_and_responses_may_be_permuted(baseline):
    rewards, capabilities = random_rewards(6, 3, 10, 5), f64([0.2, 0.6, 0.4])
    prompts, responses = torch.randperm(10, generator=torch.manual_seed(0)), torch.tensor([3, 1, 4, 0, 2])
    before = capability_aware_advantages(rewards, capabilities, baseline=baseline)
    after = capability_aware_advantages(rewards[:, prompts][..., responses], capabilities, baseline=baseline)
    torch.testing.assert_close(after, before[:, :, prompts][..., responses], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
def test_scaling_the_rewards_changes_nothing(baseline):
    rewards, capabilities = random_rewards(7, 3, 20, 5), f64([0.2, 0.6, 0.4])
    one = capability_aware_advantages(rewards, capabilities, baseline=baseline, epsilon=0.0)
    three = capability_aware_advantages(3 * rewards, capabilities, baseline=baseline, epsilon=0.0, max_reward=3.0)
    torch.testing.assert_close(three, one, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", BASELINES)
def test_an_unscorable_response_is_as_if_it_were_not_there(baseline):
    capabilities, variances = f64([0.2, 0.6]), f64([0.1, 0.2])
    rewards = random_rewards(8, 2, 20, 5, graded=True)
    rewards[:, :, 3] = NAN
    padded = capability_aware_advantages(rewards, capabilities, baseline=baseline, reward_variances=variances)
    kept = [0, 1, 2, 4]
    bare = capability_aware_advantages(rewards[..., kept], capabilities, baseline=baseline, reward_variances=variances)
    torch.testing.assert_close(padded[..., kept], bare, rtol=1e-12, atol=1e-12)
    assert (padded[..., 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_are_always_finite(baseline, dtype):
    rng = random.Random(9)
    for _ in range(100):
        rewards, _, _, max_reward = random_case(rng, 4, rng.random() < 0.5, True)
        capabilities = [rng.choice([NAN, INF, -INF, -1.0, 0.0, 1e-8, 0.5, 1.0, 3.0, 1e8]) for _ in range(4)]
        given = f64([rng.choice([NAN, 0.0, 0.2, 1e9]) for _ in range(4)])
        for variances in (None, given):
            actual = capability_aware_advantages(
                torch.tensor(rewards, dtype=dtype),
                f64(capabilities),
                baseline=baseline,
                max_reward=max_reward,
                reward_variances=variances,
            )
            assert torch.isfinite(actual).all()
            assert (actual[:, ~torch.isfinite(torch.tensor(rewards))] == 0).all()


# -- the baseline is unbiased -----------------------------------------------------------------------------------------


def baselines_of(rewards, capabilities, baseline):
    """mu of every learner and prompt, (N, B), solved for in the advantages: mu = r - A (sigma + epsilon)."""
    advantages = capability_aware_advantages(rewards, capabilities, baseline=baseline)
    sigma = rewards.transpose(0, 1).flatten(1).std(-1)
    assert (sigma > 0).all()
    mu = rewards[None] - advantages * (sigma[:, None] + EPS)  # the same for every response of the prompt
    torch.testing.assert_close(mu.amin((1, 3)), mu.amax((1, 3)), rtol=1e-9, atol=1e-9)
    return mu[:, 0, :, 0]


def test_only_the_capability_weights_are_unbiased():
    # Many responses to a prompt, so that no prompt is uninformative and no baseline meets its guard
    rates = f64([0.2, 0.6])
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(2, 1500, 64, dtype=torch.float64, generator=generator)
    rewards = (draws < rates[:, None, None]).double()
    spread = {}
    for baseline in BASELINES:
        mu = baselines_of(rewards, rates, baseline)
        error = (mu.mean(1) - rates).abs() / (mu.std(1) / math.sqrt(mu.shape[1]))  # in standard errors
        if baseline == "pooled":
            assert (error > 40).all()
            assert mu.mean().item() == pytest.approx(0.4, abs=0.01)
        else:
            assert (error < 4).all(), baseline
        spread[baseline] = mu.var(1)
    # the strong learner scales its weak peer's few successes by 3; the other weights are made to hold that down
    # variances of mu times G: paper (.24 + 9 * .16) / 4 = .42, own .24, lambda ~ (1/.24, 1/1.44): .2057
    assert (spread["min_variance"] < spread["capability"]).all()
    close(spread["min_variance"][1:] * 64, [0.2057], tolerance=0.03)
    close(spread["capability"][1:] * 64, [0.42], tolerance=0.06)
    close(spread["own"][1:] * 64, [0.24], tolerance=0.04)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(agents, prompts, generations\), got \(2, 3\)"):
        capability_aware_advantages(torch.zeros(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match=r"each of the 2 agents, got the shape \(3,\)"):
        capability_aware_advantages(torch.zeros(2, 3, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"each of the 2 agents, got the shape \(2, 2\)"):
        capability_aware_advantages(torch.zeros(2, 3, 4), torch.ones(2, 2))


def test_baseline_is_checked():
    with pytest.raises(ValueError, match="baseline='mean' is unknown; use one of capability, pooled, min_variance"):
        capability_aware_advantages(torch.zeros(2, 3, 4), torch.ones(2), baseline="mean")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "update_index=-1 must be at least 0"),
        ((0, -0.1), r"delta=-0.1 must lie in \[0, 1\]"),
        ((0, 1.1), r"delta=1.1 must lie in \[0, 1\]"),
        ((0, NAN), "delta=nan"),
        ((0, 0.2, -0.025), "delta_step=-0.025 must not be negative"),
    ],
)
def test_clip_range_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        peer_clip_lower(*arguments)


def test_objective_checks_its_clip_range():
    one = f64([1.0])
    with pytest.raises(ValueError, match="update_index=-2"):
        hacpo_objective(one, one, torch.tensor([False]), one, -2)
    with pytest.raises(ValueError, match="delta=2"):
        hacpo_objective(one, one, torch.tensor([False]), one, 0, delta=2.0)


# -- sequence ratio ---------------------------------------------------------------------------------------------------


def test_log_ratio_by_hand():
    # row 0: mean (-1, -3) = -2, source -2.5: .5; row 1: mean (-1, -2, -6) = -3, source -2: -1
    logps = f64([[-1, -3, 0], [-1, -2, -6]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    for kind in (torch.long, torch.bool, torch.float64):
        close(sequence_log_ratio(logps, mask.to(kind), f64([-2.5, -2.0])), [0.5, -1.0])


def test_log_ratio_with_the_learners_length_for_both():
    # sums over the learner's 2 tokens: ((-1 - 3) - (-6)) / 2 = 1, whatever number of tokens the source had
    close(sequence_log_ratio(f64([[-1, -3, 0]]), torch.tensor([[1, 1, 0]]), f64([-6 / 2])), [1.0])


def test_log_ratio_is_clamped_and_then_without_gradient():
    logps = f64([[-1.0, -1.0], [-1.0, -1.0], [-30.0, -30.0], [-1.0, -1.0]], requires_grad=True)
    mask, source = torch.ones(4, 2), f64([-21.0, -11.0, -1.0, -10.9])
    value = sequence_log_ratio(logps, mask, source)
    close(value.detach(), [10.0, 10.0, -10.0, 9.9])
    value.sum().backward()
    assert torch.equal(logps.grad[[0, 2]], torch.zeros(2, 2, dtype=torch.float64))
    close(logps.grad[3], [0.5, 0.5])
    close(sequence_log_ratio(logps.detach(), mask, source, max_abs=2.0), [2.0, 2.0, -2.0, 2.0])


def test_log_ratio_gradient_is_one_over_the_length():
    logps = f64([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]], requires_grad=True)
    sequence_log_ratio(logps, torch.tensor([[1, 1, 1], [0, 1, 0]]), f64([0.0, 0.0])).sum().backward()
    close(logps.grad, [[1 / 3, 1 / 3, 1 / 3], [0, 1, 0]])


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_log_ratio_ignores_what_is_masked(junk):
    logps = f64([[-1.0, junk, -3.0, junk]], requires_grad=True)
    value = sequence_log_ratio(logps, torch.tensor([[1, 0, 1, 0]]), f64([-2.5]))
    close(value.detach(), [0.5])
    value.exp().sum().backward()
    close(logps.grad, [[math.exp(0.5) / 2, 0, math.exp(0.5) / 2, 0]])


def test_log_ratio_hides_nothing_inside_the_mask():
    # a broken log-probability of a real token must show, and an impossible token is as far off as can be
    value = sequence_log_ratio(f64([[-1.0, NAN], [-1.0, -INF]]), torch.ones(2, 2), f64([-1.0, -1.0]))
    torch.testing.assert_close(value, f64([NAN, -10.0]), equal_nan=True)


@pytest.mark.parametrize("junk", [NAN, -1.0])
def test_log_ratio_of_a_row_without_a_token(junk):
    logps = f64([[junk, junk], [-1.0, -1.0]], requires_grad=True)
    value = sequence_log_ratio(logps, torch.tensor([[0, 0], [1, 1]]), f64([-0.5, -1.0]))
    close(value.detach(), [0.5, 0.0])
    value.sum().backward()
    close(logps.grad, [[0, 0], [0.5, 0.5]])
    empty = sequence_log_ratio(torch.zeros(2, 0), torch.zeros(2, 0), torch.tensor([0.0, -3.0]))
    assert empty.tolist() == [0.0, 3.0]


def test_log_ratio_matches_the_loops():
    rng = random.Random(12)
    for _ in range(100):
        rows, tokens = rng.randint(1, 5), rng.randint(1, 9)
        logps = [[-rng.expovariate(1) * rng.choice([1, 20]) for _ in range(tokens)] for _ in range(rows)]
        mask = [[rng.random() < 0.7 for _ in range(tokens)] for _ in range(rows)]
        source = [-rng.expovariate(1) for _ in range(rows)]
        expected = [ref_log_ratio(*row) for row in zip(logps, mask, source, strict=True)]
        leaf = f64(logps, requires_grad=True)
        value = sequence_log_ratio(leaf, torch.tensor(mask), f64(source))
        close(value.detach(), [e[0] for e in expected])
        value.sum().backward()
        slope = [[m / e[1] if e[1] else 0.0 for m in row] for row, e in zip(mask, expected, strict=True)]
        close(leaf.grad, slope)


# -- clip range of peers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "lower"),
    [
        ((0,), 0.8),
        ((1,), 0.825),
        ((3,), 0.875),
        ((8,), 1.0),  # .8 + 8 * .025
        ((9,), 1.0),
        ((10**9,), 1.0),
        ((0, 0.6), 0.4),
        ((4, 0.6, 0.1), 0.8),
        ((5, 0.3, 0.0), 0.7),
        ((0, 1.0), 0.0),
        ((0, 0.0), 1.0),
    ],
)
def test_peer_clip_lower_by_hand(arguments, lower):
    assert peer_clip_lower(*arguments) == pytest.approx(lower, abs=1e-12)
    assert peer_clip_lower(*arguments) <= 1.0


def test_peer_clip_lower_matches_the_reference():
    rng = random.Random(13)
    for _ in range(200):
        m, delta, step = rng.randint(0, 30), rng.random(), rng.random() * 0.1
        assert peer_clip_lower(m, delta, step) == pytest.approx(ref_lower(m, delta, step), abs=1e-12)


# -- objective --------------------------------------------------------------------------------------------------------


def objective_and_slope(ratio, advantage, own, coefficient=1.0, update_index=0, **kwargs):
    """J and dJ/ds of rows that are all own or all peers'."""
    ratio = f64(ratio, requires_grad=True)
    rows = ratio.shape
    value = hacpo_objective(
        ratio,
        f64(advantage).expand(rows),
        torch.full(rows, own),
        f64(coefficient).expand(rows),
        update_index,
        **kwargs,
    )
    assert value.shape == rows
    value.sum().backward()
    return value.detach(), ratio.grad


def test_own_objective_is_pessimistic():
    # eps (.1, .2): above with A > 0 is held at 1.2, above with A < 0 is not, below with A > 0 is not,
    # below with A < 0 is held at .9, inside never
    value, slope = objective_and_slope(
        [1.5, 1.5, 0.5, 0.5, 1.1, 1.1], [2, -2, 2, -2, 2, -2], True, epsilon_low=0.1, epsilon_high=0.2
    )
    close(value, [2.4, -3.0, 1.0, -1.8, 2.2, -2.2])
    close(slope, [0, -2, 2, 0, 2, -2])
    assert slope[0] == 0 and slope[3] == 0


def test_own_objective_has_gspos_narrow_range_by_default():
    # [.9997, 1.0004]: 1.00035 is inside though 1 - .00035 is not
    value, slope = objective_and_slope([1.00035, 1.00045, 0.99975, 0.99965], [1, 1, -1, -1], True)
    close(value, [1.00035, 1.0004, -0.99975, -0.9997])
    close(slope, [1, 0, -1, 0])


@pytest.mark.parametrize("m", [0, 5, 100])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_own_objective_knows_no_peer_term(m, alpha):
    value, slope = objective_and_slope([0.5, 1.0, 1.5], [1, 1, -1], True, 7.0, m, alpha=alpha)
    close(value, [0.5, 1.0, -1.5])
    close(slope, [1, 1, -1])


def test_own_objective_ignores_any_coefficient():
    ratio = f64([1.0, 0.9], requires_grad=True)
    own = torch.tensor([True, False])
    value = hacpo_objective(ratio, f64([2.0, 1.0]), own, f64([NAN, 1.0]), 0)
    close(value.detach(), [2.0, 0.81])
    value.sum().backward()
    close(ratio.grad, [2.0, 0.9])


def test_peer_objective_by_hand():
    # inside: .9 * .9 * c A with c = .5, A = 2: .81; slope .9 * 1 = .9 and not 2 * .9
    # below [.8, 1]: held at .8: .8 * .8 = .64; above: held at 1: 1
    value, slope = objective_and_slope([0.9, 0.5, 1.3], [2.0] * 3, False, 0.5)
    close(value, [0.81, 0.64, 1.0])
    close(slope, [0.9, 0, 0])
    assert slope[1] == 0 and slope[2] == 0
    # a negative advantage is clipped on the same two sides: there is no pessimistic minimum
    value, slope = objective_and_slope([0.9, 0.5, 1.3], [-2.0] * 3, False, 0.5)
    close(value, [-0.81, -0.64, -1.0])
    close(slope, [-0.9, 0, 0])


def test_peer_objective_scales_with_the_coefficient():
    # c = P_j / P_k = 3 for a peer three times as strong: three times as loud
    value, slope = objective_and_slope([0.9, 0.9], [1.0, 1.0], False, [3.0, 0.25])
    close(value, [2.43, 0.2025])
    close(slope, [2.7, 0.225])


@pytest.mark.parametrize(("alpha", "factor"), [(0.0, 1.0), (0.5, 0.9**0.5), (1.0, 0.9), (2.0, 0.81), (3.0, 0.729)])
def test_power_scales_without_being_differentiated(alpha, factor):
    value, slope = objective_and_slope([0.9], [2.0], False, 0.5, alpha=alpha)
    close(value, [0.9 * factor])
    close(slope, [factor])


def test_power_comes_after_the_clip():
    # s = .7, lower .8, alpha 2: .8^3 = .512; a power before the clip would give clip(.343) = .8
    # s = .95: .95^3 = .857375 inside; with the power first alpha = 4 would fall out of the range and lose its gradient
    value, slope = objective_and_slope([0.7, 0.95], [1.0, 1.0], False, alpha=2.0)
    close(value, [0.512, 0.857375])
    close(slope, [0, 0.9025])
    _, slope = objective_and_slope([0.95], [1.0], False, alpha=4.0)
    close(slope, [0.95**4])


def test_clip_range_narrows_with_the_updates():
    # lower ends .8, .85, .9, .95: s = .88 is inside for m = 0, 2 only
    for m, lower in ((0, None), (2, None), (4, 0.9), (6, 0.95)):
        value, slope = objective_and_slope([0.88], [1.0], False, 1.0, m)
        close(value, [0.88**2 if lower is None else lower**2])
        close(slope, [0.88 if lower is None else 0.0])
    # without tightening it never does
    value, slope = objective_and_slope([0.88], [1.0], False, 1.0, 6, delta_step=0.0)
    close(slope, [0.88])
    # a wider start and steps of .1: .4 + 2 * .1 = .6
    value, slope = objective_and_slope([0.55, 0.65], [1.0] * 2, False, 1.0, 2, delta=0.6, delta_step=0.1, alpha=0.0)
    close(value, [0.6, 0.65])
    close(slope, [0.0, 1.0])


@pytest.mark.parametrize("m", [8, 9, 1000])
def test_range_of_late_updates_is_a_point(m):
    value, slope = objective_and_slope([0.5, 0.999, 1.001, 2.0], [1.0, -1.0, 1.0, -1.0], False, 0.5, m)
    close(value, [0.5, -0.5, 0.5, -0.5])
    assert torch.equal(slope, torch.zeros(4, dtype=torch.float64))


def test_without_delta_nothing_is_clipped():
    # s^(1 + alpha) c A with alpha 1: 1.69 * .5, .01 * .5
    for m in (0, 100):
        value, slope = objective_and_slope([1.3, 0.1], [1.0, 1.0], False, 0.5, m, delta=None)
        close(value, [0.845, 0.005])
        close(slope, [0.65, 0.05])


def test_ends_of_the_range_belong_to_it():
    # s = 1 is a response that learner and source find equally likely: it must have a gradient
    _, slope = objective_and_slope([1.0], [2.0], False, 0.5)
    close(slope, [1.0])
    _, slope = objective_and_slope([0.5], [2.0], False, 0.5, delta=0.5)
    close(slope, [0.5])


def test_objective_matches_the_loops():
    rng = random.Random(14)
    outside = 0
    for _ in range(200):
        rows = rng.randint(1, 12)
        s = [math.exp(rng.gauss(0, rng.choice([3e-4, 0.2]))) for _ in range(rows)]
        a = [rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)]) for _ in range(rows)]
        own = [rng.random() < 0.4 for _ in range(rows)]
        c = [math.exp(rng.uniform(-2.3, 2.3)) for _ in range(rows)]
        m, delta = rng.randint(0, 10), rng.choice([None, 0.2, rng.random()])
        step, alpha = rng.choice([0.0, 0.025, 0.1]), rng.choice([0.0, 0.5, 1.0, 3.0])
        low, high = rng.choice([(3e-4, 4e-4), (0.1, 0.2)])
        lower = None if delta is None else ref_lower(m, delta, step)
        expected = [
            ref_own(s[i], a[i], low, high) if own[i] else ref_peer(s[i], a[i], c[i], lower, alpha) for i in range(rows)
        ]
        leaf = f64(s, requires_grad=True)
        value = hacpo_objective(
            leaf,
            f64(a),
            torch.tensor(own),
            f64(c),
            m,
            epsilon_low=low,
            epsilon_high=high,
            delta=delta,
            delta_step=step,
            alpha=alpha,
        )
        value.sum().backward()
        close(value.detach(), [e[0] for e in expected])
        close(leaf.grad, [e[1] for e in expected])
        for i in range(rows):
            if not own[i] and lower is not None and not lower <= s[i] <= 1:
                assert leaf.grad[i] == 0
                outside += 1
    assert outside > 200


def test_gradient_through_to_the_token_log_probabilities():
    # one loss of own and peers' rows against the chain rule: dL/dlogp_t = -(1 / R) dJ/ds s / |y|
    rng = random.Random(15)
    for _ in range(50):
        rows, tokens = 6, 5
        logps = [[-rng.random() for _ in range(tokens)] for _ in range(rows)]
        mask = [[t == 0 or rng.random() < 0.7 for t in range(tokens)] for _ in range(rows)]
        logps = [[x if m else NAN for x, m in zip(*row, strict=True)] for row in zip(logps, mask, strict=True)]
        lengths = [sum(row) for row in mask]
        means = [sum(x for x in row if x == x) / n for row, n in zip(logps, lengths, strict=True)]
        source = [mean - rng.choice([rng.gauss(-0.05, 0.1), rng.gauss(0, 2e-4)]) for mean in means]
        a, c = [rng.gauss(0, 1) for _ in range(rows)], [rng.uniform(0.1, 10) for _ in range(rows)]
        own, m = [i < 2 for i in range(rows)], rng.randint(0, 3)
        expected = []
        for i in range(rows):
            s = math.exp(ref_log_ratio(logps[i], mask[i], source[i])[0])
            slope = ref_own(s, a[i])[1] if own[i] else ref_peer(s, a[i], c[i], ref_lower(m))[1]
            expected.append([-slope * s / lengths[i] / rows if keep else 0.0 for keep in mask[i]])
        leaf = f64(logps, requires_grad=True)
        ratio = sequence_log_ratio(leaf, torch.tensor(mask), f64(source)).exp()
        (-hacpo_objective(ratio, f64(a), torch.tensor(own), f64(c), m).mean()).backward()
        close(leaf.grad, expected)


def test_no_advantage_means_no_gradient():
    for own in (True, False):
        value, slope = objective_and_slope([0.9, 1.0, 1.1], [0.0] * 3, own)
        assert torch.equal(value, torch.zeros(3, dtype=torch.float64))
        assert torch.equal(slope, torch.zeros(3, dtype=torch.float64))


def test_objective_with_a_single_agent_is_gspo():
    ratio = 1 + 1e-3 * torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    actual = hacpo_objective(ratio, advantages, torch.ones(50, dtype=torch.bool), torch.ones(50), 3)
    torch.testing.assert_close(actual, expected)


# -- KL ---------------------------------------------------------------------------------------------------------------


def test_k3_by_hand():
    # d = ref - policy = (ln 2, -ln 2): k3 = 2 - ln 2 - 1 = .3068528 and .5 + ln 2 - 1 = .1931472, mean .25
    two = math.log(2)
    logps, reference = f64([[-2.0, -1.0]]), f64([[-2.0 + two, -1.0 - two]])
    close(k3_divergence(logps, reference, torch.ones(1, 2)), [0.25])
    close(k3_divergence(logps, reference, torch.tensor([[1, 0]])), [1 - two])
    close(k3_divergence(logps, reference, torch.tensor([[False, True]])), [two - 0.5])
    close(k3_divergence(logps, logps, torch.ones(1, 2)), [0.0])


def test_k3_gradient():
    # d k3 / d log pi = 1 - exp(d): 1 - 2 = -1 and 1 - .5 = .5, over two tokens
    two = math.log(2)
    logps = f64([[-2.0, -1.0]], requires_grad=True)
    k3_divergence(logps, f64([[-2.0 + two, -1.0 - two]]), torch.ones(1, 2)).sum().backward()
    close(logps.grad, [[-0.5, 0.25]])


@pytest.mark.parametrize("junk", [(NAN, -1.0), (-1.0, NAN), (NAN, NAN), (-INF, -INF), (-1e30, 0.0), (INF, -INF)])
def test_k3_ignores_what_is_masked(junk):
    two = math.log(2)
    logps = f64([[-2.0, junk[0]], [junk[0], junk[0]]], requires_grad=True)
    reference = f64([[-2.0 + two, junk[1]], [junk[1], junk[1]]], requires_grad=True)
    value = k3_divergence(logps, reference, torch.tensor([[1, 0], [0, 0]]))
    close(value.detach(), [1 - two, 0.0])
    value.sum().backward()
    close(logps.grad, [[-1, 0], [0, 0]])
    close(reference.grad, [[1, 0], [0, 0]])


def test_k3_matches_the_loops_and_is_never_negative():
    rng = random.Random(16)
    policy = [[-rng.expovariate(1) for _ in range(6)] for _ in range(40)]
    reference = [[-rng.expovariate(1) for _ in range(6)] for _ in range(40)]
    mask = [[rng.random() < 0.6 for _ in range(6)] for _ in range(40)]
    expected = []
    for row in range(40):
        terms = [
            math.exp(reference[row][t] - policy[row][t]) - (reference[row][t] - policy[row][t]) - 1.0
            for t in range(6)
            if mask[row][t]
        ]
        expected.append(sum(terms) / len(terms) if terms else 0.0)
    actual = k3_divergence(f64(policy), f64(reference), torch.tensor(mask))
    close(actual, expected)
    assert (actual >= 0).all()
    assert k3_divergence(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [0.0, 0.0]
