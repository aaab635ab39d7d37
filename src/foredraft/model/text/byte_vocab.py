"""A byte-level view of a tokenizer: the bytes of each token, and the tokens of any bytes.

Tokens of different vocabularies are compared by their bytes; see ``token_bytes``.
"""

import itertools
import re
from collections.abc import Callable, Iterable

import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foredraft.model.text.token_bytes import BYTE
from foredraft.model.text.tokenizer import Tokenizer

_INCOMPLETE = re.compile("([\udc80-\udcff]+)")
"""Bytes of incomplete characters, as decoded by ``surrogateescape``."""

_MARK = "\0"
"""A character that no vocabulary merges with others."""


class ByteVocab:
    """Maps tokens to bytes and bytes to tokens. The caller's tokenizer is not modified.

    ``pieces[i]``: the bytes of token i; empty for special tokens, vocabulary padding, and tokens without logits.
    ``names``: special tokens by id. ``index``: the other tokens' ids by their bytes. ``opening``: the special tokens
    that start a prompt. ``adds_space``: whether the tokenizer encodes a string as if a space preceded it.

    Args:
        size: width of the model's logits, which may be more or less than the tokenizer's size.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        inner = tokenizer.inner
        self._encode_string = _encoder(inner)
        tokens = tokenizer.token_bytes
        self.names = tokens.names
        vocabulary = dict(sorted(inner.get_vocab().items(), key=lambda entry: entry[1]))  # its order is arbitrary
        self.pieces = [b""] * max(size, *(index + 1 for index in vocabulary.values()))
        for index in vocabulary.values():
            if index < size:
                self.pieces[index] = tokens[index]
        self.index: dict[bytes, int] = {}
        for token in sorted(vocabulary, key=lambda token: BYTE.fullmatch(token) is not None):  # byte tokens last
            index = vocabulary[token]
            if self.pieces[index]:
                self.index.setdefault(self.pieces[index], index)
        prompt = inner("a", add_special_tokens=True)["input_ids"]
        self.opening = list(itertools.takewhile(self.names.__contains__, prompt))
        self.adds_space = self.decode(self._encode_string("a")) == b" a"
        self._mark = self._encode_string(_MARK)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes of a token sequence."""
        pieces = self.pieces
        return b"".join([pieces[token] for token in tokens])

    def encode(self, raw: bytes, first: bool = False) -> list[int]:
        """The tokens of a byte string. Names of special tokens in it are encoded as plain text.

        Bytes of incomplete characters become single-byte tokens, or nothing if the vocabulary has none.

        Args:
            first: the string starts a prompt; otherwise it continues one.
        """
        if raw.isascii():
            return self._encode_text(raw.decode(), first) if raw else []
        tokens: list[int] = []
        for number, run in enumerate(_INCOMPLETE.split(raw.decode("utf-8", "surrogateescape"))):
            if number % 2:
                single = (bytes([byte]) for byte in run.encode("utf-8", "surrogateescape"))
                tokens += [self.index[byte] for byte in single if byte in self.index]
            elif run:
                tokens += self._encode_text(run, first and not tokens)
        return tokens

    def _encode_text(self, text: str, first: bool) -> list[int]:
        """Encode a string of whole characters."""
        if first or not self.adds_space:
            return self._encode_string(text)
        tokens, mark = self._encode_string(_MARK + text), len(self._mark)  # no space is added after the mark
        return tokens[mark:] if tokens[:mark] == self._mark else self._encode_string(text)


def complete(raw: bytes) -> bytes:
    """A byte string without the bytes of an incomplete character at its end."""
    if raw.isascii():
        return raw
    text = raw.decode("utf-8", "surrogateescape")
    return text.rstrip("".join(map(chr, range(0xDC80, 0xDD00)))).encode("utf-8", "surrogateescape")


def _encoder(inner: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """A function from strings to ids that encodes names of special tokens as plain text."""
    if not isinstance(inner, PreTrainedTokenizerFast):
        return lambda text: list(inner.encode(text, add_special_tokens=False, split_special_tokens=True))
    own = tokenizers.Tokenizer.from_str(inner.backend_tokenizer.to_str())
    own.encode_special_tokens = True
    own.no_truncation()
    own.no_padding()

    def encode(text: str) -> list[int]:
        try:
            return own.encode(text, add_special_tokens=False).ids
        except Exception:  # tokenizers raises a plain Exception for strings that a vocabulary cannot encode
            return []

    return encode
