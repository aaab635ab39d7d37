"""Calls that must be made or must be valid: ``tool_choice`` and strict functions as grammars."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
import servers

import foredraft

TAGGED = (
    "{# calls are between <tool_call> tags #}{% if tools %}{{ tools|tojson }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}\nCall: "
)
BARE = TAGGED.replace("<tool_call>", "no")
LISTED = TAGGED.replace("<tool_call>", "[TOOL_CALLS]")
TIME: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/digit"}, "text": {"type": "string", "maxLength": 5}},
            "required": ["a", "text"],
            "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
SCHEMA = jsonschema_rs.validator_for(ADD["function"]["parameters"])


@pytest.fixture(scope="module", params=[TAGGED, BARE, LISTED], ids=["tagged", "bare", "listed"])
def sample(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """A client of a server with the bundled model and a template that has tools."""
    g = foredraft.load("sample", "prompt_lookup")
    assert g.tokenizer is not None
    g.tokenizer.inner.chat_template = request.param
    with servers.served(g) as running, running.client() as made:
        yield made


def asked(client: openai.OpenAI, tools: list[dict[str, Any]], **options: Any) -> list[Any]:
    answer = client.chat.completions.create(
        model=servers.NAME,
        messages=[{"role": "user", "content": "Add 3."}],
        tools=tools,  # type: ignore[arg-type]
        max_tokens=120,
        temperature=1.0,
        seed=4,
        **options,
    )
    return answer.choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_must_be_made_is_made(sample: openai.OpenAI, choice: Any):
    for answer in asked(sample, [TIME, ADD], tool_choice=choice, n=4, parallel_tool_calls=False):
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert not answer.message.content
        assert call.function.name == "add" or (choice == "required" and call.function.arguments == "{}")
        if call.function.name == "add":
            assert SCHEMA.is_valid(json.loads(call.function.arguments))


def test_strict_functions_are_called_rightly_or_not_at_all(sample: openai.OpenAI):
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    for answer in asked(sample, [strict], n=4, logit_bias={str(i): 4.0 for i in braces(sample)}):
        for call in answer.message.tool_calls or []:
            assert SCHEMA.is_valid(json.loads(call.function.arguments))
        if not answer.message.tool_calls:
            assert answer.message.content


def braces(client: openai.OpenAI) -> list[int]:
    """Tokens that calls begin with."""
    tokenizer = foredraft.load("sample", None).tokenizer
    assert tokenizer is not None
    return [tokenizer.encode(text)[0] for text in ("{", "<")]


Refusal = tuple[list[dict[str, Any]], dict[str, Any], str]
JSON: Any = {"type": "json_object"}
NOT: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
REFUSED: list[Refusal] = [
    ([ADD], {"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "a tool that is not in tools"),
    ([ADD], {"tool_choice": "required", "response_format": JSON}, "Give either calls that are enforced"),
    ([NOT], {}, "not is not supported"),
]


@pytest.mark.parametrize(("tools", "options", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_cannot_be_enforced_is_a_400(
    sample: openai.OpenAI, tools: list[dict[str, Any]], options: dict[str, Any], said: str
):
    with pytest.raises(openai.BadRequestError, match=said):
        asked(sample, tools, **options)


def test_a_lax_function_may_have_any_schema(sample: openai.OpenAI):
    lax: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    (answer,) = asked(sample, [lax], tool_choice="required", max_completion_tokens=60)
    assert answer.finish_reason in ("tool_calls", "length")
