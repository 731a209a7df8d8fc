"""Tests of the settings: defaults, refusals with their suggestions, parsing, one agent's settings, saving."""

import dataclasses
import json
import pickle
import re
import warnings

import numpy as np
import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, TrlParser

from hacpo_trl import HACPOConfig
from hacpo_trl.methods import METHODS
from hacpo_trl.setting_types import convert_fields, converted

BASE = {"output_dir": "out", "use_cpu": True, "bf16": False}
HACPO_FIELDS = {f.name for f in dataclasses.fields(HACPOConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}


def config(**changes):
    return HACPOConfig(**{**BASE, **changes})


def refused(*patterns, error=ValueError, **changes):
    with pytest.raises(error) as caught:
        config(**changes)
    for pattern in patterns:
        assert pattern in str(caught.value), str(caught.value)
    return str(caught.value)


def warnings_of(**changes):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config(**changes)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "no effect" in str(w.message)]


def parse(*arguments):
    base = ["--output_dir", "out", "--use_cpu", "True", "--bf16", "False"]
    return TrlParser([HACPOConfig]).parse_args_and_config([*base, *arguments])[0]


def parse_yaml(tmp_path, text, *arguments):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return parse("--config", str(file), *arguments)


# -- defaults ---------------------------------------------------------------------------------------------------------


def test_defaults_are_the_papers():
    args = config()
    expected = {
        "method": "hacpo",
        "beta": 0.001,
        "use_bias_correction_kl": False,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1,
        "max_completion_length": 4096,
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_grad_norm": 1.0,
        "num_generations": 8,
        "alpha": 1.0,
        "peer_clip_delta": 0.2,
        "peer_clip_step": 0.025,
        "capability_window": 5,
        "capability_metric": "positive_rate",
        "capability_ratio_bounds": [0.1, 10.0],
        "baseline": "capability",
        "capability_coefficient": True,
        "peer_advantages": "all",
        "advantage_epsilon": 1e-6,
        "max_reward": 1.0,
        "rollout_order": "own_first",
        "length_normalization": "own",
        "peer_overflow": "truncate",
        "skip_silent_responses": True,
        "agent_overrides": None,
        "max_rounds": -1,
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_the_docstring_names_all_changed_defaults():
    ours = {f.name: f.default for f in dataclasses.fields(HACPOConfig)}
    text = HACPOConfig.__doc__.split("A *round* is")[0]
    for f in dataclasses.fields(GRPOConfig):
        if f.default != ours[f.name]:
            assert f.name in text, f"the default of {f.name} differs from TRL's and the docstring does not say so"


def test_the_docstring_tells_the_values_of_the_changed_defaults():
    args = config()
    for name, value in re.findall(r"`(\w+)=([^`]+)`", HACPOConfig.__doc__.split("A *round* is")[0]):
        if name != "method":
            assert getattr(args, name) == json.loads(value.replace("True", "true").replace("False", "false")), name


def test_every_own_setting_is_documented_and_has_help():
    for f in dataclasses.fields(HACPOConfig):
        if f.name in HACPO_FIELDS:
            assert f.metadata.get("help"), f.name
            assert re.search(rf"^        {f.name}: ", HACPOConfig.__doc__, re.M), f.name


@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_two_updates_on_each_agents_responses(accumulation):
    args = config(gradient_accumulation_steps=accumulation, per_device_train_batch_size=8)
    assert args.steps_per_generation == 2 * accumulation
    assert args.generation_batch_size == args.rows_per_round == 16 * accumulation
    assert [args.updates_per_round(n) for n in (1, 2, 3)] == [2, 4, 6]


def test_a_given_round_size_is_kept():
    args = config(steps_per_generation=6, gradient_accumulation_steps=3, num_iterations=2)
    assert args.generation_batch_size == 48 and args.updates_per_round(2) == 2 * 2 * 2
    args = config(generation_batch_size=32)
    assert args.steps_per_generation == 4 and args.updates_per_round(3) == 12


def test_defaults_are_not_shared_between_configs():
    one, two = config(), config()
    one.capability_ratio_bounds.append(3)
    assert two.capability_ratio_bounds == [0.1, 10.0]


# -- methods and ablations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_methods(method):
    args = config(method=method)
    sharing = method not in ("gspo", "grpo", "xgrpo")
    grows = method in ("hacpo", "naive", "gap", "f_tis")
    sequences = method in ("hacpo", "naive", "gap", "gspo")
    assert args.shares_rollouts is sharing
    assert args.updates_per_round(3) == (6 if grows else 2)
    assert args.importance_sampling_level == ("sequence" if sequences or method == "f_tis" else "token")
    high = 0.28 if method in ("graft", "sapo") else 0.2
    assert (args.epsilon, args.epsilon_high) == ((3e-4, 4e-4) if sequences else (0.2, high))
    assert args.beta == (0.001 if sequences or method == "grpo" else 0.0)
    assert warnings_of(method=method) == []


@pytest.mark.parametrize("method", METHODS)
def test_given_clip_ranges_are_kept(method):
    args = config(method=method, epsilon=0.1, epsilon_high=0.3)
    assert (args.epsilon, args.epsilon_high) == (0.1, 0.3)


def test_epsilon_high_of_grpo_follows_epsilon():
    assert config(method="grpo", epsilon=0.1).epsilon_high == 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"baseline": "pooled"},
        {"baseline": "min_variance"},
        {"baseline": "own"},
        {"capability_coefficient": False},
        {"alpha": 0.0},
        {"alpha": 3},
        {"peer_clip_step": 0.0},
        {"peer_clip_delta": None},
        {"peer_clip_delta": 0.0},
        {"peer_clip_delta": 1.0},
        {"peer_advantages": "positive"},
        {"rollout_order": "shuffled"},
        {"length_normalization": "shared"},
        {"peer_overflow": "drop"},
        {"skip_silent_responses": False},
        {"capability_metric": "mean_reward"},
        {"capability_window": 1},
        {"capability_ratio_bounds": [1.0, 1.0]},
        {"beta": 0.0},
        {"use_bias_correction_kl": True},
        {"max_rounds": 3},
    ],
)
def test_switches(changes):
    args = config(**changes)
    assert {name: getattr(args, name) for name in changes} == changes
    assert warnings_of(**changes) == []


