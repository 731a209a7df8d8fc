"""Tests of the checks before any weights are loaded: names, lists per agent, models, tokenizers, data sets."""

import copy
import itertools
import json
import pathlib
import random
import re
import warnings

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, get_peft_model
from support.tiny_teams import CHAT_TEMPLATE, SPECS
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.processing_utils import ProcessorMixin

import hacpo_trl.texts.prompt_check
import hacpo_trl.training.arguments
from hacpo_trl import HACPOConfig
from hacpo_trl.playground import build_agent, save_agent
from hacpo_trl.training.arguments import (
    check_dataset,
    check_models,
    load_tokenizers,
    per_agent,
    refuse,
    resolve_names,
    resolve_optimizers,
    resolve_peft_configs,
    warn_if_alone,
)


def config(**changes):
    return HACPOConfig(**{"output_dir": "out", "use_cpu": True, "bf16": False, **changes})


def model():
    return build_agent(SPECS["char"])[0]


def tokenizer():
    return build_agent(SPECS["char"])[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [save_agent(*build_agent(SPECS[name]), root / name) for name in ("char", "bpe")]


def message_of(error, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# -- per_agent --------------------------------------------------------------------------------------------------------


def test_per_agent():
    assert per_agent(3, 2, "x") == [3, 3]
    assert per_agent([3, None], 2, "x") == [3, None]
    assert per_agent(None, 3, "x") == [None] * 3
    assert per_agent(None, 2, "x", default=(1, 2)) == [(1, 2), (1, 2)]
    assert per_agent(0, 2, "x", default=5) == [0, 0]
    assert per_agent([], 0, "x") == []


def test_per_agent_names_the_argument_and_both_counts():
    message = message_of(ValueError, per_agent, [1, 2, 3], 2, "peft_configs")
    assert "peft_configs" in message and "3 values" in message and "2 agents" in message
    message_of(ValueError, per_agent, [], 1, "x")


def test_per_agent_copies_the_list():
    values = [1, 2]
    result = per_agent(values, 2, "x")
    result[0] = 5
    assert values == [1, 2]


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["Qwen/Qwen3-1.7B-Base", "meta-llama/Llama-3.2-3B"], ["Qwen3-1.7B-Base", "Llama-3.2-3B"]),
        (["some/folder/", "./other"], ["folder", "other"]),
        (["a/m", "b/m", "c/n", "d/m"], ["m-1", "m-2", "n", "m-3"]),
        (["m", "m"], ["m-1", "m-2"]),
        (["a b", "c:d"], ["a-b", "c-d"]),
        ([".", "..", "/"], ["agent-0", "agent-1", "agent-2"]),
        (["é", ".hidden"], ["agent-0", "hidden"]),
        (["only"], ["only"]),
    ],
)
def test_default_names(models, names):
    assert resolve_names(models, None) == names


def test_default_names_of_objects(folders):
    loaded = AutoModelForCausalLM.from_pretrained(folders[1])
    assert resolve_names([model(), loaded, folders[0]], None) == ["agent-0", "bpe", "char"]


def test_default_names_of_peft_models(folders):
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folders[1]), LoraConfig(target_modules=["q_proj"]))
    assert resolve_names([adapted], None) == ["bpe"]


def test_default_names_of_paths():
    assert resolve_names([pathlib.Path("models/small"), "large"], None) == ["small", "large"]


@pytest.mark.parametrize(
    "models", [["Org/Qwen", "org/qwen"], ["a-1", "x/a", "y/a"], ["a", "a", "a-2"], ["A", "a", "a"], ["é", "agent-0"]]
)
def test_default_names_always_differ(models):
    # nobody named anything, so nothing is to be complained of
    names = resolve_names(models, None)
    assert len({name.lower() for name in names}) == len(models)


def test_random_default_names_are_good_folders():
    generator = random.Random(0)
    for _ in range(200):
        models = ["".join(generator.choices("aB.-_/ é1", k=generator.randint(1, 4))) for _ in range(3)]
        names = resolve_names(models, None)
        assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) for name in names), (models, names)
        assert len({name.lower() for name in names}) == 3


def test_no_agent_is_named_like_a_checkpoint():
    # the run's own checkpoints are folders of this name: rotation would delete the agent, resuming would take it
    (name,) = resolve_names(["runs/first/checkpoint-500"], None)
    assert not re.fullmatch(r"checkpoint-\d+", name)
    message = message_of(ValueError, resolve_names, ["a"], ["checkpoint-500"])
    assert "checkpoint-500" in message


