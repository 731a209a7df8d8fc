"""Saving, loading and exact resuming of a whole team."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from support.tiny_teams import all_weights, config, dataset, digit_reward, team, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback

NAMES = ["char", "bpe"]
RUN = {
    "max_rounds": 5,
    "save_strategy": "steps",
    "save_steps": 4,
    "beta": 0.1,
    "peer_clip_delta": 0.9,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
}


def run(folders, output_dir, resume=None, names=NAMES, rows=6, **changes):
    trainer = team(folders, names, config(output_dir, **{**RUN, **changes}), train_dataset=dataset(rows))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def whole_run(agent_folders, tmp_path_factory):
    """An uninterrupted run of 5 rounds of 2 prompts, and 3 rounds an epoch."""
    output_dir = tmp_path_factory.mktemp("whole")
    return run(agent_folders, output_dir), output_dir


def test_a_resumed_run_ends_at_the_same_bits(agent_folders, whole_run, tmp_path):
    whole, output_dir = whole_run
    checkpoints = sorted(p for p in os.listdir(output_dir) if p.startswith("checkpoint-"))
    assert checkpoints == ["checkpoint-12", "checkpoint-16", "checkpoint-20", "checkpoint-4", "checkpoint-8"]
    assert whole.state.epoch > 1
    for checkpoint in ("checkpoint-4", "checkpoint-12"):  # in the first epoch and behind its end
        resumed = run(agent_folders, tmp_path / checkpoint, resume=str(output_dir / checkpoint))
        for a, b in zip(all_weights(whole), all_weights(resumed), strict=True):
            assert torch.equal(a, b)
        assert resumed.capability.state_dict() == whole.capability.state_dict()
        old = {k: v for k, v in whole.state.log_history[-2].items() if "time" not in k and "runtime" not in k}
        new = {k: v for k, v in resumed.state.log_history[-2].items() if "time" not in k and "runtime" not in k}
        assert old == new
        assert [a.state.global_step for a in resumed.agents] == [20, 20]


@pytest.mark.parametrize("method", ["graft", "sapo"])
def test_a_resumed_run_of_a_method_that_draws_ends_at_the_same_bits(agent_folders, tmp_path, method):
    changes = {"method": method, "num_generations": 2, "max_rounds": 4, "save_steps": 4, "rows": 12}
    whole = run(agent_folders, tmp_path / "whole", **changes)
    (checkpoint,) = (tmp_path / "whole").glob("checkpoint-4")
    resumed = run(agent_folders, tmp_path / "resumed", resume=str(checkpoint), **changes)
    for a, b in zip(all_weights(whole), all_weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_resuming_at_the_end_of_an_epoch(agent_folders, tmp_path):
    """3 rounds an epoch: the checkpoint behind round 3 is between two epochs."""
    whole = run(agent_folders, tmp_path / "a", save_steps=12, max_rounds=6)
    assert whole.state.epoch == 2
    resumed = run(
        agent_folders, tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-12"), save_steps=12, max_rounds=6
    )
    for a, b in zip(all_weights(whole), all_weights(resumed), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("strategy", "steps"), [("steps", (8, 12, 16)), ("epoch", (12,))])
def test_a_stream_resumes_in_its_second_pass(agent_folders, tmp_path, strategy, steps):
    """3 rounds a pass, in another order each; checkpoints in the first pass, at its end, and in the second one."""

    def run_stream(output_dir, resume=None, **changes):
        prompts = dataset(6).to_iterable_dataset().shuffle(seed=1, buffer_size=6)
        args = config(output_dir, **{**RUN, "save_strategy": strategy, "lr_scheduler_type": "constant", **changes})
        trainer = team(agent_folders, NAMES, args, train_dataset=prompts)
        asked = []
        sample = trainer.sample
        trainer.sample = lambda inputs: (asked.append([row["prompt"] for row in inputs]), sample(inputs))[1]
        trainer.train(resume_from_checkpoint=resume)
        return trainer, asked

    def assert_goes_on(checkpoint, folder):
        resumed, again = run_stream(folder, str(checkpoint))
        assert again == asked[-len(again) :] and resumed.state.global_step == 20
        assert resumed.state.epoch == whole.state.epoch
        for a, b in zip(all_weights(whole), all_weights(resumed), strict=True):
            assert torch.equal(a, b)

    whole, asked = run_stream(tmp_path / "whole")
    assert len(asked) == 5 and len({str(prompts) for prompts in asked}) == 5
    for step in steps:
        assert_goes_on(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / str(step))
    if strategy == "epoch":  # a run that ended within a pass, and goes on
        run_stream(tmp_path / "short", max_rounds=4)
        assert_goes_on(tmp_path / "short" / "checkpoint-16", tmp_path / "longer")


def test_checkpoints_wait_for_the_end_of_the_round(agent_folders, tmp_path):
    run(agent_folders, tmp_path, save_steps=3, max_rounds=3)
    saved = sorted(int(p.split("-")[1]) for p in os.listdir(tmp_path) if p.startswith("checkpoint-"))
    assert saved == [4, 8, 12]  # asked for at 3, 6, 9, 12; a round has 4 updates
    with open(tmp_path / "checkpoint-8" / "hacpo_state.json") as file:
        state = json.load(file)
    assert (state["round"], state["global_step"]) == (2, 8)


def test_stopping_waits_for_the_end_of_the_round(agent_folders, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 5
            return control

    trainer = team(agent_folders, NAMES, config(tmp_path, max_rounds=4), callbacks=[Stop()])
    trainer.train()
    assert [agent.state.global_step for agent in trainer.agents] == [8, 8]


def test_true_takes_the_newest_whole_checkpoint(agent_folders, whole_run, tmp_path):
    whole, output_dir = whole_run
    shutil.copytree(output_dir, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoint-20")
    resumed = run(agent_folders, tmp_path / "copy", resume=True)
    for a, b in zip(all_weights(whole), all_weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_an_interrupted_save_never_looks_whole(agent_folders, tmp_path, monkeypatch):
    trainer = team(agent_folders, NAMES, config(tmp_path, **RUN), train_dataset=dataset(6))
    save, calls = trainer.agents[1]._save_optimizer_and_scheduler, []

    def dies_in_the_second(folder):
        calls.append(folder)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(folder)

    monkeypatch.setattr(trainer.agents[1], "_save_optimizer_and_scheduler", dies_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [p for p in os.listdir(tmp_path) if p.startswith("checkpoint-")] == ["checkpoint-4"]
    unfinished = tmp_path / ".unfinished" / "checkpoint-8"
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        run(agent_folders, tmp_path, resume=str(unfinished))
    whole = run(agent_folders, tmp_path / "whole")
    resumed = run(agent_folders, tmp_path, resume=True)
    for a, b in zip(all_weights(whole), all_weights(resumed), strict=True):
        assert torch.equal(a, b)
    assert not unfinished.exists()


def test_a_checkpoint_of_other_agents_is_refused(agent_folders, whole_run, tmp_path):
    _, output_dir = whole_run
    checkpoint = str(output_dir / "checkpoint-4")
    with pytest.raises(ValueError, match="other agents.*name 'bpe' there, 'mini' here"):
        run(agent_folders, tmp_path, resume=checkpoint, names=["char", "mini"])
    with pytest.raises(ValueError, match="other agents.*2 agents, this team 3"):
        run(agent_folders, tmp_path, resume=checkpoint, names=["char", "bpe", "mini"])
    with pytest.raises(ValueError, match="of a run with method='hacpo', this one has 'naive'. Go on with"):
        run(agent_folders, tmp_path, resume=checkpoint, method="naive")
    with pytest.raises(ValueError, match="4 updates a round, this one has 2"):
        run(agent_folders, tmp_path, resume=checkpoint, rollout_order="merged")
    with pytest.raises(ValueError, match="There is no checkpoint"):
        run(agent_folders, tmp_path / "empty", resume=True)


def test_what_keeps_a_resumed_run_from_being_exact_is_told(agent_folders, whole_run, tmp_path):
    _, output_dir = whole_run
    checkpoint = str(output_dir / "checkpoint-16")
    told = "num_generations: 4 there, 2 here; prompts a round: 2 there, 4 here; .*: 6 there, 8 here; seed: 7 there, 8"
    with pytest.warns(UserWarning, match=f"other settings .{told} here"):
        run(agent_folders, tmp_path / "other", resume=checkpoint, num_generations=2, seed=8, rows=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(agent_folders, tmp_path / "same", resume=checkpoint)


def test_a_checkpoint_without_optimizer_is_refused(agent_folders, tmp_path):
    run(agent_folders, tmp_path, save_only_model=True, max_rounds=1)
    with pytest.raises(ValueError, match="save_only_model"):
        run(agent_folders, tmp_path, resume=True)


def test_old_checkpoints_are_removed(agent_folders, tmp_path):
    run(agent_folders, tmp_path, save_total_limit=2)
    assert sorted(p for p in os.listdir(tmp_path) if p.startswith("checkpoint-")) == ["checkpoint-16", "checkpoint-20"]


def test_the_best_checkpoint_of_all_agents_is_loaded_at_the_end(agent_folders, tmp_path):
    trainer = team(
        agent_folders,
        NAMES,
        config(
            tmp_path,
            **{**RUN, "save_steps": 4},
            eval_strategy="steps",
            eval_steps=4,
            per_device_eval_batch_size=4,
            load_best_model_at_end=True,
        ),
        train_dataset=dataset(6),
        eval_dataset=dataset(4),
    )
    trainer.train()
    rewards = {h["step"]: h["eval_reward"] for h in trainer.state.log_history if "eval_reward" in h}
    best = max(rewards, key=lambda step: (rewards[step], -step))
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    for agent in trainer.agents:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{best}" / agent.agent_name)
        assert torch.equal(weights(saved), weights(agent.model))


def test_the_best_over_several_data_sets_is_loaded_at_the_end(agent_folders, tmp_path):
    """Of .4, .6 and .4, the means of the two sets' rewards; pooled by size they would be .33, .7 and .4."""
    scores = {"a": {4: 0.2, 8: 0.9, 12: 0.4}, "b": {4: 0.6, 8: 0.3, 12: 0.4}}

    def reward(completions, level, trainer_state, **kwargs):
        if level[0] == "train":
            return digit_reward(completions)
        return [scores[level[0]][trainer_state.global_step]] * len(completions)

    trainer = team(
        agent_folders,
        NAMES,
        config(
            tmp_path,
            **{**RUN, "save_steps": 4, "max_rounds": 3},
            eval_strategy="steps",
            eval_steps=4,
            per_device_eval_batch_size=4,
            load_best_model_at_end=True,
        ),
        reward,
        train_dataset=dataset(6, level="train"),
        eval_dataset={"a": dataset(4, level="a"), "b": dataset(2, level="b")},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    history = trainer.state.log_history
    overall = {entry["step"]: entry for entry in history if "eval_reward" in entry}
    assert list(overall) == [4, 8, 12]
    for step, expected in {4: 0.4, 8: 0.6, 12: 0.4}.items():
        assert overall[step]["eval_reward"] == pytest.approx(expected)
        for agent in NAMES:
            assert overall[step][f"eval_{agent}/reward"] == pytest.approx(expected)
        for name in ("a", "b"):
            each = [entry for entry in history if entry["step"] == step and f"eval_{name}_reward" in entry]
            assert len(each) == 1
            for key in (f"eval_{name}_reward", *(f"eval_{name}_{agent}/reward" for agent in NAMES)):
                assert each[0][key] == pytest.approx(scores[name][step])
    assert trainer.state.best_metric == pytest.approx(0.6)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-8")
    for agent in trainer.agents:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8" / agent.agent_name)
        assert torch.equal(weights(saved), weights(agent.model))
    stopper = next(c for c in trainer.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback))
    assert stopper.early_stopping_patience_counter == 1  # it has seen all three