@pytest.mark.parametrize("method", ["hacpo", "naive", "gspo"])
def test_token_level_ratios_need_grpo(method):
    refused("importance_sampling_level='sequence'", "grpo", method=method, importance_sampling_level="token")


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("method", ["hacpo", "naive", "gspo", "grpo"]),
        ("baseline", ["capability", "pooled", "min_variance", "own"]),
        ("capability_metric", ["positive_rate", "mean_reward"]),
        ("peer_advantages", ["all", "positive"]),
        ("rollout_order", ["own_first", "shuffled"]),
        ("length_normalization", ["own", "shared"]),
        ("peer_overflow", ["truncate", "drop"]),
    ],
)
def test_unknown_choices_name_the_known(name, known):
    message = refused(f"{name}='other'", *known, **{name: "other"})
    assert "is unknown" in message


@pytest.mark.parametrize(
    ("changes", "patterns"),
    [
        ({"alpha": -0.1}, ["alpha=-0.1", "0 switches"]),
        ({"peer_clip_delta": 1.5}, ["delta=1.5", "[0, 1]", "0.2"]),
        ({"peer_clip_delta": -0.1}, ["delta=-0.1", "[0, 1]"]),
        ({"peer_clip_delta": "wide"}, ["'wide'", "[0, 1]", "'none'"]),
        ({"peer_clip_delta": "nan"}, ["[0, 1]"]),
        ({"peer_clip_step": -0.1}, ["delta_step=-0.1", "0.025"]),
        ({"epsilon": -1.0}, ["epsilon=-1.0"]),
        ({"epsilon_high": -1.0}, ["epsilon_high=-1.0"]),
        ({"epsilon": float("nan")}, ["epsilon=nan"]),
        ({"advantage_epsilon": 0.0}, ["advantage_epsilon=0.0", "1e-6"]),
        ({"max_reward": 0.0}, ["max_reward=0.0", "positive"]),
        ({"capability_window": 0}, ["window=0", "5"]),
        ({"capability_ratio_bounds": [1.0]}, ["two numbers"]),
        ({"capability_ratio_bounds": [0.1, 1.0, 10.0]}, ["two numbers"]),
        ({"capability_ratio_bounds": [2.0, 10.0]}, ["(0.1, 10.0)"]),
        ({"capability_ratio_bounds": [0.1, 0.9]}, ["(0.1, 10.0)"]),
        ({"capability_ratio_bounds": [0.0, 10.0]}, ["(0.1, 10.0)"]),
        ({"capability_ratio_bounds": [float("nan"), 10.0]}, ["(0.1, 10.0)"]),
        ({"max_rounds": 0}, ["max_rounds=0", "-1"]),
        ({"max_rounds": -2}, ["max_rounds=-2", "-1"]),
        ({"max_rounds": 2, "max_steps": 8}, ["max_rounds=2", "max_steps=8"]),
        ({"num_generations": 1}, ["2"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size"]),
        ({"generation_batch_size": 32, "steps_per_generation": 4}, ["steps_per_generation"]),
    ],
)
def test_values_that_cannot_work(changes, patterns):
    refused(*patterns, **changes)


@pytest.mark.parametrize("name", ["alpha", "advantage_epsilon", "max_reward", "peer_clip_step"])
def test_nan_is_refused(name):
    refused(name.replace("peer_clip_", "delta_") if "clip" in name else name, **{name: float("nan")})


@pytest.mark.parametrize("name", ["learning_rate", "alpha", "advantage_epsilon", "beta", "temperature"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_numbers_are_finite(name, value):
    refused(f"{name}={value} must be a finite number, e.g. ", **{name: float(value)})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_generations": 0},
        {"gradient_accumulation_steps": 0},
        {"num_iterations": 0},
        {"per_device_train_batch_size": 0},
        {"max_completion_length": 0},
        {"temperature": 0.0},
        {"temperature": -1.0},
    ],
    ids=str,
)
def test_zeros_are_refused_by_name(changes):
    refused(*changes, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("vllm_structured_outputs_regex", "a*"),
    ],
)
def test_samplers_that_the_ratio_does_not_know(name, value):
    refused(f"{name}={value!r}", "Leave it at its default", **{name: value})


@pytest.mark.parametrize(("name", "value"), [("top_k", None), ("top_p", 1), ("min_p", 0.0), ("temperature", 0.7)])
def test_samplers_without_effect_are_fine(name, value):
    assert getattr(config(**{name: value}), name) == value


@pytest.mark.parametrize(
    "key", "top_p top_k temperature no_repeat_ngram_size do_sample num_beams min_tokens logit_bias dola_layers".split()
)
def test_samplers_in_generation_kwargs(key):
    refused("generation_kwargs", key, generation_kwargs={key: 1})
    refused("generation_kwargs", key, generation_kwargs=json.dumps({key: 1}))


def test_all_bad_generation_kwargs_are_named_at_once():
    refused("min_p, top_p", generation_kwargs={"top_p": 0.5, "min_p": 0.1, "cache_implementation": "static"})


def test_other_generation_kwargs_are_fine():
    assert config(generation_kwargs={"prompt_lookup_num_tokens": 3}).generation_kwargs


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("loss_type", "dapo", "loss_type='grpo'"),
        ("loss_type", "bnpo", "loss_type='grpo'"),
        ("delta", 1.5, "delta=None"),
        ("scale_rewards", "batch", "scale_rewards='group'"),
        ("scale_rewards", "none", "scale_rewards='group'"),
        ("scale_rewards", False, "scale_rewards='group'"),
        ("multi_objective_aggregation", "normalize_then_sum", "multi_objective_aggregation='sum_then_normalize'"),
        ("off_policy_mask_threshold", 0.5, "off_policy_mask_threshold=None"),
        ("torch_compile", True, "torch_compile=False"),
        ("top_entropy_quantile", 0.2, "top_entropy_quantile=1.0"),
        ("use_adaptive_entropy", True, "use_adaptive_entropy=False"),
    ],
)
def test_what_is_not_supported_names_what_is(name, value, use):
    refused(f"Use {use}", **{name: value})


