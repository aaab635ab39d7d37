"""Rules of xgrammar's EBNF, as text."""

import json
from collections.abc import Iterator

from foredraft.model.text.json_text import escapes, raw, spelled, spelled_start
from foredraft.model.text.regex import (
    LAST,
    Anchor,
    Both,
    Chars,
    Either,
    Join,
    Node,
    Repeat,
    after,
    edges,
    ends,
)

NEVER = r"[^\x00-\U0010FFFF]"
"""Matches nothing."""
_UNROLLED = 32
"""Characters that one automaton counts. xgrammar computes a mask for each of its states when it compiles."""
_LISTED = 128
"""Repetitions that automata write out; they count more than that."""
_MOST_STATES = 500
"""Of an automaton of a string. Each takes 20 ms to compile for a vocabulary of 49,152."""

_State = tuple[frozenset[Node], int, int | None]
"""What the rest of a text must match, and the fewest and the most characters of it."""


_Step = tuple[Chars, _State]


class TooLargeError(Exception):
    """An automaton has too many states."""


class Rules(dict[str, str]):
    """Bodies of rules by name; equal bodies share one."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, str] = {}

    def reserve(self) -> str:
        """A new name, whose rule comes later."""
        name = f"r{len(self)}"
        self[name] = NEVER
        return name

    def add(self, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self._names:
            self._names[body] = self.reserve()
            self[self._names[body]] = body
        return self._names[body]

    def limited(self, body: str, most: int | None) -> str:
        """A rule that must end at ``most`` characters, as they are written, or where it can next."""
        name = f"limited_{len(self)}"
        self[name if most is None else f"{name}[max_chars={most}]"] = body
        return name

    def text(self) -> str:
        """The grammar."""
        return "".join(f"{name} ::= {body}\n" for name, body in self.items())


def literal(text: str) -> str:
    """The text alone."""
    return '"' + "".join(_escaped(char) for char in text) + '"'


def matching(node: Node) -> str:
    """A text that matches.

    No ``Regex``: automata of xgrammar 0.2.8 are wrong where they can end and go on (``b|b{1,2}`` matches bbb).
    """
    assert not isinstance(node, Both)  # of JSON strings alone
    if isinstance(node, Chars):
        return _class(node)
    if isinstance(node, Anchor):
        return '""'
    if isinstance(node, Either):
        return f"({' | '.join(matching(part) for part in node.parts)})"
    if isinstance(node, Repeat):
        return '""' if node.high == 0 else f"({matching(node.part)}){times(node.low, node.high)}"
    return _joined(node)


def quoted(rules: Rules, node: Node, low: int = 0, high: int | None = None) -> str | None:
    """A JSON string whose text matches and has ``low`` to ``high`` characters; None if there is none.

    An automaton is written here, a rule a state: xgrammar's own (0.2.8) are wrong for some nested repetitions. It
    counts characters up to where any number of one class may follow (``_tail``).

    Raises:
        TooLargeError: it has too many states.
    """
    start: _State = (frozenset((node,)), low, high)
    steps: dict[_State, list[_Step]] = {}
    known: dict[frozenset[Node], list[tuple[Chars, frozenset[Node]]]] = {}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state not in steps:
            if len(steps) >= _MOST_STATES:
                raise TooLargeError
            steps[state] = [] if _tail(state) else _steps(state, known)
            waiting += [then for _, then in steps[state]]
    alive = _alive(steps)
    if start not in alive:
        return None
    names = {state: rules.reserve() for state in steps if state in alive}
    for state, name in names.items():
        if (chars := _tail(state)) is not None:
            rules[name] = _rest_of(rules, chars, state[1], state[2])
            continue
        ways = [way for chars, then in steps[state] if then in alive for way in spelled_out(rules, chars, names[then])]
        rules[name] = " | ".join(ways + ['"\\""'] * _is_end(state))
    return f'"\\"" {names[start]}'


def spelled_text(rules: Rules, node: Node) -> str:
    """The inside of a JSON string whose text matches, without an automaton: slow to mask, but never too large.

    Raises:
        TooLargeError: all of several must match, which takes an automaton.
    """
    if isinstance(node, Chars):
        return f"({' | '.join(spelled_out(rules, node, ''))})"
    if isinstance(node, Either):
        return f"({' | '.join(spelled_text(rules, part) for part in node.parts)})"
    if isinstance(node, Repeat):
        return '""' if node.high == 0 else f"{spelled_text(rules, node.part)}{times(node.low, node.high)}"
    if isinstance(node, Both):
        raise TooLargeError
    return f"({' '.join(spelled_text(rules, part) for part in node.parts)})" if isinstance(node, Join) else '""'


def times(low: int, high: int | None) -> str:
    """How often; masks of ``{0,}`` take xgrammar (0.2.8) many times as long as those of ``*``."""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return short.get((low, high), f"{{{low},{'' if high is None else high}}}")


def spelled_out(rules: Rules, chars: Chars, rest: str) -> Iterator[str]:
    """Ways to write a character of a class inside a JSON string, with what follows."""
    if (plain := raw(chars)).ranges:
        yield f"{_class(plain)} {rest}"
    if (escaped := escapes(chars)) is not None:
        yield f'"\\\\" {rules.add(matching(escaped))} {rest}'


def _steps(state: _State, known: dict[frozenset[Node], list[tuple[Chars, frozenset[Node]]]]) -> list[_Step]:
    """What may come next, and the states behind it.

    Args:
        known: what may come next without a length, so far.
    """
    nodes, low, high = state
    if high is not None and high < max(low, 1):
        return []
    if nodes not in known:
        known[nodes] = list(_moves(nodes))
    return [(chars, (then, max(0, low - 1), None if high is None else high - 1)) for chars, then in known[nodes]]


def _moves(nodes: frozenset[Node]) -> Iterator[tuple[Chars, frozenset[Node]]]:
    firsts = edges(nodes)
    found: dict[frozenset[Node], list[tuple[int, int]]] = {}
    for first, following in zip(firsts, [*firsts[1:], LAST + 1], strict=True):
        if then := after(nodes, first):
            found.setdefault(then, []).append((first, following - 1))
    for then, ranges in found.items():
        if (chars := Chars.of(ranges)).ranges:
            yield chars, then


def _tail(state: _State) -> Chars | None:
    """The class of which any number may follow, where more are to be counted than an automaton should."""
    nodes, low, high = state
    node = next(iter(nodes))
    many = (low if high is None else high) > _UNROLLED and (high is None or low <= high)
    if many and len(nodes) == 1 and isinstance(node, Repeat) and (node.low, node.high) == (0, None):
        return node.part if isinstance(node.part, Chars) else None
    return None


def _is_end(state: _State) -> bool:
    return _tail(state) is not None or (state[1] == 0 and ends(state[0]))


def _alive(steps: dict[_State, list[_Step]]) -> set[_State]:
    """The states from which a text can end."""
    before: dict[_State, list[_State]] = {}
    for state, each in steps.items():
        for _, then in each:
            before.setdefault(then, []).append(state)
    waiting = [state for state in steps if _is_end(state)]
    alive = set(waiting)
    while waiting:
        found = [state for state in before.get(waiting.pop(), ()) if state not in alive]
        alive.update(found)
        waiting += found
    return alive


def any_string(chars: Chars, begin: str = '"') -> str:
    """A JSON string of characters of a class; ``begin``: "" without its first quote."""
    return _automaton(f'{begin}{spelled(chars)}*"')


def string_of(rules: Rules, chars: Chars, low: int, high: int | None) -> str:
    r"""A JSON string of ``low`` to ``high`` characters of a class; None for no limit.

    An automaton that counts has as many states as characters, and each takes time to compile. Longer strings are
    counted by xgrammar while it runs, which checks nearly every token at every step, unless another alternative of
    the grammar has allowed it already. So such strings have another one, ``near``: text of at most ``high``
    characters as they are written, in which ``\n`` counts two. It never ends, so it allows no string by itself, and
    all that it allows may become a string that the count allows.
    """
    if (low, high) == (0, None):
        return any_string(chars)
    if (low if high is None else high) <= _UNROLLED:
        return quoted(rules, Repeat(chars, low, high)) or NEVER
    return f'"\\"" ({_rest_of(rules, chars, low, high)})'


def _rest_of(rules: Rules, chars: Chars, low: int, high: int | None) -> str:
    """``string_of`` without its first quote."""
    name = rules.limited(_automaton(spelled_start(chars)), high)
    if high is not None and high <= _LISTED:
        counted = f'{rules.add(_automaton(spelled(chars)))}{{{low},{high}}} "\\""'
    else:
        counted = _automaton(f'{spelled(chars)}{{{low},{"" if high is None else high}}}"')
    return f"{name} {NEVER} | {counted}"


def _automaton(pattern: str) -> str:
    return f"Regex({json.dumps(pattern, ensure_ascii=False)})"


def _joined(node: Join) -> str:
    """Parts after each other; characters become texts."""
    parts: list[str] = []
    text = ""
    for part in node.parts:
        if isinstance(part, Chars) and part.code is not None:
            text += chr(part.code)
            continue
        parts += [literal(text)] * bool(text) + [matching(part)]
        text = ""
    return f"({' '.join([*parts, *[literal(text)] * bool(text or not parts)])})"


def _class(chars: Chars) -> str:
    if chars.code is not None:
        return literal(chr(chars.code))
    return f"[{''.join(f'{_code(low)}-{_code(high)}' for low, high in chars.ranges)}]"


def _code(code: int) -> str:
    return chr(code) if chr(code).isalnum() and code < 0x80 else f"\\U{code:08x}"


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x20 or code == 0x7F else char
