"""N-grams by their first token: the latest few of each, in one tensor of a fixed size, without a look at its values."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

_FREE = -1


class Found(NamedTuple):
    """G n-grams a row without their first token, M = N - 1 tokens each, and which of them there are."""

    tokens: Int[Tensor, "B G M"]
    exist: Bool[Tensor, "B G"]


class NgramPool:
    """Pools of n-grams, one for each of a few owners: whatever was added least recently leaves first.

    A pool is a table in order of age, the latest first. An n-gram that is added again moves to the front. Nothing is
    read back from the device, and no loop runs over n-grams.

    Args:
        length: N, the tokens of an n-gram; the first is its key.
        per_key: at most so many n-grams with one and the same key.
        size: at most so many in a pool, and at least ``per_key``.
    """

    def __init__(self, length: int, per_key: int, size: int, device: torch.device) -> None:
        self._per_key = per_key
        self._tokens = torch.zeros(0, size, length, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        """What the tables take."""
        return self._tokens.nbytes

    def reserve(self, owners: int) -> None:
        """Have pools for so many owners; new ones are empty."""
        self._tokens = with_rows(self._tokens, owners, _FREE)

    def empty(self, owner: int) -> None:
        """Forget all that this owner has, if there is a pool for it."""
        self._tokens[owner : owner + 1] = _FREE

    def clear(self) -> None:
        """Let go of all owners and of their tables."""
        self._tokens = self._tokens[:0].clone()

    def find(self, owners: Int[Tensor, "B"], keys: Int[Tensor, "B"]) -> Found:
        """What follows each key, the latest first."""
        size = self._tokens.shape[1]
        youth = torch.arange(size, 0, -1, device=keys.device)
        latest = torch.where(self._tokens[owners, :, 0] == keys[:, None], youth, 0).topk(self._per_key, dim=1)
        return Found(self._tokens[owners[:, None], latest.indices, 1:], latest.values > 0)

    def add(self, owners: Int[Tensor, "B"], ngrams: Int[Tensor, "B K N"], wanted: Bool[Tensor, "B K"]) -> None:
        """Add K n-grams for each of B different owners, the latest last, but only those that are ``wanted``."""
        size = self._tokens.shape[1]
        for part, some in zip(ngrams.split(size, 1), wanted.split(size, 1), strict=True):
            self._add(owners, part, some)

    def _add(self, owners: Int[Tensor, "B"], ngrams: Int[Tensor, "B K N"], wanted: Bool[Tensor, "B K"]) -> None:
        held, fresh, count = self._tokens[owners], ngrams.flip(1), ngrams.shape[1]
        every = torch.cat([fresh, held], 1)
        alive = torch.cat([wanted.flip(1), held[..., 0] != _FREE], 1)
        same = (fresh[:, :, None] == every[:, None]).all(-1) & alive[:, :count, None]
        alive = alive & ~same.triu(1).any(1)  # of equal ones the latest stays
        mates = (fresh[:, :, None, 0] == every[:, None, :, 0]) & alive[:, None]
        alive = alive & ~(mates & (mates.cumsum(2) > self._per_key)).any(1)
        every[..., 0] = torch.where(alive, every[..., 0], _FREE)
        order = alive.int().sort(dim=1, descending=True, stable=True).indices[:, : held.shape[1]]
        self._tokens[owners] = every.gather(1, order[..., None].expand(-1, -1, every.shape[2]))


def with_rows(table: Shaped[Tensor, "R *k"], count: int, value: int = 0) -> Shaped[Tensor, "S *k"]:
    """The table with so many rows at least, new ones full of ``value``; it doubles, so that it grows seldom."""
    if count <= len(table):
        return table
    return torch.cat([table, table.new_full((max(count, 2 * len(table)) - len(table), *table.shape[1:]), value)])
