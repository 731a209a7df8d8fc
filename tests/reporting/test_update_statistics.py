"""Tests of the update statistics: hand-worked means, silent responses, micro-batches, draining and reducing."""

import pytest
import torch

from hacpo_trl.methods import Clipped
from hacpo_trl.objective import in_range
from hacpo_trl.reporting.update_statistics import UpdateStatistics

OWN, PEER = (0.9, 1.1), (0.8, 1.0)
EVERY = {"ratio_mean", "ratio_max", "effective_sample_size", "no_gradient"}
ONLY_OWN = {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "entropy", "kl"}
ONLY_PEER = {"below_range", "above_range", "repelling"}


def batch(source, ratio, advantages, learner=0, own_range=OWN, peer_range=PEER, **changes):
    source = torch.tensor(source)
    rows = len(source)
    values = {
        "source": source,
        "ratio": torch.tensor(ratio, dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "kl": None,
        "entropy": torch.zeros(rows, 1),
        "mask": torch.ones(rows, 1, dtype=torch.long),
    }
    is_own = changes.pop("is_own", source == learner)
    values["clipped"] = clipped(values["ratio"], values["advantages"], is_own, own_range, peer_range)
    return {**values, **changes}


def clipped(ratio, advantages, is_own, own_range, peer_range):
    low, high = (torch.where(is_own, a, b) for a, b in zip(own_range, peer_range, strict=True))
    return Clipped(ratio < low, ratio > high, in_range(ratio, advantages, is_own, own_range, peer_range))


def approx(expected):
    return pytest.approx(expected, abs=1e-12)


def test_own_responses_by_hand():
    # five ratios 1.5, .5, 1.5, .5, 1 with advantages +, -, -, +, 0 and the range [.9, 1.1]:
    # the first is held above, the second below; the third and fourth are not held; the last has no advantage
    statistics = UpdateStatistics(2, 0)
    statistics.add(
        **batch(
            [0] * 5,
            [1.5, 0.5, 1.5, 0.5, 1.0],
            [1, -1, -1, 1, 0],
            kl=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]),
            entropy=torch.tensor([[1.0, 3.0], [2.0, 9.0], [1.0, 1.0], [0.0, 9.0], [9.0, 9.0]]),
            mask=torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [0, 0]]),
        )
    )
    own, peer = statistics.drain()
    assert own == approx(
        {
            "ratio_mean": 1.0,  # 5 / 5
            "ratio_max": 1.5,
            "effective_sample_size": 25 / 30,  # 5^2 / (5 * (2.25 + .25 + 2.25 + .25 + 1))
            "clip_ratio/low_mean": 0.2,
            "clip_ratio/high_mean": 0.2,
            "clip_ratio/region_mean": 0.4,
            "entropy": 8 / 6,  # over tokens: (1 + 3 + 2 + 1 + 1 + 0) / 6
            "kl": pytest.approx(0.2, abs=1e-7),  # 1 / 5, in single precision
            "no_gradient": 0.6,
        }
    )
    assert peer == {}


def test_peers_responses_by_hand():
    # range [.8, 1]: .9 works, 1.2 is above, .5 below, .85 has no advantage
    statistics = UpdateStatistics(2, 0)
    statistics.add(**batch([1] * 4, [0.9, 1.2, 0.5, 0.85], [1, -1, 2, 0], kl=torch.ones(4)))
    own, peer = statistics.drain()
    assert own == {}
    assert peer == approx(
        {
            "ratio_mean": 0.8625,  # 3.45 / 4
            "ratio_max": 1.2,
            "effective_sample_size": 11.9025 / 12.89,  # 3.45^2 / (4 * (.81 + 1.44 + .25 + .7225))
            "below_range": 0.25,
            "above_range": 0.25,
            "no_gradient": 0.75,
            "repelling": 0.0,  # the one negative advantage is outside
        }
    )


def test_sources_are_apart():
    statistics = UpdateStatistics(3, 1)
    statistics.add(**batch([2, 1, 0, 2], [0.5, 1.0, 2.0, 0.9], [1, 1, 1, 1], learner=1))
    first, own, last = statistics.drain()
    assert set(own) == EVERY | ONLY_OWN and set(first) == set(last) == EVERY | ONLY_PEER
    assert (first["ratio_mean"], own["ratio_mean"], last["ratio_mean"]) == approx((2.0, 1.0, 0.7))
    assert (first["ratio_max"], own["ratio_max"], last["ratio_max"]) == approx((2.0, 1.0, 0.9))
    assert (first["above_range"], first["below_range"]) == (1.0, 0.0)
    assert (last["above_range"], last["below_range"]) == (0.0, 0.5)
    assert own["kl"] == 0.0


def test_a_peers_response_counts_on_both_sides_whatever_its_advantage():
    statistics = UpdateStatistics(2, 0)
    statistics.add(**batch([1] * 4, [0.5, 0.5, 1.5, 1.5], [1, -1, 1, -1]))
    peer = statistics.drain()[1]
    assert (peer["below_range"], peer["above_range"], peer["no_gradient"]) == (0.5, 0.5, 1.0)


