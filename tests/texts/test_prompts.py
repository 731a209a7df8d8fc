"""The form of prompts: what a problem becomes, where a response ends, and that saved agents are asked as trained."""

import json

import pytest
import torch
from huggingface_hub.errors import RemoteEntryNotFoundError
from support.tiny_teams import CHAT_TEMPLATE, config, dataset, team
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl.cli import evaluate
from hacpo_trl.cli.train import main
from hacpo_trl.cli.tryout import show_prompt, verdict
from hacpo_trl.evaluation.answers import evaluate_model
from hacpo_trl.evaluation.scores import EvaluationResult
from hacpo_trl.playground import shipped_agent
from hacpo_trl.texts import prompts
from hacpo_trl.texts.prompts import AS_IT_IS, PROMPT_FILE, PromptForm, make_form, read_form, stops_of, with_newlines

FOUR_SHOT = "Q: What is 3 + 4?\nA: 7\n\nQ: {problem}\nA:"


# -- forms ------------------------------------------------------------------------------------------------------------


def test_plain_prompts():
    form = make_form("plain", prompt_template=FOUR_SHOT, system_prompt="Add.")
    assert form.render(" What is 1 + 1? ") == "Add.\nQ: What is 3 + 4?\nA: 7\n\nQ: What is 1 + 1?\nA:"
    assert form.stop == ("\nQ:",)
    assert make_form("plain", instruction="Box it.").render("1 + 1?") == "Problem: 1 + 1?\nBox it.\nSolution:"
    assert make_form("plain", prompt_template=r"{problem} \boxed{}").render("{problem}") == r"{problem} \boxed{}"


def test_prompts_as_they_are_keep_their_spaces_and_messages():
    assert PromptForm("plain").render(" 1 + 1 = ") == " 1 + 1 = "
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert PromptForm("chat").render(chat) is chat
    assert PromptForm("chat").render("U") == [{"role": "user", "content": "U"}]
    for form in (PromptForm("plain"), make_form("chat"), PromptForm("chat", system_prompt="S")):
        with pytest.raises(ValueError, match="A problem is a list of messages, but the prompts are"):
            form.render(chat)


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        ("Problem: {problem}\nSolution:", ("\nProblem:",)),
        (FOUR_SHOT, ("\nQ:",)),
        ("{problem}\nAnswer:", ()),  # a bare new line would end answers of several lines
        ("Add: {problem} =", ("\nAdd:",)),
        (AS_IT_IS, ()),
    ],
)
def test_where_responses_to_a_template_end(template, stops):
    assert stops_of(template) == stops


@pytest.mark.parametrize(("written", "read"), [(r"a\nb", "a\nb"), (r"a\\nb", r"a\nb"), (r"\t", r"\t")])
def test_new_lines_of_the_command_line(written, read):
    assert with_newlines(written) == read


