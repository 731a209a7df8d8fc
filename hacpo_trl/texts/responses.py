"""Responses as text: what an agent wrote behind its prompt, and how another agent reads it behind its own.

Text is exchanged, never token ids, so that any tokenizers go together. Some tokenizers put a space before every text
that they encode and take it away when they decode (Llama 2, Mistral, T5), others do not (byte-level BPE). So a text is
always decoded behind the prompt, encoded for a place behind the prompt, and checked there: for source and learner

    decode(prompt + response) = decode(prompt) + lead + text

The *lead* is what the tokenizer, or a chat template, itself puts between this prompt and a text that follows: nothing,
or white space, such as the space behind a special token. The text is the same for all agents, the lead is each one's.
A learner's own responses keep their exact ids. R is the number of responses of one agent on this process.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of bytes that are not UTF-8
_CONTEXT = 32  # last tokens of a prompt, which decide how the text behind it is decoded
_MARK = "1"  # a text that any vocabulary holds
_ANCHORS = ("\n", ":", "0", "a")  # what a response is encoded behind where it does not fit alone; letters last


@dataclass
class ResponseTexts:
    """An agent's responses as its peers read them.

    Attributes:
        texts: R texts, see `response_texts`, with the stop text that ended the response.
        leads: R, what stands between the agent's own prompts and its or any peer's text, see `find_leads`.
        ended: R flags, True when an end token ended the response.
    """

    texts: list[str | None]
    leads: list[str]
    ended: list[bool]


@dataclass
class EncodedResponses:
    """Peers' texts in a learner's tokens.

    Attributes:
        ids: R lists of ids, cut to the learner's limit.
        lengths: R token counts before the cut.
        unreadable: R flags, True for a text that the learner's tokens cannot hold.
    """

    ids: list[list[int]]
    lengths: list[int]
    unreadable: list[bool]

    @property
    def overflowing(self) -> list[bool]:
        """R flags, True for a response longer than the learner's limit."""
        return [length > len(ids) for length, ids in zip(self.lengths, self.ids, strict=True)]


def decode_behind(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]
) -> list[str | None]:
    """What the tokens of responses add to the text of their prompts, without special tokens.

    Args:
        tokenizer: of the agent whose tokens they are.
        prompts: R lists of ids; an empty one stands for the beginning of a text.
        ids: R lists of ids behind them.

    Returns:
        R texts; None where the response changes how its prompt is decoded, as broken UTF-8 can do.
    """
    contexts = [_context(tokenizer, prompt) for prompt in prompts]
    whole = [[*context, *tokens] for (context, _), tokens in zip(contexts, ids, strict=True)]
    return [
        text[len(before) :] if text.startswith(before) else None
        for text, (_, before) in zip(_decode(tokenizer, whole), contexts, strict=True)
    ]


def _context(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> tuple[list[int], str]:
    """The end of a prompt and its text; the whole prompt where its end is blank or begins inside a character."""
    for ids in (list(prompt[-_CONTEXT:]), list(prompt)):
        text = _decode(tokenizer, [ids])[0] if ids else ""
        if text.strip() and _REPLACEMENT not in text:
            break
    return ids, text


def _decode(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_leads(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    prompt_ids: Sequence[Sequence[int]],
    template_kwargs: dict[str, Any],
) -> list[str]:
    """The white space that stands between each prompt and a text behind it, without anybody having written it.

    It is found by a short text: as the prompt's continuation, or in a chat as the assistant's message. A template may
    put a space or a line break before the message that its generation prompt does not have (Llama 2's), and a
    tokenizer a space behind a special token.

    Args:
        tokenizer: the agent's.
        prompts: texts, or chats; the first chat speaks for all of them.
        prompt_ids: the prompts in the agent's tokens.
        template_kwargs: further arguments of the chat template.
    """
    if not isinstance(prompts[0], str):
        return [_chat_lead(tokenizer, prompts[0], prompt_ids[0], template_kwargs)] * len(prompts)
    found: dict[str, str] = dict.fromkeys(prompts, "")
    known = dict(zip(prompts, prompt_ids, strict=True))
    continued = tokenizer([prompt + _MARK for prompt in found])["input_ids"]
    for prompt, ids in zip(list(found), continued, strict=True):
        found[prompt] = _lead(tokenizer, known[prompt], ids) or ""
    return [found[prompt] for prompt in prompts]


def _chat_lead(tokenizer: PreTrainedTokenizerBase, prompt: list, ids: Sequence[int], kwargs: dict[str, Any]) -> str:
    answered = [*prompt, {"role": "assistant", "content": _MARK}]
    for chat, behind, generation in ((answered, "", False), (prompt, _MARK, True)):
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation, **kwargs)
        except Exception:  # the template's own: it may want no answer to this chat
            continue
        lead = _lead(tokenizer, ids, tokenizer(text + behind, add_special_tokens=False)["input_ids"])
        if lead is not None:
            return lead
    return ""


def _lead(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], ids: Sequence[int]) -> str | None:
    """White space between a prompt and the mark, None where the tokens do not show it."""
    length = len(prompt_ids)
    if list(ids[:length]) != list(prompt_ids):
        return None
    text = decode_behind(tokenizer, [prompt_ids], [ids[length:]])[0] or ""
    return _margin(text) if text.lstrip().startswith(_MARK) else None


