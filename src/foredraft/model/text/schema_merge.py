"""``allOf``, and keywords beside ``$ref``, ``anyOf`` or ``oneOf``: one schema that allows what all of them allow."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import lcm
from typing import Any
from urllib.parse import unquote

from foredraft.model.text.schema_keywords import (
    CONSTRAINTS,
    constants_of,
    decimal_of,
    kinds_of,
    mapping_of,
    names_of,
    refuse,
    same,
)

_MOST_PARTS = 1000
"""Schemas that are merged in one document."""
_DEEPEST = 64
"""Levels of ``allOf``, ``anyOf`` and ``oneOf`` directly in each other."""
_LEAST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_GREATEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_UNIONS = ("anyOf", "oneOf")


class Document:
    """A schema whose parts are referred to."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def resolved(self, ref: Any, place: str) -> Any:
        """What a ``$ref`` at a place means."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            refuse(place, f"$ref must be # or start with #/, not {ref!r}")
        found = self._root
        for part in ref.split("/")[1:]:
            name = _unquoted(part)
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                refuse(place, f"$ref {ref!r} finds nothing")
        return found


class Merger:
    """Merges the schemas of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._left = _MOST_PARTS
        self._depth = 0

    def merged(self, schema: Any, place: str, seen: tuple[Any, ...] = ()) -> Any:
        """The schema as one of keywords alone, one ``$ref``, or one ``anyOf`` or ``oneOf``; itself if it is one.

        Raises:
            OptionError: no such schema says the same, or there are too many.
        """
        if not isinstance(schema, Mapping) or not any(key in schema for key in ("$ref", "allOf", *_UNIONS)):
            return schema
        self._depth += 1
        if self._depth > _DEEPEST:
            refuse(place, f"more than {_DEEPEST} levels of schemas would have to be merged")
        found = self._merged(schema, place, seen)
        self._depth -= 1
        return found

    def _merged(self, schema: Mapping[str, Any], place: str, seen: tuple[Any, ...]) -> Any:
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", *_UNIONS)}
        later = {key: own.pop(key) for key in _UNEVALUATED if key in own}
        parts = list(self._parts(schema, place))
        if not later and not any(key in CONSTRAINTS for key in own) and len(parts) == 1:
            return self.merged(parts[0], place, seen) if "allOf" in schema else schema
        unions: list[Any] = []
        found: Any = own
        for part in parts:
            self._left -= 1
            if self._left < 0:
                refuse(place, f"more than {_MOST_PARTS} schemas would have to be merged")
            each = self._flat(part, place, seen)
            if isinstance(each, Mapping) and any(key in each for key in _UNIONS):
                unions.append(each)
            else:
                found = _both(found, each, place)
        if not unions:
            return _with(found, later)
        first, *others = unions
        key = next(key for key in _UNIONS if key in first)
        options = [self.merged({"allOf": [found, each, *others]}, place, seen) for each in first[key]]
        return {key: [_with(each, later) for each in options]}

    def _parts(self, schema: Mapping[str, Any], place: str) -> Iterator[Any]:
        if "$ref" in schema:
            yield {"$ref": schema["$ref"]}
        for key in ("allOf", *_UNIONS):
            options = schema.get(key, [True])
            if not isinstance(options, list) or not options:
                refuse(place, f"{key} must be an array of one schema or more")
            if key in schema:
                yield from options if key == "allOf" else [{key: options}]

    def _flat(self, part: Any, place: str, seen: tuple[Any, ...]) -> Any:
        """A part without references, whose ``unevaluated`` keywords see nothing of its neighbours."""
        if not isinstance(part, (Mapping, bool)):
            refuse(place, "a schema is an object, true or false")
        found = self.merged(part, place, seen)
        if isinstance(found, Mapping) and "$ref" in found:
            if found["$ref"] in seen:
                refuse(place, f"$ref {found['$ref']!r} refers to itself")
            return self._flat(self._document.resolved(found["$ref"], place), place, (*seen, found["$ref"]))
        if isinstance(found, Mapping) and (key := next((key for key in _UNIONS if key in found), None)):
            return {key: [_closed(each) for each in found[key]]}
        return _closed(found)


