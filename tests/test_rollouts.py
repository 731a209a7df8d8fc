"""Tests of the exchange of responses: other tokenizers' text, end tokens, rows, the plan of a round, and batches."""

import json
import math
import random
import string
import time

import pytest
import torch
from support.tiny_teams import CHAT_TEMPLATE, SPECS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hacpo_trl.playground import build_agent
from hacpo_trl.rollouts import (
    Rollout,
    Row,
    arrange,
    collate,
    own_rows,
    peer_rows,
    plan_round,
)
from hacpo_trl.texts.responses import EncodedResponses, encode_responses, end_of_response_id, find_leads

# -- tokenizers of many kinds, built on the spot ----------------------------------------------------------------------

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", string.printable, "Hello World, the answer is 42"] * 5


def wrapped(backend, **kwargs):
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{"eos_token": "</s>", "pad_token": "<pad>", **kwargs}, model_max_length=10**9
    )


def byte_level(eos_token="</s>", pad_token="<pad>", add_prefix_space=False, extra=(), template=None):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = wrapped(backend, eos_token=eos_token, pad_token=pad_token, additional_special_tokens=list(extra))
    tokenizer.chat_template = template
    return tokenizer


def metaspace(prepend_scheme):
    """Llama 2's kind: spaces become "▁", one stands before the text, unknown characters become bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = SPECIAL + [f"<0x{i:02X}>" for i in range(256)]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    )
    plain = json.loads(backend.to_str())  # the trainer takes the bytes for special tokens
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] in SPECIAL]
    return wrapped(Tokenizer.from_str(json.dumps(plain)), unk_token="<unk>", bos_token="<s>")


def unigram():
    """SentencePiece's kind with NFKC. Its special tokens are pieces of the model, too."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend, unk_token="<unk>")


def words():
    vocabulary = {word: i for i, word in enumerate(SPECIAL + "the answer is 42 no yes".split())}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(backend, unk_token="<unk>")


