"""Recordings over rows: when they end, which rows they have, and what they read of a view."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from foredraft.core.drafter import View
from foredraft.model.kv.cache import SlotCache
from foredraft.model.recording.replay import EAGER, PaddedSizes, Replay

T = TypeVar("T")


def replay_for(
    replay: Replay, cache: SlotCache, version: object, count: int, free_rows: Container[int]
) -> tuple[Replay, PaddedSizes]:
    """How segments that read the first ``count`` rows of a cache run now.

    Rows are padded to the next power of two, if free rows follow in the cache's lines. Before the cache's buffers are
    allocated, which the first forward does, nothing is recorded.

    Args:
        version: of what else the segments read beyond their inputs, such as a model.
        free_rows: rows of which the cache holds nothing, so that recordings may use them as padding.
    """
    if not replay.records or not cache.holds(0):
        return EAGER, PaddedSizes(count, count)
    replay.renew((cache.version, version))
    padded = min(1 << (count - 1).bit_length(), cache.rows)
    following = cache.first(padded)[count:]
    return replay, PaddedSizes(count, padded if all(row in free_rows for row in following) else count)


def run_rows(
    replay: Replay,
    rows: Sequence[int],
    segment: str,
    function: Callable[..., T],
    view: View,
    *arguments: Any,
    otherwise: Callable[[], T] | None = None,
    why_eager: str | None = None,
) -> T:
    """``function(view, *arguments)``, which may be recorded.

    A recorded function gets a view without lengths on the host whose rows are the first ones of ``rows``, and whose
    history is the roots alone if the warp does not read it. Tensors of its result are valid until the segment's next
    call.

    Args:
        rows: those of the view, and then the padding of a recording.
        otherwise: called if this is not recorded.
        why_eager: a reason not to record this call.
    """

    def eager() -> T:
        return function(view, *arguments) if otherwise is None else otherwise()

    if not replay.records:
        return eager()

    def recorded(view: View, *arguments: Any) -> T:
        count = len(view.lengths)
        return function(replace(view, rows=tuple(rows[:count]), lengths=view.lengths.clamp(min=1)), *arguments)

    sizes, given = PaddedSizes(len(view.rows), len(rows)), (view.recordable(history=view.warp.needs_paths), *arguments)
    return replay(segment, sizes, recorded, *given, otherwise=eager, why_eager=why_eager)
