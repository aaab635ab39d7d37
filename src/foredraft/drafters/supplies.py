"""What a drafter may be made of. A method's file has ``build(options, supplies)``, which takes what it needs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError
from foredraft.core.options import entries
from foredraft.model.cache import SlotCache
from foredraft.model.causal import CausalLM
from foredraft.model.tokenizer import Tokenizer


class Foreign(NamedTuple):
    """A model with a tokenizer of its own; None where it has none."""

    model: CausalLM
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True)
class Place:
    """For whom is drafted, and what the spec says.

    ``cache`` is the target's in the loop, for drafters that share it. ``path`` is what stands behind the colon.
    ``vocab_size`` is how wide laws are; inside another drafter that need not be the width of ``target``, see ``Fitted``.
    """

    name: str
    needs: str
    path: str | None
    target: CausalLM
    cache: SlotCache
    tokenizer: Tokenizer | None
    vocab_size: int


class Supplies(ABC):
    """The parts that a spec names, loaded when they are asked for. ``compose`` is the one that has them."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def path(self) -> str:
        """What stands behind the colon.

        Raises:
            DrafterError: nothing does; the sentence says what the method needs.
        """
        name, needs, path = self.place.name, self.place.needs, self.place.path
        if path is None:
            raise DrafterError(f"{name} needs {needs}: write {name}:PATH with a folder or hub name.")
        return path

    @property
    def paths(self) -> list[str]:
        """The same as a list: A+B, or [A,option=value]+B where entries are specs."""
        return entries(self.path)

    @abstractmethod
    def model(self, path: str) -> CausalLM:
        """A draft model, of the target's precision and on its device.

        Raises:
            DrafterError: its tokenizer is not the target's.
        """

    @abstractmethod
    def foreign(self, path: str) -> Foreign:
        """A draft model with whatever tokenizer it has."""

    @abstractmethod
    def head(self, options: Any) -> Any:
        """The net of the trained head at ``path``, of a kind that the method drafts with.

        Raises:
            DrafterError: it is of another kind.
        """

    @abstractmethod
    def drafter(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> Drafter:
        """What another spec stands for, as a part of this drafter.

        Args:
            target, cache: whom it drafts for, where that is not the target itself: a model between the two.
        """
