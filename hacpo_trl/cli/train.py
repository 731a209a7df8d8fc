"""Trains a team on maths problems from the command line: `hacpo train`, and examples/train_math.py.

Every field of HACPOConfig, of TRL's ModelConfig (LoRA, quantization, dtype, attention) and of `ScriptArguments` can be
given on the command line or in a YAML file named by --config; the command line wins.
"""

import difflib
import functools
import os
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import yaml
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trl.trainer.utils import get_callable_name

from ..config import HACPOConfig
from ..hub.origin import find_origin
from ..hub.publishing import check_sharing
from ..maths.problems import is_local, load_problems, missing_file, to_prompts
from ..maths.reward import load_reward, weighted_sum
from ..sampling.turn_taking import agents_are_running
from ..setting_types import convert_fields
from ..texts.prompts import AS_IT_IS, INSTRUCTION, PromptForm, make_form, with_newlines
from ..training.arguments import (
    check_dataset,
    check_models,
    check_offload,
    load_config,
    load_tokenizers,
    numbered,
    resolve_names,
    resolve_rewards,
)
from ..training.checkpoint import CheckpointError, TeamState, check_rounds, find_checkpoint
from ..training.fsdp import check_fsdp, own_plugin, uses_fsdp
from ..training.trainer import HACPOTrainer
from .console import end_interrupted, show_slow_bars_only, tell_held
from .tryout import sample_team, show_prompt