@pytest.mark.parametrize("name", ["completions", "Completions", "runs"])
def test_no_agent_is_named_like_a_folder_of_the_run(name):
    assert resolve_names([f"lab/{name}", name], None) == ["lab", "agent-1"]
    message = message_of(ValueError, resolve_names, ["a"], [name])
    assert message == f"agent name '{name}' is that of a folder of the run itself; try 'agent-{name}'."
    assert resolve_names(["a"], [f"agent-{name}"]) == [f"agent-{name}"]


def test_given_names_are_kept():
    assert resolve_names(["x", "x"], ["Weak_1.5b", "strong-3B"]) == ["Weak_1.5b", "strong-3B"]
    assert resolve_names(["x", "x"], ("a", "b")) == ["a", "b"]
    names = ["a", "b"]
    assert resolve_names(["x", "x"], names) is not names


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], []])
def test_one_name_for_each(names):
    message = message_of(ValueError, resolve_names, ["x", "y"], names)
    assert f"{len(names)} names" in message and "2 models" in message


def test_one_text_is_no_list_of_names():
    message_of((ValueError, TypeError), resolve_names, ["x", "y"], "ab")
    with pytest.raises((ValueError, TypeError)) as caught:
        resolve_names(["x"], "llama")
    assert "5 names" not in str(caught.value)


@pytest.mark.parametrize("bad", ["", "a/b", "a\\b", ".", "..", ".a", "-a", "a b", "a\n", "é", "a:b", "a*", "/"])
def test_names_that_are_no_folders(bad):
    message = message_of(ValueError, resolve_names, ["x", "y"], [bad, "ok-name"])
    assert repr(bad) in message
    suggested = re.search(r"e\.g\. '([^']+)'", message)[1]
    assert resolve_names(["x", "y"], [suggested, "ok-name"])[0] == suggested


@pytest.mark.parametrize("names", [[1, 2], [None, "b"]])
def test_names_that_are_no_texts(names):
    message_of((ValueError, TypeError), resolve_names, ["x", "y"], names)


@pytest.mark.parametrize("names", [["a", "a"], ["Agent", "agent"], ["a", "b", "A"], ["a", "a", "a-1"], ["x-1", "X-1"]])
def test_equal_names(names):
    message = message_of(ValueError, resolve_names, ["m"] * len(names), names)
    assert "must differ" in message and names[0] in message
    suggested = re.search(r"try (.+)\.$", message)[1].split(", ")
    assert resolve_names(["m"] * len(names), suggested) == suggested


# -- models -----------------------------------------------------------------------------------------------------------


def test_models_that_are_there(folders):
    assert check_models([*folders, model()], ["a", "b", "c"], [config()] * 3, [None] * 3) is None


def test_all_bad_models_are_named_at_once_and_nothing_is_loaded(folders, monkeypatch, tmp_path):
    def load(*args, **kwargs):
        raise AssertionError("weights are being loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{no json")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    bad = ["nobody/no-such-model", *(str(tmp_path / name) for name in ("missing", "empty", "broken", "unknown"))]
    models = [folders[0], *bad, folders[1], model()]
    names = [f"agent{i}" for i in range(len(models))]
    message = message_of(ValueError, check_models, models, names, [config()] * len(models), [None] * len(models))
    lines = message.splitlines()[1:]
    assert len(lines) == len(bad)
    for line, name, path in zip(lines, names[1:], bad, strict=False):
        assert line.startswith(f"- {name}: {path!r}: ") and not line.endswith(": ")
    assert "nothing was loaded" in message


