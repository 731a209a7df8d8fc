"""The border between prompt and response: what one agent wrote behind its prompt, another reads behind its own.

The tokenizers are of transformers' own classes, with small vocabularies trained on the spot.
"""

import functools
import json

import datasets
import pytest
from support.tiny_teams import config
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    BertTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
    XGLMTokenizer,
)

from hacpo_trl import HACPOTrainer
from hacpo_trl.texts.responses import decode_behind, encode_responses, find_leads, response_texts
from hacpo_trl.training.agent import HACPOAgent

CORPUS = [
    "What is 2 + 3? Solution: The answer is 5. Add the numbers, and then the sum is 12.",
    "the processing of the problem takes two steps: adding and carrying; so the answer is 42.",
    "[INST] user assistant system Problem: Solution: x = 12 and y = 7.",
] * 4
LLAMA_SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


@functools.cache
def sentencepiece_bpe(specials, newlines=False):
    """Vocabulary and merges of the kind that Llama 2 and Gemma have: "▁" for a space, bytes for the unknown."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    learned = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    vocabulary = [*specials, *BYTES, *(["\n", "\n\n"] if newlines else []), *learned]
    data = json.loads(backend.to_str())["model"]["merges"]
    merges = [tuple(pair) for pair in data] + ([("\n", "\n")] if newlines else [])
    return {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}, merges


def with_ends(tokenizer, tokens=("<|user|>", "<|assistant|>", "<|end|>")):
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(t, special=True) for t in tokens]})
    return tokenizer


def llama(**kwargs):
    vocabulary, merges = sentencepiece_bpe(tuple(LLAMA_SPECIAL))
    return with_ends(LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, **kwargs))


def llama_of_old():
    """A tokenizer.json of Llama 2, TinyLlama or Phi-3: "▁" by a normalizer, in front of every piece of text."""
    vocabulary, merges = sentencepiece_bpe(tuple(LLAMA_SPECIAL))
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_ends(
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    )


def gemma():
    vocabulary, merges = sentencepiece_bpe(("<pad>", "<eos>", "<bos>", "<unk>"), newlines=True)
    return with_ends(GemmaTokenizer(vocab=vocabulary, merges=merges))


@functools.cache
def byte_level_bpe():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    merges = json.loads(backend.to_str())["model"]["merges"]
    vocabulary = {**backend.get_vocab(), "<|endoftext|>": 320}
    for pair in (("Ċ", "Ċ"), (":", "Ċ")):  # tokens that reach over the border, as Qwen's do
        merges.append(list(pair))
        vocabulary["".join(pair)] = len(vocabulary)
    return vocabulary, [tuple(pair) for pair in merges]


def byte_level(cls=GPT2Tokenizer, **kwargs):
    vocabulary, merges = byte_level_bpe()
    return with_ends(cls(vocab=vocabulary, merges=merges, eos_token="<|endoftext|>", **kwargs))


@functools.cache
def unigram_pieces(specials):
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        [*CORPUS, "".join(map(chr, range(33, 127)))],
        trainers.UnigramTrainer(vocab_size=150, special_tokens=list(specials), unk_token="<unk>", show_progress=False),
    )
    return [tuple(piece) for piece in json.loads(backend.to_str())["model"]["vocab"]]


def t5():
    return with_ends(T5Tokenizer(vocab=unigram_pieces(("<pad>", "</s>", "<unk>")), extra_ids=0))


def xglm():
    pieces = unigram_pieces(("<s>", "<pad>", "</s>", "<unk>"))
    return with_ends(XGLMTokenizer(vocab=[*pieces, ("\n", -5.0)]))


def bert():
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=260, special_tokens=special, show_progress=False)
    )
    tokenizer = BertTokenizer(vocab=backend.get_vocab(), do_lower_case=False)
    tokenizer.backend_tokenizer.post_processor = None  # a decoder ends its prompts on no [SEP]
    tokenizer.eos_token = "[SEP]"
    return with_ends(tokenizer)


KINDS = {
    "llama, legacy": functools.partial(llama, legacy=True),
    "llama": functools.partial(llama, legacy=False),
    "llama, no prefix space": functools.partial(llama, add_prefix_space=False),
    "llama, tokenizer.json of old": llama_of_old,
    "gemma": gemma,
    "gpt2": byte_level,
    "gpt2, prefix space": functools.partial(byte_level, add_prefix_space=True),
    "qwen2": functools.partial(byte_level, Qwen2Tokenizer),
    "t5": t5,
    "xglm": xglm,
    "bert": bert,
}
EXACT = list(KINDS)[:8]  # these hold every text; the others lose white space


@functools.cache
def tokenizer_of(kind):
    return KINDS[kind]()


PROMPTS = ["What is 2 + 3?\nSolution:", "Solution: ", "the process", "Solution:\n", "Solution:\n\n", "x = 12", "é日"]
TEXTS = [
    "The answer is 5.",
    " The answer is 5.",
    "  two",
    "5",
    " 5",
    "\nThe sum",
    "\n\n5",
    "ing",
    ": x",
    "日本 é",
    " ",
    "\n",
]
CASES = [(prompt, text) for prompt in PROMPTS for text in TEXTS]


def borders(tokenizer):
    prompts = [prompt for prompt, _ in CASES]
    prompt_ids = tokenizer(prompts)["input_ids"]
    return prompt_ids, find_leads(tokenizer, prompts, prompt_ids, {})


def encode(tokenizer, prompt_ids, leads, texts, ended=True, limit=10**6):
    return encode_responses(tokenizer, prompt_ids, leads, texts, [ended] * len(texts), tokenizer.eos_token_id, limit)


@pytest.mark.parametrize("kind", EXACT)
def test_every_text_stands_behind_every_prompt_to_the_letter(kind):
    tokenizer = tokenizer_of(kind)
    prompt_ids, leads = borders(tokenizer)
    texts = [text for _, text in CASES]
    assert leads == [""] * len(CASES)
    read = encode(tokenizer, prompt_ids, leads, texts)
    assert not any(read.unreadable)
    assert all(ids[-1] == tokenizer.eos_token_id for ids in read.ids)
    whole = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompt_ids, read.ids, strict=True)]
    assert tokenizer.batch_decode(whole, skip_special_tokens=True) == [
        decoded + text
        for decoded, text in zip(tokenizer.batch_decode(prompt_ids, skip_special_tokens=True), texts, strict=True)
    ]
    # and back: what the learner reads is, written by it, the same text for its peers
    assert response_texts(tokenizer, prompt_ids, leads, [ids[:-1] for ids in read.ids]) == texts


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_prompt_and_text_together(kind):
    """Wherever no token reaches over the border, they are what the tokenizer makes of the whole."""
    tokenizer = tokenizer_of(kind)
    prompt_ids, leads = borders(tokenizer)
    read = encode(tokenizer, prompt_ids, leads, [text for _, text in CASES], ended=False)
    compared = 0
    for (prompt, text), before, ids, unreadable in zip(CASES, prompt_ids, read.ids, read.unreadable, strict=True):
        whole = tokenizer(prompt + text)["input_ids"]
        if unreadable or whole[: len(before)] != before or not text.strip():
            continue
        if kind in EXACT or text.startswith("The"):
            compared += 1
            assert ids == whole[len(before) :], (prompt, text, tokenizer.convert_ids_to_tokens(ids))
    assert compared >= (30 if kind in EXACT else 4) or kind == "t5"  # T5 ends every prompt on its end token


@pytest.mark.parametrize("kind", ["t5", "xglm", "bert"])
def test_what_loses_white_space_reads_all_the_rest(kind):
    tokenizer = tokenizer_of(kind)
    prompt_ids, leads = borders(tokenizer)
    texts = [text for _, text in CASES]
    read = encode(tokenizer, prompt_ids, leads, texts)
    backs = decode_behind(tokenizer, prompt_ids, read.ids)
    for text, back, unreadable in zip(texts, backs, read.unreadable, strict=True):
        assert unreadable == (text == "日本 é"), (text, back)
        if not unreadable:
            assert back.split() == text.split()


@pytest.mark.parametrize("writer", KINDS)
def test_the_text_is_equal_for_all_agents(writer):
    """What an agent writes as its tokenizer would go on, all others get without a space that nobody wrote."""
    tokenizer = tokenizer_of(writer)
    prompts = ["What is 2 + 3? Solution:", "Add the numbers, and then"]
    for text in ("The answer is 5.", "Add 2 and 3."):
        written = " " + text
        whole = tokenizer([prompt + written for prompt in prompts])["input_ids"]
        prompt_ids = tokenizer(prompts)["input_ids"]
        if writer == "t5":  # it ends every text on its end token
            whole, prompt_ids = [[ids[:-1] for ids in rows] for rows in (whole, prompt_ids)]
        ids = [ids[len(before) :] for ids, before in zip(whole, prompt_ids, strict=True)]
        leads = find_leads(tokenizer, prompts, prompt_ids, {})
        assert response_texts(tokenizer, prompt_ids, leads, ids) == [
            text if writer == "bert" else written,  # WordPiece itself puts the space behind a colon
            written,
        ]


def test_the_bare_decoding_of_today_would_have_lost_the_space():
    tokenizer = tokenizer_of("llama, legacy")
    ids = tokenizer(" The answer", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "The answer"
    prompt = tokenizer("Solution:")["input_ids"]
    assert decode_behind(tokenizer, [prompt], [ids]) == [" The answer"]


# -- special tokens and chats -----------------------------------------------------------------------------------------

LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = LLAMA_2.replace(" {{ eos_token }}", "{{ eos_token }}")
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
LINE_AFTER = PHI.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>\n")  # the generation prompt has no line break
THINKS = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
CHAT = [{"role": "user", "content": "What is 2 + 3?"}]


def chat_of(kind, template):
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = template
    ids = tokenizer.apply_chat_template([CHAT], add_generation_prompt=True, return_dict=True)["input_ids"]
    return tokenizer, ids, find_leads(tokenizer, [CHAT], ids, {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [LLAMA_2, PHI, CHATML, LINE_AFTER, THINKS])
def test_chats_give_and_take_the_message_alone(kind, template):
    """The assistant's message, as the template would write it, is the text, and is read as the template writes it."""
    tokenizer, prompt_ids, leads = chat_of(kind, template)
    text = "The answer is 5."
    answered = tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": text}], tokenize=False)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    read = encode(tokenizer, prompt_ids, leads, [text], ended=False)
    assert read.unreadable == [False]
    assert response_texts(tokenizer, prompt_ids, leads, read.ids) == [text]
    if template != THINKS:  # else the model thinks before it answers
        assert answered.startswith(rendered)
        whole = tokenizer(answered, add_special_tokens=False)["input_ids"]
        start = len(prompt_ids[0])
        assert whole[:start] == prompt_ids[0] and whole[start:][: len(read.ids[0])] == read.ids[0]


