"""What an update runs: micro-batches by tokens, screening of peers, no step without a gradient, a router's loss."""

import random

import pytest
import torch
from support.tiny_teams import all_weights, config, team
from transformers import MixtralConfig, MixtralForCausalLM

from hacpo_trl.objective import in_range, sampler_correction
from hacpo_trl.playground import AgentSpec, build_agent
from hacpo_trl.rollouts import Row, cut_rows, padded_tokens, plan_round

PAIR = ["char", "bpe"]


def rows_of(lengths):
    """Rows with a prompt of 10 tokens, longest first."""
    return [Row(0, torch.ones(10).long(), torch.ones(n).long(), 1.0) for n in sorted(lengths, reverse=True)]


# -- cutting ----------------------------------------------------------------------------------------------------------


def best_peak(rows, count):
    """The smallest possible largest micro-batch, by trying all cuts."""
    if count == 1:
        return padded_tokens(rows)
    return min(max(padded_tokens(rows[:i]), best_peak(rows[i:], count - 1)) for i in range(1, len(rows) - count + 2))


@pytest.mark.parametrize("seed", range(20))
def test_cutting_by_tokens_makes_the_largest_micro_batch_as_small_as_can_be(seed):
    generator = random.Random(seed)
    rows = rows_of([generator.choice([3, 5, 8, 40, 90]) for _ in range(9)])
    count = generator.randint(1, 5)
    batches = cut_rows(rows, count, "tokens")
    assert [row for batch in batches for row in batch] == rows
    assert len(batches) == count and all(batches)
    assert max(map(padded_tokens, batches)) == best_peak(rows, count)


def test_cutting_by_hand():
    rows = rows_of([90, 10, 10, 10, 10, 10])  # padded: 100 tokens a row beside the long one, else 20
    assert [len(batch) for batch in cut_rows(rows, 2, "rows")] == [3, 3]
    for cut in ("tokens", "auto"):
        assert [len(batch) for batch in cut_rows(rows, 2, cut)] == [1, 5]
    even = rows_of([10, 10, 10, 11])
    assert [len(batch) for batch in cut_rows(even, 2, "auto")] == [2, 2]
    assert cut_rows([], 0, "tokens") == []


def test_an_update_without_a_teaching_row_has_no_micro_batch():
    own = [Row(0, torch.ones(1).long(), torch.ones(1).long(), advantage) for advantage in (0.0,) * 4]
    peers = [Row(1, torch.ones(1).long(), torch.ones(1).long(), 1.0) for _ in range(4)]
    options = {"rows_per_step": 2, "steps_per_update": 2, "skip_updates": True}
    updates = [own, peers]
    plan = plan_round(updates, own, **options)
    assert [len(batch) for batch in plan.batches] == [0, 0, 2, 2]
    assert plan.left_out == [{0: 4}, {}]
    # another process has an advantage there: this one runs its own responses for KL, or one that fills the pass
    plan = plan_round(updates, own, **options, agree=lambda counts: [1, 2, 1, 1])
    assert [len(batch) for batch in plan.batches][:2] == [0, 4]
    plan = plan_round(updates, own, **options, own_always=False, agree=lambda counts: [1, 2, 1, 1])
    assert [len(batch) for batch in plan.batches][:2] == [0, 1] and plan.batches[1][0].filler
    assert plan.left_out[0] == {0: 4} and not any(row.filler for row in own)


# -- equations --------------------------------------------------------------------------------------------------------


def test_in_range_by_hand():
    ratio = torch.tensor([0.5, 1.5, 0.5, 1.5, 0.79, 0.8, 1.0, 1.01])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    is_own = torch.arange(8) < 4
    ranges = ((0.9, 1.1), (0.8, 1.0))
    expected = [True, False, False, True, False, True, True, False]
    assert in_range(ratio, advantages, is_own, *ranges).tolist() == expected
    expected[4] = expected[7] = True  # 0.79 and 1.01 are less than 0.02 away
    assert in_range(ratio, advantages, is_own, *ranges, slack=0.02).tolist() == expected


