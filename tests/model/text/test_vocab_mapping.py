"""Two tokenizers and one text: what tokens say, how texts are written, and the way there and back."""

import functools
import itertools
import random

import pytest
import torch

from dialects import EXACT, NAMES, SPECIAL, TEXTS, dialect, size, trained
from foredraft.model.text.byte_vocab import ByteVocab, complete
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.model.text.vocab_mapping import VocabMapping

PAIRS = list(itertools.product(NAMES, NAMES))


@functools.cache
def spelling(name: str) -> ByteVocab:
    return ByteVocab(dialect(name), size(name))


@functools.cache
def bridge(target: str, draft: str) -> VocabMapping:
    return VocabMapping(dialect(target), dialect(draft), size(target), size(draft))


def real() -> list[Tokenizer]:
    return [trained("target-65m"), trained("draft-4m")]


def plain(name: str) -> list[bytes]:
    """The texts; sentencepiece cannot tell its own mark from a space."""
    return [text.replace("▁", "").encode() for text in TEXTS]


@pytest.mark.parametrize("name", EXACT)
def test_any_bytes_are_written_exactly(name: str):
    """From every place of every text on: in the middle of a word, of a run of spaces, of a character."""
    one = spelling(name)
    for text in plain(name):
        for begin in range(len(text)):
            assert one.decode(one.encode(text[begin : begin + 30])) == text[begin : begin + 30]
    noise = random.Random(0).randbytes(200)
    assert one.decode(one.encode(noise)) == noise


@pytest.mark.parametrize("name", EXACT)
def test_a_text_is_written_as_its_tokenizer_writes_it(name: str):
    one, inner = spelling(name), dialect(name).inner
    for text in TEXTS:
        if not any(mark in text for mark in one.names.values()):
            assert one.encode(text.encode(), first=True) == inner(text, add_special_tokens=False)["input_ids"]


def test_trained_tokenizers_are_written_exactly():
    for tokenizer in real():
        one = ByteVocab(tokenizer, len(tokenizer.inner))
        assert len(one.index) == len(tokenizer.inner) - len(one.names), "no two tokens say the same"
        for text in map(str.encode, TEXTS):
            for begin in range(len(text)):
                assert one.decode(one.encode(text[begin:])) == text[begin:]


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_an_error_and_nothing_written_is_special(name: str):
    one = spelling(name)
    for raw in (*map(str.encode, TEXTS), *(name.encode() for name in one.names.values()), b"", b"\xff\x00\n", b" "):
        for first in (False, True):
            tokens = one.encode(raw, first)
            assert all(0 <= token < size(name) for token in tokens)
            unknown = dialect(name).inner.unk_token_id
            assert not {*tokens} & ({*one.names} - {unknown})


def test_pieces_of_each_kind():
    def says(name: str, token: str) -> bytes:
        return spelling(name).pieces[dialect(name).inner.get_vocab()[token]]

    assert says("bytes", "Ġfox") == b" fox" and says("bytes", "ä") == b"\xe4"
    assert says("sentencepiece", "▁fox") == b" fox" and says("sentencepiece", "<0xE4>") == b"\xe4"
    assert says("sentencepiece", "<s>") == b"" == says("bytes", SPECIAL[0])
    assert says("words", "fox") == b" fox" == says("wordpiece", "fox")
    assert says("wordpiece", "##s") == b"s"
    assert [spelling(name).adds_space for name in NAMES] == [
        n in ("sentencepiece", "words", "wordpiece") for n in NAMES
    ]


def test_the_callers_tokenizer_stays_as_it_is():
    inner = dialect("bytes").inner
    before = inner.backend_tokenizer.to_str()
    spelling("bytes").encode(TEXTS[7].encode())
    assert inner.backend_tokenizer.to_str() == before and not inner.backend_tokenizer.encode_special_tokens


def test_half_a_character_at_the_end_is_cut_off():
    text = "aé中🚀".encode()
    ends = [len("aé中🚀"[:n].encode()) for n in range(5)]
    for end in range(len(text) + 1):
        assert complete(text[:end]) == text[: max(e for e in ends if e <= end)]
    assert complete(b"\xff a") == b"\xff a" and complete(b"a\xff\xff") == b"a"


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shared_tokens_say_the_same_and_no_two_are_one(target: str, draft: str):
    pair = bridge(target, draft)
    mapped = [(index, other) for index, other in enumerate(pair.shared.tolist()) if other >= 0]
    assert all(pair.target.pieces[index] == pair.draft.pieces[other] != b"" for index, other in mapped)
    assert len({other for _, other in mapped}) == len(mapped)
    assert not {index for index, _ in mapped} & {*pair.target.names}
    assert pair.silent[list(pair.draft.names)].all()
    if target == draft in EXACT:
        assert len(mapped) >= size(target) - len(pair.target.names) - 60  # sentencepiece has bytes twice


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_there_and_back(target: str, draft: str):
    """A text parted anywhere, the rest handed over as the draft writes it: the target's tokens of the rest."""
    pair = bridge(target, draft)
    exact = {target, draft} <= {*EXACT}
    agreed = places = 0
    for text in plain(target):
        tokens = pair.target.encode(text)
        for place in range(0, len(tokens), 3):
            known, rest = tokens[:place], pair.target.decode(tokens[place:])
            told = pair.to_target(known[-10:], pair.draft.encode(rest[:40]))
            if exact:
                said = pair.target.decode(told)
                assert rest.startswith(said) and len(rest[:40]) - len(said) < 4, (text, place)
            agreed += told[:3] == tokens[place : place + 3]
            places += 1
    if exact:
        assert agreed > 0.9 * places