@pytest.mark.parametrize(
    ("kind", "template", "lead"),
    [
        ("llama, legacy", LLAMA_2, " "),
        ("gpt2", LLAMA_2, " "),
        ("llama, legacy", PHI, " "),  # the tokenizer's own, behind a special token
        ("llama, tokenizer.json of old", PHI, " "),
        ("llama", PHI, ""),
        ("gemma", PHI, ""),
        ("qwen2", PHI, ""),
        ("qwen2", LINE_AFTER, "\n"),
        ("qwen2", CHATML, ""),
        ("qwen2", THINKS, ""),
    ],
)
def test_what_stands_before_a_chats_message(kind, template, lead):
    tokenizer, prompt_ids, leads = chat_of(kind, template)
    assert leads == [lead]
    # a response without it is taken as it is
    bare = tokenizer("\n\nSo", add_special_tokens=False)["input_ids"]
    raw = decode_behind(tokenizer, prompt_ids, [bare])
    assert response_texts(tokenizer, prompt_ids, leads, [bare]) == [raw[0].removeprefix(lead)]


@pytest.mark.parametrize(("kind", "lead"), [("llama, legacy", " "), ("llama", ""), ("qwen2", ""), ("gemma", "")])
def test_a_plain_prompt_that_ends_on_a_special_token(kind, lead):
    tokenizer = tokenizer_of(kind)
    prompt = "<|user|>What is 2 + 3?<|end|><|assistant|>"
    prompt_ids = tokenizer([prompt])["input_ids"]
    leads = find_leads(tokenizer, [prompt], prompt_ids, {})
    assert leads == [lead]
    read = encode(tokenizer, prompt_ids, leads, ["The answer"], ended=False)
    assert prompt_ids[0] + read.ids[0] == tokenizer(prompt + "The answer")["input_ids"]
    assert response_texts(tokenizer, prompt_ids, leads, read.ids) == ["The answer"]


