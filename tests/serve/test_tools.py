"""Tool calls: read from the model's text, whole and in streams, and sent back in the next turn."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
import servers
from hypothesis import given, settings, strategies as st
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from foredraft.serve.tools import ToolParser, parse

TAGGED, BARE, LISTED = "x <tool_call> y", '{"name": f, "parameters": p}', "[AVAILABLE_TOOLS] [TOOL_CALLS]"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHAT: Any = [{"role": "user", "content": "add!"}]


def names(text: str, template: str = TAGGED) -> tuple[str, list[tuple[str, Any]]]:
    found = parse(text, template)
    return found.content, [(call.name, json.loads(call.arguments)) for call in found.calls]


@pytest.mark.parametrize(
    ("text", "template", "expected"),
    [
        (CALL, TAGGED, ("", [("add", {"a": 1, "b": [2]})])),
        (f"Well. {CALL}{CALL}", TAGGED, ("Well. ", [("add", {"a": 1, "b": [2]})] * 2)),
        ('<tool_call>{"name": "now"}', TAGGED, ("", [("now", {})])),
        ("<tool_call>{broken</tool_call>", TAGGED, ("<tool_call>{broken</tool_call>", [])),
        ('<tool_call>{"arguments": {}}</tool_call>', TAGGED, ('<tool_call>{"arguments": {}}</tool_call>', [])),
        ("a < b <tool", TAGGED, ("a < b <tool", [])),
        ('{"name": "f", "parameters": {"x": 1}}', BARE, ("", [("f", {"x": 1})])),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', BARE, ("", [("f", {}), ("g", {})])),
        ('{"a": 1}', BARE, ('{"a": 1}', [])),
        ('so {"name": "f", "parameters": {}}', BARE, ('so {"name": "f", "parameters": {}}', [])),
        ("{", BARE, ("{", [])),
        ('[{"name": "f", "parameters": {}}, {"name": "g"}]', BARE, ("", [("f", {}), ("g", {})])),
        ('[{"name": "f", "parameters": {}}, 3]', BARE, ('[{"name": "f", "parameters": {}}, 3]', [])),
        ("[1] says so", BARE, ("[1] says so", [])),
        (
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
            TAGGED,
            ("", [("f", {}), ("g", {})]),
        ),
        ('<tool_call>{"name": "f", "arguments": {}} and</tool_call>', TAGGED, "itself"),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', TAGGED, ("", [("f", {"a": 1})])),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', TAGGED, ("", [("f", {})])),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', LISTED, ("", [("f", {"a": 1})])),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "x"},{"name": "g"}]', LISTED, ("", [("f", {}), ("g", {})])),
        ('Well. [TOOL_CALLS]{"name": "f", "arguments": {}}', LISTED, ("Well. ", [("f", {})])),
        ('[TOOL_CALLS]f[ARGS]{"a": [1]}[TOOL_CALLS]g[CALL_ID]7x[ARGS]{}', LISTED, ("", [("f", {"a": [1]}), ("g", {})])),
        ('[TOOL_CALLS]f{"a": 1}', LISTED, ("", [("f", {"a": 1})])),
        ('[{"name": "f", "arguments": {"a": "[TOOL"}}]', LISTED, ("", [("f", {"a": "[TOOL"})])),
        ('[TOOL_CALLS] [{"name": "f", "arg', LISTED, ('[TOOL_CALLS] [{"name": "f", "arg', [])),
        ('[TOOL_CALLS] [{"name": "f"}, {"name": "g", "arg', LISTED, ('{"name": "g", "arg', [("f", {})])),
        ("a [TOOL", LISTED, ("a [TOOL", [])),
    ],
)
def test_calls_are_found_and_everything_else_is_content(text: str, template: str, expected: Any):
    assert names(text, template) == ((text, []) if expected == "itself" else expected)


PARTS = [*"<>{} a;[]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "f[ARGS]", '{"name": "f"}', CALL]


@settings(max_examples=150)
@given(st.lists(st.sampled_from(PARTS)), st.data())
def test_a_stream_of_any_parts_gives_the_same(parts: list[str], data: st.DataObject):
    text = "".join(parts)
    template = data.draw(st.sampled_from([TAGGED, BARE, LISTED]))
    parser, content = ToolParser(template), ""
    while text:
        size = data.draw(st.integers(1, len(text)))
        content += parser.push(text[:size])
        text = text[size:]
    rest = parser.finish()
    whole = parse("".join(parts), template)
    assert content + rest.content == whole.content
    assert rest.calls == whole.calls


def test_a_call_reaches_the_client_whole_and_in_a_stream(client: openai.OpenAI, says: Callable[[str], None]):
    says(f"So. {CALL.replace(chr(10), '')}")
    options: Any = {"model": servers.NAME, "messages": CHAT, "tools": TOOLS}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": [2]})
    assert choice.message.content == "So. "
    text, calls = "", []
    for chunk in client.chat.completions.create(stream=True, **options):
        text += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
    assert text == "So. " and [(each.index, each.type) for each in calls] == [(0, "function")]
    assert (calls[0].function.name, calls[0].function.arguments) == (call.function.name, call.function.arguments)
    without = client.chat.completions.create(tool_choice="none", **options).choices[0].message
    assert without.tool_calls is None and without.content == f"So. {CALL.replace(chr(10), '')}"


def test_ids_of_calls_follow_from_that_of_the_request(client: openai.OpenAI, says: Callable[[str], None]):
    """Or a batch that is resumed would not write what an undisturbed one writes."""
    says(2 * CALL.replace("\n", ""))
    named = client.with_options(default_headers={"X-Request-Id": "seven"})
    answer = named.chat.completions.create(model=servers.NAME, messages=CHAT, tools=TOOLS)
    assert [call.id for call in answer.choices[0].message.tool_calls or []] == ["call-seven-0-0", "call-seven-0-1"]


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_calls_tools_and_answers_them(server: servers.Running, says: Callable[[str], None], responses: bool):
    """Over both of OpenAI's interfaces."""

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    says('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    plain: Any = ChatOpenAI(
        model=servers.NAME,
        base_url=f"{server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        use_responses_api=responses,
    )
    model = plain.bind_tools([add])
    asked: Any = [("user", "1 + 2?")]
    answer: Any = model.invoke(asked)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]
    says("3")
    assert model.invoke([*asked, answer, add.invoke(answer.tool_calls[0])]).text == "3"
    assert "".join(part.text for part in model.stream(asked)) == "3"
