"""Incremental detokenization and the search for stop strings.

The engine uses the tokenizer only here, and only its ``decode``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[list[int]], str]
"""A tokenizer's decode without special tokens: ids to text, with U+FFFD for bytes that are not a character."""

_REPLACEMENT = "\ufffd"
_WINDOW = 32  # tokens; a longer window is cut
_CONTEXT = 4  # tokens left after a cut: no UTF-8 character has more bytes
_TRIES = 8


class IncrementalText:
    """Text of a growing sequence of tokens: the returned parts concatenate to what they add to ``decode`` of all.

    Each push decodes a window over the last tokens, because decoding depends on the tokens before: sentencepiece
    drops the space at the start of a text, and the bytes of a character may span several tokens. The window is cut
    from time to time, so the work per token does not grow with the text.

    Text is held back while it may be an incomplete character. The concatenation is exact for byte-level BPE. A decoder
    with byte fallback turns a whole run of bytes into U+FFFD if one character in it is invalid, even characters already
    returned: these are kept, and the run yields that many fewer U+FFFD.

    Args:
        before: tokens that precede the text, such as a prompt; only the last ones are read. A character that they
            begin is returned when it is complete.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._before = before  # until the first push
        self._window: list[int] = []
        self._sent = 0  # characters of decode(window) already returned
        self._incomplete = ""  # the text of a character that those before begin
        self._limit = _WINDOW
        self._last = (0, 0)  # tokens in the window and characters sent before the last push

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the characters that are now final."""
        self._begin()
        if len(self._window) > self._limit:
            self._cut()
        self._last = (len(self._window), self._sent)
        self._window.extend(tokens)
        return self._new(self._final(self._window))

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        self._begin()
        return self._new(self._decode(self._window))

    def tokens_for(self, characters: int) -> int:
        """How many tokens of the last push are needed for its first ``characters`` characters."""
        before, sent = self._last
        for end in range(before + 1, len(self._window)):
            if len(self._final(self._window[:end])) - sent >= characters:
                return end - before
        return len(self._window) - before

    def _begin(self) -> None:
        """Read the end of what precedes the text."""
        if self._before:
            self._window, self._before = _tail(self._decode, self._before), ()
            self._sent = len(self._final(self._window))
            self._incomplete = self._decode(self._window)[self._sent :]
            self._limit = max(_WINDOW, 2 * len(self._window))

    def _new(self, text: str) -> str:
        """The characters of the window's text that have not been returned."""
        fresh = text[self._sent :]
        self._sent += len(fresh)
        if fresh and self._incomplete:  # if it never became a character, it is no part of this text
            own = fresh.removeprefix(self._incomplete)
            tokens, sent = self._last
            self._last = tokens, sent + len(fresh) - len(own)
            self._incomplete = ""
            return own
        return fresh

    def _final(self, window: list[int]) -> str:
        """``decode(window)`` without the characters at its end that further tokens may change."""
        text = self._decode(window)
        if not text.endswith(_REPLACEMENT):
            return text
        if not text.endswith(_REPLACEMENT * 2):
            return text[:-1]
        # Several U+FFFD: with byte fallback one for each byte of an incomplete character, or of a run that ends with
        # one. Without the tokens of the incomplete character, three at most, the rest is complete.
        whole = text.rstrip(_REPLACEMENT)
        for count in range(1, min(3, len(window)) + 1):
            before = self._decode(window[:-count])
            if not before.endswith(_REPLACEMENT):
                return max(before, whole, key=len)
            whole = max(before.rstrip(_REPLACEMENT), whole, key=len)  # the text may contain U+FFFD itself
        # Either the bytes are not text, or the text contains U+FFFD: do not hold them back indefinitely.
        return whole if len(text) - len(whole) <= _WINDOW else text[:-1]

    def _cut(self) -> None:
        """Shorten the window from the left if the rest decodes to the same characters and some were sent.

        Never cuts between the bytes of a character, nor leaves only tokens without text as context.
        """
        text = self._decode(self._window)
        held = len(text) - self._sent
        if text[: self._sent] == self._final(self._window):
            for size in range(_CONTEXT, _CONTEXT + _TRIES):
                rest = self._decode(self._window[-size:])
                if len(rest) > held and text.endswith(rest):
                    self._window = self._window[-size:]
                    self._sent = len(rest) - held
                    self._limit = _WINDOW
                    return
        self._limit = 2 * len(self._window)  # no cut found: wait before the next try, or the work would grow


def _tail(decode: Decode, tokens: Sequence[int]) -> list[int]:
    """The last tokens: enough of them that what follows is decoded as it is behind all of them.

    They have text of their own, and do not begin within a character if that can be avoided.
    """
    size = _CONTEXT
    while size + _CONTEXT <= len(tokens):
        tails = [list(tokens[-each:]) for each in range(size, size + _CONTEXT)]
        texts = [decode(tail) for tail in tails]
        if texts[0]:
            broken = [text.count(_REPLACEMENT) for text in texts]
            return tails[broken.index(min(broken))]
        size *= 2
    return list(tokens)


def text_after(decode: Decode, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of tokens that follow others: ``decode`` of all without ``decode`` of those before."""
    text = IncrementalText(decode, before)
    return text.push(tokens) + text.finish()


@dataclass(frozen=True, slots=True)
class Pushed:
    """Result of a push: text that is final, and how many of the pushed tokens to keep."""

    text: str
    tokens_kept: int
    stopped: bool = False


class IncrementalDetokenizer:
    """The text of one request, up to the first stop string.

    ``stop_strings`` (see ``SamplingParams``) are found across token and push boundaries. As in transformers, the tokens
    up to and including the one that completes a stop string are kept; the text ends before the stop string. If several
    match, the one that ends first counts, and of those the longest. Text that may become a stop string is held back.

    ``stopped_by``: the stop string that was found. ``before``: see ``IncrementalText``.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str], before: Sequence[int] = ()) -> None:
        self._text = IncrementalText(decode, before)
        self._stops = stop_strings
        self._held = ""  # final text that may be the start of a stop string
        self.stopped_by: str | None = None

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Add the tokens of a step; ignored after a stop."""
        if self.stopped_by is not None:
            return Pushed("", 0, stopped=True)
        fresh = self._text.push(tokens)
        if not self._stops:
            return Pushed(fresh, len(tokens))
        text = self._held + fresh
        match = self._find(text)
        if match is not None:
            start, end = match
            kept = self._text.tokens_for(end - len(self._held))
            self._held, self.stopped_by = "", text[start:end]
            return Pushed(text[:start], kept, stopped=True)
        safe = len(text) - self._partial_stop(text)
        self._held = text[safe:]
        return Pushed(text[:safe], len(tokens))

    def finish(self) -> Pushed:
        """End the text; return what was held back, unless a stop string was found."""
        if self.stopped_by is not None:
            return Pushed("", 0, stopped=True)
        text = self._held + self._text.finish()
        self._held = ""
        return Pushed(text, 0)

    def _find(self, text: str) -> tuple[int, int] | None:
        """Start and end of the stop string that ends first; the longest of those."""
        starts = [(text.find(stop), len(stop)) for stop in self._stops]
        matches = [(start + size, start) for start, size in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _partial_stop(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