def test_scale_rewards_true_is_the_group():
    assert config(scale_rewards=True).scale_rewards == "group"


# -- sizes of a round -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 6, 8, 12, 30, 49, 128])
@pytest.mark.parametrize("generations", [5, 7, 11, 100])
def test_the_suggested_num_generations_work(rows, generations):
    sizes = {"per_device_train_batch_size": rows, "steps_per_generation": 1}
    if rows % generations == 0:
        assert config(num_generations=generations, **sizes)
        return
    message = refused(f"num_generations={generations}", str(rows), num_generations=generations, **sizes)
    suggested = [int(n) for n in re.findall(r"\d+", message.split("try num_generations=")[1])]
    assert suggested and len(suggested) <= 3 and suggested == sorted(suggested)
    for number in suggested:
        assert config(num_generations=number, **sizes)


def test_a_round_of_one_response_gets_no_wrong_suggestion():
    message = refused(num_generations=4, per_device_train_batch_size=1, steps_per_generation=1)
    for number in re.findall(r"num_generations=(\d+)", message.partition("try")[2]):
        assert 1 % int(number) == 0 and int(number) > 1, message


def test_suggestions_for_a_given_generation_batch_size():
    refused(
        "try num_generations=3, 4 or 6", generation_batch_size=12, per_device_train_batch_size=4, num_generations=5
    )
    # here no other num_generations helps: the batch size is wrong
    message = refused(generation_batch_size=10, per_device_train_batch_size=8, num_generations=8)
    assert "generation_batch_size" in message, message


@pytest.mark.parametrize("steps", range(1, 14))
@pytest.mark.parametrize("accumulation", [2, 3, 4])
def test_the_suggested_steps_per_generation_work(steps, accumulation):
    sizes = {"gradient_accumulation_steps": accumulation}
    if steps % accumulation == 0:
        assert config(steps_per_generation=steps, **sizes).updates_per_round(1) == steps // accumulation
        return
    message = refused(f"steps_per_generation={steps}", steps_per_generation=steps, **sizes)
    suggested = int(re.search(r"Try steps_per_generation=(\d+)", message)[1])
    assert abs(suggested - steps) < accumulation
    assert config(steps_per_generation=suggested, **sizes)


# -- warnings ---------------------------------------------------------------------------------------------------------

HACPO_ONLY = {
    "alpha": 2.0,
    "peer_clip_delta": 0.5,
    "peer_clip_step": 0.0,
    "baseline": "own",
    "capability_coefficient": False,
}
SHARED_ONLY = {
    "peer_advantages": "positive",
    "rollout_order": "shuffled",
    "length_normalization": "shared",
    "peer_overflow": "drop",
    "skip_silent_responses": False,
}


