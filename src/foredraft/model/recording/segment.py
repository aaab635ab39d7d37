"""Functions of rows that may be recorded: what they read of a view, how rows are padded, and when recordings end."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

import torch

from foredraft.core.drafter import View
from foredraft.model.kv.cache import SlotCache
from foredraft.model.recording.recorder import PaddedSizes, Recorder

T = TypeVar("T")


@runtime_checkable
class Model(Protocol):
    """What is read of a ``TargetModel``."""

    @property
    def why_eager(self) -> str | None: ...

    @property
    def target_cache(self) -> SlotCache | None: ...


@final
class SegmentRows:
    """The rows of segments whose recordings end together.

    Args:
        cache: the KV cache of which the segments use the first rows; None if they use none.
        version: of what else they read beyond their inputs, such as a model.
        spare: whether these rows of the cache hold nothing that is needed, so that recordings may use them as padding.
    """

    def __init__(
        self,
        cache: SlotCache | None = None,
        version: Callable[[], object] = lambda: None,
        spare: Callable[[Sequence[int]], bool] = lambda rows: False,
    ) -> None:
        self._cache = cache
        self._version = version
        self._spare = spare

    def recorder(self, view: View) -> tuple[Recorder, PaddedSizes] | None:
        """What records the segments in this step, and the number of rows; None if they run as they are.

        Rows are padded to the next power of two, if spare rows follow in the cache's lines. Before the cache's buffers
        are allocated, which the first forward does, nothing is recorded.
        """
        if not isinstance(view.recorder, Recorder):
            return None
        count, cache, own = len(view.rows), self._cache, view.recorder.of(self)
        padded = 1 << (count - 1).bit_length()
        if cache is None:
            return own, PaddedSizes(count, padded)
        if not cache.holds(0):
            return None
        own.renew((cache.version, self._version()))
        padded = min(padded, cache.rows)
        return own, PaddedSizes(count, padded if self._spare(cache.first(padded)[count:]) else count)

    def first(self, count: int) -> tuple[int, ...]:
        """The numbers of the first rows."""
        return tuple(range(count) if self._cache is None else self._cache.first(count))


@final
class Segment(Generic[T]):
    """A part of a step, as a function: called like it, and recorded if the step is; see ``recorder``.

    Args:
        name: in the log.
        function: of a view and of nested values.
        rows: that it reads and writes.
        model: which it runs; it may say why that cannot be recorded.
        of_view: the function takes the view; else only what follows it.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., T],
        rows: SegmentRows,
        *,
        model: Model | None = None,
        of_view: bool = True,
    ) -> None:
        self._name = name
        self._function = function
        self._rows = rows
        self._model = model
        self._of_view = of_view

    def __call__(self, view: View, *arguments: Any) -> T:
        """``function(view, *arguments)``.

        A recorded function gets a view without lengths on the host whose rows are the first ones, and whose history is
        the roots alone if the warp does not read it. Tensors of its result are valid until the segment's next call.
        """
        given = (view, *arguments) if self._of_view else arguments
        found = self._rows.recorder(view)
        if found is None:
            return self._function(*given)
        recorder, sizes = found
        if not self._of_view:
            return recorder(self._name, sizes, self._function, *given, why_eager=self._why_eager)
        eager, given = partial(self._function, *given), (_recordable(view), *arguments)
        return recorder(self._name, sizes, self._of_rows, *given, otherwise=eager, why_eager=self._why_eager)

    @property
    def _why_eager(self) -> str | None:
        model = self._model
        if model is not None and model.target_cache is not None:
            return "it reads the target's KV cache"
        return None if model is None else model.why_eager

    def _of_rows(self, view: View, *arguments: Any) -> T:
        """The function, with padding among the rows, which has no tokens."""
        rows = self._rows.first(len(view.lengths))
        return self._function(replace(view, rows=rows, lengths=view.lengths.clamp(min=1)), *arguments)


def _recordable(view: View) -> View:
    """What is read of a view in a recording: tensors, and few numbers of the host.

    The history is padded to a power of two if the warp reads it; else it has one column, the roots.
    """
    if view.warp.needs_paths:
        width = 1 << (view.history.shape[1] - 1).bit_length()
        history = torch.nn.functional.pad(view.history, (0, width - view.history.shape[1]))
    else:
        history = view.roots[:, None]
    noise = replace(view.noise, recent=None)
    return View((), history, view.lengths, (), replace(view.warp, host_temperatures=()), noise, view.draws)
