"""The bytes that single tokens stand for, from the vocabulary.

A token decoded by itself may be another text: sentencepiece drops the space at the start of a text, and the bytes of a
part of a character are no text. How a vocabulary marks spaces and bytes is determined by probing its decoder: GPT-2's
byte alphabet, sentencepiece's "▁" for spaces and <0x..> for bytes, or otherwise the string that a token adds when
appended to another.
"""

import re
from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE = re.compile("<0x([0-9A-F]{2})>")
"""sentencepiece's name of a byte."""


class TokenBytes:
    """The bytes of each token by id; empty for special tokens and for ids without a token.

    ``names``: special tokens by id.
    """

    def __init__(self, inner: PreTrainedTokenizerBase) -> None:
        self.names = _special(inner)
        self._inner = inner
        self._added = {index: token.content.encode() for index, token in inner.added_tokens_decoder.items()}
        self._of_string = _token_decoder(self._decoded, self._strings)
        self._found: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        found = self._found.get(token)
        if found is None:
            found = self._found[token] = self._read(token)
        return found

    def _read(self, token: int) -> bytes:
        if token in self.names:
            return b""
        if token in self._added:
            return self._added[token]
        try:
            string = self._inner.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError):
            string = None
        return self._of_string(string) if isinstance(string, str) else b""

    def _strings(self) -> Iterable[str]:
        vocabulary = self._inner.get_vocab()
        return sorted(vocabulary, key=vocabulary.__getitem__)

    def _decoded(self, tokens: list[str]) -> str:
        try:
            return str(self._inner.convert_tokens_to_string(tokens))
        except Exception:  # a decoder may raise anything for unknown tokens
            return ""


def readable(raw: bytes) -> str:
    r"""Bytes as text; those of incomplete characters as ``\xf0``."""
    return raw.decode("utf-8", "backslashreplace")


def _special(inner: PreTrainedTokenizerBase) -> dict[int, str]:
    """Names of special tokens by id."""
    marked = [index for index, token in inner.added_tokens_decoder.items() if token.special]
    return {index: str(inner.convert_ids_to_tokens(index)) for index in {*inner.all_special_ids, *marked}}


def _token_decoder(
    decode: Callable[[list[str]], str], vocabulary: Callable[[], Iterable[str]]
) -> Callable[[str], bytes]:
    """A function from a vocabulary entry to its bytes. ``decode``: the tokenizer's decoder."""
    marks = bytes_to_unicode()  # GPT-2's character for each byte
    bytes_of = {mark: byte for byte, mark in marks.items()}
    if decode(["".join(marks[byte] for byte in "中".encode())]) == "中":
        return lambda token: bytes(map(bytes_of.__getitem__, token)) if bytes_of.keys() >= {*token} else token.encode()
    if decode(["x", "▁y"]) == "x y":
        has_bytes = decode(["x", "<0x41>"]) == "xA"

        def spaced(token: str) -> bytes:
            byte = BYTE.fullmatch(token) if has_bytes else None
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

        return spaced
    anchor = next((token for token in vocabulary() if token.isalnum() and decode([token]) == token), "")

    def appended(token: str) -> bytes:
        text = decode([anchor, token]) if anchor else decode([token])
        return b"" if "\ufffd" in text else text.removeprefix(anchor).encode("utf-8", "ignore")

    return appended
