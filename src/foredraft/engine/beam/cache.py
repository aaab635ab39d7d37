"""Continuations of a few prompts that part and die out: each is a row of the slot cache, forked from its parent."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.model.base import TargetModel
from foredraft.model.prefill import prefill


class Forks:
    """Where N continuations stand in a cache of their own. They fill the first rows, so a forward copies none.

    Args:
        tokens: the prompts, padded on the right; they are read once, all but their last tokens.
        sizes: tokens of each prompt.
        width: continuations of each prompt; those of one prompt stand side by side, and on one row until they part.
    """

    def __init__(self, target: TargetModel, tokens: Int[Tensor, "B L"], sizes: Sequence[int], width: int) -> None:
        self._target = target
        self._cache = target.new_cache()
        self._rows = [row for row in range(len(sizes)) for _ in range(width)]
        self._bases = [size - 1 for size in sizes for _ in range(width)]  # slots of the tokens to be read next
        longest = max(self._bases)
        self._cache.reserve(len(sizes) * width, longest + 1)
        prefill(target, self._cache, range(len(sizes)), tokens[:, :longest], [0] * len(sizes))

    def forward(self, root: TokenTree) -> Float[Tensor, "N 1 V"]:
        """Read the last token of each continuation, ``root``; return its logits. Shared rows are read once."""
        device = self._target.device
        first = {row: fork for fork, row in reversed(list(enumerate(self._rows)))}
        rows = range(len(first))
        forks = [first[row] for row in rows]  # one that stands there
        bases = [self._bases[fork] for fork in forks]
        reach = max(bases) + 1
        self._cache.reserve(len(rows), reach)
        tree = TokenTree.root(root.tokens[torch.tensor(forks, device=device), 0])
        step = self._target.address(tree, torch.tensor(bases, device=device), rows, reach)
        return self._target.forward(step, self._cache).logits[torch.tensor(self._rows, device=device)]

    @property
    def parted(self) -> bool:
        """Whether every continuation has a row of its own, as it has once all of them have moved."""
        return len(set(self._rows)) == len(self._rows)

    def reach(self, nodes: int) -> int:
        """How many slots trees of so many nodes below the last tokens take."""
        return max(self._bases) + nodes

    def read(self, tree: TokenTree, start: int = 0) -> Float[Tensor, "N M V"]:
        """Logits of the nodes of a tree from ``start`` on, below the last token of each continuation, its node 0."""
        reach = self.reach(tree.tokens.shape[1])
        self._cache.reserve(len(self._rows), reach)
        bases = torch.tensor(self._bases, device=self._target.device)
        step = self._target.address(tree, bases, self._rows, reach, start=start)
        return self._target.forward(step, self._cache).logits

    def move(self, parents: Sequence[int], paths: Sequence[Sequence[int]] | None = None) -> None:
        """From now on there are these children, so much longer than their parents as their paths say.

        One child of each parent stays on its row, the others are copied. Where whole prompts have dropped out, those
        that stood highest come down.

        Args:
            paths: nodes of the parent's tree that were read for each child, 0 first; by default that one alone.
        """
        paths = [(0,)] * len(parents) if paths is None else paths
        wanted = [self._rows[parent] for parent in parents]
        bases = [self._bases[parent] for parent in parents]
        self._rows = place(wanted)
        moved = [i for i, row in enumerate(self._rows) if row != wanted[i]]
        if moved:
            slots = max(bases[i] + 1 + max(paths[i]) for i in moved)
            self._cache.fork([wanted[i] for i in moved], [self._rows[i] for i in moved], slots)
        if any(len(path) > 1 for path in paths):
            device, longest = self._target.device, max(map(len, paths))
            filled = torch.tensor([[*path, *[-1] * (longest - len(path))] for path in paths], device=device)
            self._cache.compact(torch.tensor(self._rows, device=device), torch.tensor(bases, device=device), filled)
        self._bases = [base + len(path) for base, path in zip(bases, paths, strict=True)]


def place(wanted: Sequence[int]) -> list[int]:
    """Rows 0 .. N-1 for N continuations that would like to stand on ``wanted``, of which as few as can be move."""
    rows = [-1] * len(wanted)
    free = dict.fromkeys(range(len(wanted)))
    for fork, row in enumerate(wanted):
        if row in free:
            rows[fork] = row
            del free[row]
    left = iter(free)
    return [row if row >= 0 else next(left) for row in rows]