def test_a_saved_form_comes_back(tmp_path, monkeypatch):
    form = make_form(
        "chat", prompt_template="é {problem}\n", system_prompt="S", stop=["x"], chat_template_kwargs={"a": 1}
    )
    form.save(tmp_path)
    assert read_form(str(tmp_path)) == form and json.loads((tmp_path / PROMPT_FILE).read_text("utf-8"))["version"] == 1
    assert read_form(str(tmp_path / "other")) is None
    monkeypatch.setattr(prompts, "hf_hub_download", lambda repo, name: {"me/a": str(tmp_path / name)}[repo])
    assert read_form("me/a") == form  # of the Hub

    class Response:
        headers, request, status_code = {}, None, 404

    def missing(repo, name):
        raise RemoteEntryNotFoundError("no such file", response=Response())

    monkeypatch.setattr(prompts, "hf_hub_download", missing)
    assert read_form("me/b") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "does not describe prompts .JSONDecodeError"),
        ("[]", "does not describe prompts"),
        ('{"prompt_format": "chat"}', "does not describe prompts .KeyError: 'version'"),
        ('{"version": 2, "prompt_format": "chat"}', "version 2 of the file, this package reads version 1"),
        ('{"version": 1, "prompt_format": "poem"}', "prompt_format='poem' is unknown"),
        ('{"version": 1, "prompt_format": "plain", "prompt_template": "x"}', "has no {problem}"),
    ],
)
def test_files_that_describe_no_prompts(tmp_path, content, message):
    (tmp_path / PROMPT_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_form(str(tmp_path))


# -- saved with every agent -------------------------------------------------------------------------------------------


def test_every_agent_is_saved_with_its_form(agent_folders, tmp_path):
    args = config(tmp_path, max_rounds=1, save_strategy="steps", save_steps=4)
    trainer = team(agent_folders, ["char", "bpe"], args)
    trainer.train()
    trainer.save_model()
    for folder in ("char", "bpe", "checkpoint-4/char"):
        assert read_form(str(tmp_path / folder)) == PromptForm("plain")  # the data set's prompts, as they are
    trainer.prompt_form = make_form("plain", prompt_template=FOUR_SHOT)
    trainer.save_model()
    assert read_form(str(tmp_path / "bpe")).prompt_template == FOUR_SHOT


def test_agents_have_template_arguments_of_their_own(tmp_path):
    models = [shipped_agent("tiny-char"), shipped_agent("tiny-bpe")]
    tokenizers = [AutoTokenizer.from_pretrained(model) for model in models]
    for tokenizer in tokenizers:
        tokenizer.chat_template = CHAT_TEMPLATE
    chats = dataset().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    overrides = {"tiny-bpe": {"chat_template_kwargs": {"enable_thinking": False}}}
    trainer = team(
        dict(zip("ab", models, strict=True)),
        ["a", "b"],
        config(tmp_path, agent_overrides=overrides),
        train_dataset=chats,
        processing_classes=tokenizers,
    )
    trainer.save_model()
    assert read_form(str(tmp_path / "tiny-char")) == PromptForm("chat")
    assert read_form(str(tmp_path / "tiny-bpe")).chat_template_kwargs == {"enable_thinking": False}


# -- evaluated as trained ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Bases (one with a template, one without) and the agents they became, with the form of their training."""
    root = tmp_path_factory.mktemp("models")
    form = make_form("plain", prompt_template="{problem}\n", stop=["!"])
    for name in ("tiny-char", "tiny-bpe"):
        for kind in ("base", "agent"):
            folder = root / kind / name
            AutoModelForCausalLM.from_pretrained(shipped_agent(name), dtype=torch.float32).save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(shipped_agent(name))
            tokenizer.chat_template = CHAT_TEMPLATE if name == "tiny-bpe" else None
            tokenizer.save_pretrained(folder)
        form.save(root / "agent" / name)
    rows = [{"problem": f"{i} + 21 = ?", "answer": str(i + 21)} for i in range(30, 34)]
    (root / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def asked(out):
    """The settings of all results in a folder, by the folder of the model."""
    results = [EvaluationResult.load(path) for path in out.glob("*--*.json")]
    return {"/".join(result.settings["model"].split("/")[-2:]): result.settings for result in results}


def evaluates(models, out, *options):
    names = [models / "agent" / name for name in ("tiny-char", "tiny-bpe")]
    bases = [models / "base" / name for name in ("tiny-char", "tiny-bpe")]
    before = ["--before", *bases] if "--before" in options else []
    options = [option for option in options if option != "--before"]
    chosen = bases if "bases" in options else names
    options = [option for option in options if option != "bases"]
    common = ["--benchmarks", models / "sums.jsonl", "--output_dir", out, "--max_new_tokens", "32", "--no_progress"]
    return evaluate.main(list(map(str, [*chosen, *before, *common, *options])))


def test_before_and_after_are_asked_as_trained(models, tmp_path, capsys):
    evaluates(models, tmp_path, "--before")
    settings = asked(tmp_path)
    assert sorted(settings) == ["agent/tiny-bpe", "agent/tiny-char", "base/tiny-bpe", "base/tiny-char"]
    forms = {json.dumps({k: s[k] for k in ("prompt_format", "prompt_template", "stop")}) for s in settings.values()}
    assert forms == {'{"prompt_format": "plain", "prompt_template": "{problem}\\n", "stop": ["!"]}'}
    said = capsys.readouterr().out
    assert "tiny-char: prompts as in training: plain, template '{problem}\\n', a response ends at '!'" in said
    assert "results differ" not in said and "| +0.0 ± 0.0 |" in said  # the same weights, asked the same


def test_auto_is_decided_for_all_models_together(models, tmp_path, capsys):
    """One of the two bases has a template: `hacpo train` would ask both in plain text, and so does this."""
    evaluates(models, tmp_path, "bases")
    assert {s["prompt_format"] for s in asked(tmp_path).values()} == {"plain"}
    assert "tiny-bpe: no hacpo_prompt.json in its folder; prompts: plain" in capsys.readouterr().out


def test_options_win_over_the_saved_form(models, tmp_path, capsys):
    evaluates(models, tmp_path, "--prompt_template", r"{problem}\n\n", "--stop")
    for settings in asked(tmp_path).values():
        assert settings["prompt_template"] == "{problem}\n\n" and settings["stop"] == []
    assert "tiny-bpe: prompts, other than in training: plain" in capsys.readouterr().out


def test_the_base_gets_the_chat_template_of_its_agent(models, tmp_path):
    agent = tmp_path / "agent"
    AutoModelForCausalLM.from_pretrained(shipped_agent("tiny-char"), dtype=torch.float32).save_pretrained(agent)
    tokenizer = AutoTokenizer.from_pretrained(shipped_agent("tiny-char"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(agent)
    PromptForm("chat").save(agent)
    options = ["--benchmarks", models / "sums.jsonl", "--output_dir", tmp_path / "out", "--max_new_tokens", "32"]
    base = models / "base" / "tiny-char"  # has no template
    evaluate.main(list(map(str, [agent, "--before", base, *options, "--no_progress"])))
    results = [EvaluationResult.load(path) for path in (tmp_path / "out").glob("*--*.json")]
    assert len(results) == 2 and results[0].problems == results[1].problems


def test_rows_of_a_training_set_are_evaluated_with_their_own_reward():
    folder = shipped_agent("tiny-char")
    tokenizer, seen = AutoTokenizer.from_pretrained(folder), {}

    def reward(prompts, completions, bonus, **kwargs):
        seen.update(prompts=prompts, completions=completions, bonus=bonus, keys=sorted(kwargs))
        return [b * float("#### " in text) for text, b in zip(completions, bonus, strict=True)]

    rows = [{"prompt": "12 + 21 = ?\n", "bonus": 0.5}, {"prompt": "30 + 11 = ?\n", "bonus": 0.0}]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    form = PromptForm("plain").settings()
    result = evaluate_model(model, tokenizer, rows, verifier=reward, max_new_tokens=64, progress=False, **form)
    assert seen["prompts"] == ["12 + 21 = ?\n", "30 + 11 = ?\n"] and seen["bonus"] == [0.5, 0.0]
    assert seen["keys"] == ["log_extra", "log_metric", "trainer_state"]
    assert [row["correct"] for row in result.problems] == [[True], [False]]
    assert [row["rewards"] for row in result.problems] == [[0.5], [0.0]]
    assert result.summary()["reward"] == (0.25, 0.25)  # mean, and sqrt((.25^2 + .25^2) / 1 / 2)
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "bonus": 1.0} for row in rows]
    tokenizer.chat_template = CHAT_TEMPLATE
    evaluate_model(model, tokenizer, chats, verifier=lambda completions, **_: seen.update(c=completions) or [1, 0],
                   max_new_tokens=4, progress=False, **PromptForm("chat").settings())  # fmt: skip
    assert seen["c"][0][0]["role"] == "assistant"  # as GRPOTrainer passes them


# -- the command line of the training ---------------------------------------------------------------------------------

SMALL = "--use_cpu --bf16 false --num_generations 2 --per_device_train_batch_size 4 --report_to none".split()
SMALL += ["--max_completion_length", "64"]


@pytest.fixture
def trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"{i} + 21 = ?", "prompt": f" {i} + 21 = ?\n", "answer": str(i + 21)} for i in range(30, 38)]
    chats = [{"prompt": [{"role": "user", "content": row["problem"]}], "answer": row["answer"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    plain = [shipped_agent("tiny-char"), shipped_agent("tiny-bpe")]
    with_template = []
    for model in plain:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = CHAT_TEMPLATE
        folder = tmp_path / "chat" / model.rsplit("/", 1)[-1]
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with_template.append(str(folder))

    def run(*options, data="rows.jsonl", chat=False):
        models = with_template if chat else plain
        code = main(["--models", *models, "--dataset", data, "--output_dir", "out", *SMALL, *options])
        shown = capsys.readouterr()
        return code, shown.out if code == 0 else shown.err

    return run


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--prompt_template", r"Add: {problem}\nA:"], ["| Add: 30 + 21 = ?", "| A:⟦response⟧", r"ends at '\nAdd:'"]),
        (["--prompt_column", "prompt"], ["|  30 + 21 = ?", "| ⟦response⟧", "plain, problems as they are"]),
        (["--instruction", ""], ["| Problem: 30 + 21 = ?", "| Solution:⟦response⟧"]),
    ],
)
def test_a_dry_run_shows_the_prompt_of_each_agent(trains, options, lines):
    code, plan = trains("--dry_run", *options)
    assert code == 0
    for name in ("tiny-char", "tiny-bpe"):
        assert f"the first prompt as {name} reads it: " in plan
    assert all(plan.count(line) >= (1 if "|" not in line else 2) for line in lines), plan


def test_chats_of_a_file(trains):
    code, plan = trains("--dry_run", data="chats.jsonl", chat=True)
    assert code == 0 and "| user: 30 + 21 = ?" in plan and "prompts: chat, problems as they are" in plan
    assert "assistant: ⟦response⟧" in plan


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("options", "data", "chat", "message"),
    [
        (
            ["--prompt_format", "chat"],
            "rows.jsonl",
            False,
            "no chat template in the tokenizer of 'tiny-char'",
        ),
        ([], "chats.jsonl", False, "the prompts of chats.jsonl are chats, but there is no chat template in"),
        (
            ["--prompt_format", "plain"],
            "chats.jsonl",
            True,
            "lists of messages, which are rendered by each",
        ),
        (["--system_prompt", "S"], "chats.jsonl", True, "Leave out --system_prompt."),
        (["--prompt_template", "Add"], "rows.jsonl", False, "has no {problem}"),
        (
            "--prompt_column prompt --problem_column problem".split(),
            "rows.jsonl",
            False,
            "--prompt_column takes prompts",
        ),
    ],
)
def test_forms_that_do_not_fit(trains, options, data, chat, message, dry):
    code, said = trains(*options, *dry, data=data, chat=chat)
    assert code == 2 and message in said and "Traceback" not in said


