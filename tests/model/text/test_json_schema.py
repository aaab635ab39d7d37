"""What a schema's grammar allows, beside a validator: instances that must be writable, and random walks."""

import functools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import torch

from dialects import dialect, size
from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.model.text.byte_vocab import ByteVocab
from foredraft.model.text.grammar import GrammarCompiler, Matcher

EOS = 0
TEXTS = [
    "",
    "a",
    "ab",
    'say "hi"',
    "two\nlines",
    "C:\\dir",
    "tab\t",
    "\x00",
    "é",
    "🙂🙂",
    "Buy milk",
    "v1.2",
    "a/b",
    " ",
]
NUMBERS: list[Any] = [0, 1, -1, 3, 5, 7, 9, 10, 12, 15, -5, -6, 59, 100, 1000, 0.5, -0.5, 1.5, 0.1, 0.123456789, 99.5]
ARRAYS: list[Any] = [[], [1], ["a", 2], [1, 2, 3], [None, {"a": 1}, "x", 4]]
OBJECTS: list[Any] = [{}, {"a": 1}, {"a": "x"}, {"a": 1, "b": [2]}, {"b": True}, {"ab": 1}, {"x-a": "b"}, {"y": None}]
OTHERS: list[Any] = [None, True, False]
EVERY = [*TEXTS, *NUMBERS, *ARRAYS, *OBJECTS, *OTHERS]

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}


def kinded(kind: str) -> Any:
    """An object of a union that is told apart by a constant."""
    return {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}}, "required": ["kind"]}