@dataclass
class ScriptArguments:
    """What to train on what."""

    models: list[str] = field(default_factory=list, metadata={"help": "Hub ids or folders, one for each agent."})
    agent_names: list[str] | None = field(default=None, metadata={"help": "Names of the agents."})
    dataset: str = field(default="", metadata={"help": "Hub id or local file with problems and answers."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a Hub data set."})
    eval_dataset_file: str | None = field(default=None, metadata={"help": "Local file to evaluate on."})
    problem_column: str | None = field(default=None, metadata={"help": "Column of the problem."})
    answer_column: str | None = field(default=None, metadata={"help": "Column of the answer or solution."})
    max_problems: int | None = field(default=None, metadata={"help": "Use the first problems only."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math_reward"],
        metadata={
            "help": "What grades: math_reward, number_reward (wants a number, no sum), module.function or "
            "file.py:function; several are weighed by --reward_weights."
        },
    )
    prompt_format: str = field(
        default="auto",
        metadata={
            "help": "'chat', 'plain', or 'auto': chat if all agents have a template.",
            "choices": ("auto", "chat", "plain"),
        },
    )
    prompt_template: str | None = field(
        default=None, metadata={"help": "Text with {problem} in it that makes the prompts; \\n in it is a new line."}
    )
    prompt_column: str | None = field(
        default=None,
        metadata={"help": "Column of whole prompts, texts or lists of messages, to which nothing is added."},
    )
    system_prompt: str | None = field(default=None, metadata={"help": "First message of every prompt."})
    instruction: str = field(
        default=INSTRUCTION, metadata={"help": "Stands behind every problem, where there is no prompt_template."}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Check the settings and print the plan of the run, without loading weights."}
    )
    sample_problems: int = field(
        default=0,
        metadata={"help": "Problems that every agent answers in a dry run, to see if the task is learnable."},
    )


class _Parser(TrlParser):
    """The options of `hacpo train`: help in groups, the first of which a run cannot do without, and errors in one
    sentence."""

    def __init__(self):
        super().__init__(
            (ScriptArguments, HACPOConfig, ModelConfig),
            prog="hacpo train",
            usage="hacpo train --models MODEL MODEL ... --dataset DATASET [--config FILE.yaml] [options]",
        )
        stop_texts = next(action for action in self._actions if action.dest == "stop_texts")
        stop_texts.nargs = "*"  # none at all: no stop texts

    def format_help(self) -> str:
        inherited = {f.name for f in fields(GRPOConfig)}
        own = {f.name for f in fields(HACPOConfig)} - inherited
        groups = {
            "agents and problems": {"help", *(f.name for f in fields(ScriptArguments))},
            "learning together (HACPOConfig)": own,
            "LoRA, quantization and loading, for all agents (trl.ModelConfig)": {f.name for f in fields(ModelConfig)},
            "training, sampling, logging, saving (trl.GRPOConfig)": inherited,
        }
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text("Every option can also stand in a YAML file, under the same name; the command line wins.")
        for title, names in groups.items():
            formatter.start_section(title)
            formatter.add_arguments([action for action in self._actions if action.dest in names])
            formatter.end_section()
        return formatter.format_help()

    def error(self, message: str) -> None:
        sys.exit(_failure(message))

    def parse_known_args(self, args=None, namespace=None):
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            name = next((text.partition("=")[0] for text in rest if text.startswith("--")), None)
            known = [option for option in self._option_string_actions if option.startswith("--")]
            self.error(
                f"unexpected argument {rest[0]!r}." if name is None else f"unknown option {name}.{_near(name, known)}"
            )
        return namespace, rest

    def set_defaults_with_config(self, **kwargs) -> list[str]:
        known = [action.dest for action in self._actions]
        for key in kwargs:
            if key not in known:
                raise ValueError(f"the file of --config sets {key!r}, which is no setting.{_near(str(key), known)}")
        return super().set_defaults_with_config(**kwargs)


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _failure(error: Any) -> int:
    print(f"hacpo train: error: {error}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, or with --dry_run prints the plan.

    Args:
        arguments: by default those of the process.

    Returns:
        The exit code. What goes wrong by the user's doing before the training starts is told in one sentence, with 2;
        after Ctrl-C one says how to go on, with 130.
    """
    show_slow_bars_only()
    try:
        script, args, model_args = _parse(sys.argv[1:] if arguments is None else list(arguments))
        quantization = get_quantization_config(model_args)
        if quantization is not None:
            tell_held("bitsandbytes.backends.cpu.ops")
        if args.deepspeed_plugin is not None:
            tell_held("DeepSpeed")
        if script.dry_run:
            print(describe(script, args, model_args), flush=True)
            if script.sample_problems:
                task = _task(script, args, model_args)
                problems = random.Random(args.seed).sample(
                    task.problems, min(script.sample_problems, len(task.problems))
                )
                print(sample_team(script.models, *task[:4], problems, weighted_sum(task.rewards, args.reward_weights)))
            return 0
        trainer = _build(script, args, model_args, quantization)
    except (ValueError, ImportError, FileNotFoundError, IsADirectoryError) as error:
        return _failure(error)
    except KeyboardInterrupt:
        return end_interrupted("train", "Nothing was trained yet.")
    try:
        trainer.train(resume_from_checkpoint=_resume(args))
        if args.push_to_hub:
            for name, commit in zip(trainer.agent_names, trainer.push_to_hub(), strict=False):
                print(f"Pushed: {name} to {commit.commit_url}")
        else:
            trainer.save_model()
    except CheckpointError as error:
        return _failure(error)
    except KeyboardInterrupt:
        speaks = trainer.is_world_process_zero()
        return end_interrupted("train", _how_to_resume(trainer), main_process=speaks, at_once=agents_are_running())
    print("Saved: " + ", ".join(f"{args.output_dir}/{name}" for name in trainer.agent_names))
    return 0


def _resume(args: HACPOConfig) -> str | bool | None:
    return True if str(args.resume_from_checkpoint).lower() == "true" else args.resume_from_checkpoint


def _how_to_resume(trainer: HACPOTrainer) -> str:
    args, size = trainer.args, trainer.updates_per_round
    rounds = trainer.state.global_step // size
    done = f"{rounds} round{'s' * (rounds != 1)} done."
    if trainer.last_checkpoint is not None:
        return (
            f"{done} The newest checkpoint is {trainer.last_checkpoint}. To go on from it, run the same command with "
            f"--resume_from_checkpoint {shlex.quote(trainer.last_checkpoint)}"
        )
    if args.save_only_model:
        return f"{done} There is nothing to resume from, since --save_only_model saves no optimizer: leave it out."
    return (
        f"{done} There is no checkpoint yet: --save_strategy is {args.save_strategy.value!r}, --save_steps "
        f"{args.save_steps:g}, and a round has {size} updates. --save_strategy steps --save_steps {size} saves every "
        "round."
    )


def _parse(arguments: list[str]) -> tuple[ScriptArguments, HACPOConfig, ModelConfig]:
    """The settings of a command line, and what can be told to be wrong without reading anything else."""
    parser = _Parser()
    words = [word for text in arguments for word in (text.split("=", 1) if text.startswith("--config=") else [text])]
    if words and words[-1] == "--config":
        parser.error("which file? Give --config with a YAML file.")
    try:
        script, args, model_args = parser.parse_args_and_config(words)
    except FileNotFoundError as error:
        raise ValueError(f"--config {error.filename}: there is no such file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        file = words[words.index("--config") + 1]
        raise ValueError(f"{file}{place}: no YAML: {getattr(error, 'problem', None) or error}.") from None
    convert_fields(script)
    convert_fields(model_args)
    if not script.models:
        raise ValueError("Which models? Give --models with one Hub id or folder for each agent.")
    if isinstance(script.models, str):
        raise ValueError(f"models must be a list with one Hub id or folder for each agent, not {script.models!r}.")
    if model_args.model_name_or_path:
        raise ValueError(
            "--model_name_or_path is for one model; give --models with one Hub id or folder for each agent."
        )
    if not script.dataset:
        raise ValueError("Which problems? Give --dataset with a Hub id or a local file.")
    for source in (script.dataset, script.eval_dataset_file or ""):
        if (missing := missing_file(source)) is not None:
            raise ValueError(missing)
    if args.resume_from_checkpoint is not None:
        find_checkpoint(_resume(args), args)
    if script.prompt_format not in ("auto", "chat", "plain"):  # of a YAML file
        raise ValueError(f"prompt_format={script.prompt_format!r} is unknown; use one of auto, chat, plain.")
    if args.stop_texts is not None:
        args.stop_texts = [with_newlines(text) for text in args.stop_texts]
    if script.prompt_template is not None:
        script.prompt_template = with_newlines(script.prompt_template)
        make_form("plain", prompt_template=script.prompt_template)  # refuses what is no template
    for other in ("prompt_template", "problem_column", "system_prompt"):
        if script.prompt_column is not None and getattr(script, other) is not None:
            raise ValueError(
                f"--prompt_column takes prompts as they are, --{other} makes prompts of problems: give one of them."
            )
    if script.sample_problems and not script.dry_run:
        raise ValueError("--sample_problems belongs to --dry_run: it samples without training.")
    if script.sample_problems < 0:
        raise ValueError(f"--sample_problems {script.sample_problems}: use at least 1, such as 8.")
    evaluates = getattr(args.eval_strategy, "value", args.eval_strategy) != "no"
    if script.eval_dataset_file and not (evaluates or args.eval_on_start):
        raise ValueError(
            f"--eval_dataset_file {script.eval_dataset_file} would never be read: --eval_strategy is 'no', so nothing "
            "is evaluated. Add --eval_strategy steps --eval_steps N, with N in updates."
        )
    if evaluates and not script.eval_dataset_file:
        raise ValueError(
            "--eval_strategy asks for evaluations, but there is nothing to evaluate on. Give --eval_dataset_file with "
            "a local file, or leave --eval_strategy out."
        )
    init = {"attn_implementation": model_args.attn_implementation, "dtype": model_args.dtype}
    if model_args.model_revision not in (None, "main"):
        init["revision"] = model_args.model_revision
    args.model_init_kwargs = {**{k: v for k, v in init.items() if v is not None}, **(args.model_init_kwargs or {})}
    return script, args, model_args


class _Task(NamedTuple):
    """Who is asked what."""

    names: list[str]
    configs: list[HACPOConfig]
    tokenizers: list[PreTrainedTokenizerBase]
    form: PromptForm
    problems: list[dict[str, Any]] | None  # None: a data set of the Hub that a dry run does not look at
    eval_problems: list[dict[str, Any]] | None
    rewards: list[Any]


def _task(script: ScriptArguments, args: HACPOConfig, model_args: ModelConfig, *, of_hub: bool = True) -> _Task:
    """Everything of a run but the models.

    Args:
        script: what to train on what.
        args: settings of the team.
        model_args: how models are loaded and adapted.
        of_hub: whether to load data sets of the Hub, too.

    Raises:
        ValueError: for settings, models, problems and templates that do not go together.
    """
    names = resolve_names(script.models, script.agent_names)
    args.check_agents(names)
    rewards = resolve_rewards(_rewards(script), args)
    configs = [args.for_agent(name, leader=i == 0, index=i) for i, name in enumerate(names)]
    check_models(script.models, names, configs, [get_peft_config(model_args)] * len(names))
    tokenizers = load_tokenizers(script.models, [None] * len(names), names, configs)
    columns = {"problem_column": script.prompt_column or script.problem_column, "answer_column": script.answer_column}
    problems = eval_problems = None
    if of_hub or is_local(script.dataset):
        problems = load_problems(
            script.dataset,
            split=script.dataset_split,
            name=script.dataset_config,
            limit=script.max_problems,
            **columns,
        )
    if script.eval_dataset_file and (of_hub or is_local(script.eval_dataset_file)):
        eval_problems = load_problems(script.eval_dataset_file, **columns)
    form = _form(script, args, problems, names, tokenizers)
    for config in (args, *configs):
        config.stop_texts = list(form.stop)
    return _Task(names, configs, tokenizers, form, problems, eval_problems, rewards)


def _rewards(script: ScriptArguments) -> list[Any]:
    names = [script.reward_funcs] if isinstance(script.reward_funcs, str) else script.reward_funcs
    return [load_reward(name) for name in names]


def _build(script: ScriptArguments, args: HACPOConfig, model_args: ModelConfig, quantization: Any) -> HACPOTrainer:
    task = _task(script, args, model_args)
    if args.process_index == 0:
        print(f"Prompts: {task.form}\nLoading {', '.join(task.names)} ...", flush=True)
    trainer = HACPOTrainer(
        models=script.models,
        reward_funcs=task.rewards,
        args=args,
        train_dataset=to_prompts(task.problems, task.form),
        eval_dataset=to_prompts(task.eval_problems, task.form) if task.eval_problems else None,
        peft_configs=get_peft_config(model_args),
        quantization_configs=quantization,
        agent_names=script.agent_names,
    )
    trainer.prompt_form = task.form
    if not os.path.exists(script.dataset):
        trainer.card_details["dataset_name"] = script.dataset
    return trainer


def _form(
    script: ScriptArguments,
    args: HACPOConfig,
    problems: list[dict[str, Any]] | None,
    names: Sequence[str],
    tokenizers: Sequence[PreTrainedTokenizerBase],
) -> PromptForm:
    """How problems become prompts: one form for the team.

    Raises:
        ValueError: for chats without a template, and for templates around prompts that are chats already.
    """
    without = [name for name, tokenizer in zip(names, tokenizers, strict=True) if not tokenizer.chat_template]
    chats = bool(problems) and not isinstance(problems[0]["problem"], str)
    wanted = script.prompt_format
    if chats:
        given = [n for n in ("prompt_template", "system_prompt") if getattr(script, n) is not None]
        if given or wanted == "plain":
            raise ValueError(
                f"The prompts of {script.dataset} are lists of messages, which are rendered by each agent's chat "
                f"template as they are. Leave out {' and '.join(f'--{n}' for n in given) or '--prompt_format plain'}."
            )
        wanted = "chat"
    elif wanted == "auto":
        wanted = "plain" if without or script.prompt_column is not None else "chat"
    if wanted == "chat" and without:
        why = f"the prompts of {script.dataset} are chats" if chats else "--prompt_format chat"
        raise ValueError(
            f"{why}, but there is no chat template in the tokenizer of {' and '.join(map(repr, without))}. "
            + ("Give texts instead." if chats else "Use --prompt_format plain, or leave it out.")
        )
    template = AS_IT_IS if chats or script.prompt_column is not None else script.prompt_template
    return make_form(
        wanted,
        prompt_template=template,
        instruction=script.instruction,
        system_prompt=script.system_prompt,
        stop=args.stop_texts,
    )


def describe(script: ScriptArguments, args: HACPOConfig, model_args: ModelConfig) -> str:
    """The plan of a run: agents, the arithmetic of a round, and an estimate of the memory.

    Tokenizers are loaded, and local problems are read and checked as the run does it; data sets of the Hub are not
    looked at.

    Args:
        script: what to train on what.
        args: settings of the team.
        model_args: how models are loaded and adapted.

    Raises:
        ValueError: for settings that cannot work.
    """
    task = _task(script, args, model_args, of_hub=False)
    names, configs, count = task.names, task.configs, len(task.names)
    adapters = [get_peft_config(model_args)] * count
    quantizations = [get_quantization_config(model_args)] * count
    check_fsdp(configs, adapters, quantizations)
    if args.offload_inactive_agents:
        check_offload(configs, quantizations)
    repositories = check_sharing(script.models, names, args, configs, adapters)

    processes = args.world_size
    own = args.steps_per_generation // args.gradient_accumulation_steps * args.num_iterations
    updates = args.updates_per_round(count)
    prompts = args.generation_batch_size // args.num_generations
    if args.resume_from_checkpoint is not None:
        checkpoint = find_checkpoint(_resume(args), args)
        check_rounds(checkpoint, TeamState.read(checkpoint), args.method, updates)
    lines = [f"method {args.method}, {count} agents, {processes} process{'es' * (processes > 1)}:"]
    for name, model, config in zip(names, script.models, configs, strict=True):
        size = config.per_device_train_batch_size * config.rows_factor(count)
        accumulation = config.gradient_accumulation_steps
        lines.append(
            f"  {name}: {model}, learning rate {config.learning_rate:g}, micro-batches of {size} x {accumulation} an "
            f"update, responses up to {config.max_completion_length} tokens"
        )
    lines.append(f"graded by {', '.join(numbered([get_callable_name(reward) for reward in task.rewards]))}")
    lines.append(
        f"a round: {prompts} prompts x {args.num_generations} responses = {args.generation_batch_size} of each agent"
    )
    lines.append(f"  updates of an agent: {updates}, each on {args.rows_per_update(count) * processes}")
    if args.shares_rollouts and args.order == "own_first":
        lines.append(
            f"  a pass over them: {own // args.num_iterations} on its own responses, then the others' on peers'"
        )
    forwards = args.num_iterations * args.generation_batch_size * args.updates_factor(count) * args.rows_factor(count)
    lines.append(f"  responses that pass forward and backward, at most: {forwards} of each agent")

    where = "of each process" if args.use_cpu else "on each GPU"
    lines.append(f"memory {where}, estimated for prompts of 1024 tokens: {_memory(script, args, model_args)}")
    check = functools.partial(
        check_dataset, tokenizers=task.tokenizers, names=names, configs=configs, models=script.models
    )
    if task.problems is not None:
        problems = len(check(to_prompts(task.problems, task.form)))
        rounds = args.max_rounds if args.max_rounds > 0 else int(args.num_train_epochs * (problems // prompts))
        if args.max_steps > 0:
            rounds = args.max_steps // updates
        lines.append(f"{problems} problems, {rounds} rounds, {rounds * updates} updates of an agent")
    else:
        lines.append(f"{script.dataset}: a data set of the Hub, not looked at")
    if task.eval_problems is not None:
        evaluation = check(to_prompts(task.eval_problems, task.form), evaluation=True)
        lines.append(f"{len(evaluation)} problems to evaluate on")
    elif script.eval_dataset_file:
        lines.append(f"{script.eval_dataset_file}, to evaluate on: a data set of the Hub, not looked at")
    if args.push_to_hub:
        pushed = ", ".join(f"{name} to {repository}" for name, repository in zip(names, repositories, strict=True))
        lines.append(f"pushed to the Hub: {pushed}")
    example = task.problems[0] if task.problems else {"problem": "What is 12 + 34?"}
    lines.append(f"prompts: {task.form}")
    for name, tokenizer, config in zip(names, task.tokenizers, configs, strict=True):
        lines.append(show_prompt(name, tokenizer, task.form.for_agent(config.chat_template_kwargs), example))
    return "\n".join(lines)


def _memory(script: ScriptArguments, args: HACPOConfig, model_args: ModelConfig) -> str:
    """GiB that the team needs, or why there is no estimate: a plan does not fail for it."""
    from ..memory import GIB, AgentShape, estimate

    plugin, adapter = args.deepspeed_plugin, get_peft_config(model_args)
    sharding = own_plugin(args) if uses_fsdp(args) else None
    try:
        team = estimate(
            [
                AgentShape.from_config(load_config(model, args), model, find_origin(model, args).adapter or adapter)
                for model in script.models
            ],
            args.world_size,
            zero_stage=0 if plugin is None else plugin.zero_stage,
            lora_rank=None if adapter is None else model_args.lora_r,
            offload_inactive=args.offload_inactive_agents,
            fsdp=sharding is not None,
            offload_optimizer=plugin is not None and plugin.offload_optimizer_device not in (None, "none"),
            reference=args.beta != 0,
            micro_batch=args.per_device_train_batch_size * args.rows_factor(len(script.models)),
            length=args.max_completion_length + 1024,
            sample_rows=0
            if args.use_vllm
            else min(args.rows_per_round, args.sampling_batch_size or args.rows_per_round),
            checkpointing=bool(args.gradient_checkpointing or (sharding and sharding.activation_checkpointing)),
            weight_bytes=2 if "16" in str((args.model_init_kwargs or {}).get("dtype")) else 4,
        )
    except Exception as error:  # of any model's code
        return f"no estimate ({next(iter(str(error).splitlines()), type(error).__name__):.200})"
    return f"{team.total / GIB:.1f} GiB"
