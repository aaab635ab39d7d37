"""The Responses interface, by the official client: what a chat says, in other bodies and events."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest
import servers
from openai.types.responses import ResponseFunctionToolCall

from foredraft.serve.responses.chat import chat_of
from foredraft.serve.responses.schema import ResponsesRequest

JSON = "application/json"
NEW = 12
GREEDY: Any = {"model": servers.NAME, "max_output_tokens": NEW, "temperature": 0.0}
ASKED = "say something"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'
TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]

TEXT_EVENTS = {f"response.{name}" for name in ("output_text.delta", "output_text.done")} | {
    f"response.content_part.{name}" for name in ("added", "done")
}


def library(messages: Any, **options: Any) -> Any:
    return servers.generator().generate(messages, max_new_tokens=NEW, **options)


def chat(body: dict[str, Any]) -> dict[str, Any]:
    return chat_of(ResponsesRequest.model_validate(body)).model_dump(exclude_unset=True, exclude_none=True)


def test_a_response_is_the_librarys(client: openai.OpenAI):
    answer = client.responses.create(input=ASKED, instructions="Be brief.", **GREEDY)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    expected = library(turns)
    assert answer.output_text == expected.text and answer.model == servers.NAME
    assert answer.id.startswith("resp_") and answer.output[0].id is not None and answer.output[0].id.startswith("msg_")
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == NEW
    assert answer.usage.total_tokens == answer.usage.input_tokens + NEW
    assert (answer.instructions, answer.max_output_tokens, answer.temperature) == ("Be brief.", NEW, 0.0)
    found = answer.model_extra or {}
    assert found["lossless"] is True and found["metrics"]["speculative_decoding"]["num_spec_steps"] == NEW


def test_an_answer_that_ends_is_complete(client: openai.OpenAI):
    text = library([{"role": "user", "content": ASKED}]).text
    answer = client.responses.create(input=ASKED, extra_body={"stop": [text[4:6]]}, **GREEDY)
    assert (answer.status, answer.output_text) == ("completed", text[: text.index(text[4:6])])
    assert answer.incomplete_details is None and answer.output[0].status == "completed"


def test_sampling_options_reach_the_model(client: openai.OpenAI):
    sampled = {**GREEDY, "temperature": 0.9, "top_p": 0.8, "extra_body": {"seed": 11, "top_k": 20}}
    answer = client.responses.create(input=ASKED, **sampled)
    turns = [{"role": "user", "content": ASKED}]
    assert answer.output_text == library(turns, temperature=0.9, top_p=0.8, seed=11, top_k=20).text
    assert (answer.temperature, answer.top_p) == (0.9, 0.8)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_events_of_openai_and_joins_to_the_whole(client: openai.OpenAI, logprobs: bool):
    more: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} if logprobs else {}
    whole = client.responses.create(input=ASKED, **GREEDY, **more)
    events: list[Any] = list(client.responses.create(input=ASKED, stream=True, **GREEDY, **more))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(event.delta for event in deltas) == whole.output_text
    message: Any = whole.output[0]
    found = [one for event in deltas for one in event.logprobs]
    assert [(one.token, one.logprob) for one in found] == [
        (one.token, one.logprob) for one in message.content[0].logprobs
    ]
    assert len(found) == (NEW if logprobs else 0) and all(len(one.top_logprobs) == 2 for one in found)
    last = events[-1].response
    assert (last.usage, last.output_text, last.status) == (whole.usage, whole.output_text, "incomplete")
    parts = {(event.item_id, event.output_index, event.content_index) for event in [*deltas, events[3], events[-4]]}
    assert parts == {(events[2].item.id, 0, 0)} == {(events[-2].item.id, 0, 0)}
    assert {event.response.id for event in (events[0], events[1], events[-1])} == {last.id}


def test_the_clients_own_stream_collects_the_response(client: openai.OpenAI):
    text = library([{"role": "user", "content": ASKED}]).text
    options: Any = {**GREEDY, "extra_body": {"stop": [text[8:10]]}}
    with client.responses.stream(input=ASKED, **options) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(pieces) == client.responses.create(input=ASKED, **options).output_text
    assert final.status == "completed" and final.usage is not None


@pytest.mark.parametrize("before", ["", "So. "])
def test_calls_are_items_whole_and_in_a_stream(client: openai.OpenAI, says: Callable[[str], None], before: str):
    says(f"{before}{CALL}{CALL}")
    options: Any = {"model": servers.NAME, "input": "add!", "tools": TOOLS, "extra_headers": {"x-request-id": "seven"}}
    whole = client.responses.create(**options)
    assert whole.output_text == before
    calls = [item for item in whole.output if isinstance(item, ResponseFunctionToolCall)]
    assert len(whole.output) == len(calls) + bool(before) == 2 + bool(before)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1, "b": [2]})] * 2
    assert [(call.id, call.call_id) for call in calls] == [
        ("fc_seven_0", "call-seven-0-0"),
        ("fc_seven_1", "call-seven-0-1"),
    ]
    events: list[Any] = list(client.responses.create(stream=True, **options))
    called = [event.type.removeprefix("response.") for event in events if event.type not in TEXT_EVENTS]
    one = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    around = ["output_item.added", "output_item.done"] if before else []
    assert called == ["created", "in_progress", *around, *one, *one, events[-1].type.removeprefix("response.")]
    assert events[-1].response.output == whole.output
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == list(range(len(whole.output)))
    assert [event.item for event in done] == whole.output


def test_a_call_is_answered_in_the_next_turn(client: openai.OpenAI, says: Callable[[str], None]):
    says(f"So. {CALL}")
    turns: list[Any] = [{"role": "user", "content": "1 + [2]?"}]
    answer = client.responses.create(model=servers.NAME, input=turns, tools=TOOLS)
    call: Any = answer.output[-1]
    turns += answer.output
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "three"})
    sent = json.loads(json.dumps([*turns[:1], *(item.model_dump(exclude_unset=True) for item in turns[1:3]), turns[3]]))
    assert chat({"input": sent})["messages"] == [
        {"role": "user", "content": "1 + [2]?"},
        {
            "role": "assistant",
            "content": "So. ",
            "tool_calls": [{"id": call.call_id, "function": {"name": "add", "arguments": call.arguments}}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "three"},
    ]
    says("3")
    assert client.responses.create(model=servers.NAME, input=turns, tools=TOOLS).output_text == "3"


def test_items_become_turns():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    body = {
        "instructions": "I",
        "input": [
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": parts},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": parts},
            {"type": "function_call_output", "call_id": "2", "output": "c"},
            {"role": "system", "content": "S"},
        ],
    }
    calls = [{"id": n, "function": {"name": name, "arguments": "{}"}} for n, name in (("1", "f"), ("2", "g"))]
    assert chat(body)["messages"] == [
        {"role": "system", "content": "I\n\nD"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "2", "content": "c"},
        {"role": "system", "content": "S"},
    ]


def test_options_become_those_of_a_chat():
    schema = {"type": "object"}
    given = {
        "input": "a",
        "tools": [{**TOOLS[0], "strict": True, "description": "d"}],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        "chat_template_kwargs": {"x": 1},
        "structured_outputs": {"regex": "a"},
        "top_logprobs": 3,
        "seed": 4,
        "max_output_tokens": 5,
    }
    function = {"name": "add", "parameters": schema, "strict": True, "description": "d"}
    assert chat(given) == {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema_": schema, "strict": True},
        },
        "chat_template_kwargs": {"x": 1},
        "structured_outputs": {"regex": "a"},
        "logprobs": True,
        "top_logprobs": 3,
        "seed": 4,
        "max_completion_tokens": 5,
    }


class Digit(pydantic.BaseModel):
    """What the model must say."""

    model_config = pydantic.ConfigDict(extra="forbid")
    a: bool


def test_structured_outputs_are_parsed_by_the_client(client: openai.OpenAI):
    options: Any = {"model": servers.NAME, "input": ASKED, "max_output_tokens": 60}
    answer = client.responses.parse(text_format=Digit, **options)
    assert isinstance(answer.output_parsed, Digit) and answer.status == "completed"
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"
    plain = client.responses.create(text={"format": {"type": "json_object"}}, **options)
    assert plain.output_text.startswith("{")


def test_fields_without_effect_are_taken(client: openai.OpenAI):
    plain = client.responses.create(input=ASKED, **GREEDY)
    given = client.responses.create(
        input=ASKED,
        store=True,
        metadata={"a": "b"},
        reasoning={"effort": "low"},
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        truncation="disabled",
        max_tool_calls=3,
        include=["reasoning.encrypted_content"],
        text={"verbosity": "low"},
        background=False,
        **GREEDY,
    )
    assert given.output_text == plain.output_text and given.metadata == {"a": "b"}
    assert given.model_extra is not None and given.model_extra["store"] is False


@pytest.mark.parametrize(
    ("change", "status", "sentence"),
    [
        ({"model": "other"}, 404, "There is no model 'other'"),
        ({"max_tokens": 5}, 400, "Unknown field 'max_tokens'. Did you mean"),
        ({"temperature": -1.0}, 400, "temperature must be"),
        ({"input": []}, 400, "input"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            400,
            "An item is a message, a reasoning, a function_call or",
        ),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
        ({"input": "a" * 3000}, 400, "the model's context"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, 400, "a tool that is not in tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "needs schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            400,
            "not is not supported",
        ),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"previous_response_id": "resp_1"}, 400, "stores nothing: instead of previous_response_id, send the earlier"),
        ({"conversation": "conv_1"}, 400, "stores nothing: instead of conversation, send"),
        ({"prompt": {"id": "p"}}, 400, "stores nothing: instead of prompt, send its text"),
        ({"background": True}, 400, "stores nothing: instead of background, wait"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_has_an_error_object(
    server: servers.Running, change: dict[str, Any], status: int, sentence: str, stream: bool
):
    answer = server.post({"input": "abc", "max_output_tokens": 2, "stream": stream, **change}, "/v1/responses")
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and sentence in error["message"]


def test_nothing_is_stored(client: openai.OpenAI):
    number = client.responses.create(input=ASKED, **GREEDY).id
    for action in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="This server stores no responses."):
            action(number)


def test_a_stream_that_fails_ends_with_its_error(client: openai.OpenAI, says: Callable[[str], None]):
    says("abc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "tokenizer", lambda: 1 / 0)
        events: list[Any] = list(client.responses.create(input=ASKED, stream=True, **GREEDY))
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    error = events[-1].response.error
    assert events[-1].response.status == "failed" and error.code == "server_error" and error.message


def test_what_an_answer_cannot_repeat_is_refused(server: servers.Running):
    """Schemas hold anything, also what JSON in UTF-8 cannot, and what pydantic will not write."""
    statuses = {}
    for depth in (100, *range(240, 262), 600):
        schema = f'{{"a": {"[" * depth}{"]" * depth}}}'
        body = f'{{"input": "a", "max_output_tokens": 1, "text": {{"format": {{"type": "text", "schema": {schema}}}}}}}'
        for stream in ("false", "true"):
            answer = server.post(
                None, "/v1/responses", content=body[:-1] + f', "stream": {stream}}}', headers={"content-type": JSON}
            )
            assert "response.failed" not in answer.text
            statuses[depth] = answer.status_code
    assert statuses[100] == 200 and statuses[600] == 400 and set(statuses.values()) == {200, 400}
    lone = {"type": "function", "name": "f", "parameters": {"a": "\ud800"}}
    body = json.dumps({"input": "a", "max_output_tokens": 1, "tools": [lone], "tool_choice": "none"})
    answer = server.post(None, "/v1/responses", content=body, headers={"content-type": JSON})
    assert answer.status_code == 400 and "tools or text is not valid Unicode" in answer.json()["error"]["message"]
