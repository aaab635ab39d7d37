"""Base classes of drafter options, checks of ranges, and parsing from ``option=value`` strings."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args, get_type_hints

from foredraft.core.errors import OptionError
from foredraft.core.law import Law
from foredraft.core.sampling.params import check_known

T = TypeVar("T")
_NONE: Mapping[str, float] = {}


def option(default: T, meaning: str, *, kw_only: bool = False, **metadata: Any) -> T:
    """A dataclass field with its meaning, which help texts show.

    Args:
        kw_only: as in ``dataclasses.field``; for a field that a base has, which otherwise comes first.
        metadata: such as ``unset``, what a default of None means, and what ``cli.flags.FlagGroup`` reads.
    """
    about = {"meaning": meaning, **metadata}
    if kw_only:
        return field(default=default, metadata=about, kw_only=True)  # type: ignore[no-any-return, call-overload]
    return field(default=default, metadata=about)  # type: ignore[no-any-return, call-overload]


class DrafterOptions:
    """Base of the frozen ``Options`` dataclass of every method, with the properties that the loop reads."""

    __slots__ = ()

    law: Law = Law.FIXED
    """The law of drafts for sampled rows, if they are drawn (``View.draws``)."""

    @property
    def schedule(self) -> str:
        """How the draft size is chosen: one of ``engine.policy.SCHEDULES``."""
        return "constant"

    @property
    def confidence(self) -> float:
        """A path ends after its first token below this probability (see ``Plan``); 0: no such limit."""
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedOptions(DrafterOptions):
    """Options of methods with a variable draft size."""

    num_assistant_tokens_schedule: str = option(
        "auto",
        "auto, the size with the most tokens per second; constant, always the largest; or heuristic, transformers' "
        "rule for the length: two more after full acceptance, else one less. See docs/schedules.md.",
    )

    @property
    def schedule(self) -> str:
        return self.num_assistant_tokens_schedule


def check_bounds(
    options: object,
    *,
    least: Mapping[str, float] = _NONE,
    most: Mapping[str, float] = _NONE,
    above: Mapping[str, float] = _NONE,
    below: Mapping[str, float] = _NONE,
) -> None:
    """Check that fields keep to their bounds; None is allowed, NaN is not.

    Raises:
        OptionError: one does not; the message has its name and its value.
    """
    for bounds, keeps, words in (
        (least, operator.ge, "{} or more"),
        (most, operator.le, "{} or less"),
        (above, operator.gt, "above {}"),
        (below, operator.lt, "below {}"),
    ):
        for name, bound in bounds.items():
            value = getattr(options, name)
            if value is not None and not keeps(value, bound):
                raise OptionError(f"{name} must be {words.format(bound)}, not {value}.")


def read_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Parse ``option=value`` strings into a mapping.

    Raises:
        OptionError: a string is not of this form, or an option is given twice.
    """
    given = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"The option {pair!r} is not of the form option=value.")
        if key.strip() in given:
            raise OptionError(f"The option {key.strip()} is given twice: {given[key.strip()]} and {value.strip()}.")
        given[key.strip()] = value.strip()
    return given


def parts(text: str, separator: str) -> list[str]:
    """Split at a separator, except inside [square brackets], which hold nested specs.

    Raises:
        OptionError: the brackets do not match.
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
        raise OptionError(f"The square brackets in {text!r} do not match.")
    return found


def entries(text: str) -> list[str]:
    """The entries of a list such as A+B+[C,option=value], without an entry's enclosing brackets.

    Raises:
        OptionError: an entry is empty, or the brackets do not match.
    """
    found = [part.strip() for part in parts(text, "+")]
    found = [part[1:-1].strip() if part.startswith("[") and part.endswith("]") else part for part in found]
    if not all(found):
        raise OptionError(f"{text!r} has an empty entry; write A+B, or [A,option=value]+B.")
    return found


def read_options(kind: type[T], name: str, given: Mapping[str, str]) -> T:
    """Build the dataclass ``kind`` from strings by field name; missing fields keep their defaults.

    Tuples of integers are written as 4x2x1, booleans as yes or no.

    Raises:
        OptionError: an unknown option (the message lists the known ones), or a value of the wrong type.
    """
    hints = get_type_hints(kind)
    known = {each.name: hints[each.name] for each in fields(kind)}  # type: ignore[arg-type]
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
        expected = {bool: "yes or no", int: "a whole number", float: "a number"}.get(
            kinds[0], "whole numbers, such as 4x2x1"
        )
        raise OptionError(f"The option {key} must be {expected}, not {text!r}.") from None


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """An option's name, meaning, and default as typed on the command line."""

    name: str
    meaning: str
    default: str


def describe_options(kind: type[Any]) -> list[OptionInfo]:
    """The options of the dataclass ``kind``, with their meanings (see ``option``)."""
    return [
        OptionInfo(each.name, each.metadata.get("meaning", ""), each.metadata.get("unset") or written(each.default))
        for each in fields(kind)
    ]


def written(value: Any) -> str:
    """Format an option value in the syntax of ``read_options``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "none"
    return str(value)