SUITE: list[tuple[Any, list[Any]]] = [
    (True, EVERY),
    ({}, EVERY),
    *[({"type": kind}, EVERY) for kind in ("null", "boolean", "integer", "number", "string", "array", "object")],
    ({"type": ["string", "null"], "maxLength": 2}, EVERY),
    ({"type": ["integer", "number", "boolean"], "minimum": 3}, EVERY),
    ({"const": {"a": [1, 2], "b": {}}}, [{"a": [1, 2], "b": {}}, {"a": [1, 2]}, []]),
    ({"const": "é\n"}, ["é\n", "é"]),
    ({"const": 2.0}, [2, 2.0, 3]),
    ({"enum": [{"a": 1}, [1, 2], "x", None, 0.1]}, [*EVERY, "x", [1, 2]]),
    ({"type": "string", "enum": ["x", 1]}, ["x", 1]),
    # strings: lengths in characters, whatever their escapes
    *[
        ({"type": "string", **bounds}, [*TEXTS, *("x" * n for n in (1, 2, 4, 5, 6)), "\n" * 5, "\n" * 6, '"' * 5])
        for bounds in ({"maxLength": 1}, {"maxLength": 5}, {"minLength": 1}, {"minLength": 2, "maxLength": 5})
    ],
    *[
        (
            {"type": "string", "maxLength": most},
            [char * count for char in ("x", "\n", '"', "\x01", "é", "🙂") for count in (most - 1, most, most + 1)],
        )
        for most in (32, 33, 128, 129, 300, 2000)
    ],
    (
        {"type": "string", "minLength": 130, "maxLength": 140},
        [char * n for char in "x\n" for n in (129, 130, 140, 141)],
    ),
    ({"type": "string", "minLength": 40}, [char * n for char in "x\n" for n in (39, 40, 200)]),
    # patterns: anywhere in the text
    ({"type": "string", "pattern": "^https?://"}, ["https://a.b", "http://", "ftp://a", "see http://a", "https://a\n"]),
    ({"type": "string", "pattern": "^https?://.+$"}, ["https://a.b", "http://", 'http://"']),
    ({"type": "string", "pattern": "\\S"}, TEXTS),
    ({"type": "string", "pattern": "[0-9]"}, TEXTS),
    ({"type": "string", "pattern": "^[^x]*$"}, [*TEXTS, "x", "ax"]),
    ({"type": "string", "pattern": "^(a|b$)|c"}, ["a", "ab", "b", "bb", "cab", "d", "ba"]),
    ({"type": "string", "pattern": "^$|^\\d{2,}$"}, ["", "1", "12", "123", "a"]),
    ({"type": "string", "pattern": '^"\\\\\\n?"$'}, ['"\\"', '"\\\n"', "x"]),
    ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, ["a", "ab", "abc", "abcd", "A"]),
    ({"type": "string", "pattern": "^[A-Z]{2}-", "maxLength": 5}, ["AB-", "AB-cd", "AB-cde", "A-"]),
    ({"type": "string", "pattern": "ab", "maxLength": 4}, ["ab", "xab", "xxab", "xxxab", "xxxx"]),
    ({"type": "string", "pattern": "^.{1,300}$"}, ["", "x" * 300, "x" * 301, '"' * 300, "a\nb"]),
    # numbers
    *[
        ({"type": kind, **bounds}, NUMBERS)
        for kind in ("integer", "number")
        for bounds in (
            {"minimum": -4, "maximum": 4},
            {"exclusiveMinimum": 0},
            {"minimum": 0, "maximum": 59},
            {"minimum": 1.5},
            {"exclusiveMinimum": 1, "exclusiveMaximum": 5.5},
            {"minimum": 0, "exclusiveMinimum": 0, "maximum": 10},
            {"maximum": -5},
            {"minimum": 0.1, "maximum": 0.9} if kind == "number" else {"minimum": 0.1, "maximum": 1.9},
            {"multipleOf": 5},
            {"multipleOf": 5, "minimum": 0},
            {"multipleOf": 3, "minimum": 7},
            {"multipleOf": 5, "maximum": 12},
            {"multipleOf": 3, "exclusiveMinimum": 0, "maximum": 12},
            {"multipleOf": 0.5},
            {"multipleOf": 0.5, "minimum": -0.5, "maximum": 99.5},
            {"multipleOf": 0.01, "minimum": 0},
        )
    ],
    # arrays
    *[
        ({"type": "array", **bounds}, ARRAYS)
        for bounds in (
            {"minItems": 1},
            {"maxItems": 2},
            {"minItems": 2, "maxItems": 3},
            {"maxItems": 0},
            {"items": {"type": "integer"}},
            {"items": {"type": "integer"}, "minItems": 2},
            {"items": False},
            {"prefixItems": [{"type": "string"}]},
            {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
            {"prefixItems": [{"type": "integer"}], "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            {"prefixItems": [{}, {}, {}], "maxItems": 2},
            {"prefixItems": [{}, False]},
            {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        )
    ],
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 200}, [[1] * n for n in (0, 199, 200, 201)]),
    # objects
    *[
        ({"type": "object", **bounds}, [*OBJECTS, {"a": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}])
        for bounds in (
            {"minProperties": 1},
            {"maxProperties": 1},
            {"required": ["b"]},
            {"required": ["a"], "minProperties": 2},
            {"properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False},
            {"properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False, "minProperties": 1},
            {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "maxProperties": 2},
            {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False, "minProperties": 2},
            {"properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
            {"properties": {"a": False, "b": {}}, "additionalProperties": True},
            {"properties": {"a": {}}, "required": ["b"], "additionalProperties": {"type": "array"}},
            {"additionalProperties": {"type": "integer"}},
            {"unevaluatedProperties": False},
            {"patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False},
            {"patternProperties": {"^x-": {}, "^y": {"type": "null"}}, "additionalProperties": False},
            {"propertyNames": {"pattern": "^[a-z]"}, "additionalProperties": {"type": "integer"}},
            {"propertyNames": {"enum": ["a", "b"]}},
            {"propertyNames": {"maxLength": 1}},
        )
    ],
    # several schemas
    ({"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string", "maxLength": 1}, False]}, EVERY),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]}, EVERY),
    (
        {"oneOf": [kinded("cat"), kinded("dog")]},
        [{"kind": "cat", "cat": 1}, {"kind": "dog", "dog": 2}, {"kind": "cow"}, {"cat": 1}],
    ),
    ({"oneOf": [{**A, "additionalProperties": False}, {**B, "additionalProperties": False}]}, OBJECTS),
    ({"allOf": [{"type": "integer", "maximum": 3}]}, EVERY),
    # merged
    ({"allOf": [{"type": "integer", "maximum": 9}, {"type": "number", "minimum": 3}, {"maximum": 12}]}, EVERY),
    ({"allOf": [{"type": ["integer", "string"], "multipleOf": 2}, {"multipleOf": 1.5}, {"maxLength": 2}]}, EVERY),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, EVERY),
    ({"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}], "$defs": {"a": {"allOf": [False, A]}}}, EVERY),
    ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b$", "maxLength": 3}]}, [*TEXTS, "acb", "accb", "ba"]),
    ({"type": "string", "format": "ipv4", "pattern": "^1", "maxLength": 8}, ["1.2.3.4", "2.2.3.4", "10.20.3.4"]),
    ({"allOf": [{"enum": ["a", 1, 2.0, None]}, {"enum": [2, "a", "b"]}]}, ["a", "b", 1, 2, 2.0, None]),
    ({"allOf": [{"const": 1}, {"type": "string"}]}, [1, "1"]),
    ({"allOf": [A, B], "type": "object"}, [*OBJECTS, {"a": 1, "b": True}]),
    ({"allOf": [A, {"type": "object", "properties": {"a": {"maximum": 4}}}]}, [{"a": 4}, {"a": 5}, {}]),
    (
        {"allOf": [A, {"properties": {"a": {}, "b": {"const": 2}}, "additionalProperties": False}]},
        [{"a": 4}, {"a": 5, "b": 2}, {"a": 5, "b": 3}, {"a": "x"}, {"b": 2}, {"a": 1, "c": 2}],
    ),
    (
        {"allOf": [{"$ref": "#/$defs/a"}, B], "unevaluatedProperties": False, "$defs": {"a": A}},
        [{"a": 1, "b": True}, {"a": 1}, {"a": 1, "b": True, "c": 1}],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}
        | {"allOf": [{"prefixItems": [True, {"type": "integer"}], "minItems": 1}]},
        [*ARRAYS, [1, 2], [1, "a"]],
    ),
    ({"allOf": [{"type": "array", "items": {"type": "integer"}}, {"items": {"minimum": 2}, "maxItems": 2}]}, ARRAYS),
    (
        {
            "allOf": [
                {"type": "array", "prefixItems": [{}, {"type": "integer"}]},
                {"items": {"type": ["string", "integer"]}},
            ]
        },
        [*ARRAYS, ["a", "b"]],
    ),
    ({"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": {"type": "string", "minLength": 1}}}, TEXTS),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        OBJECTS,
    ),
    ({"type": "string", "anyOf": [{"maxLength": 1}, {"pattern": "^Buy"}]}, TEXTS),
    ({"type": ["integer", "string"], "oneOf": [{"type": "string"}, {"type": "number", "minimum": 3}]}, EVERY),
    (
        {
            "allOf": [
                {"anyOf": [A, B]},
                {"anyOf": [{"type": "object", "maxProperties": 1}, {"type": "object", "required": []}]},
            ]
        },
        [{}, {"a": 1}, {"b": True}, {"a": "x"}, {"b": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"allOf": [{"$ref": "#"}, {"required": ["v"]}]}},
            "additionalProperties": False,
        },
        [{"v": 1, "next": {"v": 2}}, {"next": {}}, {"next": {"v": 1, "next": {}}}],
    ),
    # values that differ
    (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        [[], ["c", "a"], ["a", "b", "c"], ["b", "b"], ["a", "b", "a"], ["d"]],
    ),
    (
        {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
        | {"$defs": {"e": {"anyOf": [{"type": "boolean"}, {"const": 1}, {"enum": [1.0, "x", {"a": [1]}]}]}}},
        [[True, 1], [1, True], [1.0, 1], [True], [1, "x", True], [{"a": [1]}, "x"], [False, True]],
    ),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [[], ["a"], ["a", "b"]]),
    # patterns whose end is counted
    ({"type": "string", "pattern": "^https?://", "maxLength": 40}, ["https://" + "é" * n for n in (0, 32, 33)]),
    ({"type": "string", "pattern": "^a.*$", "maxLength": 600}, ["a" + char * n for char in 'x"' for n in (599, 600)]),
    ({"type": "string", "pattern": "^a", "minLength": 50}, ["a" + "\n" * n for n in (48, 49, 200)] + ["b" * 60]),
    ({"type": "string", "pattern": "\\S", "maxLength": 60}, [" " * n + "x" for n in (0, 59, 60)] + [" " * 9, "x" * 60]),
    ({"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"type": "integer"}}}, EVERY),
    ({"$ref": "#/$defs/all/anyOf/1", "$defs": {"all": {"anyOf": [True, {"type": "null"}]}}}, EVERY),
    (
        {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["v"],
            "additionalProperties": False,
        },
        [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}]}, {"kids": []}, {"v": 1, "kids": [{}]}],
    ),
]
FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2023-12-31", "2000-02-29"], ["2023-02-29", "1900-02-29", "2023-13-01", "2023-04-31"]),
    "time": (["10:00:00Z", "23:59:60Z", "10:00:00.5+02:00"], ["10:00", "10:00:00", "22:59:60Z", "24:00:00Z"]),
    "date-time": (["2024-02-29T10:00:00Z", "2024-02-29t10:00:00z"], ["2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z"]),
    "duration": (["P1D", "PT1H30M", "P4W", "P1Y2M3DT4H"], ["P", "PT", "1D", "P1D2H"]),
    "email": (
        ["jo@mail.x.com", "a+b@x.org", '"a b"@x.org', "jo@[127.0.0.1]", "jo@[IPv6:::1]"],
        ["a@b", ".a@b.c", "a..b@c.d", "a@b..c", "a@-b.c", "jo@x.com-"],
    ),
    "hostname": (["a", "a-b.c"], ["-a", "a-", "a..b", "a_b"]),
    "ipv4": (["1.2.3.4", "255.0.0.0"], ["1.2.3", "256.1.1.1", "01.2.3.4"]),
    "ipv6": (["::", "::1", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"], [":", "1::2::3", "12345::", ":2:3:4::8"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "uri": (["https://a.b/c?d=e#f", "mailto:a@b", "http://[::1]:80/"], ["a b", "//a", "http://[::1", "x"]),
    "uri-reference": (["/a", "", "//a/b", "a/b?c", "#x"], ["a b", "\\a"]),
    "uri-template": (["/a/{b}{?c*,d:3}", "x"], ["/a/{b", "{}"]),
    "json-pointer": (["", "/a~0~1/é"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1#", "10/a"], ["01", "#", "/a"]),
}  # fmt: skip


@functools.cache
def vocabulary() -> ByteVocab:
    return ByteVocab(dialect("bytes"), size("bytes"))


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(dialect("bytes"), size("bytes"))


def started(schema: Any) -> Matcher | None:
    """None where the schema allows nothing."""
    try:
        compiled = compiler()(Grammar.json_schema(schema))
    except OptionError as error:
        assert "cannot accept any value" in str(error)
        return None
    assert compiled is not None
    return compiled.matcher([EOS])


def writes(schema: Any, text: str) -> bool:
    m, tokens = started(schema), list(vocabulary().encode(text.encode()))
    return m is not None and m.advance([*tokens, EOS]) == len(tokens) + 1


def ordered(value: Any, schema: Any) -> Any:
    """The value with its properties as a grammar writes them: in the schema's order, then others."""
    if not isinstance(value, dict) or not isinstance(schema, dict):
        return value
    first = [*schema.get("properties", {}), *schema.get("required", [])]
    return {name: value[name] for name in dict.fromkeys([*(name for name in first if name in value), *value])}


@pytest.mark.parametrize(("schema", "values"), SUITE, ids=[json.dumps(schema)[:70] for schema, _ in SUITE])
def test_a_value_is_writable_if_and_only_if_it_is_valid(schema: Any, values: list[Any]):
    validator = None if isinstance(schema, bool) else jsonschema_rs.validator_for(schema)
    for value in values:
        valid = schema if validator is None else validator.is_valid(value)
        ascii_only = json.dumps(ordered(value, schema))
        assert writes(schema, json.dumps(ordered(value, schema), ensure_ascii=False)) == valid, value
        assert not writes(schema, ascii_only) or valid, value


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str):
    good, bad = FORMATS[name]
    schema = {"type": "string", "format": name}
    for text in good:
        assert writes(schema, json.dumps(text, ensure_ascii=False)), text
    for text in bad:
        assert not writes(schema, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"maxLength": 5},
        {"maxLength": 100},
        {"maxLength": 300},
        {"minLength": 1},
        {"pattern": "^.+$"},
        {"pattern": "\\S"},
    ],
    ids=json.dumps,
)
def test_strings_have_jsons_escapes_and_nothing_raw(bounds: dict[str, Any]):
    schema = {"type": "string", **bounds}
    for text in ('"a\\"b"', '"\\\\"', '"\\/x"', '"\\u00e9"', '"\\ud83d\\ude42"', '"\\u0041"'):
        assert writes(schema, text) == (len(json.loads(text)) <= 5) or text == '"\\u0041"', text
    for text in (
        '"a"b"',
        '"a\nb"',
        '"a\tb"',
        '"a\0b"',
        '"a\\ b"',
        '"a\\x41"',
        '"\\ud83d"',
        '"\\ude42"',
        '"\\u00"',
        '"a',
    ):
        assert not writes(schema, text), text


