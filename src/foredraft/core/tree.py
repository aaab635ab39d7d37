"""The token tree, the data structure of every draft. A chain is a tree with one branch."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foredraft.core.cached import cached
from foredraft.core.transfer import on_host

ROOT = -1
PAD = -2
_FEW = 64
"""Most nodes of a tree whose paths are computed on the host."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafted tokens of B rows with N nodes each, parents before children, siblings in draw order.

    Node 0 (the root) is the row's last committed token, which is not yet in the target's cache. Padding nodes (parent
    ``PAD``) may occur anywhere after node 0. ``depth`` bounds the depth of all nodes (the root has depth 0); it is
    known on the host, so loops over a tree have a fixed length. ``linear``: node i's parent is node i - 1 in every
    row, so an accepted path is always a prefix of the nodes.

    The turn of a node is one more than that of its previous sibling or, without one, of its parent; the root's is 0.
    Rules test nodes of the same turn together. ``turns``: for each turn from 1 on, a bound on the number of its nodes
    in any row; None if the host does not know the shape, and nodes are then tested one by one. Drafts of rows that
    exceed the bound are rejected.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depth: int
    linear: bool = False
    turns: tuple[int, ...] | None = None
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def chain(cls, tokens: Int[Tensor, "B N"], lengths: Int[Tensor, "B"] | None = None) -> "TokenTree":
        """One branch per row. ``lengths``: valid nodes of each row, root included; None means all N."""
        nodes = tokens.shape[1]
        index = torch.arange(nodes, device=tokens.device).expand_as(tokens)
        parents = index - 1
        if lengths is not None:
            parents = torch.where(index < lengths[:, None], parents, PAD)
        return cls(tokens, parents, depth=nodes - 1, linear=True)

    @classmethod
    def root(cls, tokens: Int[Tensor, "B"]) -> "TokenTree":
        """The tree of plain decoding: only the last committed token."""
        tokens = tokens[:, None]
        return cls(tokens, torch.full_like(tokens, ROOT), depth=0, linear=True)

    @classmethod
    def on_host(
        cls, tokens: list[list[int]], parents: list[list[int]], depth: int, *, linear: bool = False
    ) -> "TokenTree":
        """A tree of these ``lists``, on the host."""
        tree = cls(on_host(tokens), on_host(parents), depth, linear)
        tree._cache["lists"] = tokens, parents
        return tree

    @cached
    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents; reading them from a device waits for it."""
        return self.tokens.tolist(), self.parents.tolist()

    @cached
    def valid(self) -> Bool[Tensor, "B N"]:
        return self.parents != PAD

    @cached
    def on_path(self) -> Bool[Tensor, "B N N"]:
        """``[b, i, j]``: node j is on the path from the root to node i, including i. Padding has only itself.

        Repeatedly squares the parent relation: log2(depth) products, no loop over nodes. Paths longer than ``depth``
        are found to be too long, but not to their full length.
        """
        nodes = self.parents.shape[1]
        index = torch.arange(nodes, device=self.parents.device)
        itself = index[:, None] == index
        if self.linear:
            reached = self.valid.cumprod(1).bool()
            return itself | ((index[:, None] > index) & reached[:, :, None])
        ancestors = (itself | (self.parents[:, :, None] == index)).float()
        for _ in range(self.depth.bit_length()):
            ancestors = (ancestors @ ancestors).clamp_(max=1.0)
        return ancestors > 0.5

    def read(self) -> None:
        """Compute ``on_path``, ``depths`` and ``host_depths`` without operators, for a small tree on the host: in a
        tenth of their time."""
        rows, nodes = self.parents.shape
        if nodes > _FEW:
            return
        if self.linear:
            self._cache["host_depths"] = [range(nodes)] * rows
            return
        self._cache["host_depths"] = depths = [host_depths(parents) for parents in self.lists[1]]
        paths = list[bytearray]()
        for first, parents in zip(count(0, nodes), self.lists[1]):
            for node, parent in enumerate(parents):
                paths.append(bytearray(nodes) if parent < 0 else paths[first + parent].copy())
                paths[-1][node] = True
        on_path = torch.frombuffer(bytearray().join(paths), dtype=torch.bool).view(rows, nodes, nodes)
        self._cache["on_path"], self._cache["depths"] = on_path, on_host(depths)

    @property
    def host_depths(self) -> Sequence[Sequence[int]] | None:
        """``depths`` on the host, if the tree was read there; padding at the end of a chain counts as its nodes."""
        return self._cache.get("host_depths")

    @property
    def used(self) -> int:
        """The number of nodes without padding that all rows have at their ends; read from ``lists``."""
        count = self.tokens.shape[1]
        while all(row[count - 1] == PAD for row in self.lists[1]):
            count -= 1
        return count

    def as_chain(self) -> "TokenTree":
        """The tree, ``linear`` if ``lists`` show a chain in each row."""
        for row in self.lists[1]:
            for above, parent in enumerate(row, start=-1):
                if parent != above and parent != PAD:
                    return self
        tree = copy(self)
        object.__setattr__(tree, "linear", True)
        return tree

    @cached
    def depths(self) -> Int[Tensor, "B N"]:
        """Distance of each node from the root; 0 for padding."""
        return self.on_path.sum(-1) - 1

    @cached
    def elders(self) -> Bool[Tensor, "B N N"]:
        """``[b, i, j]``: node j is an earlier sibling of node i; undefined at padding i."""
        return (self.parents[:, :, None] == self.parents[:, None]).tril(-1)

    @cached
    def turn(self) -> Int[Tensor, "B N"]:
        """The turn of each node; 0 for padding."""
        passed = torch.where(self.on_path, self.elders.sum(-1)[:, None], 0).sum(-1)  # earlier siblings on the way
        return torch.where(self.valid, self.depths + passed, 0)

    def counted(self, without: Bool[Tensor, "B"] | None = None) -> "TokenTree":
        """The same tree, with all that is known about it, and exact ``turns``, read from the device.

        Args:
            without: rows that are not counted, since no rule tests them by turns.
        """
        turn = self.turn if without is None else self.turn * ~without[:, None]
        counts = torch.nn.functional.one_hot(turn).sum(1).amax(0).tolist()
        tree = copy(self)
        object.__setattr__(tree, "turns", tuple(counts[1:]))
        return tree

    def only(self, rows: Bool[Tensor, "B"]) -> "TokenTree":
        """The same tree with the drafted nodes of all other rows turned into padding."""
        keep = rows[:, None] | (self.parents == ROOT)
        return replace(self, parents=torch.where(keep, self.parents, PAD))


def host_depths(parents: Sequence[int]) -> list[int]:
    """Distance of each node of a row from the root; 0 for padding."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