def test_a_template_that_takes_no_answer_still_has_a_border():
    template = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + PHI
    assert chat_of("llama, legacy", template)[2] == [" "]


# -- what has no text, and what ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXACT)
def test_half_a_character_is_unreadable_and_harms_no_neighbour(kind):
    tokenizer = tokenizer_of(kind)
    prompt_ids = tokenizer(["Solution: é"] * 3)["input_ids"]
    leads = [""] * 3
    whole = tokenizer(" 日", add_special_tokens=False)["input_ids"]
    good = encode(tokenizer, prompt_ids[:1], leads[:1], [" 5"], ended=False).ids[0]
    texts = response_texts(tokenizer, prompt_ids, leads, [good, whole[:-1], good])
    assert texts[0] == texts[2] == " 5"
    assert texts[1] is None or "\ufffd" in texts[1]
    for learner in map(tokenizer_of, EXACT):
        behind = learner(["Solution: é"] * 3)["input_ids"]
        assert encode(learner, behind, leads, texts).unreadable == [False, True, False]


def test_bytes_that_break_the_prompts_own_characters_have_no_text():
    tokenizer = tokenizer_of("llama, legacy")  # a run of byte tokens is decoded together
    prompt = tokenizer("日")["input_ids"]
    broken = tokenizer.convert_tokens_to_ids(["<0xE6>"])
    assert response_texts(tokenizer, [prompt], [""], [broken]) == [None]
    assert encode(tokenizer, [prompt], [""], [None]).unreadable == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_empty_responses(kind):
    tokenizer = tokenizer_of(kind)
    prompt_ids, leads = borders(tokenizer)
    for lead in ("", " "):
        read = encode(tokenizer, prompt_ids[:1], [lead], [""])
        assert read.ids == [[tokenizer.eos_token_id]] and read.unreadable == [False]
    assert response_texts(tokenizer, prompt_ids[:1], leads[:1], [[]]) == [""]


