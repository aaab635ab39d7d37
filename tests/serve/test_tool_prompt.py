"""Tools for models whose chat template has none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers

from foredraft.serve.answers import CalledFunction
from foredraft.serve.schema import ChatRequest
from foredraft.serve.service import converter_for
from foredraft.serve.tool_prompt import TOOL_PROMPT, described
from foredraft.serve.tools import parse

PLAIN = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LISTED = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
ASKED = TOOL_PROMPT % LISTED
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1, 2 + 2?"},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "x", "content": "2"},
    {"role": "tool", "tool_call_id": "y", "content": [{"type": "text", "text": "4"}]},
]
WRITTEN = """\
[assistant]Well.
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
[user]<tool_response>
2
</tool_response>
<tool_response>
4
</tool_response>
[assistant]"""


@pytest.fixture
def plain() -> Iterator[None]:
    inner = servers.tokenizer().inner
    own, inner.chat_template = inner.chat_template, PLAIN
    yield
    inner.chat_template = own


@pytest.fixture(scope="module")
def strict() -> Iterator[servers.Running]:
    with servers.served(servers.generator(), tool_prompt=False) as running:
        yield running


def test_the_prompt_is_that_of_hermes_and_in_the_docs():
    docs = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    before, after = TOOL_PROMPT.split("%s")
    assert f"```\n{before}" in docs and f"{after}\n```" in docs
    assert ASKED.startswith("# Tools\n\nYou may call one or more functions to assist with the user query.\n\n")
    assert f"<tools>\n{LISTED}\n</tools>\n\n" in ASKED
    assert ASKED.endswith('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')


@pytest.mark.parametrize(
    ("chat", "tools", "written"),
    [
        (TURNS, [], f"[user]1 + 1, 2 + 2?\n{WRITTEN}"),
        (TURNS, [ADD], f"[user]{ASKED}\n\n1 + 1, 2 + 2?\n{WRITTEN}"),
        (
            [{"role": "developer", "content": "Be brief."}, *TURNS],
            [ADD],
            f"[system]Be brief.\n\n{ASKED}\n[user]1 + 1, 2 + 2?\n{WRITTEN}",
        ),
        ([{"role": "assistant", "content": "Hello."}], [ADD], f"[user]{ASKED}\n[assistant]Hello.\n[assistant]"),
        (
            [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Add."}],
            [ADD],
            f"[assistant]Hi.\n[user]{ASKED}\n\nAdd.\n[assistant]",
        ),
    ],
)
@pytest.mark.usefixtures("plain")
def test_tools_calls_and_results_become_text(
    server: servers.Running, chat: list[dict[str, Any]], tools: list[dict[str, Any]], written: str
):
    ids = server.post({"messages": chat, "tools": tools}, "/tokenize").json()["tokens"]
    assert servers.tokenizer().decode(ids) == servers.tokenizer().decode(servers.tokenizer().encode(written))


def test_a_template_with_tools_writes_them_itself(server: servers.Running):
    ids = server.post({"messages": TURNS[:1], "tools": [ADD]}, "/tokenize").json()["tokens"]
    assert servers.tokenizer().decode(ids).startswith("[tools]")


def test_messages_are_not_changed():
    before = [{**message} for message in TURNS]
    described(TURNS, [ADD])
    assert before == TURNS


@pytest.mark.usefixtures("plain")
def test_the_prompt_can_be_turned_off(strict: servers.Running):
    answer = strict.post({"messages": TURNS[:1], "tools": [ADD]}, "/v1/chat/completions")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("The model's chat template has no tools, and --no-tool-prompt turns off")
    body = {"messages": TURNS[:1], "tools": [ADD], "tool_choice": "none", "max_tokens": 1}
    assert strict.post(body, "/v1/chat/completions").status_code == 200


@pytest.mark.usefixtures("plain")
def test_a_call_is_forced_and_read_as_with_a_template_of_tools():
    body = ChatRequest.model_validate({"messages": TURNS[:1], "tools": [ADD], "tool_choice": "required"})
    converter = converter_for(servers.generator(), 8)
    described = converter.chat(body)
    servers.tokenizer().inner.chat_template = servers.TEMPLATE
    assert described.params.grammar == converter.chat(body).params.grammar is not None
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert parse(call, described.tools_of or "") == ("", [CalledFunction(name="add", arguments='{"a": 1}')])
