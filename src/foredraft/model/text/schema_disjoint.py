"""Whether schemas exclude each other, as those of ``oneOf`` must."""

from collections.abc import Callable, Mapping
from typing import Any

from foredraft.model.text.schema_keywords import constants_of, is_kind, kinds_of, mapping_of, names_of, same

Resolver = Callable[[Any, str], Any]
_DEEPEST = 64


def disjoint(one: Any, other: Any, resolved: Resolver, depth: int = 0) -> bool:
    """Whether it is plain that no value is allowed by both schemas, and written under one of them.

    Args:
        resolved: finds what a ``$ref`` at a place means.
    """
    one, other = _target(one, resolved), _target(other, resolved)
    if one is False or other is False:
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or depth > _DEEPEST:
        return False
    for first, second in ((one, other), (other, one)):
        for key, enough in (("anyOf", all), ("oneOf", all), ("allOf", any)):
            if isinstance(options := first.get(key), list):
                return enough(disjoint(each, second, resolved, depth + 1) for each in options)
    kinds = [kinds_of(each) for each in (one, other)]
    values = [constants_of(each) for each in (one, other)]
    for i in (0, 1):
        if (found := values[i]) is not None:
            others = values[1 - i]
            if others is not None:
                return not any(same(value, each) for value in found for each in others)
            return not any(is_kind(value, kind) for value in found for kind in kinds[1 - i])
    shared = kinds[0] & kinds[1]
    return not shared or (shared == {"object"} and _disjoint_objects(one, other, resolved, depth))


def _disjoint_objects(one: Mapping[str, Any], other: Mapping[str, Any], resolved: Resolver, depth: int) -> bool:
    sides: list[tuple[Mapping[str, Any], list[str], bool]] = []
    for each in (one, other):
        properties = mapping_of(each, "properties", "#")
        extra = each.get("additionalProperties", each.get("unevaluatedProperties", "properties" not in each))
        sides.append((properties, names_of(each, "#"), extra is False and "patternProperties" not in each))
    (left, left_must, left_closed), (right, right_must, right_closed) = sides
    for name in left_must:
        if name in right_must and disjoint(left.get(name, True), right.get(name, True), resolved, depth + 1):
            return True
    # An object of one side has no name that the other must have, and the other way round.
    return (left_closed and any(name not in left for name in right_must)) and (
        right_closed and any(name not in right for name in left_must)
    )


def _target(schema: Any, resolved: Resolver) -> Any:
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = resolved(schema["$ref"], "#")
    return schema
