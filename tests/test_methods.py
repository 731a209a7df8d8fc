"""Tests of the methods: hand-worked selections and weights, limits, gradients against loops, short runs of each."""

import dataclasses
import math
from typing import ClassVar

import pytest
import torch
from support.tiny_teams import all_weights, config, team

from hacpo_trl.methods import METHODS, FTis, Gap, Graft, Grpo, Hacpo, Luffy, Method, Pool, Rows, Sapo, Sgt, Xgrpo
from hacpo_trl.methods.base import Counts
from hacpo_trl.objective import group_advantages

PAIR = ["char", "bpe"]
SHARING = [name for name, method in METHODS.items() if method.trains_on_peers]


def pool(rewards, seed=0, **changes):
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    rates = (rewards > 0).double().mean((1, 2))
    return Pool(rewards, rates, generator=torch.Generator().manual_seed(seed), **changes)


def groups(counts, generations=4):
    """(N, B, G) rewards with the given numbers of right responses, the right ones first."""
    return [[[1.0] * c + [0.0] * (generations - c) for c in agent] for agent in counts]


def micro_batch(advantages, own, lengths, seed=0, weights=None, shift=0.3):
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(advantages), max(lengths)
    logps = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    old = logps + shift * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    logps = torch.where(mask.bool(), logps, torch.nan).requires_grad_()
    return Rows(
        logps=logps,
        mask=mask,
        source_logp=torch.where(mask.bool(), old, 0.0).sum(-1) / mask.sum(-1),
        old_logps=torch.where(mask.bool(), old, torch.nan),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.ones(rows, dtype=torch.float64) if weights is None else torch.tensor(weights).double(),
        is_own=torch.tensor(own),
        clip_range=(0.2, 0.28),
    )


def slow_terms(rows, i, objective):
    """(sum over the tokens of a row, tokens), by a loop."""
    length = int(rows.mask[i].sum())
    terms = [
        objective(math.exp(rows.logps[i, t].item() - rows.old_logps[i, t].item()), rows.logps[i, t].item())
        for t in range(length)
    ]
    return sum(terms), length


def ppo(advantage, low=0.2, high=0.28):
    return lambda rho, logp: min(rho * advantage, max(1 - low, min(rho, 1 + high)) * advantage)


# -- GRAFT ------------------------------------------------------------------------------------------------------------


def test_graft_by_hand():
    # C(1 <- 2) = {b1, b2}, C(2 <- 1) = {b4}, m = 1: the first learner takes b2 (3 > 1), the second b4
    found = Graft().signal(pool(groups([(0, 0, 0, 2, 4), (1, 3, 4, 0, 0)])))
    assert found.taken[0, 1].any(-1).tolist() == [False, True, False, False, False]
    assert found.taken[1, 0].any(-1).tolist() == [False, False, False, True, False]
    assert found.taken[0, 0].all(-1).tolist() == [True, False, True, True, True]
    assert found.taken[1, 1].all(-1).tolist() == [True, True, True, False, True]
    assert found.advantages[0, 1, 1].tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-5)
    assert found.advantages[1, 0, 3].tolist() == pytest.approx([0.8660, 0.8660, -0.8660, -0.8660], abs=1e-4)
    weights = Graft().admit(torch.tensor([0.95, 0.80, 0.79, 1.2]), torch.ones(4))
    assert weights.tolist() == pytest.approx([0.95, 0, 0, 1])


def test_graft_takes_all_that_tie_with_the_last():
    found = Graft().select(pool(groups([(0, 0, 0, 2), (1, 1, 3, 0)])))
    assert found[0, 1].tolist() == [False, False, True, False]  # m = 1, the best alone
    found = Graft().select(pool(groups([(0, 0, 0, 2), (2, 2, 1, 0)])))
    assert found[0, 1].tolist() == [True, True, False, False]  # both that the peer solves twice
    assert Graft(balance=False).select(pool(groups([(0, 0, 0, 2), (2, 2, 1, 0)])))[0, 1].tolist() == [True] * 3 + [
        False
    ]


