"""Specs: drafters written as text, on a command line, in a file or inside another spec."""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from foredraft.core.drafter import Drafter
from foredraft.core.errors import OptionError
from foredraft.core.options import DrafterOptions, entries, parts, read_options, read_pairs
from foredraft.core.sampling.params import check_known
from foredraft.drafters import METHODS
from foredraft.drafters.context import BuildContext

_LENGTH = "num_assistant_tokens"
"""The option for the length of chains, also where a method has its own name for it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter by name: ``name``, ``name:PATH`` or ``name:PATH,option=value,...``; PATH may be in [brackets]."""

    name: str
    path: str | None
    options: DrafterOptions
    off_from: int = 0
    """Draft nothing with this many rows or more; 0 is never."""
    learned: Mapping[str, Any] | None = None
    """What a policy has learned; see ``Policy.state``."""
    model: Any = None
    """A loaded draft model; ``path`` is then its name in messages."""

    @property
    def drafting(self) -> "Spec":
        """The spec of the drafter that does the drafting: the inner one's if this one wraps another.

        Raises:
            OptionError: the inner drafter is not a valid spec.
        """
        if METHODS[self.name].around and self.path is not None:
            return Spec.parse(entries(self.path)[0]).drafting
        return self

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Read a spec.

        Raises:
            OptionError: an unknown method or option (the message lists the known ones), a path without a method, or a
                value of the wrong type.
        """
        head, *pairs = parts(text, ",")
        name, _, path = head.partition(":")
        if "/" in name:
            raise OptionError(f"{name!r} is a path: write NAME:PATH, such as draft_model:{name} or eagle3:{name}.")
        check_known("drafter", {name: None}, list(METHODS))
        options = find(name)[1]
        if path and not (METHODS[name].nests or METHODS[name].several):
            path, pairs = _whole_path(path, pairs)
        given = read_pairs(pairs)
        size = METHODS[name].size
        if size and _LENGTH in given and size != _LENGTH:
            if size in given:
                raise OptionError(f"{_LENGTH} and {size} are the same option of {name}: give one of them.")
            given[size] = given.pop(_LENGTH)
        return cls(name, path or None, read_options(options, name, given))


def _whole_path(path: str, pairs: list[str]) -> tuple[str, list[str]]:
    """A path without its enclosing brackets, or with the commas that split it if there is such a file or folder."""
    if path.startswith("[") and path.endswith("]") and len(entries(path)) == 1:
        inner = entries(path)[0]
        return (inner, pairs) if not os.path.exists(os.path.expanduser(path)) else (path, pairs)
    if pairs and not os.path.exists(os.path.expanduser(path)):
        for count in range(len(pairs), 0, -1):
            whole = ",".join([path, *pairs[:count]])
            if os.path.exists(os.path.expanduser(whole)):
                return whole, pairs[count:]
    return path, pairs


def find(name: str) -> tuple[type[Drafter], type[DrafterOptions]]:
    """The drafter class of a method and its ``Options``."""
    module, class_name = _module(name)
    return getattr(module, class_name), module.Options


def build_function(name: str) -> Callable[[Any, BuildContext], Drafter]:
    """``build(options, context)`` of a method."""
    return _module(name)[0].build


def _module(name: str) -> tuple[Any, str]:
    module, _, class_name = METHODS[name].drafter.partition(":")
    return importlib.import_module(module), class_name


def option_defaults(name: str) -> dict[str, Any]:
    """Options of a method with their defaults."""
    options: Any = find(name)[1]
    return {each.name: None if each.default is MISSING else each.default for each in fields(options)}
