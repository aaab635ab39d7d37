"""Draft trees under construction, level by level on a draft model or head."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import View
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.trees.candidates import SHARPEST
from foredraft.model.base import widened
from foredraft.model.ops import TORCH, Ops


class TreeBuilder(ABC):
    """A tree under construction: expanded nodes and frontier logits.

    ``starts``: for each level, the number of its first node among those that the draft has read; the last level is the
    frontier, of F nodes. ``logits`` [B, F, v], or [B, 1, v] if all F have the same, are in the draft's own token ids; V
    is the target's ``vocab_size``. ``in_place``: static trees keep the nodes of their shape in sampled rows, too.

    Args:
        vocabulary: the target's ids of the draft's tokens; None if they are the same.
        ops: which rank the guesses.
    """

    in_place = False

    def __init__(
        self,
        view: View,
        logits: Float[Tensor, "B 1 v"],
        vocab_size: int,
        vocabulary: Int[Tensor, "v"] | None = None,
        ops: Ops = TORCH,
    ) -> None:
        self.view = view
        self.vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._ops = ops
        self.starts = [0]
        self.logits = logits
        self._tokens = [view.roots[:, None]]
        self._places: list[Tensor] = []  # of the parents of each level's nodes on the level above

    @property
    def read(self) -> TokenTree:
        """The nodes that the draft has read, in that order, root first."""
        parents = [self._root, *(places + start for places, start in zip(self._places, self.starts, strict=False))]
        depth = len(self._places)
        return TokenTree(torch.cat(self._tokens, 1), torch.cat(parents, 1), depth, linear=depth == 0)

    @property
    def paths(self) -> Paths:
        """The paths to the frontier nodes; without the tree if the warp does not read them."""
        tree = self.read if self.view.warp.needs_paths else TokenTree(self._tokens[0], self._root, 0, linear=True)
        return Paths(self.view.history, self.view.lengths, tree, self.starts[-1])

    @property
    def _root(self) -> Int[Tensor, "B 1"]:
        """The root's parent."""
        return torch.full_like(self._tokens[0], ROOT)

    def add_level(self, tokens: Int[Tensor, "B G"], places: Int[Tensor, "B G"]) -> None:
        """Read another level, the new frontier; ``places``: the positions of the parents on the frontier."""
        self._places.append(places)
        self.starts.append(self.starts[-1] + self._tokens[-1].shape[1])
        self._tokens.append(tokens)
        self.logits = self._read_level(tokens, places)

    def target_logits(self) -> Float[Tensor, "B F V"]:
        """The frontier logits over the target's vocabulary; finite even if the draft's are not."""
        ids = self._vocabulary
        logits = widened(self.logits, self.vocab_size if ids is None else len(ids))
        if ids is not None:
            wide = logits.new_full((*logits.shape[:-1], self.vocab_size), torch.finfo(logits.dtype).min)
            logits = wide.index_copy(-1, ids, logits)
        return logits.expand(-1, self._tokens[-1].shape[1], -1)

    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """The best guesses after each frontier node in the target's ids; see ``Ops.rank``."""
        warp, ids, logits = self.view.warp, self._vocabulary, self.logits
        if warp.bias_ids is not None or warp.needs_paths:
            logits, ids = warp.processed(self.target_logits(), self.paths), None
        elif ids is None:
            logits = widened(logits, self.vocab_size)
        times = None if warp.greedy else self.view.noise.times(len(self._places), self.vocab_size)
        if times is not None and ids is not None:
            times = times.index_select(1, ids)
        best, shares = self._ops.rank(logits, count, warp, times, SHARPEST)
        best = best if ids is None else ids[best]
        nodes = self._tokens[-1].shape[1]
        return best.expand(-1, nodes, -1), shares.expand(-1, nodes, -1)

    @abstractmethod
    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F v"]:
        """Read the frontier nodes; return the logits after them."""