def test_sampler_correction_by_hand():
    logps, sampled = torch.zeros(3), torch.tensor([0.5, -1.0, torch.nan])
    weights = [torch.tensor(x).exp().item() for x in (-0.5, 1.0, 0.0)]
    assert sampler_correction(logps, sampled, "token_truncate").tolist() == pytest.approx(weights)
    assert sampler_correction(logps, sampled, "token_truncate", 0.7, 2.0).tolist() == pytest.approx([0.7, 2.0, 1.0])
    assert sampler_correction(logps, sampled, "token_mask", 0.7, 2.0).tolist() == [0.0, 0.0, 1.0]
    whole = torch.tensor(0.5).exp().item()
    assert sampler_correction(logps, sampled, "sequence_truncate", high=1.2).tolist() == pytest.approx([1.2] * 3)
    assert sampler_correction(logps, sampled, "sequence_mask", high=2.0).tolist() == pytest.approx([whole] * 3)


# -- runs -------------------------------------------------------------------------------------------------------------


def gradients_of(trainer):
    """The gradient of every update of every agent, None where there is none."""
    found = [[] for _ in trainer.agents]
    for agent, mine in zip(trainer.agents, found, strict=True):

        def kept(model, grad_norm=None, agent=agent, mine=mine, norm=agent._get_grad_norm):
            parts = [p.grad.flatten().double() for p in agent.model.parameters() if p.grad is not None]
            mine.append(torch.cat(parts) if parts else None)
            return norm(model, grad_norm)

        agent._get_grad_norm = kept
    return found


