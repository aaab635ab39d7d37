"""Compiled grammars and their masks over trees, against a slow reference that tries every token at every node."""

import functools
import itertools
import json
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
import torch

from dialects import EXACT, dialect, size, toy
from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.core.tree import PAD
from foredraft.model.text.byte_vocab import ByteVocab
from foredraft.model.text.grammar import GrammarCompiler, Matcher
from foredraft.model.text.json_schema import schema_rules
from foredraft.model.text.tokenizer import Tokenizer

LETTERS = ["a", "b", "c", "ab", "bc", "."]
PADDED = 70
"""Ids from 6 on are no tokens."""
EOS = 5


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(toy(LETTERS), PADDED)


def matcher_of(grammar: Grammar, eos: Sequence[int], own: GrammarCompiler) -> Matcher:
    compiled = own(grammar)
    assert compiled is not None
    return compiled.matcher(eos)


def matcher(pattern: str, eos: Sequence[int] = (EOS,)) -> Matcher:
    return matcher_of(Grammar.regex(pattern), eos, compiler())


def legal(mask: torch.Tensor, vocab: int = PADDED) -> set[int]:
    bits = mask[:, None] >> torch.arange(32) & 1
    return set(bits.flatten()[:vocab].nonzero()[:, 0].tolist())


def root(m: Matcher, vocab: int = PADDED) -> set[int]:
    return legal(m.masks([0], [-1])[0], vocab)


@functools.cache
def texts_of(pattern: str) -> frozenset[str]:
    """All texts that match, by Python's own regular expressions; none has more than six letters."""
    every = ("".join(letters) for length in range(7) for letters in itertools.product("abc", repeat=length))
    return frozenset(text for text in every if re.fullmatch(pattern, text))


def by_trying(pattern: str, text: str, eos: Sequence[int]) -> set[int]:
    """The tokens that may follow a text."""
    every = texts_of(pattern)
    found = {i for i, token in enumerate(LETTERS[:5]) if any(each.startswith(text + token) for each in every)}
    return found | (set(eos) if text in every else set())


PATTERNS = ["(ab|c){1,3}", "a?b?c?", "(bc|ab){0,2}a", "abc"]


