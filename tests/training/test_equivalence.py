"""What a run must equal: TRL's trainer for one agent, itself under other micro-batches, the equations in a loop."""

import math

import pytest
import torch
from datasets import Dataset
from support.tiny_teams import all_weights, config, dataset, digit_reward, team, weights
from trl import GRPOConfig, GRPOTrainer

import hacpo_trl.training.agent
from hacpo_trl.playground import AgentSpec, build_agent, save_agent


def train_with_trl(folder, args, train_dataset=None, **changes):
    """The same run by GRPOTrainer."""
    names = """output_dir use_cpu bf16 gradient_checkpointing report_to disable_tqdm save_strategy logging_steps
    num_generations per_device_train_batch_size gradient_accumulation_steps steps_per_generation num_iterations
    max_completion_length learning_rate adam_epsilon seed beta epsilon epsilon_high loss_type max_steps
    importance_sampling_level lr_scheduler_type temperature use_bias_correction_kl
    disable_dropout""".split()
    settings = {name: getattr(args, name) for name in names}
    trainer = GRPOTrainer(folder, digit_reward, GRPOConfig(**{**settings, **changes}), train_dataset or dataset())
    trainer.train()
    return weights(trainer.model)


@pytest.mark.parametrize("method", ["hacpo", "naive", "gspo", "grpo"])
@pytest.mark.parametrize(("beta", "corrected"), [(0.0, False), (0.1, False), (0.1, True)])
def test_one_agent_is_trls_trainer(agent_folders, tmp_path, method, beta, corrected):
    args = config(
        tmp_path,
        method=method,
        beta=beta,
        use_bias_correction_kl=corrected,
        advantage_epsilon=1e-4,  # TRL's
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_rounds=-1,
        max_steps=8,
        epsilon=0.2,
        epsilon_high=0.2,
        skip_idle_updates=False,  # TRL's steps are taken without any advantage, too
    )
    trainer = team(agent_folders, ["bpe"], args)
    start = weights(trainer.model)
    trainer.train()
    expected = train_with_trl(agent_folders["bpe"], args)
    assert (weights(trainer.model) - start).abs().max() > 1e-4
    torch.testing.assert_close(weights(trainer.model), expected, atol=1e-5, rtol=0)


def test_one_agent_with_the_papers_clip_range_and_one_update_a_round(agent_folders, tmp_path):
    args = config(
        tmp_path, beta=0.001, advantage_epsilon=1e-4, steps_per_generation=1, max_rounds=4, skip_idle_updates=False
    )
    trainer = team(agent_folders, ["char"], args)
    trainer.train()
    expected = train_with_trl(agent_folders["char"], args, max_steps=4)
    torch.testing.assert_close(weights(trainer.model), expected, atol=1e-5, rtol=0)


DEEP = AgentSpec("deep", "llama", "char", hidden_size=32, num_layers=12, num_heads=2, seed=4)


@pytest.fixture(scope="module")
def folders_of_deep_agents(agent_folders, tmp_path_factory):
    """With a random model of 12 layers, in which rounding adds up."""
    model, tokenizer = build_agent(DEEP)
    return {**agent_folders, "deep": save_agent(model, tokenizer, tmp_path_factory.mktemp("deep") / "deep")}


def mixed_prompts():
    """Prompts of 8 to 60 characters: what stands beside a response in its micro-batch moves its positions."""
    prompts = ["Tell me. " * (1 + i % 6) + f"{i} + {i} =" for i in range(32)]
    return Dataset.from_dict({"prompt": prompts})


def ratios_of_updates(trainer):
    """(update in the round, ratio - 1) of every own response that is run, for the first agent."""
    found, add = [], trainer.statistics.add

    def recorded(**kwargs):
        own = kwargs["source"] == trainer.agent_index
        update = trainer._step % trainer.steps_per_round // trainer.args.gradient_accumulation_steps
        found.extend((update, ratio - 1) for ratio in kwargs["ratio"][own].tolist())
        return add(**kwargs)

    trainer.statistics.add = recorded
    return found


