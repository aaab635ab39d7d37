"""Operations beside a model's forward: the definitions, in torch.

A model has those that suit it (``TargetModel.ops``). Others override what they do faster, and hand the rest to
``super()``.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.core.best import best_of
from foredraft.core.draft import Draft
from foredraft.core.drafter import LevelPrice, View
from foredraft.core.rng import exponentials, first
from foredraft.core.sampling.warp import Warp
from foredraft.model.attention.slot_attention import masked_attention, runs_kernel
from foredraft.model.kv.cache import SlotCache, SlotView
from foredraft.model.kv.masks import StepIn

Read = Callable[[Tensor, Tensor, Tensor, Callable[[int, Tensor, Tensor, Tensor], Tensor]], Tensor]
"""``read(tokens [B, N], features [B, N, F], positions [B, N], attend) -> states [B, N, H]``."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class HeadNet:
    """The decoder layers of a trained head: their forward in torch, and what they are made of, for kernels.

    ``reserve``: see ``HeadLayers``. ``blocks``, ``config``, ``rotary``: those of ``heads.nets.blocks``. ``norm``:
    before the output layer; ``normed``: states are returned after it. ``window``: see ``EagleNet``.
    ``entry``: what the first layer reads: the features (states), embedding and feature in a product (fused), or both
    next to each other (beside); ``entry_layers``: the product, or the norms. ``normed_residual``: see ``Eagle3Config``.
    ``embedding``, ``output``: its own layers, in place of the target's. ``drafts``: it has an output layer, whose
    tokens are ``vocabulary``'s, if there is one, and a drafted token reads its parent's state, after the norm if
    ``carries_norm``. ``taps``: the target's layers that ``fusion`` makes features of; empty where it takes more than a
    product.
    """

    read: Read
    device: torch.device
    config: Any
    blocks: Sequence[Any]
    rotary: Any
    entry: str
    reserve: Callable[[int], int] = lambda length: 0
    norm: nn.RMSNorm | None = None
    normed: bool = False
    window: int | None = None
    entry_layers: Mapping[str, nn.Module] = field(default_factory=dict)
    normed_residual: bool = False
    embedding: nn.Module | None = None
    output: nn.Module | None = None
    drafts: bool = False
    vocabulary: Int[Tensor, "v"] | None = None
    carries_norm: bool = False
    taps: tuple[int, ...] = ()
    fusion: nn.Module | None = None


class TreeSize(NamedTuple):
    """Limits of a dynamic tree: its nodes and levels, the nodes of a level that are read, and their scored children.

    ``level_price``: see ``Plan``. ``allowed``: levels of each row. ``sharpest``: temperature of greedy rows.
    ``ablated``: without EAGLE-2's choice of nodes or its re-rank.
    """

    nodes: int
    depth: int
    top_k: int
    children: int
    level_price: LevelPrice
    allowed: Sequence[int]
    sharpest: float
    ablated: bool = False


class UnreadStates(NamedTuple):
    """What a head has not read: the last ``width`` committed entries of each row.

    Entry j reads token j + 1 and its place in ``states``. ``fresh``: those that are made first, by their rows and
    slots, and for each the addresses of what it is made of.
    """

    cache: SlotCache
    width: int
    states: Float[Tensor, "R S H"]
    fresh: Sequence[tuple[int, int, list[int]]]


Unread = Callable[[tuple[int, ...]], AbstractContextManager[UnreadStates]]
"""A context that reads these entries; the argument are the target's layers of which it makes features."""


class HeadLayers:
    """The forward of a head's layers over a slot cache, and its draft trees.

    ``reads_masks``: forwards attend by masks, and not by ``StepIn.visible``.
    """

    def __init__(self, head: HeadNet) -> None:
        self.head = head
        self.reads_masks = not runs_kernel(head.device)

    def reserve(self, length: int) -> int:
        """Called with the largest position before forwards; a number that grows when what they read changes."""
        return self.head.reserve(length)

    def __call__(
        self, step: StepIn, cache: SlotCache, features: Float[Tensor, "B N F"], mask: Float[Tensor, "B 1 N S"] | None
    ) -> Float[Tensor, "B N H"]:
        """The states of a step; keys and values are written to their slots.

        Args:
            mask: what the nodes attend to, instead of ``step.visible``.
        """
        tables = not self.reads_masks and step.few
        window = SlotView(cache, step, stored=tables)
        if mask is None:
            mask = (step.tables(window.buffer_rows) if tables else step.masks(features.dtype))["rows"]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.write(layer, key, value, window)
            return masked_attention(query, keys, values, mask)

        return self.head.read(step.tokens, features, step.positions, attend)

    def draft(self, view: View, size: TreeSize, unread: Unread, by_level: Callable[[], Draft]) -> Draft:
        """The rows' dynamic trees.

        Args:
            unread: for layers that read the entries and build the tree in one call.
            by_level: reads them and builds the tree, with a forward for each level.
        """
        return by_level()


class Ops:
    """Guesses ranked, tokens chosen, the times of races, and the layers of heads.

    All but ``choose`` have static shapes and read nothing back, so they can be recorded. ``walks``: scores are in
    memory of the host, and ``choose`` is fast. Steps then follow their drafts on the host, and choose a token only
    where a draft reaches it, without its law.
    """

    walks = False

    def rank(
        self,
        logits: Float[Tensor, "B F v"],
        count: int,
        warp: Warp,
        times: Float[Tensor, "B v"] | None,
        sharpest: float,
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """The ``count`` best guesses for the token after each of F nodes, best first, in the draft's own ids, and the
        log of their shares among all guesses; -inf for tokens that the draft's warp cuts.

        The target will take the token with the least time / p. So in sampled rows the guesses are ranked by time / q,
        and a guess's share is that of its q / time. In greedy rows they are ranked by q.

        Args:
            logits: after penalties and bans, where there are any.
            times: of the tokens at the position after these nodes; see ``Noise.times``. None if all rows are greedy.
            sharpest: the temperature of greedy rows.
        """
        least = torch.finfo(torch.float32).min / 64  # so that a path's sum cannot overflow
        logits = logits.float().nan_to_num(nan=least, posinf=0.0, neginf=least)
        if times is None:
            scores = logits / sharpest
        else:
            scores = warp.truncation(logits) - times.log()[:, None]
            if warp.greedy_rows is not None:
                scores = torch.where(warp.greedy_rows, logits / sharpest, scores)
        best = best_of(scores, min(count, scores.shape[-1]))
        return best.indices, scores.log_softmax(-1).gather(-1, best.indices)

    def times(self, bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
        """The times of ``count`` tokens in the race of each entry of ``bits``; see ``rng.exponentials``. Overrides may
        differ in the last places."""
        return exponentials(bits, count)

    def choose(self, scores: Float[Tensor, "B N V"], row: int, node: int, temperature: float, bits: int) -> int:
        """The best token at a node or, at a temperature above 0, the first arrival of the race of these bits (see
        ``rng.target_bits``). -1 if a score is NaN or the highest is not finite."""
        own = scores[row, node]
        if not own.max().isfinite():
            return -1
        if not temperature:
            return int(own.argmax())
        return int(first((own / temperature).softmax(-1), self.times(torch.tensor(bits), len(own))))

    def head_layers(self, head: HeadNet) -> HeadLayers:
        """The forward of a head of the model."""
        return HeadLayers(head)


TORCH = Ops()
