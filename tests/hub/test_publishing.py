"""Agents on the Hub: a small one in a thread takes what is pushed, and another process loads it from there."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from support.fake_hub import Hub
from support.tiny_teams import CHAT_TEMPLATE, config, dataset, team
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl import HACPOConfig
from hacpo_trl.hub.card import settings_of
from hacpo_trl.hub.publishing import find_base
from hacpo_trl.playground import make_problems, shipped_agent
from hacpo_trl.texts.prompts import make_form

ROOT = Path(__file__).parents[2]
PAIR = ["char", "bpe"]
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
FAULTS = [("create-403", "create", 403), ("preupload-403", "preupload", 403), ("lfs-403", "lfs", 403),
          ("commit-500", "commit", 500)]  # fmt: skip


def process(hub, scene, work, launcher=(), **settings):
    """What a process found that talks to the Hub, and what it printed."""
    settings = {"work": str(work), "report": str(work / f"{scene}.json"), **settings}
    (work / f"{scene}.settings").write_text(json.dumps(settings))
    environment = {
        **{key: value for key, value in os.environ.items() if key.lower() not in ("http_proxy", "all_proxy")},
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": "hf_right",
        "HF_HOME": str(work / f"home of {scene}"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            str(ROOT / "tests" / "support" / "hub_worker.py"),
            scene,
            str(work / f"{scene}.settings"),
        ],
        capture_output=True,
        text=True,
        env=environment,
        cwd=work,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(path.read_text()) for path in sorted(work.glob(f"{scene}.json*"))]
    return {key: value for report in reports for key, value in report.items()}, done.stdout


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A Hub to which a process has pushed, what it reported and printed, and where it worked."""
    work = tmp_path_factory.mktemp("sharing")
    rows = [{"problem": p["prompt"].strip(), "answer": p["answer"]} for p in make_problems(["addition"], 8, 0)]
    (work / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with Hub() as hub:
        hub.add("lab/tiny-bpe", shipped_agent("tiny-bpe"))
        for name, kind, status in FAULTS:
            hub.faults[f"me/{name}-bpe", kind] = status  # of the second agent
        report, printed = process(
            hub,
            "share",
            work,
            char=str(shipped_agent("tiny-char")),
            bpe=str(shipped_agent("tiny-bpe")),
            problems=str(work / "train.jsonl"),
            faults=FAULTS,
        )
        yield hub, report, printed, work


def metadata(card):
    return yaml.safe_load(card.split("---\n")[1])


# -- pushed and loaded again --------------------------------------------------------------------------------------


def test_every_agent_gets_a_repository_of_its_own(shared):
    hub, report, _, _ = shared
    assert hub.messages("me/team-char") == hub.messages("me/team-bpe") == ["First"]  # "Again" had nothing to add
    heads = [hub.repositories[f"me/team-{name}"].find("main")["oid"] for name in PAIR]
    assert report["commits"] == [
        f"{hub.endpoint}/me/team-{name}/commit/{oid}" for name, oid in zip(PAIR, heads, strict=True)
    ]
    assert report["again"] == heads
    model = {"README.md", "hacpo_prompt.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(hub.files("me/team-char")) == model | {"config.json", "generation_config.json", "model.safetensors"}
    assert set(hub.files("me/team-bpe")) == model | {"adapter_config.json", "adapter_model.safetensors"}
    assert not hub.repositories["me/team-char"].private
    assert hub.unknown == []


def test_an_adapter_names_its_base_on_the_hub(shared):
    hub, _, _, work = shared
    for repo_id in ("me/team-bpe", "lab/other"):  # from the Hub, and from a folder of which the user said what it is
        settings = json.loads(hub.files(repo_id)["adapter_config.json"])
        assert settings["base_model_name_or_path"] == "lab/tiny-bpe" and settings["r"] == 2
    at_home = json.loads((work / "during" / "bpe" / "adapter_config.json").read_text())
    assert at_home["base_model_name_or_path"] == str(shipped_agent("tiny-bpe"))


def test_nothing_local_is_pushed(shared):
    hub, _, _, work = shared
    for repo_id in hub.repositories:
        for path, content in hub.files(repo_id).items():
            for secret in (str(work), str(ROOT), "hf_right"):
                assert secret.encode() not in content, (repo_id, path)


def test_a_push_in_the_background_and_to_a_branch(shared):
    hub, report, _, _ = shared
    for name, oid in zip(PAIR, report["branch"], strict=True):
        repository = hub.repositories[f"me/team-{name}"]
        assert oid == repository.find("dev")["oid"]
        assert repository.find("dev")["files"] == repository.find("main")["files"]
    assert report["left"] == ["bpe", "char", "hacpo_run.json", "trainer_state.json"]  # no copies are left


def test_pushed_agents_are_loaded_by_their_ids(shared):
    hub, _, _, work = shared
    cards = {name: hub.files(f"me/team-{name}")["README.md"].decode() for name in PAIR}
    programs = {name: re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1) for name, card in cards.items()}
    assert all(f'"me/team-{name}"' in program for name, program in programs.items())
    report, _ = process(hub, "load", work, programs=programs)
    assert report["char differs by"] == report["bpe differs by"] == 0
    assert report["bpe has learned"] > 1e-3
    assert 0 < report["char writes"] <= 10 and 0 < report["bpe writes"] <= 10
    assert hub.unknown == []


def test_of_two_processes_one_pushes(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with Hub() as hub:
        hub.add("lab/tiny-bpe", shipped_agent("tiny-bpe"))
        report, _ = process(hub, "together", tmp_path, launcher, char=str(shipped_agent("tiny-char")))
        assert report == {"commits of 0": 2, "commits of 1": 0}
        creations = [path for method, path in hub.calls if path == "/api/repos/create"]
        assert len(creations) == 2
        for name in PAIR:
            assert hub.messages(f"me/two-{name}")[0] == "Training in progress, round 1, step 4"
            assert len(hub.messages(f"me/two-{name}")) <= 2  # where the log has grown since, the card is new


# -- while it trains ----------------------------------------------------------------------------------------------


def test_agents_are_pushed_at_every_save(shared):
    hub, _, _, _ = shared
    training = ["Training in progress, round 1, step 4", "Training in progress, round 2, step 8"]
    # The last save is the last checkpoint: only the card of the first differs, by its log
    assert hub.messages("me/during-char")[:2] == training
    assert hub.messages("lab/other") == ["Model save"]  # its hub_strategy is "end"
    assert hub.repositories["me/during-char"].private and hub.repositories["lab/other"].private
    first, second = (hub.repositories["me/during-char"].branches["main"][n]["files"] for n in (1, 2))
    assert first["model.safetensors"] != second["model.safetensors"]
    assert not [path for path in second if path.startswith(("optimizer", "training_args", "trainer_state", "rng"))]


def test_a_failed_push_does_not_end_the_training(shared):
    _, report, _, _ = shared
    assert report["unlucky steps"] == 8
    assert len(report["unlucky"]) >= 1
    for message in report["unlucky"]:
        assert message.startswith("agent 'bpe': the push to 'me/commit-500-bpe' failed: ")
        assert "500" in message and "Pushed before: char (me/commit-500-char); not pushed: bpe." in message


def test_the_command_pushes(shared):
    hub, report, printed, _ = shared
    assert report["command"] == 0
    for name in "ab":
        head = hub.repositories[f"me/my-run-{name}"].find("main")
        assert head["message"] == "End of training" and "model.safetensors" in head["files"]
        assert f"Pushed: {name} to {hub.endpoint}/me/my-run-{name}/commit/{head['oid']}" in printed


# -- failures -----------------------------------------------------------------------------------------------------


def test_a_repository_that_may_not_be_opened(shared):
    _, report, _, _ = shared
    message = report["create 403"]
    assert message.startswith("ConnectionError: agent 'bpe': its repository 'me/create-403-bpe' could not be opened: ")
    assert "403" in message and "write access" in message
    assert message.endswith("Opened before: char (me/create-403-char). Nothing was pushed.")
    assert "agent 'char'" in report["wrong token"] and "401" in report["wrong token"]
    assert "hf auth login" in report["wrong token"]


@pytest.mark.parametrize(("name", "kind", "status"), FAULTS[1:])
def test_a_push_that_fails_tells_what_was_pushed(shared, name, kind, status):
    hub, report, _, work = shared
    message = report[f"{kind} {status}"]
    assert message.startswith(f"ConnectionError: agent 'bpe': the push to 'me/{name}-bpe' failed: ")
    assert str(status) in message
    assert f"Pushed before: char (me/{name}-char); not pushed: bpe. All of them are saved in" in message
    assert "model.safetensors" in hub.files(f"me/{name}-char") and hub.files(f"me/{name}-bpe") == {}
    assert not (work / "run" / ".pushing").exists()


def test_a_push_that_fails_in_the_background(shared):
    _, report, _, _ = shared
    assert report["in the background"].startswith("ConnectionError: agent 'bpe': the push to 'me/commit-500-bpe'")


def test_repositories_are_opened_before_models_are_loaded(shared):
    _, report, _, work = shared
    assert "agent 'char': its repository 'stranger/team-char' could not be opened: " in report["before loading"]
    assert "403" in report["before loading"] and not (work / "x").exists()


def test_one_repository_under_two_names(shared):
    _, report, _, _ = shared
    assert "agents 'char' and 'bpe' would both be pushed to 'me/team-char'" in report["same repository"]


# -- refused before anything is loaded ----------------------------------------------------------------------------


class Unloadable(dict):
    """Folders of agents that must not be loaded."""

    def __getitem__(self, name):
        return f"/nowhere/{name}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hub_model_id": "me/te am"}, "agent 'char' cannot have the repository 'me/te am-char'.*'?\"me/te-am-char\""),
        ({"hub_model_id": "me/a/b"}, "agent 'char' cannot have the repository"),
        (
            {"agent_overrides": {"bpe": {"hub_model_id": "me/--"}}, "hub_model_id": "me/x"},
            "agent 'bpe' cannot have the repository 'me/--'",
        ),
        (
            {"agent_overrides": {"bpe": {"hub_model_id": "Me/X-char"}}, "hub_model_id": "me/x"},
            "agents 'char' and 'bpe' would both be pushed",
        ),
        ({"push_to_hub": True, "hub_strategy": "checkpoint"}, "hub_strategy='checkpoint'.*Use hub_strategy='every_s"),
        ({"push_to_hub": True, "hub_strategy": "all_checkpoints"}, "hub_strategy='all_checkpoints'"),
        ({"hub_base_model_id": "some/base"}, "cannot be the base of 2 different models"),
        ({"agent_overrides": {"bpe": {"hub_base_model_id": "a/b/c"}}}, "hub_base_model_id='a/b/c' is no id"),
    ],
)
def test_wrong_ids_are_refused_before_a_model_is_looked_at(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        team(Unloadable(), PAIR, config(tmp_path, **changes))


def test_an_adapter_on_a_local_base_is_refused(agent_folders, tmp_path):
    match = "agent 'bpe' is an adapter on the local folder 'bpe'.*hub_base_model_id.*merge_adapter"
    with pytest.raises(ValueError, match=match):
        team(agent_folders, PAIR, config(tmp_path, push_to_hub=True), peft_configs=[None, LORA])
    trainer = team(agent_folders, PAIR, config(tmp_path), peft_configs=[None, LORA])
    with pytest.raises(ValueError, match=match):
        trainer.push_to_hub()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="agent 'bpe' is pushed with its team"):
        trainer.agents[1].push_to_hub()
    with pytest.raises(TypeError, match="does not know licence; cards take.*license"):
        trainer.push_to_hub(licence="mit")