def random_tree(source: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents; some nodes are padding, some tokens no tokens, some siblings twins."""
    tokens, parents = [0], [-1]
    for node in range(1, nodes):
        above = [i for i in range(node) if parents[i] != PAD]
        parents.append(PAD if source.random() < 0.1 else source.choice(above))
        tokens.append(source.choice([0, 1, 2, 3, 4, 5, 5, 6, 69]))
    return tokens, parents


@pytest.mark.parametrize("eos", [(EOS,), (), (EOS, 20)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_of_random_trees_are_those_found_by_trying(pattern: str, eos: tuple[int, ...]):
    source = random.Random(pattern)
    illegal = behind = 0
    for _ in range(40):
        m = matcher(pattern, eos)
        text = ""
        for _ in range(source.randrange(3)):
            token = source.choice(sorted(by_trying(pattern, text, ())) or [None])
            if token is not None:
                assert m.advance([token]) == 1
                text += LETTERS[token]
        if m.ended:
            continue
        tokens, parents = random_tree(source, source.choice([1, 4, 12]))
        masks = m.masks(tokens, parents)
        texts: dict[int, str] = {0: text}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node > 0 and parent in texts:
                if token in by_trying(pattern, texts[parent], ()):
                    texts[node] = texts[parent] + LETTERS[token]
                elif token in eos:
                    behind += 1
                else:
                    illegal += 1
            wanted = by_trying(pattern, texts[node], eos) if node in texts else set()
            assert legal(masks[node]) == (wanted or set(range(PADDED))), "unreachable nodes have a law too"
        assert root(m) == (by_trying(pattern, text, eos) or set(range(PADDED))), "the matcher has not moved"
    assert illegal and (behind or not eos)


def test_a_matcher_advances_to_the_end_and_no_further():
    m = matcher("ab?")
    assert m.advance([0, EOS, 1]) == 2
    assert m.ended
    assert m.advance([1]) == 0
    without = matcher("ab?", ())
    assert without.advance([0]) == 1 and not without.ended, "b may still follow"
    assert without.advance([1, 1]) == 1
    assert without.ended, "nothing may follow, and no token ends it"


def test_an_illegal_token_is_not_accepted():
    m = matcher("abc")
    assert m.advance([0, 2, 1]) == 1
    assert not m.ended
    assert m.advance([1]) == 1


def test_an_end_of_sequence_id_that_is_text_ends_complete_outputs_only():
    m = matcher(r"a\.?b?", (5,))
    assert 5 not in root(m)
    m.advance([0])
    assert root(m) == {1, 5}
    assert m.advance([5]) == 1 and m.ended


def test_what_no_token_can_say_is_a_dead_end_and_not_the_end():
    m = matcher("ad", ())
    assert m.advance([0]) == 1
    assert root(m) == set()
    assert not m.ended


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("padding", [0, 45])
def test_real_kinds_of_tokenizers_say_json_and_no_special_token(name: str, padding: int):
    tokenizer, vocab = dialect(name), size(name) + padding
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "string"}})
    text = '["a b", "é<|end|>"]'
    bytes_of = ByteVocab(tokenizer, vocab)
    m = matcher_of(grammar, [7], GrammarCompiler(tokenizer, vocab))
    for token in bytes_of.encode(text.encode()):
        allowed = root(m, vocab)
        assert token in allowed
        assert not allowed.intersection(bytes_of.names), "special tokens are no text"
        assert max(allowed) < size(name), "padding is no token"
        assert m.advance([token]) == 1
    assert root(m, vocab) == {7}


def test_a_slow_tokenizer():
    m = matcher_of(Grammar.choice(["ne"]), [1], GrammarCompiler(dialect("slow"), 400))
    ids = dialect("slow").inner("ne", add_special_tokens=False)["input_ids"]
    assert m.advance([*ids, 1]) == len(ids) + 1 and m.ended


VALID: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "integer"}}},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "string", "pattern": "^[ab]+$"},
    {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 12}, "minItems": 1, "maxItems": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"enum": ["yes", "no"], "type": "string"}}},
    {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99},
    {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"], "additionalProperties": False},
]


@pytest.mark.parametrize("schema", VALID, ids=json.dumps)
def test_random_walks_under_a_schema_are_valid(schema: Any):
    tokenizer = dialect("bytes")
    vocab = size("bytes")
    compiled = GrammarCompiler(tokenizer, vocab)(Grammar.json_schema(schema))
    assert compiled is not None
    source, validator, pieces = random.Random(1), jsonschema_rs.validator_for(schema), ByteVocab(tokenizer, vocab)
    plain = [i for i, piece in enumerate(pieces.pieces) if piece.isascii()]  # half a character is no JSON
    for _ in range(20):
        m, out = compiled.matcher([0]), []
        while not m.ended:
            allowed = root(m, vocab)
            if 0 in allowed and len(out) > 12:
                break
            out.append(source.choice(sorted(allowed.intersection(plain))))
            assert m.advance(out[-1:]) == 1
        value = json.loads(pieces.decode(token for token in out if token != 0))
        assert validator.is_valid(value), value


def nested(levels: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[tuple[Any, str]] = [
    (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "at #: uniqueItems needs items of at most 10",
    ),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "at #/properties/a: not is not supported"),
    ({"type": "string", "multipleOf": 3}, 'multipleOf needs "type": "number"'),
    ({"type": "number", "multipleOf": 0.123456789}, "multipleOf 0.123456789 has too many remainders"),
    ({"minimum": 3}, 'minimum needs "type": "number"'),
    ({"type": "string", "pattern": "a", "maxLength": 3000}, "maxLength beside pattern would take more states"),
    ({"type": "string", "format": "uri", "maxLength": 100}, "maxLength beside format would take more states"),
    ({"type": "string", "format": "email", "pattern": "x{9}.*y{90}"}, "pattern beside format would take more states"),
    ({"type": "string", "pattern": "(?=a)b"}, "at #/pattern: At character 1: Lookahead is not supported"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength is greater than maxLength"),
    ({"type": "string", "minLength": -1}, "minLength must be a whole number"),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": {"type": "string"}}}, 'minimum needs "type": "number"'),
    ({"$ref": "http://a.b/c"}, r"\$ref must be # or start with #/, not 'http://a.b/c'"),
    ({"$ref": "#/$defs/x"}, r"\$ref '#/\$defs/x' finds nothing"),
    ({"$ref": "#"}, r"\$ref '#' refers to itself"),
    ({"anyOf": [{"type": "null"}], "type": "object"}, "cannot accept any value"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required property 'b' is not in properties"),
    ({"type": "array", "prefixItems": [{"contains": {}}]}, "at #/prefixItems/0: contains"),
    (nested(70), "nested more than 64 levels"),
    ({"type": "nothing"}, 'json_schema grammar is not valid: Unsupported type "nothing"'),
    (False, "cannot accept any value"),
    ({"enum": []}, "enum array must not be empty"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_schema_that_cannot_be_enforced_is_refused(schema: Any, said: str):
    with pytest.raises(OptionError, match=said) as caught:
        compiler()(Grammar.json_schema(schema))
    assert "\n" not in str(caught.value) and ".cc" not in str(caught.value)


def test_annotations_are_no_constraints():
    plain = {"type": "object", "properties": {"not": {"type": "string"}}}
    assert schema_rules({**plain, "title": "t", "description": "d", "format": "x"}) == schema_rules(plain)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.regex("("), "regex grammar is not valid: .*parenthesis is not closed"),
        (Grammar.regex("(?=a)b"), "At character 1: Lookahead is not supported"),
        (Grammar.regex("(" * 10_000), "not valid"),
        (Grammar.ebnf("x ::= y"), 'The root rule with name "root" is not found'),
        (Grammar.ebnf("root ::= "), "Expect element"),
        (Grammar.structural_tag({"type": "nothing"}), "structural_tag grammar is not valid"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_in_one_sentence(grammar: Grammar, said: str):
    with pytest.raises(OptionError, match=said) as caught:
        compiler()(grammar)
    assert "\n" not in str(caught.value) and ".cc" not in str(caught.value)


def test_a_grammar_needs_a_tokenizer_and_the_package(monkeypatch: pytest.MonkeyPatch):
    assert GrammarCompiler(None, 8)(None) is None
    with pytest.raises(OptionError, match="came without one: pass tokenizer="):
        GrammarCompiler(None, 8)(Grammar.json())
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(OptionError, match=r"pip install 'foredraft\[grammar\]'"):
        GrammarCompiler(toy(LETTERS), PADDED)(Grammar.json())


@pytest.mark.parametrize("grammar", [Grammar.regex("(ab|b?c){1,3}"), Grammar.choice(["abc", "bcb", "cab"])])
def test_a_grammar_that_is_handed_over_allows_the_same(grammar: Grammar):
    maker, reader = GrammarCompiler(toy(LETTERS), PADDED), GrammarCompiler(toy(LETTERS), PADDED)
    made = maker(grammar)
    assert made is not None
    written = made.written()
    assert written is not None
    read = reader.read(grammar, written)
    assert reader(grammar) is read, "it is not compiled again"
    for seed in range(20):
        source = random.Random(seed)
        one, other = made.matcher((EOS,)), read.matcher((EOS,))
        while not one.ended:
            assert root(one) == root(other)
            token = source.choice(sorted(root(one)))
            assert one.advance([token]) == other.advance([token]) == 1
        assert other.ended


def test_a_large_grammar_is_not_written():
    made = GrammarCompiler(toy(LETTERS), PADDED)(Grammar.regex("|".join(f"[ab]{{{size}}}" for size in range(1, 300))))
    assert made is not None and made.written() is None


def test_grammars_in_use_and_the_last_ones_are_kept():
    own = GrammarCompiler(toy(LETTERS), PADDED, cache_bytes=0)
    grammars = [Grammar.regex(f"[ab]{{{size}}}") for size in range(1, 5)]
    first, again = own(grammars[0]), own(grammars[0])
    assert first is again, "it is in use"
    del first, again
    assert own.known(grammars[0]) is None
    sizes = [len(grammar.text) + (own(grammar) or pytest.fail()).bytes for grammar in grammars]
    own = GrammarCompiler(toy(LETTERS), PADDED, cache_bytes=max(sizes) * 2)
    for grammar in (*grammars[:2], grammars[0], grammars[2]):  # the first one is used again
        own(grammar)
    assert [own.known(grammar) is not None for grammar in grammars] == [True, False, True, False]


def test_a_vocabulary_wider_than_the_logits():
    """The tokenizer has tokens without logits."""
    m = matcher_of(Grammar.json(), [0], GrammarCompiler(Tokenizer(dialect("bytes").inner), 300))
    assert max(root(m, 320)) <= 300
