"""Checkpoints of a team: an interrupted one never looks whole, and one of other agents is refused."""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import ADAPTER_CONFIG_NAME

from ..config import HACPOConfig
from ..texts.prompts import read_form

TEAM_STATE = "hacpo_state.json"
_UNFINISHED = ".unfinished"
_FORMAT = 1
_SAMPLE = "Solve 12 + 34 = 46, then \\boxed{46}.\n  The answer: #### 46 – naïve café 你好"


@contextlib.contextmanager
def atomic_folder(folder: str, accelerator: Accelerator) -> Iterator[str]:
    """A folder to write into that takes the place of `folder` only when everything in it is written.

    Args:
        folder: where it ends up; what is there is replaced.
        accelerator: all processes must take part; the main one renames.

    Yields:
        The folder to write into: ".unfinished/<name>" beside `folder`.
    """
    parent, name = os.path.split(os.path.abspath(folder))
    staging = os.path.join(parent, _UNFINISHED)
    unfinished = os.path.join(staging, name)
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
    accelerator.wait_for_everyone()
    yield unfinished
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        old = os.path.join(staging, f"{name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if os.path.exists(folder):
            os.rename(folder, old)
        os.rename(unfinished, folder)
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):  # another folder is being written beside this one
            os.rmdir(staging)
    accelerator.wait_for_everyone()


class CheckpointError(ValueError):
    """A checkpoint that the run cannot go on from."""


@dataclass
class TeamState:
    """What belongs to the team and not to one agent.

    Attributes:
        agents: of each agent what must be the same for its weights and optimizer to fit.
        method: the run's.
        global_step: the leader's updates.
        updates_per_round: the leader's.
        prompts_seen: finished passes over the prompts, and the update at which the running one began.
        capability: the tracker's state.
        outside_shares: of each agent the share of the peers' responses outside of its clip range.
        resumable: whether optimizers are saved, too.
        exact: what must be the same for a resumed run to see the prompts and the random numbers of the uninterrupted
            one.
    """

    agents: list[dict[str, Any]]
    method: str
    global_step: int
    updates_per_round: int
    prompts_seen: tuple[int, int]
    capability: dict[str, Any]
    outside_shares: list[float]
    resumable: bool
    exact: dict[str, Any]

    def write(self, folder: str) -> None:
        """Writes the state into a checkpoint."""
        state = {
            "format": _FORMAT,
            "agents": self.agents,
            "method": self.method,
            "global_step": self.global_step,
            "updates_per_round": self.updates_per_round,
            "round": self.global_step // self.updates_per_round,
            "pass": list(self.prompts_seen),
            "capability": self.capability,
            "outside_shares": self.outside_shares,
            "resumable": self.resumable,
            "exact": self.exact,
        }
        with open(os.path.join(folder, TEAM_STATE), "w") as file:
            json.dump(state, file, indent=2)

    @classmethod
    def read(cls, folder: str) -> "TeamState":
        """Reads the state of a checkpoint.

        Raises:
            CheckpointError: when the checkpoint is not whole, or of another format.
        """
        path = os.path.join(folder, TEAM_STATE)
        if not os.path.isfile(path):
            raise CheckpointError(f"{folder!r} is not a whole checkpoint of HACPOTrainer: {TEAM_STATE} is missing.")
        with open(path) as file:
            state = json.load(file)
        if state["format"] != _FORMAT:
            raise CheckpointError(f"{folder!r} has the format {state['format']}; this version reads {_FORMAT}.")
        return cls(
            agents=state["agents"],
            method=state["method"],
            global_step=state["global_step"],
            updates_per_round=state["updates_per_round"],
            prompts_seen=tuple(state.get("pass", (0, 0))),  # release 0.1.0 wrote neither this nor the shares
            capability=state["capability"],
            outside_shares=state.get("outside_shares", []),
            resumable=state["resumable"],
            exact=state.get("exact", {}),
        )


