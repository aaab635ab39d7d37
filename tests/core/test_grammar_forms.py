"""Grammars as values: the forms in which they are given."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar, as_grammar
from foredraft.core.sampling.params import SamplingParams

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Person(BaseModel):
    name: str


@pytest.mark.parametrize("given", [SCHEMA, json.dumps(SCHEMA), f" {json.dumps(SCHEMA)}\n", Grammar.json_schema(SCHEMA)])
def test_a_schema_in_any_form_is_the_same_grammar(given: Any):
    assert SamplingParams(grammar=given).grammar == Grammar.json_schema(SCHEMA)


def test_a_pydantic_class_is_its_schema():
    grammar = SamplingParams(grammar=Person).grammar
    assert grammar == Grammar.json_schema(Person)
    assert grammar is not None and json.loads(grammar.text) == Person.model_json_schema()


def test_other_forms():
    assert as_grammar(None) is None
    assert as_grammar("json") == Grammar.json()
    assert Grammar.choice(['say "é"', "back\\slash", "new\nline"]).text == (
        'root ::= "say \\"é\\"" | "back\\\\slash" | "new\\nline"'
    )
    assert len({Grammar.regex("a"), Grammar.regex("a"), Grammar.ebnf("a"), Grammar.structural_tag({"a": 1})}) == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: as_grammar("yes|no"), "must be a JSON schema"),
        (lambda: as_grammar(3), "must be a JSON schema"),
        (lambda: as_grammar(int), "must be a JSON schema"),
        (lambda: as_grammar("{"), "is not JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "is not JSON"),
        (lambda: Grammar.json_schema("3"), "is a mapping, its JSON text or a pydantic class, not an int"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "cannot be written as JSON"),
        (lambda: Grammar.regex(b"a"), "regular expression must be a string, not a bytes"),
        (lambda: Grammar.regex("\ud800"), "is not valid Unicode"),
        (lambda: Grammar.choice([]), "a list of one or more strings"),
        (lambda: Grammar.choice("ab"), "a list of one or more strings"),
        (lambda: Grammar.choice(["a", 3]), "choice must be a string, not an int"),
        (lambda: Grammar.ebnf(None), "EBNF must be a string"),
        (lambda: Grammar.structural_tag("tag"), "A structural tag is a mapping, not a str"),
        (lambda: Grammar.structural_tag({"a": object()}), "cannot be written as JSON"),
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, said: str):
    with pytest.raises(OptionError, match=said):
        make()
