"""Reads regular expressions: the part that JSON Schema's (ECMA-262), Python's and Rust's have in common.

xgrammar ignores what it does not know (``\\A`` is the letter A to it), so nothing reaches it unread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from foredraft.core.errors import OptionError
from foredraft.model.text.regex import (
    ANYTHING,
    EMPTY,
    LAST,
    SURROGATES,
    Anchor,
    Chars,
    Either,
    Join,
    Node,
    Range,
    Repeat,
)

_DEEPEST = 100
"""Levels of nested groups."""
_DIGIT = Chars.of([(0x30, 0x39)])
_WORD = Chars.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_WHITE = (0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)
_SPACE = Chars.of([(9, 13), *((code, code) for code in _WHITE)])
_DOT = ~Chars.of([(10, 10), (13, 13), (0x2028, 0x2029)])
_CLASSES = {"d": _DIGIT, "D": ~_DIGIT, "w": _WORD, "W": ~_WORD, "s": _SPACE, "S": ~_SPACE}
_ESCAPED = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_UNSUPPORTED = {
    **dict.fromkeys("bB", "Word boundaries are"),
    **dict.fromkeys("pP", "Unicode properties are"),
    **dict.fromkeys("123456789k", "Back-references are"),
}
_GROUPS = {
    "?=": "Lookahead is not supported",
    "?!": "Lookahead is not supported",
    "?<=": "Lookbehind is not supported",
    "?<!": "Lookbehind is not supported",
    "?>": "Atomic groups are not supported",
}
"""What begins a group, without its parenthesis."""


def searched(pattern: str) -> Node:
    """What a text matches as a whole if the pattern matches somewhere in it, as JSON Schema has it.

    Raises:
        OptionError: the pattern is not valid, or has what a grammar cannot express; the message names the place.
    """
    return _edged(_Reader(pattern).read(), _Edge(True, True), _Edge(True, True))


def matched(pattern: str) -> Node:
    """What the whole pattern matches; anchors at its ends change nothing. Raises ``OptionError`` as ``searched``."""
    return _edged(_Reader(pattern).read(), _Edge(True, False), _Edge(True, False))


@dataclass(frozen=True, slots=True)
class _Edge:
    """``here``: the node is at this edge of the pattern. ``open``: whatever may stand before (or behind) it."""

    here: bool
    open: bool


_INSIDE = _Edge(False, False)


def _edged(node: Node, left: _Edge, right: _Edge) -> Node:
    """The node without anchors, with anything before and behind it where none of them stands."""
    if isinstance(node, Either):
        return Either(tuple(_edged(part, left, right) for part in node.parts))
    if isinstance(node, Repeat) and _anchored(node) and (node.low, node.high) == (0, 1):
        return _edged(Either((node.part, EMPTY)), left, right)
    parts = list(node.parts) if isinstance(node, Join) else [node]
    while left.here and parts and isinstance(parts[0], Anchor) and parts[0].start:
        parts, left = parts[1:], _Edge(True, False)
    while right.here and parts and isinstance(parts[-1], Anchor) and not parts[-1].start:
        parts, right = parts[:-1], _Edge(True, False)
    made: list[Node] = []
    for index, part in enumerate(parts):
        before = left if index == 0 else _INSIDE
        behind = right if index == len(parts) - 1 else _INSIDE
        if isinstance(part, Anchor) or (isinstance(part, Repeat) and part.high != 1 and _anchored(part)):
            place = next(_anchors(part)).place
            raise OptionError(f"At character {place + 1}: ^ and $ are supported at the ends of a pattern only.")
        if _anchored(part) or isinstance(part, Either):
            made.append(_edged(part, before, behind))
        else:
            made.extend([*[ANYTHING] * before.open, part, *[ANYTHING] * behind.open])
    if not parts and (left.open or right.open):
        made = [ANYTHING]
    return made[0] if len(made) == 1 else Join(tuple(made))


def _anchors(node: Node) -> Iterator[Anchor]:
    if isinstance(node, Anchor):
        yield node
    for part in (node.part,) if isinstance(node, Repeat) else node.parts if isinstance(node, (Join, Either)) else ():
        yield from _anchors(part)


def _anchored(node: Node) -> bool:
    return next(_anchors(node), None) is not None


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> Node:
        node = self._either()
        if self._at < len(self._pattern):
            self._refuse("The parenthesis is not opened")
        return node

    def _refuse(self, reason: str, at: int | None = None) -> NoReturn:
        raise OptionError(f"At character {(self._at if at is None else at) + 1}: {reason}.")

    def _next(self, size: int = 1) -> str:
        return self._pattern[self._at : self._at + size]

    def _take(self, given: str) -> bool:
        found = self._pattern.startswith(given, self._at)
        self._at += len(given) * found
        return found

    def _either(self) -> Node:
        parts = [self._join()]
        while self._take("|"):
            parts.append(self._join())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _join(self) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Join(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        began = self._at
        bounds = self._bounds()
        if bounds is None:
            return part
        if isinstance(part, Anchor):
            self._refuse("An anchor cannot be repeated", began)
        if self._take("+"):
            self._refuse("Possessive repetitions are not supported", self._at - 1)
        self._take("?")  # a lazy repetition matches the same texts
        if self._next() in ("*", "+", "?") or self._count() is not None:
            self._refuse("Two repetitions after each other need a group")
        return Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(mark):
                return bounds
        count = self._count()
        if count is None:
            return None
        low, high, end = count
        if high is not None and high < low:
            self._refuse("The repetition's second number is less than its first")
        self._at = end
        return low, high

    def _count(self) -> tuple[int, int | None, int] | None:
        """``{2}``, ``{2,}`` or ``{2,3}`` here, and where it ends; other braces are characters."""
        end = self._pattern.find("}", self._at)
        if self._next() != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._at + 1 : end].partition(",")
        if not (low.isascii() and low.isdigit() and (not high or (high.isascii() and high.isdigit()))):
            return None
        if len(low) > 9 or len(high) > 9:
            self._refuse("The repetition is too long")
        return int(low), int(high) if high else None if comma else int(low), end + 1

    def _atom(self) -> Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return self._chars()
        if char in "*+?":
            self._refuse("There is nothing to repeat")
        if char == "{" and self._count() is not None:
            self._refuse("There is nothing to repeat")
        self._at += 1
        if char in "^$":
            return Anchor(char == "^", self._at - 1)
        if char == ".":
            return _DOT
        if char != "\\":
            return Chars.of([(ord(char), ord(char))])
        if self._next() in ("A", "Z", "z"):
            self._at += 1
            return Anchor(self._pattern[self._at - 1] == "A", self._at - 2)
        return self._escape()

    def _group(self) -> Node:
        began = self._at
        for mark in _GROUPS:
            if self._pattern.startswith(f"({mark}", self._at):
                self._refuse(_GROUPS[mark])
        self._at += 1
        if self._take("?P<") or self._take("?<"):
            end = self._pattern.find(">", self._at)
            if end < 0 or not self._pattern[self._at : end].isidentifier():
                self._refuse("The group's name is not valid")
            self._at = end + 1
        elif not self._take("?:") and self._next() == "?":
            self._refuse("Flags are not supported")
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"Groups are nested more than {_DEEPEST} levels deep")
        node = self._either()
        self._depth -= 1
        if not self._take(")"):
            self._refuse("The parenthesis is not closed", began)
        return node

    def _chars(self) -> Chars:
        began = self._at
        self._at += 1
        negated = self._take("^")
        if self._next() == "]":
            self._refuse("An empty class is not supported; escape the ] that it may have", began)
        ranges: list[Range] = []
        while not self._take("]"):
            if self._at >= len(self._pattern):
                self._refuse("The class is not closed", began)
            if self._next(2) in ("[:", "[=", "[."):
                self._refuse(r"POSIX classes such as [:digit:] are not supported; write \d or 0-9")
            start = self._at
            first = self._class_char()
            if self._next() == "-" and self._next(2) != "-]" and len(self._next(2)) == 2:
                self._at += 1
                last = self._class_char()
                if first.code is None or last.code is None or last.code < first.code:
                    self._refuse("The range of characters is not valid", start)
                ranges.append((first.code, last.code))
            else:
                ranges.extend(first.ranges)
        found = Chars.of(ranges)
        found = ~found if negated else found
        if not found.ranges:
            self._refuse("The class has no character", began)
        return found

    def _class_char(self) -> Chars:
        char = self._next()
        self._at += 1
        if char != "\\":
            return Chars.of([(ord(char), ord(char))])
        if self._take("b"):
            return Chars.of([(8, 8)])
        if self._take("-"):
            return Chars.of([(0x2D, 0x2D)])
        return self._escape()

    def _escape(self) -> Chars:
        """What stands behind a backslash."""
        began = self._at - 1
        char = self._next()
        self._at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if not char:
            self._refuse("The escape is not finished", began)
        if char in _UNSUPPORTED:
            self._refuse(f"{_UNSUPPORTED[char]} not supported", began)
        if char == "0" and self._next().isdigit():
            self._refuse("Octal escapes are not supported", began)
        if char in ("x", "u"):
            code = self._hex(2 if char == "x" else 4)
        elif char == "c":
            letter = self._next()
            self._at += 1
            code = ord(letter) % 32 if letter.isascii() and letter.isalpha() else None
        else:
            known = not (char.isascii() and char.isalnum())
            code = _ESCAPED.get(char, ord(char) if known else None)
        if code is None or code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            self._refuse(f"The escape \\{char} is not supported", began)
        return Chars.of([(code, code)])

    def _hex(self, size: int) -> int | None:
        digits = self._next(size)
        if size == 4 and self._take("{"):
            end = self._pattern.find("}", self._at)
            digits, self._at = self._pattern[self._at : max(end, self._at)], max(end, self._at) + 1
            size = len(digits) if 0 < len(digits) <= 6 else -1
        else:
            self._at += size
        if len(digits) != size or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            return None
        return int(digits, 16)