def portrait(name: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """What must be the same for an agent's weights and optimizer to fit, see `TeamState.agents`."""
    config = model.config.get_text_config()
    return {
        "name": name,
        "model_type": config.model_type,
        "hidden_size": getattr(config, "hidden_size", None),
        "num_hidden_layers": getattr(config, "num_hidden_layers", None),
        "vocab_size": config.vocab_size,
        "tokens": len(tokenizer),
        "adapter": is_peft_model(model),
    }


def find_checkpoint(checkpoint: str | bool, args: HACPOConfig) -> str:
    """The folder of a checkpoint.

    Args:
        checkpoint: a folder, or True for the newest in the run's output folder.
        args: settings of the team.

    Raises:
        ValueError: when there is none.
    """
    if checkpoint is True:
        found = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
        if found is None:
            raise ValueError(
                f"There is no checkpoint in {args.output_dir!r}. One is written every save_steps={args.save_steps} "
                "updates, at the end of the round; an interrupted one does not count. Start without "
                "resume_from_checkpoint."
            )
        return found
    if not os.path.isdir(checkpoint):
        parent = os.path.dirname(checkpoint.rstrip("/")) or "."
        names = os.listdir(parent) if os.path.isdir(parent) else []
        beside = sorted(name for name in names if name.startswith("checkpoint-"))
        hint = f" {parent!r} holds {', '.join(beside)}." if beside else ""
        raise ValueError(f"The checkpoint {checkpoint!r} does not exist.{hint}")
    return checkpoint


def check_rounds(checkpoint: str, state: TeamState, method: str, updates_per_round: int) -> None:
    """Makes sure that a run goes on by the method and with the rounds that it began with.

    Args:
        checkpoint: its folder.
        state: its state.
        method: of the run that wants to go on.
        updates_per_round: of that run's leader.

    Raises:
        CheckpointError: naming what differs.
    """
    if state.method != method:
        raise CheckpointError(
            f"{checkpoint!r} is of a run with method={state.method!r}, this one has {method!r}. Go on with "
            f"method={state.method!r}, or start a new run from the folders of the checkpoint's agents."
        )
    if state.updates_per_round != updates_per_round:
        raise CheckpointError(
            f"{checkpoint!r} is of a run with {state.updates_per_round} updates a round, this one has "
            f"{updates_per_round}. Use the same num_iterations, steps_per_generation, gradient_accumulation_steps and "
            "rollout_order."
        )


def check_checkpoint(checkpoint: str, here: TeamState) -> TeamState:
    """Makes sure that a checkpoint is whole and of this team.

    Args:
        checkpoint: its folder.
        here: the state of the team that wants to go on from it.

    Returns:
        The state of the checkpoint.

    Raises:
        CheckpointError: when it is not whole, or it is of other agents, another method or other rounds.

    Warns:
        when the run can go on, but with other prompts or other random numbers.
    """
    state = TeamState.read(checkpoint)
    if state.agents != here.agents:
        there, ours = state.agents, here.agents
        differences = [f"it has {len(there)} agents, this team {len(ours)}"] if len(there) != len(ours) else []
        for old, new in zip(there, ours, strict=False):
            differences += [f"{old['name']}: {k} {old[k]!r} there, {new[k]!r} here" for k in old if old[k] != new[k]]
        raise CheckpointError(f"{checkpoint!r} is a checkpoint of other agents ({'; '.join(differences)}).")
    if not state.resumable:
        raise CheckpointError(
            f"{checkpoint!r} was saved with save_only_model=True and holds no optimizer. Start a new run from its "
            "agents' folders instead."
        )
    check_rounds(checkpoint, state, here.method, here.updates_per_round)
    if state.global_step % state.updates_per_round:
        raise CheckpointError(f"{checkpoint!r} was saved inside a round, so the run cannot be continued exactly.")
    differences = [
        f"{key}: {state.exact[key]} there, {value} here"
        for key, value in here.exact.items()
        if key in state.exact and state.exact[key] != value
    ]
    if differences:
        warnings.warn(
            f"{checkpoint!r} is of a run with other settings ({'; '.join(differences)}). Weights and optimizers go on "
            "from it, but not exactly as the run would have: prompts may come twice or be left out, and sampling "
            "draws other random numbers.",
            stacklevel=3,
        )
    return state


def merge_adapter(folder: str, output_dir: str) -> None:
    """Merges a saved LoRA agent into its base: the result is a full model that needs no PEFT.

    Args:
        folder: the agent's folder, as `HACPOTrainer.save_model` wrote it, or an adapter's id on the Hub. Its base is
            loaded from where it came from. PEFT saves an adapter that is not called "default" into a folder of its
            name inside; that is found, too.
        output_dir: where the merged model and the tokenizer go. Without a tokenizer in the folder it is the base's.

    Raises:
        ValueError: for a folder without an adapter, or with several.
    """
    from peft import AutoPeftModelForCausalLM

    adapter = _adapter_in(folder)
    model = AutoPeftModelForCausalLM.from_pretrained(adapter)
    base = model.peft_config["default"].base_model_name_or_path
    model.merge_and_unload().save_pretrained(output_dir)
    places = [place for place in (adapter, folder) if os.path.isfile(os.path.join(place, TOKENIZER_CONFIG_FILE))]
    tokenizer = next(iter(places), base if os.path.isdir(folder) else folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(output_dir)
    form = read_form(folder)
    if form is not None:
        form.save(output_dir)


def _adapter_in(folder: str) -> str:
    """The folder of the adapter: itself, or the one inside that holds one."""

    def is_one(path: str) -> bool:
        return os.path.isfile(os.path.join(path, ADAPTER_CONFIG_NAME))

    if not os.path.isdir(folder) or is_one(folder):
        return folder
    inside = sorted(entry.path for entry in os.scandir(folder) if is_one(entry.path))
    if len(inside) == 1:
        return inside[0]
    if not inside:
        raise ValueError(f"{folder!r} holds no adapter: there is no {ADAPTER_CONFIG_NAME} in it.")
    raise ValueError(f"{folder!r} holds several adapters. Choose one of {', '.join(inside)}.")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str, name: str) -> None:
    """Warns when AutoTokenizer makes another tokenizer of what was saved.

    AutoTokenizer builds the class that belongs to the model's type, so that a tokenizer of one's own may come back as
    a different one, silently.

    Args:
        tokenizer: the one that was saved.
        folder: where.
        name: the agent's, for the message.
    """
    try:
        same = AutoTokenizer.from_pretrained(folder)(_SAMPLE)["input_ids"] == tokenizer(_SAMPLE)["input_ids"]
    except Exception as error:  # the warning below is all that can be done
        same, reason = False, f" ({error})"
    else:
        reason = ""
    if not same:
        warnings.warn(
            f"agent {name!r}: AutoTokenizer does not load the tokenizer saved in {folder!r} as it was{reason}. Load "
            f"it with {type(tokenizer).__name__}.from_pretrained.",
            stacklevel=3,
        )
