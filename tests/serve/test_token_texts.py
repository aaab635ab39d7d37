"""Log-probabilities show tokens by the bytes of the vocabulary, which are the text's."""

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import servers

import tiny
from dialects import TEXTS, dialect, size
from foredraft.engine.request import TokenLogprobs
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.serve.token_texts import TokenTexts

KINDS = ("bytes", "digits", "sentencepiece", "words", "wordpiece")


@pytest.mark.parametrize("name", KINDS)
def test_bytes_join_to_the_text_and_offsets_are_where_tokens_begin(name: str):
    tokenizer, draw = dialect(name), random.Random(1)
    for text in TEXTS:
        tokens = list(tokenizer.inner(text)["input_ids"])
        whole = tokenizer.decode(tokens)
        for cut in {0, *(draw.randrange(len(tokens)) for _ in range(6))}:
            known = tokenizer.decode(tokens[:cut])
            if known.endswith("\ufffd"):
                continue
            texts, joined = TokenTexts(tokenizer, tokens[:cut], len(known)), b""
            for token in tokens[cut:]:
                shown = texts.show(token)
                begin = texts.take(token)
                assert begin == len(known) + len(joined.decode("utf-8", "ignore"))
                joined += shown.raw
                if "\\x" not in shown.text and not shown.special:
                    assert whole[begin : begin + len(shown.text)] == shown.text
            assert known + joined.decode() == whole
            assert texts.offset == len(whole)


def test_alternatives_have_a_name_each_and_the_next_token_its_own():
    """sentencepiece writes some characters in two ways, and special tokens are no text."""
    tokenizer = dialect("sentencepiece")
    vocabulary = tokenizer.inner.get_vocab()
    letter, byte, end = vocabulary["a"], vocabulary["<0x61>"], tokenizer.inner.eos_token_id
    texts = TokenTexts(tokenizer, [vocabulary["b"]])
    top = {letter: -1.0, byte: -2.0, end: -3.0, 10**6: -4.0, vocabulary["<0xF0>"]: -5.0}
    assert list(texts.names(TokenLogprobs(letter, -1.0, top)).values()) == [
        "a",
        f"token_id:{byte}",
        "</s>",
        "",
        "\\xf0",
    ]
    assert texts.names(TokenLogprobs(byte, -2.0, top))[letter] == f"token_id:{letter}"
    names = texts.names(TokenLogprobs(end, -3.0, top))
    assert names[end] == "" and len(set(names.values())) == len(names) == len(top)


@functools.cache
def told(name: str) -> Tokenizer:
    """A tokenizer with a chat template."""
    inner = dialect(name).inner
    inner.chat_template = servers.TEMPLATE
    return Tokenizer(inner)


@pytest.fixture(params=["bytes", "sentencepiece"], scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[servers.Running]:
    name = request.param
    model = CausalLM(tiny.build("llama", vocab_size=size(name), max_position_embeddings=512))
    with servers.served(tiny.generator(model, tokenizer=told(name))) as server:
        yield server


TEXT = " 日本 The quick 🚀🚀 fox, é"
ASKED: Any = {"model": servers.NAME, "max_tokens": 90, "temperature": 1, "seed": 4, "return_token_ids": True}
"""Of the text the bundled alphabet has few characters, so most of it are bytes."""


@pytest.mark.parametrize("stream", [False, True])
def test_chats(running: servers.Running, stream: bool):
    body = {**ASKED, "messages": [{"role": "user", "content": "fox"}], "logprobs": True, "top_logprobs": 7}
    answer = running.post({**body, "structured_outputs": {"choice": [TEXT]}, "stream": stream}, "/v1/chat/completions")
    chunks = [answer.json()] if not stream else events(answer.text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    content = "".join((choice.get("message") or choice["delta"]).get("content") or "" for choice in choices)
    found = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    assert content == TEXT == b"".join(bytes(each["bytes"]) for each in found).decode()
    for each in found:
        assert len(each["top_logprobs"]) == 7
        own = [top["logprob"] for top in each["top_logprobs"] if top["token"] == each["token"]]
        assert not own or each["logprob"] in own


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completions(running: servers.Running, stream: bool, echo: bool):
    body = {**ASKED, "prompt": "The fox 日", "logprobs": 20, "echo": echo, "stream": stream}
    answer = running.post({**body, "structured_outputs": {"choice": [TEXT]}}, "/v1/completions")
    chunks = [answer.json()] if not stream else events(answer.text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    assert text == ("The fox 日" if echo else "") + TEXT
    lists = {
        name: [each for choice in choices for each in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert len(lists["tokens"]) == len(ids) + (len(choices[0]["prompt_token_ids"]) if echo else 0)
    for token, value, top, offset in zip(*lists.values(), strict=True):
        assert len(top or range(20)) == 20
        assert value is None or top is None or top.get(token, value) == value
        assert text[offset : offset + len(token)] == token or "\\x" in token
    whole = "".join(token for token in lists["tokens"] if "\\x" not in token)
    assert "".join(letter for letter in text if letter.isascii()) == "".join(each for each in whole if each.isascii())


def test_tokens_and_recorded_steps_by_name(running: servers.Running):
    answer = running.post({"prompt": "fox 🚀", "return_token_strs": True}, "/tokenize").json()
    tokenizer = running.generator.tokenizer
    assert tokenizer is not None
    assert answer["token_strs"] == [tokenizer.text_of(token) for token in answer["tokens"]]
    assert "\ufffd" not in "".join(answer["token_strs"])
    body = {**ASKED, "prompt": "fox", "return_steps": True, "structured_outputs": {"choice": [" fox"]}}
    (choice,) = running.post(body, "/v1/completions").json()["choices"]
    said = [text for step in choice["steps"] for text in step["emitted_texts"]]
    assert "".join(said).removesuffix("</s>") == " fox"


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