def test_graft_without_candidates_in_one_direction_exchanges_nothing():
    found = Graft().signal(pool(groups([(0, 0), (1, 3)])))
    assert not found.taken[0, 1].any() and not found.taken[1, 0].any()
    own = group_advantages(torch.tensor(groups([(0, 0), (1, 3)])).double())
    assert torch.equal(found.advantages.diagonal().movedim(-1, 0), own)


def test_graft_of_three_gives_a_prompt_to_the_peer_that_solves_it_most():
    found = Graft().select(pool(groups([(0, 2), (1, 0), (3, 0)])))
    assert found[0].any(-1).tolist() == [False, False, True]
    assert found[2, 0].tolist() == [False, True] and not found[1].any()  # the second's pair has no way back
    # equal peers: a draw that depends on the seed, and only on it
    drawn = [
        Graft(balance=False).select(pool(groups([(0,), (2,), (2,)]), seed))[0, :, 0].tolist() for seed in range(20)
    ]
    assert all(sum(picks) == 1 for picks in drawn) and len(set(map(tuple, drawn))) == 2
    again = [
        Graft(balance=False).select(pool(groups([(0,), (2,), (2,)]), seed))[0, :, 0].tolist() for seed in range(20)
    ]
    assert drawn == again


def test_graft_ignores_unscorable_responses():
    rewards = torch.tensor(groups([(0, 0, 1), (1, 3, 0)])).double()
    rewards[0, 0, 0] = torch.nan
    rewards[1, 1] = torch.tensor([1.0, math.nan, math.nan, math.nan])  # one response: no group with both kinds
    found = Graft().signal(pool(rewards))
    assert found.taken[0, 1].any(-1).tolist() == [True, False, False]
    assert torch.isfinite(found.advantages).all()


def test_graft_variants():
    rewards = groups([(0, 2), (1, 0)])
    kept = Graft(pooled=True).signal(pool(rewards))
    assert kept.taken[0, 0, 0].all() and kept.taken[0, 1, 0].all()
    union = group_advantages(torch.tensor([[[0.0] * 4 + [1.0, 0, 0, 0]]]).double())[0, 0]
    assert torch.equal(torch.cat([kept.advantages[0, 0, 0], kept.advantages[0, 1, 0]]), union)
    right = Graft(success_only=True).signal(pool(rewards))
    assert right.taken[0, 1, 0].tolist() == [True, False, False, False]
    assert Graft(gate=False, floor=0.0).admit(torch.tensor([0.1, 2.0]), torch.ones(2)).tolist() == [1, 1]
    assert Graft(floor=math.inf).admit(torch.tensor([0.1, 2.0]), torch.ones(2)).tolist() == [0, 0]


def test_grafts_objective_is_the_loop():
    rows = micro_batch([1.0, -0.5, 2.0, -1.0], [True, True, False, False], [3, 5, 2, 4], weights=[9.0, 9.0, 0.9, 0.85])
    found = Graft().objective(rows)
    for i in range(4):
        total, _ = slow_terms(rows, i, ppo(rows.advantages[i].item()))
        assert found[i].item() == pytest.approx((1.0 if rows.is_own[i] else rows.weights[i].item()) * total)
    found.sum().backward()
    assert torch.isfinite(rows.logps.grad).all() and (rows.logps.grad[rows.mask == 0] == 0).all()
    assert Graft().denominators(Counts(8, 77.0, 3.0, 100)) == (77, 77)


# -- SGT, LUFFY -------------------------------------------------------------------------------------------------------


