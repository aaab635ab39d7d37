"""Numbers of JSON schemas as regular expressions and right-linear rules: ranges and multiples, without exponents."""

from decimal import Decimal
from math import ceil, floor
from typing import NamedTuple

from foredraft.model.text.ebnf import Rules, literal, matching
from foredraft.model.text.json_text import span
from foredraft.model.text.regex_reader import matched

_MOST_MULTIPLES = 10_000
"""Multiples in a range that are listed."""
_MOST_STATES = 4096
"""Of the automaton that divides."""


class Bound(NamedTuple):
    """One end of a range; ``strict``: the value itself is outside."""

    value: Decimal
    strict: bool = False


class Interval(NamedTuple):
    """From ``low`` to ``high``; None for no limit."""

    low: Bound | None
    high: Bound | None

    @property
    def empty(self) -> bool:
        """Whether no number is in it."""
        if self.low is None or self.high is None:
            return False
        strict = self.low.strict or self.high.strict
        return self.low.value > self.high.value or (strict and self.low.value == self.high.value)

    def integers(self) -> tuple[int | None, int | None]:
        """The least and the greatest whole number in it."""
        low = None if self.low is None else ceil(self.low.value)
        high = None if self.high is None else floor(self.high.value)
        if self.low is not None and self.low.strict and low == self.low.value:
            low = floor(self.low.value) + 1
        if self.high is not None and self.high.strict and high == self.high.value:
            high = ceil(self.high.value) - 1
        return low, high


def integers(low: int | None, high: int | None) -> str | None:
    """A pattern of the whole numbers from ``low`` to ``high``; None if there are none."""
    if low is not None and high is not None and low > high:
        return None
    ways: list[str] = []
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        ways += [f"-{way}" for way in _naturals(least, None if low is None else -low)]
    if high is None or high >= 0:
        ways += _naturals(max(0, low or 0), high)
    return "|".join(ways)


def decimals(interval: Interval) -> str | None:
    """A pattern of the numbers in an interval; None if there are none."""
    if interval.empty:
        return None
    low, high = interval
    ways: list[str] = []
    if low is None or low.value < 0:
        zero = Bound(Decimal(0), strict=True)
        least = zero if high is None or high.value >= 0 else Bound(-high.value, high.strict)
        ways += [f"-({way})" for way in _positive(least, None if low is None else Bound(-low.value, low.strict))]
    if high is None or high.value >= 0:
        least = Bound(Decimal(0)) if low is None or low.value < 0 else low
        ways += _positive(least, high)
    return "|".join(ways) or None


def multiples(rules: Rules, step: Decimal, interval: Interval, whole: bool) -> list[str] | None:
    """Expressions of the multiples of a step in an interval; None if they are too many to list or to count.

    Args:
        whole: of the whole numbers alone.
    """
    low, high = interval
    ways: list[str] = []
    if high is None or high.value >= 0:
        least = Bound(Decimal(0)) if low is None or low.value < 0 else low
        found = _multiples(rules, step, Interval(least, high), whole)
        if found is None:
            return None
        ways += found
    if low is None or low.value < 0:
        least = Bound(Decimal(0), strict=True) if high is None or high.value >= 0 else Bound(-high.value, high.strict)
        most = None if low is None else Bound(-low.value, low.strict)
        found = _multiples(rules, step, Interval(least, most), whole)
        if found is None:
            return None
        ways += [f'"-" ({way})' for way in found]
    return ways


def _multiples(rules: Rules, step: Decimal, interval: Interval, whole: bool) -> list[str] | None:
    """``multiples`` of an interval of numbers, 0 or more, with a lower end."""
    low, high = interval
    assert low is not None
    if high is not None:
        return _listed(step, low, high, whole)
    size = len(str(int(low.value))) if low.value else 0
    ways = _listed(step, low, Bound(Decimal(10**size), strict=True), whole) if size else []
    automaton = _Division.of(step, max(1, size + bool(size)))
    if ways is None or automaton is None:
        return None
    zero = [] if size or (low.strict and whole) else [automaton.zero(rules, whole)]
    return [*ways, *zero, automaton.root(rules, whole)]


def _listed(step: Decimal, low: Bound, high: Bound, whole: bool) -> list[str] | None:
    first, last = ceil(low.value / step), floor(high.value / step)
    if last - first >= _MOST_MULTIPLES:
        return None
    values = [number * step for number in range(first, last + 1)]
    values = [v for v in values if not (low.strict and v == low.value) and not (high.strict and v == high.value)]
    texts = [f"{value:f}".rstrip("0").rstrip(".") if value % 1 else str(int(value)) for value in values]
    if whole:
        return [literal(text) for text, value in zip(texts, values, strict=True) if not value % 1]
    ends = [r"\.0+" if value % 1 == 0 else "0+" for value in values]
    found = "|".join(text.replace(".", r"\.") + f"({end})?" for text, end in zip(texts, ends, strict=True))
    return [matching(matched(found))] if found else []


