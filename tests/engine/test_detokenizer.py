"""Text by pieces equals text at once; stops are where a search of the whole text finds them."""

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders

import foredraft
from foredraft.engine.detokenizer import Decode, IncrementalDetokenizer, IncrementalText, Pushed

SAMPLE = Path(foredraft.__path__[0]) / "models" / "sample-16m" / "tokenizer.json"
HALF = "\ufffd"
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\n\tx = 'naïve'",
    "Ünïcödé: Straße, ελληνικά, русский, עברית, العربية, हिन्दी, ไทย",
    "日本語の文章と中文字符。한국어도",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 o\u0308\u0323 Z̷̧̛",
    "  two  spaces , and ' n't' . Done !",
    "literal \ufffd and \ufffd\ufffd twice",
)
texts = st.one_of(
    st.sampled_from(TEXTS),
    st.text(max_size=40),
    st.lists(st.sampled_from(["a", "b", " ", "é", "日", "😀", "e\u0301", "\ufffd"]), max_size=30).map("".join),
)


class Coder:
    """A tokenizer for tests: ``encode`` and ``decode``, and any ids below ``size`` are tokens."""

    def __init__(self, name: str, encode: Callable[[str], list[int]], decode: Decode, size: int) -> None:
        self.name, self.encode, self.decode, self.size = name, encode, decode, size


def byte_coder() -> Coder:
    return Coder("bytes", lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), 256)


