"""The tables of what the agents wrote."""

import os
import re
import sys
import types

import pandas
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from support.tiny_teams import CHAT_TEMPLATE, config, dataset, digit_reward, team
from transformers import AutoTokenizer

from hacpo_trl import math_reward
from hacpo_trl.reporting.run_page import completion_tables

PAIR = ["char", "bpe"]


def length_reward(completions, **kwargs):
    """None for long responses: they are not scored by this function."""
    return [len(c) / 10 if len(c) < 8 else None for c in completions]


def tables(folder):
    return {number: pandas.read_parquet(path) for number, path in completion_tables(str(folder)).items()}


@pytest.fixture(scope="module")
def run(agent_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rounds = []
    args = config(folder, log_completions=True, reward_weights=[1.0, 0.5], logging_steps=3, num_iterations=2)
    trainer = team(agent_folders, PAIR, args, [digit_reward, length_reward])
    for agent in trainer.agents:
        begin = agent.begin_round

        def recorded(rollouts, advantages, *rest, begin=begin, k=agent.agent_index):
            rounds.append((k, rollouts[k], advantages[k]))
            return begin(rollouts, advantages, *rest)

        agent.begin_round = recorded
    trainer.train()
    return folder, rounds


def test_a_table_a_round_for_the_whole_team(run):
    folder, rounds = run
    found = tables(folder)
    assert list(found) == [1, 2]
    assert sorted(os.listdir(folder / "completions")) == ["round_00001.parquet", "round_00002.parquet"]
    assert not (folder / "bpe").exists()  # the agents write none of their own
    for (k, rollout, advantages), number in zip(rounds, [1, 1, 2, 2], strict=True):
        table = found[number]
        assert (table["round"] == number).all() and len(table) == 16
        own = table[table["agent"] == PAIR[k]]
        assert own["completion"].tolist() == rollout.texts
        assert own["finish_reason"].tolist() == ["stop" if done else "length" for done in rollout.finished]
        assert own["tokens"].tolist() == [len(ids) for ids in rollout.completion_ids]
        assert own["advantage"].tolist() == pytest.approx(advantages.tolist())
        assert own["reward"].tolist() == pytest.approx(rollout.rewards.tolist())


def test_rewards_by_function_and_what_is_missing(run):
    table = pandas.concat(tables(run[0]).values())
    digits, lengths = digit_reward(table["completion"]), length_reward(table["completion"])
    assert table["rewards/digit_reward"].tolist() == digits
    assert table["rewards/length_reward"].isna().tolist() == [value is None for value in lengths]
    assert None in lengths
    total = [d + 0.5 * (n or 0.0) for d, n in zip(digits, lengths, strict=True)]
    assert table["reward"].tolist() == pytest.approx(total)
    assert table["parsed_answer"].isna().all()
    assert set(table["finish_reason"]) == {"stop", "length"}


def test_columns_and_types(run):
    for path in completion_tables(str(run[0])).values():
        schema = pq.read_schema(path)
        assert {name: str(schema.field(name).type) for name in schema.names} == {
            "round": "int64", "agent": "string", "prompt": "string", "completion": "string", "reward": "double",
            "rewards/digit_reward": "double", "rewards/length_reward": "double", "finish_reason": "string",
            "tokens": "int64", "advantage": "double", "parsed_answer": "string", "gold": "string",
        }  # fmt: skip


def test_parsed_answers_and_other_columns(agent_folders, tmp_path):
    calls = []

    def logging_reward(completions, log_extra, **kwargs):
        calls.append(1)
        if len(calls) <= 2:  # the first round only
            log_extra("reward", [{"length": len(c)} for c in completions])
            log_extra("odd", [i if i % 2 else "\ud800" for i in range(len(completions))])
            log_extra("short", [1])
        return [1.0] * len(completions)

    trainer = team(agent_folders, PAIR, config(tmp_path, log_completions=True), [math_reward, logging_reward])
    for agent in trainer.agents:  # every second response is a sum that is right or wrong, boxed
        ids = agent._tokenizer("#### 12")["input_ids"]
        plain = agent._tokenizer("= ; =")["input_ids"]
        agent._generate_single_turn = lambda *args, ids=ids, plain=plain, **kw: ([ids, plain] * 4, None)
    trainer.train()
    found = tables(tmp_path)
    for table in found.values():
        assert set(table["completion"].str.strip()) == {"#### 12", "= ; ="}
        assert table["parsed_answer"].tolist() == ["12", ""] * 8
    assert [value["length"] for value in found[1]["extra/reward"]] == [len(c) for c in found[1]["completion"]]
    assert found[1]["odd"].tolist()[:2] == ["?", "1"]
    assert "short" not in found[1]  # not one a completion
    assert {"odd", "extra/reward"}.isdisjoint(found[2].columns)  # nothing is left of the first round


def test_chats(agent_folders, tmp_path):
    tokenizers = [AutoTokenizer.from_pretrained(agent_folders[name]) for name in PAIR]
    for tokenizer in tokenizers:
        tokenizer.chat_template = CHAT_TEMPLATE
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i} + {i} = ?"}]} for i in range(8)])
    trainer = team(
        agent_folders,
        PAIR,
        config(tmp_path, log_completions=True, max_rounds=1),
        train_dataset=chats,
        processing_classes=tokenizers,
    )
    trainer.train()
    table = tables(tmp_path)[1]
    for prompt in table["prompt"]:
        assert [message["role"] for message in prompt] == ["user"] and "= ?" in prompt[0]["content"]
    assert all(isinstance(completion, str) for completion in table["completion"])


