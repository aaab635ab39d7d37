"""Reasoning is a field of its own, whole and in streams, and is taken back; calls that it quotes are none."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import servers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken

import tiny
from dialects import dialect, size
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.serve.convert import Converter
from foredraft.serve.reasoning import ReasoningParser, split

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHAT: Any = [{"role": "user", "content": "add!"}]
QUOTED = f"<think> Maybe {CALL}? No. </think>  Hello <think>"


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("plain", False, ("", "plain")),
        (" a <think>b</think>", False, ("", " a <think>b</think>")),
        ("<think>a</think>b", False, ("a", "b")),
        (" \n<think>\n a \n</think>\n\n b ", False, ("a", "b ")),
        ("<think>\n\n</think>\n\nb", False, ("", "b")),
        ("<think>cut", False, ("cut", "")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<thi", False, ("", "<thi")),
        ("", False, ("", "")),
        ("a</think>b</think>", True, ("a", "b</think>")),
        ("<think>a</think>b", True, ("a", "b")),
        ("a", True, ("a", "")),
        (" ", True, ("", "")),
    ],
)
def test_reasoning_is_told_from_content(text: str, begun: bool, expected: Any):
    assert split(text, begun) == expected


@settings(max_examples=150)
@given(st.lists(st.sampled_from([*"<a \n>", "<think>", "</think>", "</", "think>"])), st.booleans(), st.data())
def test_a_stream_of_any_parts_gives_the_same(parts: list[str], begun: bool, data: st.DataObject):
    whole = text = "".join(parts)
    parser, reasoning, content = ReasoningParser(begun), "", ""
    while text:
        count = data.draw(st.integers(1, len(text)))
        new = parser.push(text[:count])
        reasoning, content, text = reasoning + new.reasoning, content + new.content, text[count:]
    rest = parser.finish()
    assert (reasoning + rest.reasoning, content + rest.content) == split(whole, begun)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, str, list[Any]]:
    reasoning, content, calls = "", "", []
    for chunk in client.chat.completions.create(stream=True, **options):
        delta: Any = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        calls += delta.tool_calls or []
    return reasoning, content, calls


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_quoted_call_is_none(client: openai.OpenAI, says: Callable[[str], None], tools: Any):
    says(QUOTED)
    options: Any = {"model": servers.NAME, "messages": CHAT, **({"tools": tools} if tools else {})}
    answer = client.chat.completions.create(**options)
    message: Any = answer.choices[0].message
    wanted = (f"Maybe {CALL}? No.", "Hello <think>")
    assert (message.reasoning_content, message.content, message.tool_calls) == (*wanted, None)
    assert streamed(client, **options) == (*wanted, [])
    details = answer.usage and answer.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == QUOTED.index("</think>") + 8


def test_a_call_behind_reasoning_is_one(client: openai.OpenAI, says: Callable[[str], None]):
    says(f"<think>add</think>{CALL}")
    options: Any = {"model": servers.NAME, "messages": CHAT, "tools": TOOLS}
    message: Any = client.chat.completions.create(**options).choices[0].message
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == ("add", None, 1)
    reasoning, content, calls = streamed(client, **options)
    assert (reasoning, content, len(calls)) == ("add", "", 1)


def test_reasoning_of_no_output_has_no_field(client: openai.OpenAI, says: Callable[[str], None]):
    says("plain")
    answer = client.chat.completions.create(model=servers.NAME, messages=CHAT)
    assert "reasoning_content" not in answer.choices[0].message.model_dump(exclude_unset=True)
    assert answer.usage and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_response_has_an_item_of_it(client: openai.OpenAI, says: Callable[[str], None]):
    says(f"<think>so</think>Well. {CALL}")
    options: Any = {"model": servers.NAME, "input": "add!", "tools": [{"type": "function", "name": "add"}]}
    whole = client.responses.create(**options)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    first: Any = whole.output[0]
    assert [part.text for part in first.content] == ["so"] and whole.output_text == "Well. "
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == len("<think>so</think>")
    with client.responses.stream(**options) as stream:
        events = list(stream)
    last: Any = events[-1]
    plain = {"exclude": {"id", "call_id", "parsed_arguments", "content"}}
    assert [each.model_dump(**plain) for each in last.response.output] == [
        each.model_dump(**plain) for each in whole.output
    ]
    names = [event.type for event in events]
    assert names.index("response.reasoning_text.done") < names.index("response.output_text.delta")
    added: Any = [event for event in events if event.type == "response.output_item.added"]
    assert [(each.output_index, each.item.type) for each in added] == [
        (0, "reasoning"),
        (1, "message"),
        (2, "function_call"),
    ]
    says("3")  # it is sent back
    items: Any = [{"role": "user", "content": "add!"}, *[item.model_dump() for item in whole.output]]
    results: Any = [{"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "3"}]
    assert client.responses.create(model=servers.NAME, input=[*items, *results]).output_text == "3"


THINKING = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}{{ k ~ v }}"
    "{% endfor %}!{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    "{# <tool_call> [TOOL_CALLS] #}{% if tools %}{% endif %}"
)


@pytest.fixture(scope="module")
def marked() -> Iterator[servers.Running]:
    """A model whose prompts end with <think>, in whose vocabulary the tags are special tokens."""
    inner = dialect("bytes").inner
    inner.add_tokens(
        [AddedToken(each, special=True) for each in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    inner.chat_template = THINKING
    model = CausalLM(tiny.build("llama", vocab_size=size("bytes") + 4, max_position_embeddings=1024))
    with servers.served(tiny.generator(model, tokenizer=Tokenizer(inner))) as running:
        yield running


def prompt(running: servers.Running, messages: list[Any]) -> str:
    ids = running.post({"messages": messages}, "/tokenize").json()["tokens"]
    return running.post({"tokens": ids}, "/detokenize").json()["prompt"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_taken_back(marked: servers.Running, name: str):
    chat: Any = [*CHAT, {"role": "assistant", "content": "3", name: "1 + 2"}, *CHAT]
    assert "[assistant]<think>1 + 2</think>3[user]" in prompt(marked, chat)
    cut: Any = [*CHAT, {"role": "assistant", "content": None, name: "1 + 2"}, *CHAT]
    assert "[assistant]<think>1 + 2</think>[user]" in prompt(marked, cut)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("{}", ""), ("", ""), (" ", ""), ("null", ""), (None, ""), ('{"a": 1}', "a1"), ({"a": None}, "aNone")],
)
def test_arguments_in_the_history_are_objects(marked: servers.Running, arguments: Any, said: str):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    assert f"[assistant]{said}![tool]3" in prompt(marked, chat)


def test_empty_fields_of_an_answer_come_back_with_the_history(marked: servers.Running):
    empty: Any = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
    said: Any = {"role": "assistant", "content": "3"}
    assert prompt(marked, [*CHAT, {**said, **empty}, *CHAT]) == prompt(marked, [*CHAT, said, *CHAT])
    for name, value in (("refusal", "No."), ("audio", {"id": "a"}), ("annotations", [{"type": "url_citation"}])):
        refused = marked.post({"messages": [*CHAT, {**said, name: value}, *CHAT]}, "/tokenize")
        assert refused.status_code == 400 and name in refused.text


def force(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Have the model say these tokens."""
    made = Converter._params

    def params(self: Converter, body: Any, *rest: Any) -> SamplingParams:
        own = made(self, body, *rest)
        options = {name: getattr(own, name) for name in own.__slots__}
        start = len(self._chat_ids(body, body.messages, body.called))

        def processor(given: Any, scores: Any) -> Any:
            scores[:] = -float("inf")
            scores[:, ids[min(given.shape[1] - start, len(ids) - 1)]] = 0.0
            return scores

        return SamplingParams(**{**options, "logits_processor": (processor,), "max_new_tokens": len(ids)})

    monkeypatch.setattr(Converter, "_params", params)


