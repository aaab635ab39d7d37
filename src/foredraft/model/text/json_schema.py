"""JSON schemas as grammars: what a schema allows, written as ``json.dumps`` writes it, or a refusal with the place.

xgrammar has a converter of its own, which ignores, narrows or widens what it cannot express (0.2.8). So it is given
a grammar in EBNF, whose rules are made here: one for each schema, automata of single strings in ``Regex``.
"""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from foredraft.core.errors import OptionError
from foredraft.model.text import json_numbers, regex
from foredraft.model.text.ebnf import (
    NEVER,
    TooLargeError,
    any_string,
    matching,
    quoted,
    spelled_text,
    string_of,
)
from foredraft.model.text.json_formats import format_of, uri_within
from foredraft.model.text.json_numbers import Interval
from foredraft.model.text.json_rules import JsonRules, choice, differing
from foredraft.model.text.regex_reader import matched, searched
from foredraft.model.text.schema_disjoint import disjoint
from foredraft.model.text.schema_keywords import (
    constants_of,
    count_of,
    decimal_of,
    faults,
    interval_of,
    is_kind,
    mapping_of,
    names_of,
    refuse,
    same,
    types_of,
)
from foredraft.model.text.schema_merge import Document, Merger

_DEEPEST = 64
"""Levels of nested schemas; the time to compile grows with their cube."""
_MOST_UNIQUE = 10
"""Values of items that must differ; there is a rule for each set of those that came already."""
_LONGEST_NAME = 200
"""Of a property beside others that the schema does not name."""


def schema_rules(schema: Any, *, space: str = "") -> str:
    """The schema as a grammar in EBNF with the rule ``root``.

    Args:
        space: EBNF of white space that may stand between tokens of JSON. By default, a blank follows commas and colons.

    Raises:
        OptionError: a keyword is not valid or cannot be enforced, or the schema allows nothing.
    """
    try:
        return _Converter(schema, space).convert()
    except RecursionError:
        raise _too_deep() from None


