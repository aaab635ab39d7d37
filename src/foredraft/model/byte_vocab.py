"""A tokenizer as bytes: what each of its tokens says, and how it writes any bytes.

Tokens of different vocabularies can be compared by their bytes alone. How a vocabulary marks spaces and bytes is
found out by asking its decoder, not by its name: GPT-2's alphabet for bytes, sentencepiece's low line for spaces and
<0x..> for bytes, and for anything else what a token adds to a text that it is appended to.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foredraft.model.tokenizer import Tokenizer

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_HALVES = re.compile("([\udc80-\udcff]+)")
"""Bytes that are no character, as ``surrogateescape`` has them."""

_MARK = "\0"
"""A character that no vocabulary joins with others."""


class Spelling:
    """What tokens say, and the tokens that say something. The caller's tokenizer stays as it is.

    ``pieces[i]`` are the bytes of token i, none for special tokens, for padding of the vocabulary, and where there are
    no logits. ``names`` are the special tokens by id, ``index`` the others by their bytes. ``opening``: the special
    tokens that a text begins with. ``adds_space``: a text is written as if a space stood before it.

    Args:
        size: tokens of the model's logits, which may be more than the tokenizer has, or fewer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        inner = tokenizer.inner
        self._encode = _encoder(inner)
        self.names = _special(inner)
        vocabulary = dict(sorted(inner.get_vocab().items(), key=lambda entry: entry[1]))  # it comes in any order
        self.pieces = [b""] * max(size, *(index + 1 for index in vocabulary.values()))
        for index, said in _pieces(inner, vocabulary, self.names):
            if index < size:
                self.pieces[index] = said
        self.index: dict[bytes, int] = {}
        for token in sorted(
            vocabulary, key=lambda token: _BYTE.fullmatch(token) is not None
        ):  # bytes if all else fails
            index = vocabulary[token]
            if self.pieces[index]:
                self.index.setdefault(self.pieces[index], index)
        begun = inner("a", add_special_tokens=True)["input_ids"]
        self.opening = list(itertools.takewhile(self.names.__contains__, begun))
        self.adds_space = self.say(self._encode("a")) == b" a"
        self._mark = self._encode(_MARK)

    def say(self, tokens: Iterable[int]) -> bytes:
        """What tokens say together."""
        pieces = self.pieces
        return b"".join([pieces[token] for token in tokens])

    def spell(self, raw: bytes, first: bool = False) -> list[int]:
        """The tokens of a text; without special ones, whatever is written there.

        Bytes that are no character become tokens of one byte each, or nothing where the vocabulary has none.

        Args:
            first: a text begins; otherwise it goes on from one that is not given.
        """
        if raw.isascii():
            return self._spell(raw.decode(), first) if raw else []
        tokens: list[int] = []
        for number, run in enumerate(_HALVES.split(raw.decode("utf-8", "surrogateescape"))):
            if number % 2:
                single = (bytes([byte]) for byte in run.encode("utf-8", "surrogateescape"))
                tokens += [self.index[byte] for byte in single if byte in self.index]
            elif run:
                tokens += self._spell(run, first and not tokens)
        return tokens

    def _spell(self, text: str, first: bool) -> list[int]:
        """The same for a text of whole characters."""
        if first or not self.adds_space:
            return self._encode(text)
        tokens, mark = self._encode(_MARK + text), len(self._mark)  # nothing is added in the middle of a text
        return tokens[mark:] if tokens[:mark] == self._mark else self._encode(text)


def complete(raw: bytes) -> bytes:
    """A text without the bytes at its end that are no character, or not yet one."""
    if raw.isascii():
        return raw
    text = raw.decode("utf-8", "surrogateescape")
    return text.rstrip("".join(map(chr, range(0xDC80, 0xDD00)))).encode("utf-8", "surrogateescape")


def _encoder(inner: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """From text to ids, in which nothing that is written stands for a special token."""
    if not isinstance(inner, PreTrainedTokenizerFast):
        return lambda text: list(inner.encode(text, add_special_tokens=False, split_special_tokens=True))
    own = tokenizers.Tokenizer.from_str(inner.backend_tokenizer.to_str())
    own.encode_special_tokens = True
    own.no_truncation()
    own.no_padding()

    def encode(text: str) -> list[int]:
        try:
            return own.encode(text, add_special_tokens=False).ids
        except Exception:  # tokenizers has no kind of its own for a text with words that a vocabulary cannot write
            return []

    return encode


def _special(inner: PreTrainedTokenizerBase) -> dict[int, str]:
    """Ids of special tokens and their names."""
    marked = [index for index, token in inner.added_tokens_decoder.items() if token.special]
    return {index: str(inner.convert_ids_to_tokens(index)) for index in {*inner.all_special_ids, *marked}}


def _pieces(
    inner: PreTrainedTokenizerBase, vocabulary: dict[str, int], special: dict[int, str]
) -> Iterable[tuple[int, bytes]]:
    """The bytes of each token that is not special."""

    def say(tokens: list[str]) -> str:
        try:
            return str(inner.convert_tokens_to_string(tokens))
        except Exception:  # a decoder may raise anything at tokens that are not its own
            return ""

    read = _reader(say, list(vocabulary))
    added = {index: token.content.encode() for index, token in inner.added_tokens_decoder.items()}
    for token, index in vocabulary.items():
        if index not in special:
            yield index, added[index] if index in added else read(token)


def _reader(say: Callable[[list[str]], str], vocabulary: Sequence[str]) -> Callable[[str], bytes]:
    """What a token as it is written in the vocabulary says. ``say``: the decoder."""
    marks = _marks()
    bytes_of = {mark: byte for byte, mark in marks.items()}
    if say(["".join(marks[byte] for byte in "中".encode())]) == "中":
        return lambda token: bytes(map(bytes_of.__getitem__, token)) if bytes_of.keys() >= {*token} else token.encode()
    if say(["x", "▁y"]) == "x y":
        has_bytes = say(["x", "<0x41>"]) == "xA"

        def spaced(token: str) -> bytes:
            byte = _BYTE.fullmatch(token) if has_bytes else None
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

        return spaced
    anchor = next((token for token in vocabulary if token.isalnum() and say([token]) == token), "")

    def appended(token: str) -> bytes:
        text = say([anchor, token]) if anchor else say([token])
        return b"" if "\ufffd" in text else text.removeprefix(anchor).encode("utf-8", "ignore")

    return appended


def _marks() -> dict[int, str]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others have those from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