@pytest.mark.parametrize("stream", [False, True])
def test_tags_that_are_special_tokens(marked: servers.Running, monkeypatch: pytest.MonkeyPatch, stream: bool):
    tokenizer = marked.generator.tokenizer
    assert tokenizer is not None
    body = f"It is easy: {CALL} it is.\n</think>\n\nHere: {CALL}<|end|>"
    ids = list(tokenizer.inner(body, add_special_tokens=False)["input_ids"])
    assert sum(token in tokenizer.token_bytes.names for token in ids) == 6
    force(monkeypatch, ids)
    with marked.client() as client:
        options: Any = {"model": servers.NAME, "messages": CHAT, "tools": TOOLS}
        if stream:
            reasoning, content, calls = streamed(client, **options)
        else:
            message: Any = client.chat.completions.create(**options).choices[0].message
            reasoning, content, calls = message.reasoning_content, message.content, message.tool_calls
        assert (reasoning, content.strip()) == (f"It is easy: {CALL} it is.", "Here:")
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}]


def test_an_answer_of_a_grammar_is_no_reasoning(marked: servers.Running):
    body: Any = {"messages": CHAT, "max_tokens": 40, "structured_outputs": {"choice": ['{"a": 1}']}}
    (choice,) = marked.post(body, "/v1/chat/completions").json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": '{"a": 1}'}
