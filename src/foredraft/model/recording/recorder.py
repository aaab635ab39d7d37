"""Recorders: a part of a step is recorded once for each shape of its inputs and then replayed.

A part (*segment*) is a function of nested values: dataclasses, tuples and mappings of tensors [B, ...] and of numbers
on the host. The numbers and the tensors' shapes are the key of a recording, so a recording never replays a number of
another step. The tensors are copied to buffers at fixed addresses.

A function must be repeatable: recording runs it more than once with the inputs of one step. What it reads and writes
beyond its inputs (weights, KV caches) must stay where it is; ``Recorder.renew`` says when it moved. ``Segment`` makes a
function a segment.

Segments are ``forward`` and ``tail`` (``engine.step``), ``catch-up``, ``tree`` of heads, and ``chain``, ``tree``,
``guesses`` and ``text`` of draft models and of targets that skip layers; or each of their forwards, ``draft``,
where the whole cannot be recorded. docs/performance.md lists what is no segment, and why.
"""

import dataclasses
import logging
import threading
import types
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from foredraft.core.errors import ForedraftError, OptionError
from foredraft.model.recording.nested_values import joined, split

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_RECORDINGS = 256
"""Most recordings of a segment; inputs of further shapes run eagerly."""
MAX_FAILURES = 3
"""A segment that could not be recorded for this many shapes, and for none so far, is not tried again."""
_CAPTURING = threading.Lock()
"""A capture begins by waiting for the device, which would end one of another thread."""
_HASHLESS = frozenset({"forward", "draft", "catch-up"})
"""Segments without random numbers. Compiled for a CPU, the hashes behind these differ in the last entries of some
vectors (docs/log/recording.md), and a seed would give another output."""
_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels and allocates the workspaces of libraries."""


class PaddedSizes(NamedTuple):
    """``rows``: B, the size of the first dimension of all tensors, inputs and results. ``padded``: the size that a
    recording is made for; further rows hold zeros."""

    rows: int
    padded: int


Flat = Callable[..., list[Tensor]]
"""A function of the tensors of its arguments alone, which returns those of its result."""


@dataclasses.dataclass(slots=True)
class _Recording:
    """A recording: its inputs' buffers, what runs it, and the form of its result.

    ``buffers``: None where a result of another recording is read in place. ``rows``: rows that hold inputs; further
    rows hold zeros.
    """

    buffers: list[Tensor | None]
    play: Callable[[], Sequence[Tensor]]
    form: Any
    rows: int

    def __call__(self, tensors: Sequence[Tensor], rows: int) -> Any:
        before, self.rows = self.rows, max(rows, self.rows)  # also if this is interrupted
        for buffer, given in zip(self.buffers, tensors, strict=True):
            if buffer is not None:
                buffer[:rows] = given
                if rows < before:
                    buffer[rows:before] = 0
        self.rows = rows
        return joined(self.form, [each[:rows] for each in self.play()])


class Recorder(ABC):
    """Records each segment once for each key. What cannot be recorded runs as it is, which is logged once.

    A key that failed is not tried again, unless memory was short: then it is when ``renew`` drops the recordings.
    A tensor that is a result of a recording is read where it is.

    Args:
        segments: those to record; None for all.
    """

    def __init__(self, segments: Container[str] | None = None) -> None:
        self._segments = segments
        self._stamp: object = ()  # None is that of a closed recorder
        self._recordings: dict[object, _Recording] = {}
        self._results: dict[int, Tensor] = {}  # by address
        self._eager: set[str] = set()  # segments that are not tried again
        self._failed: dict[object, str] = {}  # segments by the keys that cannot be recorded
        self._short: set[object] = set()  # keys for which memory was short
        self._children: dict[object, Recorder] = {}
        self._logged: set[tuple[str, str]] = set()

    def renew(self, stamp: object) -> None:
        """Drop the recordings if ``stamp`` differs from the last one: what they read was reallocated or replaced."""
        if stamp != self._stamp:
            self._recordings.clear()
            self._results.clear()
            self._short.clear()
            self._stamp = stamp

    def of(self, owner: object) -> "Recorder":
        """A recorder of the same kind with a stamp and recordings of its own, which is closed with this one; always the
        same one for an owner."""
        if owner not in self._children:
            self._children[owner] = self._another()
        return self._children[owner]

    def close(self) -> None:
        """Drop all recordings."""
        self.renew(None)
        for each in self._children.values():
            each.close()

    @property
    def recordings(self) -> Counter[str]:
        """Number of recordings by segment, with those of the recorders of owners."""
        own = Counter(key[0] for key in self._recordings if isinstance(key, tuple))
        return sum((each.recordings for each in self._children.values()), own)

    def __call__(
        self,
        segment: str,
        sizes: PaddedSizes,
        function: Callable[..., T],
        *arguments: Any,
        otherwise: Callable[[], T] | None = None,
        why_eager: str | None = None,
    ) -> T:
        """``function(*arguments)``.

        The results are valid until the segment's next call.

        Args:
            segment: a name; one segment always calls one function.
            otherwise: called instead of the function if this call is not recorded.
            why_eager: a reason not to record this call.
        """
        eager = otherwise or (lambda: function(*arguments))
        if self._segments is not None and segment not in self._segments:
            return eager()
        if why_eager is not None or segment in self._eager:
            self._note(segment, why_eager or "")
            return eager()
        tensors: list[Tensor] = []
        try:
            form = split(arguments, tensors)
        except TypeError as error:
            self._note(segment, str(error))
            return eager()
        places = [self._place(tensor, sizes.padded) for tensor in tensors]
        key = (segment, sizes.padded, form, tuple(None if place is None else place.data_ptr() for place in places))
        with torch.inference_mode(False), torch.no_grad():  # buffers must outlive the step; compilers refuse others
            found = self._recordings.get(key)
            if found is None and key not in self._failed and key not in self._short:
                found = self._new(key, function, sizes.rows, tensors, places)
            if found is not None:
                return found(tensors, sizes.rows)
        return eager()

    def _place(self, tensor: Tensor, padded: int) -> Tensor | None:
        """The result of a recording that this tensor is, with all its rows, if it is one."""
        found = self._results.get(tensor.data_ptr())
        if found is None or found.shape != (padded, *tensor.shape[1:]) or found.dtype != tensor.dtype:
            return None
        return found

    def _new(
        self,
        key: tuple[Any, ...],
        function: Callable[..., Any],
        rows: int,
        tensors: Sequence[Tensor],
        places: Sequence[Tensor | None],
    ) -> _Recording | None:
        """Record a segment; None if it must run eagerly."""
        segment, padded, form, *_ = key
        if self.recordings.get(segment, 0) >= MAX_RECORDINGS:
            self._note(segment, f"its inputs had {MAX_RECORDINGS} different shapes")
            return None
        buffers = [
            tensor.new_zeros(padded, *tensor.shape[1:]) if place is None else None
            for tensor, place in zip(tensors, places, strict=True)
        ]
        inputs = [buffer if place is None else place for buffer, place in zip(buffers, places, strict=True)]
        for buffer, tensor in zip(buffers, tensors, strict=True):
            if buffer is not None:
                buffer[:rows] = tensor
        result: list[Any] = [None]  # of one length: code is compiled again where lengths change

        def flat(*values: Tensor) -> list[Tensor]:
            found: list[Tensor] = []
            result[0] = split(function(*joined(form, values)), found)
            return found

        try:
            play, results = self._record(segment, flat, [each for each in inputs if each is not None])
        except ForedraftError:
            raise
        except Exception as error:  # anything that a compiler or a driver may raise; a fault of ours recurs eagerly
            self._fail(key, error)
            return None
        self._results.update({each.data_ptr(): each for each in results})
        found = self._recordings[key] = _Recording(buffers, play, result[0], rows)
        return found

    def _fail(self, key: tuple[Any, ...], error: Exception) -> None:
        """Note that a key could not be recorded."""
        segment: str = key[0]
        if _memory_was_short(error):
            self._short.add(key)
        else:
            self._failed[key] = segment
            if not self.recordings.get(segment) and list(self._failed.values()).count(segment) >= MAX_FAILURES:
                self._eager.add(segment)
        lines = str(error).strip().splitlines()
        self._note(segment, f"recording failed with {error.__class__.__name__}: {' '.join(lines[:2])}")

    @abstractmethod
    def _another(self) -> "Recorder":
        """A recorder of the same kind without recordings."""

    @abstractmethod
    def _record(
        self, segment: str, function: Flat, inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]:
        """Record ``function(*inputs)``, whose inputs stay where they are.

        Returns:
            a function that runs it again and returns the results, and the results' tensors, if they stay where they
            are.
        """

    def _note(self, segment: str, reason: str) -> None:
        if reason and (segment, reason) not in self._logged:
            self._logged.add((segment, reason))
            _log.warning("The %s of a step runs eagerly: %s.", segment, reason)


def _memory_was_short(error: BaseException | None) -> bool:
    """Whether an error or one behind it says so; a capture that ends early raises another one."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


