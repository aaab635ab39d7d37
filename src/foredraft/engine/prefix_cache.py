"""Prefix cache: a prompt that begins like an earlier one takes over its keys and values instead of reading them again.

Nothing is stored apart: a row of the KV cache keeps its contents after its request has ended, until another request
needs the row. Rows are found by hashes of blocks of their tokens, each chained to the hashes of those before it.
"""

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from foredraft.engine.request import Sequence

BLOCK = 16
"""Tokens of a hash. Shorter prefixes are read again: that takes no longer than to copy them."""

Tokens = np.ndarray
"""Token ids [T]."""
Features = Mapping[int, Tensor]
"""What a drafter reads of a prompt, as ``Drafter.admit`` takes it."""


def block_keys(tenant: str, tokens: Tokens, before: int | None = None) -> list[int]:
    """A number for each whole block of the tokens, which stands for the tenant and all tokens up to the block's end.

    Args:
        before: the key of the block before these tokens, if they are not the first.
    """
    keys, raw, width = [], tokens.astype(np.int64).tobytes(), 8 * BLOCK
    key = hash(tenant) if before is None else before
    for begin in range(0, len(raw) - width + 1, width):
        key = hash((key, raw[begin : begin + width]))
        keys.append(key)
    return keys


class CachedPrefix(NamedTuple):
    """The first ``length`` tokens of a row, and what the drafter reads of them."""

    row: int
    length: int
    features: Features


@dataclass(slots=True)
class _Contents:
    """The tokens of a row: of a prompt, and of the output so far (the request's own list). All but the last are cached.

    ``reread``: tokens of the output that were read with the prompt. ``features``: of the prompt without its last token.
    ``keys``: of the blocks that can be taken over.
    """

    tenant: str
    prompt: Tokens
    output: list[int]
    reread: int
    features: Features
    keys: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many tokens can be taken over."""
        return len(self.prompt) - 1 + (0 if self.features else len(self.output) - self.reread)

    def tokens(self, begin: int = 0) -> Tokens:
        """Those that can be taken over, from ``begin`` on."""
        own, after = self.prompt[begin : self.length], len(self.prompt) - self.reread
        output = self.output[max(begin - after, self.reread) : max(self.length - after, self.reread)]
        return np.concatenate([own, np.array(output, dtype=np.int64)]) if output else own

    def common(self, tokens: Tokens) -> int:
        """How many of these tokens the row holds from its beginning on, with their features."""
        return self._with_features(common_prefix(self.tokens(), tokens), len(tokens))

    def common_beyond(self, known: int, tokens: Tokens) -> int:
        """``common``, if the first ``known`` tokens are the same: quick if few more are."""
        same, end, prompt = known, min(len(tokens), self.length), len(self.prompt)
        while same < end:
            token = self.prompt[same] if same < prompt else self.output[same - prompt + self.reread]
            if token != tokens[same]:
                break
            same += 1
        return self._with_features(same, len(tokens))

    def _with_features(self, same: int, wanted: int) -> int:
        last_only = same == wanted < self.length  # a drafter may read the last token's state alone
        return same - last_only if self.features else same


class PrefixCache:
    """The contents of rows, the least recently used first: of requests that run, and of ended ones.

    A tenant's requests never take over those of another tenant.

    Args:
        enabled: if not, nothing is kept.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._rows: dict[int, _Contents] = {}  # the least recently used first
        self._index: dict[int, set[int]] = {}  # rows by the keys of their blocks
        self._running: set[int] = set()  # rows whose output may grow
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

    def length(self, row: int) -> int:
        """How many tokens of a row can be taken over."""
        return self._rows[row].length if row in self._rows else 0

    def hold(self, row: int, sequence: Sequence, features: Features, cached: int) -> None:
        """Keep the contents of a row whose prompt has been read, but for ``cached`` tokens that were taken over."""
        if self.enabled:
            self.drop([row])
            prompt, output = np.array(sequence.committed, dtype=np.int64), sequence.tokens
            self.queried += len(prompt) - 1
            self.hits += cached
            self._rows[row] = _Contents(sequence.tenant, prompt, output, len(output), features)
            self._running.add(row)
            self._extend(row)

    def _extend(self, row: int) -> None:
        """Add the blocks that the row has filled since the last call to the index."""
        contents = self._rows[row]
        count = len(contents.keys)
        if contents.length >= (count + 1) * BLOCK:
            before = contents.keys[-1] if count else None
            contents.keys += block_keys(contents.tenant, contents.tokens(count * BLOCK), before)
            for key in contents.keys[count:]:
                self._index.setdefault(key, set()).add(row)

    def end(self, row: int, sequence: Sequence) -> None:
        """The row's request has ended. Its contents stay, unless it failed: they may be NaN."""
        if row in self._rows and sequence.error is None:
            self._extend(row)
            self._running.discard(row)
            self._rows[row] = self._rows.pop(row)
        else:
            self.drop([row])

    def drop(self, rows: Collection[int]) -> None:
        """Forget the contents of these rows."""
        for row in rows:
            self._running.discard(row)
            contents = self._rows.pop(row, None)
            for key in () if contents is None else contents.keys:
                self._index[key].discard(row)
                if not self._index[key]:
                    del self._index[key]

    def clear(self) -> None:
        """Forget the contents of all rows."""
        for held in (self._rows, self._index, self._running):
            held.clear()

    def find(self, tenant: str, tokens: Tokens, keys: Seq[int] | None = None) -> CachedPrefix | None:
        """The row that holds most of the beginning of these tokens; None if it is not worth a copy.

        Args:
            keys: the ``block_keys`` of the tokens, if they are known.
        """
        if not self._rows:
            return None
        for row in self._running:
            self._extend(row)
        alike: Collection[int] = ()
        blocks = 0
        for key in block_keys(tenant, tokens) if keys is None else keys:
            if key not in self._index:
                break
            alike, blocks = self._index[key], blocks + 1
        if not alike:
            return None
        known, rows = BLOCK * blocks, self._rows
        latest_first = (row for row in reversed(rows) if row in alike)
        row = max(latest_first, key=lambda each: rows[each].common_beyond(known, tokens))
        length = rows[row].common(tokens)  # a hash may be that of other tokens
        if length < BLOCK:
            return None
        features = {key: states[:, :length] for key, states in rows[row].features.items()}
        return CachedPrefix(row, length, features)

    @property
    def oldest(self) -> list[int]:
        """The rows that hold something, the least recently used first."""
        return list(self._rows)

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
        found = self.find(sequence.tenant, np.array(sequence.committed[:-1])) if self._rows else None
        if found is not None and found.row in order:
            lost = self._rows[found.row].length - found.length
            if lost < BLOCK or (lost <= found.length and all(row in rank for row in free)):
                order.remove(found.row)
                order.insert(0, found.row)
        return order


def common_prefix(a: Tokens | Seq[int], b: Tokens | Seq[int]) -> int:
    """How many tokens two sequences share from their beginning on."""
    shorter = min(len(a), len(b))
    differ = np.asarray(a[:shorter]) != np.asarray(b[:shorter])
    return int(differ.argmax()) if differ.any() else shorter
