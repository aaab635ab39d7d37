"""Grammars that an output must match, as values. For how they are compiled see ``model/text/grammar.py``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from foredraft.core.errors import OptionError, kind_of


@runtime_checkable
class SchemaClass(Protocol):
    """A class that knows its JSON schema: a pydantic model."""

    def model_json_schema(self) -> dict[str, Any]:
        """The JSON schema of the class."""
        ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match, from its first token to its end. Made by the functions below; hashable.

    A request with a grammar draws from the target's law given that every next token is legal: the logits of illegal
    tokens are -inf before penalties, temperature and truncation apply. End-of-sequence ids are legal where the output
    is complete, and nowhere else.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: str

    @classmethod
    def json(cls) -> "Grammar":
        """Any JSON value, in one line."""
        return cls("json_schema", "{}")

    @classmethod
    def json_schema(cls, schema: "Schema") -> "Grammar":
        """JSON that a schema allows, in one line, as ``json.dumps`` writes it.

        Properties come in the schema's order. Where it names some, by ``properties`` or ``patternProperties``, others
        are not generated unless ``additionalProperties`` allows them. Keywords of objects or arrays without a type
        mean that type. A keyword that a grammar cannot enforce is refused when the grammar is compiled.

        Args:
            schema: a mapping, its JSON text, or a pydantic class.

        Raises:
            OptionError: it is none of these.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise OptionError(f"The grammar's JSON schema is not JSON: {error}.") from None
        elif isinstance(schema, type) and isinstance(schema, SchemaClass):
            schema = schema.model_json_schema()
        if not isinstance(schema, (Mapping, bool)):
            raise OptionError(f"A JSON schema is a mapping, its JSON text or a pydantic class, not {kind_of(schema)}.")
        return cls("json_schema", _json("grammar's JSON schema", schema))

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A regular expression that the whole output matches; without look-around, back-references and flags.

        It means what ECMA-262, Python and Rust agree on; classes such as ``\\d`` are of ASCII, ``.`` is no line end.
        """
        return cls("regex", _text("regular expression", pattern))

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """One of several strings.

        Raises:
            OptionError: there are none, or one is not a string.
        """
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise OptionError(f"A grammar's choices are a list of one or more strings, not {choices!r}.")
        texts = [json.dumps(_text("choice", choice), ensure_ascii=False) for choice in choices]
        return cls("ebnf", "root ::= " + " | ".join(texts))

    @classmethod
    def ebnf(cls, text: str) -> "Grammar":
        """A context-free grammar in GBNF, llama.cpp's form of EBNF; its first rule is called ``root``."""
        return cls("ebnf", _text("EBNF", text))

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any]) -> "Grammar":
        """Text with tagged parts that follow grammars of their own, in xgrammar's format of structural tags."""
        if not isinstance(tag, Mapping):
            raise OptionError(f"A structural tag is a mapping, not {kind_of(tag)}.")
        return cls("structural_tag", _json("structural tag", tag))


Schema = Mapping[str, Any] | str | bool | SchemaClass | type
GrammarLike = Grammar | Mapping[str, Any] | str | SchemaClass | type
"""A grammar, "json", or a JSON schema as a mapping, its JSON text or a pydantic class."""


def as_grammar(given: Any) -> Grammar | None:
    """The grammar that a user means; None for None.

    Raises:
        OptionError: it is not a grammar in any form.
    """
    if given is None or isinstance(given, Grammar):
        return given
    if given == "json":
        return Grammar.json()
    if isinstance(given, Mapping) or (isinstance(given, type) and isinstance(given, SchemaClass)):
        return Grammar.json_schema(given)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return Grammar.json_schema(given)
    raise OptionError(
        f'grammar must be a JSON schema (a mapping, its JSON text or a pydantic class), "json", or a foredraft.Grammar '
        f"such as Grammar.regex(...), not {given!r}."
    )


def _text(what: str, text: Any) -> str:
    """A string of valid Unicode. Raises ``OptionError``: it is not."""
    if not isinstance(text, str):
        raise OptionError(f"A grammar's {what} must be a string, not {kind_of(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"A grammar's {what} is not valid Unicode: {error.reason}.") from None
    return text


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"The {what} cannot be written as JSON: {error}.") from None
