"""Hidden states on disk: the same lessons, bounded, and no harm when a disk is full or a run is killed."""

import contextlib
import shutil
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainees import target

import tiny
from foredraft.core.target_parts import FINAL
from foredraft.files.provenance import fingerprint
from foredraft.train.data import features
from foredraft.train.data.batches import LiveFeatures
from foredraft.train.data.features import StoredFeatures
from processes import disk_for

WINDOWS, LENGTH, WIDTH = 6, 8, 32
SHAPE = (WINDOWS, LENGTH, WIDTH)
TAPS = (FINAL, 1, 3)
ONE = 2 * LENGTH * WIDTH * len(TAPS)
"""Bytes of a window."""


class Counting:
    """The target, and how often it was asked."""

    def __init__(self) -> None:
        self.live = LiveFeatures(target(), contextlib.nullcontext)
        self.asked: list[list[int]] = []

    def read(self, windows: list[int], tokens: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
        self.asked.append(windows)
        return self.live.read(windows, tokens, taps)

    def prefetch(self, windows: list[int], device: torch.device, taps: tuple[int, ...]) -> None:
        raise AssertionError("the target is asked for what is needed now")


def tokens(windows: list[int]) -> Tensor:
    ids = torch.randint(tiny.VOCAB, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return ids[windows]


def stored(folder: Path, live: Any = None, taps: tuple[int, ...] = TAPS, **options: Any) -> StoredFeatures:
    return StoredFeatures(folder / "target", live or Counting(), taps, SHAPE, **{"bound": 10**9, **options})


def read(source: StoredFeatures, windows: list[int], taps: tuple[int, ...] = TAPS) -> dict[int, Tensor]:
    return source.read(windows, tokens(windows), taps)


def assert_right(source: StoredFeatures, windows: list[int], taps: tuple[int, ...] = TAPS) -> None:
    """What comes is what the target says, rounded to bfloat16, in float32."""
    said, wanted = read(source, windows, taps), target().read(tokens(windows), taps)
    assert set(said) == set(taps)
    for tap in taps:
        assert said[tap].dtype == torch.float32
        torch.testing.assert_close(said[tap], wanted[tap], rtol=2**-8, atol=1e-6)
        assert torch.equal(said[tap], said[tap].bfloat16().float())


def marks(folder: Path) -> list[int]:
    [path] = folder.glob("target/states-*/there.bin")
    return np.fromfile(path, np.uint8).tolist()


def test_each_window_is_asked_for_once(tmp_path: Path):
    live = Counting()
    source = stored(tmp_path, live)
    for windows in ([0, 2], [2, 5], [0, 5], [5, 2, 0]):
        assert_right(source, windows)
    assert live.asked == [[0, 2], [2, 5]] and marks(tmp_path) == [1, 0, 1, 0, 0, 1]


def test_a_lesson_does_not_depend_on_what_was_kept(tmp_path: Path):
    """Else a run that goes on would not end where it would have ended."""
    source = stored(tmp_path)
    first, again = read(source, [1, 3]), read(source, [1, 3])
    bounded = read(stored(tmp_path / "b", bound=0), [1, 3])
    for tap in TAPS:
        assert torch.equal(first[tap], again[tap]) and torch.equal(first[tap], bounded[tap])


def test_states_that_were_read_ahead_are_those_of_their_windows(tmp_path: Path, monkeypatch: Any):
    source, threads = stored(tmp_path), []
    read(source, [0, 1, 2, 3])
    of_disk = source._read_stored
    monkeypatch.setattr(source, "_read_stored", lambda *a: threads.append(current_thread().name) or of_disk(*a))
    for ahead, windows, taps in (
        ([0, 2], [0, 2], TAPS),
        ([0, 2], [2, 0], TAPS),
        ([1, 3], [1, 3], (FINAL,)),
        ([4], [4], TAPS),
    ):
        source.prefetch(ahead, torch.device("cpu"), TAPS)
        assert_right(source, windows, taps)
    in_thread = [name != "MainThread" for name in threads]  # in any order: both read at once after a wrong guess
    assert sorted(in_thread) == [False, False, True, True, True], "one read for right guesses, another for wrong ones"


def test_a_later_run_takes_them_also_for_fewer_taps(tmp_path: Path):
    read(stored(tmp_path), [0, 1])
    live = Counting()
    assert_right(stored(tmp_path, live), [1, 0])
    assert_right(stored(tmp_path, live, (FINAL,)), [1], (FINAL,))
    assert live.asked == []
    assert_right(stored(tmp_path, live, (2,)), [1], (2,))
    assert live.asked == [[1]] and len(list(tmp_path.glob("target/states-*"))) == 2


def test_a_tap_that_is_not_kept_is_read(tmp_path: Path):
    source = stored(tmp_path)
    assert_right(source, [0], (2, FINAL))
    assert marks(tmp_path) == [0] * WINDOWS


def test_the_bound(tmp_path: Path):
    source = stored(tmp_path, bound=3 * ONE + 5)
    for windows in ([0, 1], [2, 3], [4], [5]):
        assert_right(source, windows)
    assert sum(marks(tmp_path)) == 3
    assert_right(stored(tmp_path, bound=3 * ONE), [5, 4])
    assert sum(marks(tmp_path)) == 3, "what earlier runs have kept counts too"


def test_a_full_disk_ends_storing_and_not_the_training(tmp_path: Path):
    live = Counting()
    source = stored(tmp_path, live)
    assert_right(source, [0])
    with disk_for(ONE + 100):
        assert_right(source, [3])
        assert_right(source, [0])
    assert_right(source, [4])
    assert marks(tmp_path) == [1, 0, 0, 0, 0, 0] and live.asked == [[0], [3], [4]]


def test_a_disk_that_was_full_before(tmp_path: Path):
    live = Counting()
    with disk_for(10):
        source = stored(tmp_path, live)
    assert_right(source, [0, 1])
    (tmp_path / "b").write_text("a file where the folder would be")
    assert_right(StoredFeatures(tmp_path / "b", live, TAPS, SHAPE, bound=10**9), [0, 1])  # type: ignore[arg-type]
    assert live.asked == [[0, 1], [0, 1]]


def test_some_of_the_disk_is_left_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = stored(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda folder: usage._replace(free=2**30 + 10))
    assert_right(source, [0])
    assert sum(marks(tmp_path)) == 0


def test_a_kill_between_states_and_mark_leaves_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put = features._put

    def killed(path: Path, pieces: dict[int, np.ndarray]) -> None:
        if path.name == "there.bin":
            raise KeyboardInterrupt
        put(path, {place: values[:1] for place, values in pieces.items()})  # and not all was written

    source = stored(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(features, "_put", killed)
        read(source, [1])
    live = Counting()
    again = stored(tmp_path, live)
    assert_right(again, [1])
    assert_right(again, [1])
    assert live.asked == [[1]]


def test_several_processes_share_a_store(tmp_path: Path):
    """Whoever comes later cuts nothing off, and sees what the others have kept."""
    first, live = stored(tmp_path), Counting()
    read(first, [0])
    second = stored(tmp_path, live)
    read(first, [1, 2])
    assert_right(second, [0, 1, 2])
    assert live.asked == []


def test_targets_of_one_name_are_told_apart():
    other = tiny.build("llama", num_hidden_layers=3, seed=8)
    mine, theirs = fingerprint(target().model), fingerprint(other)
    assert mine == fingerprint(tiny.build("llama", num_hidden_layers=3)) != theirs
