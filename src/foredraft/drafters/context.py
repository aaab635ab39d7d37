"""The interface that a method's ``build(options, context)`` uses to load its parts; ``compose`` implements it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter, Rewindable
from foredraft.core.errors import DrafterError
from foredraft.core.options import entries
from foredraft.heads.glide_model import GlideLM
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.model.ops import Ops
from foredraft.model.text.tokenizer import Tokenizer


class DraftModelFiles(NamedTuple):
    """A draft model with its own tokenizer; None if it has none."""

    model: TargetModel
    tokenizer: Tokenizer | None


class BuiltDrafter(NamedTuple):
    """A drafter built from a spec, with the properties of its drafts.

    ``law``: of its drafts for sampled rows, if they are drawn. ``confidence``: its assistant_confidence_threshold; see
    ``Plan``.
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

    ``name``, ``needs``: of the method. ``argument``: the part of the spec after the colon. ``cache``: the target's
    cache, for drafters that share it. ``vocab_size``: width of the drafter's laws; inside another drafter it may
    differ from the target's.
    """

    name: str
    needs: str
    argument: str | None
    target: TargetModel
    cache: SlotCache
    tokenizer: Tokenizer | None
    vocab_size: int

    @property
    def ops(self) -> Ops:
        """Operations of the target, for heads."""
        return self.target.ops

    @property
    def path(self) -> str:
        """The part of the spec after the colon.

        Raises:
            DrafterError: it is missing; the message says what the method needs.
        """
        if self.argument is None:
            raise DrafterError(f"{self.name} needs {self.needs}: write {self.name}:PATH with a folder or hub name.")
        return self.argument

    @property
    def stock_target(self) -> CausalLM:
        """The target as a transformers model, for methods that read a part of its KV cache.

        Raises:
            DrafterError: it is on the native engine.
        """
        if not isinstance(self.target, CausalLM):
            raise DrafterError(
                f"{self.name} reads a part of the target's KV cache, which the native engine does not: load it without "
                "weights, or a GGUF file with dtype float32."
            )
        return self.target

    @property
    def paths(self) -> list[str]:
        """``path`` as a list: A+B, or [A,option=value]+B if entries are specs."""
        return entries(self.path)

    def paths_like(self, example: str) -> list[str]:
        """``paths``, for a method that combines other drafters.

        Raises:
            DrafterError: there are none; the message shows ``example``.
        """
        if self.argument is None:
            raise DrafterError(f"{self.name} needs {self.needs}: write {example}.")
        return self.paths

    @abstractmethod
    def model(self, path: str) -> TargetModel:
        """Load a draft model in the target's precision and on its device.

        Raises:
            DrafterError: its tokenizer is not the target's.
        """

    @abstractmethod
    def model_of_any_tokenizer(self, path: str) -> DraftModelFiles:
        """Load a draft model with any tokenizer."""

    @abstractmethod
    def head(
        self, rope_theta: float | None = None, taps: tuple[int, ...] | None = None, norm_output: bool | None = None
    ) -> Any:
        """The network of the trained head at ``path``.

        Args:
            rope_theta: base of its rotary positions, if its config is wrong.
            taps: hidden layers of the target that it reads, if its files are wrong.
            norm_output: whether drafted positions read its normed state, if its config is wrong.

        Raises:
            DrafterError: the method does not support this kind of head.
        """

    def glide(self) -> GlideLM:
        """The GLIDE head at ``path`` as a draft model.

        Raises:
            DrafterError: it is another kind of head, or it cannot read the target's KV cache.
        """
        target = self.stock_target
        return GlideLM(self.head(), target, self.cache)

    @property
    @abstractmethod
    def names_head(self) -> bool:
        """Whether ``path`` is a trained head, and not a model."""

    @abstractmethod
    def drafter(self, spec: str, target: TargetModel | None = None, cache: SlotCache | None = None) -> BuiltDrafter:
        """Build another spec as a part of this drafter.

        Args:
            target, cache: the model to draft for and its cache; by default the target's.
        """

    @abstractmethod
    def nested(self, spec: str, target: TargetModel | None = None, cache: SlotCache | None = None) -> NestedDrafter:
        """Build a drafter that continues tokens which are only drafted; arguments as in ``drafter``.

        Raises:
            DrafterError: it cannot be rewound; the message lists the methods that can.
        """
