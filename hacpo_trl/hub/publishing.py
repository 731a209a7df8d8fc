"""Agents on the Hub: which repository is whose, what goes there, and what is said when it does not work."""

import contextlib
import fnmatch
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.utils import validate_repo_id
from trl.trainer.utils import get_config_model_id

from .._version import __version__
from ..config import HACPOConfig
from .origin import find_origin

_ADAPTER_CONFIG = "adapter_config.json"
_STAGING = ".pushing"

# Files beside a model that stay at home: they continue a run ("ref" is an adapter's KL reference), and the pickled
# settings hold local paths and the token
_HOME = """training_args.bin optimizer.* scheduler.pt scaler.pt rng_state*.pth trainer_state.json hacpo_state.json
latest zero_to_fp32.py global_step* checkpoint-* completions runs ref _* .*""".split()

# A folder of huggingface_hub's cache tells which repository and commit it holds
_CACHED = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})")


@dataclass(frozen=True)
class Base:
    """The model that an agent started from.

    Attributes:
        title: what to call it: its Hub id, or the last part of its folder; "" for a model object without either.
        hub_id: its id on the Hub, None where it is not known.
        revision: the commit, tag or branch that was asked for, None for the newest.
    """

    title: str
    hub_id: str | None
    revision: str | None


def find_base(model: Any, args: HACPOConfig) -> Base:
    """Where a model comes from, without local paths.

    Args:
        model: a Hub id, a folder, or a model object.
        args: the agent's settings.
    """
    if _is_path(model):
        origin = find_origin(model, args)
        path, revision = origin.base, origin.arguments["revision"]
    else:
        path, revision = str(get_config_model_id(model.config) or ""), (args.model_init_kwargs or {}).get("revision")
    cached = _CACHED.search(path)
    if args.hub_base_model_id is not None:
        return Base(args.hub_base_model_id, args.hub_base_model_id, None)
    if cached:
        hub_id = cached.group(1).replace("--", "/")
        return Base(hub_id, hub_id, cached.group(2))
    if path and not os.path.exists(path) and _why_no_id(path) is None:
        return Base(path, path, revision)
    return Base(os.path.basename(os.path.abspath(path)) if path else "", None, None)


def _is_path(model: Any) -> bool:
    return isinstance(model, (str, os.PathLike))


