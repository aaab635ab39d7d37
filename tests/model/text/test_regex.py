"""Regular expressions, beside Python's own: what they match, how they are refused, and as grammars."""

import itertools
import random
import re

import pytest

from dialects import dialect, size
from foredraft.core.errors import OptionError
from foredraft.core.sampling.grammar import Grammar
from foredraft.model.text import regex
from foredraft.model.text.byte_vocab import ByteVocab
from foredraft.model.text.ebnf import matching
from foredraft.model.text.grammar import GrammarCompiler
from foredraft.model.text.regex_reader import matched, searched

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]
REPEATED = ["*", "+", "?", "{2}", "{0,2}", "{1,2}", "{2,}", "{0}", "{1,3}", "*?", "{1}"]


def drawn(source: random.Random, depth: int) -> str:
    """A random pattern."""
    kind = source.random()
    if depth == 0 or kind < 0.25:
        return source.choice(["a", "b", "c", "[ab]", "[^a]", "[b-c]", ".", r"\w", r"[^\d]"])
    if kind < 0.5:
        return drawn(source, depth - 1) + drawn(source, depth - 1)
    if kind < 0.65:
        return f"({drawn(source, depth - 1)}|{source.choice([drawn(source, depth - 1), ''])})"
    return f"(?:{drawn(source, depth - 1)}){source.choice(REPEATED)}"


@pytest.mark.parametrize("seed", range(60))
def test_random_patterns_match_what_pythons_do(seed: int):
    source = random.Random(seed)
    compiler = GrammarCompiler(dialect("bytes"), size("bytes"))
    vocabulary = ByteVocab(dialect("bytes"), size("bytes"))
    pattern = drawn(source, 3)
    node = matched(pattern)
    compiled = compiler(Grammar.regex(pattern))
    assert compiled is not None
    expected = re.compile(pattern)
    few, most = regex.lengths(node)
    for text in source.sample(TEXTS, 60):
        whole = expected.fullmatch(text) is not None
        assert regex.matches(node, text) == whole, (pattern, text)
        assert not whole or few <= len(text) <= (len(text) if most is None else most)
        assert regex.matches(searched(pattern), text) == (expected.search(text) is not None)
        tokens = list(vocabulary.encode(text.encode()))
        assert (compiled.matcher([0]).advance([*tokens, 0]) == len(tokens) + 1) == whole, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\A[0-9]{3}\Z", ["123"], ["A111Z", "1234"]),
        (r"^[0-9]{3}\z", ["123"], ["12"]),
        (r"^(a|b)$", ["a", "b"], ["ab"]),
        (r"(^a|b$)", ["a", "b"], ["ab"]),
        (r"a.c", ["abc", "a\tc", "aéc"], ["a\nc", "a\rc"]),
        (r"\x41\u0042\u{43}\cA\t\0", ["ABC\x01\t\0"], []),
        (r"\!\@\#\-\/\ \"", ['!@#-/ "'], []),
        (r"[\w.-]+", ["a.b-c_9"], ["a b", "é"]),
        (r"[\]\\^-]+", ["]\\^-"], ["a"]),
        (r"{a}{1,2", ["{a}{1,2"], []),
        (r"(?<year>\d{4})-(?P<month>\d\d)", ["2024-01"], ["2024-1"]),
        (r"\s\S", ["\u00a0x", "\u2003x"], ["xx"]),
        (r"a{0}b", ["b"], ["ab"]),
        (r"(|a)b", ["b", "ab"], []),
        (r"[^\x00-\uFFFF]", ["🙂"], ["é"]),
    ],
)
def test_patterns(pattern: str, good: list[str], bad: list[str]):
    node = matched(pattern)
    assert all(regex.matches(node, text) for text in good)
    assert not any(regex.matches(node, text) for text in bad)
    assert "Regex" not in matching(node)


REFUSED = [
    (r"\h+", r"At character 1: The escape \\h is not supported"),
    ("[[:digit:]]+", "At character 2: POSIX classes"),
    ("a(?=b)", "At character 2: Lookahead is not supported"),
    ("(?<!b)a", "At character 1: Lookbehind is not supported"),
    ("(?>a)", "At character 1: Atomic groups are not supported"),
    ("(?i)a", "At character 2: Flags are not supported"),
    (r"a\b", "At character 2: Word boundaries are not supported"),
    (r"\p{L}", "At character 1: Unicode properties are not supported"),
    (r"(a)\1", "At character 4: Back-references are not supported"),
    ("a++", "At character 3: Possessive repetitions"),
    ("a**", "At character 3: Two repetitions"),
    ("a{2}{3}", "At character 5: Two repetitions"),
    ("*a", "At character 1: There is nothing to repeat"),
    ("a{3,2}", "less than its first"),
    ("a{9999999999}", "too long"),
    ("[b-a]", "At character 2: The range of characters is not valid"),
    (r"[\d-z]", "At character 2: The range of characters is not valid"),
    ("[]", "At character 1: An empty class"),
    ("[a", "At character 1: The class is not closed"),
    ("(a", "At character 1: The parenthesis is not closed"),
    ("a)", "At character 2: The parenthesis is not opened"),
    ("a\\", "At character 2: The escape is not finished"),
    (r"\uD800", r"The escape \\u is not supported"),
    (r"\x4", r"The escape \\x is not supported"),
    (r"\01", "Octal escapes"),
    ("a^b", "At character 2: .* at the ends of a pattern only"),
    ("(a$)*", "At character 3: .* at the ends of a pattern only"),
    ("(?<1>a)", "The group's name is not valid"),
    ("(" * 200, "nested more than 100 levels"),
]


@pytest.mark.parametrize(("pattern", "said"), REFUSED, ids=[pattern[:12] for pattern, _ in REFUSED])
def test_what_is_not_supported_is_refused_at_its_place(pattern: str, said: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(OptionError, match=said) as caught:
        GrammarCompiler(dialect("bytes"), size("bytes"))(Grammar.regex(pattern))
    assert str(caught.value).startswith("The regex grammar is not valid: At character ")
    assert "\n" not in str(caught.value) and capfd.readouterr().err == ""


def test_patterns_that_differ():
    def differ(one: str, other: str) -> bool:
        return regex.differ(searched(one), searched(other))

    assert differ("^x", "^y") and differ("^a{3}$", "^a{4,}$") and differ("^[a-c]+$", "^[0-9]")
    assert not differ("^x", "y$") and not differ("a", "a") and not differ("^[a-c]+$", "^b")
