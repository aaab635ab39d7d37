"""Prefix cache: a prompt that begins like an earlier one takes over its keys and values instead of reading them again.

Nothing is stored apart: a row of the KV cache keeps its contents after its request has ended, until another request
needs the row.
"""

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from foredraft.engine.request import Sequence

_SHORTEST = 16
"""Shorter prefixes are read again: that takes no longer than to copy them."""

Tokens = np.ndarray
"""Token ids [T]."""
Features = Mapping[int, Tensor]
"""What a drafter reads of a prompt, as ``Drafter.admit`` takes it."""


class CachedPrefix(NamedTuple):
    """The first ``length`` tokens of a row, and what the drafter reads of them."""

    row: int
    length: int
    features: Features


@dataclass(frozen=True, slots=True)
class _Contents:
    """The tokens of a row: of a prompt, and of the output so far (the request's own list). All but the last are cached.

    ``features``: of the prompt without its last token.
    """

    tenant: str
    prompt: Tokens
    output: list[int]
    features: Features

    @property
    def length(self) -> int:
        """How many tokens can be taken over."""
        return len(self.prompt) - 1 + (0 if self.features else len(self.output))

    def common(self, tokens: Tokens) -> int:
        """How many of these tokens the row holds from its beginning on, with their features."""
        same = min(common_prefix(self.prompt, tokens), len(self.prompt) - 1)
        if self.features:
            last_only = same == len(tokens) < len(self.prompt) - 1  # a drafter may read the last token's state alone
            return same - last_only
        if same == len(self.prompt) - 1 and self.output:
            whole = np.array([*self.prompt[same:], *self.output[:-1]])
            same += common_prefix(whole, tokens[same:])
        return same


class PrefixCache:
    """The contents of rows, the least recently used first: of requests that run, and of ended ones.

    A tenant's requests never take over those of another tenant.

    Args:
        enabled: if not, nothing is kept.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._rows: dict[int, _Contents] = {}
        self.queried = 0
        """Prompt tokens that were looked up."""
        self.hits = 0
        """Those of them that were taken over."""

    def __len__(self) -> int:
        """The number of rows that hold something."""
        return len(self._rows)

    def __contains__(self, row: int) -> bool:
        """Whether the row holds something."""
        return row in self._rows

    def hold(self, row: int, sequence: Sequence, features: Features, cached: int) -> None:
        """Keep the contents of a row whose prompt has been read, but for ``cached`` tokens that were taken over."""
        if self.enabled:
            self.queried += len(sequence.prompt) - 1
            self.hits += cached
            prompt = np.array(sequence.prompt)
            self._rows[row] = _Contents(sequence.tenant, prompt, sequence.tokens, features)

    def end(self, row: int, sequence: Sequence) -> None:
        """The row's request has ended. Its contents stay, unless it failed: they may be NaN."""
        contents = self._rows.pop(row, None)
        if contents is not None and sequence.error is None:
            self._rows[row] = contents

    def drop(self, rows: Collection[int]) -> None:
        """Forget the contents of these rows."""
        for row in rows:
            self._rows.pop(row, None)

    def clear(self) -> None:
        """Forget the contents of all rows."""
        self._rows.clear()

    def find(self, tenant: str, tokens: Tokens) -> CachedPrefix | None:
        """The row that holds most of the beginning of these tokens; None if it is not worth a copy."""
        best, longest = None, 0
        for row, contents in self._rows.items():
            if contents.tenant == tenant:
                length = contents.common(tokens)
                if length >= max(_SHORTEST, longest):  # of equal ones the latest
                    best, longest = row, length
        if best is None:
            return None
        features = {key: states[:, :longest] for key, states in self._rows[best].features.items()}
        return CachedPrefix(best, longest, features)

    def use(self, prefix: CachedPrefix) -> None:
        """The prefix is taken over: its row is now the most recently used."""
        self._rows[prefix.row] = self._rows.pop(prefix.row)

    def preferred(self, free: Seq[int], sequence: Sequence) -> list[int]:
        """Free rows in the order in which a request should take them.

        First the row whose contents its prompt continues, then empty rows, then the least recently used. If there is no
        empty row, it may also take one of which it continues at least half: less is lost than by evicting another.
        """
        rank = {row: place for place, row in enumerate(self._rows, start=1)}
        order = sorted(free, key=lambda row: (rank.get(row, 0), row))
        found = self.find(sequence.tenant, np.array(sequence.prompt[:-1])) if self._rows else None
        if found is not None and found.row in order:
            lost = self._rows[found.row].length - found.length
            if lost < _SHORTEST or (lost <= found.length and all(row in rank for row in free)):
                order.remove(found.row)
                order.insert(0, found.row)
        return order


def common_prefix(a: Tokens | Seq[int], b: Tokens | Seq[int]) -> int:
    """How many tokens two sequences share from their beginning on."""
    shorter = min(len(a), len(b))
    differ = np.asarray(a[:shorter]) != np.asarray(b[:shorter])
    return int(differ.argmax()) if differ.any() else shorter
