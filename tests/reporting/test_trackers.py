"""What reaches a tracker: the metrics of all agents, in one run."""

import numbers

import pytest
from support.tiny_teams import config, dataset, team
from transformers import TrainerCallback
from transformers.integrations import integration_utils

NAMES = ["char", "bpe", "mini"]


@pytest.fixture
def runs(monkeypatch):
    """Stands in for TensorBoard's callback: every instance is a run, with what it was sent."""
    opened = []

    class Tracker(TrainerCallback):
        def __init__(self):
            self.folder, self.sent = None, []
            opened.append(self)

        def on_train_begin(self, args, state, control, **kwargs):
            self.folder = args.output_dir

        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.is_world_process_zero:
                self.sent.append((state.global_step, dict(logs)))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
    return opened


def test_all_agents_report_in_one_run(agent_folders, tmp_path, runs):
    args = config(
        tmp_path, report_to="tensorboard", peer_clip_delta=0.9, beta=0.1, logging_steps=6, eval_strategy="steps",
        eval_steps=12, per_device_eval_batch_size=4, log_completions=True,
    )  # fmt: skip
    trainer = team(agent_folders, NAMES, args, eval_dataset={"a": dataset(1), "b": dataset(1)})
    trainer.train()
    assert len(runs) == 1 and runs[0].folder == str(tmp_path)  # the peers have opened none
    steps = [step for step, logs in runs[0].sent if "char/reward" in logs]
    assert steps == [6, 12]  # once a round, not once an agent
    for _, logs in [entry for entry in runs[0].sent if "char/reward" in entry[1]]:
        for name in NAMES:
            for key in ("reward", "capability", "loss", "kl", "entropy", "grad_norm", "learning_rate", "ratio_mean"):
                assert isinstance(logs[f"{name}/{key}"], numbers.Number), (name, key)
            for other in set(NAMES) - {name}:
                assert isinstance(logs[f"pair/{other}->{name}/coefficient"], numbers.Number)
    evaluated = {key for _, logs in runs[0].sent for key in logs if key.startswith("eval_")}
    assert {"eval_reward", "eval_a_reward", "eval_b_reward", "eval_mini/reward", "eval_a_mini/reward"} <= evaluated
    assert [(step, logs) for step, logs in runs[0].sent] == [
        (entry["step"], {key: value for key, value in entry.items() if key != "step"})
        for entry in trainer.state.log_history
    ]  # what a tracker gets is what trainer_state.json keeps