def _why_no_id(repo_id: Any) -> str | None:
    """Why a text cannot be a repository's id, None where it can."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        return str(error).removesuffix(".")
    return None


def _sanitized(text: str) -> str:
    return re.sub(r"([.-])[.-]+", r"\1", re.sub(r"[^A-Za-z0-9._-]+", "-", text)).strip(".-") or "hacpo"


# -- before a model is loaded -------------------------------------------------------------------------------------


def check_sharing(
    models: Sequence[Any],
    names: Sequence[str],
    args: HACPOConfig,
    configs: Sequence[HACPOConfig],
    adapters: Sequence[Any],
) -> list[str]:
    """Finds out what could not be pushed.

    Args:
        models: one per agent.
        names: of the agents.
        args: settings of the team.
        configs: settings per agent.
        adapters: adapter configuration or None per agent.

    Returns:
        The id of every agent's repository; one without a namespace belongs to whom the token belongs to.

    Raises:
        ValueError: for ids that cannot be or that two agents have, and with `push_to_hub=True` for what the Hub could
            not hold: a team's checkpoint, and adapters on a base that nobody else can load.
    """
    repositories = []
    for name, config in zip(names, configs, strict=True):
        repository = config.hub_model_id or _sanitized(f"{Path(args.output_dir).absolute().name}-{name}")
        if args.push_to_hub or config.hub_model_id is not None:
            _check_id(repository, name)
        repositories.append(repository)
        why = None if config.hub_base_model_id is None else _why_no_id(config.hub_base_model_id)
        if why is not None:
            raise ValueError(
                f"agent {name!r}: hub_base_model_id={config.hub_base_model_id!r} is no id on the Hub: {why}. It names "
                "the model that the agent started from, such as 'Qwen/Qwen3-1.7B-Base'."
            )
    _check_bases_differ(models, names, args)
    if args.push_to_hub or any(config.hub_model_id is not None for config in configs):
        _check_distinct(repositories, names)
    if args.push_to_hub:
        for name, config in zip(names, configs, strict=True):
            if config.hub_strategy in ("checkpoint", "all_checkpoints"):
                raise ValueError(
                    f"agent {name!r}: hub_strategy={config.hub_strategy.value!r} would push its optimizer to its own "
                    "repository, but a run continues from the checkpoint of the whole team. Use "
                    "hub_strategy='every_save', which pushes every agent's model at every save, and keep the "
                    "checkpoint-<step> folders."
                )
        check_bases(
            names,
            [find_base(model, config) for model, config in zip(models, configs, strict=True)],
            [
                adapter is not None
                or (find_origin(model, config).adapter is not None if _is_path(model) else is_peft_model(model))
                for model, adapter, config in zip(models, adapters, configs, strict=True)
            ],
        )
    return repositories


def _check_id(repository: Any, name: str) -> None:
    why = _why_no_id(repository)
    if why is not None:
        near = "/".join(_sanitized(part) for part in str(repository).split("/")[:2])[:96].strip(".-")
        raise ValueError(
            f"agent {name!r} cannot have the repository {repository!r}: {why}. Set its hub_model_id in "
            f'agent_overrides, e.g. {{"{name}": {{"hub_model_id": "{near}"}}}}.'
        )


def _check_distinct(repositories: Sequence[str], names: Sequence[str]) -> None:
    taken: dict[str, str] = {}
    for repository, name in zip(repositories, names, strict=True):
        other = taken.setdefault(repository.lower(), name)  # the Hub's names ignore case
        if other != name:
            raise ValueError(
                f"agents {other!r} and {name!r} would both be pushed to {repository!r}, and the last would remain. "
                "Give each a hub_model_id of its own in agent_overrides, or one to the team: then they are called "
                "<hub_model_id>-<agent>."
            )


def _check_bases_differ(models: Sequence[Any], names: Sequence[str], args: HACPOConfig) -> None:
    """Refuses one base for all where the agents started from several models."""
    overrides = args.agent_overrides or {}
    common = [i for i, name in enumerate(names) if "hub_base_model_id" not in overrides.get(name, {})]
    paths = {os.fspath(models[i]) for i in common if _is_path(models[i])}
    if args.hub_base_model_id is not None and len(paths) > 1:
        raise ValueError(
            f"hub_base_model_id={args.hub_base_model_id!r} cannot be the base of {len(paths)} different models. Set "
            f"it for single agents: agent_overrides={{{names[common[0]]!r}: {{'hub_base_model_id': ...}}, ...}}."
        )


def check_bases(names: Sequence[str], bases: Sequence[Base], are_adapters: Sequence[bool]) -> None:
    """Refuses adapters that would name a base that only this computer has.

    Args:
        names: of the agents.
        bases: what they started from.
        are_adapters: whether an agent is pushed as an adapter.

    Raises:
        ValueError: naming the agent and the ways out.
    """
    for name, base, is_adapter in zip(names, bases, are_adapters, strict=True):
        if is_adapter and base.hub_id is None:
            what = f"the local folder {base.title!r}" if base.title else "a model object that comes from no path"
            raise ValueError(
                f"agent {name!r} is an adapter on {what}, which nobody else can load. If that is a model on the Hub, "
                f'say which: agent_overrides={{"{name}": {{"hub_base_model_id": "..."}}}}. If it is one of your own, '
                "push it first, or save the agent and share it whole: hacpo_trl.merge_adapter(folder, output_dir), "
                "then huggingface_hub.upload_folder."
            )


# -- pushing ------------------------------------------------------------------------------------------------------


class Publisher:
    """The team's connection to the Hub. Only the main process calls it.

    Args:
        run_dir: the run's folder; files that are under way are kept in it.
        names: of the agents.
        repositories: ids of their repositories, as `check_sharing` returns them.
        configs: settings per agent.
    """

    def __init__(
        self, run_dir: str, names: Sequence[str], repositories: Sequence[str], configs: Sequence[HACPOConfig]
    ):
        self.run_dir = run_dir
        self.api = HfApi(library_name="hacpo_trl", library_version=__version__)
        self.wanted = dict(zip(names, repositories, strict=True))
        self.configs = dict(zip(names, configs, strict=True))
        self.opened: dict[str, str] = {}  # agent -> whole id
        self._running: list[tuple[str, Future]] = []

    def open(self, name: str, token: str | None = None, private: bool | None = None) -> str:
        """Makes sure that an agent's repository is there.

        Args:
            name: the agent's.
            token: by default the agent's `hub_token`, or the one that `hf auth login` saved.
            private: whether a new repository is; by default the agent's `hub_private_repo`.

        Returns:
            The whole id of the repository.

        Raises:
            ConnectionError: naming agent and repository when the Hub refuses.
            ValueError: when its id cannot be, or turns out to be another agent's.
        """
        if name in self.opened:
            return self.opened[name]
        config = self.configs[name]
        _check_id(self.wanted[name], name)
        try:
            url = self.api.create_repo(
                self.wanted[name],
                token=config.hub_token if token is None else token,
                private=config.hub_private_repo if private is None else private,
                exist_ok=True,
            )
        except Exception as error:  # whatever it is, it is this repository's problem and is told as such
            opened = _listed(self.opened) if self.opened else "none"
            raise ConnectionError(
                f"agent {name!r}: its repository {self.wanted[name]!r} could not be opened: {_reason(error)} "
                f"Opened before: {opened}. Nothing was pushed."
            ) from error
        _check_distinct([*self.opened.values(), url.repo_id], [*self.opened, name])
        self.opened[name] = url.repo_id
        return url.repo_id

    def push(
        self,
        bases: Mapping[str, Base],
        output_dir: str,
        *,
        commit_message: str | None,
        token: str | None = None,
        revision: str | None = None,
        blocking: bool = True,
        background: bool = False,
    ) -> list[CommitInfo] | list[Future]:
        """Uploads agents that were saved, one after the other.

        Args:
            bases: what they started from, by name; their repositories are open.
            output_dir: holds a folder for each of them.
            commit_message: of every commit.
            token: by default each agent's `hub_token`.
            revision: the branch, made where it is missing; by default each agent's `hub_revision`.
            blocking: whether to wait. Without, the folders may go away: what is uploaded is kept until then.
            background: one of the pushes during training, which leave out an agent whose last one is under way still
                (unless its `hub_always_push` is set).

        Returns:
            The commits, or, without waiting, futures of them.

        Raises:
            ConnectionError: naming agent and repository, and what was pushed before; also as a future's exception.
        """
        self.reap(wait=not background)
        if not self._running:  # what an interrupted process may have left
            shutil.rmtree(os.path.join(self.run_dir, _STAGING), ignore_errors=True)
        results: list[Any] = []
        done: list[str] = []
        for name, base in bases.items():
            config = self.configs[name]
            under_way = any(other == name for other, _ in self._running)
            if background and under_way and not config.hub_always_push:
                continue
            job = {
                "name": name,
                "staged": _stage(os.path.join(output_dir, name), self.run_dir, base),
                "commit_message": commit_message,
                "token": config.hub_token if token is None else token,
                "revision": config.hub_revision if revision is None else revision,
                "done": done,
                "names": list(bases),
                "home": output_dir,
            }
            if blocking:
                results.append(self._upload(**job))
            else:
                results.append(self.api.run_as_future(self._upload, **job))
                self._running.append((name, results[-1]))
        return results

    def reap(self, wait: bool = False) -> None:
        """Warns of pushes in the background that failed.

        Args:
            wait: until all are over.
        """
        over = [entry for entry in self._running if wait or entry[1].done()]
        self._running = [entry for entry in self._running if entry not in over]
        for _, push in over:
            error = push.exception()
            if error is not None:
                warnings.warn(str(error), stacklevel=3)

    def _upload(
        self,
        name: str,
        staged: str,
        commit_message: str | None,
        token: str | None,
        revision: str | None,
        done: list[str],
        names: Sequence[str],
        home: str,
    ) -> CommitInfo:
        repository = self.opened[name]
        try:
            if revision is not None and revision != "main" and not revision.startswith("refs/"):
                self.api.create_branch(repository, branch=revision, token=token, exist_ok=True)
            commit = self.api.upload_folder(
                repo_id=repository,
                folder_path=staged,
                commit_message=commit_message,
                token=token,
                revision=revision,
            )
        except Exception as error:  # of many kinds; what they have in common is that this push failed
            before = {other: self.opened[other] for other in done}
            missing = [other for other in names if other not in done]
            raise ConnectionError(
                f"agent {name!r}: the push to {repository!r} failed: {_reason(error)} Pushed before: "
                f"{_listed(before) if before else 'none'}; not pushed: {', '.join(missing)}. All of them are saved in "
                f"{home!r}, and trainer.push_to_hub() sends what is missing."
            ) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            with contextlib.suppress(OSError):  # another agent's files are there still
                os.rmdir(os.path.dirname(staged))
        done.append(name)
        return commit


def _listed(repositories: dict[str, str]) -> str:
    return ", ".join(f"{name} ({repository})" for name, repository in repositories.items())


def _reason(error: BaseException) -> str:
    """One sentence or two of what went wrong, with what to do about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    status, cause = None, error
    while status is None and cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        cause = cause.__cause__
    hints = {
        401: "No valid token was sent: log in with `hf auth login`, or set hub_token.",
        403: "The token may not write there: use one with write access, or a hub_model_id in your own namespace.",
    }
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    if status is not None and str(status) not in reason:
        reason = f"{status}: {reason}"
    return f"{reason}. {hints[status]}" if status in hints else f"{reason}."


