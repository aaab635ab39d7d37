"""Keywords of JSON schemas: which stand beside each other, and their values, checked."""

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import inf
from typing import Any, NoReturn

from foredraft.core.errors import OptionError
from foredraft.model.text.json_numbers import Bound, Interval

_MOST = 2**31 - 1
"""That xgrammar counts to."""

_NEVER = frozenset(
    ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
)
_VALUES = ("const", "enum")
"""Keywords beside which others that constrain are refused, but for ``type``."""

_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPED = {
    **dict.fromkeys(_NUMERIC, ("number", "integer")),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems", "unevaluatedItems"), ("array",)),
    **dict.fromkeys(("required", "minProperties", "maxProperties", "properties"), ("object",)),
    **dict.fromkeys(("patternProperties", "propertyNames", "additionalProperties"), ("object",)),
    "unevaluatedProperties": ("object",),
}
"""Keywords that constrain values of one type only, and that type."""

CONSTRAINTS = frozenset(("type", "uniqueItems", *_VALUES, *_NEVER, *_TYPED))
"""Keywords that constrain by themselves."""

_IMPLIED = {
    **dict.fromkeys(("items", "prefixItems", "unevaluatedItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"), "object"),
}
"""Keywords that mean a type where none is given."""

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def refuse(place: str, fault: str) -> NoReturn:
    raise OptionError(f"The grammar's JSON schema cannot be enforced at {place}: {fault}.")


def faults(schema: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about keywords that are not supported, or not beside each other."""
    for key in schema:
        if key in _NEVER:
            yield f"{key} is not supported"
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    alone = next((key for key in _VALUES if key in schema), None)
    for key, needed in _TYPED.items():
        if key not in schema:
            continue
        if alone is not None:
            yield f"{key} beside {alone} is not supported"
        if not set(map(str, types)).intersection(needed) and not (given is None and _implied(schema) in needed):
            yield f'{key} needs "type": "{needed[0]}"'
    if all(key in schema for key in _VALUES):
        yield "const beside enum is not supported"


def _implied(schema: Mapping[str, Any]) -> str | None:
    """The type that a schema without one means, by its keywords."""
    return next((kind for key, kind in _IMPLIED.items() if key in schema), None)


def types_of(schema: Mapping[str, Any], place: str) -> list[str] | None:
    """A schema's types; None for any."""
    given = schema.get("type", _implied(schema))
    if given is None:
        return None
    kinds = given if isinstance(given, list) else [given]
    for kind in kinds:
        if kind not in _TYPES:
            raise OptionError(f'The json_schema grammar is not valid: Unsupported type "{kind}" at {place}.')
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def kinds_of(schema: Mapping[str, Any], place: str = "#") -> set[str]:
    """The types of a schema's values, with integer where there is number."""
    found = types_of(schema, place) or _TYPES
    return {*found, *(["integer"] if "number" in found else [])}


def constants_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of ``const`` or ``enum``; None without."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON, where 1 is 1.0 and not true."""
    return dumps(_plain(one)) == dumps(_plain(other))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in sorted(value)}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def is_kind(value: Any, kind: str) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": number and float(value).is_integer(),
        "number": number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, Mapping),
    }[kind]


def count_of(schema: Mapping[str, Any], key: str, place: str) -> int | None:
    """A keyword's number of characters, items or properties; None without it."""
    value = schema.get(key)
    if value is None and key not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf or value != int(value):
        refuse(place, f"{key} must be a whole number, 0 or more")
    return None if key.startswith("max") and value > _MOST else int(value)


def decimal_of(schema: Mapping[str, Any], key: str, place: str) -> Decimal:
    value = schema[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not Decimal(value).is_finite():
        refuse(place, f"{key} must be a number")
    return Decimal(str(value))


def interval_of(schema: Mapping[str, Any], place: str) -> Interval:
    lows = [Bound(decimal_of(schema, key, place), key != "minimum") for key in _NUMERIC[:4:2] if key in schema]
    highs = [Bound(decimal_of(schema, key, place), key != "maximum") for key in _NUMERIC[1:4:2] if key in schema]
    low = max(lows, key=lambda bound: (bound.value, bound.strict), default=None)
    high = min(highs, key=lambda bound: (bound.value, not bound.strict), default=None)
    return Interval(low, high)


def mapping_of(schema: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    found = schema.get(key, {})
    if not isinstance(found, Mapping):
        refuse(place, f"{key} must be an object")
    return found


def names_of(schema: Mapping[str, Any], place: str) -> list[str]:
    found = schema.get("required", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse(place, "required must be an array of strings")
    return list(dict.fromkeys(found))


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