def characters(alphabet, normalizer=None, **kwargs):
    """Characters without an unknown token: what is not in the alphabet vanishes."""
    vocabulary = {token: i for i, token in enumerate(["</s>", "<pad>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return wrapped(backend, **kwargs)


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "playground char": build_agent(SPECS["char"])[1],
        "playground bpe": build_agent(SPECS["bpe"])[1],
        "byte level": byte_level(),
        "byte level, prefix space": byte_level(add_prefix_space=True),
        "metaspace": metaspace("always"),
        "metaspace, first": metaspace("first"),
        "unigram": unigram(),
        "characters": characters(string.printable),
    }


NAMES = [
    "playground char",
    "playground bpe",
    "byte level",
    "byte level, prefix space",
    "metaspace",
    "metaspace, first",
    "unigram",
    "characters",
]
BYTES = ["playground bpe", "byte level", "byte level, prefix space", "metaspace", "metaspace, first"]


def encode(tokenizer, texts, finished=True, max_length=10**6, end_id=None):
    finished = [finished] * len(texts) if isinstance(finished, bool) else finished
    end_id = tokenizer.eos_token_id if end_id is None else end_id
    count = len(texts)  # behind nothing: see test_texts.py for prompts
    leads = find_leads(tokenizer, [""], [[]], {}) * count
    return encode_responses(tokenizer, [[]] * count, leads, texts, finished, end_id, max_length)


def plain_ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


# -- encode_responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_only_finished_responses_end_on_the_end_token(tokenizers, name):
    tokenizer = tokenizers[name]
    text = "the answer is 42"
    result = encode(tokenizer, [text, text], [True, False])
    ids = plain_ids(tokenizer, text)
    assert result.ids == [[*ids, tokenizer.eos_token_id], ids]
    assert result.lengths == [len(ids) + 1, len(ids)]
    assert result.unreadable == [False, False] and result.overflowing == [False, False]


def test_the_end_token_is_the_one_that_is_given(tokenizers):
    tokenizer = tokenizers["byte level"]
    assert encode(tokenizer, ["yes"], end_id=7).ids[0][-1] == 7


@pytest.mark.parametrize("done", [True, False])
def test_cut_at_the_limit_and_counted_before_the_cut(tokenizers, done):
    tokenizer = tokenizers["playground char"]
    whole = encode(tokenizer, ["12345"], done).ids[0]
    assert len(whole) == 5 + done
    for limit in range(1, 8):
        result = encode(tokenizer, ["12345"], done, limit)
        assert result.ids == [whole[:limit]]
        assert result.lengths == [5 + done]
        assert result.overflowing == [limit < 5 + done]
        assert result.unreadable == [False]


def test_a_response_that_just_lacks_room_for_its_end_overflows(tokenizers):
    result = encode(tokenizers["playground char"], ["12345", "12345"], [True, False], 5)
    assert result.ids[0] == result.ids[1]
    assert result.overflowing == [True, False]


def test_no_responses():
    result = encode_responses(None, [], [], [], [], 0, 5)
    assert (result.ids, result.lengths, result.unreadable, result.overflowing) == ([], [], [], [])


@pytest.mark.parametrize("name", NAMES)
def test_empty_texts(tokenizers, name):
    tokenizer = tokenizers[name]
    result = encode(tokenizer, ["", ""], [True, False])
    assert result.ids == [[tokenizer.eos_token_id], []]
    assert result.lengths == [1, 0]
    assert result.unreadable == [False, False] and result.overflowing == [False, False]
    # the same alone: an unfinished one, and a finished one
    assert encode(tokenizer, [""], [False]).ids == [[]]
    assert encode(tokenizer, [""], [True]).ids == [[tokenizer.eos_token_id]]


@pytest.mark.parametrize("name", NAMES)
def test_every_response_is_read_on_its_own(tokenizers, name):
    tokenizer = tokenizers[name]
    texts = ["42", "", "the quick brown fox", " ", "a+b", "é"]
    together = encode(tokenizer, texts, [True, False, True, True, False, True])
    for i, (text, done) in enumerate(zip(texts, [True, False, True, True, False, True], strict=True)):
        alone = encode(tokenizer, [text], [done])
        assert together.ids[i] == alone.ids[0] and together.lengths[i] == alone.lengths[0]
        assert together.unreadable[i] == alone.unreadable[0]


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_a_text_are_plain_text(tokenizers, name):
    tokenizer = tokenizers[name]
    specials = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    texts = [f"x {token} y{token}" for token in tokenizer.all_special_tokens] + [tokenizer.eos_token]
    result = encode(tokenizer, texts, finished=False)
    for text, ids, unreadable in zip(texts, result.ids, result.unreadable, strict=True):
        if unreadable:
            continue  # no use is fine, a wrong end in the middle is not
        assert not specials & set(ids), f"{text!r} became {tokenizer.convert_ids_to_tokens(ids)}"
        assert tokenizer.decode(ids).split() == text.split()


def test_a_word_that_is_the_end_token_is_no_end(tokenizers):
    # a model whose vocabulary holds the end token as an ordinary word
    tokenizer = words()
    result = encode(tokenizer, ["the </s> yes", "the answer"], finished=False)
    assert result.unreadable[0] or tokenizer.eos_token_id not in result.ids[0]
    assert result.unreadable[1] is False


@pytest.mark.parametrize("name", ["byte level", "playground bpe", "playground char"])
def test_readable_special_looking_text_is_kept(tokenizers, name):
    tokenizer = tokenizers[name]
    result = encode(tokenizer, [f"a{tokenizer.eos_token}b{tokenizer.pad_token}"])
    assert result.unreadable == [False]
    assert tokenizer.decode(result.ids[0][:-1]) == f"a{tokenizer.eos_token}b{tokenizer.pad_token}"


def test_encoding_leaves_the_tokenizer_as_it_was(tokenizers):
    for tokenizer in tokenizers.values():
        before = tokenizer(f"yes{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
        encode(tokenizer, [f"yes{tokenizer.eos_token}"])
        assert tokenizer(f"yes{tokenizer.eos_token}", add_special_tokens=False)["input_ids"] == before


def test_an_added_token_that_is_not_special_is_used():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    ids = encode(tokenizer, ["<think>4"], False).ids[0]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<think>")


def test_no_start_token_is_added():
    tokenizer = metaspace("always")
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert 1 not in encode(tokenizer, ["yes"]).ids[0]
    assert encode(tokenizer, ["yes"]).ids[0].count(2) == 1


def test_truncation_and_padding_of_the_tokenizer_file_do_not_act():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    text = "the quick brown fox jumps"
    result = encode(tokenizer, [text, "a"], finished=False)
    assert tokenizer.decode(result.ids[0]) == text
    assert len(result.ids[1]) == 1 and result.unreadable == [False, False]


def test_padding_and_end_may_be_the_same_token():
    tokenizer = byte_level(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    result = encode(tokenizer, ["yes", "the answer is 42", ""], [True, True, False])
    assert [ids[-1:] for ids in result.ids] == [[tokenizer.eos_token_id]] * 2 + [[]]
    assert result.ids[0].count(tokenizer.eos_token_id) == 1  # nothing was padded


def test_unknown_and_end_may_be_the_same_token():
    tokenizer = byte_level(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.unk_token = "<|endoftext|>"  # GPT-2's kind
    result = encode(tokenizer, ["yes", "é"])
    assert result.unreadable == [False, False]


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("text", ["é", "日本語", "x² ≤ ½", "👩‍👩‍👧", "a\u200bb", "\x00", "naïve", "e\u0301", "Ω", "ﬁ"])
def test_bytes_hold_every_character(tokenizers, name, text):
    result = encode(tokenizers[name], [text], finished=False)
    assert result.unreadable == [False]
    assert tokenizers[name].decode(result.ids[0]).strip() == text.strip()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["\ufffd", "the answer \ufffd", "4\ufffd2"])
def test_broken_utf8_is_unreadable(tokenizers, name, text):
    result = encode(tokenizers[name], ["42", text, "42"])
    assert result.unreadable == [False, True, False]


@pytest.mark.parametrize("text", ["é", "4é2", "日本", "\x00", "\u200b"])
def test_unknown_characters_are_unreadable(tokenizers, text):
    for name in ("playground char", "unigram"):
        assert encode(tokenizers[name], [text, "42"]).unreadable == [True, False], name


def test_a_text_that_spells_the_unknown_token_is_unreadable():
    # it comes back letter by letter, but the token stands for anything
    assert encode(words(), ["the <unk> yes", "the answer"]).unreadable == [True, False]


@pytest.mark.parametrize("text", ["é", "4é2", "日本", "4\u200b2"])
def test_dropped_characters_are_unreadable(tokenizers, text):
    # the characters vanish without an unknown token
    assert encode(tokenizers["characters"], [text, "42"]).unreadable == [True, False]


WHITESPACE = [" yes", "  yes", "yes ", "yes  no", "yes\nno", "\nyes", "yes\n\n", "a\tb", "a \n b", " ", "\n", "   "]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("playground char", "unigram")])
@pytest.mark.parametrize("text", WHITESPACE)
def test_whitespace_may_differ(tokenizers, name, text):
    result = encode(tokenizers[name], [text])
    assert result.unreadable == [False]
    assert tokenizers[name].decode(result.ids[0][:-1]).split() == text.split()


@pytest.mark.parametrize("name", ["playground bpe", "byte level"])
@pytest.mark.parametrize("text", WHITESPACE)
def test_byte_level_keeps_whitespace_exactly(tokenizers, name, text):
    assert tokenizers[name].decode(encode(tokenizers[name], [text], False).ids[0]) == text


def test_whitespace_between_words_may_vanish():
    tokenizer = characters(string.ascii_letters + string.digits)  # without any whitespace
    assert encode(tokenizer, ["the answer\n", "a b", "a-b"]).unreadable == [False, False, True]


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (normalizers.Lowercase(), "Yes"),
        (normalizers.Replace("1", "7"), "41"),
        (normalizers.Replace("-", ""), "-1"),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "résumé"),
    ],
)
def test_real_differences_are_unreadable(normalizer, text):
    tokenizer = characters(string.printable, normalizer)
    assert encode(tokenizer, [text, "42"]).unreadable == [True, False]


