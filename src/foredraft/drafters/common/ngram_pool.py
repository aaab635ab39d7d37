"""N-grams by their first token: the latest few of each, in one tensor of fixed size, without host synchronisation."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

_FREE = -1


class Found(NamedTuple):
    """G n-grams per row without their first token (M = N - 1 tokens each), and which of them exist."""

    tokens: Int[Tensor, "B G M"]
    exist: Bool[Tensor, "B G"]


class NgramPool:
    """Pools of n-grams, one per owner, with eviction of the least recently added.

    A pool is a table ordered by age, the latest first. An n-gram that is added again moves to the front. Nothing is
    read back from the device, and no loop runs over n-grams.

    Args:
        length: N, the tokens of an n-gram; the first is its key.
        per_key: the most n-grams with the same key.
        size: the most n-grams in a pool, at least ``per_key``.
    """

    def __init__(self, length: int, per_key: int, size: int, device: torch.device) -> None:
        self._per_key = per_key
        self._tokens = torch.zeros(0, size, length, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes

    def reserve(self, owners: int) -> None:
        """Make room for ``owners`` pools; new ones are empty."""
        self._tokens = with_rows(self._tokens, owners, _FREE)

    def empty(self, owner: int) -> None:
        self._tokens[owner : owner + 1] = _FREE

    def clear(self) -> None:
        self._tokens = self._tokens[:0].clone()

    def find(self, owners: Int[Tensor, "B"], keys: Int[Tensor, "B"]) -> Found:
        """The n-grams of each key, the latest first."""
        size = self._tokens.shape[1]
        recency = torch.arange(size, 0, -1, device=keys.device)
        latest = torch.where(self._tokens[owners, :, 0] == keys[:, None], recency, 0).topk(self._per_key, dim=1)
        return Found(self._tokens[owners[:, None], latest.indices, 1:], latest.values > 0)

    def add(self, owners: Int[Tensor, "B"], ngrams: Int[Tensor, "B K N"], valid: Bool[Tensor, "B K"]) -> None:
        """Add the ``valid`` ones of K n-grams for each of B different owners, the latest last."""
        size = self._tokens.shape[1]
        for part, some in zip(ngrams.split(size, 1), valid.split(size, 1), strict=True):
            self._add(owners, part, some)

    def _add(self, owners: Int[Tensor, "B"], ngrams: Int[Tensor, "B K N"], valid: Bool[Tensor, "B K"]) -> None:
        stored, fresh, count = self._tokens[owners], ngrams.flip(1), ngrams.shape[1]
        every = torch.cat([fresh, stored], 1)
        alive = torch.cat([valid.flip(1), stored[..., 0] != _FREE], 1)
        same = (fresh[:, :, None] == every[:, None]).all(-1) & alive[:, :count, None]
        alive = alive & ~same.triu(1).any(1)  # keep the latest of equal ones
        same_key = (fresh[:, :, None, 0] == every[:, None, :, 0]) & alive[:, None]
        alive = alive & ~(same_key & (same_key.cumsum(2) > self._per_key)).any(1)
        every[..., 0] = torch.where(alive, every[..., 0], _FREE)
        order = alive.int().sort(dim=1, descending=True, stable=True).indices[:, : stored.shape[1]]
        self._tokens[owners] = every.gather(1, order[..., None].expand(-1, -1, every.shape[2]))


def with_rows(table: Shaped[Tensor, "R *k"], count: int, value: int = 0) -> Shaped[Tensor, "S *k"]:
    """The table with at least ``count`` rows, new ones filled with ``value``; it doubles, so that it rarely grows."""
    if count <= len(table):
        return table
    return torch.cat([table, table.new_full((max(count, 2 * len(table)) - len(table), *table.shape[1:]), value)])