class Merged(NamedTuple):
    """K continuations as one tree. ``nodes[b, k, d]`` is the node of token d of continuation k; 0 past its length."""

    tree: TokenTree
    nodes: Int[Tensor, "B K D"]


def merge_paths(
    root: Int[Tensor, "B"], paths: Int[Tensor, "B K D"], lengths: Int[Tensor, "B K"], budget: int | None = None
) -> Merged:
    """Merge K continuations of each row into one tree; equal prefixes share nodes.

    Args:
        root: the last committed token of each row.
        paths: tokens of each continuation, best continuation first; tokens past its length are ignored.
        lengths: valid tokens of each continuation (0 drops it).
        budget: most drafted nodes per row; the deepest tokens of the worst continuations are dropped first.
    """
    rows, count, depth = paths.shape
    device = paths.device
    valid = torch.arange(depth, device=device) < lengths[:, :, None]
    # same[b, k, j, d]: continuations k and j both have at least d + 1 tokens and agree on them
    same = (paths[:, :, None] == paths[:, None]) & valid[:, :, None] & valid[:, None]
    same = same.cummin(-1).values
    # owner[b, k, d]: the first continuation with this prefix
    owner = same.to(torch.int8).argmax(2)
    mine = torch.arange(count, device=device)[:, None]
    fresh = valid & (owner == mine)
    number = fresh.flatten(1).cumsum(1).view(rows, count, depth)  # 1-based index of each fresh node
    node = torch.where(valid, number.gather(1, owner), 0)
    parent = torch.cat([torch.zeros_like(node[..., :1]), node[..., :-1]], dim=-1)
    size = 1 + count * depth
    width = size if budget is None else min(size, 1 + budget)
    slot = torch.where(fresh, node, size).flatten(1)
    tokens = root.new_zeros(rows, size + 1).scatter(1, slot, paths.flatten(1))
    parents = torch.full_like(tokens, PAD).scatter(1, slot, parent.flatten(1))
    tokens[:, 0] = root
    parents[:, 0] = ROOT
    tree = TokenTree(tokens[:, :width], parents[:, :width], depth=depth, linear=count == 1)
    return Merged(tree, node)


def merge_duplicates(tree: TokenTree, *, keep_duplicates: bool) -> TokenTree:
    """Move the children of duplicate nodes (same token path) to the first of the duplicates, level by level.

    This stays lossless: a sibling's rejection does not depend on its subtree, so the shape below an earlier sibling
    reveals nothing about later ones.

    Args:
        keep_duplicates: keep the later duplicates as leaves, as drawn tokens require. False turns them into padding,
            which is allowed for picked tokens.
    """
    parents, count = tree.parents, tree.parents.shape[1]
    index = torch.arange(count, device=parents.device)
    pair = (tree.tokens[:, :, None] == tree.tokens[:, None]) & tree.valid[:, :, None] & tree.valid[:, None]
    first = index.expand_as(parents)
    for _ in range(tree.depth + 1):  # each round fixes the parents of one more level
        same = pair & (parents[:, :, None] == parents[:, None])
        first = torch.where(tree.valid, same.to(torch.int8).argmax(2), index)
        parents = torch.where(parents > 0, first.gather(1, parents.clamp(min=0)), parents)
    if not keep_duplicates:
        parents = torch.where(first == index, parents, PAD)
    return replace(tree, parents=parents, linear=False, turns=None)
