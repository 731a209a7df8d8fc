"""Processes that talk to the Hub that the tests of sharing start; not a test itself.

    python tests/support/hub_worker.py share|load|together settings.json

The Hub's address is read when huggingface_hub is imported, so that they cannot run in the tests' own process. What
they found goes, as JSON, into "report" of the settings.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

torch.set_num_threads(1)
SCENE = sys.argv[1]
SETTINGS = json.loads(Path(sys.argv[2]).read_text())
WORK = Path(SETTINGS["work"])
REPORT = {}
TEXT = "12 + 345 = ?\n"


def logits(model, tokenizer):
    model.eval()
    with torch.no_grad():
        return model(**tokenizer(TEXT, return_tensors="pt")).logits.float()


def failing(call):
    """The message of the error that a call ends in."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def build(output_dir, names=("char", "bpe"), bpe="lab/tiny-bpe", **changes):
    from peft import LoraConfig
    from support.tiny_teams import config, team

    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return team(
        {"char": SETTINGS["char"], "bpe": bpe},
        names,
        config(WORK / output_dir, **{"max_rounds": 1, **changes}),
        peft_configs=[adapter if name == "bpe" else None for name in names],
        agent_names=list(names),
    )


def share():
    torch.manual_seed(0)
    trainer = build("run", hub_model_id="me/team")
    trainer.train()
    (WORK / "run" / ".pushing" / "char-of a killed process").mkdir(parents=True)
    commits = trainer.push_to_hub(
        commit_message="First", dataset_name="lab/sums", license="mit", accuracies={"char": {"sums": (0.25, 0.5)}}
    )
    REPORT["commits"] = [commit.commit_url for commit in commits]
    REPORT["again"] = [commit.oid for commit in trainer.push_to_hub(commit_message="Again")]
    futures = trainer.push_to_hub(commit_message="To a branch", blocking=False, revision="dev")
    REPORT["branch"] = [future.result().oid for future in futures]
    REPORT["left"] = sorted(path.name for path in (WORK / "run").iterdir())
    torch.save(
        {agent.agent_name: logits(agent.model, agent.processing_class) for agent in trainer.agents}, WORK / "logits.pt"
    )

    # Failures of the same team, at different places
    for name, kind, status in SETTINGS["faults"]:
        trainer.publisher.opened.clear()
        trainer.publisher.wanted = {agent: f"me/{name}-{agent}" for agent in trainer.agent_names}
        REPORT[f"{kind} {status}"] = failing(trainer.push_to_hub)
    trainer.publisher.opened.clear()
    REPORT["wrong token"] = failing(lambda: trainer.push_to_hub(token="hf_wrong"))
    trainer.publisher.opened.clear()
    trainer.publisher.wanted = {"char": "team-char", "bpe": "me/team-char"}
    REPORT["same repository"] = failing(trainer.push_to_hub)
    later = build("later", hub_model_id="me/commit-500")
    REPORT["in the background"] = failing(lambda: later.push_to_hub(blocking=False)[1].result())

    during = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 4, "max_rounds": 2, "save_total_limit": 1}
    REPORT["before loading"] = failing(lambda: build("x", hub_model_id="stranger/team", **during))
    trainer = build(
        "during",
        bpe=SETTINGS["bpe"],
        hub_model_id="me/during",
        hub_private_repo=True,
        hub_always_push=True,
        agent_overrides={
            "bpe": {"hub_model_id": "lab/other", "hub_strategy": "end", "hub_base_model_id": "lab/tiny-bpe"}
        },
        **during,
    )
    trainer.train()
    trainer.save_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = build("unlucky", hub_model_id="me/commit-500", **during)
        trainer.train()
    REPORT["unlucky"] = [str(warning.message) for warning in caught if "agent '" in str(warning.message)]
    REPORT["unlucky steps"] = trainer.state.global_step

    from hacpo_trl.cli import main

    command = [
        "train", "--models", SETTINGS["char"], SETTINGS["char"], "--agent_names", "a", "b", "--dataset",
        SETTINGS["problems"], "--output_dir", str(WORK / "my run"), "--max_rounds", "1", "--num_generations", "4",
        "--per_device_train_batch_size", "4", "--max_completion_length", "8", "--use_cpu", "--bf16", "False",
        "--gradient_checkpointing", "False", "--report_to", "none", "--push_to_hub", "--save_strategy", "no",
    ]  # fmt: skip
    REPORT["command"] = main(command)


def load():
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = torch.load(WORK / "logits.pt")
    for name, loader in (("char", AutoModelForCausalLM), ("bpe", AutoPeftModelForCausalLM)):
        tokenizer = AutoTokenizer.from_pretrained(f"me/team-{name}")
        model = loader.from_pretrained(f"me/team-{name}", dtype=torch.float32)  # as it was trained
        REPORT[f"{name} differs by"] = (logits(model, tokenizer) - expected[name]).abs().max().item()
    base = AutoModelForCausalLM.from_pretrained("lab/tiny-bpe", dtype=torch.float32)
    REPORT["bpe has learned"] = (logits(base, tokenizer) - expected["bpe"]).abs().max().item()
    for name, program in SETTINGS["programs"].items():
        scope = {}
        exec(program, scope)
        REPORT[f"{name} writes"] = scope["output"].shape[1] - scope["inputs"]["input_ids"].shape[1]


def together():
    """One of two processes of a run."""
    trainer = build(
        "two", hub_model_id="me/two", push_to_hub=True, save_strategy="steps", save_steps=4, ddp_backend="gloo"
    )
    trainer.train()
    commits = trainer.push_to_hub(commit_message="Both")
    REPORT[f"commits of {trainer.accelerator.process_index}"] = len(commits)
    torch.distributed.barrier()


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    {"share": share, "load": load, "together": together}[SCENE]()
    Path(SETTINGS["report"] + os.environ.get("RANK", "")).write_text(json.dumps(REPORT))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # now and then a thread of gloo aborts the interpreter's own way out