def test_sgt_draws_one_right_response_where_the_learner_fails():
    rewards = groups([(0, 2, 0, 0), (4, 1, 2, 0), (1, 0, 0, 0)])
    found = Sgt().signal(pool(rewards))
    foreign = found.taken[0, 1:].sum((0, 2)).tolist()
    assert foreign == [1, 0, 1, 0]  # a group that is all right counts, one that nobody solves has nothing to draw
    assert found.taken[0, 0].all()  # the failed group stays, without advantage
    assert (found.advantages[0, 0, 0] == 0).all() and found.advantages[0, 1:][found.taken[0, 1:]].tolist() == [1, 1]
    drawn = torch.stack([Sgt().signal(pool(rewards, seed)).taken[0, 1:, 0] for seed in range(400)]).double().mean(0)
    assert drawn[0].tolist() == pytest.approx([0.2] * 4, abs=0.07) and drawn[1, 0].item() == pytest.approx(
        0.2, abs=0.07
    )


def test_sgts_objective_and_its_two_denominators():
    rows = micro_batch([0.7, 1.0], [True, False], [3, 4], weights=[0.1, 0.1])
    found = Sgt().objective(rows)
    total, length = slow_terms(rows, 0, ppo(0.7))
    assert found[0].item() == pytest.approx(total / length)
    assert found[1].item() == pytest.approx(0.1 * rows.logps[1, :4].mean().item())
    assert Sgt().denominators(Counts(8, 50, 2.0, 100)) == (8, 2)
    assert Sgt(mean_over="rows").denominators(Counts(8, 50, 2.0, 100)) == (8, 8)
    assert Sgt().clipped(rows).inside.tolist()[1] is True


def test_luffy_compares_with_the_union():
    # own (1, 0, 0, 0) and a right foreign one: mean 2 / 5; nobody else solves the second prompt
    found = Luffy().signal(pool(groups([(1, 2), (4, 0)])))
    assert found.advantages[0, 0, 0].tolist() == pytest.approx([0.6, -0.4, -0.4, -0.4])
    assert found.advantages[0, 1, 0][found.taken[0, 1, 0]].tolist() == pytest.approx([0.6])
    assert found.advantages[0, 0, 1].tolist() == [0.5, 0.5, -0.5, -0.5] and not found.taken[0, 1, 1].any()
    scaled = Luffy(scale=True).signal(pool(groups([(1,), (4,)]))).advantages[0, 0, 0]
    assert scaled.tolist() == pytest.approx([0.6 / 0.5477, *[-0.4 / 0.5477] * 3], abs=1e-3)


def test_luffys_shaping_is_the_loop_and_weighs_improbable_tokens_most():
    rows = micro_batch([0.6, -0.4], [False, True], [4, 3])
    found = Luffy().objective(rows)
    shaped, _ = slow_terms(rows, 0, lambda rho, logp: 0.6 * math.exp(logp) / (math.exp(logp) + 0.1))
    plain, _ = slow_terms(rows, 1, lambda rho, logp: -0.4 * rho)
    assert found.tolist() == pytest.approx([shaped, plain])
    found.sum().backward()
    pi = rows.logps.detach()[0].exp()
    assert torch.allclose(rows.logps.grad[0], 0.6 * 0.1 * pi / (pi + 0.1) ** 2)
    assert Luffy().denominators(Counts(8, 50, 2.0, 100)) == (800, 800)


# -- SAPO, F-TIS, XGRPO, gap -----------------------------------------------------------------------------------------


def test_sapo_replaces_a_share_of_the_groups():
    rewards = groups([(1, 2, 0, 4), (2, 0, 4, 3)])
    found = Sapo().signal(pool(rewards))
    assert found.taken[0, 1].any(-1).tolist() == [True, False, False, True]  # the peer's two with unlike rewards
    assert found.taken[0, 0].all(-1).tolist() == [True, True, False, False]  # the own ones with advantage first
    alone = Sapo(peer_share=0).signal(pool(rewards))
    assert alone.taken.any(-1).any(-1).tolist() == [[True, False], [False, True]] and alone.taken[0, 0].all()
    any_group = Sapo(peer_share=1.0, informative_only=False).signal(pool(rewards))
    assert any_group.taken[0, 1].all() and not any_group.taken[0, 0].any()


