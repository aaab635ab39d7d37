"""The slot cache: what is written stays where it belongs, whatever grows, moves, forks or is forgotten."""

import os
from pathlib import Path

import pytest
import torch

from foredraft.model.kv.cache import BUCKET, SlotCache, SlotView, persistent_zeros
from foredraft.model.kv.masks import GRAIN, StepIn

LAYERS, HEADS, KEY, VALUE = 2, 3, 4, 5
TEMPLATE = SlotCache(LAYERS)
"""What kinds of buffers the layers have."""


def block(rows: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, HEADS, nodes, KEY), torch.randn(rows, HEADS, nodes, VALUE)


def view(store: SlotCache, rows: list[int], slots: list[list[int]], kv_extent: int) -> SlotView:
    nodes = torch.tensor(slots)
    return SlotView(store, StepIn(nodes, nodes, nodes, {}, tuple(rows), kv_extent))


def write(store: SlotCache, rows: list[int], slots: list[list[int]], kv_extent: int = 16):
    """Write random keys and values for these slots to both layers; what was written and what came back, by layer."""
    window = view(store, rows, slots, kv_extent)
    written = [block(len(rows), len(slots[0])) for _ in range(LAYERS)]
    read = [window.update(key, value, layer) for layer, (key, value) in enumerate(written)]
    return written, read


def peek(store: SlotCache, rows: list[int], kv_extent: int = 16):
    """Keys and values of these rows, both layers."""
    rows = store.buffer_rows(rows)
    return [
        (store._keys[layer][rows, :, :kv_extent], store._values[layer][rows, :, :kv_extent]) for layer in range(LAYERS)
    ]


def filled(rows: int = 4, slots: int = 16, like: SlotCache | None = TEMPLATE) -> SlotCache:
    store = SlotCache(LAYERS, like=like)
    store.reserve(range(rows), slots)
    write(store, list(range(rows)), [list(range(slots))] * rows, slots)
    return store


def learn() -> None:
    TEMPLATE.reserve([0], 1)
    write(TEMPLATE, [0], [[0]])


learn()


def same(a, b) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("rows", [[0, 1], [3, 1]])
def test_each_row_writes_to_slots_of_its_own_and_reads_them_all(rows: list[int]):
    store = filled()
    others = [row for row in range(4) if row not in rows]
    before, unread = peek(store, rows), peek(store, others)
    written, read = write(store, rows, [[3, 4], [10, 8]])
    for layer in range(LAYERS):
        for kind in range(2):
            for line, slots in enumerate(([3, 4], [10, 8])):
                expected = before[layer][kind][line].clone()
                expected[:, slots] = written[layer][kind][line]
                assert torch.equal(read[layer][kind][line], expected)
    assert same(peek(store, rows), read) and same(peek(store, others), unread)


