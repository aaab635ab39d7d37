"""Tokens become text, piece by piece, and stop strings are found in it.

The only place of the engine that knows a tokenizer, and all that it knows is its ``decode``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.core.errors import OptionError

Decode = Callable[[list[int]], str]
"""A tokenizer's decode, special tokens left out: ids to text, with U+FFFD where bytes are no character."""

_HALF = "\ufffd"
_WINDOW = 32  # tokens; a window that has grown beyond is cut
_CONTEXT = 4  # tokens that a cut leaves: no character of UTF-8 has more bytes
_TRIES = 8


class IncrementalText:
    """Text of a growing sequence of tokens: what is returned, put together, is ``decode`` of all tokens.

    A window over the last tokens is decoded at each push, never the token alone, because decoding depends on
    what stands before: sentencepiece drops the space at the start of a text, and the bytes of a character may
    lie in several tokens. The window is cut now and then, so the work for a token does not grow with the
    text.

    Text is held back while it may be half a character. The sum is exact for byte-level BPE, whatever the
    bytes. A decoder with byte fallback turns a whole run of bytes into U+FFFD when one character in it is
    broken, even characters already said: these stay said, and the run's U+FFFD are that many fewer.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0  # characters of decode(window) that were returned
        self._limit = _WINDOW
        self._last = (0, 0)  # tokens in the window and characters sent before the last push

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the characters that are now certain."""
        if len(self._window) > self._limit:
            self._cut()
        self._last = (len(self._window), self._sent)
        self._window.extend(tokens)
        text = self._certain(self._window)
        fresh = text[self._sent :]
        self._sent += len(fresh)
        return fresh

    def finish(self) -> str:
        """The rest: whatever was held back, U+FFFD for an incomplete character."""
        fresh = self._decode(self._window)[self._sent :]
        self._sent += len(fresh)
        return fresh

    def tokens_for(self, characters: int) -> int:
        """How many tokens of the last push it takes to bring forth the first so many of its characters."""
        before, sent = self._last
        for end in range(before + 1, len(self._window)):
            if len(self._certain(self._window[:end])) - sent >= characters:
                return end - before
        return len(self._window) - before

    def _certain(self, window: list[int]) -> str:
        """``decode(window)`` without the characters at its end that further tokens may change."""
        text = self._decode(window)
        if not text.endswith(_HALF):
            return text
        if not text.endswith(_HALF * 2):
            return text[:-1]
        # Several: with byte fallback one for each byte of half a character, or of a run that ends with one;
        # without the tokens of that half, of which there are three at most, the rest is whole.
        whole = text.rstrip(_HALF)
        for half in range(1, min(3, len(window)) + 1):
            before = self._decode(window[:-half])
            if not before.endswith(_HALF):
                return max(before, whole, key=len)
        # Either these bytes are no text, or the text is about U+FFFD. To hold them for ever would be wrong.
        return whole if len(text) - len(whole) <= _WINDOW else text[:-1]

    def _cut(self) -> None:
        """Shorten the window from the left, where the rest decodes to the same characters and some were sent.

        Not between the bytes of a character, and not so that only tokens without text are left as context.
        """
        text = self._decode(self._window)
        held = len(text) - self._sent
        if text[: self._sent] == self._certain(self._window):
            for size in range(_CONTEXT, _CONTEXT + _TRIES):
                rest = self._decode(self._window[-size:])
                if len(rest) > held and text.endswith(rest):
                    self._window = self._window[-size:]
                    self._sent = len(rest) - held
                    self._limit = _WINDOW
                    return
        self._limit = 2 * len(self._window)  # tried in vain: not at every push, or the work would grow


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push brought: text that is safe to show, and how many of the pushed tokens are to be kept."""

    text: str
    tokens_kept: int
    stopped: bool = False


class IncrementalDetokenizer:
    """The text of one request, until a stop string is in it.

    ``stop_strings`` are looked for across the borders of tokens and pushes. As in transformers the tokens up
    to and including the one that completes a stop string are kept; the text ends before the stop string.
    Where several match, the one that ends first counts, and of those the longest. Text that may yet become a
    stop string is held back.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise OptionError("stop_strings must be non-empty strings.")
        self._text = IncrementalText(decode)
        self._stops = tuple(stop_strings)
        self._held = ""  # certain, but perhaps the beginning of a stop string
        self._stopped = False

    def push(self, tokens: Sequence[int]) -> Pushed:
        """Add the tokens of a step. After a stop nothing is added any more."""
        if self._stopped:
            return Pushed("", 0, stopped=True)
        fresh = self._text.push(tokens)
        if not self._stops:
            return Pushed(fresh, len(tokens))
        text = self._held + fresh
        match = self._find(text)
        if match is not None:
            start, end = match
            kept = self._text.tokens_for(end - len(self._held))
            self._held, self._stopped = "", True
            return Pushed(text[:start], kept, stopped=True)
        safe = len(text) - self._beginning(text)
        self._held = text[safe:]
        return Pushed(text[:safe], len(tokens))

    def finish(self) -> Pushed:
        """No more tokens will come: the text that was held back, if no stop string was found."""
        if self._stopped:
            return Pushed("", 0, stopped=True)
        text = self._held + self._text.finish()
        self._held = ""
        return Pushed(text, 0)

    def _find(self, text: str) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first; the longest of those."""
        starts = [(text.find(stop), len(stop)) for stop in self._stops]
        matches = [(start + size, start) for start, size in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` that some stop string begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
