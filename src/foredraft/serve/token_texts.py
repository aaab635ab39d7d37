"""Single tokens of an output, as answers show them beside log-probabilities."""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

from foredraft.engine.detokenizer import IncrementalText
from foredraft.engine.request import TokenLogprobs
from foredraft.model.text.token_bytes import readable
from foredraft.model.text.tokenizer import Tokenizer

_LEAST = -9999.0
"""In place of an infinite log-probability, which JSON lacks; as in vLLM."""


class ShownToken(NamedTuple):
    r"""A token at a place of a text.

    ``text``: its bytes as text, those of incomplete characters as ``\xf0``; the name of a special token. ``raw``: its
    bytes; joined, those of a text's tokens are the text in UTF-8.
    """

    text: str
    raw: bytes
    special: bool


class TokenTexts:
    """Walks over the tokens of a text, in order.

    ``offset``: characters of the text that the tokens so far have completed, and ``offset`` at the start.

    Args:
        before: tokens that precede the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, before: Seq[int] = (), offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._text = IncrementalText(tokenizer.decode if tokenizer is not None else lambda tokens: "", before)
        self._first = tokenizer is None or not any(map(tokenizer.bytes_of, before))
        self.offset = offset

    def show(self, token: int) -> ShownToken:
        """A token at this place: the next one, or one that might have been."""
        if self._tokenizer is None:
            return ShownToken("", b"", False)
        name = self._tokenizer.token_bytes.names.get(token)
        raw = self._tokenizer.bytes_of(token, first=self._first)
        return ShownToken(readable(raw) if name is None else name, raw, name is not None)

    def take(self, token: int) -> int:
        """Go on behind the next token; where it begins."""
        if self._tokenizer is None:
            return self.offset
        raw = self._tokenizer.bytes_of(token, first=self._first)
        begin = self.offset
        new = self._text.push([token])
        self.offset += len(new)
        own = raw.decode("utf-8", "replace")
        if own and new.endswith(own) and "\ufffd" not in own:  # behind characters that were incomplete until now
            begin = self.offset - len(own)
        self.skip(token)
        return begin

    def skip(self, token: int) -> None:
        """Go on behind the next token, without ``offset``."""
        if self._first and self._tokenizer is not None:
            self._first = not self._tokenizer.bytes_of(token)

    def names(self, found: TokenLogprobs) -> dict[int, str]:
        """Names of the next token and its alternatives, no two alike.

        The next one has its part of the text, which a special token has not. Another token of the same name is called
        by its id, as in ``token_id:17``.
        """
        names: dict[int, str] = {}
        for token in (found.token, *found.top):
            if token in names:
                continue
            shown = self.show(token)
            name = "" if shown.special and token == found.token else shown.text
            names[token] = f"token_id:{token}" if name in names.values() else name
        return names


def finite(logprob: float) -> float:
    """A log-probability that JSON has."""
    return logprob if math.isfinite(logprob) else _LEAST
