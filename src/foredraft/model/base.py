"""What a loop needs of a model: any rows, any tree, any lengths, over slots."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.tree import TokenTree
from foredraft.model.cache import SlotCache
from foredraft.model.masks import StepIn


class TargetModel(ABC):
    """A causal LM over a slot cache: what engine, policies and drafters need of a target or a draft model.

    ``vocab_size`` is the width of its logits, ``max_length`` its context. ``weight_bytes`` is what a forward reads of
    the weights, ``token_bytes`` what a token takes in the cache; 0 if unknown. ``first_token`` begins an output
    without a prompt.
    """

    name: str = "model"
    vocab_size: int
    max_length: int
    weight_bytes: int = 0
    token_bytes: int = 0
    first_token: int = 0

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def new_cache(self) -> SlotCache:
        """An empty cache of the model's shape."""

    @abstractmethod
    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], reach: int, *, start: int = 0
    ) -> StepIn:
        """Positions, slots and masks of a tree whose roots stand in slots ``bases``; see ``masks.address``."""

    @abstractmethod
    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        """One forward of B rows with N nodes each; their keys and values are written to the cache.

        Args:
            step: from ``address``; the cache must have room for its rows and its extent.
            keep: nodes whose logits are wanted, the same for every row; None means all.

        Returns:
            logits [B, N or M, V] and the hidden states [B, N, H] of the tapped layers.
        """

    @abstractmethod
    def empty_hidden(self, rows: int) -> dict[int, Float[Tensor, "B T H"]]:
        """The hidden states of no tokens at all: T is 0."""

    def tap(self, layers: Sequence[int]) -> None:
        """Return the hidden states after these layers from now on (0: the embedding), or ``FINAL``.

        Raises:
            ModelError: the model does not return hidden states.
        """
        raise ModelError(f"{self.name} does not return hidden states.")

    def check_ready(self) -> None:  # noqa: B027 - most models are always ready
        """Check that the model can run.

        Raises:
            ModelError: it cannot; the sentence says why.
        """

    @property
    def ready(self) -> bool:
        """Whether ``check_ready`` passes."""
        try:
            self.check_ready()
        except ModelError:
            return False
        return True

    def stock_logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits of the model itself, with its own attention and without a cache: the reference for tests.

        Raises:
            ModelError: the model has no such forward.
        """
        raise ModelError(f"{self.name} has no forward of its own to compare with.")

    def retain(self) -> None:  # noqa: B027
        """Count another holder; see ``let_go``."""

    def let_go(self) -> None:  # noqa: B027
        """Count a holder less; without holders the model closes."""

    def reset_hooks(self) -> None:  # noqa: B027 - most models have none
        """Remove what an interrupted forward may have left on the model."""


@final
class VocabPadded(TargetModel):
    """A model over the vocabulary of another, which may be wider or narrower, as padded vocabularies are."""

    def __init__(self, model: TargetModel, vocab_size: int) -> None:
        self._model = model
        self.vocab_size = vocab_size
        self.max_length = model.max_length

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def new_cache(self) -> SlotCache:
        return self._model.new_cache()

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], reach: int, *, start: int = 0
    ) -> StepIn:
        return self._model.address(tree, bases, rows, reach, start=start)

    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        mine = replace(step, tokens=step.tokens.clamp(max=self._model.vocab_size - 1))
        out = self._model.forward(mine, cache, keep)
        return replace(out, logits=widened(out.logits, self.vocab_size))

    def empty_hidden(self, rows: int) -> dict[int, Float[Tensor, "B T H"]]:
        return self._model.empty_hidden(rows)


def widened(logits: Float[Tensor, "B N v"], vocab_size: int) -> Float[Tensor, "B N V"]:
    """A draft's logits over the target's vocabulary, and numbers whatever the draft computed."""
    least = torch.finfo(logits.dtype).min
    missing = vocab_size - logits.shape[-1]
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=least)  # a negative number cuts off
    return logits.nan_to_num(nan=least, posinf=0.0, neginf=least)
