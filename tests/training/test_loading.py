"""Which weights an agent trains, what its KL reference is, and adapters that go on training."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from support.tiny_teams import all_weights, config, dataset, digit_reward, team, weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hacpo_trl import HACPOTrainer, merge_adapter
from hacpo_trl.cli import evaluate
from hacpo_trl.cli.train import main
from hacpo_trl.playground import save_agent
from hacpo_trl.reporting.round_progress import RoundProgress
from hacpo_trl.training.loading import changes_base

PAIR = ["char", "bpe"]


def lora(**changes):
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **changes})


def of_objects(models, folders, args, names=("a", "b"), **kwargs):
    """A team of model objects that came from the tiny agent "char"."""
    trainer = HACPOTrainer(
        list(models),
        digit_reward,
        args,
        dataset(),
        processing_classes=[AutoTokenizer.from_pretrained(folders["char"]) for _ in models],
        agent_names=list(names)[: len(models)],
        **kwargs,
    )
    trainer.remove_callback(RoundProgress)
    return trainer


def load(folders, name="char"):
    return AutoModelForCausalLM.from_pretrained(folders[name])


@pytest.fixture(scope="module")
def adapters(agent_folders, tmp_path_factory):
    """Folders of two LoRA agents on one base, as `save_model` wrote them."""
    out = tmp_path_factory.mktemp("adapters")
    trainer = HACPOTrainer(
        [agent_folders["char"]] * 2,
        digit_reward,
        config(out, beta=0.1, max_rounds=1, learning_rate=1e-2),
        dataset(),
        peft_configs=lora(),
        agent_names=["a", "b"],
    )
    trainer.train()
    for agent in trainer.agents:  # far from the base, from which a KL would be seen at once
        for parameter in agent.model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.3)
    trainer.save_model()
    return {name: str(out / name) for name in ("a", "b")}


# -- what trains -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_that_was_loaded_frozen_is_refused(agent_folders, adapters, tmp_path, beta):
    model = PeftModel.from_pretrained(load(agent_folders), adapters["a"])
    with pytest.raises(ValueError, match="'a' has no trainable weights.*is_trainable=True"):
        of_objects([model], agent_folders, config(tmp_path, beta=beta))


def test_an_agent_without_trainable_weights_is_refused(agent_folders, tmp_path):
    with pytest.raises(ValueError, match="'a' has no trainable weights.*peft_configs"):
        of_objects([load(agent_folders).requires_grad_(False)], agent_folders, config(tmp_path))
    with pytest.raises(ValueError, match="'char' has no trainable weights"):  # of a path, known after building
        team(agent_folders, ["char"], config(tmp_path), peft_configs=lora(inference_mode=True))
    model = load(agent_folders).requires_grad_(False)
    of_objects([model], agent_folders, config(tmp_path), peft_configs=lora())  # the adapter trains


def test_agents_whose_weights_lie_in_the_same_memory_are_refused(agent_folders, tmp_path):
    one, two = load(agent_folders), load(agent_folders)
    two.lm_head.weight = torch.nn.Parameter(one.lm_head.weight.data)  # another object, the same memory
    with pytest.raises(ValueError, match="would train weights that agent"):
        of_objects([one, two], agent_folders, config(tmp_path))
    full = load(agent_folders)
    adapted = get_peft_model(copy.deepcopy(full), lora())
    adapted.base_model.model.lm_head.weight = torch.nn.Parameter(full.lm_head.weight.data, requires_grad=False)
    with pytest.raises(ValueError, match="agent 'a' would train weights that agent 'b' holds"):
        of_objects([full, adapted], agent_folders, config(tmp_path))


@pytest.mark.parametrize("changes", [{"bias": "all"}, {"bias": "lora_only"}, {"init_lora_weights": "pissa"}])
def test_adapters_that_change_the_base_do_not_share_it(agent_folders, tmp_path, changes):
    """Each agent trains as it does beside agents of another folder."""
    settings = AutoConfig.from_pretrained(agent_folders["char"], attention_bias=True)
    model = AutoModelForCausalLM.from_config(settings)  # with biases beside its adapters
    model.load_state_dict(load(agent_folders).state_dict(), strict=False)
    base = save_agent(model, AutoTokenizer.from_pretrained(agent_folders["char"]), tmp_path / "base")
    folders = {"a": base, "b": base}
    apart = {**folders, "b": str(shutil.copytree(base, tmp_path / "copy"))}

    def train(folders, output_dir):
        trainer = HACPOTrainer(
            list(folders.values()),
            digit_reward,
            config(output_dir, beta=0.0, max_rounds=1, peer_clip_delta=0.9, learning_rate=1e-2),
            dataset(),
            peft_configs=lora(**changes),
            agent_names=["a", "b"],
        )
        trainer.remove_callback(RoundProgress)
        trainer.train()
        for agent in trainer.agents:
            biases = [p for name, p in agent.model.named_parameters() if name.endswith("q_proj.base_layer.bias")]
            assert biases and all(bias.any() == ("bias" in changes) for bias in biases)  # they began as 0
        return all_weights(trainer)

    together = train(folders, tmp_path / "1")
    assert not torch.equal(*together)
    for one, other in zip(together, train(apart, tmp_path / "2"), strict=True):
        assert torch.equal(one, other)


def test_which_adapters_change_their_base():
    assert changes_base(lora(bias="lora_only")) and changes_base(lora(init_lora_weights="olora"))
    for harmless in (lora(), lora(init_lora_weights=False), lora(init_lora_weights="gaussian"), IA3Config()):
        assert not changes_base(harmless)


def test_trained_biases_leave_no_reference(agent_folders, tmp_path):
    with pytest.raises(ValueError, match="bias='all'.*beta=0"):
        team(agent_folders, ["char"], config(tmp_path, beta=0.1), peft_configs=lora(bias="all"))


def test_optimizers_in_the_wrong_order_are_refused(agent_folders, tmp_path):
    models = [load(agent_folders), load(agent_folders)]
    pairs = [(torch.optim.SGD(model.parameters(), lr=0.1), None) for model in models]
    of_objects(models, agent_folders, config(tmp_path), optimizers=pairs)
    models = [load(agent_folders), load(agent_folders)]
    pairs = [(torch.optim.SGD(model.parameters(), lr=0.1), None) for model in reversed(models)]
    with pytest.raises(ValueError, match="'a': its optimizer holds none"):
        of_objects(models, agent_folders, config(tmp_path), optimizers=pairs)


# -- the KL reference ------------------------------------------------------------------------------------------------


def kls(trainer, name="a"):
    return [entry[f"{name}/kl"] for entry in trainer.state.log_history if f"{name}/kl" in entry]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_object_that_was_passed(agent_folders, tmp_path, dtype):
    """Changed in memory, with other token embeddings: what its folder holds does not count."""
    model = load(agent_folders).to(dtype)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    start = weights(model)
    args = config(tmp_path, beta=0.1, learning_rate=1e-2, model_init_kwargs={"dtype": "float32"})
    trainer = of_objects([model], agent_folders, args)
    trainer.train()
    assert kls(trainer)[0] == pytest.approx(0.0, abs=1e-6) and kls(trainer)[-1] > 1e-4
    assert torch.equal(weights(trainer.ref_model), start) and trainer.ref_model.dtype == dtype
    assert not torch.equal(weights(trainer.model), start)


def test_a_trained_model_is_the_reference_of_its_next_run(agent_folders, tmp_path):
    first = of_objects([load(agent_folders)], agent_folders, config(tmp_path / "1", beta=0.1, learning_rate=1e-2))
    first.train()
    middle = weights(first.model)
    second = of_objects([first.model], agent_folders, config(tmp_path / "2", beta=0.1, learning_rate=1e-2))
    second.train()
    assert kls(second)[0] == pytest.approx(0.0, abs=1e-6) and kls(second)[-1] > 1e-5
    assert torch.equal(weights(second.ref_model), middle)


@pytest.mark.parametrize("init", [False, "pissa", "gaussian"])
def test_a_new_adapter_is_compared_with_its_own_start(agent_folders, tmp_path, init):
    args = config(tmp_path, beta=0.1, learning_rate=1e-2)
    trainer = team(agent_folders, ["char"], args, peft_configs=lora(init_lora_weights=init))
    trainer.train()
    assert kls(trainer, "char")[0] == pytest.approx(0.0, abs=1e-6) and kls(trainer, "char")[-1] > 1e-5
    assert ("ref" in trainer.model.peft_config) == (init != "gaussian")  # that one starts as the base
    assert not any(p.requires_grad for n, p in trainer.model.named_parameters() if ".ref." in n)


def test_adapters_of_embeddings_are_compared_with_their_start(agent_folders, tmp_path):
    """Their weights are called without a dot behind the adapter's name."""
    model = get_peft_model(load(agent_folders), lora(target_modules=["embed_tokens"], init_lora_weights=False))
    trainer = of_objects([model], agent_folders, config(tmp_path, beta=0.1, learning_rate=1e-2))
    trainer.train()
    assert kls(trainer)[0] == pytest.approx(0.0, abs=1e-6) and kls(trainer)[-1] > 1e-5