@pytest.mark.parametrize("normalizer", [normalizers.NFKC(), normalizers.NFC(), normalizers.NFD(), normalizers.NFKD()])
def test_unicode_normalisation_may_differ(normalizer):
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizer
    assert encode(tokenizer, ["café", "cafe\u0301", "ﬁne", "x²", "한국", "Å"]).unreadable == [False] * 6


def test_nfkc_of_the_unigram_tokenizer(tokenizers):
    tokenizer = tokenizers["unigram"]
    result = encode(tokenizer, ["ﬁne", "４２", "a\u00a0b"], finished=False)
    assert result.unreadable == [False] * 3
    assert [tokenizer.decode(ids).strip() for ids in result.ids] == ["fine", "42", "a b"]


@pytest.mark.parametrize("name", NAMES)
def test_lone_surrogates_are_unreadable_not_a_crash(tokenizers, name):
    result = encode(tokenizers[name], ["42", "\ud800", "4\udfff2"])
    assert result.unreadable == [False, True, True]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unit", ["the answer is 42\n", "7", " ", "ab"])
def test_a_long_text_takes_no_time(tokenizers, name, unit):
    text = (unit * 100_000)[:100_000]
    started = time.perf_counter()
    result = encode(tokenizers[name], [text], max_length=64)
    assert time.perf_counter() - started < 3
    assert len(result.ids[0]) <= 64 and result.overflowing[0] == (result.lengths[0] > 64)


def test_a_random_text_comes_back():
    generator = random.Random(0)
    alphabet = string.printable + "éß日本²½👧\u0301"
    tokenizer = byte_level()
    texts = ["".join(generator.choices(alphabet, k=generator.randrange(60))) for _ in range(200)]
    result = encode(tokenizer, texts)
    assert not any(result.unreadable)
    assert [tokenizer.decode(ids[:-1]) for ids in result.ids] == texts


def test_a_random_text_of_letters_and_spaces_is_readable_everywhere(tokenizers):
    generator = random.Random(1)
    alphabet = string.ascii_letters + string.digits + "+-=*/().,:  "
    texts = ["".join(generator.choices(alphabet, k=generator.randrange(60))) for _ in range(100)]
    for name, tokenizer in tokenizers.items():
        assert not any(encode(tokenizer, texts).unreadable), name


# -- end_of_response_id -----------------------------------------------------------------------------------------------

MARKS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<eot>", "<|end_marker|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def end_of(template, eos_token, end_tokens, conversational=True, **template_kwargs):
    tokenizer = byte_level(eos_token=eos_token, extra=MARKS, template=template)
    ends = tokenizer.convert_tokens_to_ids(list(end_tokens))
    end_id = end_of_response_id(tokenizer, ends, conversational=conversational, template_kwargs=dict(template_kwargs))
    return tokenizer.convert_ids_to_tokens(end_id)


def test_end_of_chatml():
    assert end_of(CHATML, "<|im_end|>", ["<|im_end|>"]) == "<|im_end|>"
    assert end_of(CHATML, "<|im_end|>", ["<|endoftext|>", "<|im_end|>"]) == "<|im_end|>"
    # a base model's tokenizer that has a chat template, too
    assert end_of(CHATML, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]) == "<|im_end|>"


def test_end_of_gemma_is_not_its_eos_token():
    for ends in (["<eos>", "<end_of_turn>"], ["<end_of_turn>", "<eos>"]):
        assert end_of(GEMMA, "<eos>", ends) == "<end_of_turn>"


def test_a_token_that_ends_no_generation_is_no_end():
    assert end_of(GEMMA, "<eos>", ["<eos>"]) == "<eos>"


def test_end_of_the_tests_template():
    assert end_of(CHAT_TEMPLATE, "</s>", ["<eot>", "</s>"]) == "</s>"


def test_a_template_that_appends_nothing():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert end_of(template, "<eos>", ["<eot>", "<eos>"]) == "<eos>"


