"""The model interface of the decoding loop: rows of any length and trees of any shape, over a slot cache."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import StepOut
from foredraft.core.errors import ModelError
from foredraft.core.target_parts import TargetParts
from foredraft.core.tree import TokenTree
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import Layout, StepIn, kv_extent_of
from foredraft.model.ops import TORCH, Ops


class TargetModel(ABC):
    """A causal LM over a slot cache: the interface of targets and draft models for engine, policies and drafters.

    ``vocab_size``: width of its logits. ``max_length``: its context. ``weight_bytes``: weight bytes that a forward
    reads. ``token_bytes``: cache bytes per token; 0 if unknown. ``first_token``: starts an output without a prompt.
    ``ranks``: processes that each run a part of it (tensor parallelism). ``collective``: whether the others take part
    in a forward now. ``why_eager``: why its forward cannot be recorded; None if it can. ``target_cache``: another
    model's cache that it reads, too, so that it cannot. ``version``: grows when a recorded forward is no longer the
    model's, ``weights_version`` when its weights are found changed.
    ``weights``: int4 or int8 if foredraft quantised them.
    ``kv_cache_dtype``: float16 or int8 on the native engine.
    ``ops``: what is done beside its forwards.
    ``same_bits``: a token's logits have the same bits in every tree and batch and with every number of threads.
    ``any_width``: a forward of a number of nodes that was not used before is as fast as later ones.
    ``origin``: the folder or hub name that it was loaded from. ``config``: the text part of its transformers config.
    ``layout``: which tokens the layers of each type attend to.
    """

    name: str = "model"
    vocab_size: int
    max_length: int
    weight_bytes: int = 0
    token_bytes: int = 0
    first_token: int = 0
    ranks: int = 1
    collective: bool = True
    why_eager: str | None = None
    target_cache: SlotCache | None = None
    version: int = 0
    weights_version: int = 0
    weights: str | None = None
    kv_cache_dtype: str | None = None
    ops: Ops = TORCH
    same_bits: bool = False
    any_width: bool = False
    origin: str = ""
    layers: int
    config: Any
    layout: Layout

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
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], used_slots: int, *, start: int = 0
    ) -> StepIn:
        """Positions, slots and masks of a tree whose roots are in slots ``bases``; see ``masks.address``."""

    def root_slots(self, bases: Int[Tensor, "B"], rows: Sequence[int]) -> Int[Tensor, "B"]:
        """The slots to which ``address`` assigns roots that are in slots ``bases`` of the whole cache."""
        return bases

    @torch.inference_mode()
    def forward(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        """One forward of B rows with N nodes each; writes their keys and values to the cache.

        Args:
            step: from ``address``; the cache must have room for its rows and its extent.
            keep: nodes whose logits to return, the same for every row; None means all.

        Returns:
            logits [B, N or M, V] and the hidden states [B, N, H] of the tapped layers.
        """
        with self.running():
            return self.compute(step, cache, keep)

    @abstractmethod
    def compute(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        """``forward`` as a function that can be recorded, to be called within ``running``."""

    def stepping(self) -> AbstractContextManager[None]:
        """The context of a whole step, drafts and sampling included."""
        return nullcontext()

    def running(self) -> AbstractContextManager[object]:
        """The context of ``compute``: it installs what the forward needs, and other threads wait."""
        return nullcontext()

    def kv_extent(self, used_slots: int, nodes: int, slots: int) -> int:
        """The number of slots to ``address`` a forward for, so that forwards have few shapes; at least ``used_slots``.

        Args:
            nodes: of the forward.
            slots: of the cache.
        """
        return min(kv_extent_of(used_slots, self.device), slots)

    @abstractmethod
    def empty_hidden(self) -> dict[int, Float[Tensor, "1 T H"]]:
        """Hidden states of zero tokens of one row (T = 0)."""

    def tap(self, layers: Sequence[int]) -> None:
        """Add hidden layers to the output of later forwards (0 is the embedding; see ``taps`` for ``FINAL``).

        Layers that other users of the model tapped stay.

        Raises:
            ModelError: the model does not return hidden states.
        """
        raise ModelError(f"{self.name} does not return hidden states.")

    def check_ready(self) -> None:  # noqa: B027 - most models are always ready
        """Check that the model can run.

        Raises:
            ModelError: it cannot; the message says why.
        """

    def notice_changes(self) -> None:  # noqa: B027 - the weights of most models do not change
        """Between forwards: raise ``weights_version`` if the weights, the modules or their hooks have changed since the
        last call, as far as torch shows it, and compute anew what was computed from them.

        Raises:
            ModelError: the changed model cannot run as it was loaded; the message says why.
        """

    def contents(self) -> str | None:
        """A hash that says which model it is, see ``hf.contents``; None if unknown."""
        return None

    def invalidate(self) -> None:
        """As ``notice_changes``, whether there is a change or not: for those that torch does not show."""
        self.weights_version += 1

    @property
    def ready(self) -> bool:
        """Whether ``check_ready`` passes."""
        try:
            self.check_ready()
        except ModelError:
            return False
        return True

    def stock_logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Logits of the stock forward, with the model's own attention and without a cache: slow, for comparison.

        Raises:
            ModelError: the model has no such forward.
        """
        raise ModelError(f"{self.name} has no stock forward to compare with.")

    @property
    def module(self) -> PreTrainedModel:
        """The transformers model with its weights, for what trains them, copies layers or observes attention.

        Raises:
            ModelError: the model runs otherwise.
        """
        raise ModelError(
            f"{self.name} does not run on transformers, as this needs: load it without weights, or a GGUF file "
            "with dtype float32."
        )

    def read(self, tokens: Int[Tensor, "B T"], layers: Sequence[int]) -> dict[int, Float[Tensor, "B T H"]]:
        """Hidden states of whole sequences, without logits and without a cache that is kept.

        Raises:
            ModelError: the model does not return hidden states.
        """
        raise ModelError(f"{self.name} does not return hidden states.")

    def parts(self) -> TargetParts:
        """Embedding and output layer, for heads.

        Raises:
            ModelError: the model does not name them.
        """
        raise ModelError(f"{self.name} does not name its embedding and its output layer.")

    def embedding(self) -> Float[Tensor, "V H"]:
        """The weight of the input embedding; on the meta device or in integers if the model holds it otherwise.

        Raises:
            ModelError: the model does not name it.
        """
        raise ModelError(f"{self.name} does not name its embedding.")

    def retain(self) -> None:  # noqa: B027
        """Add a reference; see ``release``."""

    def release(self) -> None:  # noqa: B027
        """Drop a reference; dropping the last one closes the model."""

    def reset_hooks(self) -> None:  # noqa: B027 - most models have none
        """Remove hooks that an interrupted forward may have left on the model."""


def widened(logits: Float[Tensor, "B N v"], vocab_size: int) -> Float[Tensor, "B N V"]:
    """A draft's logits padded or cut to the target's vocabulary size, with NaN and infinities replaced."""
    least = torch.finfo(logits.dtype).min
    missing = vocab_size - logits.shape[-1]
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=least)  # a negative width cuts
    return logits.nan_to_num(nan=least, posinf=0.0, neginf=least)
