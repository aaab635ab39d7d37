"""Recordings over a slot cache: when they end, and which rows they have."""

from collections.abc import Container

from foredraft.model.cache import SlotCache
from foredraft.model.replay import EAGER, Replay, Sizes


def replay_for(
    replay: Replay, cache: SlotCache, version: object, count: int, free_rows: Container[int]
) -> tuple[Replay, Sizes]:
    """How segments that read the first ``count`` rows of a cache run now.

    Rows are padded to the next power of two, if free rows follow in the cache's lines. Before the cache's buffers are
    allocated, which the first forward does, nothing is recorded.

    Args:
        version: of what else the segments read beyond their inputs, such as a model.
        free_rows: rows of which the cache holds nothing, so that recordings may use them as padding.
    """
    if not replay.records or not cache.holds(0):
        return EAGER, Sizes(count, count)
    replay.renew((cache.version, version))
    padded = min(1 << (count - 1).bit_length(), cache.rows)
    following = cache.first(padded)[count:]
    return replay, Sizes(count, padded if all(row in free_rows for row in following) else count)
