"""Which replica a request goes to: the one that has most of its prompt in its KV cache, unless it has too much to do.

The load bound is that of consistent hashing with bounded loads (Mirrokni et al. 2016, arXiv:1608.01350).
"""

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence as Seq

_BLOCK = 64
"""Characters; a shared beginning that is shorter is not worth a detour."""
_MOST_BLOCKS = 512
_LONG_BYTES = 2**18
"""Bodies that are compared as they are, since parsing them would hold up other requests."""
_REMEMBERED = 2**17
"""Blocks, of 8 million characters together; about 50 MB."""


def prompt_blocks(body: bytes, tenant: str = "") -> tuple[bytes, ...]:
    """Digests of the beginnings of a request's prompt, the shortest first: one for each whole block of characters.

    Args:
        body: JSON with ``messages``, ``input`` or ``prompt``; anything else has no blocks, unless it is long.
        tenant: who asks; replicas share keys and values only between requests of one tenant.
    """
    text = _prompt(body) if len(body) <= _LONG_BYTES else body[: _BLOCK * _MOST_BLOCKS].decode("latin-1")
    digest, blocks = hashlib.blake2b(tenant.encode(), digest_size=8), []
    for start in range(0, min(len(text), _BLOCK * _MOST_BLOCKS) - _BLOCK + 1, _BLOCK):
        digest.update(text[start : start + _BLOCK].encode())
        blocks.append(digest.digest())
    return tuple(blocks)


def _prompt(body: bytes) -> str:
    """The prompt of a body, and what comes before it; empty if there is none."""
    try:
        found = json.loads(body)
        prompt = found.get("messages", found.get("input", found.get("prompt")))
        return "" if prompt is None else json.dumps([found.get("tools"), found.get("instructions"), prompt])
    except (ValueError, RecursionError, AttributeError):
        return ""


class Affinity:
    """Remembers which replicas have read which beginnings of prompts.

    Args:
        load_bound: a replica with more than this many times the mean load takes no request for its cache alone.
    """

    def __init__(self, load_bound: float = 1.25) -> None:
        self._bound = load_bound
        self._readers: OrderedDict[bytes, frozenset[str]] = OrderedDict()  # the least recently used first

    def ranked(self, blocks: Seq[bytes], loads: Mapping[str, int]) -> list[str]:
        """The replicas, best first.

        Those below the load bound come first, by the length of the known beginning, then by load. Between equals a hash
        of prompt and replica decides, so several routers that know nothing yet decide alike.

        Args:
            loads: requests in flight by replica.
        """
        limit = math.ceil(self._bound * (sum(loads.values()) + 1) / max(1, len(loads)))
        known = self._known(blocks, loads)
        first = blocks[-1] if blocks else b""

        def place(name: str) -> tuple[bool, int, int, bytes]:
            full = loads[name] >= limit
            order = hashlib.blake2b(first + name.encode(), digest_size=8).digest()
            return full, 0 if full else -known[name], loads[name], order

        return sorted(loads, key=place)

    def routed(self, blocks: Seq[bytes], name: str, names: Collection[str]) -> None:
        """Note that replica ``name``, one of ``names``, reads this prompt; replicas that are gone are forgotten."""
        for block in blocks:
            readers = self._readers.pop(block, frozenset())
            self._readers[block] = readers.intersection(names) | {name}
        while len(self._readers) > _REMEMBERED:
            self._readers.popitem(last=False)

    def _known(self, blocks: Seq[bytes], names: Collection[str]) -> dict[str, int]:
        """How many of the blocks each replica has read, from the first one on."""
        known = dict.fromkeys(names, 0)
        readers = set(names)
        for number, block in enumerate(blocks, 1):
            readers &= self._readers.get(block, frozenset())
            if not readers:
                break
            known.update(dict.fromkeys(readers, number))
        return known