def test_a_template_that_ends_all_but_the_last_message():
    template = "{% for m in messages %}{{ m.content }}{% if not loop.last %}<eot>{% endif %}{% endfor %}"
    assert end_of(template, "<eos>", ["<eot>", "<eos>"]) == "<eos>"


def test_a_template_that_always_opens_the_next_turn():
    template = "{% for m in messages %}{{ m.content }}<eot>\n{% endfor %}<|im_start|>assistant\n"
    assert end_of(template, "<eos>", ["<eos>", "<eot>"]) == "<eot>"


def test_a_template_with_different_ends_for_user_and_assistant():
    template = "{% for m in messages %}{{ m.content }}{{ '<eot>' if m.role == 'assistant' else '<end_of_turn>' }}\n"
    template += "{% endfor %}"
    assert end_of(template, "<eos>", ["<eos>", "<end_of_turn>", "<eot>"]) == "<eot>"


def test_template_kwargs_reach_the_template():
    template = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if enable_thinking else '<eot>' }}{% endfor %}"
    ends = ["<eos>", "<eot>", "<|im_end|>"]
    assert end_of(template, "<eos>", ends, enable_thinking=True) == "<|im_end|>"
    assert end_of(template, "<eos>", ends, enable_thinking=False) == "<eot>"
    assert end_of(CHATML, "<|endoftext|>", ["<|im_end|>"], enable_thinking=False) == "<|im_end|>"


def test_a_template_that_strips_the_content():
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1].strip() }} <eot>\n{% endfor %}"
    assert end_of(template, "<eos>", ["<eos>", "<eot>"]) == "<eot>"


def test_a_template_that_changes_the_content_and_shows_no_end():
    # the user's message ends on a token, the assistant's does not: the tokenizer's EOS token it is
    template = "{% for m in messages %}{{ m.content | upper }}{% if m.role == 'user' %}<eot>{% endif %}{% endfor %}"
    assert end_of(template, "<eos>", ["<eos>", "<eot>"]) == "<eos>"


def test_a_template_that_leaves_the_content_out():
    template = "{% for m in messages %}message of {{ m.role }}{% if m.role == 'user' %}<eot>{% endif %}{% endfor %}"
    assert end_of(template, "<eos>", ["<eos>", "<eot>"]) == "<eos>"


def test_an_end_token_that_is_called_a_marker():
    template = "{% for m in messages %}{{ m.content }}<|end_marker|>\n{% endfor %}"
    assert end_of(template, "<eos>", ["<eos>", "<|end_marker|>"]) == "<|end_marker|>"


def test_plain_prompts_end_on_the_eos_token():
    assert end_of(CHATML, "<eos>", ["<|im_end|>", "<eos>"], conversational=False) == "<eos>"
    assert end_of(None, "<eos>", ["<|im_end|>", "<eos>"], conversational=False) == "<eos>"


def test_a_tokenizer_without_eos_token():
    tokenizer = byte_level()
    tokenizer.eos_token = None
    assert end_of_response_id(tokenizer, [5, 6], conversational=False, template_kwargs={}) == 5


# -- rows -------------------------------------------------------------------------------------------------------------


def rollout(lengths, *, masked=None, logp_sums=None, texts=None):
    count = len(lengths)
    return Rollout(
        prompt_ids=[torch.arange(1, 2 + i % 3) for i in range(count)],
        completion_ids=[torch.arange(100 * i, 100 * i + n) for i, n in enumerate(lengths)],
        texts=[f"text {i}" for i in range(count)] if texts is None else texts,
        finished=[True] * count,
        masked=[False] * count if masked is None else masked,
        logp_sums=logp_sums,
        rewards=torch.zeros(count),
    )


def test_own_rows_keep_every_token():
    own = rollout(
        [3, 1, 4],
        masked=[False, True, False],
        logp_sums=torch.tensor([-3.0, -0.5, -2.0]),
    )
    rows = own_rows(own, 2, torch.tensor([1.5, -0.25, 0.0]))
    assert [row.source for row in rows] == [2, 2, 2]
    assert [row.advantage for row in rows] == [1.5, -0.25, 0.0]
    assert [row.weight for row in rows] == [1.0] * 3
    assert [row.masked for row in rows] == [False, True, False]
    assert [row.source_logp for row in rows] == [-1.0, -0.5, -0.5]
    for i, row in enumerate(rows):
        assert torch.equal(row.prompt_ids, own.prompt_ids[i])
        assert torch.equal(row.completion_ids, own.completion_ids[i])
        assert len(row) == len(own.prompt_ids[i]) + len(own.completion_ids[i])
    assert len(own) == 3


def test_log_probabilities_may_become_known_after_the_rows_are_made():
    source = rollout([2, 3])
    own = own_rows(source, 0, torch.zeros(2))
    peers = peer_rows(
        source,
        EncodedResponses([[1], [2, 3, 4]], [1, 3], [False] * 2),
        source.prompt_ids,
        0,
        torch.ones(2),
        torch.ones(2),
        pad_id=0,
    )
    assert all(math.isnan(row.source_logp) for row in own + peers)
    source.logp_sums[:] = torch.tensor([-1.0, -6.0])
    assert [row.source_logp for row in own] == [row.source_logp for row in peers] == [-0.5, -2.0]


LOGPS = torch.tensor([-6.0, -6.0, -6.0, -6.0, -6.0])


