"""Chat templates see messages as they were given."""

from collections.abc import Sequence
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dialects import dialect
from foredraft.core.errors import PromptError
from foredraft.model.text.tokenizer import Message, Tokenizer

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT: list[Message] = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
]
EACH = "{% for m in messages %}<{{ m['role'] }}>REST{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
CALLS = "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}"
ASKS = EACH.replace(
    "REST", "{% if m['content'] is none %}" + CALLS + "{% elif m['content'] is defined %}{{ m['content'] }}{% endif %}"
)
ADDS = EACH.replace("REST", "{{ ' ' + m['content'] }}" + CALLS)
PRINTS = EACH.replace("REST", "{{ m['content'] }}" + CALLS)
OR = EACH.replace("REST", "{{ m['content'] or 'nothing' }}" + CALLS)


def told(template: str) -> Tokenizer:
    inner = dialect("bytes").inner
    inner.chat_template = template
    return Tokenizer(inner)


def text(template: str, messages: Sequence[Message], **options: Any) -> str:
    tokenizer = told(template)
    return tokenizer.decode(tokenizer.encode_chat(messages, **options), special=True)


@pytest.mark.parametrize(
    ("template", "said"),
    [(ASKS, "add"), (ADDS, " add"), (PRINTS, "add"), (OR, "nothingadd")],
    ids=lambda each: each[:60],
)
def test_a_call_without_content_stays_in_the_history(template: str, said: str):
    space = " " if template is ADDS else ""
    assert text(template, CHAT) == f"<user>{space}1 + 2?<assistant>{said}<tool>{space}3<go>"


@pytest.mark.parametrize("template", [ASKS, OR])
def test_what_the_template_asks_for_is_what_jinja_gives_it(template: str):
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert text(template, CHAT) == jinja.from_string(template).render(messages=CHAT, add_generation_prompt=True)


def test_other_fields_that_are_none():
    """As messages of OpenAI's library have them."""
    strict = EACH.replace(
        "REST", "{{ m['content'] }}{% if 'tool_calls' in m %}" + CALLS.replace(" or []", "") + "{% endif %}"
    )
    chat: list[Message] = [{"role": "user", "content": "None of it", "tool_calls": None, "name": None}]
    assert text(strict, chat) == "<user>None of it<go>"
    named = EACH.replace("REST", "{% if m['name'] is none %}nobody{% endif %}: {{ m['content'] }}")
    assert text(named, chat) == "<user>nobody: None of it<go>"


def test_a_template_that_refuses_says_why():
    refuses = "{{ raise_exception('no calls here') if messages[1]['tool_calls'] else '' }}"
    with pytest.raises(PromptError, match="no calls here"):
        text(refuses, CHAT)


def test_text_parts_are_lines():
    parts = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
    chat: list[Message] = [{"role": "user", "content": parts}]
    assert text(PRINTS, chat) == "<user>one\ntwo\nthree<go>"


@pytest.mark.parametrize("ending", ["answer", "open", "closed"])
def test_without_such_fields_it_is_transformers_own_text(ending: Any):
    chat: list[Message] = [{"role": "user", "content": "a <b>"}, {"role": "assistant", "content": "Sure: "}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = "{{ eos_token }}{{ tools | tojson if tools }}{{ extra }}" + PRINTS
    inner = told(template).inner
    options: Any = {"add_generation_prompt": ending == "answer", "continue_final_message": ending == "open"}
    expected = inner.apply_chat_template(chat, tools=[tool], tokenize=False, extra="x", **options)
    assert text(template, chat, tools=[tool], options={"extra": "x"}, ending=ending) == expected
