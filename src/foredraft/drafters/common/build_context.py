"""What a method's ``build(options, context)`` may ask for. ``compose`` implements it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter, Rewindable
from foredraft.core.errors import DrafterError
from foredraft.core.options import entries
from foredraft.model.cache import SlotCache
from foredraft.model.hf import CausalLM
from foredraft.model.tokenizer import Tokenizer


class DraftModelFiles(NamedTuple):
    """A draft model with its own tokenizer; None if it has none."""

    model: CausalLM
    tokenizer: Tokenizer | None


class BuiltDrafter(NamedTuple):
    """A drafter that a spec names, and what its options say of its drafts.

    ``law``: of drafts for sampled rows. ``confidence``: its assistant_confidence_threshold; see ``Plan``.
    """

    drafter: Drafter
    law: Law
    confidence: float


class NestedDrafter(NamedTuple):
    """A drafter inside another.

    ``draws``: it draws tokens for sampled rows instead of picking them. ``confidence``: its
    assistant_confidence_threshold; see ``Plan``.
    """

    drafter: Rewindable
    draws: bool
    confidence: float = 0.0


@dataclass(frozen=True, eq=False)
class BuildContext(ABC):
    """Loads the models and heads that a spec names.

    ``name``, ``needs``: of the method. ``argument``: what stands behind the colon of the spec. ``cache``: the target's
    own, for drafters that share it. ``vocab_size``: width of the laws that are asked for; inside another drafter it
    may differ from the target's.
    """

    name: str
    needs: str
    argument: str | None
    target: CausalLM
    cache: SlotCache
    tokenizer: Tokenizer | None
    vocab_size: int

    @property
    def path(self) -> str:
        """What stands behind the colon.

        Raises:
            DrafterError: nothing does; the sentence says what the method needs.
        """
        if self.argument is None:
            raise DrafterError(f"{self.name} needs {self.needs}: write {self.name}:PATH with a folder or hub name.")
        return self.argument

    @property
    def paths(self) -> list[str]:
        """The same as a list: A+B, or [A,option=value]+B where entries are specs."""
        return entries(self.path)

    def paths_like(self, example: str) -> list[str]:
        """``paths``, for a method that is made of other drafters.

        Raises:
            DrafterError: there are none; the sentence shows an example.
        """
        if self.argument is None:
            raise DrafterError(f"{self.name} needs {self.needs}: write {example}.")
        return self.paths

    @abstractmethod
    def model(self, path: str) -> CausalLM:
        """A draft model, of the target's precision and on its device.

        Raises:
            DrafterError: its tokenizer is not the target's.
        """

    @abstractmethod
    def model_of_any_tokenizer(self, path: str) -> DraftModelFiles:
        """A draft model, whatever its tokenizer."""

    @abstractmethod
    def head(self, law: Law, rope_theta: float | None = None, taps: tuple[int, ...] | None = None) -> Any:
        """The network of the trained head at ``path``.

        Args:
            law: of the drafts; where they are picked, a CPU may run the head in lower precision.
            rope_theta: base of its rotary positions, if its config is wrong.
            taps: hidden layers of the target that it reads, if its files are wrong.

        Raises:
            DrafterError: the method does not draft with heads of its kind.
        """

    @abstractmethod
    def drafter(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> BuiltDrafter:
        """Build another spec as a part of this drafter.

        Args:
            target, cache: the model that it drafts for and its cache; by default the target's.
        """

    @abstractmethod
    def nested(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> NestedDrafter:
        """A drafter for texts that are only drafted themselves; arguments are those of ``drafter``.

        Raises:
            DrafterError: it cannot be rewound; the sentence lists the methods that can.
        """
