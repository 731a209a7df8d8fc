"""The form of an agent's prompts: how a problem becomes a prompt, and which texts end a response.

A team is trained in one form. It is saved with every agent as `hacpo_prompt.json`, and `hacpo evaluate` asks in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

PROMPT_FILE = "hacpo_prompt.json"
"""Stands in the folder of every saved agent."""

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

AS_IT_IS = "{problem}"
"""The template of prompts that need nothing around them: whole prompts, or chats that the data set holds."""

_FORMATS = ("chat", "plain")
_VERSION = 1
_HOLE = "{problem}"


@dataclass(frozen=True)
class PromptForm:
    r"""How problems become prompts.

    Attributes:
        prompt_format: "chat" or "plain" (a text that the model continues).
        prompt_template: the content of the user's message, or the plain prompt; the problem takes the place of
            "{problem}". With `AS_IT_IS`, a problem is the whole prompt, and may be a list of messages.
        system_prompt: first message of a chat, or first line of a plain prompt.
        stop: texts that end a response and do not belong to it.
        chat_template_kwargs: arguments of the chat template.

    Raises:
        ValueError: for an unknown format, or a template without "{problem}".
    """

    prompt_format: str
    prompt_template: str = AS_IT_IS
    system_prompt: str | None = None
    stop: Sequence[str] = ()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_format not in _FORMATS:
            raise ValueError(f"prompt_format={self.prompt_format!r} is unknown; use 'chat' or 'plain'.")
        if not isinstance(self.prompt_template, str) or _HOLE not in self.prompt_template:
            raise ValueError(
                f"prompt_template={self.prompt_template!r} has no {_HOLE}, so every prompt would be the same. Write "
                f"{_HOLE} where the problem goes, such as 'Problem: {_HOLE}\\nAnswer:'."
            )
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={self.stop!r} must be a list of texts that are not empty.")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "system_prompt", self.system_prompt or None)

    @property
    def as_it_is(self) -> bool:
        """Whether a problem is the whole prompt."""
        return self.prompt_template == AS_IT_IS and not self.system_prompt

    def render(self, problem: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The prompt of a problem.

        Args:
            problem: its text, or a chat (only where prompts are chats and nothing is put around them).

        Returns:
            A text, or for "chat" a list of messages.

        Raises:
            ValueError: for a chat where this form wants a text.
        """
        if not isinstance(problem, str):
            if self.prompt_format != "chat" or not self.as_it_is:
                raise ValueError(
                    "A problem is a list of messages, but the prompts are "
                    + ("plain text." if self.prompt_format == "plain" else "made by a template or a system prompt.")
                    + f" Chats are prompts as they are: use prompt_format='chat' with prompt_template='{AS_IT_IS}'."
                )
            return problem
        text = problem if self.as_it_is else self.prompt_template.replace(_HOLE, problem.strip())
        if self.prompt_format == "plain":
            return f"{self.system_prompt}\n{text}" if self.system_prompt else text
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": text}]

    def for_agent(self, chat_template_kwargs: dict[str, Any] | None) -> PromptForm:
        """The form with an agent's own arguments of its chat template."""
        kwargs = dict(chat_template_kwargs or {}) if self.prompt_format == "chat" else {}
        return replace(self, chat_template_kwargs=kwargs)

    def settings(self) -> dict[str, Any]:
        """The form as arguments of `evaluate_model`."""
        return {**asdict(self), "stop": list(self.stop)}

    def save(self, folder: str) -> None:
        """Writes `PROMPT_FILE` into an agent's folder."""
        with open(os.path.join(folder, PROMPT_FILE), "w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, **self.settings()}, file, indent=2, ensure_ascii=False)
            file.write("\n")

    def __str__(self) -> str:
        parts = [self.prompt_format, "problems as they are" if self.as_it_is else f"template {self.prompt_template!r}"]
        parts += [f"system prompt {self.system_prompt!r}"] if self.system_prompt else []
        parts += [f"a response ends at {' or '.join(map(repr, self.stop))}"] if self.stop else []
        parts += [f"{key}={value!r}" for key, value in self.chat_template_kwargs.items()]
        return ", ".join(parts)


def make_form(
    prompt_format: str,
    *,
    prompt_template: str | None = None,
    instruction: str = INSTRUCTION,
    system_prompt: str | None = None,
    stop: Sequence[str] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> PromptForm:
    """A form with defaults for what is left open.

    Args:
        prompt_format: "chat" or "plain".
        prompt_template: see `PromptForm`; by default the problem and behind it the instruction, in plain prompts
            between "Problem:" and "Solution:".
        instruction: of the default template.
        system_prompt: see `PromptForm`.
        stop: see `PromptForm`; by default those of `stops_of` for plain prompts, and none for chats.
        chat_template_kwargs: see `PromptForm`; they are not used for plain prompts.

    Raises:
        ValueError: see `PromptForm`.
    """
    if prompt_template is None:
        if prompt_format == "chat":
            prompt_template = f"{_HOLE}\n\n{instruction}" if instruction else _HOLE
        else:
            prompt_template = "\n".join(part for part in (f"Problem: {_HOLE}", instruction, "Solution:") if part)
    if stop is None:
        stop = stops_of(prompt_template) if prompt_format == "plain" else ()
    kwargs = dict(chat_template_kwargs or {}) if prompt_format == "chat" else {}
    return PromptForm(prompt_format, prompt_template, system_prompt, stop, kwargs)


def stops_of(template: str) -> tuple[str, ...]:
    r"""Where responses to plain prompts of a template end: models go on with a problem of their own, whose answer
    would be judged in place of the first one's.

    Args:
        template: with "{problem}".

    Returns:
        A new line and what stands before the problem on its line, such as "\nProblem:"; nothing where the line begins
        with the problem.
    """
    label = template[: template.find(_HOLE)].rpartition("\n")[2].strip()
    return (f"\n{label}",) if label else ()


def form_of_settings(settings: dict[str, Any]) -> PromptForm:
    """The form in the settings of an evaluation, which hold other things, too."""
    return PromptForm(**{name: settings[name] for name in (f.name for f in fields(PromptForm))})


def read_form(source: str) -> PromptForm | None:
    """The form that a saved agent was trained in.

    Args:
        source: its folder, or its repository on the Hub.

    Returns:
        None for a model that was not saved by this package.

    Raises:
        ValueError: for a file that cannot be read, or that a later version wrote.
    """
    path = os.path.join(source, PROMPT_FILE)
    if not os.path.isdir(source):
        try:
            path = hf_hub_download(source, PROMPT_FILE)
        except (EntryNotFoundError, HfHubHTTPError, HFValidationError):  # loading the model tells what is wrong
            return None
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        version = content.pop("version")
        if version != _VERSION:
            raise ValueError(f"{path}: version {version} of the file, this package reads version {_VERSION}.")
        return PromptForm(**content)
    except (OSError, TypeError, KeyError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} does not describe prompts ({type(error).__name__}: {error}). Delete it and give --prompt_format "
            "and --prompt_template."
        ) from None


def with_newlines(text: str) -> str:
    r"""Turns "\n" in a text of the command line into a new line; "\\n" stays a backslash and an n."""
    return r"\n".join(part.replace(r"\n", "\n") for part in text.split(r"\\n"))