@pytest.mark.parametrize("method", ["naive", "gspo", "grpo"])
@pytest.mark.parametrize("name", HACPO_ONLY)
def test_hacpos_settings_warn_with_other_methods(method, name):
    (message,) = warnings_of(method=method, **{name: HACPO_ONLY[name]})
    assert message == f"{name} has no effect with method={method!r}."


@pytest.mark.parametrize("method", ["gspo", "grpo"])
@pytest.mark.parametrize("name", SHARED_ONLY)
def test_settings_of_sharing_warn_without_sharing(method, name):
    (message,) = warnings_of(method=method, **{name: SHARED_ONLY[name]})
    assert name in message and method in message


@pytest.mark.parametrize("name", SHARED_ONLY)
def test_settings_of_sharing_act_with_naive_sharing(name):
    assert warnings_of(method="naive", **{name: SHARED_ONLY[name]}) == []


def test_several_idle_settings_are_one_warning():
    (message,) = warnings_of(method="gspo", alpha=0.0, peer_overflow="drop")
    assert message == "alpha, peer_overflow have no effect with method='gspo'."


def test_no_clip_is_noticed_with_another_method():
    assert warnings_of(method="naive", peer_clip_delta=None)
    assert warnings_of(method="naive", peer_clip_delta="none")
    assert warnings_of(method="naive", peer_clip_delta="0.2") == []


def test_the_warning_points_to_the_callers_line():
    with pytest.warns(UserWarning) as caught:
        HACPOConfig(**BASE, method="gspo", alpha=0.0)
    (warning,) = [w for w in caught if "alpha" in str(w.message)]
    assert warning.filename == __file__


# -- command line and YAML --------------------------------------------------------------------------------------------


def test_the_parsers_defaults_are_the_constructors():
    parsed, made = parse(), config()
    for f in dataclasses.fields(HACPOConfig):
        if f.init and f.name not in ("logging_dir", "run_name"):
            assert getattr(parsed, f.name) == getattr(made, f.name), f.name


@pytest.mark.parametrize("text", ["none", "None", "NULL", " none "])
def test_no_clip_on_the_command_line(text):
    assert parse("--peer_clip_delta", text).peer_clip_delta is None


def test_numbers_on_the_command_line():
    args = parse(
        *"--peer_clip_delta 0.3 --peer_clip_step 0 --alpha 2 --epsilon 0.1 --beta 1e-2 --max_rounds 3".split(),
        *"--capability_ratio_bounds 0.5 2 --capability_window 3 --advantage_epsilon 1e-4 --max_reward 2".split(),
    )
    assert (args.peer_clip_delta, args.peer_clip_step, args.alpha, args.epsilon) == (0.3, 0.0, 2.0, 0.1)
    assert (args.beta, args.max_rounds, args.capability_window) == (0.01, 3, 3)
    assert args.capability_ratio_bounds == [0.5, 2.0]
    assert (args.advantage_epsilon, args.max_reward) == (1e-4, 2.0)


def test_flags_on_the_command_line():
    args = parse("--no_capability_coefficient", "--no_skip_silent_responses")
    assert not args.capability_coefficient and not args.skip_silent_responses
    assert not parse("--capability_coefficient", "false").capability_coefficient
    assert parse("--use_bias_correction_kl").use_bias_correction_kl


@pytest.mark.parametrize(
    "arguments",
    [
        "--method grpo",
        "--baseline own",
        "--capability_metric mean_reward",
        "--peer_advantages positive",
        "--rollout_order shuffled",
        "--length_normalization shared",
        "--peer_overflow drop",
    ],
)
def test_choices_on_the_command_line(arguments, capsys):
    name, value = arguments.split()
    assert getattr(parse(name, value), name[2:]) == value
    with pytest.raises(SystemExit):
        parse(name, "other")
    assert value in capsys.readouterr().err


def test_overrides_on_the_command_line():
    text = '{"llama-3b": {"learning_rate": 5e-7, "chat_template_kwargs": {"enable_thinking": false}}}'
    args = parse("--agent_overrides", text)
    assert args.agent_overrides == json.loads(text)
    agent = args.for_agent("llama-3b", leader=False)
    assert agent.learning_rate == 5e-7 and agent.chat_template_kwargs == {"enable_thinking": False}


def test_yaml(tmp_path):
    args = parse_yaml(
        tmp_path,
        """
        method: hacpo
        learning_rate: 5.0e-7
        peer_clip_delta: 0.4
        capability_ratio_bounds: [0.2, 5]
        capability_coefficient: false
        peer_advantages: positive
        agent_overrides:
          small:
            learning_rate: 5.0e-6
            per_device_train_batch_size: 4
            chat_template_kwargs: {enable_thinking: false}
        """,
    )
    assert (args.learning_rate, args.peer_clip_delta, args.peer_advantages) == (5e-7, 0.4, "positive")
    assert args.capability_ratio_bounds == [0.2, 5] and args.capability_coefficient is False
    args.check_agents(["small", "large"])
    agent = args.for_agent("small", leader=True)
    assert (agent.learning_rate, agent.per_device_train_batch_size) == (5e-6, 4)
    assert agent.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("text", ["none", "null", "~", '"none"'])