@pytest.mark.parametrize("rows", [[0, 1], [2, 3], [3]])
def test_adjacent_rows_are_read_without_a_copy(rows: list[int]):
    store = filled()
    _, read = write(store, rows, [[3]] * len(rows))
    assert read[0][0].untyped_storage().data_ptr() == store._keys[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("order", [[3, 1, 2], [2, 0], [1, 2, 3, 0], [3, 2, 1, 0]])
def test_arranged_rows_keep_their_contents_and_come_first(order: list[int]):
    store = filled()
    before = peek(store, [0, 1, 2, 3])
    store.arrange(order)
    assert store.buffer_rows(order) == list(range(len(order)))
    assert same(peek(store, [0, 1, 2, 3]), before)
    store.reserve(range(6), BUCKET + 1)
    store.arrange([*order, 5])
    assert same(peek(store, [0, 1, 2, 3]), before)
    _, read = write(store, order, [[5]] * len(order))
    assert read[1][1].untyped_storage().data_ptr() == store._values[1].untyped_storage().data_ptr()
    assert same(read, peek(store, order))
    store.fork([order[0]], [4], 16)
    assert same(peek(store, [4]), peek(store, order[:1]))
    store.zero([order[1]])
    assert not any(buffer.any() for pair in peek(store, order[1:2]) for buffer in pair)
    assert same(peek(store, order[:1]), peek(store, [4]))


def test_only_the_row_that_fills_a_hole_is_moved():
    store = filled()
    places = store._keys[0].clone()
    store.arrange([3, 1, 2])
    assert torch.equal(store._keys[0], places[[3, 1, 2, 0]])


def test_growth_keeps_content_and_never_shrinks():
    store = filled()
    before = peek(store, [0, 1, 2, 3])
    store.reserve(range(9), BUCKET + 1)
    assert (store.rows, store.slots) == (9, 2 * BUCKET)
    assert same(peek(store, [0, 1, 2, 3]), before)
    size = store.nbytes
    store.reserve(range(2), 3)
    assert (store.rows, store.slots, store.nbytes) == (9, 2 * BUCKET, size)
    assert same(peek(store, [0, 1, 2, 3]), before)
    write(store, [8], [[BUCKET + 1]], BUCKET + 2)


def test_bytes_are_those_that_rows_hold_or_of_buffers_that_are_allocated_whole(monkeypatch: pytest.MonkeyPatch):
    store = filled(4, 16)
    assert store.slot_bytes == LAYERS * HEADS * (KEY + VALUE) * 4 and store.nbytes == 4 * GRAIN * store.slot_bytes
    monkeypatch.setattr(SlotCache, "lazy", False)
    assert store.nbytes == 4 * BUCKET * store.slot_bytes


@pytest.mark.parametrize("order", [[], [0, 2]], ids=["in place", "moved"])
@pytest.mark.parametrize("like", [None, TEMPLATE], ids=["separate", "shared"])
def test_compact_moves_a_path_together(like: SlotCache | None, order: list[int]):
    """In shared and in separate allocations of keys and values."""
    store = filled(like=like)
    before = peek(store, [0, 1, 2, 3])
    store.arrange(order)
    store.compact([2, 0], torch.tensor([6, 2]), torch.tensor([[0, 2, 5, 6], [0, 3, -1, -1]]))
    after = peek(store, [0, 1, 2, 3])
    for layer in range(LAYERS):
        for kind in range(2):
            expected = before[layer][kind].clone()
            expected[2][:, 6:10] = before[layer][kind][2][:, [6, 8, 11, 12]]
            expected[0][:, 3] = before[layer][kind][0][:, 5]
            assert torch.equal(after[layer][kind], expected)


def test_fork_reads_all_before_it_writes_any():
    store = filled()
    before = peek(store, [0, 1, 2, 3])
    store.fork([0, 1, 1], [1, 0, 3], 5)
    after = peek(store, [0, 1, 2, 3])
    for layer in range(LAYERS):
        for kind in range(2):
            expected = before[layer][kind].clone()
            for source, target in ((0, 1), (1, 0), (1, 3)):
                expected[target][:, :5] = before[layer][kind][source][:, :5]
            assert torch.equal(after[layer][kind], expected)


def test_free_gives_everything_back():
    store = filled()
    store.free()
    assert (store.rows, store.slots, store.nbytes) == (0, 0, 0)
    store.reserve([0], 1)
    _, read = write(store, [0], [[1]], 4)
    assert not read[0][0][:, :, [0, 2, 3]].any(), "something of before has come back"


def test_clear_keeps_the_memory_for_rows_of_the_same_length():
    store = filled()
    store.arrange([2, 1])
    before, size = store._keys[0], store.nbytes
    store.clear()
    store.reserve(range(2), 3)
    assert store._keys[0] is before and store.nbytes == size and store.kv_size[:2] == (4, BUCKET)
    assert store.buffer_rows([0, 1, 2]) == [0, 1, 2]
    store.zero([1])
    assert not any(each.any() for pair in peek(store, [1]) for each in pair), "what it held before is known to be there"
    for rows, slots in ((5, 3), (1, BUCKET + 1), (1, 1)):
        store.clear()
        store.reserve(range(rows), slots)
        assert store.nbytes == 0
        _, read = write(store, [0], [[1]], 4)
        assert store.rows == rows and not read[0][0][:, :, [0, 2, 3]].any()


def test_the_model_is_told_nothing_that_it_could_derive_positions_from():
    window = view(filled(), [0], [[7]], 16)
    assert window.get_seq_length() == window.get_seq_length(1) == 0
    assert window.get_mask_sizes(1, 0) == (16, 0)


@pytest.mark.parametrize("like", [None, TEMPLATE])
def test_buffers_of_one_kind_are_one_allocation_where_the_kinds_are_known(like: SlotCache | None):
    store = filled(like=like)
    assert len({each.untyped_storage().data_ptr() for layer in range(LAYERS) for each in store.stored(layer)}) == (
        2 if like else 2 * LAYERS
    )
    store.free()
    store.reserve([0], 4)
    written, _ = write(store, [0], [[1]], 4)
    assert len({each.untyped_storage().data_ptr() for layer in range(LAYERS) for each in store.stored(layer)}) == 2
    assert same(peek(store, [0], 4)[1:], [tuple(torch.nn.functional.pad(x[0], (0, 0, 1, 2))[None] for x in written[1])])


def test_growth_frees_the_old_buffers_first_where_both_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    store = filled()
    before, failed = peek(store, [0, 1, 2, 3]), []

    def full(like: torch.Tensor, *shape: int) -> torch.Tensor:
        if store._keys[0] is not None and len(failed) < 2:
            failed.append(shape)
            raise torch.OutOfMemoryError("full")
        return persistent_zeros(like, *shape)

    monkeypatch.setattr("foredraft.model.kv.cache.persistent_zeros", full)
    store.reserve(range(6), BUCKET + 1)
    assert failed and same(peek(store, [0, 1, 2, 3]), before)


def test_each_row_holds_what_was_reserved_for_it():
    store = filled(1)
    store.reserve([0, 2], [100, 600])
    assert [store.held(row) for row in range(4)] == [128, 0, 640, 0]
    assert store.total_with({0: 50, 1: 64, 2: 641}) == 128 + 64 + 704
    size = store.slot_bytes
    assert store.nbytes == 768 * size
    store.trim([2, 1], 70)
    assert [store.held(row) for row in range(3)] == [128, 0, 128] and store.nbytes == 256 * size
    store.clear()
    assert store.held(2) == 128, "the memory stays"
    store.free()
    assert store.held(2) == store.nbytes == 0 and store.total_with({5: 1}) == GRAIN


def test_buffers_that_are_allocated_whole_count_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotCache, "lazy", False)
    store = filled(2, 40)
    assert store.total_with({0: 700}) == 2 * 3 * BUCKET and store.total_with({4: 3}) == 5 * BUCKET
    before = peek(store, [0, 1], 40)
    store.trim([0, 1])
    assert same(peek(store, [0, 1], 40), before) and store.nbytes == 2 * BUCKET * store.slot_bytes


