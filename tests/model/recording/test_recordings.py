"""Recordings of functions: what is in their key, how inputs are padded, and captures with a stand-in for CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import runs
import tiny
from foredraft.core.errors import DrafterError, OptionError
from foredraft.model.recording import recorder as module
from foredraft.model.recording.recorder import Captured, Compiled, PaddedSizes, recorder_on
from traced import Tape, Traced

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Nested:
    values: dict[int, Tensor]
    twice: tuple[Tensor, Tensor]
    factor: int
    flags: tuple[bool, None, str]


def scaled(given: Nested) -> Nested:
    """Of each row; 1 is added, so rows of zeros do not stay zero."""
    total = given.values[3] * given.factor + given.twice[0] - given.twice[1] + 1
    return Nested({7: total}, (total, given.twice[1]), given.factor, given.flags)


def nested(rows: int, factor: int = 2) -> Nested:
    values, same = torch.arange(4.0 * rows).view(rows, 4), torch.ones(rows, 1)
    return Nested({3: values}, (same, same), factor, (True, None, "a"))


def test_numbers_and_shapes_are_the_key_and_tensors_are_inputs():
    recorder = Traced()
    for rows, factor in ((3, 2), (2, 2), (4, 2), (3, 5), (1, 2), (3, 2)):
        found = recorder("a", PaddedSizes(rows, 4), scaled, nested(rows, factor))
        expected = scaled(nested(rows, factor))
        assert torch.equal(found.values[7], expected.values[7]) and torch.equal(found.twice[0], expected.twice[0])
        assert (found.factor, found.flags) == (factor, (True, None, "a"))
    assert recorder.keys == ["a", "a"]  # one for each factor
    one, other = torch.ones(3, 1), torch.ones(3, 1)
    recorder("a", PaddedSizes(3, 4), scaled, Nested({3: one}, (one, other), 2, (True, None, "a")))
    assert len(recorder.keys) == 3  # tensors that were one and are two


def test_further_rows_hold_zeros():
    recorder = Traced()
    seen: list[Tensor] = []

    def keep(values: Tensor) -> Tensor:
        seen.append(values)
        return values + 1

    for rows in (4, 2, 3):
        recorder("a", PaddedSizes(rows, 4), keep, torch.full((rows, 2), 5.0))
        assert seen[0][:rows].eq(5).all() and seen[0][rows:].eq(0).all()
    assert len(seen) == 1


def test_a_result_is_read_where_it_is():
    recorder = Traced()
    for number in (1.0, 2.0):
        first = recorder("a", PaddedSizes(2, 4), torch.neg, torch.full((2, 3), number))
        place = first.data_ptr()
        second = recorder("b", PaddedSizes(2, 4), torch.square, first)
        assert second.eq(number**2).all() and second.shape == (2, 3) and first.eq(-number).all()
    assert list(recorder._recordings.values())[1].buffers == [None] and place in recorder._results
    assert recorder("b", PaddedSizes(2, 4), torch.square, torch.ones(2, 3)).eq(1).all() and len(recorder.keys) == 3


def test_what_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture):
    recorder = Traced()
    for number in (1.0, 2.0):
        value = torch.full((2, 1), number)
        assert recorder("host", PaddedSizes(2, 2), lambda x, f: f(x), value, torch.neg).eq(-number).all()
        assert recorder("read", PaddedSizes(2, 2), lambda x: x * x.sum().item(), value).eq(2 * number**2).all()
        assert recorder("given", PaddedSizes(2, 2), torch.neg, value, why_eager="it is Sunday").eq(-number).all()
    assert [record.getMessage() for record in caplog.records] == [
        "The host of a step runs eagerly: it depends on a function on the host.",
        "The read of a step runs eagerly: recording failed with RuntimeError: _local_scalar_dense cannot be recorded.",
        "The given of a step runs eagerly: it is Sunday.",
    ]

    def fails(value: Tensor) -> Tensor:
        raise DrafterError("no")

    with pytest.raises(DrafterError):
        recorder("fails", PaddedSizes(2, 2), fails, torch.ones(2, 1))
    assert "fails" not in {segment for segment, _ in recorder.fallbacks}


def test_a_shape_that_cannot_be_recorded_leaves_the_others_recorded():
    def reads(value: Tensor, number: int) -> Tensor:
        return value + (value.sum().item() if number == 2 else number)

    recorder = Traced()
    for number in (2, 1, 2, 3, 1, 3):
        expected = 3 if number == 2 else 1 + number
        assert recorder("a", PaddedSizes(2, 2), reads, torch.ones(2, 1), number).eq(expected).all()
    assert recorder.recordings == {"a": 2} and recorder.replays == 4 and len(recorder.fallbacks) == 1


def test_what_never_records_is_tried_for_a_few_shapes():
    tried = []

    def reads(value: Tensor, number: int) -> Tensor:
        tried.append(number)
        return value * value.sum().item()

    recorder = Traced()
    for number in range(10):
        assert recorder("a", PaddedSizes(1, 1), reads, torch.full((1, 1), 2.0), number).eq(4).all()
    assert len(tried) == 10 + module.MAX_FAILURES


def test_a_recording_for_which_memory_was_short_is_tried_again_with_another_cache(monkeypatch: pytest.MonkeyPatch):
    recorder, record, short = Traced(), Traced._record, [True]

    def recorded(*args: Any) -> Any:
        try:
            if short[0]:
                raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            if short[0]:
                raise RuntimeError("the capture has ended")
        return record(*args)

    monkeypatch.setattr(Traced, "_record", recorded)
    for stamp, now_short in ((0, True), (0, False), (1, False), (1, False)):
        recorder.renew(stamp)
        short[0] = now_short
        assert recorder("a", PaddedSizes(2, 2), torch.neg, torch.ones(2, 1)).eq(-1).all()
    assert recorder.replays == 2 and recorder.recordings == {"a": 1}


def test_the_number_of_recordings_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_RECORDINGS", 3)
    recorder = Traced()
    for number in range(6):
        found = recorder("a", PaddedSizes(1, 1), lambda x, n: x + n, torch.ones(1, 1), number)
        assert float(found) == number + 1
    assert recorder.recordings == {"a": 3} and len(recorder.fallbacks) == 1


def test_recordings_end_with_what_they_read():
    recorder, weight = Traced(), torch.ones(2, 1)
    for stamp in (0, 0, 1, 1):
        recorder.renew(stamp)
        recorder("a", PaddedSizes(2, 2), lambda x: x * weight, torch.ones(2, 1))
    assert len(recorder.keys) == 2


def test_options():
    assert recorder_on(CPU, compile=False, cuda_graphs=False) is None
    assert isinstance(recorder_on(CPU, compile=True, cuda_graphs=False), Compiled)
    assert isinstance(recorder_on(torch.device("cuda"), compile=True, cuda_graphs=True), Captured)
    with pytest.raises(OptionError, match="cuda_graphs needs a CUDA device"):
        recorder_on(CPU, compile=False, cuda_graphs=True)


class FakeCuda:
    """The part of ``torch.cuda`` that captures use. A graph is a tape, and its tensors keep their places."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.own = SimpleNamespace(name="own", wait_stream=lambda other: self.calls.append(("own", other.name)))
        self.current: Any = self.own

    def Stream(self) -> Any:
        return SimpleNamespace(name="side", wait_stream=lambda other: self.calls.append(("side", other.name)))

    def current_stream(self) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def graph_pool_handle(self) -> object:
        return object()

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=None, pool=None)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        tape = Tape()
        with tape:
            yield
        self.current = before  # not after an error, as in torch
        run, kept = tape.replayable(tape._tensors), list(tape._tensors)

        def play() -> None:
            for each, new in zip(kept, run(), strict=True):
                mine, made = each.untyped_storage(), new.untyped_storage()
                if mine.data_ptr() != made.data_ptr():  # else a view of an input
                    mine.copy_(made)

        graph.replay, graph.pool = play, pool
        self.calls.append(("captured", pool))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in vars(FakeCuda):
        if not name.startswith("_"):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_texts(temperature: float, cuda: FakeCuda):
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature, "seed": 3}
    prompts = tiny.prompts((18, 24, 17))
    recorder = Captured(CPU)
    g = runs.with_tree(recorder=recorder)
    expected = [result.tokens for result in runs.with_tree().generate(prompts, **options)]
    for _ in range(2):
        assert [result.tokens for result in g.generate(prompts, **options)] == expected
    assert recorder.recordings["forward"] and recorder.recordings["tail"] and not recorder._logged
    pools = [pool for name, pool in cuda.calls if name == "captured"]
    assert len(pools) == recorder.recordings.total() and len(set(map(id, pools))) == len(recorder.recordings)
    assert ("side", "own") in cuda.calls and ("own", "side") in cuda.calls and cuda.current is cuda.own
    g.close()
    assert not any(own._pools for own in recorder._children.values())


def test_a_capture_that_fails_leaves_the_callers_stream(cuda: FakeCuda):
    prompts = tiny.prompts((18, 24))
    expected = [result.tokens for result in runs.with_tree().generate(prompts, max_new_tokens=10)]
    recorder = Captured(CPU)
    g = runs.with_tree(recorder=recorder)
    norm = g.engine.target.model.model.norm
    norm.register_forward_hook(lambda layer, args, output: output * float(output.sum() * 0 + 1))
    assert [result.tokens for result in g.generate(prompts, max_new_tokens=10)] == expected
    assert set(recorder.recordings) == {"draft", "tail"} and cuda.current is cuda.own