def test_repelling_responses_are_inside_with_a_negative_advantage():
    # inside: .9 and .85 with -1 repel, .95 with 1 does not; outside: .5 and 1.5; one more ran not at all
    statistics = UpdateStatistics(2, 0)
    statistics.add(**batch([1] * 5, [0.9, 0.85, 0.95, 0.5, 1.5], [-1, -1, 1, -1, -1]))
    statistics.add_silent(1, 1)
    assert statistics.drain()[1]["repelling"] == approx(2 / 6)


def test_ends_of_a_range_are_inside():
    statistics = UpdateStatistics(2, 0)
    ranges = {"own_range": (0.875, 1.125), "peer_range": (0.75, 1.0)}
    statistics.add(**batch([0, 0, 1, 1], [0.875, 1.125, 0.75, 1.0], [-1, 1, 1, 1], **ranges))
    own, peer = statistics.drain()
    assert own["clip_ratio/region_mean"] == 0 and own["no_gradient"] == 0
    assert peer["below_range"] == peer["above_range"] == peer["no_gradient"] == 0


def test_own_formula_for_a_peers_response():
    # naive sharing: the own range and its four cases, still reported as a peer's
    statistics = UpdateStatistics(2, 0)
    common = {"is_own": torch.ones(4, dtype=torch.bool)}
    statistics.add(**batch([1] * 4, [1.5, 1.5, 0.5, 1.05], [1, -1, 1, 1], **common))
    peer = statistics.drain()[1]
    assert set(peer) == EVERY | ONLY_PEER
    assert (peer["below_range"], peer["above_range"], peer["no_gradient"]) == (0.25, 0.5, 0.25)
    assert peer["repelling"] == 0.25  # 1.5 with -1: the own formula's minimum does not clip it


def test_unclipped_peers():
    statistics = UpdateStatistics(2, 0)
    statistics.add(**batch([1, 1], [1e-4, 1e4], [1, 1], peer_range=(-1.0, float("inf"))))
    peer = statistics.drain()[1]
    assert peer["below_range"] == peer["above_range"] == peer["no_gradient"] == 0


@pytest.mark.parametrize(
    ("ratios", "size"),
    [
        ([0.7, 0.7, 0.7], 1.0),  # equal weights: all of it
        ([3.0, 1e-9, 1e-9], 1 / 3),  # one response carries all
        ([1.0, 2.0], 0.9),  # 3^2 / (2 * 5)
    ],
)
def test_effective_sample_size(ratios, size):
    statistics = UpdateStatistics(2, 0)
    statistics.add(**batch([1] * len(ratios), ratios, [1] * len(ratios)))
    assert statistics.drain()[1]["effective_sample_size"] == pytest.approx(size, abs=1e-8)


def test_silent_responses():
    # 4 ran, one of them outside the range; 6 more had no advantage: 7 of 10, and no other mean moves
    statistics = UpdateStatistics(3, 0)
    statistics.add(**batch([1] * 4, [0.9, 0.9, 0.9, 0.5], [1, 1, 1, 1]))
    statistics.add_silent(1, 4)
    statistics.add_silent(1, 2)
    statistics.add_silent(2, 5)
    own, peer, silent = statistics.drain()
    assert own == {}
    assert peer["no_gradient"] == approx(0.7)
    assert peer["ratio_mean"] == approx(0.8) and peer["below_range"] == approx(0.25)
    assert peer["repelling"] == 0.0
    assert silent == {"no_gradient": 1.0, "repelling": 0.0}  # nothing ran: there is no ratio to speak of


def test_no_tokens_is_no_division_by_zero():
    statistics = UpdateStatistics(1, 0)
    statistics.add(**batch([0], [1.0], [1], mask=torch.zeros(1, 1), entropy=torch.ones(1, 1)))
    assert statistics.drain()[0]["entropy"] == 0.0


def random_batch(generator, rows):
    return {
        "source": torch.randint(0, 3, (rows,), generator=generator),
        "ratio": torch.randn(rows, generator=generator).mul(0.2).exp(),
        "advantages": torch.randint(-1, 2, (rows,), generator=generator).float(),
        "kl": torch.rand(rows, generator=generator),
        "entropy": torch.rand(rows, 7, generator=generator),
        "mask": torch.randint(0, 2, (rows, 7), generator=generator),
    }


def add(statistics, part):
    is_own = part["source"] == statistics.learner
    statistics.add(**part, clipped=clipped(part["ratio"], part["advantages"], is_own, OWN, PEER))


def same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def test_micro_batches_add_up():
    whole = random_batch(torch.Generator().manual_seed(0), 60)
    big, small = UpdateStatistics(3, 1), UpdateStatistics(3, 1)
    add(big, whole)
    for start, end in ((0, 1), (1, 20), (20, 37), (37, 60)):
        add(small, {name: value[start:end] for name, value in whole.items()})
    expected = big.drain()
    assert all(expected)
    same(small.drain(), expected)


