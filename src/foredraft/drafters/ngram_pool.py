"""N-grams by their first token: the latest few of each, in tensors of a fixed size, without a look at the values."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


class Found(NamedTuple):
    """G n-grams a row without their first token, M = N - 1 tokens each, and which of them there are."""

    tokens: Int[Tensor, "B G M"]
    exist: Bool[Tensor, "B G"]


class NgramPool:
    """Pools of n-grams, one for each of a few owners: the least recently added leaves first.

    An n-gram that is added again counts as new. Nothing is read back from the device, and no loop runs over n-grams:
    a pool is a table with a stamp for each entry, and 0 is the stamp of a free one.

    Args:
        length: N, the tokens of an n-gram; the first is its key.
        per_key: at most so many n-grams with one and the same key.
        size: at most so many in a pool.
    """

    def __init__(self, length: int, per_key: int, size: int, device: torch.device) -> None:
        self._per_key = per_key
        self._tokens = torch.zeros(0, size, length, dtype=torch.long, device=device)
        self._stamps = torch.zeros(0, size, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        """What the tables take."""
        return self._tokens.nbytes + self._stamps.nbytes

    def reserve(self, owners: int) -> None:
        """Have pools for so many owners; new ones are empty."""
        self._tokens, self._stamps = with_rows(self._tokens, owners), with_rows(self._stamps, owners)

    def empty(self, owner: int) -> None:
        """Forget all that this owner has."""
        self._stamps[owner] = 0

    def clear(self) -> None:
        """Let go of all owners and of their tables."""
        self._tokens, self._stamps = self._tokens[:0].clone(), self._stamps[:0].clone()

    def find(self, owners: Int[Tensor, "B"], keys: Int[Tensor, "B"]) -> Found:
        """What follows each key, the latest first."""
        stamps = torch.where(self._tokens[owners, :, 0] == keys[:, None], self._stamps[owners], 0)
        latest = stamps.topk(self._per_key, dim=1)
        return Found(self._tokens[owners[:, None], latest.indices, 1:], latest.values > 0)

    def add(self, owners: Int[Tensor, "B"], ngrams: Int[Tensor, "B K N"], wanted: Bool[Tensor, "B K"]) -> None:
        """Add K n-grams for each of B different owners, the latest last, but only those that are ``wanted``."""
        size = self._stamps.shape[1]
        ngrams, wanted = ngrams[:, -size:], wanted[:, -size:]
        held, stamps = self._tokens[owners], self._stamps[owners]
        twins = (ngrams[:, :, None] == ngrams[:, None]).all(-1) & wanted[:, None]
        wanted = wanted & ~twins.triu(1).any(2)  # of equal ones the last
        known = ((ngrams[:, :, None] == held[:, None]).all(-1) & wanted[..., None]).any(1)
        stamps = torch.where(known, 0, stamps)

        # the wanted ones take the oldest places, in order; the others leave theirs as they are
        order = wanted.int().sort(dim=1, descending=True, stable=True).indices
        wanted = wanted.gather(1, order)
        places = stamps.topk(order.shape[1], dim=1, largest=False).indices
        fresh = stamps.amax(1, keepdim=True) + 1 + torch.arange(order.shape[1], device=order.device)
        stamps = stamps.scatter(1, places, torch.where(wanted, fresh, stamps.gather(1, places)))
        wide = (-1, -1, ngrams.shape[2])
        ngrams = ngrams.gather(1, order[..., None].expand(wide))
        old = held.gather(1, places[..., None].expand(wide))
        held = held.scatter(1, places[..., None].expand(wide), torch.where(wanted[..., None], ngrams, old))

        # with a new one the oldest of too many goes
        mates = torch.where(ngrams[:, :, None, 0] == held[:, None, :, 0], stamps[:, None], 0)
        least = mates.topk(self._per_key, dim=2).values[..., -1:]
        surplus = ((mates > 0) & (mates < least)).any(1)
        self._tokens[owners], self._stamps[owners] = held, torch.where(surplus, 0, stamps)


def with_rows(table: Shaped[Tensor, "R *k"], count: int) -> Shaped[Tensor, "S *k"]:
    """The table with so many rows at least, new ones being 0: twice as many when it grows, so that it grows seldom."""
    if count <= len(table):
        return table
    return torch.cat([table, table.new_zeros(max(count, 2 * len(table)) - len(table), *table.shape[1:])])