def test_f_tis_filters_far_failures_and_caps():
    rows = micro_batch([1.0, -1.0, -1.0, 1.0], [False, False, True, False], [2, 2, 2, 2])
    rows.source_logp = rows.logps.detach()[:, :2].mean(-1) - torch.tensor([math.log(0.5)] * 3 + [math.log(3.0)])
    found, clipped = FTis().objective(rows), FTis().clipped(rows)
    assert found.tolist() == pytest.approx([0.5, 0.0, -0.5, 2.0])  # s = .5 < exp(-.17), s = 3 > 2
    assert clipped.inside.tolist() == [True, False, True, True] and clipped.above.tolist() == [False] * 3 + [True]
    found.sum().backward()
    assert torch.allclose(rows.logps.grad, torch.tensor([[0.25] * 2, [0.0] * 2, [-0.25] * 2, [1.0] * 2]).double())


def test_xgrpo_pushes_a_failed_group_down_where_a_peer_succeeds():
    found = Xgrpo().signal(pool(groups([(0, 4), (4, 0)])))
    assert (found.advantages[0, 0, 0] < 0).all() and (found.advantages[0, 0, 1] > 0).all()
    assert not found.taken[0, 1].any()
    lone = pool(groups([(1, 3)]))
    assert torch.allclose(Xgrpo().signal(lone).advantages, Grpo().signal(lone).advantages)


def test_gap_weighs_by_how_much_better_the_peer_is():
    # the first solves 1 and 3 of 4, the second 3 and 3: gaps .5 and 0, and -.5 the other way round
    found, plain = (m.signal(pool(groups([(1, 3), (3, 3)]))) for m in (Gap(), Hacpo(peer_advantages="positive")))
    assert torch.allclose(found.weights[0, 1, 0], 0.5 * plain.weights[0, 1, 0])
    assert (found.advantages[0, 1, 1] == 0).all() and (found.advantages[1, 0] == 0).all()
    assert torch.equal(found.advantages[0, 1, 0], plain.advantages[0, 1, 0])
    assert torch.equal(found.advantages[0, 0], plain.advantages[0, 0])
    squared = Gap(power=2.0).signal(pool(groups([(1, 3), (3, 3)])))
    assert torch.allclose(squared.weights[0, 1, 0], 0.25 * plain.weights[0, 1, 0])
    # two responses of rate .5 more: (3 + 1) / 6 - (1 + 1) / 6
    smooth = Gap(prior=2.0).signal(pool(groups([(1, 3), (3, 3)])))
    assert torch.allclose(smooth.weights[0, 1, 0], plain.weights[0, 1, 0] / 3)