@pytest.mark.parametrize("pieces", [0, 1, 2, 5])
def test_what_only_half_a_character_was_drafted_for_is_nothing(pieces: int):
    pair = bridge("bytes", "digits")
    known = pair.target.encode(b"price: ")
    rocket = [pair.draft.index[bytes([byte])] for byte in "🚀".encode()]
    if pieces < 4:
        assert pair.to_target(known, rocket[:pieces]) == []
    else:
        assert pair.target.decode(pair.to_target(known, [*rocket, *rocket[:1]])) == "🚀".encode()


def test_a_character_that_the_target_has_begun_is_ended():
    pair = bridge("digits", "digits")
    byte = [pair.target.index[bytes([b])] for b in "🚀".encode()]
    for begun in range(1, 4):
        context = pair.to_draft(byte[:begun], first=False)
        assert pair.draft.decode(context) == "🚀".encode()[:begun]
        told = pair.to_target(byte[:begun], byte[begun:])
        assert pair.target.decode(told) == "🚀".encode()[begun:]


def test_special_tokens_are_read_where_both_have_them_and_never_written():
    pair = bridge("bytes", "digits")  # both have the first; the second is the target's own
    end, user = (dialect("bytes").inner.convert_tokens_to_ids(mark) for mark in SPECIAL)
    text = [user, *pair.target.encode(b"hello"), end, *pair.target.encode(b"\nyou")]
    there = dialect("digits").inner.convert_tokens_to_ids(SPECIAL[0])
    assert pair.to_draft(text) == [*pair.draft.encode(b"hello"), there, *pair.draft.encode(b"\nyou")]
    assert pair.to_target(text, [there]) == []
    assert pair.to_target(text[:-1], [*pair.draft.encode(b"s"), there]) == pair.target.encode(b"s")


def test_a_text_begins_once():
    begin = dialect("sentencepiece").inner.bos_token_id
    one, other = bridge("bytes", "sentencepiece"), bridge("sentencepiece", "sentencepiece")
    plain = one.target.encode(b"The fox")
    told = one.to_draft(plain)
    assert told == dialect("sentencepiece").inner("The fox")["input_ids"] and told[0] == begin
    assert other.to_draft(told) == told, "it has begun already"
    assert begin not in one.to_draft(plain, first=False)


def test_the_space_that_sentencepiece_puts_in_front_is_no_text():
    pair = bridge("sentencepiece", "bytes")
    tokens = dialect("sentencepiece").inner("The fox")["input_ids"]
    assert pair.draft.decode(pair.to_draft(tokens)) == b"The fox"
    assert pair.draft.decode(pair.to_draft(tokens[1:], first=False)) == b" The fox"


def test_vocabularies_that_are_padded_or_cut_off():
    """Logits may have more entries than the tokenizer has tokens, or fewer: those it has not are never shared."""
    wide = VocabMapping(dialect("bytes"), dialect("digits"), size("bytes") + 9, size("digits") + 5)
    assert wide.shared.shape == (size("bytes") + 9,) and (wide.shared[-9:] == -1).all() and wide.silent[-5:].all()
    assert wide.to_draft([size("bytes") + 3, *wide.target.encode(b"a")], first=False) == wide.draft.encode(b"a")
    narrow = VocabMapping(dialect("bytes"), dialect("digits"), 300, 290)
    assert narrow.shared.shape == (300,) and int(narrow.shared.max()) < 290
    assert torch.equal(narrow.silent, wide.silent[:290])
    rest = [narrow.to_target([], narrow.draft.encode(text)) for text in map(str.encode, TEXTS)]
    assert all(token < 300 for tokens in rest for token in tokens) and any(rest)


def test_where_texts_are_parted():
    pair = bridge("digits", "bytes")  # which has most of these characters byte by byte

    def places(text: str) -> list[str]:
        """The text, cut there."""
        tokens = pair.target.encode(text.encode())
        cuts = [0, *(place for place in range(1, len(tokens)) if pair.is_boundary(tokens, place)), len(tokens)]
        return [pair.target.decode(tokens[begin:end]).decode() for begin, end in itertools.pairwise(cuts)]

    assert places("f(ab)") == ["f", "(", "ab", ")"]
    assert places("12 ab  cd") in (["12", " ab", "  cd"], ["12", " ab", " ", " cd"], ["12", " ab", "  ", "cd"])
    assert places("天気。🚀🚀文本") == ["天気", "。🚀🚀", "文本"]
    assert places("-" * 30) == ["-" * 30] and places("天" * 30) == ["天" * 30]
    end = dialect("digits").inner.convert_tokens_to_ids(SPECIAL[0])
    assert pair.is_boundary([end, end], 1) and pair.is_boundary([end, *pair.target.encode(b"a")], 1)