def test_spacing_is_that_of_json_dumps_in_constants_too():
    schema = {"type": "object", "properties": {"a": {"const": {"b": [1, 2]}}, "c": {"enum": [[], [3, {}]]}}}
    assert writes(schema, '{"a": {"b": [1, 2]}, "c": [3, {}]}')
    assert not writes(schema, '{"a": {"b":[1,2]}, "c": [3, {}]}')


def test_a_name_cannot_come_again_in_other_letters():
    schema = {"type": "object", "properties": {"ab": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert writes(schema, '{"ab": 1, "abc": "x", "a": "x", "": "x"}')
    for name in ('"ab"', '"\\u0061b"', '"a\\u0062"'):
        assert not writes(schema, f'{{{name}: "x"}}'), name


def walk(schema: Any, source: random.Random) -> bytes | None:
    """Text that random tokens of the grammar write; None if it did not end in 400."""
    m, out = started(schema), list[int]()
    assert m is not None
    pieces = vocabulary().pieces
    whole = {i for i, piece in enumerate(pieces) if piece.isascii()}  # the others are parts of characters
    closing = {i for i, piece in enumerate(pieces) if piece in (b'"', b"]", b"}", b'"}', b'"]')}
    while not m.ended and len(out) < 400:
        allowed = set(legal(m))
        allowed = allowed & whole or allowed
        assert allowed, vocabulary().decode(out)
        wanted = allowed & (closing | {EOS}) if source.random() < 0.3 else allowed
        out.append(source.choice(sorted(wanted or allowed)))
        assert m.advance(out[-1:]) == 1
    return vocabulary().decode(token for token in out if token != EOS) if m.ended else None


def legal(m: Matcher) -> Iterator[int]:
    bits = m.masks([0], [-1])[0][:, None] >> torch.arange(32) & 1
    return iter(bits.flatten()[: size("bytes")].nonzero()[:, 0].tolist())


WALKED = [(schema, 12) for schema, values in SUITE if started(schema) is not None and isinstance(schema, dict)]


@pytest.mark.parametrize(("schema", "walks"), WALKED, ids=[json.dumps(schema)[:70] for schema, _ in WALKED])
def test_random_walks_write_valid_values_alone(schema: Any, walks: int):
    validator, source = jsonschema_rs.validator_for(schema), random.Random(1)
    for _ in range(walks):
        found = walk(schema, source)
        if found is not None:
            value = json.loads(found)
            assert value in (math.inf, -math.inf) or validator.is_valid(value), found  # beyond what a float can be


def urls(source: random.Random, most: int) -> Iterator[str]:
    """URIs about as long as ``most``, and texts that are none."""
    for begin in ("http://a.b/", "http://a.b", "s:", "s:/", "http://u:p@h.x:80/?", "https://[::1]/", "x"):
        for _ in range(60):
            text = begin + "".join(source.choice("abc/?") for _ in range(most - len(begin) - source.randrange(0, 9)))
            while len(text) < most + 2 and source.random() < 0.9:
                text += source.choice(["%2F", "%C3", "#" if "#" not in text else "x", "y", "z", "?"])
            yield text if source.random() < 0.8 else text[: -source.randrange(1, 3)]


def test_a_uri_of_limited_length():
    source, most = random.Random(1), 200
    schema = {"type": "string", "format": "uri", "minLength": 1, "maxLength": most}
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    seen: set[tuple[bool, bool]] = set()
    for text in urls(source, most):
        valid = validator.is_valid(text)
        assert writes(schema, json.dumps(text)) == (valid and not text.startswith("x")), text
        seen.add((valid, len(text) <= most))
    assert seen == {(True, True), (False, True), (False, False)}


def test_a_uri_of_limited_length_is_written_to_its_end():
    """Token by token: what is allowed before the limit can be ended within it."""
    schema = {"type": "string", "format": "uri", "maxLength": 140}
    validator, source = jsonschema_rs.validator_for(schema, validate_formats=True), random.Random(3)
    for begin in [b'"https://a.b/', b'"http://'] * 15:
        m, out = started(schema), list(vocabulary().encode(begin))
        assert m is not None and m.advance(out) == len(out)
        while not m.ended:
            out.append(
                source.choice([token for token in legal(m) if vocabulary().pieces[token] != b'"'] or [*legal(m)])
            )
            assert m.advance(out[-1:]) == 1
        found = json.loads(vocabulary().decode(token for token in out if token != EOS))
        assert len(found) == 140 and validator.is_valid(found), found


REFUSED: list[tuple[Any, str]] = [
    (functools.reduce(lambda part, _: {"allOf": [part]}, range(200), {}), "more than 64 levels of schemas"),
    (functools.reduce(lambda part, _: {"anyOf": [part]}, range(450), {}), "nested more than 64 levels"),
    (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "uniqueItems needs items of at most 10 values",
    ),
    ({"type": "string", "format": "email", "maxLength": 254}, "at #: maxLength beside format would take more states"),
    ({"allOf": [{"$ref": "#"}, {"type": "string"}]}, "at #: .ref '#' refers to itself"),
    ({"allOf": [{"type": "string", "not": {}}, {"maxLength": 1}]}, "not is not supported"),
    ({"allOf": [{"type": 5}, {"type": "string"}]}, 'Unsupported type "5" at #'),
    ({"items": {"allOf": [{"items": []}, {"items": {"minimum": 1}}]}}, "a schema is an object, true or false"),
    ({"type": "string", "minLength": float("inf")}, "minLength must be a whole number"),
    ({"allOf": [{"enum": [1, 2]}, {"minimum": 2}]}, "minimum beside enum is not supported"),
    ({"allOf": [{"maximum": "3", "type": "integer"}, {"maximum": 2}]}, "maximum must be a number"),
    (
        {"allOf": [{"patternProperties": {"a": {}}, "additionalProperties": False}, A]},
        "patternProperties cannot be merged",
    ),
    ({"allOf": [{"type": "string"}, []]}, "at #: a schema is an object, true or false"),
    ({"allOf": []}, "allOf must be an array of one schema or more"),
    ({"allOf": [{"anyOf": [{"type": "string"}, {"maximum": n}]} for n in range(40)]}, "more than 1000 schemas"),
    (
        {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 10}]},
        "at #: the schemas of oneOf are not told apart",
    ),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "the schemas of oneOf are not told apart"),
    ({"type": "string", "const": 1}, "cannot accept any value"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "cannot accept any value"),
    ({"type": "object", "minProperties": 3}, "minProperties counts properties without a name"),
    ({"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": {}}, '"additionalProperties": false'),
    (
        {"type": "object", "patternProperties": {"^x": {}, "y$": {}}, "additionalProperties": False},
        r"at #/patternProperties/y\$: patterns that may match the same name",
    ),
    (
        {"type": "object", "properties": {"xa": {}}, "patternProperties": {"^x": {}}, "additionalProperties": False},
        "the property 'xa' matches it too",
    ),
    ({"type": "object", "properties": {"xa": {}}, "propertyNames": {"maxLength": 3}}, "propertyNames beside named"),
    ({"type": "string", "pattern": "^[[:digit:]]+$"}, "at #/pattern: At character 3: POSIX classes"),
    ({"type": "string", "pattern": "\\h"}, r"At character 1: The escape \\h is not supported"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf must be greater than 0"),
    ({"type": "string", "maxLength": "3"}, "maxLength must be a whole number"),
    ({"type": "array", "prefixItems": {}}, "prefixItems must be an array"),
    ({"type": "array", "items": [{}]}, "at #/items: a schema is an object, true or false"),
    ({"type": "object", "required": "a"}, "required must be an array of strings"),
    ({"type": "object", "properties": []}, "properties must be an object"),
    ({"anyOf": []}, "anyOf must be an array of one schema or more"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_a_grammar_cannot_say_is_refused_at_its_place(schema: Any, said: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(OptionError, match=said):
        compiler()(Grammar.json_schema(schema))
    assert capfd.readouterr().err == ""


def test_xgrammar_says_nothing_on_stderr(capfd: pytest.CaptureFixture[str]):
    """It would where a rule's budget of characters ends within an escape."""
    schema = {"type": "string", "maxLength": 40}
    for text in ("x" * 39 + "\n", "x" * 38 + "\n\n", "\n" * 40, "x" * 40):
        m, tokens = started(schema), list(vocabulary().encode(json.dumps(text).encode()))
        assert m is not None
        for token in tokens:
            assert token in set(legal(m))
            assert m.advance([token]) == 1
        assert m.advance([EOS]) == 1
    assert capfd.readouterr().err == ""