def test_without_network_nothing_is_lost(agent_folders, tmp_path):
    trainer = team(agent_folders, ["char"], config(tmp_path / "a run"))
    with pytest.raises(
        ConnectionError, match="agent 'char': its repository 'a-run-char' could not be opened.*offline"
    ):
        trainer.push_to_hub()


def test_where_a_model_comes_from(agent_folders, tmp_path):
    args = config(tmp_path, model_init_kwargs={"revision": "v2"})
    base = find_base("some/base", args)
    assert (base.title, base.hub_id, base.revision) == ("some/base", "some/base", "v2")
    base = find_base(agent_folders["char"], args)
    assert (base.title, base.hub_id, base.revision) == ("char", None, None)
    commit = "0123456789" * 4
    base = find_base(f"/home/me/hub/models--some--base/snapshots/{commit}", args)
    assert (base.title, base.hub_id, base.revision) == ("some/base", "some/base", commit)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(agent_folders["char"]), LORA)
    assert find_base(model, args).title == "char"
    named = config(tmp_path, hub_base_model_id="my/base")
    assert find_base(agent_folders["char"], named).hub_id == find_base(model, named).hub_id == "my/base"


# -- cards --------------------------------------------------------------------------------------------------------


def test_a_card_tells_what_was_done(shared):
    hub, _, _, _ = shared
    card = hub.files("me/team-char")["README.md"].decode()
    assert metadata(card) == {
        "datasets": ["lab/sums"],
        "library_name": "transformers",
        "license": "mit",
        "model_name": "team-char",
        "pipeline_tag": "text-generation",
        "tags": ["trl", "hacpo", "generated_from_trainer"],
    }
    assert "| **char** (this one) | `tiny-char` (a local llama model) | all weights |" in card
    assert (
        "| bpe | [lab/tiny-bpe](https://huggingface.co/lab/tiny-bpe) | LoRA adapter of rank 2 | "
        "[me/team-bpe](https://huggingface.co/me/team-bpe) |"
    ) in card
    assert "1 round of 2 prompts x 4 responses of each agent; 4 updates a round" in card
    assert "| `learning_rate` | 0.001 |" in card and "| `alpha` | 1 |" in card and "| `adam_epsilon` |" in card
    assert "16 prompts of [lab/sums](https://huggingface.co/datasets/lab/sums)" in card
    assert "`digit_reward`" in card
    assert "| measured | before | after |\n|---|---|---|\n| accuracy, sums | 0.250 | 0.500 |" in card
    assert "| while training |  | " in card  # one round: its log is no first one
    for paper in ("2603.02604", "2507.18071", "2402.03300", "vonwerra2020trl"):
        assert paper in card
    adapter = hub.files("me/team-bpe")["README.md"].decode()
    assert metadata(adapter)["base_model"] == "lab/tiny-bpe" and metadata(adapter)["library_name"] == "peft"
    assert "accuracy" not in adapter  # there is none of this agent