@pytest.mark.parametrize("method", ["hacpo", "gspo"])
@pytest.mark.parametrize("name", ["bpe", "deep"])
def test_in_bf16_the_own_ratio_is_one_at_a_rounds_first_update(folders_of_deep_agents, tmp_path, name, method):
    args = config(
        tmp_path,
        method=method,
        bf16=True,
        beta=0.01,
        advantage_epsilon=1e-4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_rounds=-1,
        max_steps=6,
        learning_rate=1e-4,
        skip_idle_updates=False,
    )
    trainer = team(folders_of_deep_agents, [name], args, train_dataset=mixed_prompts())
    ratios, start = ratios_of_updates(trainer), weights(trainer.model)
    trainer.train()
    name_of_share = f"{name}/clip_ratio/region_mean"
    clipped = [entry[name_of_share] for entry in trainer.state.log_history if name_of_share in entry]
    assert len(clipped) == 6 and clipped[::2] == [0.0] * 3
    if method == "hacpo":
        first = [deviation for update, deviation in ratios if update == 0]
        assert len(first) == 24 and set(first) == {0.0}
        assert any(deviation for update, deviation in ratios if update == 1)
    expected = train_with_trl(folders_of_deep_agents[name], args, train_dataset=mixed_prompts())
    # TRL's micro-batches are padded otherwise: in the later updates rounding decides on what is clipped
    assert (weights(trainer.model) - expected).norm() < 0.3 * (expected - start).norm()


@pytest.mark.parametrize("order", ["own_first", "shuffled"])
def test_micro_batches_sum_to_the_batch(agent_folders, tmp_path, order):
    results = []
    for size, accumulation in [(8, 1), (4, 2), (2, 4)]:
        args = config(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            num_generations=8,
            rollout_order=order,
            beta=0.1,
            peer_clip_delta=None,
        )
        trainer = team(agent_folders, ["char", "bpe"], args)
        trainer.train()
        results.append(all_weights(trainer))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_an_agent_with_other_micro_batches_learns_the_same(agent_folders, tmp_path):
    changed = {"bpe": {"per_device_train_batch_size": 2}}
    results = []
    for overrides in (None, changed):
        trainer = team(
            agent_folders,
            ["char", "bpe"],
            config(tmp_path, gradient_accumulation_steps=2, agent_overrides=overrides, beta=0.1),
        )
        trainer.train()
        results.append(all_weights(trainer))
    assert trainer.agents[1].args.gradient_accumulation_steps == 4
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_leaving_out_silent_responses_changes_nothing(agent_folders, tmp_path):
    results, shares = [], []
    for skip in (True, False):
        args = config(
            tmp_path,
            skip_silent_responses=skip,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            peer_advantages="positive",
            peer_clip_delta=None,
            max_rounds=4,
        )
        trainer = team(agent_folders, ["char", "bpe", "mini"], args)
        trainer.train()
        results.append(all_weights(trainer))
        shares.append([{k: v for k, v in h.items() if k.endswith("no_gradient")} for h in trainer.state.log_history])
        ran = sum(len(batch) for agent in trainer.agents for batch in agent._plan)
        assert (ran < 3 * 24) == skip
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    # the log tells the same, too: what did not run has no gradient, in the update where it would have run
    for skipped, complete in zip(*shares, strict=True):
        assert skipped == pytest.approx(complete)


def test_peers_move_the_weights(agent_folders, tmp_path):
    """With the clip off, the result with sharing is another than without."""
    shared = team(agent_folders, ["char", "bpe"], config(tmp_path, peer_clip_delta=None))
    alone = team(agent_folders, ["char", "bpe"], config(tmp_path, method="gspo"))
    shared.train()
    alone.train()
    for a, b in zip(all_weights(shared), all_weights(alone), strict=True):
        assert (a - b).abs().max() > 1e-4


def plain_logps(model, prompt, completion, temperature=1.0):
    """Log-probabilities of a completion, one sequence at a time, without padding."""
    ids = torch.cat([prompt, completion])[None]
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, completion[:, None])[:, 0]