def test_a_long_prompt_is_decoded_by_its_end_alone(monkeypatch):
    tokenizer = tokenizer_of("gpt2")
    prompt = tokenizer("the sum " * 1000)["input_ids"]
    seen = []
    decode = tokenizer.batch_decode
    monkeypatch.setattr(
        tokenizer, "batch_decode", lambda rows, **kw: (seen.extend(map(len, rows)), decode(rows, **kw))[1]
    )
    assert decode_behind(tokenizer, [prompt], [tokenizer(" is 5")["input_ids"]]) == [" is 5"]
    assert max(seen) < 50


def test_a_long_text_is_encoded_twice_at_most(monkeypatch):
    tokenizer = tokenizer_of("llama, legacy")
    prompt_ids = tokenizer(["Solution:"] * 8)["input_ids"]
    texts = ["The sum is 12. " * 200] * 8
    encoded, call = [], type(tokenizer).__call__

    def counting(self, batch, **kwargs):
        encoded.append(sum(map(len, batch)))
        return call(self, batch, **kwargs)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    read = encode(tokenizer, prompt_ids, [""] * 8, texts)
    assert not any(read.unreadable)
    assert sum(encoded) < 2.2 * sum(map(len, texts))


# -- in the trainer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_agents_grade_and_read_one_and_the_same_text(agent_folders, tmp_path, monkeypatch, chat):
    tokenizers = [llama(legacy=True), byte_level(Qwen2Tokenizer)]
    prompt = CHAT if chat else "What is 2 + 3? Solution:"
    texts = ["The answer is 5.", "5"] if chat else [" The answer is 5.", " 5"]
    for tokenizer, template in zip(tokenizers, (MISTRAL, CHATML), strict=True):
        tokenizer.chat_template = template
        tokenizer.pad_token = tokenizer.eos_token
    written = []

    def generate(agent, prompt_ids, *args, **kwargs):
        tokenizer = agent._tokenizer
        rows = []
        for i, ids in enumerate(prompt_ids):
            said = texts[i % 2]
            if chat:  # as the template writes the message
                answered = [*CHAT, {"role": "assistant", "content": said}]
                whole = tokenizer.apply_chat_template(answered, tokenize=True, return_dict=True)["input_ids"]
                end = tokenizer.convert_tokens_to_ids("<|end|>") if agent.agent_index else tokenizer.eos_token_id
                rows.append(whole[len(ids) : whole.index(end, len(ids))] + [tokenizer.eos_token_id])
            else:
                rows.append(tokenizer(prompt + said)["input_ids"][len(ids) :] + [tokenizer.eos_token_id])
        return rows, None

    def reward(completions, **kwargs):
        said = [c[0]["content"] if chat else c for c in completions]
        written.append(said)
        return [float(i % 3 == 0) for i in range(len(said))]

    monkeypatch.setattr(HACPOAgent, "_generate_single_turn", generate)
    rows = datasets.Dataset.from_list([{"prompt": prompt}] * 4)
    args = config(tmp_path, max_rounds=1, max_completion_length=40, skip_silent_responses=False, beta=0.0)
    # Neither model knows these vocabularies: only the tokens are looked at
    models = [sized(agent_folders["char"], len(t)) for t in tokenizers]
    trainer = HACPOTrainer(models, reward, args, rows, processing_classes=tokenizers, agent_names=["llama", "qwen"])
    plans = {}
    plan = HACPOAgent.plan_updates

    def keep(agent):
        plan(agent)
        plans[agent.agent_index] = [row for batch in agent._plan for row in batch]

    monkeypatch.setattr(HACPOAgent, "plan_updates", keep)
    trainer.train()
    assert written == [texts * 4] * 2
    for learner in plans:
        own, peers = ([tuple(r.completion_ids.tolist()) for r in plans[learner] if (r.source == learner) == is_own]
                      for is_own in (True, False))  # fmt: skip
        assert len(own) == len(peers) == 8
        assert set(own) == set(peers), "both wrote the same, so the learner reads the tokens that it writes"
    assert not any(v for k, v in trainer.state.log_history[0].items() if k.endswith("unreadable"))


def sized(folder, vocabulary):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(vocabulary)
    return model
