"""Every prompt of a data set through every agent's template and tokens, before anything is trained or evaluated."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from datasets import IterableDataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from trl.data_utils import is_conversational

_BATCH = 1000
_SHOW_BAR = 20_000  # prompts, from which on a bar shows how far the check is


class Reader(NamedTuple):
    """Who reads the prompts.

    Attributes:
        name: of the agent.
        tokenizer: its own.
        template_kwargs: arguments of its chat template.
        positions: the longest text that its model reads, in tokens; None where it has no limit.
        response: tokens that a response needs room for; None where it ends with the positions.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    positions: int | None = None
    response: int | None = None


class PromptChecker:
    """Tells which prompts of a data set the agents can take.

    Args:
        what: "train_dataset", "eval_dataset" or the name of a benchmark, for messages.
        readers: the agents.
        limit: `max_prompt_length`.
    """

    def __init__(self, what: str, readers: Sequence[Reader], limit: int | None = None):
        self.what, self.readers, self.limit = what, list(readers), limit
        self.chat: bool | None = None  # the first prompt tells

    def fitting(self, prompts: Sequence[Any], first: int) -> list[bool]:
        """Which prompts are not longer than `max_prompt_length`.

        Args:
            prompts: rows of the column "prompt".
            first: the number of the first of them.

        Raises:
            ValueError: naming the row, and the agent, of a prompt that is none, that is of another kind than the
                others, that a template cannot render, or that leaves a model no room for a response.
        """
        for number, prompt in enumerate(prompts, first):
            chat = self._kind(prompt, number)
            self.chat = chat if self.chat is None else self.chat
            if chat != self.chat:
                raise ValueError(
                    f"{self.what} mixes texts and chats: prompt 0 and prompt {number} differ. Use one kind."
                )
        fits = [True] * len(prompts)
        for reader in self.readers:
            for i, length in enumerate(self._lengths(reader, prompts, first)):
                if self.limit is not None and length > self.limit:
                    fits[i] = False
                elif reader.positions is not None and length + (reader.response or 1) > reader.positions:
                    self._refuse(reader, first + i, length)
        return fits

    def _kind(self, prompt: Any, number: int) -> bool:
        """Whether a prompt is a chat."""
        # Of the prompt alone: TRL's test picks any of several columns, in an order that differs between processes
        if isinstance(prompt, list) and prompt and is_conversational({"prompt": prompt}):
            return True
        if not isinstance(prompt, str) or not prompt:
            kind = "is empty" if prompt in ("", []) else f"is {prompt!r:.80}, of type {type(prompt).__name__}"
            raise ValueError(
                f'{self.what}: prompt {number} {kind}; use a text, or a chat [{{"role": "user", "content": "..."}}].'
            )
        return False

    def _lengths(self, reader: Reader, prompts: Sequence[Any], first: int) -> list[int]:
        name, tokenizer, kwargs = reader[:3]
        if not self.chat:
            return [len(ids) for ids in tokenizer(list(prompts))["input_ids"]]
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The prompts are chats, but the tokenizer of agent {name!r} has no chat template. Set "
                "tokenizer.chat_template, or use plain text prompts."
            )
        texts = []
        for number, prompt in enumerate(prompts, first):
            try:
                text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **kwargs)
            except Exception as error:  # templates raise errors of their own
                raise ValueError(
                    f"The chat template of agent {name!r} cannot render prompt {number} of {self.what}: {error}. Some "
                    "templates know no system message; put its text into the user's."
                ) from error
            texts.append(text)
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def _refuse(self, reader: Reader, number: int, length: int) -> None:
        name, positions, response = reader.name, reader.positions, reader.response
        if response is None:
            raise ValueError(
                f"agent {name!r}: prompt {number} of {self.what} has {length} tokens, but its model reads {positions} "
                "in all, the response included. Use shorter prompts."
            )
        remedies = [f"max_completion_length={positions - length}"] * (positions > length)
        if positions > response:
            remedies.append(f"max_prompt_length={positions - response}, which leaves out longer prompts")
        raise ValueError(
            f"agent {name!r}: prompt {number} of {self.what} has {length} tokens, and with max_completion_length="
            f"{response} that is more than the {positions} that its model reads. Use "
            f"{', or '.join(remedies) or 'shorter prompts'}."
        )


def check_prompts(dataset: Any, checker: PromptChecker) -> Any:
    """Checks every prompt, and leaves out those longer than `max_prompt_length`.

    A data set is checked at once, a stream while it is read.

    Args:
        dataset: a Dataset, or an IterableDataset.
        checker: see `PromptChecker`.

    Returns:
        The data set that is left.

    Raises:
        ValueError: see `PromptChecker.fitting`.
    """
    if isinstance(dataset, IterableDataset):
        return dataset.filter(_row_filter(checker), with_indices=True)
    kept: list[int] = []
    bar = tqdm(total=len(dataset), desc="checking prompts", unit="prompt", disable=len(dataset) < _SHOW_BAR)
    with bar:
        for start in range(0, len(dataset), _BATCH):
            prompts = dataset[start : start + _BATCH]["prompt"]
            kept += [start + i for i, fits in enumerate(checker.fitting(prompts, start)) if fits]
            bar.update(len(prompts))
    if len(kept) == len(dataset):
        return dataset
    rows = sorted(set(range(len(dataset))) - set(kept))
    first = ", ".join(map(str, rows[:5])) + ", ..." * (len(rows) > 5)
    warnings.warn(
        f"{checker.what}: {len(rows)} of {len(dataset)} prompts have more tokens than max_prompt_length="
        f"{checker.limit} for at least one agent and are left out: {first}.",
        stacklevel=5,
    )
    return dataset.select(kept)


def _row_filter(checker: PromptChecker) -> Callable[[dict[str, Any], int], bool]:
    def fits(row: dict[str, Any], number: int) -> bool:
        return checker.fitting([row["prompt"]], number)[0]

    return fits
