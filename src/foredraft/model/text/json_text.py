"""Characters as JSON strings write them, and numbers of a range, as patterns."""

import functools
from collections.abc import Sequence

from foredraft.model.text.regex import ANY, LAST, Chars, Node, Range
from foredraft.model.text.regex_reader import matched


def spelled(chars: Chars) -> str:
    """A pattern of one character of a class in a JSON string, for xgrammar."""
    ways = [_class(raw(chars).ranges)] * bool(raw(chars).ranges) + [rf"\\({_escapes(chars)})"] * bool(_escapes(chars))
    return f"({'|'.join(ways)})"


def spelled_start(chars: Chars) -> str:
    """A pattern of beginnings of the inside of JSON strings of a class: it can end after each character written.

    Not all beginnings are among them: pairs of surrogates are not, nor other codes unless the class has everything.
    """
    short = "".join(letter for code, letter in _SHORT.items() if code in chars)
    units = [_class(raw(chars).ranges)] * bool(raw(chars).ranges) + [rf"\\[{short}]"] * bool(short)
    begun = r"(\\){0,1}" if short else ""
    if chars == ANY:
        units.append(rf"\\u({_SINGLE})")
        half = f"[0-9a-cefA-CEF]{_HEX}{{0,2}}|[dD]([0-7]{_HEX}{{0,1}}){{0,1}}"
        begun = rf"(\\(u({half}){{0,1}}){{0,1}}){{0,1}}"
    return f"({'|'.join(units)})*{begun}"


def _class(ranges: Sequence[Range]) -> str:
    if ranges == ANY.ranges:
        return r"[\x00-" + chr(LAST) + "]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    inside = "".join(_char(low) + (f"-{_char(high)}" if high > low else "") for low, high in ranges)
    return f"[{inside}]"


def _char(code: int) -> str:
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    return f"\\{chr(code)}" if chr(code) in r"\[]^-.{}()|*+?$/" else chr(code)


_SHORT = {0x22: '"', 0x5C: r"\\", 0x2F: r"\/", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_RAW = ~Chars.of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_CONTROLS = Chars.of([(0, 0x1F)])
_BEYOND = Chars.of([(0x80, 0xFFFF)])
_ASTRAL = Chars.of([(0x10000, LAST)])
_HEX = "[0-9a-fA-F]"
_PAIR = rf"[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_SINGLE = rf"[0-9a-cefA-CEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
"""Codes of characters that are no surrogates."""


def span(low: str, high: str, digits: str = "0123456789") -> str:
    """A pattern of the numbers from one to another of the same length; hexadecimal digits are lower-case here."""
    if not low:
        return ""
    size = len(low) - 1
    every = _digits(digits, 0, len(digits) - 1)
    if low[0] == high[0]:
        return _digits(digits, digits.index(low[0]), digits.index(low[0])) + span(low[1:], high[1:], digits)
    first, last = digits.index(low[0]), digits.index(high[0])
    ways: list[str] = []
    if low[1:] != digits[0] * size:
        ways.append(_digits(digits, first, first) + span(low[1:], digits[-1] * size, digits))
        first += 1
    if high[1:] != digits[-1] * size:
        ways.append(_digits(digits, last, last) + span(digits[0] * size, high[1:], digits))
        last -= 1
    if first <= last:
        ways.append(_digits(digits, first, last) + (f"{every}{{{size}}}" if size > 1 else every * size))
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"


def _digits(digits: str, first: int, last: int) -> str:
    """One digit, small or capital."""
    some = dict.fromkeys(each for digit in digits[first : last + 1] for each in (digit, digit.upper()))
    return next(iter(some)) if len(some) == 1 else f"[{''.join(some)}]"


def raw(chars: Chars) -> Chars:
    """Those characters of a class that stand for themselves in a JSON string."""
    return chars & _RAW


@functools.cache
def escapes(chars: Chars) -> Node | None:
    """What may stand behind a backslash in a JSON string for a character of a class; None for nothing.

    A class of ASCII alone is spelled as ``json.dumps`` does it; others may be escaped in JSON's other ways too.
    """
    written = _escapes(chars)
    return matched(written) if written else None


def _escapes(chars: Chars) -> str:
    wide = chars.ranges[-1][1] > 0x7F
    short = [letter for code, letter in _SHORT.items() if code in chars and (wide or code != 0x2F)]
    if chars == ANY:
        codes = [_SINGLE, _PAIR]
    else:
        controls = [code for low, high in (chars & _CONTROLS).ranges for code in range(low, high + 1)]
        codes = [f"{code:04x}" for code in controls if code not in _SHORT or wide]
        codes += [span(f"{low:04x}", f"{high:04x}", "0123456789abcdef") for low, high in (chars & _BEYOND).ranges]
        codes += [_PAIR] * (chars & _ASTRAL == _ASTRAL)
    return "|".join([f"[{''.join(short)}]"] * bool(short) + [f"u({'|'.join(codes)})"] * bool(codes))