def test_cards_are_written_without_network(agent_folders, tmp_path):
    args = config(tmp_path, max_rounds=2, eval_strategy="no", per_device_eval_batch_size=4)
    trainer = team(agent_folders, PAIR, args, eval_dataset={"sums": dataset(2), "more": dataset(2)})
    trainer.train()
    assert not (tmp_path / "char").exists()
    trainer.evaluate()
    trainer.create_model_card(model_name="Sums", dataset_name=str(tmp_path / "train.jsonl"), tags="maths")
    history = trainer.state.log_history
    for name in PAIR:
        card = (tmp_path / name / "README.md").read_text()
        assert str(tmp_path) not in card and "`train.jsonl`" in card and f"# Sums-{name}" in card
        assert "base_model" not in metadata(card) and "datasets" not in metadata(card)
        assert "license" not in metadata(card) and "maths" in metadata(card)["tags"]
        rewards = [entry[f"{name}/reward"] for entry in history if f"{name}/reward" in entry]
        assert "| before |" not in card and "| mean reward | first log | last log |" in card
        assert f"| while training | {rewards[0]:.3f} | {rewards[-1]:.3f} |" in card
        measured = next(entry[f"eval_sums_{name}/reward"] for entry in history if f"eval_sums_{name}/reward" in entry)
        assert f"| in evaluation on sums |  | {measured:.3f} |" in card
        assert f'name = "{name}"  # the folder of this card' in card
    trainer.save_model()
    assert "# Sums-bpe" in (tmp_path / "bpe" / "README.md").read_text()  # what was given is remembered