def test_a_trained_team_is_evaluated_in_its_form(trains, tmp_path):
    code, _ = trains("--prompt_template", r"{problem}\n", "--max_rounds", "1", "--max_completion_length", "4")
    assert code == 0
    expected = make_form("plain", prompt_template="{problem}\n")
    assert [read_form(str(tmp_path / "out" / name)) for name in ("tiny-char", "tiny-bpe")] == [expected] * 2


# -- is the task learnable? -------------------------------------------------------------------------------------------


def test_a_dry_run_samples_some_problems(trains):
    options = [
        "--dry_run",
        "--sample_problems",
        "3",
        "--prompt_template",
        r"{problem}\n",
        "--max_completion_length",
        "48",
    ]
    code, said = trains(*options)
    table = said[said.index("3 problems x 2 responses") :].splitlines()
    assert code == 0 and [line.split()[0] for line in table[2:4]] == ["tiny-char", "tiny-bpe"]
    rewards = [float(line.split()[1]) for line in table[2:4]]
    assert max(rewards) > 0 and "Learnable? " in table[4]
    assert trains("--sample_problems", "3")[0] == 2


def test_verdicts():
    nan = float("nan")
    right, wrong, mixed = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]
    assert "Yes: on 50 % of the problems" in verdict(["a", "b"], [[mixed, wrong], [wrong, wrong]], [0, 0])
    assert "Never rewarded: b." in verdict(["a", "b"], [[mixed, wrong], [wrong, wrong]], [0, 0])
    # Where one agent is always right and the other always wrong, the team's responses differ
    assert "Yes: on 100 %" in verdict(["a", "b"], [[right], [wrong]], [0, 0])
    nothing = verdict(["a", "b"], [[wrong], [wrong]], [0, 0.5])
    assert "No: not one response was rewarded" in nothing and "Up to 50 % of an agent's responses were cut" in nothing
    assert "same reward. Take harder" in verdict(["a"], [[right, right]], [0])
    assert (
        "Hardly: only on 20 %" in (easy := verdict(["a"], [[right] * 4 + [mixed]], [0])) and "harder problems" in easy
    )
    assert (
        "Hardly: only on 20 %" in (hard := verdict(["a"], [[wrong] * 4 + [mixed]], [0])) and "easier problems" in hard
    )
    assert "not one response could be scored" in verdict(["a"], [[[nan, nan]]], [0])
    assert "Yes: on 100 %" in verdict(["a"], [[[nan, nan], mixed]], [0])  # of the problems that can be scored


def test_the_prompt_shows_special_tokens():
    tokenizer = AutoTokenizer.from_pretrained(shipped_agent("tiny-bpe"))
    tokenizer.chat_template = CHAT_TEMPLATE
    shown = show_prompt("a", tokenizer, PromptForm("chat"), {"problem": "1 + 1"})
    assert f"| user: 1 + 1{tokenizer.eos_token}" in shown and shown.endswith("assistant: ⟦response⟧")