def _closed(schema: Any) -> Any:
    """The schema with ``additionalProperties`` and ``items`` in place of their ``unevaluated`` forms."""
    if not isinstance(schema, Mapping) or not any(key in schema for key in _UNEVALUATED):
        return schema
    found = {key: value for key, value in schema.items() if key not in _UNEVALUATED}
    return found | {other: schema[key] for key, other in _UNEVALUATED.items() if key in schema and other not in schema}


def _with(schema: Any, later: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping) or not later:
        return schema
    if key := next((key for key in _UNIONS if key in schema), None):
        return {key: [_with(each, later) for each in schema[key]]}
    return {**schema, **{key: value for key, value in later.items() if _UNEVALUATED[key] not in schema}}


def _all(one: Any, other: Any) -> Any:
    if one is True or one == other:
        return other
    return one if other is True else False if one is False or other is False else {"allOf": [one, other]}


def _both(one: Any, other: Any, place: str) -> Any:
    """What two schemas of keywords alone both allow."""
    if isinstance(one, bool) or isinstance(other, bool):
        return _all(one, other)
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        refuse(place, "a schema is an object, true or false")
    found: dict[str, Any] = {**one, **other}
    for key in one.keys() & other.keys():
        left, right = one[key], other[key]
        if key in _LEAST + _GREATEST:
            choose = min if key in _LEAST else max
            found[key] = choose(left, right, key=lambda value, key=key: decimal_of({key: value}, key, place))
        elif key in ("pattern", "format") and left != right:
            found[key] = (*_several(left), *_several(right))
        elif key == "multipleOf":
            found[key] = _common(decimal_of(one, key, place), decimal_of(other, key, place))
        elif key == "type":
            found[key] = sorted(kinds_of(one, place) & kinds_of(other, place))
        elif key == "required":
            found[key] = [*names_of(one, place), *names_of(other, place)]
        elif key == "uniqueItems":
            found[key] = bool(left or right)
        elif key == "propertyNames":
            found[key] = _all(left, right)
        elif key in ("not", "if", "then", "else", "contains") and left != right:
            refuse(place, f"{key} is not supported")
    values = [constants_of(each) for each in (one, other)]
    if (left := values[0]) is not None and (right := values[1]) is not None:
        found.pop("const", None)
        found["enum"] = [value for value in left if any(same(value, each) for each in right)]
    if found.get("type") == [] or found.get("enum") == []:
        return False
    return {**found, **_members(one, other, place), **_items(one, other, place)}


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _common(one: Decimal, other: Decimal) -> int | float:
    """The least common multiple."""
    places = max(0, *(-int(each.normalize().as_tuple().exponent) for each in (one, other)))
    found = Decimal(lcm(int(one.scaleb(places)), int(other.scaleb(places)))).scaleb(-places)
    return int(found) if found == int(found) else float(found)


def _members(one: Mapping[str, Any], other: Mapping[str, Any], place: str) -> dict[str, Any]:
    keys = ("properties", "patternProperties", "additionalProperties")
    if not all(any(key in each for key in keys) for each in (one, other)):
        return {}
    if "patternProperties" in one or "patternProperties" in other:
        refuse(place, "patternProperties cannot be merged with the properties of another schema")
    left, right = (mapping_of(each, "properties", place) for each in (one, other))
    rest = [each.get("additionalProperties", True) for each in (one, other)]
    found: dict[str, Any] = {}
    if left or right:
        names = dict.fromkeys([*left, *right])
        found["properties"] = {name: _all(left.get(name, rest[0]), right.get(name, rest[1])) for name in names}
    if "additionalProperties" in one or "additionalProperties" in other:
        found["additionalProperties"] = _all(*rest)
    return found


def _items(one: Mapping[str, Any], other: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not all("items" in each or "prefixItems" in each for each in (one, other)):
        return {}
    first = [each.get("prefixItems", []) for each in (one, other)]
    rest = [each.get("items", True) for each in (one, other)]
    if not all(isinstance(each, list) for each in first):
        refuse(place, "prefixItems must be an array of schemas")
    sides = [[*each, *[more] * (max(map(len, first)) - len(each))] for each, more in zip(first, rest, strict=True)]
    found: dict[str, Any] = {"prefixItems": [_all(*pair) for pair in zip(*sides, strict=True)]} if sides[0] else {}
    return found | ({"items": _all(*rest)} if "items" in one or "items" in other else {})


def _unquoted(part: str) -> str:
    """A name as JSON pointers in a URI fragment write it."""
    return unquote(part).replace("~1", "/").replace("~0", "~")