@pytest.mark.parametrize("order", [[1], [2, 0]])
def test_moved_rows_of_different_lengths_keep_contents_and_memory(order: list[int]):
    store, lengths = SlotCache(LAYERS, like=TEMPLATE), [40, 700, 100]
    store.reserve(range(3), lengths)
    for row, length in enumerate(lengths):
        write(store, [row], [list(range(length))], length)
    before, held = [peek(store, [row], length) for row, length in enumerate(lengths)], [64, 704, 128]
    store.arrange(order)
    assert [store.held(row) for row in range(3)] == held and store.total_with({}) == sum(held)
    for row, length in enumerate(lengths):
        assert same(peek(store, [row], length), before[row])
    store.reserve([3], 1100)  # a longer row moves all buffers
    for row, length in enumerate(lengths):
        assert same(peek(store, [row], length), before[row])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory that Linux reports")
def test_memory_is_committed_for_the_rows_own_slots_and_given_back():
    """Rows of 100 tokens in buffers for one of 100,000."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    store = SlotCache(1)
    store.reserve([0], 100_000)
    store.buffers(0, torch.empty(1, 2, 0, 64), torch.empty(1, 2, 0, 64))
    store.reserve(range(64), 100)
    start = resident()
    for each in store.stored(0):
        each[:, :, :100] = 1.0
    short = resident() - start
    for each in store.stored(0):
        each[0, :, 100:100_000] = 2.0
    long = resident() - start - short
    own = 2 * 2 * 64 * 4
    assert 64 * 100 * own <= short < 64 * 160 * own and long < 1.1 * 100_000 * own
    store.trim([0], 128)
    assert resident() - start < short + 2_000 * own and store.total_with({}) == 64 * 128
    for each in store.stored(0):
        assert bool((each[:, :, :100] == 1.0).all()) and not each[0, :, 1000:].any()
