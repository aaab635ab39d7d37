"""Draft trees built level by level on a draft model or head, and static trees built with them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.drafter import LevelPrice, View
from foredraft.core.sampling.warp import Paths
from foredraft.core.transfer import to_device
from foredraft.core.tree import ROOT, TokenTree
from foredraft.drafters.common.templates import Path, Template
from foredraft.drafters.common.tree_ops import Candidates, ranked, worth_a_level
from foredraft.model.base import widened
from foredraft.model.native.runner import KernelRuntime


class TreeBuilder(ABC):
    """A tree under construction: expanded nodes and frontier logits.

    ``starts``: for each level, the number of its first node among those that the draft has read; the last level is the
    frontier, of F nodes. ``logits`` [B, F, v], or [B, 1, v] if all F have the same, are in the draft's own token ids; V
    is the target's ``vocab_size``. ``in_place``: static trees keep the nodes of their shape in sampled rows, too.

    Args:
        vocabulary: the target's ids of the draft's tokens; None if they are the same.
        engine: see ``ranked``.
    """

    in_place = False

    def __init__(
        self,
        view: View,
        logits: Float[Tensor, "B 1 v"],
        vocab_size: int,
        vocabulary: Int[Tensor, "v"] | None = None,
        engine: KernelRuntime | None = None,
    ) -> None:
        self.view = view
        self.vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._engine = engine
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
        """The best guesses after each frontier node in the target's ids; see ``tree_ops.ranked``."""
        warp, ids, logits = self.view.warp, self._vocabulary, self.logits
        if warp.bias_ids is not None or warp.needs_paths:
            logits, ids = warp.processed(self.target_logits(), self.paths), None
        elif ids is None:
            logits = widened(logits, self.vocab_size)
        times = None if warp.greedy else self.view.noise.times(len(self._places), self.vocab_size)
        if times is not None and ids is not None:
            times = times.index_select(1, ids)
        best, shares = ranked(logits, count, warp, times, engine=self._engine)
        best = best if ids is None else ids[best]
        nodes = self._tokens[-1].shape[1]
        return best.expand(-1, nodes, -1), shares.expand(-1, nodes, -1)

    @abstractmethod
    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F v"]:
        """Read the frontier nodes; return the logits after them."""


@dataclass(frozen=True, slots=True)
class Level:
    """The K nodes of a level of a static tree, whose parents are the F inner nodes of the level above.

    ``width``: the size of the largest family. ``ranks``: of the nodes among their siblings, from 0 on. ``chosen``: the
    index of each node in a table of ``width`` children for each parent. ``places``: the position of its parent among
    the F; ``above``: that among all nodes of the level above. ``earlier``: 1 for each of the first ``width - 1``
    siblings of a node that comes before it. ``parents``: numbers in the tree. ``inner``: positions on the level of the
    nodes with children; ``inner_places``: the positions of their parents among the F. ``turns``: of the nodes, see
    ``TokenTree``.
    """

    width: int
    ranks: Int[Tensor, "K"]
    chosen: Int[Tensor, "K"]
    places: Int[Tensor, "K"]
    above: Int[Tensor, "K"]
    earlier: Float[Tensor, "K E"]
    parents: Int[Tensor, "K"]
    inner: Int[Tensor, "G"]
    inner_places: Int[Tensor, "G"]
    turns: tuple[int, ...]

    @classmethod
    def all_of(cls, template: Template, device: torch.device) -> tuple["Level", ...]:
        """The levels of a template, starting with the root's children."""
        return tuple(cls.of(template, depth, device) for depth in range(1, template.depth + 1))

    @classmethod
    def of(cls, template: Template, depth: int, device: torch.device) -> "Level":
        """The nodes at a depth, from 1 on."""
        paths: list[Path] = [(), *template.paths]
        nodes_above, nodes = ([i for i, path in enumerate(paths) if len(path) == each] for each in (depth - 1, depth))
        parents = [template.parents[node - 1] for node in nodes]
        families = sorted(set(parents))
        places = [families.index(parent) for parent in parents]
        ranks = [paths[node][-1] for node in nodes]
        width = max(ranks) + 1
        inner = [place for place, node in enumerate(nodes) if node in template.parents]
        return cls(
            width=width,
            ranks=to_device(ranks, device),
            chosen=to_device([place * width + rank for place, rank in zip(places, ranks, strict=True)], device),
            places=to_device(places, device),
            above=to_device([nodes_above.index(parent) for parent in parents], device),
            earlier=(torch.arange(width - 1, device=device) < to_device(ranks, device)[:, None]).float(),
            parents=to_device(parents, device),
            inner=to_device(inner, device),
            inner_places=to_device([places[own] for own in inner], device),
            turns=tuple(sum(paths[node]) + depth for node in nodes),
        )


def static_candidates(
    builder: TreeBuilder, levels: Sequence[Level], allowed: Int[Tensor, "B"], level_price: LevelPrice
) -> Candidates:
    """The nodes of a static tree: of each family, the best guesses in order.

    Args:
        allowed: the number of levels that each row may have.
        level_price: see ``Plan``.
    """
    view = builder.view
    above = torch.zeros_like(view.roots, dtype=torch.float32)[:, None]  # scores of the frontier nodes
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for number, level in enumerate(levels, start=1):
        ids, shares = builder.ranked(level.width)
        rank = level.ranks.clamp(max=ids.shape[2] - 1)
        missing = level.ranks >= ids.shape[2]  # a family may be larger than the vocabulary
        scores = above[:, level.places] + shares[:, level.places, rank].masked_fill(missing, -torch.inf)
        tokens = ids[:, level.places, rank]
        parts.append((tokens, level.parents.expand(tokens.shape), scores))
        above = scores[:, level.inner]
        if number == len(levels) or not worth_a_level(above, allowed > number, level_price):
            break
        builder.add_level(tokens[:, level.inner], level.inner_places.expand(len(tokens), -1))
    tokens, parents, scores = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    depths = torch.cat([torch.full_like(each.ranks, i) for i, each in enumerate(levels[: len(parts)], start=1)])
    return Candidates(tokens, parents, scores, depths, len(parts))