@pytest.mark.parametrize("name", METHODS)
def test_equal_rewards_teach_nothing_but_rescue(name):
    for right in (0, 4):
        found = METHODS[name]().signal(pool(groups([(right,) * 3] * 3)))
        assert (torch.where(found.taken, found.advantages, 0.0) == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_lone_agent_takes_its_own_responses_and_no_more(name):
    lone = pool(groups([(0, 1, 3, 4)]))
    found = METHODS[name]().signal(lone)
    assert found.taken.all() and found.taken.shape == found.advantages.shape == (1, 1, 4, 4)
    expected = group_advantages(lone.rewards, scale=name != "luffy")
    assert torch.allclose(found.advantages[0], expected)


@pytest.mark.parametrize("name", METHODS)
def test_unscorable_responses_have_no_advantage(name):
    rewards = torch.tensor(groups([(0, 2), (3, 0)])).double()
    rewards[:, :, 1] = torch.nan
    found = METHODS[name]().signal(pool(rewards))
    assert torch.isfinite(found.advantages).all() and torch.isfinite(found.weights).all()
    assert (torch.where(found.taken, found.advantages, 0.0)[:, :, :, 1] == 0).all()


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_objectives_are_finite_whatever_stands_outside_of_the_mask(name, dtype):
    rows = micro_batch([1.0, -1.0, 0.5, -0.5], [True, True, False, False], [3, 6, 2, 4])
    logps = rows.logps.detach().to(dtype).requires_grad_()
    rows = dataclasses.replace(rows, logps=logps, old_logps=rows.old_logps.to(dtype))
    method = METHODS[name]()
    method.objective(rows).sum().backward()
    assert torch.isfinite(logps.grad).all() and (logps.grad[rows.mask == 0] == 0).all()
    assert method.clipped(rows).inside.dtype == torch.bool


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_a_method(tmp_path):
    assert config(tmp_path, method="graft", method_settings={"floor": 0.7}).build_method() == Graft(floor=0.7)
    assert config(tmp_path, method="graft", method_settings='{"floor": 0.7}').build_method() == Graft(floor=0.7)
    for settings, words in (
        ({"flor": 0.7}, "it has floor, gate, balance, prompts, success_only, pooled. Did you mean 'floor'?"),
        ({"floor": -1}, "graft: floor=-1 must be in [0, 1); the paper's value is 0.8"),
        ("{floor}", "method_settings is not valid JSON"),
        ({"floor": 7}, "graft: floor=7 must be in [0, 1)"),
        ({"floor": "high"}, "method_settings of 'graft': floor='high' must be a number, e.g. 0.8."),
        ({"gate": "maybe"}, "method_settings of 'graft': gate='maybe' must be true or false, e.g. True."),
        ([1], "must map settings of the method to values"),
    ):
        with pytest.raises(ValueError) as error:
            config(tmp_path, method="graft", method_settings=settings)
        assert words in str(error.value)
    with pytest.raises(ValueError, match="sets 'delta', which is a setting of its own: peer_clip_delta"):
        config(tmp_path, method_settings={"delta": 0.1})
    written = config(tmp_path, method="graft", method_settings={"floor": "0.7", "success_only": "no"}).build_method()
    assert written == Graft(floor=0.7, success_only=False)
    with pytest.raises(ValueError, match=r"method is the class Graft; pass an object: Graft\(\)"):
        config(tmp_path, method=Graft)
    with pytest.raises(ValueError, match="beta=-1 must not be negative"):
        config(tmp_path, beta=-1.0)
    with pytest.raises(ValueError, match="method='graf' is unknown; use one of hacpo, naive"):
        config(tmp_path, method="graf")


@dataclasses.dataclass(frozen=True)
class Cheer(Sgt):
    """A user's own: every right response of a peer, by its likelihood."""

    weight: float = 0.05

    name: ClassVar[str] = "cheer"
    title: ClassVar[str] = "cheering"
    about: ClassVar[str] = "every right answer of a peer was learned by its likelihood."

    def signal(self, pool):
        found = super().signal(pool)
        right = pool.right[None] & ~pool.own
        return found._replace(
            advantages=torch.where(pool.own, found.advantages, right.to(found.advantages)), taken=right | pool.own
        )


def test_an_object_of_ones_own_trains(agent_folders, tmp_path):
    args = config(tmp_path, method=Cheer(weight=0.2))
    assert (args.method, args.build_method()) == ("cheer", Cheer(weight=0.2))
    trainer = team(agent_folders, PAIR, args)
    before = all_weights(trainer)
    trainer.train()
    assert all(not torch.equal(a, b) for a, b in zip(before, all_weights(trainer), strict=True))
    with pytest.raises(ValueError, match="put them into the object"):
        config(tmp_path, method=Cheer(), method_settings={"weight": 0.1})

    class Other(Method):
        name: ClassVar[str] = "cheer"

    with pytest.raises(ValueError, match="method 'cheer' is .*Cheer already"):
        config(tmp_path, method=Other())


# -- runs -------------------------------------------------------------------------------------------------------------


def hard_reward(completions, **kwargs):
    """Some groups fail wholly, others do not: by the text alone."""
    return [float(sum(map(ord, str(c))) % 5 == 0) for c in completions]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_a_team(agent_folders, tmp_path, name):
    args = config(tmp_path, method=name, max_rounds=3, num_generations=4, per_device_train_batch_size=16)
    trainer = team(agent_folders, PAIR, args, hard_reward)
    before = all_weights(trainer)
    trainer.train()
    after = all_weights(trainer)
    assert all(torch.isfinite(w).all() and not torch.equal(w, b) for w, b in zip(after, before, strict=True))
    logs = [entry for entry in trainer.state.log_history if "char/all_wrong" in entry]
    assert len(logs) == 3
    assert all(0 <= entry["char/all_wrong"] <= 1 for entry in logs)
    if METHODS[name].selects:
        assert all(0 <= entry["pair/bpe->char/taken"] < 1 for entry in logs if "pair/bpe->char/taken" in entry)
        assert any(entry.get("pair/bpe->char/taken", 0) > 0 for entry in logs)
    assert ("pair/bpe->char/admitted" in logs[0]) is METHODS[name].views_peers


@pytest.mark.parametrize("changes", [{"method": "naive"}, {"method": "hacpo", "beta": 0.01}])
def test_merged_updates_are_as_many_as_alone_on_all_responses(agent_folders, tmp_path, changes):
    args = config(tmp_path, rollout_order="merged", max_rounds=1, gradient_accumulation_steps=2, **changes)
    assert args.updates_per_round(2) == config(
        tmp_path, method="gspo", gradient_accumulation_steps=2
    ).updates_per_round(2)
    trainer = team(agent_folders, PAIR, args)
    sums = []
    for agent in trainer.agents:
        compute = agent._compute_loss

        def counted(model, inputs, compute=compute, agent=agent):
            sums.append((agent.agent_index, agent._counts[0].rows, len(inputs["advantages"])))
            return compute(model, inputs)

        agent._compute_loss = counted
    trainer.train()
    assert {rows for _, rows, _ in sums} == {2 * 4 * 2}
    assert trainer.state.global_step == args.updates_per_round(2)


@pytest.mark.parametrize(("name", "settings"), [("graft", {"floor": 0.0, "gate": False}), ("sgt", {})])
def test_without_candidates_it_is_grpo(agent_folders, tmp_path, name, settings):
    """All groups have a right response: nothing is exchanged, and the updates are those of GRPO on rows."""

    def reward(completion_ids, **kwargs):  # of tokens: alone, TRL decodes a response without its prompt
        return [1.0 + (sum(ids) % 3 == 0) for ids in completion_ids]

    class RowsGraft(Graft):
        name: ClassVar[str] = "rows_graft"
        counts_tokens: ClassVar[bool] = False

        def objective(self, rows):
            return super().objective(rows) / rows.lengths

        def denominators(self, counts):
            return counts.rows, counts.rows

    method = RowsGraft(**settings) if name == "graft" else name
    options = {
        "max_rounds": 1,
        "max_reward": 2.0,
        "advantage_epsilon": 1e-4,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
    }
    found = []
    for one in (method, "grpo"):
        trainer = team(agent_folders, PAIR, config(tmp_path, method=one, **options), reward)
        trainer.train()
        found.append(all_weights(trainer))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["graft", "sapo", "sgt", "luffy"])
def test_micro_batches_sum_to_the_batch(agent_folders, tmp_path, name):
    found = []
    for size, accumulation in ((16, 1), (4, 4)):
        args = config(
            tmp_path, method=name, max_rounds=1, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation, adam_epsilon=1.0, learning_rate=1.0,
        )  # fmt: skip
        trainer = team(agent_folders, PAIR, args, hard_reward)
        trainer.train()
        found.append(all_weights(trainer))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