def encoded_five():
    # whole; cut from 6 to 4; unreadable; empty; of one token
    ids = [[11, 12, 13], [21, 22, 23, 24], [31, 32], [], [51]]
    return EncodedResponses(ids, [3, 6, 2, 0, 1], [False, False, True, False, False])


def five_peer_rows(masked=(False,) * 5, weight=1.25, **options):
    prompts = [torch.tensor([7, 8, i]) for i in range(5)]
    peer = rollout([2, 3, 4, 6, 1], masked=list(masked), logp_sums=LOGPS)
    advantages = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0])
    return peer_rows(
        peer, encoded_five(), prompts, 1, advantages, torch.full((5,), weight), pad_id=99, **options
    ), prompts


def test_peer_rows_are_exact_and_the_unusable_keep_a_row():
    rows, prompts = five_peer_rows()
    assert [row.completion_ids.tolist() for row in rows] == [[11, 12, 13], [21, 22, 23, 24], [31, 32], [99], [51]]
    assert all(row.completion_ids.dtype == torch.long for row in rows)
    assert all(torch.equal(row.prompt_ids, prompt) for row, prompt in zip(rows, prompts, strict=True))
    assert [row.advantage for row in rows] == [1.0, -2.0, 0.0, 0.0, 5.0]
    assert [row.weight for row in rows] == [1.25] * 5
    assert [row.source for row in rows] == [1] * 5
    assert [row.masked for row in rows] == [False, False, False, True, False]
    assert [row.per_token for row in rows] == [{}] * 5


def test_peer_rows_over_the_peers_own_tokens():
    rows, _ = five_peer_rows()
    assert [row.source_logp for row in rows] == [-6 / 2, -6 / 3, -6 / 4, -6 / 6, -6 / 1]


def test_peer_rows_over_the_learners_tokens_before_the_cut():
    rows, _ = five_peer_rows(shared_length=True)
    assert [row.source_logp for row in rows] == [-6 / 3, -6 / 6, -6 / 2, -6 / 1, -6 / 1]


def test_overflowing_peer_rows_can_be_dropped():
    rows, _ = five_peer_rows(drop_overflowing=True)
    assert [row.advantage for row in rows] == [1.0, 0.0, 0.0, 0.0, 5.0]
    assert rows[1].completion_ids.tolist() == [21, 22, 23, 24]


def test_masked_peer_rows_have_no_advantage():
    rows, _ = five_peer_rows(masked=[True, False, False, False, True])
    assert [row.advantage for row in rows] == [0.0, -2.0, 0.0, 0.0, 0.0]


def test_the_two_length_normalizations_agree_for_equal_tokenizations():
    encoded = EncodedResponses([[1, 2, 3], [4]], [3, 1], [False, False])
    peer = rollout([3, 1], logp_sums=torch.tensor([-1.5, -0.25]))
    prompts = [torch.tensor([1]), torch.tensor([2])]
    both = [
        peer_rows(peer, encoded, prompts, 1, *[torch.ones(2)] * 2, pad_id=0, shared_length=shared)
        for shared in (False, True)
    ]
    assert [row.source_logp for row in both[0]] == [row.source_logp for row in both[1]] == [-0.5, -0.25]


def test_a_peer_without_tokens_does_not_divide_by_zero():
    encoded = EncodedResponses([[]], [0], [False])
    peer = rollout([0], logp_sums=torch.zeros(1))
    for shared in (False, True):
        row = peer_rows(
            peer, encoded, [torch.tensor([1])], 1, torch.ones(1), torch.ones(1), pad_id=0, shared_length=shared
        )[0]
        assert row.source_logp == 0.0 and row.advantage == 0.0


# -- plan_round -------------------------------------------------------------------------------------------------------


def plan_of(own, peers, *, rows_per_step, steps_per_update, order="own_first", **kwargs):
    """A plan of a round in which every update has as many rows."""
    rows = rows_per_step * steps_per_update
    updates = arrange(
        own,
        peers,
        own_updates=len(own) // rows,
        updates=(len(own) + len(peers)) // rows,
        order=order,
        generations=4,
    )
    return plan_round(updates, own, rows_per_step=rows_per_step, steps_per_update=steps_per_update, **kwargs)


def planned(*args, **kwargs):
    return plan_of(*args, **kwargs).batches


def made_rows(count, source, generator, silent_share=0.0, own_zero=False):
    rows = []
    for i in range(count):
        zero = own_zero or (source > 0 and generator.random() < silent_share)
        rows.append(
            Row(
                source=source,
                prompt_ids=torch.tensor([source, i]),  # names the row
                completion_ids=torch.zeros(generator.randrange(1, 40), dtype=torch.long),
                advantage=0.0 if zero else generator.choice([-1.0, 0.5, 2.0]),
            )
        )
    return rows


def key(row):
    return tuple(row.prompt_ids.tolist())


def cut(plan, size):
    assert len(plan) % size == 0
    return [plan[i : i + size] for i in range(0, len(plan), size)]


def flat(batches):
    return [row for batch in batches for row in batch]


def random_case(seed, silent_share):
    generator = random.Random(seed)
    per_step, steps, updates = generator.randint(1, 4), generator.randint(1, 4), generator.randint(1, 3)
    agents, iterations = generator.randint(1, 4), generator.randint(1, 3)
    count = per_step * steps * updates
    own = made_rows(count, 0, generator, own_zero=seed % 3 == 0)
    peers = [row for j in range(1, agents) for row in made_rows(count, j, generator, silent_share)]
    options = {"rows_per_step": per_step, "steps_per_update": steps, "iterations": iterations}
    torch.manual_seed(seed)
    return own, peers, options, generator


