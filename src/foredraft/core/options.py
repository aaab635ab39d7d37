"""Options that are given as text, ``option=value``, read into a frozen dataclass."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

from foredraft.core.errors import OptionError
from foredraft.core.params import check_known

T = TypeVar("T")


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
