"""Structured outputs with the official client: JSON, schemas, regular expressions, choices."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
import servers
from pydantic import BaseModel, Field

import foredraft
from foredraft.core.sampling.grammar import Grammar

MODEL = "sample"
ASK: Any = [{"role": "user", "content": "Describe a person."}]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]
    tags: list[Literal["red", "green"]] = Field(max_length=2)


@pytest.fixture(scope="module")
def generator() -> foredraft.Generator:
    return foredraft.load("sample", "draft_model:sample-draft,num_assistant_tokens_schedule=constant")


@pytest.fixture(scope="module")
def sample(generator: foredraft.Generator) -> Iterator[openai.OpenAI]:
    """A client of a server with the bundled model."""
    with servers.served(generator) as running, running.client() as made:
        yield made


def test_parse_returns_the_class(sample: openai.OpenAI):
    answer = sample.chat.completions.parse(
        model=servers.NAME, messages=ASK, response_format=Person, max_tokens=100, temperature=1.0, seed=2, n=4
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)
    assert answer.usage is not None


def test_a_stream_is_the_librarys_text(sample: openai.OpenAI, generator: foredraft.Generator):
    schema: Any = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
    stream = sample.chat.completions.create(
        model=servers.NAME,
        messages=ASK,
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=100,
        temperature=0.0,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == generator.generate(ASK, grammar=Person, max_new_tokens=100).text
    Person.model_validate_json(text)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4}}, None),
        ({"json": '{"type": "boolean"}'}, None),
        ({"regex": "[ab]{3,5}"}, Grammar.regex("[ab]{3,5}")),
        ({"choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
        ({"grammar": 'root ::= "x" root | "y"'}, Grammar.ebnf('root ::= "x" root | "y"')),
    ],
)
def test_structured_outputs(
    sample: openai.OpenAI, generator: foredraft.Generator, given: dict[str, Any], grammar: Grammar | None
):
    answer = sample.completions.create(
        model=servers.NAME,
        prompt="Say it:",
        max_tokens=40,
        temperature=0.0,
        extra_body={"structured_outputs": given},
    )
    expected = generator.generate("Say it:", grammar=grammar or given["json"], max_new_tokens=40)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, expected.finish_reason)


def test_any_json_object(sample: openai.OpenAI):
    answer = sample.chat.completions.create(
        model=servers.NAME, messages=ASK, response_format={"type": "json_object"}, max_tokens=200, temperature=0.0
    )
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "json_schema needs json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        'Unsupported type "nothing"',
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "not is not supported",
    ),
    ({"response_format": {"type": "yaml"}}, "type"),
    ({"response_format": {"type": "text", "schema": {}}}, "Unknown field 'schema'"),
    ({"structured_outputs": {"regex": "("}}, "parenthesis is not closed"),
    ({"structured_outputs": {"choice": []}}, "one or more strings"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, 'Rule "x" is not defined'),
    ({"structured_outputs": {"json": "{"}}, "is not JSON"),
    ({"structured_outputs": {}}, "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of"),
    ({"structured_outputs": {"guided": "a"}}, "Unknown field 'guided'"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "Give either"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_bad_grammar_is_a_400_before_anything_runs(sample: openai.OpenAI, fields: dict[str, Any], said: str):
    with pytest.raises(openai.BadRequestError, match=re.escape(said)) as caught:
        sample.chat.completions.create(model=servers.NAME, messages=ASK, max_tokens=4, extra_body=fields, stream=True)
    assert isinstance(caught.value.body, dict) and caught.value.body["code"] == 400
