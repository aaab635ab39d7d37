"""A drafter as it is written: on a command line, in a file, inside another drafter."""

from dataclasses import dataclass
from typing import Any

from foredraft.core.options import entries, parts, read_options, read_pairs
from foredraft.core.params import check_known
from foredraft.drafters import METHODS, find


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter by name: ``name``, ``name:PATH`` or ``name:PATH,option=value,...``."""

    name: str
    path: str | None
    options: Any
    off_from: int = 0
    """With so many texts at once, or more, nothing is drafted; 0 is never."""
    model: Any = None
    """A draft model that is loaded already; ``path`` is then what messages call it."""

    @property
    def drafting(self) -> Any:
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