@pytest.mark.parametrize("order", ["own_first", "shuffled"])
@pytest.mark.parametrize("seed", range(25))
def test_every_row_once_per_iteration(seed, order):
    own, peers, options, _ = random_case(seed, silent_share=0.5)
    plan = planned(own, peers, **options, order=order, skip_silent=False)
    per_step, steps, iterations = options.values()
    assert len(plan) == iterations * len(own + peers) // per_step
    assert all(len(batch) == per_step for batch in plan)
    per_iteration = len(plan) // iterations
    for i in range(iterations):
        rows = flat(plan[i * per_iteration : (i + 1) * per_iteration])
        assert sorted(map(key, rows)) == sorted(map(key, own + peers))
        if order == "own_first":
            assert all(row.source == 0 for row in rows[: len(own)])
            assert all(row.source != 0 for row in rows[len(own) :])
    for update in cut(plan, steps):
        lengths = [len(row) for row in flat(update)]
        assert steps == 1 or lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("order", ["own_first", "shuffled"])
@pytest.mark.parametrize("silent_share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(15))
def test_silent_rows_are_skipped_but_no_update_is_empty(seed, silent_share, order):
    own, peers, options, _ = random_case(seed, silent_share)
    plan = planned(own, peers, **options, order=order)
    per_step, steps, iterations = options.values()
    assert len(plan) == iterations * len(own + peers) // per_step
    loud = [key(row) for row in own + peers if row.source == 0 or row.advantage != 0.0]
    seen = [key(row) for row in flat(plan)]
    for name in loud:
        assert seen.count(name) == iterations
    assert max(seen.count(name) for name in set(seen)) == iterations
    for update in cut(plan, steps):
        sizes = [len(batch) for batch in update]
        ran = [size for size in sizes if size]
        assert sizes[-1] > 0, "the last micro-batch of an update makes the step and must run"
        assert sizes == [0] * (steps - len(ran)) + ran, "what is left stands last"
        assert max(ran) <= per_step and max(ran) - min(ran) <= 1
        active = sum(key(row) in set(loud) for row in flat(update))
        assert len(ran) == max(1, -(-active // per_step)), "no more passes than needed"
        assert sum(ran) == max(active, 1), "silent rows only where an update has nothing else"


@pytest.mark.parametrize("seed", range(10))
def test_skipping_moves_no_row_to_another_update(seed):
    own, peers, options, _ = random_case(seed, 0.6)
    plans = []
    for skip in (False, True):
        torch.manual_seed(seed)
        plans.append(cut(planned(own, peers, **options, skip_silent=skip), options["steps_per_update"]))
    for everything, left in zip(*plans, strict=True):
        assert {key(row) for row in flat(left)} <= {key(row) for row in flat(everything)}


def test_own_rows_without_advantage_are_never_silent():
    own, peers, options, _ = random_case(3, 1.0)
    assert all(row.advantage == 0.0 for row in own)
    plan = planned(own, peers, rows_per_step=1, steps_per_update=len(own))
    assert sorted(key(row) for row in flat(plan) if row.source == 0) == sorted(map(key, own))


@pytest.mark.parametrize("seed", range(15))
def test_other_processes_may_need_more_micro_batches(seed):
    own, peers, options, generator = random_case(seed, 0.8)
    per_step, steps, iterations = options.values()
    asked = []

    def agree(counts):
        assert all(type(count) is int for count in counts)
        needed, teaches = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        asked.append([generator.randint(count, steps) for count in needed])
        return asked[-1] + teaches

    plan = planned(own, peers, **options, agree=agree)
    assert len(asked) == 1, "the processes talk once a round"
    needed = asked[0] * iterations
    for update, count in zip(cut(plan, steps), needed, strict=True):
        assert sum(len(batch) > 0 for batch in update) == max(count, 1)
        names = [key(row) for row in flat(update)]
        assert len(set(names)) == len(names)
        assert max(len(batch) for batch in update) <= per_step
        active = sum(row.source == 0 or row.advantage != 0.0 for row in flat(update))
        assert len(names) == max(active, count, 1), "silent rows only fill passes that would be empty"
        assert all(row.filler == (row.source != 0 and row.advantage == 0.0) for row in flat(update))
    loud = [key(row) for row in own + peers if row.source == 0 or row.advantage != 0.0]
    seen = [key(row) for row in flat(plan)]
    assert all(seen.count(name) == iterations for name in loud)


def test_processes_that_agree_run_the_same_passes():
    plans, counts = [], []
    for process in range(2):
        generator = random.Random(process)
        own, peers = made_rows(8, 0, generator), made_rows(8, 1, generator, silent_share=0.4 + 0.5 * process)
        torch.manual_seed(process)
        plan_of(own, peers, rows_per_step=2, steps_per_update=4, agree=lambda c: counts.append(c) or c)
        plans.append((own, peers))
    assert counts[0] != counts[1]
    most = [max(pair) for pair in zip(*counts, strict=True)]
    shapes = []
    for process, (own, peers) in enumerate(plans):
        torch.manual_seed(process)
        plan = planned(own, peers, rows_per_step=2, steps_per_update=4, agree=lambda c: most)
        shapes.append([bool(batch) for batch in plan])
    assert shapes[0] == shapes[1]


def test_a_lone_agent_draws_exactly_one_permutation():
    own = made_rows(12, 0, random.Random(0))
    torch.manual_seed(5)
    plan = planned(own, [], rows_per_step=3, steps_per_update=1, iterations=2)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    order = torch.randperm(12).tolist()
    assert torch.equal(state, torch.get_rng_state())
    assert [key(row)[1] for row in flat(plan)] == order * 2


@pytest.mark.parametrize("order", ["own_first", "shuffled"])
def test_a_lone_agent_ignores_the_order(order):
    own = made_rows(8, 0, random.Random(0))
    torch.manual_seed(5)
    plan_of(own, (), rows_per_step=2, steps_per_update=2, order=order)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    torch.randperm(8)
    assert torch.equal(state, torch.get_rng_state())


def test_orders_differ_from_round_to_round_and_with_the_seed():
    generator = random.Random(0)
    own, peers = made_rows(16, 0, generator), made_rows(16, 1, generator)
    options = {"rows_per_step": 4, "steps_per_update": 1}

    def orders(seed):
        torch.manual_seed(seed)
        return [[key(row) for row in flat(planned(own, peers, **options))] for _ in range(2)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    first, second = orders(1)
    assert first[:16] != second[:16] and first[16:] != second[16:]


def test_shuffled_mixes_own_and_peers():
    generator = random.Random(0)
    own, peers = made_rows(64, 0, generator), made_rows(64, 1, generator)
    torch.manual_seed(0)
    plan = planned(own, peers, rows_per_step=64, steps_per_update=1, order="shuffled")
    share = sum(row.source == 0 for row in plan[0]) / 64
    assert 0.3 < share < 0.7


def test_peers_of_several_agents_are_mixed():
    generator = random.Random(0)
    own = made_rows(64, 0, generator)
    peers = made_rows(64, 1, generator) + made_rows(64, 2, generator)
    torch.manual_seed(0)
    plan = planned(own, peers, rows_per_step=64, steps_per_update=1)
    assert {row.source for row in plan[0]} == {0}
    assert 0.3 < sum(row.source == 1 for row in plan[1]) / 64 < 0.7


def test_a_learner_that_is_not_the_first_agent():
    generator = random.Random(0)
    own, peers = made_rows(4, 2, generator), made_rows(4, 0, generator) + made_rows(4, 1, generator)
    for row in own + peers:
        row.advantage = 0.0
    plan = planned(own, peers, rows_per_step=2, steps_per_update=2)
    assert sorted(key(row) for row in flat(plan[:2])) == sorted(map(key, own))
    assert [len(batch) for batch in plan] == [2, 2, 0, 1, 0, 1]


def test_single_micro_batches_keep_the_drawn_order():
    own = made_rows(20, 0, random.Random(0))
    torch.manual_seed(9)
    plan = planned(own, [], rows_per_step=5, steps_per_update=1)
    torch.manual_seed(9)
    assert [key(row)[1] for row in flat(plan)] == torch.randperm(20).tolist()


def test_planning_leaves_its_arguments_alone():
    generator = random.Random(0)
    own, peers = made_rows(8, 0, generator), made_rows(8, 1, generator, 0.5)
    before = [list(map(key, own)), list(map(key, peers))]
    plan_of(own, peers, rows_per_step=2, steps_per_update=2, order="shuffled")
    assert [list(map(key, own)), list(map(key, peers))] == before


# -- collate ----------------------------------------------------------------------------------------------------------


def mixed_rows():
    sums = torch.tensor([-0.5, -3.0, -0.5])
    return [
        Row(
            0,
            torch.tensor([1, 2, 3]),
            torch.tensor([4, 5]),
            0.5,
            logp_sums=sums,
            divisor=2,
            per_token={"ref": torch.tensor([-1.0, -2])},
        ),
        Row(1, torch.tensor([6]), torch.tensor([7, 8, 9, 10]), -1.0, 1.5, index=1, logp_sums=sums, divisor=4),
        Row(
            0,
            torch.tensor([11, 12]),
            torch.tensor([13]),
            2.0,
            masked=True,
            index=2,
            logp_sums=sums,
            per_token={"ref": torch.tensor([-3.0])},
        ),
    ]


def test_collate_by_hand():
    batch = collate(mixed_rows(), learner=0, pad_id=77)
    assert batch["prompt_ids"].tolist() == [[1, 2, 3], [77, 77, 6], [77, 11, 12]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert batch["completion_ids"].tolist() == [[4, 5, 77, 77], [7, 8, 9, 10], [13, 77, 77, 77]]
    assert batch["completion_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert batch["ref"].tolist() == [[-1, -2, 0, 0], [0, 0, 0, 0], [-3, 0, 0, 0]]
    assert batch["advantages"].tolist() == [0.5, -1.0, 2.0]
    assert batch["weights"].tolist() == [1.0, 1.5, 1.0]
    assert batch["source_logp"].tolist() == [-0.25, -0.75, -0.5]
    assert batch["source"].tolist() == [0, 1, 0]
    assert batch["is_own"].tolist() == [True, False, True]


def test_collate_dtypes():
    batch = collate(mixed_rows(), learner=1, pad_id=0)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "source"):
        assert batch[name].dtype == torch.long, name
    for name in ("advantages", "weights", "source_logp", "ref"):
        assert batch[name].dtype == torch.float32, name
    assert batch["is_own"].dtype == torch.bool and batch["is_own"].tolist() == [False, True, False]


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_collate_per_token_values_do_not_depend_on_the_order(order):
    rows = mixed_rows()
    batch = collate([rows[i] for i in order], learner=0, pad_id=0)
    straight = collate(rows, learner=0, pad_id=0)
    assert torch.equal(batch["ref"], straight["ref"][order])
    assert batch["ref"].shape == batch["completion_ids"].shape


def test_collate_peers_longer_than_own_and_the_other_way_round():
    own = Row(0, torch.tensor([1]), torch.arange(6), per_token={"a": torch.ones(6), "b": torch.full((6,), 2.0)})
    for length in (2, 6, 11):
        peer = Row(1, torch.tensor([1]), torch.arange(length))
        batch = collate([peer, own], learner=0, pad_id=0)
        width = max(length, 6)
        assert batch["a"].shape == batch["b"].shape == batch["completion_ids"].shape == (2, width)
        assert batch["a"][0].abs().sum() == 0 and batch["a"][1].sum() == 6 and batch["b"][1].sum() == 12


def test_collate_without_per_token_values():
    names = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "weights"}
    batch = collate([mixed_rows()[1]], learner=0, pad_id=0)
    assert set(batch) == names | {"source_logp", "source", "is_own", "filler"}


def test_collate_is_trimmed_to_its_own_longest():
    generator = random.Random(0)
    for _ in range(30):
        rows = made_rows(generator.randint(1, 6), 0, generator)
        batch = collate(rows, learner=0, pad_id=-1)
        assert batch["completion_ids"].shape == (len(rows), max(len(row.completion_ids) for row in rows))
        assert batch["prompt_ids"].shape == (len(rows), max(len(row.prompt_ids) for row in rows))
        assert batch["completion_mask"].sum(-1).tolist() == [len(row.completion_ids) for row in rows]
        assert ((batch["completion_ids"] == -1) == (batch["completion_mask"] == 0)).all()
        assert (batch["completion_mask"].diff(dim=-1) <= 0).all() and (batch["prompt_mask"].diff(dim=-1) >= 0).all()


def test_padding_is_masked_by_length_not_by_id():
    # pad == eos: the response's own end token stays
    row, longer = (
        Row(0, torch.tensor([2, 1]), torch.tensor([5, 2])),
        Row(0, torch.tensor([1]), torch.tensor([5, 6, 2])),
    )
    batch = collate([row, longer], learner=0, pad_id=2)
    assert batch["completion_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["prompt_mask"].tolist() == [[1, 1], [0, 1]]


def test_collate_an_empty_completion_beside_others():
    empty = Row(0, torch.tensor([1, 2]), torch.zeros(0, dtype=torch.long), per_token={"ref": torch.zeros(0)})
    batch = collate([empty, mixed_rows()[0]], learner=0, pad_id=9)
    assert batch["completion_ids"].tolist() == [[9, 9], [4, 5]]
    assert batch["completion_mask"].tolist() == [[0, 0], [1, 1]]
    assert batch["ref"].tolist() == [[0, 0], [-1, -2]]


def test_collate_half_precision_values_beside_peers():
    half = Row(
        0, torch.tensor([1]), torch.tensor([1, 2]), per_token={"ref": torch.tensor([-1.5, -2], dtype=torch.bfloat16)}
    )
    peer = Row(1, torch.tensor([1]), torch.tensor([1, 2, 3]))
    for rows in ([half, peer], [peer, half]):
        batch = collate(rows, learner=0, pad_id=0)
        own = [row.source for row in rows].index(0)
        assert batch["ref"][own].tolist() == [-1.5, -2.0, 0.0] and batch["ref"][1 - own].tolist() == [0.0] * 3


def test_collate_leaves_the_rows_alone():
    rows = mixed_rows()
    collate(rows, learner=0, pad_id=77)
    for row, fresh in zip(rows, mixed_rows(), strict=True):
        assert torch.equal(row.prompt_ids, fresh.prompt_ids) and torch.equal(row.completion_ids, fresh.completion_ids)


# -- from the text of one agent to the batch of another ---------------------------------------------------------------


def test_a_peers_response_reaches_the_batch_with_the_learners_end(tokenizers):
    learner, texts = tokenizers["playground bpe"], ["1+1=2", "é", "", "\ufffd"]
    peer = rollout([5, 2, 1, 3], logp_sums=-torch.ones(4), texts=texts)
    peer.finished[2] = False
    encoded = encode_responses(learner, [[]] * 4, [""] * 4, texts, peer.finished, learner.eos_token_id, 4)
    prompts = [torch.tensor([1])] * 4
    rows = peer_rows(peer, encoded, prompts, 1, *[torch.ones(4)] * 2, pad_id=learner.pad_token_id)
    assert [row.advantage for row in rows] == [1.0, 1.0, 0.0, 0.0]
    batch = collate(rows, learner=0, pad_id=learner.pad_token_id)
    assert batch["completion_ids"].shape[1] <= 4
    second = batch["completion_ids"][1][batch["completion_mask"][1].bool()].tolist()
    assert learner.decode(second[:-1]) == "é" and second[-1] == learner.eos_token_id
    assert batch["completion_mask"][2].sum() == 0