def test_no_clip_in_yaml(tmp_path, text):
    assert parse_yaml(tmp_path, f"peer_clip_delta: {text}\n").peer_clip_delta is None


def test_the_command_line_wins_over_yaml(tmp_path):
    args = parse_yaml(tmp_path, "alpha: 0.5\nmethod: naive\n", "--method", "hacpo")
    assert (args.alpha, args.method) == (0.5, "hacpo")


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 5e-7), ("alpha", 0.5), ("beta", 1e-3)])
def test_yaml_reads_5e_7_as_text_but_it_is_a_number(tmp_path, name, value):
    # YAML 1.1 wants a dot in a number with an exponent. Outside of agent_overrides the parser makes it a number.
    text = f"{value:.0e}"
    args = parse_yaml(tmp_path, f"agent_overrides:\n  small:\n    {name}: {text}\n")
    args.check_agents(["small"])
    assert getattr(args.for_agent("small", leader=True), name) == value
    assert getattr(parse_yaml(tmp_path, f"{name}: {text}\n"), name) == value


# How YAML and people write a value -> what it is
WRITTEN = [
    ("capability_ratio_bounds", ["1e-1", "1e1"], [0.1, 10.0]),
    ("capability_ratio_bounds", (0.1, 10), [0.1, 10]),
    ("reward_weights", ["1e0", 2], [1.0, 2]),
    ("reward_weights", None, None),
    ("learning_rate", "5e-7", 5e-7),
    ("learning_rate", np.float32(0.5), 0.5),
    ("peer_clip_delta", "3e-1", 0.3),
    ("peer_clip_delta", " None", None),
    ("max_completion_length", "64", 64),
    ("max_completion_length", "1e2", 100),
    ("max_completion_length", 64.0, 64),
    ("max_completion_length", np.int64(64), 64),
    ("sampling_batch_size", "none", None),
    ("capability_coefficient", "no", False),
    ("capability_coefficient", 1, True),
    ("save_strategy", False, "no"),
    ("eval_strategy", False, "no"),
    ("vllm_server_urls", None, None),
    ("hub_base_model_id", "1e3", "1e3"),
]

# What is refused, and what would have to stand there
MISWRITTEN = [
    ("learning_rate", None, "learning_rate=None must be a number, e.g. 1e-06."),
    ("learning_rate", "fast", "learning_rate='fast' must be a number, e.g. 1e-06."),
    ("learning_rate", True, "learning_rate=True must be a number, e.g. 1e-06."),
    ("peer_clip_delta", False, "peer_clip_delta=False must be a number, e.g. 0.2."),
    (
        "capability_ratio_bounds",
        ["low", 10],
        "capability_ratio_bounds=['low', 10] must be a list, each item a number.",
    ),
    ("capability_ratio_bounds", None, "capability_ratio_bounds=None must be a list."),
    ("reward_weights", 1.0, "reward_weights=1.0 must be a list."),
    ("max_completion_length", "1.5", "max_completion_length='1.5' must be a whole number, e.g. 4096."),
    ("max_completion_length", float("inf"), "max_completion_length=inf must be a whole number"),
    ("capability_coefficient", "maybe", "capability_coefficient='maybe' must be true or false, e.g. True."),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRITTEN)
def test_one_conversion_for_all_settings(name, value, expected):
    found = converted(HACPOConfig, name, value)
    assert found == expected and type(found) is type(expected)
    assert getattr(config(**{name: value}), name) == expected


@pytest.mark.parametrize(("name", "value", "message"), MISWRITTEN)
def test_what_no_setting_can_be(name, value, message):
    refused(message, **{name: value})
    if name not in ("capability_ratio_bounds", "reward_weights"):  # which all agents have in common
        with pytest.raises(ValueError, match=re.escape(f"agent 'small': {message}")):
            config(agent_overrides={"small": {name: value}}).for_agent("small", leader=True)


def test_the_conversion_leaves_defaults_and_finished_settings_alone():
    made = config()
    before = dict(vars(made))
    convert_fields(made)
    assert vars(made) == before
    for f in dataclasses.fields(HACPOConfig):
        if f.init and f.default is not dataclasses.MISSING:
            assert converted(HACPOConfig, f.name, f.default) is f.default, f.name


def test_yaml_1_1_in_lists_and_strategies(tmp_path):
    text = "capability_ratio_bounds: [1e-1, 1e1]\nreward_weights: [1e0]\nsave_strategy: no\n"
    args = parse_yaml(tmp_path, text)
    assert args.capability_ratio_bounds == [0.1, 10.0] and args.reward_weights == [1.0]
    assert args.save_strategy == "no"
    for text in ("learning_rate: null\n", "peer_clip_delta: no\n"):
        with pytest.raises(ValueError, match="must be a number"):
            parse_yaml(tmp_path, text)