@pytest.mark.parametrize(
    ("order", "changes"),
    [
        ("own_first", {}),
        ("own_first", {"skip_idle_updates": False, "peer_clip_delta": 0.01}),
        ("shuffled", {"beta": 0.0}),
        ("shuffled", {"num_iterations": 2, "beta": 0.1, "entropy_coef": 0.01}),
        ("shuffled", {"beta": 0.0, "peer_clip_delta": 0.01, "skip_idle_updates": False}),
    ],
)
def test_screening_leaves_the_gradient_the_loss_and_the_statistics(agent_folders, tmp_path, order, changes):
    runs = []
    for screen in ("off", "on"):
        args = config(
            tmp_path,
            screen_peers=screen,
            rollout_order=order,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            **{"max_rounds": 2, "peer_clip_delta": 0.6, "max_grad_norm": 0.0, **changes},
        )
        trainer = team(agent_folders, PAIR, args)
        gradients = gradients_of(trainer)
        rows = [0]
        backward = trainer.agents[1].training_step

        def counted(*args, backward=backward, agent=trainer.agents[1], rows=rows):
            result = backward(*args)
            rows[0] += len(agent._update[(agent._step - 1) % 2])
            return result

        trainer.agents[1].training_step = counted
        trainer.train()
        told = ("loss", "kl", "entropy", "ratio_mean", "ratio_max", "clip_ratio/region_mean", "skipped_updates")
        kept = [
            {k: v for k, v in entry.items() if k.startswith("pair/") or k.partition("/")[2] in told}
            for entry in trainer.state.log_history
        ]
        runs.append((gradients, kept, rows[0], all_weights(trainer)))
    (plain, logs, rows, weights), (screened, same_logs, fewer_rows, same_weights) = runs
    for mine, others in zip(plain, screened, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert any(g is not None for g in plain[1]) and fewer_rows < rows
    for a, b in zip(weights, same_weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    for a, b in zip(logs, same_logs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert any("below_range" in key for entry in logs for key in entry)
    assert any(entry.get("bpe/loss") for entry in logs)


def unlike(agent):
    """Replaces an agent's sampling by responses of 1 to 60 tokens."""
    draw = random.Random(agent.agent_index)
    digits = [agent.processing_class(str(d), add_special_tokens=False)["input_ids"][-1] for d in range(10)]

    def generate(prompt_ids, *args, **kwargs):
        lengths = [draw.choice((1, 2, 3, 60)) for _ in prompt_ids]
        return [[draw.choice(digits) for _ in range(n)] + [agent.processing_class.eos_token_id] for n in lengths], None

    agent._generate_single_turn = generate


@pytest.mark.parametrize("names", [["char"], PAIR])
def test_micro_batches_by_tokens_train_the_same_weights(agent_folders, tmp_path, names):
    ends, peaks = [], []
    for cut in ("rows", "tokens"):
        args = config(
            tmp_path,
            micro_batches=cut,
            beta=0.1,
            peer_clip_delta=0.9,
            gradient_accumulation_steps=4,
            max_completion_length=64,
        )
        trainer = team(agent_folders, names, args)
        before, sizes = all_weights(trainer), []
        for agent in trainer.agents:
            unlike(agent)
            plan = agent.plan_updates

            def watched(agent=agent, plan=plan, sizes=sizes):
                plan()
                sizes += map(padded_tokens, agent._plan)

            agent.plan_updates = watched
        trainer.train()
        ends.append(all_weights(trainer))
        peaks.append(max(sizes))
    assert peaks[1] < 0.8 * peaks[0]
    for start, a, b in zip(before, *ends, strict=True):
        assert (a - start).abs().max() > 1e-4
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_screening_switches_itself_on(agent_folders, tmp_path):
    args = config(tmp_path, max_rounds=3, peer_clip_delta=0.01, steps_per_generation=2)
    trainer = team(agent_folders, PAIR, args)
    seen = []
    for agent in trainer.agents:
        screens = agent._screens
        agent._screens = lambda update, agent=agent, screens=screens: (
            seen.append((agent._step // 4, agent.outside_share, bool(screens(update)))) or seen[-1][2]
        )
    trainer.train()
    assert not any(on for round_, _, on in seen if round_ == 0), "nothing is measured before the first round"
    shares = [share for round_, share, on in seen if on]
    assert shares and all(share > 1 / 3 for share in shares)


def constant_reward(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize("method", ["hacpo", "gspo"])
def test_without_a_gradient_there_is_no_step(agent_folders, tmp_path, method):
    args = config(tmp_path, method=method, beta=0.1, lr_scheduler_type="linear", adam_epsilon=1e-8, max_rounds=2)
    for skip in (True, False):
        args.skip_idle_updates = skip
        trainer = team(agent_folders, PAIR, args, reward_funcs=constant_reward)
        with torch.no_grad():  # so that the KL divergence has a gradient
            for agent in trainer.agents:
                next(agent.model.parameters()).add_(0.01)
        before = all_weights(trainer)
        trainer.train()
        for agent, old, new in zip(trainer.agents, before, all_weights(trainer), strict=True):
            assert torch.equal(old, new) == skip
            assert agent.state.global_step == args.updates_per_round(2) * 2
            logged = [h for h in trainer.state.log_history if f"{agent.agent_name}/skipped_updates" in h]
            assert {h[f"{agent.agent_name}/skipped_updates"] for h in logged} == {float(skip)}
            rates = [h[f"{agent.agent_name}/learning_rate"] for h in logged]
            assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1], "the schedule goes on"


def test_momentum_moves_nothing_where_nothing_teaches(agent_folders, tmp_path):
    def first_round_only(completions, **kwargs):
        first_round_only.calls += 1
        return [float(i % 2) if first_round_only.calls == 1 else 0.0 for i in range(len(completions))]

    first_round_only.calls = 0
    trainer = team(agent_folders, ["char"], config(tmp_path, beta=0.0, max_rounds=2), reward_funcs=first_round_only)
    seen = []
    step = trainer._end_update
    trainer._end_update = lambda update: seen.append(all_weights(trainer)[0]) or step(update)
    before = all_weights(trainer)[0]
    trainer.train()
    assert not torch.equal(seen[-2], before)
    assert torch.equal(seen[-1], all_weights(trainer)[0]) and torch.equal(seen[-2], seen[-1])


def test_own_responses_without_an_advantage_are_spared_only_without_kl(agent_folders, tmp_path):
    def half(completions, **kwargs):  # the second prompt's group is all right
        return [float(i % 2) if i < 4 else 1.0 for i in range(len(completions))]

    for beta, ran in ((0.0, 4), (0.1, 8)):
        args = config(tmp_path, beta=beta, max_rounds=1, per_device_train_batch_size=8, steps_per_generation=1)
        trainer = team(agent_folders, ["char"], args, reward_funcs=half)
        trainer.train()
        assert sum(map(len, trainer._plan)) == ran


def test_a_routers_loss_sees_every_response(tmp_path):
    _, tokenizer = build_agent(AgentSpec("dense", "llama", "char", hidden_size=32, num_layers=1, num_heads=2))
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    folders = {}
    for name in ("one", "two"):
        folders[name] = str(tmp_path / name)
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    results = []
    for skip in (True, False):
        args = config(
            tmp_path / "out", router_aux_loss_coef=0.1, skip_silent_responses=skip, screen_peers="on", max_rounds=1
        )
        trainer = team(folders, ["one", "two"], args, reward_funcs=constant_reward)
        assert trainer.aux_loss_enabled
        start = all_weights(trainer)
        trainer.train()
        assert sum(map(len, trainer._plan)) == 16, "responses without an advantage, too"
        results.append(all_weights(trainer))
    for old, a, b in zip(start, *results, strict=True):
        assert (a - old).abs().max() > 1e-4 and torch.equal(a, b)
