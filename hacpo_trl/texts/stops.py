"""Stop texts: a response ends with the token that completes one of them.

The rule is the same for transformers' generate, for vLLM and in evaluations. Everything that was sampled up to that
token belongs to the response: its log-probability tells how likely the agent is to stop there, and no end token is
needed. Reward functions read the text before the stop text, peers the text with it.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from .responses import decode_behind

_LAST_TOKENS: WeakKeyDictionary = WeakKeyDictionary()  # by tokenizer, see `_last_tokens`


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((place for place in map(text.find, stops) if place >= 0), default=len(text))]


def cut_at_stop(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    ids: Sequence[Sequence[int]],
    stops: Sequence[str],
) -> list[int | None]:
    """How many tokens of each response there are up to the one that completes a stop text.

    Args:
        tokenizer: of the agent whose tokens they are.
        prompts: R lists of ids.
        ids: R lists of ids behind them.
        stops: the stop texts, none of them empty.

    Returns:
        R numbers; None for a response without a stop text.
    """

    if not stops:
        return [None] * len(ids)

    def stopped(row: int, length: int) -> bool:
        return _holds(decode_behind(tokenizer, [prompts[row]], [ids[row][:length]])[0], stops)

    lengths: list[int | None] = [None] * len(ids)
    for row, text in enumerate(decode_behind(tokenizer, prompts, ids)):
        if not _holds(text, stops):
            continue
        long, step = len(ids[row]), 1  # `long` tokens hold a stop text; it is near their end, as a rule
        while long > step and stopped(row, long - step):
            long, step = long - step, 2 * step
        short = max(long - step, 0)  # and `short` tokens do not
        while long - short > 1:
            middle = (long + short) // 2
            long, short = (middle, short) if stopped(row, middle) else (long, middle)
        # Bytes of a character that follows can hide the stop text for up to three tokens
        while earlier := [n for n in range(max(long - 4, 1), long) if stopped(row, n)]:
            long = earlier[0]
        lengths[row] = long
    return lengths


def _holds(text: str | None, stops: Sequence[str]) -> bool:
    return text is not None and any(stop in text for stop in stops)


class StopAtTexts(StoppingCriteria):
    """Ends a row of `generate` once one of some texts stands in its response.

    Args:
        tokenizer: the model's.
        stops: the texts, none of them empty.
        start: the length of the padded prompts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], start: int) -> None:
        self.tokenizer, self.stops, self.start = tokenizer, list(stops), start
        self.window = max(len(text.encode()) for text in stops) + 4  # a token has at least one byte
        self.last = _last_tokens(tokenizer, frozenset(text[-1] for text in stops))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        """(R,) flags, True for rows that are done."""
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        rows = torch.isin(input_ids[:, -1], self.last.to(input_ids.device)).nonzero()[:, 0]
        if len(rows):
            ids = input_ids[rows].tolist()
            texts = self._behind(ids, max(self.start, input_ids.shape[1] - self.window))
            if None in texts:  # the window began inside a character
                texts = self._behind(ids, self.start)
            done[rows] = torch.tensor([_holds(text, self.stops) for text in texts], device=done.device)
        return done

    def _behind(self, ids: list[list[int]], split: int) -> list[str | None]:
        return decode_behind(self.tokenizer, [row[:split] for row in ids], [row[split:] for row in ids])


def _last_tokens(tokenizer: PreTrainedTokenizerBase, characters: frozenset[str]) -> torch.Tensor:
    """Tokens that can complete a text that ends in one of these characters: most steps need no decoding then."""
    known = _LAST_TOKENS.setdefault(tokenizer, {})
    if characters not in known:
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], clean_up_tokenization_spaces=False)
        # Part of a character decodes to the replacement character; a space in front of a token vanishes where the
        # token stands alone
        known[characters] = torch.tensor(
            [i for i, p in enumerate(pieces) if not p or "\ufffd" in p or not characters.isdisjoint(p + " ")]
        )
    return known[characters]
