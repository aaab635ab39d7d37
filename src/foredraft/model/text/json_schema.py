"""JSON schemas that a grammar can enforce in full; others are refused.

xgrammar ignores keywords that it does not know or cannot combine, so its outputs would not be valid. All that it was
found to ignore (0.2.8) is refused here, with the place in the schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foredraft.core.errors import OptionError

_DEEPEST = 64
"""Levels of nested schemas; the time to compile grows with their cube."""

_NEVER = frozenset(
    ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
)
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Keywords beside which xgrammar ignores all others, the first of them first."""

_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPED = {
    **dict.fromkeys(_NUMERIC, ("number", "integer")),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems"), ("array",)),
    **dict.fromkeys(("required", "minProperties", "maxProperties", "properties"), ("object",)),
    **dict.fromkeys(("patternProperties", "propertyNames", "additionalProperties"), ("object",)),
}
"""Keywords that constrain values of one type only. Most are ignored without that type."""

_IMPLIED = frozenset(("items", "prefixItems", "properties", "patternProperties", "additionalProperties"))
"""Keywords from which xgrammar concludes the type."""


def enforceable(schema: Any) -> Any:
    """The schema as xgrammar should read it: the same, but lengths of strings are patterns.

    xgrammar allows control characters in strings of a limited length, which JSON does not; patterns exclude them.

    Raises:
        OptionError: a keyword cannot be enforced.
    """
    return _read(schema, "#", 0)


def _read(schema: Any, place: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise OptionError(f"The grammar's JSON schema is nested more than {_DEEPEST} levels deep.")
    if not isinstance(schema, Mapping):
        return schema
    fault = next(_faults(schema), None)
    if fault is not None:
        raise OptionError(f"The grammar's JSON schema cannot be enforced at {place}: {fault}.")
    read: dict[str, Any] = {}
    for key, value in schema.items():
        here = f"{place}/{key}"
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            read[key] = {name: _read(part, f"{here}/{name}", depth + 1) for name, part in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, Sequence):
            read[key] = [_read(part, f"{here}/{number}", depth + 1) for number, part in enumerate(value)]
        elif key in ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
            read[key] = _read(value, here, depth + 1)
        else:
            read[key] = value
    if "minLength" in schema or "maxLength" in schema:
        read["pattern"] = rf"^[\s\S]{{{read.pop('minLength', 0)},{read.pop('maxLength', '')}}}$"
    return read


def _faults(schema: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about what cannot be enforced in a schema, its parts apart."""
    for key in schema:
        if key in _NEVER or (key == "uniqueItems" and schema[key]):
            yield f"{key} is not supported"
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    alone = next((key for key in _ALONE if key in schema), None)
    for key, needed in _TYPED.items():
        if key not in schema:
            continue
        if alone is not None:
            yield f"{key} beside {alone} is not supported"
        if not set(types).intersection(needed) and not (given is None and _IMPLIED.intersection(schema)):
            yield f'{key} needs "type": "{needed[0]}"'
    if alone is not None and (others := [key for key in _ALONE if key in schema and key != alone]):
        yield f"{others[0]} beside {alone} is not supported"
    if alone in ("$ref", "anyOf", "oneOf", "allOf") and given is not None:
        yield f"type beside {alone} is not supported"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf of several schemas is not supported"
    if isinstance(ref := schema.get("$ref"), str) and not ref.startswith("#"):
        yield f"$ref must start with #, not {ref!r}"
    if "multipleOf" in schema and "number" in types:
        yield 'multipleOf needs "type": "integer"'
    yield from _object_faults(schema)
    yield from _string_faults(schema)


def _object_faults(schema: Mapping[str, Any]) -> Iterator[str]:
    required, known = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(known, Mapping):
        for name in required:
            if name not in known:
                yield f"the required property {name!r} is not in properties"


def _string_faults(schema: Mapping[str, Any]) -> Iterator[str]:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and any(mark in pattern for mark in ("(?=", "(?!", "(?<")):
        yield "patterns with look-around or named groups are not supported"
    for key in ("minLength", "maxLength"):
        if key not in schema:
            continue
        for other in ("pattern", "format"):
            if other in schema:
                yield f"{key} beside {other} is not supported"
        if not isinstance(schema[key], int) or isinstance(schema[key], bool) or schema[key] < 0:
            yield f"{key} must be a whole number, 0 or more"
    if "minLength" in schema and "maxLength" in schema and schema["minLength"] > schema["maxLength"]:
        yield "minLength is greater than maxLength"
