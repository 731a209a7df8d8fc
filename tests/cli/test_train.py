"""`hacpo train`: what is wrong is told in one sentence before anything is loaded, by a dry run as by a run."""

import json
import sys
from dataclasses import fields

import pytest
from trl import ModelConfig

from hacpo_trl import HACPOConfig
from hacpo_trl.cli import command as cli
from hacpo_trl.cli import evaluate, train
from hacpo_trl.cli.train import ScriptArguments, main
from hacpo_trl.maths.reward import load_reward
from hacpo_trl.playground import shipped_agent

MODELS = [shipped_agent("tiny-char"), shipped_agent("tiny-bpe")]
SMALL = "--use_cpu --bf16 false --num_generations 4 --per_device_train_batch_size 8 --report_to none".split()
SMALL += ["--max_completion_length", "64"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"1 + {i}?", "answer": str(1 + i)} for i in range(8)]
    (tmp_path / "ok.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "two.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    (tmp_path / "data.txt").write_text("x")
    (tmp_path / "bad.csv").write_text("problem,answer\na,b,c\n")
    return tmp_path


def said(capsys, *options, dataset="ok.jsonl", models=MODELS):
    """The one line of an error."""
    try:
        code = main(["--models", *models, "--dataset", dataset, "--output_dir", "out", *SMALL, *options])
    except SystemExit as end:
        code = end.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2, lines
    assert lines[0].startswith("hacpo train: error: ")
    return "\n".join(lines).removeprefix("hacpo train: error: ")


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_loaded(monkeypatch):
    for name in ("load_problems", "HACPOTrainer", "describe", "load_tokenizers"):
        monkeypatch.delattr(train, name)


@pytest.mark.parametrize("options", [[], ["--dry_run"]], ids=["run", "dry run"])
def test_a_file_that_nothing_evaluates(capsys, nothing_loaded, options):
    message = said(capsys, "--eval_dataset_file", "ok.jsonl", *options)
    assert "--eval_dataset_file ok.jsonl would never be read" in message
    assert "--eval_strategy steps --eval_steps N" in message


def test_nothing_to_evaluate_on(capsys, nothing_loaded):
    assert "Give --eval_dataset_file" in said(capsys, "--eval_strategy", "steps", "--eval_steps", "4")


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("lost.jsonl", [], "lost.jsonl: there is no such file."),
        ("data.txt", [], "data.txt: cannot read .txt; use .jsonl, .json, .csv or .parquet."),
        ("bad.csv", [], "bad.csv, line 2: 3 fields, but the header has 2 columns"),
        ("ok.jsonl", ["--problem_column", "x"], "ok.jsonl: there is no column 'x'"),
        ("two.jsonl", [], "train_dataset has 2 prompts, but a round takes 4 (generation_batch_size=16 /"),
        ("ok.jsonl", ["--max_problems", "1"], "train_dataset has 1 prompts, but a round takes 4"),
        ("ok.jsonl", ["--max_problems", "0"], "0 is no number of problems to take from ok.jsonl"),
        (
            "ok.jsonl",
            "--eval_dataset_file lost.csv --eval_strategy steps --eval_steps 4".split(),
            "lost.csv: there is no such file.",
        ),
        (
            "ok.jsonl",
            ["--offload_inactive_agents", "true", "--load_in_8bit", "true"],
            "offload_inactive_agents=True cannot move quantized weights.",
        ),
        ("ok.jsonl", ["--max_completion_length", "0"], "max_completion_length=0 must be a whole number, at least 1."),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(capsys, dataset, options, message, dry):
    found = said(capsys, *options, *dry, dataset=dataset)
    assert found.startswith(message) and "Traceback" not in found


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry run"])
def test_sleeping_agents_are_refused_with_fsdp(capsys, monkeypatch, dry):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    found = said(capsys, "--offload_inactive_agents", "true", *dry)
    assert found.startswith("offload_inactive_agents=True does not work with FSDP, whose shards cannot be parked.")


def test_a_dry_run_tells_what_it_has_not_looked_at(capsys):
    options = ["--eval_dataset_file", "two.jsonl", "--eval_strategy", "steps", "--eval_steps", "4"]
    assert (
        main(["--models", *MODELS, "--dataset", "lab/maths", "--output_dir", "o", *SMALL, *options, "--dry_run"]) == 0
    )
    plan = capsys.readouterr().out
    assert "lab/maths: a data set of the Hub, not looked at" in plan and "2 problems to evaluate on" in plan
    assert main(["--models", *MODELS, "--dataset", "ok.jsonl", "--output_dir", "o", *SMALL, "--dry_run"]) == 0
    assert "8 problems, 2 rounds" in capsys.readouterr().out


# -- rewards ----------------------------------------------------------------------------------------------------------


GRADERS = """
def short(completions, **columns):
    return [float(len(completion) < 5) for completion in completions]

limit = 5
"""


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("maths_reward", "'maths_reward' is unknown; use math_reward, number_reward, module.function or file.py"),
        ("graders.shrt", "'graders' has no function 'shrt'. Did you mean short?"),
        ("graders.limit", "'graders.limit' is a int, not a function"),
        ("lost.py:short", "'lost.py:short': there is no file 'lost.py'"),
        ("nowhere.graders.short", "'nowhere.graders' cannot be imported: ModuleNotFoundError: No module named"),
        ("broken.short", "'broken' cannot be imported: SyntaxError"),
        ("graders.short --reward_weights 1 2", "reward_weights=[1.0, 2.0] has 2 numbers for 1 reward functions"),
    ],
)
def test_reward_functions_that_are_not_there(capsys, folder, options, message, dry):
    (folder / "graders.py").write_text(GRADERS)
    (folder / "broken.py").write_text("def short(:")
    assert message in said(capsys, "--reward_funcs", *options.split(), *dry)