class _Division(NamedTuple):
    """The automaton of the multiples of ``divisor / 10**places`` with ``digits`` or more before the point.

    Its states are the digits read, as far as they matter, and the remainder.
    """

    divisor: int
    places: int
    digits: int

    @classmethod
    def of(cls, step: Decimal, digits: int) -> "_Division | None":
        """None if there would be too many states."""
        exponent = step.normalize().as_tuple().exponent
        places = max(0, -exponent) if isinstance(exponent, int) else 0
        divisor = int(step.scaleb(places))
        return cls(divisor, places, digits) if divisor * (digits + places) <= _MOST_STATES else None

    def root(self, rules: Rules, whole: bool) -> str:
        """An expression of those that begin with another digit than 0, or are longer than 1."""
        self._add(rules, whole)
        name = self._name(whole)
        return rules.add(" | ".join(f'"{digit}" {name}_1_{digit % self.divisor}' for digit in range(1, 10)))

    def zero(self, rules: Rules, whole: bool) -> str:
        """An expression of 0 and of those that begin with it."""
        if whole:
            return '"0"'
        self._add(rules, whole)
        return rules.add(f'"0" | "0." {self._name(whole)}_point_0_0')

    def _name(self, whole: bool) -> str:
        return f"m{self.divisor}_{self.places}_{self.digits}{'w' * whole}"

    def _ends(self, rest: int, left: int) -> bool:
        return rest * 10**left % self.divisor == 0

    def _add(self, rules: Rules, whole: bool) -> None:
        name, places = self._name(whole), self.places
        if f"{name}_1_0" in rules:
            return
        for read in range(1, self.digits + 1):
            for rest in range(self.divisor):
                after = min(read + 1, self.digits)
                ways = [f'"{digit}" {name}_{after}_{self._next(rest, digit)}' for digit in range(10)]
                if read == self.digits:
                    ways += ['""'] * self._ends(rest, places) + [f'"." {name}_point_0_{rest}'] * (not whole)
                rules[f"{name}_{read}_{rest}"] = " | ".join(ways)
        for place in range(0 if whole else places + 1):
            for rest in range(self.divisor):
                if place < places:
                    ways = [f'"{digit}" {name}_behind_{place + 1}_{self._next(rest, digit)}' for digit in range(10)]
                else:
                    ways = [f'"0" {name}_behind_{place}_{rest}']
                rules[f"{name}_point_{place}_{rest}"] = " | ".join(ways)
                rules[f"{name}_behind_{place}_{rest}"] = " | ".join(ways + ['""'] * self._ends(rest, places - place))

    def _next(self, rest: int, digit: int) -> int:
        return (rest * 10 + digit) % self.divisor


def _naturals(low: int, high: int | None) -> list[str]:
    """Patterns of the whole numbers from ``low``, 0 or more, to ``high``."""
    ways: list[str] = []
    size = len(str(low))
    while high is None or 10 ** (size - 1) <= high or (size == 1 and high == 0):
        least = max(low, 10 ** (size - 1) if size > 1 else 0)
        most = 10**size - 1 if high is None else min(high, 10**size - 1)
        if least <= most:
            ways.append(span(str(least), str(most)))
        if high is None:
            return [*ways, f"[1-9][0-9]{{{size},}}"]
        size += 1
    return ways


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _positive(low: Bound, high: Bound | None) -> list[str]:
    """Patterns of the numbers, 0 or more, from ``low`` to ``high``."""
    whole, part = int(low.value), _fraction(low.value)
    if high is None:
        above = "|".join(_naturals(whole + 1, None))
        return [*_pointed(str(whole), part, None, low.strict, False), rf"({above})(\.[0-9]+)?"]
    last = int(high.value)
    if whole == last:
        return _pointed(str(whole), part, _fraction(high.value), low.strict, high.strict)
    between = "|".join(_naturals(whole + 1, last - 1)) if last - whole > 1 else ""
    return [
        *_pointed(str(whole), part, None, low.strict, False),
        *[rf"({between})(\.[0-9]+)?"] * bool(between),
        *_pointed(str(last), "", _fraction(high.value), False, high.strict),
    ]


def _fraction(value: Decimal) -> str:
    """The digits behind the point, without zeros at their end."""
    return f"{value:f}".partition(".")[2].rstrip("0")


def _pointed(whole: str, low: str, high: str | None, low_strict: bool, high_strict: bool) -> list[str]:
    none, some = _fractions(low, high, low_strict, high_strict)
    return [whole] * none + [rf"{whole}\.({'|'.join(some)})"] * bool(some)


def _fractions(low: str, high: str | None, low_strict: bool, high_strict: bool) -> tuple[bool, list[str]]:
    """Digits behind a point between two others: whether none are, and patterns of one or more.

    Args:
        low: "" for zero.
        high: "" for zero, None for no limit.
    """
    none = not low and not low_strict and (high is None or high != "" or not high_strict)
    if high == "":
        return none, ["0+"] * none
    if not low and high is None:
        return none, ["0*[1-9][0-9]*" if low_strict else "[0-9]+"]
    first, last = int(low[:1] or 0), int(high[0]) if high else 9
    free_from, free_to = first + 1, last if high is None else last - 1
    ways: list[str] = []
    for digit in dict.fromkeys((first, last) if high else (first,)):
        rest_low, rest_low_strict = (low[1:], low_strict) if digit == first else ("", False)
        rest_high, rest_high_strict = (high[1:], high_strict) if high and digit == last else (None, False)
        empty, some = _fractions(rest_low, rest_high, rest_low_strict, rest_high_strict)
        if some:
            ways.append(f"{digit}({'|'.join(some)})" + "?" * empty)
        elif empty:
            ways.append(str(digit))
    if free_from <= free_to:
        ways.append(_digit(free_from, free_to) + "[0-9]*")
    return none, ways
