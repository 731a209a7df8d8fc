"""The model card of an agent: what it is, who it learned with and how, on what, and how to use it.

Everything is known here: no card needs the network, and none names a local path.
"""

import dataclasses
import json
import math
import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from huggingface_hub import ModelCardData
from huggingface_hub.utils import validate_repo_id
from trl import GRPOConfig

from .._version import __version__
from ..config import HACPOConfig, idle_settings
from ..methods import METHODS, PAPERS
from ..texts.prompts import PromptForm
from .publishing import Base

_HUB = "https://huggingface.co"


# Not "before" and "after": a log is a mean of the rounds since the one before it, by an agent that learns
_REWARD_COLUMNS = ("mean reward", "first log", "last log")

# Always in the table of settings
_IMPORTANT = """learning_rate lr_scheduler_type beta epsilon epsilon_high alpha peer_clip_delta peer_clip_step
num_generations num_iterations max_completion_length temperature seed""".split()

# ... and these, with HACPO's own, where they are not the default. No setting that can hold a path is among them.
_IF_CHANGED = """optim weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_steps bf16 fp16
disable_dropout use_bias_correction_kl mask_truncated_completions entropy_coef sync_ref_model ref_model_sync_steps
ref_model_mixup_alpha reward_weights shuffle_dataset use_vllm vllm_importance_sampling_correction
chat_template_kwargs""".split()
_NOT_LEARNING = """agent_overrides hub_base_model_id max_rounds method method_settings micro_batches
offload_inactive_agents sampling_batch_size screen_peers vllm_server_urls""".split()

_TRL = """@software{vonwerra2020trl,
    title  = {{TRL: Transformers Reinforcement Learning}},
    author = {Leandro von Werra and others},
    year   = 2020,
    url    = {https://github.com/huggingface/trl},
}"""


@dataclasses.dataclass(frozen=True)
class AgentFacts:
    """What a card says of an agent.

    Attributes:
        name: in logs and folders.
        args: its settings.
        base: the model that it started from.
        model: the trained model; its configuration and its adapter's are named.
        repository: the whole id of its repository, None where it is not open.
        form: in which it was trained.
        rewards: names of the reward functions that graded its responses.
    """

    name: str
    args: HACPOConfig
    base: Base
    model: Any
    repository: str | None
    form: PromptForm
    rewards: list[str]


@dataclasses.dataclass(frozen=True)
class TeamFacts:
    """What a card says of the team and its run.

    Attributes:
        args: the run's settings.
        agents: the leader first.
        rounds: how many were trained.
        train_dataset: the prompts.
        eval_sets: names of the data sets of evaluations; [""] for one without a name.
        history: the run's log.
        details: what the user adds, see `HACPOTrainer.create_model_card`.
    """

    args: HACPOConfig
    agents: list[AgentFacts]
    rounds: int
    train_dataset: Any
    eval_sets: list[str]
    history: list[dict[str, Any]]
    details: dict[str, Any]


def card_text(team: TeamFacts, agent: AgentFacts) -> str:
    """The whole card of an agent, metadata first.

    Args:
        team: of the run.
        agent: whose card it is, one of the team's.
    """
    sections = [
        f"# {_title(team, agent)}\n\n{_introduction(team, agent)}",
        f"## How to use it\n\n{_usage(agent)}",
        f"## The team\n\n{_team(team, agent)}",
        f"## Training\n\n{_training(team, agent)}",
        f"## Data\n\n{_data(team, agent)}",
    ]
    results = _results(team, agent)
    if results:
        sections.append(f"## Results\n\n{results}")
    sections += [f"## Versions\n\n{_versions(agent)}", f"## Citation\n\n{_citations(agent)}"]
    return f"---\n{_metadata(team, agent)}---\n\n" + "\n\n".join(sections) + "\n"