def test_saved_agents_are_ordinary_models(agent_folders, tmp_path):
    trainer = run(agent_folders, tmp_path, max_rounds=1, save_strategy="no")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not load the tokenizer.*")
        trainer.save_model()
        trainer.save_model()  # over the first
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["bpe", "char"]
    for agent in trainer.agents:
        folder = tmp_path / agent.agent_name
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(weights(model), weights(agent.model))
        text = "12 + 345 = ?\n"
        assert AutoTokenizer.from_pretrained(folder)(text) == agent.processing_class(text)


def test_saved_agents_need_nothing_of_this_package(agent_folders, tmp_path):
    trainer = team(agent_folders, NAMES, config(tmp_path))
    trainer.save_model(str(tmp_path / "final"))
    program = (
        "import sys; sys.modules['hacpo_trl'] = None; sys.modules['trl'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "for path in sys.argv[1:]:\n"
        "    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)\n"
        "    ids = tokenizer('1 + 2 = ?', return_tensors='pt')\n"
        "    print(model.generate(**ids, max_new_tokens=4).shape[1] > ids['input_ids'].shape[1])\n"
    )
    paths = [str(tmp_path / "final" / name) for name in NAMES]
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("flag", ["should_training_stop", "should_save", "should_evaluate"])
def test_what_a_callback_wishes_at_a_log_waits_for_the_end_of_the_round(agent_folders, tmp_path, flag):
    class Wish(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            if state.global_step == 5:
                setattr(control, flag, True)
            return control

    settings = config(tmp_path, max_rounds=4, per_device_eval_batch_size=4)
    trainer = team(agent_folders, NAMES, settings, callbacks=[Wish()], eval_dataset=dataset(2))
    trainer.train()
    steps = [agent.state.global_step for agent in trainer.agents]
    assert steps == ([8, 8] if flag == "should_training_stop" else [16, 16])
    saved = [p for p in os.listdir(tmp_path) if p.startswith("checkpoint-")]
    assert saved == (["checkpoint-8"] if flag == "should_save" else [])
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert evaluated == ([8] if flag == "should_evaluate" else [])


def test_a_finished_run_is_not_trained_on(agent_folders, whole_run, tmp_path):
    whole, output_dir = whole_run
    with pytest.warns(UserWarning, match="finished run"):
        resumed = run(agent_folders, tmp_path, resume=str(output_dir / "checkpoint-20"))
    assert resumed.state.global_step == 20
    for a, b in zip(all_weights(whole), all_weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_from_inside_a_round_is_refused(agent_folders, whole_run, tmp_path):
    _, output_dir = whole_run
    shutil.copytree(output_dir / "checkpoint-4", tmp_path / "checkpoint-4")
    path = tmp_path / "checkpoint-4" / "hacpo_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "global_step": 3}))
    with pytest.raises(ValueError, match="inside a round"):
        run(agent_folders, tmp_path, resume=str(tmp_path / "checkpoint-4"))
    with pytest.raises(ValueError, match="does not exist"):
        run(agent_folders, tmp_path, resume=str(tmp_path / "lost"))