@pytest.mark.parametrize(("method", "tag"), [("naive", "hacpo"), ("gspo", "gspo"), ("grpo", "grpo")])
def test_a_card_names_the_method(agent_folders, tmp_path, method, tag):
    trainer = team(agent_folders, PAIR, config(tmp_path, method=method))
    trainer.create_model_card()
    card = (tmp_path / "char" / "README.md").read_text()
    assert tag in metadata(card)["tags"] and "hacpo" not in set(metadata(card)["tags"]) - {tag}
    assert ("2603.02604" in card) == (method == "naive")
    assert "`peer_clip_delta`" not in card or method == "naive"


def test_a_card_of_an_agent_that_chats(agent_folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(agent_folders["char"], padding_side="left")
    tokenizer.chat_template = CHAT_TEMPLATE
    data = dataset().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    args = config(tmp_path, chat_template_kwargs={"enable_thinking": False})
    trainer = team(agent_folders, ["char"], args, train_dataset=data, processing_classes=tokenizer)
    trainer.save_model()
    card = (tmp_path / "char" / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1)
    assert "apply_chat_template" in program and "enable_thinking=False" in program
    scope = {}
    exec(program.replace('name = "char"', f'name = "{tmp_path / "char"}"'), scope)
    assert scope["output"].shape[1] > scope["inputs"]["input_ids"].shape[1]


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (make_form("plain", instruction="Add."), r'prompt = "Problem: What is 12 + 34?\nAdd.\nSolution:"'),
        (
            make_form("chat", instruction="", system_prompt="Be brief."),
            'messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 34?"}]',
        ),
        (None, 'prompt = "What is 12 + 34?"  # put yours in the form of the training prompts'),
    ],
)
def test_the_example_in_a_card_has_the_form_of_the_prompts(agent_folders, tmp_path, form, line):
    data = dataset().map(lambda row, i: {"prompt": row["prompt"] if i else "a secret"}, with_indices=True)
    trainer = team(agent_folders, ["char"], config(tmp_path), train_dataset=data)
    trainer.prompt_form = form or trainer.prompt_form
    trainer.create_model_card()
    card = (tmp_path / "char" / "README.md").read_text()
    assert line in card.splitlines() and "secret" not in card