def _metadata(team: TeamFacts, agent: AgentFacts) -> str:
    details = team.details
    tags = ["trl", "hacpo" if team.args.shares_rollouts else team.args.method, "generated_from_trainer"]
    extra = details.get("tags") or []
    data = ModelCardData(
        base_model=agent.base.hub_id,
        datasets=[name for name in _dataset_names(team) if _is_id(name)] or None,
        language=details.get("language"),
        library_name="peft" if is_peft_model(agent.model) else "transformers",
        license=details.get("license"),
        model_name=_title(team, agent),
        pipeline_tag="text-generation",
        tags=tags + ([extra] if isinstance(extra, str) else list(extra)),
    )
    return data.to_yaml() + "\n"


def _repository(agent: AgentFacts) -> str | None:
    """The whole id of an agent's repository, as far as it is known."""
    wanted = agent.args.hub_model_id or ""
    return agent.repository or (wanted if "/" in wanted else None)


def _title(team: TeamFacts, agent: AgentFacts) -> str:
    name = team.details.get("model_name")
    return f"{name}-{agent.name}" if name else (_repository(agent) or agent.name).split("/")[-1]


def _link(hub_id: str, revision: str | None = None) -> str:
    return f"[{hub_id}]({_HUB}/{hub_id})" + (f" at `{revision}`" if revision else "")


def _base(agent: AgentFacts) -> str:
    if agent.base.hub_id is not None:
        return _link(agent.base.hub_id, agent.base.revision)
    kind = agent.model.config.model_type
    return f"`{agent.base.title}` (a local {kind} model)" if agent.base.title else f"a {kind} model of no name"


def _kind(agent: AgentFacts) -> str:
    """What was trained of an agent."""
    if not is_peft_model(agent.model):
        return "all weights"
    settings = agent.model.peft_config[agent.model.active_adapter]
    kind = str(getattr(settings.peft_type, "value", settings.peft_type)).replace("LORA", "LoRA")
    rank = getattr(settings, "r", None)
    text = f"{kind} adapter" + (f" of rank {rank}" if isinstance(rank, int) else "")
    quantization = getattr(agent.model.config, "quantization_config", None)
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else getattr(quantization, "quant_method", None)
    )
    return text + (f" on a base quantized by {getattr(method, 'value', method)}" if method else "")


def _introduction(team: TeamFacts, agent: AgentFacts) -> str:
    what = "an adapter of" if is_peft_model(agent.model) else "a fine-tuned version of"
    others = len(team.agents) - 1
    text = f"This is {what} {_base(agent)}"
    if not others:
        return f"{text}, trained alone with hacpo_trl, on [TRL](https://github.com/huggingface/trl)."
    models = "another language model" if others == 1 else f"{others} other language models"
    learned = "It learned together with" if team.args.shares_rollouts else "It was trained beside"
    return (
        f"{text}. {learned} {models}, by hacpo_trl on [TRL](https://github.com/huggingface/trl), and runs without "
        f"{'it' if others == 1 else 'them'}."
    )


