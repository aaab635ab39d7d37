"""Options of drafters: their base classes, and reading them from text, ``option=value``."""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args, get_type_hints

from foredraft.core.errors import OptionError
from foredraft.core.law import Law
from foredraft.core.sampling.params import check_known

T = TypeVar("T")


class DrafterOptions:
    """Base of the ``Options`` of every method, which are frozen dataclasses: what the loop has to know of them."""

    __slots__ = ()

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.FIXED

    @property
    def schedule(self) -> str:
        """How the size of drafts is chosen: one of ``engine.policy.SCHEDULES``."""
        return "constant"

    @property
    def confidence(self) -> float:
        """A path ends after its first token below this probability (see ``Plan``); 0: never."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedOptions(DrafterOptions):
    """Options of methods whose drafts have a size.

    num_assistant_tokens_schedule: auto, the size with the most tokens a second; constant, always the largest; or
        heuristic, transformers' rule of two more and one less. See docs/schedules.md.
    """

    num_assistant_tokens_schedule: str = "auto"

    @property
    def schedule(self) -> str:
        return self.num_assistant_tokens_schedule


def read_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Texts of the form option=value, as a mapping.

    Raises:
        OptionError: a text that is not of this form.
    """
    given = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"The option {pair!r} is not of the form option=value.")
        given[key.strip()] = value.strip()
    return given


def parts(text: str, separator: str) -> list[str]:
    """Split a text, but not inside [square brackets]: there may stand another spec, with commas of its own.

    Raises:
        OptionError: brackets that do not match.
    """
    found, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth < 0:
            break
        if character == separator and not depth:
            found.append("")
        else:
            found[-1] += character
    if depth:
        raise OptionError(f"The square brackets of {text!r} do not match.")
    return found


def entries(text: str) -> list[str]:
    """The entries of a list such as A+B+[C,option=value], without the brackets around an entry.

    Raises:
        OptionError: an entry with nothing in it, or brackets that do not match.
    """
    found = [part.strip() for part in parts(text, "+")]
    found = [part[1:-1].strip() if part.startswith("[") and part.endswith("]") else part for part in found]
    if not all(found):
        raise OptionError(f"{text!r} has an empty entry; write A+B, or [A,option=value]+B.")
    return found


def read_options(kind: type[T], name: str, given: Mapping[str, str]) -> T:
    """An object of the dataclass ``kind`` from texts by field; what is not given keeps its default.

    Tuples of whole numbers are written with an x between them, such as 4x2x1; truth is yes or no.

    Raises:
        OptionError: an unknown option, with a list of the known ones, or a value of the wrong type.
    """
    known = get_type_hints(kind)
    check_known(f"option of {name}", given, list(known))
    return kind(**{key: _value(key, text, known[key]) for key, text in given.items()})


def _value(key: str, text: str, hint: Any) -> Any:
    kinds = [part for part in get_args(hint) if part is not type(None)] if type(None) in get_args(hint) else [hint]
    try:
        if kinds[0] is bool:
            return {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}[text.lower()]
        if kinds[0] in (int, float, str):
            return kinds[0](text)
        return tuple(int(part) for part in text.split("x"))
    except (ValueError, KeyError):
        raise OptionError(f"The option {key}={text} has a value of the wrong type.") from None


@dataclass(frozen=True, slots=True)
class Described:
    """An option for a person: its name, what it means, and its default as it would be typed."""

    name: str
    meaning: str
    default: str


def described(kind: type[Any]) -> list[Described]:
    """The options of the dataclass ``kind``, with their meanings from its docstring and those of its bases.

    An option is documented by a line ``name: meaning``, or ``name, name: meaning``, whose further lines are indented.
    What a default of None stands for is in the field's metadata, under ``unset``.
    """
    meanings: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        meanings |= _meanings(inspect.cleandoc(each.__dict__.get("__doc__") or ""))
    return [
        Described(each.name, meanings.get(each.name, ""), each.metadata.get("unset") or written(each.default))
        for each in fields(kind)
    ]


def written(value: Any) -> str:
    """A value of an option as ``read_options`` reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "none"
    return str(value)


def _meanings(text: str) -> dict[str, str]:
    """The entries of a docstring by name."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in text.splitlines():
        entry = _ENTRY.match(line)
        if entry is not None:
            names = entry[1].split(", ")
            found |= {name: [entry[2]] for name in names}
        elif not line.startswith(" "):
            names = []
        for name in names if entry is None else ():
            found[name].append(line.strip())
    return {name: " ".join(lines).replace("``", "") for name, lines in found.items()}


_ENTRY = re.compile(r"([a-z_]+(?:, [a-z_]+)*): (.+)")
