"""What a drafter may be made of. A method's file has ``build(options, supplies)``, which takes what it needs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter, Rewindable
from foredraft.core.errors import DrafterError
from foredraft.core.options import entries
from foredraft.drafters import METHODS, find
from foredraft.drafters.spec import Spec
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
    ``vocab_size`` is how wide laws are: inside another drafter that need not be the width of ``target``.
    """

    name: str
    needs: str
    path: str | None
    target: CausalLM
    cache: SlotCache
    tokenizer: Tokenizer | None
    vocab_size: int


class Part(NamedTuple):
    """A drafter inside another.

    ``draws``: for sampled rows it draws its tokens, rather than pick them. ``confidence`` is its
    assistant_confidence_threshold, if it has one; see ``Plan``.
    """

    drafter: Rewindable
    draws: bool
    confidence: float = 0.0


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

    def parts_like(self, example: str) -> list[str]:
        """``paths``, of a method that is made of other drafters.

        Raises:
            DrafterError: there are none; the sentence shows an example.
        """
        if self.place.path is None:
            raise DrafterError(f"{self.place.name} needs {self.place.needs}: write {example}.")
        return self.paths

    @property
    def paths(self) -> list[str]:
        """The same as a list: A+B, or [A,option=value]+B where entries are specs."""
        return entries(self.path)

    def part(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> Part:
        """A drafter that drafts for texts which are themselves only drafted; arguments are those of ``drafter``.

        Raises:
            DrafterError: it cannot take a text back; the sentence lists those that can.
        """
        named = Spec.parse(spec)
        if not _rewindable(named.name):
            able = ", ".join(name for name in METHODS if _rewindable(name))
            raise DrafterError(
                f"{named.name} cannot stand inside {self.place.name}: what it remembers of a text that is only "
                f"drafted cannot be taken back; {able} can."
            )
        drafter = self.drafter(spec, target, cache)
        assert isinstance(drafter, Rewindable)
        confidence = getattr(named.options, "assistant_confidence_threshold", 0.0)
        return Part(drafter, (drafter.needs.law or named.options.law) is not Law.FIXED, confidence)

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


def _rewindable(name: str) -> bool:
    return issubclass(find(name)[0], Rewindable)
