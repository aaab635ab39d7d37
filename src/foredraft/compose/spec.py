"""A drafter as it is written: on a command line, in a file, inside another drafter."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from foredraft.core.drafter import Drafter
from foredraft.core.options import DrafterOptions, entries, parts, read_options, read_pairs
from foredraft.core.sampling.params import check_known
from foredraft.drafters import METHODS
from foredraft.drafters.common.build_context import BuildContext


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter by name: ``name``, ``name:PATH`` or ``name:PATH,option=value,...``."""

    name: str
    path: str | None
    options: DrafterOptions
    off_from: int = 0
    """With so many texts at once, or more, nothing is drafted; 0 is never."""
    learned: Mapping[str, Any] | None = None
    """What a policy has learned; see ``Policy.state``."""
    model: Any = None
    """A draft model that is loaded already; ``path`` is then what messages call it."""

    @property
    def drafting(self) -> DrafterOptions:
        """The options that say how tokens are drafted: those of the drafter inside, where this one is around another.

        Raises:
            OptionError: what is inside is no spec.
        """
        if METHODS[self.name].around and self.path is not None:
            return Spec.parse(entries(self.path)[0]).drafting
        return self.options

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Read a spec.

        Raises:
            OptionError: an unknown method or option, or a value of the wrong type; the sentence lists the known ones.
        """
        head, *pairs = parts(text, ",")
        name, _, path = head.partition(":")
        check_known("drafter", {name: None}, list(METHODS))
        options = find(name)[1]
        given = read_pairs(pairs)
        return cls(name, path or None, read_options(options, name, given))


def find(name: str) -> tuple[type[Drafter], type[DrafterOptions]]:
    """The class of a drafter and its ``Options``, by the name of its method."""
    module, class_name = _module(name)
    return getattr(module, class_name), module.Options


def builder(name: str) -> Callable[[Any, BuildContext], Drafter]:
    """``build(options, context)`` of a method."""
    return _module(name)[0].build


def _module(name: str) -> tuple[Any, str]:
    module, _, class_name = METHODS[name].drafter.partition(":")
    return importlib.import_module(module), class_name


def option_defaults(name: str) -> dict[str, Any]:
    """Options of a method with their defaults."""
    options: Any = find(name)[1]
    return {each.name: None if each.default is MISSING else each.default for each in fields(options)}
