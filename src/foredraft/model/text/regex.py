"""Regular expressions as trees, and what they match: by derivatives, without an automaton of the whole."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

_MOST_STATES = 2000
"""That are compared of two patterns."""
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

Range = tuple[int, int]
"""Code points, both ends included."""


def _without(ranges: Iterable[Range], cut: Range) -> Iterator[Range]:
    for low, high in ranges:
        if low < cut[0]:
            yield low, min(high, cut[0] - 1)
        if high > cut[1]:
            yield max(low, cut[1] + 1), high


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class: sorted ranges with gaps between them."""

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> "Chars":
        """The union of ranges, without surrogates, which are no characters."""
        merged: list[Range] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return cls(tuple(_without(merged, SURROGATES)))

    def __invert__(self) -> "Chars":
        starts = [0, *(high + 1 for _, high in self.ranges)]
        ends = [*(low - 1 for low, _ in self.ranges), LAST]
        return Chars.of((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)

    def __and__(self, other: "Chars") -> "Chars":
        return ~Chars.of([*(~self).ranges, *(~other).ranges])

    @property
    def code(self) -> int | None:
        """The only character; None of several."""
        return self.ranges[0][0] if len(self.ranges) == 1 and self.ranges[0][0] == self.ranges[0][1] else None

    def __contains__(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self.ranges)


@dataclass(frozen=True, slots=True)
class Join:
    """Parts after each other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of several; at least one is there."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Both:
    """All of several, of a whole text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part ``low`` to ``high`` times; None for no limit."""

    part: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``, and where it stands in the pattern."""

    start: bool
    place: int


Node = Chars | Join | Either | Both | Repeat | Anchor
EMPTY = Join(())
ANY = Chars.of([(0, LAST)])
ANYTHING = Repeat(ANY, 0, None)
_ALL = frozenset[Node]((ANYTHING,))


def lengths(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters of what matches, or bounds of them for ``Both``; None for no limit."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Anchor):
        return 0, 0
    if isinstance(node, Repeat):
        low, high = lengths(node.part)
        most = 0 if high == 0 or node.high == 0 else None if high is None or node.high is None else high * node.high
        return low * node.low, most
    each = [lengths(part) for part in node.parts]
    highs = [high for _, high in each]
    if isinstance(node, Either):
        return min(low for low, _ in each), None if None in highs else max(high or 0 for high in highs)
    if isinstance(node, Both):
        return max(low for low, _ in each), min((high for high in highs if high is not None), default=None)
    return sum(low for low, _ in each), None if None in highs else sum(high or 0 for high in highs)


def matches(node: Node, given: str) -> bool:
    """Whether a text matches, in time that grows with the product of its length and the pattern's."""
    now = frozenset((node,))
    for char in given:
        now = after(now, ord(char))
    return ends(now)


def differ(one: Node, other: Node) -> bool:
    """Whether it is plain that no text matches both; False where that takes long to find."""
    start = frozenset((one,)), frozenset((other,))
    seen, waiting = {start}, [start]
    while waiting:
        left, right = waiting.pop()
        if (ends(left) and ends(right)) or len(seen) > _MOST_STATES:
            return False
        for code in edges(left | right):
            then = after(left, code), after(right, code)
            if all(then) and then not in seen:
                seen.add(then)
                waiting.append(then)
    return True


def edges(nodes: frozenset[Node]) -> list[int]:
    """The first character of each part into which the next character's classes cut all characters."""
    return sorted({0, *(edge for node in nodes for each in _firsts(node) for edge in _edges(each))})


def after(nodes: frozenset[Node], code: int) -> frozenset[Node]:
    """What the rest of a text must match behind one character: Antimirov's partial derivatives (1996)."""
    found = frozenset(rest for node in nodes for rest in _rests(node, code))
    return _ALL if ANYTHING in found else found


def ends(nodes: frozenset[Node]) -> bool:
    """Whether the text may end here."""
    return any(lengths(node)[0] == 0 for node in nodes)


def _edges(chars: Chars) -> Iterator[int]:
    """One character of each part into which a class cuts all characters."""
    for low, high in chars.ranges:
        yield low
        yield from [high + 1] * (high < LAST)


def _firsts(node: Node) -> Iterator[Chars]:
    """The classes of the first character."""
    if isinstance(node, Chars):
        yield node
    elif isinstance(node, Repeat):
        yield from _firsts(node.part)
    elif isinstance(node, (Join, Either, Both)):
        for part in node.parts:
            yield from _firsts(part)
            if isinstance(node, Join) and lengths(part)[0] > 0:
                return


def _rests(node: Node, code: int) -> Iterator[Node]:
    if isinstance(node, Chars) and code in node:
        yield EMPTY
    elif isinstance(node, Either):
        for part in node.parts:
            yield from _rests(part, code)
    elif isinstance(node, Repeat) and node.high != 0:
        left = Repeat(node.part, max(0, node.low - 1), None if node.high is None else node.high - 1)
        yield from (_joined(rest, (left,)) for rest in _rests(node.part, code))
    elif isinstance(node, Both):
        yield from (Both(rests) for rests in product(*(set(_rests(part, code)) for part in node.parts)))
    elif isinstance(node, Join):
        for index, part in enumerate(node.parts):
            yield from (_joined(rest, node.parts[index + 1 :]) for rest in _rests(part, code))
            if lengths(part)[0] > 0:
                return


def _joined(first: Node, rest: tuple[Node, ...]) -> Node:
    parts = (*(first.parts if isinstance(first, Join) else (first,)), *rest)
    return parts[0] if len(parts) == 1 else Join(parts)