# -- agent_overrides --------------------------------------------------------------------------------------------------


def check_refused(overrides, *patterns, names=("small", "large"), **changes):
    args = config(agent_overrides=overrides, **changes)
    with pytest.raises(ValueError) as caught:
        args.check_agents(list(names))
    for pattern in patterns:
        assert pattern in str(caught.value), str(caught.value)


def test_overrides_of_unknown_agents():
    check_refused({"smal": {"alpha": 0.5}}, "smal;", "the agents are small, large")


def test_overrides_of_unknown_settings():
    check_refused({"small": {"learning_rat": 1e-6}}, "'learning_rat'", "does not have")


@pytest.mark.parametrize("values", [None, 3, "alpha", [1]])
def test_overrides_that_are_no_mapping(values):
    check_refused({"small": values}, "agent_overrides['small']", "must map")


TEAM = """output_dir agent_overrides method num_generations generation_batch_size steps_per_generation
num_iterations max_steps max_rounds num_train_epochs seed data_seed logging_steps eval_strategy save_strategy
save_steps reward_weights max_reward rollout_order capability_window capability_metric capability_ratio_bounds
baseline advantage_epsilon report_to peer_advantages capability_coefficient push_to_hub bf16 fp16 use_cpu ddp_backend
accelerator_config fsdp""".split()


@pytest.mark.parametrize("name", TEAM)
def test_overrides_of_what_all_have_in_common(name):
    # what the leader reads for the whole team would have no effect, or act on all, as an override
    value = getattr(config(), name)
    check_refused({"small": {name: value}}, f"'{name}'")


@pytest.mark.parametrize("number", ["bf16", "fp16"])
def test_continuous_batching_may_not_convert_the_trained_weights(number):
    settings = {"bf16": False, "fp16": False, "use_transformers_continuous_batching": True}
    assert config(**settings).use_transformers_continuous_batching
    with pytest.raises(ValueError, match=f"convert the trained weights to {number} for good.*set {number}=False"):
        config(**{**settings, number: True})


def test_an_agents_loading_settings_are_added_to_the_teams():
    overrides = {"small": {"model_init_kwargs": {"attn_implementation": "eager"}}}
    args = config(agent_overrides=overrides, model_init_kwargs={"dtype": "bfloat16"})
    loading = {"dtype": "bfloat16", "attn_implementation": "eager"}
    assert args.for_agent("small", leader=True).model_init_kwargs == loading
    assert args.for_agent("large", leader=False, index=1).model_init_kwargs == {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    "text", ["small", "[1, 2]", '"small"', ' {"small": {"alpha": -0.5}}', '{"small": {"alpha": 1}']
)
def test_overrides_that_are_no_json(text):
    with pytest.raises(ValueError) as caught:
        args = config(agent_overrides=text)
        args.check_agents(["small"])
        args.for_agent("small", leader=True)
    message = str(caught.value)
    assert "agent_overrides" in message or "agent 'small'" in message, message
    assert not re.search(r"names (\S, )+", message), message


def test_empty_overrides():
    for overrides in (None, {}, {"small": {}}, "{}"):
        args = config(agent_overrides=overrides)
        args.check_agents(["small", "large"])
        assert args.for_agent("small", leader=True).alpha == 1.0


def test_max_steps_must_end_a_round():
    args = config(max_steps=6)
    args.check_agents(["a"])
    args.check_agents(["a", "b", "c"])
    with pytest.raises(ValueError, match=r"max_steps=6 .* 4 updates\. Try max_steps=8, or max_rounds=2"):
        args.check_agents(["a", "b"])
    config(max_steps=6, method="gspo").check_agents(["a", "b"])


@pytest.mark.parametrize("steps", range(1, 20))
def test_the_suggested_max_steps_work(steps):
    args = config(max_steps=steps, num_iterations=3)
    if steps % 12 == 0:
        return
    with pytest.raises(ValueError) as caught:
        args.check_agents(["a", "b"])
    suggested, rounds = map(int, re.search(r"max_steps=(\d+), or max_rounds=(\d+)", str(caught.value)).groups())
    config(max_steps=suggested, num_iterations=3).check_agents(["a", "b"])
    assert suggested == 12 * rounds


# -- for_agent --------------------------------------------------------------------------------------------------------


def all_fields(args, without=()):
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and f.name not in without}


def test_the_leader_without_overrides_has_the_teams_settings():
    args = config(gradient_accumulation_steps=2, alpha=0.5, peer_clip_delta=None, max_rounds=3)
    assert all_fields(args.for_agent("a", leader=True)) == all_fields(args)