def _usage(agent: AgentFacts) -> str:
    where = _repository(agent) or agent.name
    comment = "" if _repository(agent) else "  # the folder of this card"
    remote = ", trust_remote_code=True" if agent.args.trust_remote_code else ""
    adapter = is_peft_model(agent.model)
    package, loader = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    imports = [f"from {package} import {loader}", "from transformers import AutoTokenizer"]
    if not adapter:
        imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    form = agent.form
    stop = f", stop_strings={json.dumps(form.stop, ensure_ascii=False)}, tokenizer=tokenizer" if form.stop else ""
    lines = [
        *imports,
        "",
        f'name = "{where}"{comment}',
        f"model = {loader}.from_pretrained(name{remote})",
        f"tokenizer = AutoTokenizer.from_pretrained(name{remote})",
        *_prompt(form),
        f"output = model.generate(**inputs, max_new_tokens={agent.args.max_completion_length}{stop})",
        'print(tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    note = "\n\nThe base model is downloaded with it." if adapter else ""
    return "```python\n" + "\n".join(lines) + f"\n```{note}"


def _prompt(form: PromptForm) -> list[str]:
    """Lines of a program that make the inputs for a problem of our own: the training data are not shown."""
    prompt = form.render("What is 12 + 34?")
    mine = "  # put yours in the form of the training prompts" if form.as_it_is else ""
    shown = json.dumps(prompt, ensure_ascii=False)
    if form.prompt_format == "plain":
        return [f"prompt = {shown}{mine}", 'inputs = tokenizer(prompt, return_tensors="pt")']
    options = "".join(f", {key}={value!r}" for key, value in form.chat_template_kwargs.items())
    return [
        f"messages = {shown}",
        "inputs = tokenizer.apply_chat_template(",
        f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{options}',
        ")",
    ]


def _team(team: TeamFacts, agent: AgentFacts) -> str:
    lines = ["| agent | started from | trained | repository |", "|---|---|---|---|"]
    for other in team.agents:
        name = f"**{other.name}** (this one)" if other is agent else other.name
        repository = _repository(other)
        lines.append(f"| {name} | {_base(other)} | {_kind(other)} | {_link(repository) if repository else ''} |")
    return "\n".join(lines)


def _training(team: TeamFacts, agent: AgentFacts) -> str:
    args = team.args
    prompts = args.generation_batch_size // args.num_generations
    updates = agent.args.updates_per_round(len(team.agents))
    rows = agent.args.rows_per_update(len(team.agents)) * args.world_size
    lines = [
        f"Method: {METHODS[args.method].title}{_method_settings(args)}: {METHODS[args.method].about}",
        "",
        f"{team.rounds} {'round' if team.rounds == 1 else 'rounds'} of {prompts} prompts x {args.num_generations} "
        f"responses of each agent; {updates} updates a round, each on up to {rows} responses.",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| `{name}` | {_shown(value)} |" for name, value in settings_of(agent.args).items()),
        "",
        "Other settings have the defaults of hacpo_trl's `HACPOConfig`.",
    ]
    return "\n".join(lines)


def _method_settings(args: HACPOConfig) -> str:
    numbers = {name: v for name, v in (args.method_settings or {}).items() if isinstance(v, (int, float, type(None)))}
    return f" ({', '.join(f'{name}={_shown(value)}' for name, value in numbers.items())})" if numbers else ""


def settings_of(args: HACPOConfig) -> dict[str, Any]:
    """The settings that a card names: the important ones, and those that are not the default.

    Args:
        args: the agent's settings.
    """
    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    fields = {field.name: field for field in dataclasses.fields(HACPOConfig)}
    own = [name for name in fields if name not in inherited and name not in _NOT_LEARNING]
    idle = idle_settings(args)
    result = {}
    for name in [*_IMPORTANT, *own, *_IF_CHANGED]:
        field = fields[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(args, name)
        value = getattr(value, "value", value)
        same = value == default or default is None and value is False  # bf16, where there is no GPU for it
        if name not in idle and (name in _IMPORTANT or not same):
            result[name] = value
    return result


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value).replace("|", "\\|")


def _dataset_names(team: TeamFacts) -> list[str]:
    """Ids on the Hub of the prompts, and names that the user gave."""
    given = team.details.get("dataset_name")
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    info = getattr(team.train_dataset, "info", None)
    files = [str(file) for file in (getattr(info, "download_checksums", None) or {})]
    return sorted({found.group(1) for file in files if (found := re.match(r"hf://datasets/([^@]+)@", file))})


def _is_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return not os.path.exists(name) and not name.lower().endswith((".json", ".jsonl", ".csv", ".parquet"))


def _data(team: TeamFacts, agent: AgentFacts) -> str:
    names = [
        f"[{name}]({_HUB}/datasets/{name})" if _is_id(name) else f"`{os.path.basename(os.path.normpath(name))}`"
        for name in _dataset_names(team)
    ]
    where = f" of {', '.join(names)}" if names else ""
    graded = ", ".join(f"`{name}`" for name in agent.rewards)
    if isinstance(team.train_dataset, Dataset):
        return f"{len(team.train_dataset)} prompts{where}. Responses were graded by {graded}."
    return f"A stream of prompts{where}. Responses were graded by {graded}."


def _results(team: TeamFacts, agent: AgentFacts) -> str:
    name, history = agent.name, team.history
    accuracies = []
    for benchmark, value in (team.details.get("accuracies") or {}).get(name, {}).items():
        before, after = value if isinstance(value, tuple) else (None, value)
        accuracies.append((f"accuracy, {benchmark}", before, after))
    keys = {"while training": f"{name}/reward"}
    for eval_set in team.eval_sets:
        prefix, title = (f"{eval_set}_", f"in evaluation on {eval_set}") if eval_set else ("", "in evaluation")
        keys[title] = f"eval_{prefix}{name}/reward"
    rewards = []
    for title, key in keys.items():
        found = [entry[key] for entry in history if key in entry]
        if found:
            rewards.append((title, found[0] if len(found) > 1 else None, found[-1]))
    tables = [_table(("measured", "before", "after"), accuracies), _table(_REWARD_COLUMNS, rewards)]
    return "\n\n".join(table for table in tables if table)


def _table(head: tuple[str, str, str], rows: list[tuple[str, float | None, float | None]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(head)} |", "|---|---|---|"]
    return "\n".join(lines + [f"| {what} | {_number(first)} | {_number(last)} |" for what, first, last in rows])


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def read_accuracies(value: Any, names: list[str]) -> dict[str, dict[str, float | tuple[float, float]]]:
    """Accuracies of agents on benchmarks.

    Args:
        value: {agent: {benchmark: accuracy, or (before, after)}}, or a results file of `hacpo evaluate`.
        names: of the agents.

    Raises:
        ValueError: for other agents, or for what is no number.
    """
    if isinstance(value, (str, os.PathLike)):
        from ..evaluation.scores import load_results

        found: dict[str, dict[str, Any]] = {}
        for result in load_results(value):
            found.setdefault(result.model, {})[result.title] = result.summary()["average"]
        value, others = {name: found[name] for name in names if name in found}, list(found)
        if not value:
            raise ValueError(
                f"accuracies: the file holds results of {', '.join(others)}, none of the agents {', '.join(names)}. "
                "Name the models like the agents: hacpo evaluate --names."
            )
    if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
        raise ValueError(f"accuracies={value!r:.80} must be {{agent: {{benchmark: accuracy}}}}.")
    unknown = [name for name in value if name not in names]
    if unknown:
        raise ValueError(f"accuracies names {', '.join(map(str, unknown))}; the agents are {', '.join(names)}.")
    return {
        name: {benchmark: _accuracy(entry, name, benchmark) for benchmark, entry in entries.items()}
        for name, entries in value.items()
    }


def _accuracy(value: Any, name: str, benchmark: str) -> float | tuple[float, float]:
    try:
        if isinstance(value, (tuple, list)):
            before, after = value
            return float(before), float(after)
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"accuracies[{name!r}][{benchmark!r}]={value!r:.40} must be a number, or a pair (before, after)."
        ) from None


def _versions(agent: AgentFacts) -> str:
    packages = ["trl", "transformers", "torch", "datasets", "tokenizers"]
    lines = [f"- hacpo_trl {__version__}"]
    for package in packages + (["peft"] if is_peft_model(agent.model) else []):
        try:
            lines.append(f"- {package} {version(package)}")
        except PackageNotFoundError:  # installed under another name
            continue
    return "\n".join(lines)


def _citations(agent: AgentFacts) -> str:
    papers = dict.fromkeys([*METHODS[agent.args.method].papers, "GRPO"])
    parts = []
    for paper in papers:
        number, entry = PAPERS[paper]
        link = f"{paper}: [arXiv {number}](https://arxiv.org/abs/{number})"
        parts.append(link if entry is None else f"{link}\n\n```bibtex\n{entry}\n```")
    return "\n\n".join([*parts, f"TRL:\n\n```bibtex\n{_TRL}\n```"])