def sentencepiece_coder() -> Coder:
    """Llama-2's decoder, really: words begin with U+2581, the first loses it, other characters are bytes."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = ["▁", "▁a", "▁b", "ab", "b", "▁▁", *"abcdefghijklmnopqrstuvwxyz,.'é", "<0x0A>"]
    words += [f"<0x{byte:02X}>" for byte in range(128, 256)]
    number = {word: i for i, word in enumerate(words)}

    def encode(text: str) -> list[int]:
        marked = "▁" + text.replace(" ", "▁")
        ids, at = [], 0
        while at < len(marked):
            size = next((s for s in (2, 1) if marked[at : at + s] in number and at + s <= len(marked)), 0)
            if size:
                ids.append(number[marked[at : at + size]])
            else:
                ids.extend(number.get(f"<0x{byte:02X}>", 0) for byte in marked[at].encode())
            at += max(1, size)
        return ids

    return Coder("sentencepiece", encode, lambda ids: decoder.decode([words[i] for i in ids]), len(words))


def sample_coder() -> Coder | None:
    if not SAMPLE.exists():
        return None
    tokenizer = Tokenizer.from_file(str(SAMPLE))
    return Coder("sample", lambda text: tokenizer.encode(text).ids, tokenizer.decode, tokenizer.get_vocab_size())


CODERS = {"bytes": byte_coder(), "sentencepiece": sentencepiece_coder(), "sample": sample_coder()}


@pytest.fixture(params=CODERS, scope="module")
def coder(request: pytest.FixtureRequest) -> Coder:
    found = CODERS[request.param]
    if found is None:
        pytest.skip(f"the bundled tokenizer is not there: {SAMPLE}")
    return found


steps = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


def blocks(tokens: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """The tokens in steps of these sizes, over and over."""
    at = 0
    for size in cycle(sizes):
        if at >= len(tokens):
            return
        yield tokens[at : at + size]
        at += size


def in_pieces(decode: Decode, tokens: list[int], sizes: list[int]) -> str:
    """The text that comes of blocks of these sizes."""
    stream = IncrementalText(decode)
    return "".join([stream.push(block) for block in blocks(tokens, sizes)]) + stream.finish()


@given(text=texts, sizes=steps)
def test_pieces_add_up_to_the_whole_text(coder: Coder, text: str, sizes: list[int]):
    tokens = coder.encode(text)
    stream = IncrementalText(coder.decode)
    said = ""
    for block in blocks(tokens, sizes):
        said += stream.push(block)
        assert coder.decode(tokens).startswith(said)
    assert said + stream.finish() == coder.decode(tokens)


scraps = st.sampled_from(["😀".encode(), "é".encode(), b"a", b"\xe2\x82", b"\x82", b"\xff", b"\xf0\x9f\x98"])


@given(parts=st.lists(scraps, max_size=60), sizes=steps)
def test_bytes_that_are_no_text(parts: list[bytes], sizes: list[int]):
    """Byte-level decoding is exact even for garbage, over more tokens than the window holds."""
    tokens = list(b"".join(parts))
    coder = byte_coder()
    assert in_pieces(coder.decode, tokens, sizes) == coder.decode(tokens)


@pytest.mark.parametrize("letters", [0, 4, 17])
@pytest.mark.parametrize("size", [1, 3])
def test_a_character_behind_garbage_survives_every_cut(letters: int, size: int):
    for garbage in range(70):
        tokens = [*b"a" * letters, *[0xFF] * garbage, *"😀😀é".encode(), *b"b"]
        assert in_pieces(byte_coder().decode, tokens, [size]) == "a" * letters + HALF * garbage + "😀😀éb"


@given(tokens=st.lists(st.integers(0, 8191), max_size=120), sizes=steps)
def test_any_tokens_add_up(coder: Coder, tokens: list[int], sizes: list[int]):
    """Random ids, special ones included: halves of characters everywhere."""
    tokens = [token % coder.size for token in tokens]
    if coder.name == "sentencepiece":
        # there a broken character changes those beside it
        tokens = [token for token in tokens if token < coder.size - 128]
    assert in_pieces(coder.decode, tokens, sizes) == coder.decode(tokens)


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("block", [1, 2, 3, 5, 7])
def test_a_character_is_said_when_it_is_whole_and_not_before(name: str, block: int):
    coder = CODERS[name]
    assert coder is not None
    text = "ab" + "é日😀" * 12
    ends = [len(coder.encode(text[: n + 1])) for n in range(len(text))]  # tokens after which each one is whole
    tokens = coder.encode(text)
    stream, said = IncrementalText(coder.decode), ""
    for at in range(0, len(tokens), block):
        said += stream.push(tokens[at : at + block])
        assert said == text[: sum(end <= at + block for end in ends)]


def test_an_incomplete_character_comes_at_the_end_only():
    stream = IncrementalText(byte_coder().decode)
    assert stream.push(list("né".encode()[:-1])) == "n"
    assert stream.push([]) == ""
    assert stream.finish() == HALF
    assert stream.finish() == ""


def test_spaces_of_sentencepiece_survive_the_cuts():
    coder = sentencepiece_coder()
    tokens = coder.encode("a b  a   ab " * 40)
    for block in (1, 3, 8):
        assert in_pieces(coder.decode, tokens, [block]) == "a b  a   ab " * 40


def test_a_character_once_said_stays_when_byte_fallback_takes_it_back():
    coder = sentencepiece_coder()
    smile = coder.encode("😀")[1:]
    assert coder.decode(smile + smile[:1]) == HALF * 5
    stream = IncrementalText(coder.decode)
    assert stream.push(smile) == "😀"
    assert stream.push(smile[:1]) == ""
    assert stream.push(coder.encode("c")[1:]) == HALF * 4 + "c"
    assert stream.push(coder.encode("d")[1:]) == "d"


@pytest.mark.parametrize(
    "tokens",
    [
        list("a long text, é 日 😀 ".encode() * 80),
        [0xFF] * 2000,
        [0xF0, 0x9F] * 1000,
        list(HALF.encode()) * 700,
    ],
    ids=["text", "invalid", "halves", "literal"],
)
def test_work_per_token_does_not_grow(tokens: list[int]):
    decoded = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return bytes(ids).decode(errors="replace")

    stream = IncrementalText(decode)
    said = "".join([stream.push([token]) for token in tokens])
    assert max(decoded) < 300 and len(decoded) < 6 * len(tokens)
    assert said + stream.finish() == decode(tokens)


def naive(coder: Coder, tokens: list[int], stops: list[str]) -> tuple[str, int, bool]:
    """Search the whole text after each token."""
    for kept in range(1, len(tokens) + 1):
        text = coder.decode(tokens[:kept])
        for end in range(len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found:
                return text[: end - max(map(len, found))], kept, True
    return coder.decode(tokens), len(tokens), False


cuts = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=2)
others = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=2)


@given(text=texts, cuts=cuts, others=others, sizes=steps)
def test_stops_are_where_a_search_of_the_whole_text_finds_them(
    coder: Coder, text: str, cuts: list[tuple[int, int]], others: list[str], sizes: list[int]
):
    tokens = coder.encode(text)
    whole = coder.decode(tokens)
    stops = [whole[at : at + size].replace(HALF, "") for at, size in cuts] + others
    stops = [stop for stop in stops if stop]
    stream = IncrementalDetokenizer(coder.decode, stops)
    said, kept, stopped = "", 0, False
    for block in blocks(tokens, sizes):
        piece = stream.push(block)
        said, kept = said + piece.text, kept + piece.tokens_kept
        stopped = piece.stopped
        if stopped:
            break
        assert piece.tokens_kept == len(block)
    if not stopped:
        said += stream.finish().text
    assert (said, kept, stopped) == naive(coder, tokens, stops)


def test_a_stop_before_a_replacement_character_of_the_text_itself():
    # with byte fallback the half of U+0080 turns the whole run into U+FFFD, and the text has one of its own
    coder = sentencepiece_coder()
    tokens = coder.encode("\u0800\u0800\U00010000\ufffd\x80")
    stream = IncrementalDetokenizer(coder.decode, ["\u0800\u0800\U00010000"])
    pieces = [stream.push(tokens[:5]), stream.push(tokens[5:10]), stream.push(tokens[10:15])]
    assert [piece.tokens_kept for piece in pieces] == [5, 5, 1]
    assert pieces[-1].stopped


def push_all(stream: IncrementalDetokenizer, *parts: str) -> list[Pushed]:
    return [stream.push(list(part.encode())) for part in parts]


def test_text_that_may_become_a_stop_is_held_and_no_more():
    stream = IncrementalDetokenizer(byte_coder().decode, ["abac", "c!"])
    pieces = push_all(stream, "xab", "ab", "ad", "cc", "!z")
    assert [piece.text for piece in pieces] == ["x", "ab", "abad", "c", ""]
    assert [piece.tokens_kept for piece in pieces] == [3, 2, 2, 2, 1]
    assert [piece.stopped for piece in pieces] == [False, False, False, False, True]


def test_held_text_is_given_back_at_the_end():
    stream = IncrementalDetokenizer(byte_coder().decode, ["\n\nclass"])
    assert push_all(stream, "x\n\ncl") == [Pushed("x", 5)]
    assert stream.finish() == Pushed("\n\ncl", 0)


def test_a_stop_within_an_accepted_block():
    stream = IncrementalDetokenizer(byte_coder().decode, ["\n\n"])
    assert push_all(stream, "one\n", "\ntwo\n\n") == [Pushed("one", 4), Pushed("", 1, stopped=True)]
    assert stream.push([65]) == Pushed("", 0, stopped=True)
    assert stream.finish() == Pushed("", 0, stopped=True)


def test_the_stop_that_ends_first_counts_and_of_those_the_longest():
    assert push_all(IncrementalDetokenizer(byte_coder().decode, ["bcd", "b", "ab"]), "xabcd") == [
        Pushed("x", 3, stopped=True)
    ]
    # one token holds both: the text does not depend on the tokenizer
    stream = IncrementalDetokenizer(lambda ids: "xabcd" * len(ids), ["abcd", "bc"])
    assert stream.push([0, 0]) == Pushed("xa", 1, stopped=True)


def test_a_stop_is_seen_beside_half_a_character():
    stream = IncrementalDetokenizer(byte_coder().decode, ["b"])
    assert stream.push([*b"ab", 0xE2, 0x82]) == Pushed("a", 2, stopped=True)
    stream = IncrementalDetokenizer(lambda ids: b"\xffb\xe2\xff".decode(errors="replace") * len(ids), ["b"])
    assert stream.push([0]) == Pushed(HALF, 1, stopped=True)
    stream = IncrementalDetokenizer(byte_coder().decode, ["é"])
    assert stream.push([*b"a", 0xC3]) == Pushed("a", 2)
    assert stream.push([0xA9, *b"b"]) == Pushed("", 1, stopped=True)
