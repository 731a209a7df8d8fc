"""Where the files of a model are: a Hub id, a folder, or an adapter that names its base."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from transformers.utils import find_adapter_config_file

from ..config import HACPOConfig

_SHOWN = 6  # so many folders are listed in an error


class Origin(NamedTuple):
    """Where the files of an agent's model are.

    Attributes:
        base: id or folder of the whole model: the agent's own, or the one that its adapter belongs to.
        arguments: for `from_pretrained` of the base.
        adapter: the settings of the adapter (`peft.PeftConfig`) when the agent's path is that of an adapter.
    """

    base: str
    arguments: dict[str, Any]
    adapter: Any = None


def find_origin(path: str | os.PathLike, args: HACPOConfig) -> Origin:
    """Reads whether a path is that of a whole model or of an adapter, as `save_model` writes it of a LoRA agent.

    Args:
        path: Hub id or folder.
        args: the agent's settings.

    Raises:
        ValueError: for an adapter that does not name its base.
        ImportError: for an adapter, when PEFT is not installed.
    """
    path = os.fspath(path)
    kwargs = args.model_init_kwargs or {}
    arguments = {
        "revision": kwargs.get("revision"),
        "trust_remote_code": kwargs.get("trust_remote_code", args.trust_remote_code),
    }
    try:
        found = find_adapter_config_file(path, revision=arguments["revision"])
    except OSError:  # neither a folder nor an id; `check_models` tells
        found = None
    if found is None:
        return Origin(path, arguments)
    try:
        from peft import PeftConfig
    except ImportError:
        raise ImportError(f"{path!r} is an adapter, which needs PEFT: pip install peft") from None
    adapter = PeftConfig.from_pretrained(path, revision=arguments["revision"])
    if not adapter.base_model_name_or_path:
        raise ValueError(
            f"{path!r} is an adapter whose adapter_config.json names no base. Write the base's id or folder into its "
            "base_model_name_or_path."
        )
    return Origin(adapter.base_model_name_or_path, {**arguments, "revision": adapter.revision}, adapter)


def missing_folder(path: str) -> str | None:
    """Why a path is no folder of a model; None for a folder that is there, and for what may be an id on the Hub.

    "out/a" could be either. Where a folder "out" is, and no such model in the cache of the Hub, it is the folder.
    """
    if os.path.isfile(path):
        return "is a file; give the folder that holds it"
    if os.path.exists(path):
        if os.path.isdir(path) and not any(_holds_model(path)):
            below = sorted(
                entry.name for entry in os.scandir(path) if entry.is_dir() and any(_holds_model(entry.path))
            )
            if below:
                return f"no model itself, but it holds {_listed([os.path.join(path, name) for name in below])}"
        return None
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        return "there is no such folder"
    parent = os.path.dirname(path)
    if not parent or not os.path.isdir(parent) or isinstance(try_to_load_from_cache(path, "config.json"), str):
        return None
    below = sorted(entry.name for entry in os.scandir(parent) if entry.is_dir() and not entry.name.startswith("."))
    return (
        f"there is no such folder; {parent!r} holds {_listed(below) or 'no folders'}. If it is a model on the Hub, "
        f"run `hf download {path}` first"
    )


def _holds_model(folder: str) -> Iterator[bool]:
    yield from (os.path.isfile(os.path.join(folder, name)) for name in ("config.json", "adapter_config.json"))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