def test_a_peer_reports_through_the_leader():
    args = config(report_to="tensorboard", disable_tqdm=False, run_name="mine")
    peer = args.for_agent("small", leader=False)
    assert peer.output_dir.replace("\\", "/") == "out/small"
    assert peer.report_to == [] and peer.disable_tqdm is True
    leader = args.for_agent("small", leader=True)
    assert leader.output_dir == "out" and leader.report_to == args.report_to == ["tensorboard"]
    same = ("output_dir", "report_to", "disable_tqdm")
    assert all_fields(peer, same) == all_fields(leader, same)


def test_overrides_act_on_their_agent_only():
    args = config(agent_overrides={"small": {"learning_rate": 1e-4, "alpha": 0.0, "peer_clip_delta": "none"}})
    small, large = args.for_agent("small", leader=False), args.for_agent("large", leader=True)
    assert (small.learning_rate, small.alpha, small.peer_clip_delta) == (1e-4, 0.0, None)
    assert (large.learning_rate, large.alpha, large.peer_clip_delta) == (1e-6, 1.0, 0.2)
    assert args.agent_overrides["small"] == {"learning_rate": 1e-4, "alpha": 0.0, "peer_clip_delta": "none"}
    assert small.agent_overrides is None and large.agent_overrides is None


@pytest.mark.parametrize("method", METHODS)
def test_every_method_survives_for_agent(method):
    args = config(method=method, agent_overrides={"a": {"learning_rate": 1e-3}})
    agent = args.for_agent("a", leader=False)
    for name in ("method", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type"):
        assert getattr(agent, name) == getattr(args, name)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("iterations", [1, 2])
def test_another_batch_size_keeps_rounds_and_updates(size, accumulation, iterations):
    args = config(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        num_iterations=iterations,
        agent_overrides={"a": {"per_device_train_batch_size": size}},
    )
    agent = args.for_agent("a", leader=False)
    assert agent.per_device_train_batch_size == size
    assert agent.rows_per_round == args.rows_per_round == agent.generation_batch_size
    assert agent.gradient_accumulation_steps * size == 8 * accumulation
    for agents in (1, 2, 3):
        assert agent.updates_per_round(agents) == args.updates_per_round(agents) == 2 * iterations * agents


@pytest.mark.parametrize(("accumulation", "updates"), [(1, 16), (2, 8), (4, 4), (8, 2)])
def test_another_accumulation_makes_other_updates(accumulation, updates):
    args = config(gradient_accumulation_steps=4, agent_overrides={"a": {"gradient_accumulation_steps": accumulation}})
    agent = args.for_agent("a", leader=True)
    assert agent.rows_per_round == args.rows_per_round == 64
    assert agent.gradient_accumulation_steps == accumulation
    assert agent.updates_per_round(2) == updates


def test_another_batch_size_and_accumulation():
    overrides = {"a": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}}
    agent = config(agent_overrides=overrides).for_agent("a", leader=True)
    assert (agent.rows_per_round, agent.steps_per_generation, agent.updates_per_round(1)) == (16, 8, 2)


def agent_refused(values, *patterns, **changes):
    args = config(agent_overrides={"small": values}, **changes)
    args.check_agents(["small"])
    with pytest.raises(ValueError) as caught:
        args.for_agent("small", leader=False)
    for pattern in ("agent 'small'", *patterns):
        assert pattern in str(caught.value), str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("size", [3, 5, 7, 12, 32])
def test_the_suggested_batch_size_of_an_agent_works(size):
    message = agent_refused({"per_device_train_batch_size": size}, f"per_device_train_batch_size={size}")
    suggested = int(re.search(r"Try (\d+)", message)[1])
    args = config(agent_overrides={"small": {"per_device_train_batch_size": suggested}})
    try:
        args.for_agent("small", leader=False)
    except ValueError as error:  # a second message may name a smaller one, which then works
        suggested = int(re.search(r"Try (\d+)", str(error))[1])
        config(agent_overrides={"small": {"per_device_train_batch_size": suggested}}).for_agent("small", leader=True)


def test_a_batch_size_above_an_update_needs_its_accumulation():
    message = agent_refused({"per_device_train_batch_size": 16}, "8 responses of an update")
    assert "gradient_accumulation_steps" in message and "Try 8" in message
    overrides = {"small": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}}
    assert config(agent_overrides=overrides).for_agent("small", leader=True).updates_per_round(2) == 2


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"top_p": 0.5}, "top_p=0.5"),
        ({"generation_kwargs": {"top_k": 3}}, "top_k"),
        ({"loss_type": "dapo"}, "loss_type='grpo'"),
        ({"peer_clip_delta": 2.0}, "delta=2.0"),
        ({"importance_sampling_level": "token"}, "sequence"),
    ],
)
def test_what_cannot_work_for_one_agent_names_it(values, pattern):
    agent_refused(values, pattern)


@pytest.mark.parametrize("values", [{"alpha": "high"}, {"learning_rate": "high"}], ids=str)
def test_values_of_a_wrong_type_name_the_agent(values):
    agent_refused(values, *values)


