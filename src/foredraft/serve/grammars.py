"""Grammars of requests, from OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from foredraft.core.sampling.grammar import Grammar
from foredraft.serve.errors import ApiError
from foredraft.serve.schema import Generation, ResponseFormat, StructuredOutputs


def grammar_of(body: Generation) -> Grammar | None:
    """What the outputs of a request must match; None for anything.

    Raises:
        OptionError: it is not a grammar.
        ApiError: the request asks for two.
    """
    formatted = None if body.response_format is None else _formatted(body.response_format)
    structured = None if body.structured_outputs is None else _structured(body.structured_outputs)
    if formatted is not None and structured is not None:
        raise ApiError(400, "Give either response_format or structured_outputs.", param="structured_outputs")
    return formatted or structured


def _formatted(wanted: ResponseFormat) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_schema({"type": "object"})
    if wanted.json_schema is None:
        raise ApiError(400, "response_format json_schema needs json_schema.", param="response_format")
    return Grammar.json_schema(wanted.json_schema.schema_)


def _structured(wanted: StructuredOutputs) -> Grammar:
    given = wanted.model_dump(exclude_none=True)
    if len(given) != 1:
        known = "json, regex, choice, grammar, json_object, structural_tag"
        raise ApiError(400, f"structured_outputs needs exactly one of {known}.", param="structured_outputs")
    if wanted.regex is not None:
        return Grammar.regex(wanted.regex)
    if wanted.choice is not None:
        return Grammar.choice(wanted.choice)
    if wanted.grammar is not None:
        return Grammar.ebnf(wanted.grammar)
    if wanted.structural_tag is not None:
        return Grammar.structural_tag(wanted.structural_tag)
    return Grammar.json_schema({"type": "object"} if wanted.json_ is None else wanted.json_)