class _Converter:
    """Converts one schema. An expression is a rule's name or in parentheses; None stands for what matches nothing."""

    def __init__(self, schema: Any, space: str) -> None:
        self._root = schema
        self._rules = JsonRules(space)
        self._document = Document(schema)
        self._merger = Merger(self._document)
        self._known: dict[str, str | None] = {}
        self._refs: dict[str, str] = {}
        self._waiting: list[tuple[str, Any, str]] = []

    def convert(self) -> str:
        root = self._value(self._root, "#", 0)
        if root is None:
            raise OptionError("The json_schema grammar is not valid: The schema cannot accept any value.")
        self._rules["root"] = root
        while self._waiting:
            name, schema, place = self._waiting.pop()
            self._rules[name] = self._value(schema, place, 0) or NEVER
        return self._rules.text()

    def _value(self, schema: Any, place: str, depth: int) -> str | None:
        if depth > _DEEPEST:
            raise _too_deep()
        if isinstance(schema, bool):
            return self._any() if schema else None
        if not isinstance(schema, Mapping):
            refuse(place, "a schema is an object, true or false")
        key = json.dumps(schema)
        if key not in self._known:
            merged = self._merger.merged(schema, place)
            if merged is schema:
                body = self._body(schema, place, depth)
                self._known[key] = body if body is None else self._rules.add(body)
            else:  # which may have the schema itself among its parts
                name = self._known[key] = self._rules.reserve()
                body = self._value(merged, place, depth)
                self._rules[name] = body or NEVER
                self._known[key] = body if body is None else name
        return self._known[key]

    def _body(self, schema: Mapping[str, Any], place: str, depth: int) -> str | None:
        fault = next(faults(schema), None)
        if fault is not None:
            refuse(place, fault)
        if "$ref" in schema:
            return self._ref(schema["$ref"], place)
        if "const" in schema or "enum" in schema:
            return self._values(schema, place)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._either(key, schema[key], place, depth)
        kinds = types_of(schema, place)
        if kinds is None:
            return self._any()
        return choice(self._typed(kind, schema, place, depth) for kind in kinds)

    def _typed(self, kind: str, schema: Mapping[str, Any], place: str, depth: int) -> str | None:
        if kind == "null":
            return '"null"'
        if kind == "boolean":
            return '"true" | "false"'
        if kind == "string":
            return self._string(schema, place)
        if kind == "array":
            return self._array(schema, place, depth)
        if kind == "object":
            return self._object(schema, place, depth)
        return self._number(schema, kind == "integer", place)

    def _any(self) -> str:
        if "any" not in self._rules:
            kinds = ("null", "boolean", "number", "string", "array", "object")
            self._rules["any"] = ""  # its parts need the name
            parts = [self._typed(kind, {}, "#", 0) or "" for kind in kinds]
            self._rules["any"] = " | ".join(self._rules.add(part) for part in parts)
        return "any"

    def _ref(self, ref: Any, place: str) -> str:
        target = self._target(ref, place)
        if ref not in self._refs:
            self._refs[ref] = self._rules.reserve()
            self._waiting.append((self._refs[ref], target, ref))
        return self._refs[ref]

    def _target(self, ref: Any, place: str) -> Any:
        """What a reference means that may mean another one."""
        target, seen = self._document.resolved(ref, place), {ref}
        while isinstance(target := self._merger.merged(target, place), Mapping) and "$ref" in target:
            if target["$ref"] in seen:
                refuse(place, f"$ref {ref!r} refers to itself")
            seen.add(target["$ref"])
            target = self._document.resolved(target["$ref"], place)
        return target

    def _values(self, schema: Mapping[str, Any], place: str) -> str | None:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            refuse(place, "enum must be an array")
        if not values:
            raise OptionError("The json_schema grammar is not valid: The enum array must not be empty.")
        kinds = types_of({"type": schema["type"]}, place) if "type" in schema else None
        fit = [value for value in values if kinds is None or any(is_kind(value, kind) for kind in kinds)]
        return choice(dict.fromkeys(self._rules.constant(value) for value in fit))

    def _either(self, key: str, options: Any, place: str, depth: int) -> str | None:
        if key == "oneOf":
            for number, option in enumerate(options):
                for other in options[:number]:
                    if not disjoint(option, other, self._document.resolved):
                        refuse(place, "the schemas of oneOf are not told apart by type, const, enum or properties")
        return choice(self._value(each, f"{place}/{key}/{number}", depth + 1) for number, each in enumerate(options))

    def _string(self, schema: Mapping[str, Any], place: str) -> str | None:
        node, given = self._text(schema, place)
        low, high = count_of(schema, "minLength", place) or 0, count_of(schema, "maxLength", place)
        if high is not None and low > high:
            refuse(place, "minLength is greater than maxLength")
        least, most = regex.lengths(node)
        if isinstance(node, regex.Repeat) and isinstance(node.part, regex.Chars):
            low, high = max(low, least), min((each for each in (high, most) if each is not None), default=None)
            return None if high is not None and low > high else string_of(self._rules, node.part, low, high)
        if (high is not None and least > high) or (most is not None and most < low):
            return None
        if high is not None and most is not None and most <= high:
            high = None  # so it need not be counted
        low = 0 if low <= least else low
        if given == "format" and (low, high) == (0, None) and not isinstance(node, regex.Both):
            return self._spelled(node)  # automata of formats are large
        if given == "format" and schema.get("format") == "uri" and low == 0 and high is not None:
            found = uri_within(self._rules, high)
            if found is not None:
                return found
        return self._quoted(node, low, high, schema, place)

    def _quoted(
        self, node: regex.Node, low: int, high: int | None, schema: Mapping[str, Any], place: str
    ) -> str | None:
        """A string as an automaton; without one where there are too many states, and no length to keep."""
        try:
            return quoted(self._rules, node, low, high)
        except TooLargeError:
            if (low, high) != (0, None) or isinstance(node, regex.Both):
                keys = [key for key in ("minLength", "maxLength", "pattern", "format") if key in schema]
                refuse(place, f"{' beside '.join(keys)} would take more states than a grammar can have: leave one out")
        return self._spelled(node)

    def _spelled(self, node: regex.Node) -> str:
        return f'"\\"" {spelled_text(self._rules, node)} "\\""'

    def _text(self, schema: Mapping[str, Any], place: str) -> tuple[regex.Node, str]:
        """What a string matches apart from its length, and the last keyword that says it."""
        forms, patterns = schema.get("format"), schema.get("pattern", ())
        nodes: list[tuple[regex.Node, str]] = []
        for each in forms if isinstance(forms, tuple) else (forms,):
            known = format_of(each) if isinstance(each, str) else None
            nodes += [(known, "format")] if known is not None else []
        for each in patterns if isinstance(patterns, tuple) else (patterns,):
            nodes.append((self._searched(each, f"{place}/pattern"), "pattern"))
        if not nodes:
            return regex.ANYTHING, ""
        return nodes[0] if len(nodes) == 1 else (regex.Both(tuple(node for node, _ in nodes)), nodes[-1][1])

    def _searched(self, given: Any, place: str) -> regex.Node:
        if not isinstance(given, str):
            refuse(place, "a pattern is a string")
        try:
            return searched(given)
        except OptionError as error:
            refuse(place, str(error).removesuffix("."))

    def _number(self, schema: Mapping[str, Any], whole: bool, place: str) -> str | None:
        interval = interval_of(schema, place)
        if "multipleOf" in schema:
            step = decimal_of(schema, "multipleOf", place)
            if step <= 0:
                refuse(place, "multipleOf must be greater than 0")
            return self._multiple(step, interval, whole, place)
        if interval == Interval(None, None):
            free = "0|-?[1-9][0-9]*" if whole else r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
            return matching(matched(free))
        found = json_numbers.integers(*interval.integers()) if whole else json_numbers.decimals(interval)
        return None if found is None else matching(matched(found))

    def _multiple(self, step: Decimal, interval: Interval, whole: bool, place: str) -> str | None:
        if interval.empty:
            return None
        found = json_numbers.multiples(self._rules, step, interval, whole)
        if found is None:
            refuse(place, f"multipleOf {step} has too many remainders, or too many multiples between the bounds")
        return choice(found)

    def _array(self, schema: Mapping[str, Any], place: str, depth: int) -> str | None:
        low, high = count_of(schema, "minItems", place) or 0, count_of(schema, "maxItems", place)
        if schema.get("uniqueItems") and (high is None or high > 1):
            return self._unique(schema, low, high, place)
        given = schema.get("prefixItems", [])
        if not isinstance(given, list):
            refuse(place, "prefixItems must be an array of schemas")
        first: list[str] = []
        for number, each in enumerate(given):
            part = self._value(each, f"{place}/prefixItems/{number}", depth + 1)
            if part is None:
                high = number if high is None else min(high, number)
                break
            first.append(part)
        key = "items" if "items" in schema else "unevaluatedItems"
        item = self._value(schema.get(key, True), f"{place}/{key}", depth + 1)
        first = first if high is None else first[:high]
        if item is None:
            high = len(first) if high is None else min(high, len(first))
        return self._rules.listing(first, item, low, high)

    def _unique(self, schema: Mapping[str, Any], low: int, high: int | None, place: str) -> str | None:
        """An array whose values differ."""
        values = None if "prefixItems" in schema else self._few(schema.get("items"), f"{place}/items")
        if values is None:
            refuse(
                place,
                f"uniqueItems needs items of at most {_MOST_UNIQUE} values (enum, const, boolean or null), since a "
                "grammar cannot compare values",
            )
        return self._rules.different([self._rules.constant(value) for value in values], low, high)

    def _few(self, schema: Any, place: str) -> list[Any] | None:
        """The values of a schema; None if they are many, or not plain."""
        schema = self._merger.merged(schema, place)
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = self._target(schema["$ref"], place)
        if not isinstance(schema, Mapping) or next(faults(schema), None) is not None:
            return None
        found: list[Any] | None = []
        kinds = types_of(schema, place)
        if "anyOf" in schema:
            for each in schema["anyOf"]:
                some = self._few(each, place)
                found = None if some is None or found is None else found + some
        elif (found := constants_of(schema)) is not None:
            found = [value for value in found if kinds is None or any(is_kind(value, kind) for kind in kinds)]
        elif kinds is not None and set(kinds) <= {"boolean", "null"}:
            found = [value for kind in kinds for value in ((None,) if kind == "null" else (True, False))]
        if found is None:
            return None
        different = [value for number, value in enumerate(found) if not any(same(value, e) for e in found[:number])]
        return different if len(different) <= _MOST_UNIQUE else None

    def _object(self, schema: Mapping[str, Any], place: str, depth: int) -> str | None:
        low, high = count_of(schema, "minProperties", place) or 0, count_of(schema, "maxProperties", place)
        if high is not None and low > high:
            refuse(place, "minProperties is greater than maxProperties")
        properties = mapping_of(schema, "properties", place)
        required = names_of(schema, place)
        key = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        closed = "properties" in schema or "patternProperties" in schema
        extra = schema.get(key, not closed)
        if unnamed := [name for name in required if name not in properties]:
            if extra is False or "patternProperties" in schema:
                refuse(place, f"the required property {unnamed[0]!r} is not in properties")
            properties = {**properties, **dict.fromkeys(unnamed, extra)}
        parts: list[tuple[str, bool]] = []
        for name, each in properties.items():
            where = f"{place}/properties/{name}" if name in schema.get("properties", {}) else f"{place}/{key}"
            value = self._value(each, where, depth + 1)
            if value is not None:
                parts.append((self._rules.add(self._rules.named(name, value)), name in required))
            elif name in required:
                return None
        opened = self._open(schema, properties, extra, place, depth)
        if opened is not None and low > len(required) + 1:
            refuse(place, "minProperties counts properties without a name, which a grammar cannot tell apart")
        return self._rules.members(parts, opened, low, high)

    def _open(
        self, schema: Mapping[str, Any], properties: Mapping[str, Any], extra: Any, place: str, depth: int
    ) -> str | None:
        """A member whose name the schema does not have; None if there are none."""
        patterns = mapping_of(schema, "patternProperties", place)
        names = schema.get("propertyNames", True)
        if names is not True and properties:
            refuse(place, "propertyNames beside named properties is not supported")
        if names is not True and patterns:
            refuse(place, "propertyNames beside patternProperties is not supported")
        if patterns:
            if extra is not False:
                refuse(place, 'patternProperties needs "additionalProperties": false')
            return self._by_pattern(patterns, properties, place, depth)
        key = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        value = self._value(extra, f"{place}/{key}", depth + 1)
        if value is None:
            return None
        if names is not True:
            if not isinstance(names, Mapping):
                return None if names is False else refuse(place, "propertyNames must be a schema")
            name = self._value({"type": "string", **names}, f"{place}/propertyNames", depth + 1)
            return None if name is None else self._rules.add(f"{name} {self._rules.colon} {value}")
        return self._rules.add(f"{self._unnamed(list(properties), place)} {self._rules.colon} {value}")

    def _by_pattern(
        self, patterns: Mapping[str, Any], properties: Mapping[str, Any], place: str, depth: int
    ) -> str | None:
        ways: list[str | None] = []
        nodes: list[regex.Node] = []
        for given, each in patterns.items():
            where = f"{place}/patternProperties/{given}"
            node = self._searched(given, where)
            for name in properties:
                if regex.matches(node, name):
                    refuse(where, f"the property {name!r} matches it too, which is not supported")
            if any(not regex.differ(node, other) for other in nodes):
                refuse(where, "patterns that may match the same name are not supported")
            nodes.append(node)
            value = self._value(each, where, depth + 1)
            name = self._quoted(node, 0, None, {}, where) or NEVER
            ways.append(None if value is None else f"{name} {self._rules.colon} {value}")
        body = choice(ways)
        return None if body is None else self._rules.add(body)

    def _unnamed(self, names: Sequence[str], place: str) -> str:
        """A property's name that is none of these."""
        if not names:
            return self._value({"type": "string"}, "#", 0) or NEVER
        if any(len(name) > _LONGEST_NAME for name in names):
            refuse(place, f"names of more than {_LONGEST_NAME} characters beside other properties are not supported")
        rest = self._rules.add(any_string(regex.ANY, ""))
        return self._rules.add(f'"\\"" ({differing(self._rules, names, rest)})')


def _too_deep() -> OptionError:
    return OptionError(f"The grammar's JSON schema is nested more than {_DEEPEST} levels deep.")
