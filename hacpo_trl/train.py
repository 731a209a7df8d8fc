"""Trains a team on maths problems from the command line: `hacpo train`, and examples/train_math.py.

Every field of HACPOConfig, of TRL's ModelConfig (LoRA, quantization, dtype, attention) and of `ScriptArguments` can be
given on the command line or in a YAML file named by --config; the command line wins.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import AutoConfig, AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from .config import HACPOConfig
from .data import INSTRUCTION, load_problems, to_prompts
from .rewards import math_reward
from .sharing import check_sharing
from .team import check_models, resolve_names
from .trainer import HACPOTrainer


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
    prompt_format: str = field(
        default="auto",
        metadata={
            "help": "'chat', 'plain', or 'auto': chat if all agents have a template.",
            "choices": ("auto", "chat", "plain"),
        },
    )
    system_prompt: str | None = field(default=None, metadata={"help": "First message of every prompt."})
    instruction: str = field(default=INSTRUCTION, metadata={"help": "Stands behind every problem."})
    dry_run: bool = field(
        default=False, metadata={"help": "Check the settings and print the plan of the run, without loading weights."}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, or with --dry_run prints the plan.

    Args:
        arguments: by default those of the process.

    Returns:
        The exit code.
    """
    parser = TrlParser((ScriptArguments, HACPOConfig, ModelConfig))
    script, args, model_args = parser.parse_args_and_config(None if arguments is None else list(arguments))
    if not script.models:
        sys.exit("Which models? Give --models with one Hub id or folder for each agent.")
    if model_args.model_name_or_path:
        sys.exit("--model_name_or_path is for one model; give --models with one Hub id or folder for each agent.")
    if not script.dataset:
        sys.exit("Which problems? Give --dataset with a Hub id or a local file.")

    quantization = get_quantization_config(model_args)
    init = {"attn_implementation": model_args.attn_implementation, "dtype": model_args.dtype}
    if model_args.model_revision not in (None, "main"):
        init["revision"] = model_args.model_revision
    args.model_init_kwargs = {**{k: v for k, v in init.items() if v is not None}, **(args.model_init_kwargs or {})}

    if script.dry_run:
        print(describe(script, args, model_args))
        return 0

    def prompts(source: str, **kwargs):
        columns = {"problem_column": script.problem_column, "answer_column": script.answer_column}
        problems = load_problems(source, **columns, **kwargs)
        return to_prompts(problems, chat=chat, system_prompt=script.system_prompt, instruction=script.instruction)

    chat = script.prompt_format == "chat"
    if script.prompt_format == "auto":
        try:
            chat = all(
                AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code).chat_template
                for model in script.models
            )
        except (OSError, ValueError):  # a model that is not there: the trainer says which, of all
            chat = False
        print(f"Prompts are {'chats' if chat else 'plain text: not every agent has a chat template'}.")
    train = prompts(script.dataset, split=script.dataset_split, name=script.dataset_config, limit=script.max_problems)
    trainer = HACPOTrainer(
        models=script.models,
        reward_funcs=math_reward,
        args=args,
        train_dataset=train,
        eval_dataset=prompts(script.eval_dataset_file) if script.eval_dataset_file else None,
        peft_configs=get_peft_config(model_args),
        quantization_configs=quantization,
        agent_names=script.agent_names,
    )
    if not os.path.exists(script.dataset):
        trainer.card_details["dataset_name"] = script.dataset
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    if args.push_to_hub:
        for name, commit in zip(trainer.agent_names, trainer.push_to_hub(), strict=False):
            print(f"Pushed: {name} to {commit.commit_url}")
    else:
        trainer.save_model()
    print("Saved: " + ", ".join(f"{args.output_dir}/{name}" for name in trainer.agent_names))
    return 0


def describe(script: ScriptArguments, args: HACPOConfig, model_args: ModelConfig) -> str:
    """The plan of a run: agents, the arithmetic of a round, and an estimate of the memory.

    Args:
        script: what to train on what.
        args: settings of the team.
        model_args: how models are loaded and adapted.

    Raises:
        ValueError: for settings that cannot work.
    """
    from .memory import GIB, AgentShape, estimate

    names = resolve_names(script.models, script.agent_names)
    count = len(names)
    args.check_agents(names)
    configs = [args.for_agent(name, leader=i == 0, index=i) for i, name in enumerate(names)]
    adapters = [get_peft_config(model_args)] * count
    repositories = check_sharing(script.models, names, args, configs, adapters)
    check_models(script.models, names, configs)

    processes = args.world_size
    own = args.steps_per_generation // args.gradient_accumulation_steps * args.num_iterations
    updates = args.updates_per_round(count)
    prompts = args.generation_batch_size // args.num_generations
    lines = [f"method {args.method}, {count} agents, {processes} process{'es' * (processes > 1)}:"]
    for name, model, config in zip(names, script.models, configs, strict=True):
        size, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
        lines.append(
            f"  {name}: {model}, learning rate {config.learning_rate:g}, micro-batches of {size} x {accumulation} an "
            f"update, responses up to {config.max_completion_length} tokens"
        )
    lines.append(
        f"a round: {prompts} prompts x {args.num_generations} responses = {args.generation_batch_size} of each agent"
    )
    lines.append(
        f"  updates of an agent: {updates}, each on {args.generation_batch_size // (own // args.num_iterations)}"
    )
    if args.shares_rollouts and args.rollout_order == "own_first":
        lines.append(
            f"  a pass over them: {own // args.num_iterations} on its own responses, then the others' on peers'"
        )
    forwards = args.num_iterations * args.generation_batch_size * (count if args.shares_rollouts else 1)
    lines.append(f"  responses that pass forward and backward, at most: {forwards} of each agent")

    shapes = [
        AgentShape.from_config(AutoConfig.from_pretrained(model), name=n)
        for model, n in zip(script.models, names, strict=True)
    ]
    stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin is not None else 0
    team = estimate(
        shapes,
        processes,
        zero_stage=stage,
        lora_rank=model_args.lora_r if model_args.use_peft else None,
        offload_inactive=args.offload_inactive_agents,
        reference=args.beta != 0,
        micro_batch=args.per_device_train_batch_size,
        length=args.max_completion_length + 1024,
        sample_rows=0 if args.use_vllm else min(args.rows_per_round, args.sampling_batch_size or args.rows_per_round),
        checkpointing=bool(args.gradient_checkpointing),
    )
    lines.append(f"memory on each GPU, estimated for prompts of 1024 tokens: {team.total / GIB:.1f} GiB")
    if script.dataset.endswith((".jsonl", ".json", ".csv", ".parquet")) and os.path.isfile(script.dataset):
        columns = {"problem_column": script.problem_column, "answer_column": script.answer_column}
        problems = len(load_problems(script.dataset, limit=script.max_problems, **columns))
        rounds = args.max_rounds if args.max_rounds > 0 else int(args.num_train_epochs * (problems // prompts))
        if args.max_steps > 0:
            rounds = args.max_steps // updates
        lines.append(f"{problems} problems, {rounds} rounds, {rounds * updates} updates of an agent")
    if args.push_to_hub:
        pushed = ", ".join(f"{name} to {repository}" for name, repository in zip(names, repositories, strict=True))
        lines.append(f"pushed to the Hub: {pushed}")
    return "\n".join(lines)