def _stage(folder: str, run_dir: str, base: Base) -> str:
    """A folder of what is uploaded. It lasts when the saved one is replaced, and costs no space where links work.

    Args:
        folder: where the agent was saved.
        run_dir: on the same disk.
        base: what the agent started from.
    """
    root = os.path.join(run_dir, _STAGING)
    os.makedirs(root, exist_ok=True)
    staged = tempfile.mkdtemp(prefix=f"{os.path.basename(folder)}-", dir=root)
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _stays_home(name)]
        target = os.path.join(staged, os.path.relpath(parent, folder))
        os.makedirs(target, exist_ok=True)
        for name in files:
            if _stays_home(name):
                continue
            source, copy = os.path.join(parent, name), os.path.join(target, name)
            if name == _ADAPTER_CONFIG:
                _write_adapter_config(source, copy, base)
                continue
            try:
                os.link(source, copy)  # files of a saved folder are never written to again
            except OSError:
                shutil.copy2(source, copy)
    return staged


def _stays_home(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in _HOME)


def _write_adapter_config(source: str, target: str, base: Base) -> None:
    """The adapter's settings with the id of its base; at home they name the folder that it was loaded from."""
    with open(source, encoding="utf-8") as file:
        settings = json.load(file)
    settings["base_model_name_or_path"] = base.hub_id
    settings["revision"] = settings.get("revision") or base.revision
    with open(target, "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2, sort_keys=True)
