"""Rules of JSON's arrays and objects, as ``json.dumps`` spells them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foredraft.model.text.ebnf import Rules, literal, spelled_out, times
from foredraft.model.text.regex import Chars
from foredraft.model.text.schema_keywords import dumps


class JsonRules(Rules):
    """Rules, and the white space between tokens of JSON. None stands for what matches nothing.

    Args:
        space: EBNF of white space that may stand between tokens. By default, a blank follows commas and colons.
    """

    def __init__(self, space: str = "") -> None:
        super().__init__()
        self._space = "ws" if space else ""
        if space:
            self["ws"] = space
        self._comma = " ".join(filter(None, (self._space, '","' if space else '", "', self._space)))
        self.colon = " ".join(filter(None, (self._space, '":"' if space else '": "', self._space)))

    def enclosed(self, begin: str, parts: Sequence[str], end: str) -> str:
        between = f" {self._comma} ".join(parts)
        return f"{literal(begin)} {self._space} {between} {self._space} {literal(end)}"

    def named(self, name: str, value: str) -> str:
        return f"{literal(dumps(name))} {self.colon} {value}"

    def constant(self, value: Any) -> str:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return f"({literal(dumps(value))} | {literal(str(int(value)))})"
        if isinstance(value, list) and value:
            return self.enclosed("[", [self.constant(each) for each in value], "]")
        if isinstance(value, Mapping) and value:
            return self.enclosed("{", [self.named(name, self.constant(each)) for name, each in value.items()], "}")
        return literal(dumps(value))

    def listing(self, first: Sequence[str], item: str | None, low: int, high: int | None) -> str | None:
        """An array of ``low`` to ``high`` values: those of ``first``, then others."""
        if high is not None and low > high:
            return None
        size = len(first)
        rest = '""' if item is None else self._repeated(item, size, low, high)
        for number in range(size - 1, -1, -1):
            between = f"{self._comma} " if number else ""
            more = f"{between}{first[number]} {rest}"
            rest = self.add(more if number < low else f'"" | {more}')
        return f'"[" {self._space} {rest} {self._space} "]"'

    def _repeated(self, item: str, before: int, low: int, high: int | None) -> str:
        """A value for ever, behind ``before`` others."""
        more = self.add(f"{self._comma} {item}")
        least, most = max(0, low - before), None if high is None else high - before
        if most == 0:
            return '""'
        if before:
            return f"{more}{times(least, most)}"
        several = f"{item} {more}{times(max(0, least - 1), None if most is None else most - 1)}"
        return self.add(several if least else f'"" | {several}')

    def different(self, values: Sequence[str], low: int, high: int | None) -> str | None:
        """An array of ``low`` to ``high`` of these, each once at most, in any order."""
        most = len(values) if high is None else min(high, len(values))
        rests: dict[int, str | None] = {}
        for came in range(2 ** len(values) - 1, -1, -1):  # what came is the bits that are set
            count = came.bit_count()
            if count <= most:
                between = f"{self._comma} " if count else ""
                left = [index for index in range(len(values)) if count < most and not came >> index & 1]
                after = [(values[index], rests[came | 1 << index]) for index in left]
                ways = [f"{between}({value}) {rest}" for value, rest in after if rest is not None]
                body = choice([*ways, '""' if count >= low else None])
                rests[came] = None if body is None else self.add(body)
        return None if rests[0] is None else f'"[" {self._space} {rests[0]} {self._space} "]"'

    def members(self, parts: Sequence[tuple[str, bool]], opened: str | None, low: int, high: int | None) -> str | None:
        """An object of ``low`` to ``high`` members: parts in their order, of which some must be there, then others.

        Rules are by what is left and by the members so far, counted as far as it matters.
        """
        cap = max(1, low) if high is None else high
        more = None if opened is None else self.add(f"{self._comma} {opened}")
        rests: list[str | None] = []
        for count in range(min(len(parts), cap) + 1):
            if opened is None or more is None:
                rests.append('""' if count >= low else None)
            else:
                rests.append(self._repeated(opened, count, low, high))
        for number in range(len(parts) - 1, -1, -1):
            part, must = parts[number]
            made: list[str | None] = []
            for count in range(min(number, cap) + 1):
                after = rests[min(count + 1, cap)] if high is None or count < high else None
                with_it = None if after is None else f"{f'{self._comma} ' if count else ''}{part} {after}"
                body = choice([with_it] if must else [with_it, rests[count]])
                made.append(None if body is None else self.add(body))
            rests = made
        return None if rests[0] is None else f'"{{" {self._space} {rests[0]} {self._space} "}}"'


def choice(bodies: Iterable[str | None]) -> str | None:
    """One of several bodies of rules; None if all match nothing."""
    return " | ".join(body for body in bodies if body is not None) or None


def differing(rules: Rules, names: Iterable[str], rest: str) -> str:
    """The inside of a JSON string that is none of some texts, with the quote that ends it.

    Args:
        rest: the end of any string.
    """
    by_first: dict[str, list[str]] = {}
    ends = False
    for name in names:
        ends = ends or not name
        if name:
            by_first.setdefault(name[0], []).append(name[1:])
    firsts = Chars.of((ord(char), ord(char)) for char in by_first)
    ways = [*spelled_out(rules, ~firsts, rest), *['"\\""'] * (not ends)]
    for char, tails in by_first.items():
        ways += spelled_out(rules, Chars.of([(ord(char), ord(char))]), f"({differing(rules, tails, rest)})")
    return " | ".join(ways)
