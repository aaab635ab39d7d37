"""The token tree: the one shape that every draft has. A chain is a tree of one branch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

ROOT = -1
PAD = -2


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafted tokens of B rows as N nodes each, parents before children, siblings in draw order.

    Node 0 is the row's last committed token, which is not yet in the target's cache. Padding nodes (parent
    ``PAD``) may stand anywhere behind node 0. ``depth`` is a bound that the host knows, so that loops over a
    tree have a fixed length: no node is deeper (the root has depth 0). ``linear`` says that node i's parent is
    node i - 1 in every row, so that an accepted path is always a prefix of the nodes.
    """

    tokens: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depth: int
    linear: bool = False

    @classmethod
    def chain(cls, tokens: Int[Tensor, "B N"], lengths: Int[Tensor, "B"] | None = None) -> "TokenTree":
        """One branch a row. ``lengths`` counts the valid nodes of each row, root included; None means all N."""
        nodes = tokens.shape[1]
        index = torch.arange(nodes, device=tokens.device).expand_as(tokens)
        parents = index - 1
        if lengths is not None:
            parents = torch.where(index < lengths[:, None], parents, PAD)
        return cls(tokens, parents, depth=nodes - 1, linear=True)

    @classmethod
    def root(cls, tokens: Int[Tensor, "B"]) -> "TokenTree":
        """The tree of plain decoding: nothing but the last committed token."""
        return cls.chain(tokens[:, None])

    @property
    def valid(self) -> Bool[Tensor, "B N"]:
        return self.parents != PAD

    def only(self, rows: Bool[Tensor, "B"]) -> "TokenTree":
        """The same tree with every draft of the other rows turned into padding."""
        keep = rows[:, None] | (self.parents == ROOT)
        return replace(self, parents=torch.where(keep, self.parents, PAD))


def ancestors(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """``[b, i, j]``: node j lies on the path from the root to node i, i itself included.

    By repeated squaring of the parent relation: log2(N) products, no loop over nodes. Padding sees itself only.
    """
    nodes = parents.shape[1]
    index = torch.arange(nodes, device=parents.device)
    reach = (index[:, None] == index) | (parents[:, :, None] == index)
    reach = reach.float()
    for _ in range(max(1, (nodes - 1).bit_length())):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0.5


def depths(parents: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Distance of each node from the root; 0 for padding."""
    return ancestors(parents).sum(-1) - 1


class Merged(NamedTuple):
    """K continuations as one tree. ``nodes[b, k, d]`` holds token d of continuation k; beyond its length it is 0."""

    tree: TokenTree
    nodes: Int[Tensor, "B K D"]


def from_paths(
    root: Int[Tensor, "B"], paths: Int[Tensor, "B K D"], lengths: Int[Tensor, "B K"], budget: int | None = None
) -> TokenTree:
    """The tree of ``merge_paths``."""
    return merge_paths(root, paths, lengths, budget).tree


def merge_paths(
    root: Int[Tensor, "B"], paths: Int[Tensor, "B K D"], lengths: Int[Tensor, "B K"], budget: int | None = None
) -> Merged:
    """Merge K continuations of each row into one tree; equal prefixes become one node.

    Args:
        root: the last committed token of each row.
        paths: tokens of each continuation, best continuation first; anything beyond its length is ignored.
        lengths: valid tokens of each continuation (0 drops it).
        budget: at most so many drafted nodes a row; the deepest tokens of the worst continuations go first.
    """
    rows, count, depth = paths.shape
    device = paths.device
    valid = torch.arange(depth, device=device) < lengths[:, :, None]
    # same[b, k, j, d]: continuations k and j agree up to and including token d, and both reach it
    same = (paths[:, :, None] == paths[:, None]) & valid[:, :, None] & valid[:, None]
    same = same.cummin(-1).values
    # owner[b, k, d]: the first continuation with this very prefix
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


def merge_duplicates(tree: TokenTree, *, twins: bool) -> TokenTree:
    """Let what hangs below a node hang below the first node with the same path of tokens, level by level.

    No verification minds: whether a sibling is rejected, with all that hangs below it, does not depend on what that is,
    so a tree's shape below an elder gives away nothing about its younger siblings that would count.

    Args:
        twins: the nodes that were not the first stay, without children, as drawn ones must; picked ones may go, and
            become padding.
    """
    parents, count = tree.parents, tree.parents.shape[1]
    index = torch.arange(count, device=parents.device)
    pair = (tree.tokens[:, :, None] == tree.tokens[:, None]) & tree.valid[:, :, None] & tree.valid[:, None]
    first = index.expand_as(parents)
    for _ in range(tree.depth + 1):  # each round makes the parents right one level further down
        same = pair & (parents[:, :, None] == parents[:, None])
        first = torch.where(tree.valid, same.to(torch.int8).argmax(2), index)
        parents = torch.where(parents > 0, first.gather(1, parents.clamp(min=0)), parents)
    if not twins:
        parents = torch.where(first == index, parents, PAD)
    return replace(tree, parents=parents, linear=False)