@pytest.mark.parametrize("length_normalization", ["own", "shared"])
def test_the_update_follows_the_equations(agent_folders, tmp_path, monkeypatch, length_normalization):
    """Gradients of every update of a round against a loop over sequences, scalars and equations."""
    origin = {}  # row -> index of the response

    def remembering(make):
        def wrapped(*args, **kwargs):
            rows = make(*args, **kwargs)
            origin.update({id(row): i for i, row in enumerate(rows)})
            return rows

        return wrapped

    for name in ("own_rows", "peer_rows"):
        monkeypatch.setattr(hacpo_trl.training.agent, name, remembering(getattr(hacpo_trl.training.agent, name)))
    args = config(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        beta=0.2,
        peer_clip_delta=0.9,
        alpha=0.7,
        temperature=0.8,
        max_rounds=1,
        length_normalization=length_normalization,
        skip_idle_updates=False,
        max_grad_norm=0.0,
    )
    trainer = team(agent_folders, ["char", "bpe"], args)
    updates = {0: [], 1: []}
    rewards, texts = [], []

    for agent in trainer.agents:

        def keep_gradient(agent=agent, super_clip=agent._get_grad_norm):
            def wrapped(model, grad_norm=None):
                gradient = torch.cat([p.grad.flatten().double() for p in agent.model.parameters()])
                state = {name: value.clone() for name, value in agent.model.state_dict().items()}
                updates[agent.agent_index].append((gradient, state))
                return super_clip(model, grad_norm)

            return wrapped

        agent._get_grad_norm = keep_gradient()

        def keep_rollout(inputs, agent=agent, sample=agent.sample):
            rollout = sample(inputs)
            rewards.append(rollout.rewards)
            texts.append(rollout)
            return rollout

        agent.sample = keep_rollout
    trainer.train()

    pool = torch.stack(rewards).view(2, -1, 4).tolist()  # (N, B, G)
    rates = [sum(r > 0 for group in agent for r in group) / 8 for agent in pool]
    per_update = 4
    for k, agent in enumerate(trainer.agents):
        reference_model = agent.ref_model
        assert len(updates[k]) == 4
        flat_plan = [[row for batch in agent._plan[2 * m : 2 * m + 2] for row in batch] for m in range(4)]
        for m, (gradient, state) in enumerate(updates[k]):
            model = agent.model
            model.load_state_dict(state)
            model.zero_grad()
            for row in flat_plan[m]:
                j = row.source
                index = origin[id(row)]
                text = texts[j].texts[index]
                ids = agent._tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += [agent._tokenizer.eos_token_id] * texts[j].finished[index]
                if j != k:
                    assert row.completion_ids.tolist() == ids[:10]
                assert torch.equal(row.prompt_ids, texts[k].prompt_ids[index])
                b = index // 4
                ratio_kj = [min(10.0, max(0.1, max(rates[k], 1e-8) / max(rates[i], 1e-8))) for i in range(2)]
                everything = [r for i in range(2) for r in pool[i][b]]
                mean = sum(everything) / 8
                spread = math.sqrt(sum((r - mean) ** 2 for r in everything) / 7)
                baseline = sum(ratio_kj[i] * r for i in range(2) for r in pool[i][b]) / 8
                if baseline > 1:
                    baseline = sum(pool[k][b]) / 4
                advantage = (pool[j][b][index % 4] - baseline) / (spread + 1e-6)
                if max(everything) == min(everything):
                    advantage = 0.0

                logps = plain_logps(model, row.prompt_ids, row.completion_ids, 0.8)
                tokens = len(texts[j].completion_ids[index])
                divisor = len(ids) if length_normalization == "shared" and j != k else tokens
                s = torch.exp(logps.mean() - texts[j].logp_sums[index] / divisor)
                if j == k:
                    term = torch.min(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
                    with torch.no_grad():
                        reference = plain_logps(reference_model, row.prompt_ids, row.completion_ids, 0.8)
                    difference = reference - logps
                    term = term - 0.2 * (torch.exp(difference) - difference - 1).mean()
                else:
                    lower = min(1.0, 1 - 0.9 + m * 0.025)
                    clipped = s.clamp(lower, 1.0)
                    term = clipped * clipped.detach() ** 0.7 / ratio_kj[j] * advantage
                (-term / per_update).backward()
            expected = torch.cat([p.grad.flatten().double() for p in model.parameters()])
            torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=1e-3)
    assert any(row.source != 0 and row.advantage for batch in trainer._plan for row in batch)
