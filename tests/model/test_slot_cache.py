"""The slot cache: what is written stays where it belongs, whatever grows, moves, forks or is forgotten."""

import torch

from foredraft.model.cache import BUCKET, SlotCache, SlotView

LAYERS, HEADS, KEY, VALUE = 2, 3, 4, 5


def block(rows: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, HEADS, nodes, KEY), torch.randn(rows, HEADS, nodes, VALUE)


def view(store: SlotCache, rows: list[int], slots: list[list[int]], extent: int) -> SlotView:
    prefix = len(rows) if rows == list(range(len(rows))) else None
    return SlotView(store, torch.tensor(rows), prefix, torch.tensor(slots), extent)


def write(store: SlotCache, rows: list[int], slots: list[list[int]], extent: int = 16):
    """Write random keys and values for these slots to both layers; what was written and what came back, by layer."""
    window = view(store, rows, slots, extent)
    written = [block(len(rows), len(slots[0])) for _ in range(LAYERS)]
    read = [window.update(key, value, layer) for layer, (key, value) in enumerate(written)]
    return written, read


def peek(store: SlotCache, rows: list[int], extent: int = 16):
    """Keys and values of these rows, both layers."""
    return [(store._keys[layer][rows, :, :extent], store._values[layer][rows, :, :extent]) for layer in range(LAYERS)]


def filled(rows: int = 4, slots: int = 16) -> SlotCache:
    store = SlotCache(LAYERS)
    store.reserve(rows, slots)
    write(store, list(range(rows)), [list(range(slots))] * rows, slots)
    return store


def same(a, b) -> bool:
    return all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def test_each_row_writes_to_slots_of_its_own_and_reads_them_all():
    store = filled()
    before = peek(store, [0, 1, 2, 3])
    written, read = write(store, [0, 1], [[3, 4], [9, 10]])
    for layer in range(LAYERS):
        for kind in range(2):
            for row, slots in enumerate(([3, 4], [9, 10])):
                expected = before[layer][kind][row].clone()
                expected[:, slots] = written[layer][kind][row]
                assert torch.equal(read[layer][kind][row], expected)
    assert same(peek(store, [2, 3]), [tuple(x[2:] for x in pair) for pair in before])


def test_rows_in_any_order():
    store = filled()
    written, read = write(store, [3, 1], [[5, 6], [0, 2]])
    now = peek(store, [3, 1])
    assert same(read, now)
    for layer in range(LAYERS):
        assert torch.equal(now[layer][0][0][:, [5, 6]], written[layer][0][0])
        assert torch.equal(now[layer][1][1][:, [0, 2]], written[layer][1][1])


def test_a_prefix_of_the_rows_is_read_without_a_copy():
    store = filled()
    _, read = write(store, [0, 1], [[3], [9]])
    assert read[0][0].untyped_storage().data_ptr() == store._keys[0].untyped_storage().data_ptr()


def test_growth_keeps_content_and_never_shrinks():
    store = filled()
    before = peek(store, [0, 1, 2, 3])
    store.reserve(9, BUCKET + 1)
    assert (store.rows, store.slots) == (9, 2 * BUCKET)
    assert same(peek(store, [0, 1, 2, 3]), before)
    size = store.nbytes
    store.reserve(2, 3)
    assert (store.rows, store.slots, store.nbytes) == (9, 2 * BUCKET, size)
    assert same(peek(store, [0, 1, 2, 3]), before)
    write(store, [8], [[BUCKET + 1]], BUCKET + 2)


def test_bytes_are_those_of_all_buffers():
    assert filled(4, 16).nbytes == LAYERS * 4 * HEADS * BUCKET * (KEY + VALUE) * 4


def test_compact_moves_a_path_together():
    store = filled()
    before = peek(store, [0, 1, 2, 3])
    bases = torch.tensor([6, 2])
    path = torch.tensor([[0, 2, 5, 6], [0, 3, -1, -1]])
    store.compact(torch.tensor([2, 0]), bases, path)
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


def test_clear_gives_everything_back():
    store = filled()
    store.clear()
    assert (store.rows, store.slots, store.nbytes) == (0, 0, 0)
    store.reserve(1, 1)
    _, read = write(store, [0], [[1]], 4)
    assert not read[0][0][:, :, [0, 2, 3]].any(), "something of before has come back"


def test_the_model_is_told_nothing_that_it_could_derive_positions_from():
    window = view(filled(), [0], [[7]], 16)
    assert window.get_seq_length() == window.get_seq_length(1) == 0
    assert window.get_mask_sizes(1, 0) == (16, 0)