def test_an_error_without_words(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError

    monkeypatch.setattr(hacpo_trl.training.arguments.AutoConfig, "from_pretrained", fail)
    assert "- a: 'some/model'" in message_of(ValueError, check_models, ["some/model"], ["a"], [config()], [None])


def test_a_missing_folder_as_a_path_is_noticed(tmp_path):
    message = message_of(ValueError, check_models, [tmp_path / "missing"], ["a"], [config()], [None])
    assert "missing" in message


def test_no_models():
    assert "models=[" in message_of(ValueError, check_models, [], [], [], [])


def test_the_same_object_twice():
    one = model()
    message = message_of(ValueError, check_models, [one, one], ["a", "b"], [config()] * 2, [None] * 2)
    assert "same model object" in message and "deepcopy" in message
    assert check_models([one, copy.deepcopy(one)], ["a", "b"], [config()] * 2, [None] * 2) is None


def test_the_same_path_twice_is_fine(folders):
    assert check_models([folders[0]] * 2, ["a", "b"], [config()] * 2, [None] * 2) is None


def test_revision_and_remote_code_reach_the_config(monkeypatch):
    seen = []
    monkeypatch.setattr(
        hacpo_trl.training.arguments.AutoConfig, "from_pretrained", lambda *args, **kwargs: seen.append(kwargs)
    )
    configs = [
        config(model_init_kwargs={"revision": "v2", "trust_remote_code": True}),
        config(model_init_kwargs={"dtype": "float32"}, trust_remote_code=True),
        config(),
    ]
    check_models(["x", "y", "z"], ["a", "b", "c"], configs, [None] * 3)
    assert [kwargs["revision"] for kwargs in seen] == ["v2", None, None]
    assert [kwargs["trust_remote_code"] for kwargs in seen] == [True, True, False]


# -- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizers_of(models, given=None):
    given = [None] * len(models) if given is None else given
    return load_tokenizers(models, given, [f"agent{i}" for i in range(len(models))], [config()] * len(models))


def test_tokenizers_of_folders(folders):
    char, bpe = tokenizers_of(folders)
    assert char("1+1")["input_ids"] == tokenizer()("1+1")["input_ids"]
    assert len(bpe) == 320
    assert [t.padding_side for t in (char, bpe)] == ["left", "left"]


def test_tokenizer_of_a_loaded_object(folders):
    loaded = AutoModelForCausalLM.from_pretrained(folders[1])
    assert len(tokenizers_of([loaded])[0]) == 320


def test_given_tokenizers_are_used_as_they_are(folders):
    mine = tokenizer()
    result = tokenizers_of([folders[1], model(), model()], [None, mine, mine])
    assert result[1] is mine and result[2] is mine and result[0] is not mine


def test_tokenizers_of_other_models(folders):
    large, small = AutoTokenizer.from_pretrained(folders[1]), AutoTokenizer.from_pretrained(folders[0])
    assert len(large) > len(small)
    message = message_of(ValueError, tokenizers_of, [folders[0]], [large])
    assert "'agent0'" in message and str(len(large)) in message and str(len(small)) in message
    message = message_of(ValueError, tokenizers_of, [folders[0], folders[1]], [small, small])
    assert "'agent0' and 'agent1'" in message and "different vocabularies" in message


def test_eval_batches_hold_whole_groups():
    args = [config(per_device_eval_batch_size=6, num_generations=4)]
    message = message_of(ValueError, check_dataset, rows(2), [tokenizer()], ["a"], args, evaluation=True)
    assert "per_device_eval_batch_size=8" in message
    check_dataset(
        rows(2), [tokenizer()], ["a"], [config(per_device_eval_batch_size=8, num_generations=4)], evaluation=True
    )
    assert "eval_dataset" in message_of(
        ValueError, check_dataset, Dataset.from_list([{"x": 1}]), [tokenizer()], ["a"], args, evaluation=True
    )


def test_every_prompt_is_looked_at():
    def data(prompt):
        return Dataset.from_list([{"prompt": "1+1="}] * 20 + [{"prompt": prompt}])

    assert "prompt 20 is empty" in message_of(ValueError, check, data(""))
    assert "prompt 20 is None" in message_of(ValueError, check, data(None))


def test_a_template_that_refuses_the_prompt_names_the_agent():
    strict = with_template()
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    prompt = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    message = message_of(ValueError, check, rows(prompt=prompt), [with_template(), strict])
    assert "'agent1'" in message and "no system role" in message


def test_a_missing_padding_token_is_the_end_token():
    mine = tokenizer()
    mine.pad_token = None
    assert tokenizers_of([model()], [mine])[0].pad_token_id == mine.eos_token_id


def test_a_given_padding_token_stays():
    mine = tokenizer()
    assert tokenizers_of([model()], [mine])[0].pad_token == "<pad>"


def test_a_tokenizer_without_end():
    mine = tokenizer()
    mine.eos_token = None
    message = message_of(ValueError, tokenizers_of, [model(), model()], [tokenizer(), mine])
    assert "'agent1'" in message and "eos_token" in message


def test_an_object_without_a_path():
    message = message_of(ValueError, tokenizers_of, [model()])
    assert "'agent0'" in message and "processing_classes" in message


def test_a_folder_without_a_tokenizer(tmp_path):
    model().save_pretrained(tmp_path / "bare")
    message = message_of(ValueError, tokenizers_of, [str(tmp_path / "bare")])
    assert "'agent0'" in message and "bare" in message


def test_processors_of_images_are_refused():
    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    message = message_of(ValueError, tokenizers_of, [model()], [Processor()])
    assert "'agent0'" in message and "processor.tokenizer" in message


def test_tokenizers_in_a_tuple(folders):
    # models may be a tuple, so this is near
    pair = (tokenizer(), tokenizer())
    try:
        given = per_agent(pair, 2, "processing_classes")
        result = tokenizers_of(folders, given)
    except (ValueError, TypeError) as error:
        assert "processing_classes" in str(error) or "agent0" in str(error)
    else:
        assert [t is p for t, p in zip(result, pair, strict=True)] == [True, True]


def test_revision_and_remote_code_reach_the_tokenizer(monkeypatch):
    seen = []

    def load(path, **kwargs):
        seen.append((path, kwargs["revision"], kwargs["trust_remote_code"]))
        return tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    args = config(model_init_kwargs={"revision": "v2", "trust_remote_code": True})
    load_tokenizers(["x", "y"], [None, None], ["a", "b"], [args, config()])
    assert seen == [("x", "v2", True), ("y", None, False)]


# -- data sets --------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "1+1="}]


def rows(count=16, **columns):
    return Dataset.from_list([{"prompt": "1+1=", **columns}] * count)


def stream(*examples):
    return IterableDataset.from_generator(lambda: iter(list(examples)))


def check(dataset, tokenizers=None, **changes):
    tokenizers = [tokenizer()] if tokenizers is None else tokenizers
    names = [f"agent{i}" for i in range(len(tokenizers))]
    return check_dataset(dataset, tokenizers, names, [config(**changes)] * len(names))


def with_template():
    mine = tokenizer()
    mine.chat_template = CHAT_TEMPLATE
    return mine


def test_good_data_sets():
    check(rows())
    check(rows(answer="2"))
    check(rows().to_iterable_dataset())
    check(stream({"prompt": "1+1="}))
    check(rows(prompt=CHAT), [with_template(), with_template()])
    check(stream({"prompt": CHAT, "answer": "2"}), [with_template()])


@pytest.mark.parametrize("dataset", [None, [{"prompt": "x"}], "math", {"train": []}, DatasetDict()], ids=repr)
def test_things_that_are_no_data_set(dataset):
    message = message_of(TypeError, check, dataset)
    assert type(dataset).__name__ in message and "Dataset.from_list" in message


def test_no_column_prompt():
    message = message_of(ValueError, check, Dataset.from_list([{"problem": "1+1=", "answer": "2"}] * 16))
    assert "'prompt'" in message and "problem, answer" in message and "rename_column" in message
    assert "none" in message_of(ValueError, check, Dataset.from_dict({}))


def test_no_column_prompt_in_a_stream():
    # a stream does not know its columns beforehand
    dataset = stream({"problem": "1+1=", "answer": "2"})
    message = message_of(ValueError, check, dataset)
    assert "'prompt'" in message and "problem" in message


@pytest.mark.parametrize("column", ["image", "images"])
def test_images(column):
    assert column in message_of(ValueError, check, rows(**{column: 1}))


def test_images_in_a_stream():
    assert "image" in message_of(ValueError, check, stream({"prompt": "1+1=", "image": 1}))


def test_too_few_prompts():
    check(rows(4), num_generations=4, steps_per_generation=2)
    message = message_of(ValueError, check, rows(3), num_generations=4, steps_per_generation=2)
    assert "3 prompts" in message and "takes 4" in message and "=16 / num_generations=4" in message
    assert "0 prompts" in message_of(ValueError, check, rows(1).select([]))


def test_an_empty_stream():
    message_of(ValueError, check, IterableDataset.from_generator(lambda: iter([])))


def test_chats_need_a_template_for_every_agent():
    message = message_of(ValueError, check, rows(prompt=CHAT), [with_template(), tokenizer()])
    assert "'agent1'" in message and "chat_template" in message


@pytest.mark.parametrize("prompt", [["1+1="], 5, None, [{"from": "user", "value": "x"}], {"role": "user"}], ids=repr)
def test_prompts_that_are_neither_text_nor_chat(prompt):
    message = message_of(ValueError, check, rows(prompt=prompt), [with_template()])
    assert type(prompt).__name__ in message and '"role"' in message


def test_an_empty_chat():
    message_of(ValueError, check, rows(prompt=[]), [with_template()])


@pytest.mark.parametrize("others", ["completion", "messages", "chosen", "rejected"])
def test_only_the_prompt_decides_whether_it_is_a_chat(monkeypatch, others):
    # TRL's test looks at whichever of these columns comes first out of a set, in another order in every process
    original = hacpo_trl.texts.prompt_check.is_conversational

    def unlucky(example):
        worst = [key for key in example if key != "prompt"] or ["prompt"]
        return any(original({key: example[key]}) for key in worst if key in ("prompt", others))

    monkeypatch.setattr(hacpo_trl.texts.prompt_check, "is_conversational", unlucky)
    check(rows(**{others: CHAT}))  # texts, without a template
    check(rows(prompt=CHAT, **{others: "2"}), [with_template()])
    assert "chat template" in message_of(ValueError, check, rows(prompt=CHAT, **{others: "2"}), [tokenizer()])


def test_the_check_takes_one_example_of_a_stream():
    taken = []

    def generate():
        for i in itertools.count():
            taken.append(i)
            yield {"prompt": f"{i}+1="}

    check(IterableDataset.from_generator(generate))
    assert len(taken) <= 2


REFUSING = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
SYSTEM = [{"role": "system", "content": "Be short."}, *CHAT]


def refusing():
    mine = tokenizer()
    mine.chat_template = REFUSING + "{{ m.content }}{% endfor %}"
    return mine


def test_every_row_goes_through_every_template():
    data = Dataset.from_list([{"prompt": CHAT}] * 5 + [{"prompt": SYSTEM}] + [{"prompt": CHAT}] * 10)
    message = message_of(ValueError, check, data, [with_template(), refusing()])
    assert "agent 'agent1'" in message and "prompt 5 of train_dataset" in message and "no system role" in message


def of_lengths(*lengths):
    return Dataset.from_list([{"prompt": "1" * n, "answer": str(n)} for n in lengths])


@pytest.fixture
def short_model():
    """Reads 32 tokens; the tests' tokenizer has one for each character."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2, max_position_embeddings=32))  # fmt: skip


def lengths_of(dataset):
    return [len(row["prompt"]) for row in dataset]


def test_a_prompt_that_leaves_no_room_for_the_response(short_model):
    args = config(max_completion_length=10)
    arguments = ([tokenizer()], ["a"], [args])
    fits = of_lengths(*[4] * 15, 22)
    assert check_dataset(fits, *arguments, models=[short_model]) is fits
    data = of_lengths(*[4] * 15, 23)
    message = message_of(ValueError, check_dataset, data, *arguments, models=[short_model])
    assert "agent 'a': prompt 15 of train_dataset has 23 tokens" in message and "more than the 32" in message
    assert "max_completion_length=9, or max_prompt_length=22" in message
    whole = of_lengths(*[4] * 15, 40)
    assert "Use max_prompt_length=22" in message_of(ValueError, check_dataset, whole, *arguments, models=[short_model])


def test_long_prompts_are_left_out_and_counted(short_model):
    args = config(max_completion_length=10, max_prompt_length=6)
    data = of_lengths(*[4, 7, 6] * 8)
    with pytest.warns(
        UserWarning, match=r"train_dataset: 8 of 24 prompts .*max_prompt_length=6.*: 1, 4, 7, 10, 13, \.\.\.\."
    ):
        left = check_dataset(data, [tokenizer()], ["a"], [args], models=[short_model])
    assert lengths_of(left) == [4, 6] * 8 and left["answer"][1] == "6"
    with pytest.warns(UserWarning, match="left out"):
        message = message_of(ValueError, check, of_lengths(*[4, 7] * 2), max_prompt_length=5,
                             num_generations=4, steps_per_generation=2)  # fmt: skip
    assert "2 prompts" in message and "takes 4" in message
    assert check(of_lengths(*[4] * 16)).num_rows == 16


def test_the_longest_of_all_agents_counts():
    double = with_template()  # its template writes the message twice
    double.chat_template = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "1" * n}]} for n in [2] * 16 + [4]])
    with pytest.warns(UserWarning, match="1 of 17"):
        left = check(data, [refusing(), double], max_prompt_length=6)
    assert left.num_rows == 16


def test_rows_of_a_stream_are_checked_when_they_are_read():
    rows_read = check(stream(*({"prompt": "1" * n} for n in (4, 9, 5))), max_prompt_length=6)
    assert lengths_of(rows_read) == [4, 5]
    for bad, text in (("", "prompt 2 is empty"), (CHAT, "prompt 0 and prompt 2 differ")):
        broken = check(stream({"prompt": "1"}, {"prompt": "2"}, {"prompt": bad}))
        reading = iter(broken)
        next(reading), next(reading)
        with pytest.raises(ValueError, match=text):
            next(reading)


def test_many_prompts_are_tokenized_in_batches(monkeypatch):
    mine, sizes = tokenizer(), []
    call = type(mine).__call__
    monkeypatch.setattr(type(mine), "__call__", lambda self, t, **kw: (sizes.append(len(t)), call(self, t, **kw))[1])
    check(of_lengths(*[3] * 2500), [mine])
    assert sum(sizes) == 2501 and len(sizes) == 4


# -- optimizers -------------------------------------------------------------------------------------------------------


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def test_no_optimizers():
    assert resolve_optimizers(None, 2) == [((None, None), None)] * 2
    assert resolve_optimizers((None, None), 2) == [((None, None), None)] * 2
    assert resolve_optimizers([None, None], 2) == [((None, None), None)] * 2


def test_one_class_for_all():
    arguments = {"lr": 0.1}
    result = resolve_optimizers((torch.optim.SGD, arguments), 3)
    assert result == [((None, None), (torch.optim.SGD, {"lr": 0.1}))] * 3
    result[0][1][1]["lr"] = 5.0
    assert arguments == {"lr": 0.1} and result[1][1][1] == {"lr": 0.1}
    assert resolve_optimizers((torch.optim.SGD, None), 1) == [((None, None), (torch.optim.SGD, {}))]


def test_one_for_each_agent():
    one = sgd()
    scheduler = torch.optim.lr_scheduler.ConstantLR(one)
    result = resolve_optimizers([(one, scheduler), (torch.optim.SGD, {"lr": 0.2}), None, (sgd(), None)], 4)
    assert result[0] == ((one, scheduler), None)
    assert result[1] == ((None, None), (torch.optim.SGD, {"lr": 0.2}))
    assert result[2] == ((None, None), None)
    assert isinstance(result[3][0][0], torch.optim.SGD) and result[3][1] is None


def test_one_agent_takes_what_trainer_takes():
    one = sgd()
    scheduler = torch.optim.lr_scheduler.ConstantLR(one)
    assert resolve_optimizers((one, scheduler), 1) == [((one, scheduler), None)]


def test_one_optimizer_for_several_agents():
    message = message_of(ValueError, resolve_optimizers, (sgd(), None), 2)
    assert "list" in message and "(optimizer class, arguments)" in message


def test_one_optimizer_in_a_list_for_several_agents():
    one = sgd()
    message_of(ValueError, resolve_optimizers, [(one, None), (one, None)], 2)


def test_one_scheduler_for_several_agents():
    scheduler = torch.optim.lr_scheduler.ConstantLR(sgd())
    message_of(ValueError, resolve_optimizers, (None, scheduler), 2)


def test_a_list_of_optimizers_of_another_length():
    assert "optimizers" in message_of(ValueError, resolve_optimizers, [(sgd(), None)], 2)


@pytest.mark.parametrize("agents", [1, 2])
def test_a_bare_class_or_optimizer(agents):
    for bare in (torch.optim.SGD, sgd()):
        assert "optimizers" in message_of((ValueError, TypeError), resolve_optimizers, bare, agents)


# -- adapters ---------------------------------------------------------------------------------------------------------


def test_no_adapters():
    assert resolve_peft_configs(None, ["x", "y"], ["a", "b"]) == [None, None]


def test_every_agent_gets_a_copy_of_the_adapters_settings():
    adapter = LoraConfig(r=3, target_modules=["q_proj"])
    one, two = resolve_peft_configs(adapter, ["x", "y"], ["a", "b"])
    assert one is not two and one is not adapter and one.r == two.r == 3
    one.base_model_name_or_path = "x"
    one.target_modules.add("v_proj")
    assert two.base_model_name_or_path is None and adapter.base_model_name_or_path is None
    assert two.target_modules == adapter.target_modules == {"q_proj"}


def test_adapters_for_some():
    adapter = LoraConfig(r=3)
    one, two = resolve_peft_configs([adapter, None], ["x", "y"], ["a", "b"])
    assert one.r == 3 and one is not adapter and two is None
    assert "peft_configs" in message_of(ValueError, resolve_peft_configs, [adapter], ["x", "y"], ["a", "b"])


def test_an_adapter_on_an_adapter():
    adapter = LoraConfig(target_modules=["q_proj"])
    adapted = get_peft_model(model(), copy.deepcopy(adapter))
    message = message_of(ValueError, resolve_peft_configs, adapter, ["x", adapted], ["a", "b"])
    assert "'b'" in message and "None" in message
    assert resolve_peft_configs([adapter, None], ["x", adapted], ["a", "b"])[1] is None


# -- refusals and warnings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tools", "environment_factory", "rollout_func"])
def test_refused_arguments(name):
    message = message_of(ValueError, refuse, **{name: [print]})
    assert message.startswith(f"{name} is not supported: ") and "GRPOTrainer" in message


def test_nothing_to_refuse():
    assert refuse(tools=None, environment_factory=None, rollout_func=None) is None
    assert refuse(tools=[]) is None


def test_naive_sharing_alone():
    configs = {method: config(method=method) for method in ("hacpo", "naive", "gspo", "grpo")}
    naive = configs.pop("naive")
    with pytest.warns(UserWarning, match="nobody to share with"):
        warn_if_alone(["a"], naive)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for args in configs.values():
            warn_if_alone(["a"], args)
        warn_if_alone(["a", "b"], naive)


# -- padding and end tokens -------------------------------------------------------------------------------------------


def test_tokens_without_an_embedding(folders, tmp_path):
    size = AutoTokenizer.from_pretrained(folders[0]).vocab_size

    def agent(change):
        folder = tmp_path / f"agent-{len(list(tmp_path.iterdir()))}"
        built, tokens = build_agent(SPECS["char"])
        change(built, tokens)
        return save_agent(built, tokens, folder)

    def added(built, tokens):
        tokens.add_special_tokens({"pad_token": "[PAD]"})

    def resized(built, tokens):
        added(built, tokens)
        built.resize_token_embeddings(len(tokens))

    folder = agent(added)
    for model in (folder, AutoModelForCausalLM.from_pretrained(folder)):
        message = message_of(ValueError, tokenizers_of, [folders[1], model])
        assert f"'agent1': the pad_token_id of its tokenizer, {size} ('[PAD]'), is outside" in message
    assert tokenizers_of([agent(resized)])[0].pad_token_id == size
    for where in ("config", "generation_config"):
        folder = agent(lambda built, tokens, w=where: setattr(getattr(built, w), "eos_token_id", [1, size + 3]))
        if where == "config":
            assert tokenizers_of([folder])  # its generation_config is what counts
            pathlib.Path(folder, "generation_config.json").unlink()
        message = message_of(ValueError, tokenizers_of, [folder])
        assert f"the eos_token_id of its {where}, {size + 3}, is" in message
    built = build_agent(SPECS["char"])[0]
    built.generation_config.eos_token_id = size
    assert f"generation_config, {size}," in message_of(ValueError, tokenizers_of, [built], [tokenizer()])


def test_a_folder_is_not_looked_for_on_the_hub(folders, tmp_path, monkeypatch):
    (tmp_path / "out" / "agent-a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def hub(*args, **kwargs):
        raise AssertionError("the Hub is asked")

    monkeypatch.setattr(hacpo_trl.training.arguments.AutoConfig, "from_pretrained", hub)
    message = message_of(ValueError, check_models, ["out/agnet-a"], ["a"], [config()], [None])
    assert "there is no such folder; 'out' holds agent-a" in message and "hf download out/agnet-a" in message
    monkeypatch.setattr(hacpo_trl.hub.origin, "try_to_load_from_cache", lambda *names: "/cache/config.json")
    with pytest.raises(ValueError, match="the Hub is asked"):
        check_models(["out/agnet-a"], ["a"], [config()], [None])