def response_texts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    leads: Sequence[str],
    ids: Sequence[Sequence[int]],
) -> list[str | None]:
    """An agent's responses as text, for the graders and for its peers.

    Args:
        tokenizer: the agent's.
        prompts: R prompts in its tokens.
        leads: R, see `find_leads`.
        ids: R responses, without end tokens.

    Returns:
        R texts without special tokens; None for a response that has no text of its own, see `decode_behind`.
    """
    texts = decode_behind(tokenizer, prompts, ids)
    return [None if text is None else text.removeprefix(lead) for text, lead in zip(texts, leads, strict=True)]


def encode_responses(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    leads: Sequence[str],
    texts: Sequence[str | None],
    ended: Sequence[bool],
    end_id: int,
    max_length: int,
) -> EncodedResponses:
    """Reads other agents' responses in a learner's own tokens, behind its own prompts.

    The prompts' ids stay as they are: tokens that would reach over the border are not used. A response that ended by
    an end token ends on the learner's own end token, or the learner would never learn to stop. Text that looks like a
    special token is taken as plain text. A text is unreadable when it holds broken UTF-8, when the learner has no
    other way to write it than with a special token, or when the learner's tokens do not give it back (unknown or
    dropped characters; Unicode normalisation may differ, and white space where the tokenizer cannot hold it).

    Args:
        tokenizer: the learner's.
        prompts: R prompts in its tokens.
        leads: R, see `find_leads`.
        texts: R responses, see `response_texts`.
        ended: R flags, True where an end token ended the response.
        end_id: the learner's end token, see `end_of_response_id`.
        max_length: the learner's longest response, in tokens, at least 1.
    """
    if not texts:
        return EncodedResponses([], [], [])
    clean = [(text or "").encode("utf-8", "replace").decode() for text in texts]  # lone surrogates stop a tokenizer
    targets = [lead + text if text else "" for lead, text in zip(leads, clean, strict=True)]
    found = _try_behind(tokenizer, "", prompts, targets)
    for anchor in _ANCHORS:
        # The border shows in a text's first letters
        pending = [i for i, (_, fit) in enumerate(found) if fit == 1]
        heads = _try_behind(tokenizer, anchor, [prompts[i] for i in pending], [targets[i][:64] for i in pending])
        pending = [i for i, (_, fit) in zip(pending, heads, strict=True) if fit == 2]
        whole = _try_behind(tokenizer, anchor, [prompts[i] for i in pending], [targets[i] for i in pending])
        for i, attempt in zip(pending, whole, strict=True):
            found[i] = max(found[i], attempt, key=lambda one: one[1])
    special = {end_id, *tokenizer.all_special_ids}
    result = EncodedResponses([], [], [])
    for given, text, (ids, fit), end in zip(texts, clean, found, ended, strict=True):
        lost = fit == 0 or not special.isdisjoint(ids)
        result.unreadable.append(given != text or _REPLACEMENT in text or lost)
        ids = [*ids, end_id] if end else ids
        result.lengths.append(len(ids))
        result.ids.append(ids[:max_length])
    return result


def _try_behind(
    tokenizer: PreTrainedTokenizerBase, anchor: str, prompts: Sequence[Sequence[int]], targets: Sequence[str]
) -> list[tuple[list[int], int]]:
    """Ids of texts as they are encoded behind an anchor, each with how well it fits behind its prompt."""
    if not targets:
        return []
    texts = [anchor, *(anchor + target for target in targets)]
    head, *encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    head = head if anchor else []
    apart = [ids[: len(head)] == head for ids in encoded]  # else a token reaches over the border
    rows = [ids[len(head) :] if is_apart else [] for ids, is_apart in zip(encoded, apart, strict=True)]
    backs = decode_behind(tokenizer, prompts, rows)
    fits = [_fit(target, back) * is_apart for target, back, is_apart in zip(targets, backs, apart, strict=True)]
    return list(zip(rows, fits, strict=True))


def _fit(text: str, back: str | None) -> int:
    """2: the same text, or one that differs inside by what the tokenizer cannot hold; 1: other white space at the
    border; 0: another text."""
    if text == back:
        return 2
    if back is None or _letters(text) != _letters(back):
        return 0
    return 2 if _margin(text) == _margin(back) else 1


def _letters(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def _margin(text: str) -> str:
    """The white space in front."""
    return text[: len(text) - len(text.lstrip())]


def end_of_response_id(
    tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], *, conversational: bool, template_kwargs: dict
) -> int:
    """The token that ends a response of this agent.

    For chats it is the end token that the agent's chat template puts behind an assistant's message (Gemma's is not
    the tokenizer's EOS token); where the template shows none, and for plain prompts, the tokenizer's EOS token.

    Args:
        tokenizer: the agent's.
        end_ids: every id that ends a generation of this agent.
        conversational: whether prompts are chats.
        template_kwargs: further arguments of the chat template.
    """
    if conversational:
        marker = "qzxvk"  # stands in no template
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, **template_kwargs)
        _, found, tail = rendered.rpartition(marker)  # not found: the template changes what is said
        for token in tokenizer(tail, add_special_tokens=False)["input_ids"] if found else ():
            if token in end_ids:
                return token
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end_ids[0]
