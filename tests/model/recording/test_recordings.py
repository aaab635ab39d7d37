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
from foredraft.model.recording import replay as module
from foredraft.model.recording.replay import EAGER, Captured, Compiled, PaddedSizes, replay_on
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
    replay = Traced()
    for rows, factor in ((3, 2), (2, 2), (4, 2), (3, 5), (1, 2), (3, 2)):
        found = replay("a", PaddedSizes(rows, 4), scaled, nested(rows, factor))
        expected = scaled(nested(rows, factor))
        assert torch.equal(found.values[7], expected.values[7]) and torch.equal(found.twice[0], expected.twice[0])
        assert (found.factor, found.flags) == (factor, (True, None, "a"))
    assert replay.keys == ["a", "a"]  # one for each factor
    one, other = torch.ones(3, 1), torch.ones(3, 1)
    replay("a", PaddedSizes(3, 4), scaled, Nested({3: one}, (one, other), 2, (True, None, "a")))
    assert len(replay.keys) == 3  # tensors that were one and are two


def test_further_rows_hold_zeros():
    replay = Traced()
    seen: list[Tensor] = []

    def keep(values: Tensor) -> Tensor:
        seen.append(values)
        return values + 1

    for rows in (4, 2, 3):
        replay("a", PaddedSizes(rows, 4), keep, torch.full((rows, 2), 5.0))
        assert seen[0][:rows].eq(5).all() and seen[0][rows:].eq(0).all()
    assert len(seen) == 1


def test_a_result_is_read_where_it_is():
    replay = Traced()
    for number in (1.0, 2.0):
        first = replay("a", PaddedSizes(2, 4), torch.neg, torch.full((2, 3), number))
        place = first.data_ptr()
        second = replay("b", PaddedSizes(2, 4), torch.square, first)
        assert second.eq(number**2).all() and second.shape == (2, 3) and first.eq(-number).all()
    assert list(replay._recordings.values())[1].buffers == [None] and place in replay._results
    assert replay("b", PaddedSizes(2, 4), torch.square, torch.ones(2, 3)).eq(1).all() and len(replay.keys) == 3


def test_what_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture):
    replay = Traced()
    for number in (1.0, 2.0):
        value = torch.full((2, 1), number)
        assert replay("host", PaddedSizes(2, 2), lambda x, f: f(x), value, torch.neg).eq(-number).all()
        assert replay("read", PaddedSizes(2, 2), lambda x: x * x.sum().item(), value).eq(2 * number**2).all()
        assert replay("given", PaddedSizes(2, 2), torch.neg, value, why_eager="it is Sunday").eq(-number).all()
    assert [record.getMessage() for record in caplog.records] == [
        "The host of a step runs eagerly: it depends on a builtin_function_or_method on the host.",
        "The read of a step runs eagerly: recording failed with RuntimeError: _local_scalar_dense cannot be recorded.",
        "The given of a step runs eagerly: it is Sunday.",
    ]

    def fails(value: Tensor) -> Tensor:
        raise DrafterError("no")

    with pytest.raises(DrafterError):
        replay("fails", PaddedSizes(2, 2), fails, torch.ones(2, 1))
    assert "fails" not in {segment for segment, _ in replay.fallbacks}


def test_a_shape_that_cannot_be_recorded_leaves_the_others_recorded():
    def reads(value: Tensor, number: int) -> Tensor:
        return value + (value.sum().item() if number == 2 else number)

    replay = Traced()
    for number in (2, 1, 2, 3, 1, 3):
        expected = 3 if number == 2 else 1 + number
        assert replay("a", PaddedSizes(2, 2), reads, torch.ones(2, 1), number).eq(expected).all()
    assert replay.recordings == {"a": 2} and replay.replays == 4 and len(replay.fallbacks) == 1


def test_what_never_records_is_tried_for_a_few_shapes():
    tried = []

    def reads(value: Tensor, number: int) -> Tensor:
        tried.append(number)
        return value * value.sum().item()

    replay = Traced()
    for number in range(10):
        assert replay("a", PaddedSizes(1, 1), reads, torch.full((1, 1), 2.0), number).eq(4).all()
    assert len(tried) == 10 + module.MAX_FAILURES


def test_a_recording_for_which_memory_was_short_is_tried_again_with_another_cache(monkeypatch: pytest.MonkeyPatch):
    replay, record, short = Traced(), Traced._record, [True]

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
        replay.renew(stamp)
        short[0] = now_short
        assert replay("a", PaddedSizes(2, 2), torch.neg, torch.ones(2, 1)).eq(-1).all()
    assert replay.replays == 2 and replay.recordings == {"a": 1}


def test_the_number_of_recordings_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_RECORDINGS", 3)
    replay = Traced()
    for number in range(6):
        found = replay("a", PaddedSizes(1, 1), lambda x, n: x + n, torch.ones(1, 1), number)
        assert float(found) == number + 1
    assert replay.recordings == {"a": 3} and len(replay.fallbacks) == 1


def test_recordings_end_with_what_they_read():
    replay, weight = Traced(), torch.ones(2, 1)
    for stamp in (0, 0, 1, 1):
        replay.renew(stamp)
        replay("a", PaddedSizes(2, 2), lambda x: x * weight, torch.ones(2, 1))
    assert len(replay.keys) == 2


def test_options():
    assert replay_on(CPU, compile=False, cuda_graphs=False) is EAGER
    assert isinstance(replay_on(CPU, compile=True, cuda_graphs=False), Compiled)
    assert isinstance(replay_on(torch.device("cuda"), compile=True, cuda_graphs=True), Captured)
    with pytest.raises(OptionError, match="cuda_graphs needs a CUDA device"):
        replay_on(CPU, compile=False, cuda_graphs=True)


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
    replay = Captured(CPU)
    g = runs.with_tree(replay=replay)
    expected = [result.tokens for result in runs.with_tree().generate(prompts, **options)]
    for _ in range(2):
        assert [result.tokens for result in g.generate(prompts, **options)] == expected
    assert replay.recordings["forward"] and replay.recordings["tail"] and not replay._logged
    pools = [pool for name, pool in cuda.calls if name == "captured"]
    assert len(pools) == sum(replay.recordings.values()) and len(set(map(id, pools))) == 2  # one for each segment
    assert ("side", "own") in cuda.calls and ("own", "side") in cuda.calls and cuda.current is cuda.own
    g.close()
    assert not replay._pools


def test_a_capture_that_fails_leaves_the_callers_stream(cuda: FakeCuda):
    prompts = tiny.prompts((18, 24))
    expected = [result.tokens for result in runs.with_tree().generate(prompts, max_new_tokens=10)]
    replay = Captured(CPU)
    g = runs.with_tree(replay=replay)
    norm = g.engine.target.model.model.norm
    norm.register_forward_hook(lambda layer, args, output: output * float(output.sum() * 0 + 1))
    assert [result.tokens for result in g.generate(prompts, max_new_tokens=10)] == expected
    assert set(replay.recordings) == {"tail"} and cuda.current is cuda.own