# -- adapters that go on training ------------------------------------------------------------------------------------


def test_a_saved_adapter_goes_on_as_a_model(agent_folders, adapters, tmp_path):
    """By its folder, as by the PeftModel loaded from it; the agents share their base."""
    settings = {"beta": 0.1, "learning_rate": 1e-2, "peer_clip_delta": 0.9}
    trainer = HACPOTrainer(list(adapters.values()), digit_reward, config(tmp_path / "1", **settings), dataset())
    trainer.remove_callback(RoundProgress)
    assert trainer.agent_names == ["a", "b"]
    assert [agent.base.title for agent in trainer.agents] == ["char", "char"]
    first, second = ({p.data_ptr() for p in agent.model.parameters()} for agent in trainer.agents)
    assert first & second and first - second
    start = all_weights(trainer)
    trainer.train()
    for name in ("a", "b"):  # against the base with the adapter as it was loaded
        assert kls(trainer, name)[0] == pytest.approx(0.0, abs=1e-6) and kls(trainer, name)[-1] > 1e-5

    models = [PeftModel.from_pretrained(load(agent_folders), f, is_trainable=True) for f in adapters.values()]
    twin = of_objects(models, agent_folders, config(tmp_path / "2", **settings))
    assert all(torch.equal(a, b) for a, b in zip(start, all_weights(twin), strict=True))
    twin.train()
    assert all(torch.equal(a, b) for a, b in zip(all_weights(trainer), all_weights(twin), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(start, all_weights(twin), strict=True))

    trainer.save_model()
    assert not (tmp_path / "1" / "a" / "ref").exists()
    merge_adapter(str(tmp_path / "1" / "a"), str(tmp_path / "merged"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("1 + 2", return_tensors="pt")
    ours = trainer.model.eval()(**ids).logits
    torch.testing.assert_close(loaded(**ids).logits, ours, atol=1e-4, rtol=1e-4)


def test_an_adapter_and_a_new_one_share_their_base(agent_folders, adapters, tmp_path):
    trainer = HACPOTrainer(
        [adapters["a"], agent_folders["char"], agent_folders["bpe"]],
        digit_reward,
        config(tmp_path, max_rounds=1),
        dataset(),
        peft_configs=[None, lora(), None],
    )
    saved, new, full = ({p.data_ptr() for p in agent.model.parameters()} for agent in trainer.agents)
    assert saved & new and not (saved | new) & full
    trainer.train()


def test_a_resumed_adapter_is_compared_with_the_same_start(agent_folders, adapters, tmp_path):
    settings = {"beta": 0.5, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}

    def build(folder, **changes):
        trainer = HACPOTrainer([folder], digit_reward, config(tmp_path, **{**settings, **changes}), dataset())
        trainer.remove_callback(RoundProgress)
        return trainer

    folder = str(shutil.copytree(adapters["a"], tmp_path / "a"))
    whole = build(folder)
    whole.train()
    whole.save_model()  # into the folder that it started from
    resumed = build(folder)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert kls(whole)[-1] == kls(resumed)[-1] > 0


def test_an_adapter_of_another_name_trains_and_is_saved_like_any(agent_folders, adapters, tmp_path):
    def peft_model(name):
        return PeftModel.from_pretrained(load(agent_folders), adapters["a"], adapter_name=name, is_trainable=True)

    trained = []
    for name in ("default", "mine"):
        trainer = of_objects([peft_model(name)], agent_folders, config(tmp_path / name, beta=0.1, learning_rate=1e-2))
        trainer.train()
        assert kls(trainer)[0] == pytest.approx(0.0, abs=1e-6) and kls(trainer)[-1] > 1e-5
        trainer.save_model()
        merge_adapter(str(tmp_path / name / "a"), str(tmp_path / name / "merged"))
        trained.append(weights(AutoModelForCausalLM.from_pretrained(tmp_path / name / "merged")))
    assert torch.equal(*trained)
    model = peft_model("mine")
    model.add_adapter("other", lora())
    with pytest.raises(ValueError, match="'a' has the adapters mine, other"):
        of_objects([model], agent_folders, config(tmp_path))


def test_an_adapter_that_peft_saved_under_a_name_is_merged(agent_folders, adapters, tmp_path):
    merge_adapter(adapters["a"], str(tmp_path / "merged"))
    model = PeftModel.from_pretrained(load(agent_folders), adapters["a"], adapter_name="mine")
    model.save_pretrained(tmp_path / "saved")  # into saved/mine, without a tokenizer
    assert not (tmp_path / "saved" / "adapter_config.json").exists()
    for folder in ("saved", "saved/mine"):
        merge_adapter(str(tmp_path / folder), str(tmp_path / "again"))
        merged, again = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("merged", "again"))
        assert torch.equal(weights(merged), weights(again))
        text = "12 + 34"
        ids = [
            AutoTokenizer.from_pretrained(f)(text)["input_ids"] for f in (tmp_path / "again", agent_folders["char"])
        ]
        assert ids[0] == ids[1]
    model.add_adapter("other", lora())
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="holds several adapters. Choose one of .*saved/mine, .*saved/other"):
        merge_adapter(str(tmp_path / "saved"), str(tmp_path / "no"))
    with pytest.raises(ValueError, match="holds no adapter: there is no adapter_config.json in it"):
        merge_adapter(str(agent_folders["char"]), str(tmp_path / "no"))


def test_an_adapter_is_evaluated_as_the_merged_model(adapters, tmp_path, monkeypatch):
    (tmp_path / "sums.jsonl").write_text("\n".join(f'{{"problem": "1{i} + 2", "answer": "1"}}' for i in range(6)))
    merge_adapter(adapters["a"], str(tmp_path / "merged"))
    options = ["--benchmarks", str(tmp_path / "sums.jsonl"), "--output_dir", str(tmp_path / "e"), "--device", "cpu"]
    base = json.loads(Path(adapters["a"], "adapter_config.json").read_text())["base_model_name_or_path"]
    evaluate.main([adapters["a"], str(tmp_path / "merged"), base, "--max_new_tokens", "12", *options])
    answers = [
        [row["samples"] for row in json.loads((tmp_path / "e" / entry["file"]).read_text())["problems"]]
        for entry in json.loads((tmp_path / "e" / "results.json").read_text())["results"]
    ]
    assert answers[0] == answers[1] != answers[2]
    monkeypatch.setattr(evaluate, "_load_problems", lambda _: pytest.fail("the refusal comes first"))
    for models in ([base, adapters["a"]], [base, "--before", adapters["a"]]):
        with pytest.raises(
            SystemExit, match="a is an adapter, and the engine 'vllm' takes whole models.*merge_adapter"
        ):
            evaluate.main([*models, "--engine", "vllm", *options])


def test_an_adapter_on_an_adapter_and_one_without_base(agent_folders, adapters, tmp_path):
    with pytest.raises(ValueError, match="is an adapter already.*--use_peft"):
        HACPOTrainer([adapters["a"]], digit_reward, config(tmp_path), dataset(), peft_configs=lora())
    for base, message in ((None, "names no base"), (str(tmp_path / "gone"), "its base .*gone': there is no such")):
        folder = tmp_path / f"copy-{base is None}"
        shutil.copytree(adapters["a"], folder)
        settings = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
        with pytest.raises(ValueError, match=message):
            HACPOTrainer([str(folder)], digit_reward, config(tmp_path), dataset())
    inner = tmp_path / "outer"
    shutil.copytree(adapters["a"], inner / "mine")  # as PEFT saves an adapter of another name
    with pytest.raises(ValueError, match=r"holds .*outer/mine"):
        HACPOTrainer([str(inner)], digit_reward, config(tmp_path), dataset())


def test_the_command_line_takes_adapters(adapters, tmp_path, capsys):
    (tmp_path / "problems.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n' * 8)
    options = ["--models", *adapters.values(), "--dataset", str(tmp_path / "problems.jsonl"), "--output_dir", "out"]
    options += "--use_cpu true --bf16 false --num_generations 4 --per_device_train_batch_size 4".split()
    options += "--max_completion_length 64 --dry_run".split()
    assert main(options) == 0
    assert adapters["a"] in capsys.readouterr().out
    assert main([*options, "--use_peft"]) == 2
    assert "--use_peft" in capsys.readouterr().err