def test_statistics_match_loops():
    data = random_batch(torch.Generator().manual_seed(1), 80)
    statistics = UpdateStatistics(3, 1)
    add(statistics, data)
    result = statistics.drain()
    source, ratio, advantages = (data[name].tolist() for name in ("source", "ratio", "advantages"))
    for j in range(3):
        rows = [i for i in range(80) if source[i] == j]
        s, a = [ratio[i] for i in rows], [advantages[i] for i in rows]
        low, high = OWN if j == 1 else PEER
        below = [x < low and (j != 1 or y < 0) for x, y in zip(s, a, strict=True)]
        above = [x > high and (j != 1 or y > 0) for x, y in zip(s, a, strict=True)]
        idle = [b or c or y == 0 for b, c, y in zip(below, above, a, strict=True)]
        n = len(rows)
        expected = {
            "ratio_mean": sum(s) / n,
            "ratio_max": max(s),
            "effective_sample_size": sum(s) ** 2 / (n * sum(x * x for x in s)),
            "no_gradient": sum(idle) / n,
        }
        if j == 1:
            entropy, mask = data["entropy"].tolist(), data["mask"].tolist()
            tokens = [entropy[i][t] for i in rows for t in range(7) if mask[i][t]]
            expected |= {
                "clip_ratio/low_mean": sum(below) / n,
                "clip_ratio/high_mean": sum(above) / n,
                "clip_ratio/region_mean": (sum(below) + sum(above)) / n,
                "entropy": sum(tokens) / len(tokens),
                "kl": sum(data["kl"][i].item() for i in rows) / n,
            }
        else:
            repelling = [not b and not c and y < 0 for b, c, y in zip(below, above, a, strict=True)]
            expected |= {
                "below_range": sum(below) / n,
                "above_range": sum(above) / n,
                "repelling": sum(repelling) / n,
            }
        assert result[j] == pytest.approx(expected, abs=1e-6)


def test_fillers_do_not_count():
    data = random_batch(torch.Generator().manual_seed(3), 40)
    data["ratio"][::4] = 100.0
    filler = torch.zeros(40, dtype=torch.bool)
    filler[::4] = True
    statistics, without = UpdateStatistics(3, 1), UpdateStatistics(3, 1)
    add(statistics, {**data, "filler": filler})
    add(without, {name: value[~filler] for name, value in data.items()})
    same(statistics.drain(), without.drain())


def test_drain_starts_anew():
    data = random_batch(torch.Generator().manual_seed(2), 30)
    statistics = UpdateStatistics(3, 1)
    add(statistics, {**data, "ratio": data["ratio"] * 50})
    statistics.add_silent(0, 100)
    assert statistics.drain()
    assert statistics.drain() == [{}, {}, {}]
    fresh = UpdateStatistics(3, 1)
    add(statistics, data)
    add(fresh, data)
    same(statistics.drain(), fresh.drain())


def test_reduce_is_called_in_the_same_order_whatever_was_added():
    empty, full = UpdateStatistics(3, 1), UpdateStatistics(3, 1)
    add(full, random_batch(torch.Generator().manual_seed(3), 10))
    calls = {}
    for name, statistics in (("empty", empty), ("full", full), ("again", full)):
        seen = calls[name] = []

        def reduce(tensor, kind, seen=seen):
            seen.append((kind, tuple(tensor.shape)))
            return tensor

        statistics.drain(reduce)
    assert [kind for kind, _ in calls["empty"]] == ["sum", "max"]
    assert calls["empty"] == calls["full"] == calls["again"]


def test_reduce_joins_processes():
    whole = random_batch(torch.Generator().manual_seed(4), 40)
    one, first, second = UpdateStatistics(3, 1), UpdateStatistics(3, 1), UpdateStatistics(3, 1)
    add(one, whole)
    one.add_silent(2, 7)
    add(first, {name: value[:15] for name, value in whole.items()})
    add(second, {name: value[15:] for name, value in whole.items()})
    first.add_silent(2, 3)
    second.add_silent(2, 4)
    others = []
    second.drain(lambda tensor, kind: others.append(tensor.clone()) or tensor)

    def reduce(tensor, kind):
        other = others.pop(0)
        return tensor + other if kind == "sum" else torch.maximum(tensor, other)

    same(first.drain(reduce), one.drain())


def test_no_graph_is_kept():
    statistics = UpdateStatistics(2, 0)
    ratio = torch.tensor([1.0, 0.9], dtype=torch.float64, requires_grad=True)
    statistics.add(**{**batch([0, 1], [1.0, 0.9], [1, 1]), "ratio": ratio * 1.0, "kl": ratio * 2.0})
    assert not statistics.sums.requires_grad and not statistics.ratio_max.requires_grad