def test_reward_functions_by_name(capsys, folder):
    (folder / "own.py").write_text(GRADERS)
    (folder / "graders.py").write_text(GRADERS)
    (folder / "run.yaml").write_text("reward_funcs: number_reward\n")
    run = ["--models", *MODELS, "--dataset", "ok.jsonl", "--output_dir", "o", *SMALL, "--dry_run"]
    names = ["math_reward", "graders.short", "own.py:short"]
    assert main([*run, "--reward_funcs", *names, "--reward_weights", "1", "0.5", "0.5"]) == 0
    assert "graded by math_reward, short-1, short-2" in capsys.readouterr().out
    assert main([*run, "--config", "run.yaml"]) == 0
    assert "graded by number_reward" in capsys.readouterr().out
    assert [load_reward(name)(["1234", "12345"]) for name in names[1:]] == [[1.0, 0.0]] * 2


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--learnin_rate", "1e-6"], "unknown option --learnin_rate. Did you mean --learning_rate?"),
        (["--max-runds=3"], "unknown option --max-runds. Did you mean --max-rounds?"),
        (["--xyzzy"], "unknown option --xyzzy."),
        (["--alpha", "1", "2"], "unexpected argument '2'."),
        (["--alpha", "much"], "argument --alpha: invalid float value: 'much'"),
        (["--learning_rate", "inf"], "learning_rate=inf must be a finite number, e.g. 1e-06."),
        (["--config"], "which file? Give --config with a YAML file."),
        (["--config", "lost.yaml"], "--config lost.yaml: there is no such file."),
        (["--resume_from_checkpoint", "o/checkpoint-8"], "The checkpoint 'o/checkpoint-8' does not exist."),
    ],
)
def test_options_that_are_wrong(capsys, options, message):
    assert said(capsys, *options) == message


def test_an_unknown_choice(capsys):
    message = said(capsys, "--method", "hacpo2")
    assert message.startswith("argument --method: invalid choice: 'hacpo2' (choose from") and "\n" not in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "learnin_rate: 1",
            "the file of --config sets 'learnin_rate', which is no setting. Did you mean learning_rate?",
        ),
        ("alpha: 1\nbeta: [1", "run.yaml, line 2, column 9: no YAML: "),
        ("- alpha", "Config file run.yaml must contain a YAML mapping."),
        ("prompt_format: chats", "prompt_format='chats' is unknown; use one of auto, chat, plain."),
        ("alpha: much", "argument --alpha: invalid float value: 'much'"),
    ],
)
@pytest.mark.parametrize("form", ["--config run.yaml", "--config=run.yaml"])
def test_files_that_are_wrong(folder, capsys, content, message, form):
    (folder / "run.yaml").write_text(content)
    assert said(capsys, *form.split()).startswith(message)


def test_models_in_a_file_are_a_list(folder, capsys):
    (folder / "run.yaml").write_text("models: a\ndataset: ok.jsonl\noutput_dir: out")
    assert main(["--config", "run.yaml", *SMALL]) == 2
    assert "models must be a list" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["./lost", "/lost/agent", "lost/far/away"])
@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["run", "dry run"])
def test_folders_that_are_not_there(capsys, model, dry):
    assert f"{model!r}: there is no such folder" in said(capsys, *dry, models=[MODELS[0], model])


def test_what_goes_wrong_in_training_keeps_its_traceback(capsys, monkeypatch):
    class Trainer:
        def __init__(self, **kwargs):
            self.card_details = {}

        def train(self, **kwargs):
            raise ValueError("of a reward function")

    monkeypatch.setattr(train, "HACPOTrainer", Trainer)
    with pytest.raises(ValueError, match="of a reward function"):
        main(["--models", *MODELS, "--dataset", "ok.jsonl", "--output_dir", "out", *SMALL])


# -- the command ------------------------------------------------------------------------------------------------------


def test_helps_name_the_command(capsys):
    assert evaluate.build_parser().format_usage().startswith("usage: hacpo evaluate ")
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: hacpo train --models MODEL MODEL ... --dataset DATASET ")
    order = ("agents and problems:", "--models", "(HACPOConfig)", "--alpha", "ModelConfig)", "--lora_r", "GRPOConfig)")
    places = [text.index(part, text.index("agents and problems:")) for part in (*order, "--learning_rate")]
    assert places == sorted(places)
    for name in {f.name for kind in (HACPOConfig, ModelConfig, ScriptArguments) for f in fields(kind) if f.init}:
        assert text.count(f"\n  --{name} ") + text.count(f"\n  --{name}, ") == 1, name


def test_a_report_without_matplotlib(folder, capsys, monkeypatch):
    settings = {"agents": ["a"], "shares_rollouts": True, "method": "hacpo", "settings": {}}
    (folder / "hacpo_run.json").write_text(json.dumps(settings))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "a/reward": 0.5}]}))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(folder)]) == 2
    lines = capsys.readouterr().err.splitlines()
    message = "hacpo report: error: The page of a run needs matplotlib: pip install matplotlib pandas."
    assert lines == [message]
