"""Fields of chats that clients send: those without effect, and how a prompt ends."""

from pathlib import Path
from typing import Any

import openai
import pytest
import servers

from foredraft.serve.schema import IgnoredInChats

CHAT: Any = [{"role": "user", "content": "say something"}]
GREEDY: Any = {"model": servers.NAME, "max_tokens": 8, "temperature": 0.0}
IGNORED: dict[str, Any] = {
    "user": "u",
    "store": True,
    "metadata": {"topic": "demo"},
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "modalities": ["text"],
    "reasoning_effort": "none",
    "verbosity": "low",
}


def test_fields_without_effect_are_taken(client: openai.OpenAI):
    plain = client.chat.completions.create(messages=CHAT, **GREEDY)
    given = client.chat.completions.create(messages=CHAT, **GREEDY, **IGNORED)
    assert given.choices == plain.choices
    options: Any = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}}
    *_, last = client.chat.completions.create(messages=CHAT, **GREEDY, **options)
    assert last.usage == plain.usage
    with pytest.raises(openai.BadRequestError, match="modalities"):
        client.chat.completions.create(messages=CHAT, modalities=["text", "audio"], **GREEDY)
    with pytest.raises(openai.BadRequestError, match="Unknown field 'web_search_options'"):
        client.chat.completions.create(messages=CHAT, web_search_options={}, **GREEDY)


def test_fields_without_effect_are_in_the_docs():
    assert IGNORED.keys() == IgnoredInChats.model_fields.keys()
    docs = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    (line,) = (line for line in docs.splitlines() if line.startswith("- Taken without effect:"))
    assert all(f"`{name}`" in line for name in IGNORED)


ANSWER = {"role": "assistant", "content": "So it is"}
ENDINGS: list[tuple[list[Any], dict[str, Any], str]] = [
    (CHAT, {}, "[user]say something.[assistant]"),
    (CHAT, {"add_generation_prompt": True}, "[user]say something.[assistant]"),
    (CHAT, {"add_generation_prompt": False}, "[user]say something."),
    (CHAT, {"continue_final_message": True}, "[user]say something"),
    ([*CHAT, ANSWER], {"continue_final_message": True}, "[user]say something.[assistant]So it is"),
    (
        [*CHAT, ANSWER],
        {"continue_final_message": True, "add_generation_prompt": False},
        "[user]say something.[assistant]So it is",
    ),
]
CLOSED = servers.TEMPLATE.replace("(m['content'] or '')", "(m['content'] or '') + '.'")


@pytest.mark.parametrize(("chat", "options", "prompt"), ENDINGS)
def test_a_prompt_ends_as_in_vllm(server: servers.Running, chat: list[Any], options: dict[str, Any], prompt: str):
    """The template closes each turn with a full stop."""
    inner = servers.tokenizer().inner
    plain, inner.chat_template = inner.chat_template, CLOSED
    try:
        ids = server.post({"messages": chat, **options}, "/tokenize").json()["tokens"]
        body = {"messages": chat, **GREEDY, **options, "return_token_ids": True}
        answer = server.post(body, "/v1/chat/completions").json()
    finally:
        inner.chat_template = plain
    assert servers.tokenizer().decode(ids) == prompt
    assert answer["prompt_token_ids"] == ids
    text = servers.generator().generate(ids, max_new_tokens=8).text
    assert answer["choices"][0]["message"]["content"] == text


def test_a_prompt_has_one_end(server: servers.Running):
    for options, sentence in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "Give either add_generation_prompt or"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "is not a variable of the chat template"),
    ):
        answer = server.post({"messages": CHAT, **options}, "/v1/chat/completions")
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    silent = [*CHAT, {"role": "assistant", "tool_calls": calls}]
    answer = server.post({"messages": silent, "continue_final_message": True}, "/v1/chat/completions")
    assert answer.status_code == 400 and "the final message has no" in answer.json()["error"]["message"]