@final
class Compiled(Recorder):
    """Segments compiled by ``torch.compile``, without graph breaks and for one shape each."""

    def __init__(self, backend: str = "inductor", segments: Container[str] | None = None) -> None:
        super().__init__(segments)
        self._backend = backend

    def _another(self) -> "Compiled":
        return Compiled(self._backend, self._segments)

    def _record(
        self, segment: str, function: Flat, inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]:
        compiled = compiled_once(function, self._backend)
        compiled(*inputs)
        return lambda: compiled(*inputs), ()


@final
class Captured(Recorder):
    """Segments captured as CUDA graphs.

    The graphs of a segment share one memory pool: a segment's results are read before it runs again. Segments do not
    share pools, since one reads the results of the one before. Row and node counts come in buckets that about double,
    so graphs captured in rising order take at most about twice the memory of the largest.

    Args:
        device: the CUDA device.
        compiled: capture what ``torch.compile`` makes of a segment.
    """

    def __init__(self, device: torch.device, *, compiled: bool = False) -> None:
        super().__init__()
        self._device = device
        self._compiled = compiled
        self._pools: dict[str, Any] = {}
        self._side: Any = None

    def renew(self, stamp: object) -> None:
        if stamp != self._stamp:
            self._pools.clear()  # a pool ends with its last graph
        super().renew(stamp)

    def _another(self) -> "Captured":
        return Captured(self._device, compiled=self._compiled)

    def _record(
        self, segment: str, function: Flat, inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]:
        if self._compiled:
            function = compiled_once(function, "inductor")
        with _CAPTURING, torch.cuda.device(self._device):
            if self._side is None:
                self._side = torch.cuda.Stream()
            own, side = torch.cuda.current_stream(), self._side
            side.wait_stream(own)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    function(*inputs)
            own.wait_stream(side)
            pool = self._pools.setdefault(segment, torch.cuda.graph_pool_handle())
            graph = torch.cuda.CUDAGraph()
            try:
                # other threads may allocate memory meanwhile
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    results = function(*inputs)
            finally:
                torch.cuda.set_stream(own)  # a failed capture leaves its own

        def play() -> Sequence[Tensor]:
            graph.replay()
            return results

        return play, results


def recorder_on(device: torch.device, *, compile: bool, cuda_graphs: bool) -> Recorder | None:
    """The recorder for ``load``'s options; None if steps run as they are.

    Raises:
        OptionError: CUDA graphs were asked for on another device.
    """
    if cuda_graphs and device.type != "cuda":
        raise OptionError(f"cuda_graphs needs a CUDA device, and the target is on {device}.")
    if cuda_graphs:
        return Captured(device, compiled=compile)
    if not compile:
        return None
    return Compiled(segments=_HASHLESS if device.type == "cpu" else None)


def compiled_once(function: Flat, backend: str) -> Flat:
    """``torch.compile`` of a function that is called with one shape only.

    It gets a code object of its own: recompilations are counted, and limited, by code object.
    """
    code = function.__code__.replace(co_name=f"segment_{id(function)}")
    own = types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