@pytest.mark.parametrize("size", [0, -4, "4", None], ids=repr)
def test_bad_batch_sizes_name_the_agent(size):
    if size == "4":  # a number as text may also be read as the number
        args = config(agent_overrides={"small": {"per_device_train_batch_size": size}})
        try:
            assert args.for_agent("small", leader=True).per_device_train_batch_size == 4
        except ValueError as error:
            assert "agent 'small'" in str(error)
        return
    agent_refused({"per_device_train_batch_size": size}, "per_device_train_batch_size")


def test_a_bad_accumulation_of_an_agent_is_suggested_what_it_can_change():
    # steps_per_generation belongs to the team; only the accumulation can be another
    message = agent_refused({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3")
    assert "Try steps_per_generation" not in message, message


def test_idle_settings_do_not_warn_once_more_for_every_agent():
    args = None
    with pytest.warns(UserWarning, match="alpha"):
        args = config(method="gspo", alpha=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args.for_agent("a", leader=True)
        args.for_agent("b", leader=False)


def test_agents_get_hub_ids_of_their_own():
    args = config(hub_model_id="me/team", agent_overrides={"b": {"hub_model_id": "me/other"}})
    assert args.for_agent("a", leader=True).hub_model_id == "me/team-a"
    assert args.for_agent("b", leader=False).hub_model_id == "me/other"


def test_for_agent_leaves_the_teams_settings_alone():
    args = config(agent_overrides={"a": {"per_device_train_batch_size": 4}})
    before = {name: repr(value) for name, value in all_fields(args).items()}
    args.for_agent("a", leader=False)
    args.for_agent("b", leader=True)
    assert {name: repr(value) for name, value in all_fields(args).items()} == before


# -- copies, saving, loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_replace_keeps_everything(method):
    args = config(method=method, gradient_accumulation_steps=2, peer_clip_delta="none", max_rounds=2)
    again = dataclasses.replace(args, generation_batch_size=None)
    assert all_fields(again) == all_fields(args)
    assert dataclasses.replace(args, generation_batch_size=None, alpha=0.5).alpha == 0.5


def test_settings_as_a_dict_and_as_json():
    args = config(peer_clip_delta="none", agent_overrides={"a": {"alpha": 0.5}}, capability_ratio_bounds=[0.5, 2.0])
    for values in (args.to_dict(), json.loads(args.to_json_string())):
        assert HACPO_FIELDS <= set(values)
        assert values["peer_clip_delta"] is None
        assert values["agent_overrides"] == {"a": {"alpha": 0.5}}
        assert values["capability_ratio_bounds"] == [0.5, 2.0]


@pytest.mark.parametrize("method", METHODS)
def test_settings_come_back_from_json(method):
    args = config(method=method, max_rounds=4, agent_overrides={"a": {"alpha": 0.5}}, gradient_accumulation_steps=2)
    values = json.loads(args.to_json_string())
    names = {f.name for f in dataclasses.fields(HACPOConfig) if f.init}
    values = {name: value for name, value in values.items() if name in names and not str(value).startswith("<")}
    values["generation_batch_size"] = None  # as in TRL it follows from steps_per_generation
    again = HACPOConfig(**values)
    assert {name: getattr(again, name) for name in HACPO_FIELDS} == {
        name: getattr(args, name) for name in HACPO_FIELDS
    }
    for name in ("epsilon", "epsilon_high", "steps_per_generation", "generation_batch_size", "lr_scheduler_type"):
        assert getattr(again, name) == getattr(args, name), name


def test_settings_can_be_pickled():
    # Trainer saves them beside every model
    args = config(agent_overrides={"a": {"alpha": 0.5}}, peer_clip_delta=None)
    again = pickle.loads(pickle.dumps(args))
    assert isinstance(again, HACPOConfig) and all_fields(again) == all_fields(args)


def test_it_is_a_grpo_config():
    assert isinstance(config(), GRPOConfig) and isinstance(config(), TrainingArguments)
    assert set(GRPOConfig._VALID_DICT_FIELDS) < set(HACPOConfig._VALID_DICT_FIELDS)


def test_warning_of_a_peers_clip_range_that_closes_in_a_round():
    # 2 updates on each agent's responses, width 0.2 and step 0.025: the range is a point from update 8 on
    args = config()
    assert args.updates_per_round(5) == 10
    with pytest.warns(UserWarning, match="A round has 10 updates, and in the last 2 the peers' clip range is closed"):
        args.check_agents([f"agent-{i}" for i in range(5)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        args.check_agents([f"agent-{i}" for i in range(4)])
        for changes in ({"peer_clip_step": 0.02}, {"peer_clip_delta": None}, {"method": "naive"}):  # 0.02: as advised
            config(**changes).check_agents([f"agent-{i}" for i in range(5)])


@pytest.mark.parametrize(
    ("name", "says"), [("steps_per_generation", "2 x gradient_acc"), ("log_completions", "Parquet")]
)
def test_help_of_fields_that_do_something_else_than_in_trl(name, says):
    text = HACPOConfig.__dataclass_fields__[name].metadata["help"]
    assert says in text and len(text) <= 110
