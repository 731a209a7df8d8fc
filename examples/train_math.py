"""Trains a team of language models on maths problems with verifiable answers.

    accelerate launch examples/train_math.py --config examples/configs/size_pair.yaml
    python examples/train_math.py --models Qwen/Qwen3-1.7B-Base Qwen/Qwen3-4B-Base --dataset train.jsonl

Every field of HACPOConfig, of TRL's ModelConfig (LoRA, quantization, dtype, attention) and of the arguments below can
be given on the command line or in a YAML file named by --config; the command line wins. `--help` lists them all.
"""

import sys
from dataclasses import dataclass, field

from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from hacpo_trl import HACPOConfig, HACPOTrainer, math_reward
from hacpo_trl.data import INSTRUCTION, load_problems, to_prompts


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


def main() -> None:
    parser = TrlParser((ScriptArguments, HACPOConfig, ModelConfig))
    script, args, model_args = parser.parse_args_and_config()
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
    resume = args.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    trainer.save_model()
    print("Saved: " + ", ".join(f"{args.output_dir}/{name}" for name in trainer.agent_names))


if __name__ == "__main__":
    main()
