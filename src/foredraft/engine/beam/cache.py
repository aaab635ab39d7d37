"""The KV cache of a beam search: each beam is a row of the slot cache, forked from its parent."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.model.base import TargetModel
from foredraft.model.prefill import prefill


class BeamCache:
    """Assigns N beams to the rows of a cache. They fill the first rows, so that a forward copies none.

    Args:
        tokens: the prompts, padded on the right; all but their last tokens are read once.
        sizes: tokens of each prompt.
        width: beams of each prompt; those of one prompt are adjacent, and share a row until they diverge.
    """

    def __init__(self, target: TargetModel, tokens: Int[Tensor, "B L"], sizes: Sequence[int], width: int) -> None:
        self._target = target
        self._cache = target.new_cache()
        self._rows = [row for row in range(len(sizes)) for _ in range(width)]
        self._bases = [size - 1 for size in sizes for _ in range(width)]  # slots of the next tokens to read
        longest = max(self._bases)
        self._cache.reserve(range(len(sizes) * width), longest + 1)
        prefill(target, self._cache, range(len(sizes)), tokens[:, :longest], [0] * len(sizes))

    def forward(self, root: TokenTree) -> Float[Tensor, "N 1 V"]:
        """Read the last token of each beam, ``root``; return its logits. Shared rows are read once."""
        device = self._target.device
        first = {row: beam for beam, row in reversed(list(enumerate(self._rows)))}
        rows = range(len(first))
        beams = [first[row] for row in rows]  # the first beam of each row
        bases = [self._bases[beam] for beam in beams]
        used_slots = max(bases) + 1
        self._cache.reserve(rows, used_slots)
        tree = TokenTree.root(root.tokens[torch.tensor(beams, device=device), 0])
        step = self._target.address(tree, torch.tensor(bases, device=device), rows, used_slots)
        return self._target.forward(step, self._cache).logits[torch.tensor(self._rows, device=device)]

    @property
    def diverged(self) -> bool:
        """True if every beam has its own row, as after the first ``move``."""
        return len(set(self._rows)) == len(self._rows)

    def used_slots(self, nodes: int) -> int:
        """Slots needed for trees of ``nodes`` nodes, the last tokens included."""
        return max(self._bases) + nodes

    def read(self, tree: TokenTree, start: int = 0) -> Float[Tensor, "N M V"]:
        """Read a tree below each beam, whose last token is node 0; return the logits of nodes from ``start`` on."""
        used_slots = self.used_slots(tree.tokens.shape[1])
        self._cache.reserve(range(len(self._rows)), used_slots)
        bases = torch.tensor(self._bases, device=self._target.device)
        step = self._target.address(tree, bases, self._rows, used_slots, start=start)
        return self._target.forward(step, self._cache).logits

    def move(self, parents: Sequence[int], paths: Sequence[Sequence[int]] | None = None) -> None:
        """Replace the beams by their children, each extended by its path.

        One child of each parent keeps the parent's row; the others are copied to free rows. If whole prompts have
        ended, the highest rows move down.

        Args:
            paths: for each child the accepted nodes of the parent's tree, 0 first; by default node 0 alone.
        """
        paths = [(0,)] * len(parents) if paths is None else paths
        sources = [self._rows[parent] for parent in parents]
        bases = [self._bases[parent] for parent in parents]
        self._rows = assign_rows(sources)
        moved = [i for i, row in enumerate(self._rows) if row != sources[i]]
        if moved:
            slots = max(bases[i] + 1 + max(paths[i]) for i in moved)
            self._cache.fork([sources[i] for i in moved], [self._rows[i] for i in moved], slots)
        if any(len(path) > 1 for path in paths):
            device, longest = self._target.device, max(map(len, paths))
            filled = torch.tensor([[*path, *[-1] * (longest - len(path))] for path in paths], device=device)
            self._cache.compact(self._rows, torch.tensor(bases, device=device), filled)
        self._bases = [base + len(path) for base, path in zip(bases, paths, strict=True)]


def assign_rows(preferred: Sequence[int]) -> list[int]:
    """Assign N beams to rows 0 .. N-1, moving as few as possible away from their ``preferred`` rows."""
    rows = [-1] * len(preferred)
    free = dict.fromkeys(range(len(preferred)))
    for beam, row in enumerate(preferred):
        if row in free:
            rows[beam] = row
            del free[row]
    left = iter(free)
    return [row if row >= 0 else next(left) for row in rows]