def test_the_program_in_a_card_ends_responses_as_in_training(agent_folders, tmp_path):
    args = config(tmp_path, max_completion_length=64, stop_texts=["#"])
    team(agent_folders, ["char"], args).save_model()
    program = re.search(r"```python\n(.*?)```", (tmp_path / "char" / "README.md").read_text(), re.DOTALL).group(1)
    assert 'stop_strings=["#"], tokenizer=tokenizer)' in program
    scope = {}
    exec(program.replace('name = "char"', f'name = "{tmp_path / "char"}"'), scope)
    written = scope["tokenizer"].decode(scope["output"][0][scope["inputs"]["input_ids"].shape[1] :])
    assert written.index("#") == len(written) - 1 < 63


def test_accuracies_are_checked(agent_folders, tmp_path):
    trainer = team(agent_folders, PAIR, config(tmp_path))
    with pytest.raises(ValueError, match="accuracies names other; the agents are char, bpe"):
        trainer.create_model_card(accuracies={"other": {"sums": 0.5}})
    with pytest.raises(ValueError, match="must be a number, or a pair"):
        trainer.create_model_card(accuracies={"char": {"sums": "good"}})
    with pytest.raises(ValueError, match="must be {agent: {benchmark: accuracy}}"):
        trainer.create_model_card(accuracies={"char": 0.5})
    with pytest.raises(ValueError, match="cannot be read"):
        trainer.create_model_card(accuracies=str(tmp_path / "results.json"))
    rows = [{"problem": "1", "answer": "2", "correct": [True, False], "votes": [1, 1]}]
    rows[0] |= {"samples": ["", ""], "parsed": ["", ""], "tokens": [1, 1], "finished": [True, True]}
    from hacpo_trl.evaluation.scores import EvaluationResult

    EvaluationResult("char", "math_500", {"samples": 2}, rows).save(tmp_path / "results.json")
    trainer.create_model_card(accuracies=tmp_path / "results.json")
    assert "| accuracy, MATH-500 |  | 0.500 |" in (tmp_path / "char" / "README.md").read_text()


def test_no_setting_in_a_card_can_hold_a_path(tmp_path):
    """Every setting of text that a card names is one of a few words; a new one has to be looked at."""
    words = """lr_scheduler_type optim peer_clip_delta capability_metric baseline peer_advantages rollout_order
    length_normalization peer_overflow source_logps chat_template_kwargs stop_texts""".split()
    args = config(tmp_path, alpha=0.5)
    types = typing.get_type_hints(HACPOConfig)  # HfArgumentParser changes `type` of the fields themselves
    for field in dataclasses.fields(HACPOConfig):
        if "str" in str(types[field.name]) and field.name != "method":
            setattr(args, field.name, "/a/path")
    settings = settings_of(args)
    assert {name for name, value in settings.items() if value == "/a/path"} == set(words)
    assert settings["alpha"] == 0.5 and settings["adam_epsilon"] == 1e-3