def test_a_resumed_run_redoes_its_tables(agent_folders, tmp_path):
    settings = {"log_completions": True, "save_strategy": "steps", "save_steps": 4}
    team(agent_folders, PAIR, config(tmp_path, max_rounds=3, **settings)).train()
    whole = tables(tmp_path)
    for number in (2, 3):
        table = whole[number].assign(completion="of the run that was killed")
        table.to_parquet(completion_tables(str(tmp_path))[number])
    resumed = team(agent_folders, PAIR, config(tmp_path, max_rounds=3, **settings))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    again = tables(tmp_path)
    assert list(again) == [1, 2, 3]
    for number, table in whole.items():
        pandas.testing.assert_frame_equal(again[number], table)
    team(agent_folders, PAIR, config(tmp_path, max_rounds=1, **settings)).train()
    assert list(tables(tmp_path)) == [1]  # a new run in the same folder begins without the old one's


def test_evaluations_leave_the_tables_alone(agent_folders, tmp_path):
    def reward(completions, log_extra, **kwargs):
        log_extra("place", list(range(len(completions))))
        return digit_reward(completions)

    args = config(
        tmp_path, log_completions=True, eval_strategy="steps", eval_steps=4, eval_on_start=True,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer = team(agent_folders, PAIR, args, reward, eval_dataset=dataset(2))
    trainer.train()
    for table in tables(tmp_path).values():
        assert table["place"].tolist() == list(range(8)) * 2
        assert table["rewards/reward"].tolist() == digit_reward(table["completion"])


def test_nothing_is_kept_unless_wished(agent_folders, tmp_path):
    team(agent_folders, PAIR, config(tmp_path, max_rounds=1)).train()
    assert not (tmp_path / "completions").exists()


def test_completions_on_the_screen(agent_folders, tmp_path, capsys):
    args = config(tmp_path, log_completions=True, num_completions_to_print=2, max_rounds=1)
    team(agent_folders, PAIR, args, [digit_reward, length_reward]).train()
    shown = capsys.readouterr().out
    assert "Round 1, char" in shown and "Round 1, bpe" in shown and shown.count("prompt") == 2 and "Step" not in shown
    table = tables(tmp_path)[1]
    for gold in table[table["agent"] == "bpe"]["gold"][:2]:
        assert re.search(rf"│ *{gold} *│", shown)


def test_golds_stand_beside_the_responses(agent_folders, tmp_path):
    data = dataset().map(lambda row: {"solution": f"#### {row['answer']}"})
    team(agent_folders, PAIR, config(tmp_path, log_completions=True, max_rounds=1), train_dataset=data).train()
    golds = {row["prompt"]: row["answer"] for row in data}
    table = tables(tmp_path)[1]
    assert table["gold"].tolist() == [golds[prompt] for prompt in table["prompt"]]

    data = data.rename_column("answer", "about").map(lambda row: {"target": [row["about"], "x"]})
    team(agent_folders, PAIR, config(tmp_path, log_completions=True, max_rounds=1), train_dataset=data).train()
    assert [list(gold) for gold in tables(tmp_path)[1]["gold"]] == [
        [golds[prompt], "x"] for prompt in tables(tmp_path)[1]["prompt"]
    ]  # fmt: skip

    data = data.remove_columns(["target", "solution"])
    team(agent_folders, PAIR, config(tmp_path, log_completions=True, max_rounds=1), train_dataset=data).train()
    assert "gold" not in tables(tmp_path)[1]


def test_trackers_get_one_table_a_round(agent_folders, tmp_path, monkeypatch):
    sent = []
    tracker = types.ModuleType("wandb")
    tracker.run, tracker.log, tracker.Table = object(), sent.append, lambda dataframe: dataframe
    trainer = team(agent_folders, PAIR, config(tmp_path, log_completions=True, log_unique_prompts=True))
    report = trainer.completions._report

    def with_wandb(table):  # only there: TRL would want the real one
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "wandb", tracker)
            patched.setattr(trainer.args, "report_to", ["wandb"])
            report(table)

    trainer.completions._report = with_wandb
    trainer.train()
    assert [len(entry["completions"]) for entry in sent] == [4, 4]  # 2 prompts x 2 agents
    assert [set(entry["completions"]["round"]) for entry in sent] == [{1}, {2}]
