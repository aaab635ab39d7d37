"""Attention of tree nodes over cached keys and values as they are stored: a split-KV kernel in Triton.

No mask is built and no row is copied. Each query has a range of slots that it attends to, and one bit for each node of
its tree. The slots of a row are split among programs, whose results are combined by log-sum-exp, as in Flash-Decoding
(Dao et al., 2023). The heads of a group are additional queries of one head, so each key is read once per tile.

The only module that needs Triton; see ``attention.runs_kernel``.
"""

# kernels are a language of their own, launched with values for constexpr parameters
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.model.kv.masks import TABLE_COLUMNS, WORD

_COLUMNS, _WORD = tl.constexpr(TABLE_COLUMNS), tl.constexpr(WORD)
_LOG2E = tl.constexpr(1.4426950408889634)
_WAVES = 2
"""Programs per multiprocessor."""
_MAX_SPLITS = 64


def tree_attention(
    query: Float[Tensor, "B H N E"],
    keys: Float[Tensor, "R K S E"],
    values: Float[Tensor, "R K S F"],
    table: Int[Tensor, "B 1 N C"],
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Float[Tensor, "H"] | None = None,
    splits: int | None = None,
) -> Float[Tensor, "B N H F"]:
    """Attention of N nodes per row over a layer's cache; scores and sums are float32.

    Args:
        query: float16, bfloat16 or float32; H is a multiple of K.
        table: what each node attends to, see ``Visible.table``.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: one sink logit per head that takes part in the softmax.
        splits: programs among which the slots of a row are split; None: enough to fill the device.
    """
    rows, heads, nodes, width = query.shape
    groups, out_width = keys.shape[1], values.shape[3]
    share = heads // groups
    block_e, block_f = (max(triton.next_power_of_2(each), 16) for each in (width, out_width))
    most, block_s = _tile(max(block_e, block_f) * keys.element_size())
    block_m = min(max(triton.next_power_of_2(share * nodes), 16), most)
    tiles = triton.cdiv(share * nodes, block_m)
    if splits is None:
        splits = _splits(query.device, rows * groups * tiles)
    query = query.to(keys.dtype)
    query = query if query.stride(3) == 1 else query.contiguous()
    partial = query.new_empty(rows, heads, nodes, splits, out_width, dtype=torch.float32)
    sums = query.new_empty(rows, heads, nodes, splits, dtype=torch.float32)
    output = query.new_empty(rows, nodes, heads, out_width)
    with torch.cuda.device_of(query):  # kernels run on the current device
        _attend_split[(tiles * splits, groups, rows)](
            query, keys, values, table, partial, sums,
            *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            scaling, softcap or 0.0, nodes, share, splits, width, out_width,
            WORDS=table.shape[3] - TABLE_COLUMNS, CAPPED=softcap is not None,
            BLOCK_M=block_m, BLOCK_S=block_s, BLOCK_E=block_e, BLOCK_F=block_f, num_stages=2,
        )  # fmt: skip
        _combine[(nodes, heads, rows)](
            partial, sums, sums if s_aux is None else s_aux, output, splits, out_width,
            SINKS=s_aux is not None, BLOCK_P=triton.next_power_of_2(splits), BLOCK_F=block_f,
        )  # fmt: skip
    return output


def _tile(width: int) -> tuple[int, int]:
    """Most queries, and slots, per block; with keys and values of ``width`` bytes they fit 100 kB of shared memory."""
    if width <= 256:
        return 64, 64
    return (64, 32) if width <= 512 else (32, 16)


def _splits(device: torch.device, programs: int) -> int:
    """Splits that fill the device. They do not depend on the rows' lengths, so one launch serves them all."""
    if device.type != "cuda":  # Triton's interpreter
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(triton.next_power_of_2(triton.cdiv(_WAVES * processors, programs)), _MAX_SPLITS)


@triton.jit(do_not_specialize=["nodes", "share", "splits"])
def _attend_split(  # noqa: PLR0917
    query_ptr, keys_ptr, values_ptr, table_ptr, partial_ptr, sums_ptr,
    query_row, query_head, query_node, keys_row, keys_head, keys_slot, values_row, values_head, values_slot,
    scaling, softcap, nodes, share, splits, width, out_width,
    WORDS: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of a group's queries over one split of a row's slots, and its log-sum-exp to base 2."""
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_query = m < share * nodes
    head, node = group * share + m // nodes, m % nodes
    e, f = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_F)
    in_width, in_out = e < width, f < out_width

    entries = table_ptr + b * nodes * (_COLUMNS + WORDS)
    entry = entries + node * (_COLUMNS + WORDS)
    row, base, last = tl.load(entries), tl.load(entries + 1), tl.load(entries + 2)
    begin = tl.load(entry + 3, mask=is_query, other=2**62)
    end = tl.load(entry + 4, mask=is_query, other=0)
    first = tl.min(begin, 0) // BLOCK_S * BLOCK_S
    length = tl.cdiv(tl.cdiv(last - first, BLOCK_S), splits) * BLOCK_S
    start = first + split * length

    keys_ptr += row * keys_row + group * keys_head
    values_ptr += row * values_row + group * values_head
    query_place = query_ptr + b * query_row + (head * query_head + node * query_node)[:, None] + e[None, :]
    query = tl.load(query_place, mask=is_query[:, None] & in_width[None, :], other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for at in range(start, tl.minimum(start + length, last), BLOCK_S):
        slots = at + tl.arange(0, BLOCK_S)
        inside = slots < last
        key_place = keys_ptr + slots[None, :] * keys_slot + e[:, None]
        keys = tl.load(key_place, mask=inside[None, :] & in_width[:, None], other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scaling
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # softcap * tanh(scores / softcap)
        seen = (slots[None, :] >= begin[:, None]) & (slots[None, :] < end[:, None])
        if WORDS > 0:
            if at + BLOCK_S > base:
                seen = seen | _on_path(entry, slots - base, WORDS)
        scores = tl.where(seen & is_query[:, None], scores * _LOG2E, float("-inf"))
        value_place = values_ptr + slots[:, None] * values_slot + f[None, :]
        values = tl.load(value_place, mask=inside[:, None] & in_out[None, :], other=0.0)
        peak, total, output = _accumulate(scores, values, peak, total, output)

    sum_place = (((b * tl.num_programs(1) + group) * share + m // nodes) * nodes + node) * splits + split
    safe = tl.where(total == 0, 1.0, total)
    tl.store(sums_ptr + sum_place, peak + tl.log2(safe), mask=is_query)
    place = partial_ptr + sum_place[:, None] * out_width + f[None, :]
    tl.store(place, output / safe[:, None], mask=is_query[:, None] & in_out[None, :])


@triton.jit
def _accumulate(scores, values, peak, total, output):
    """Another block of an online softmax: the largest score so far, the sum of weights, the weighted values."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    output = tl.dot(weights.to(values.dtype), values, output * decay[:, None], input_precision="ieee")
    return higher, total * decay + tl.sum(weights, 1), output


@triton.jit
def _on_path(entry, offsets, WORDS: tl.constexpr):
    """Which queries attend to which tree nodes; nodes are offsets from the slot of the tree's first node."""
    inside = (offsets >= 0) & (offsets < WORDS * _WORD)
    place = entry[:, None] + _COLUMNS + (offsets // _WORD)[None, :]
    words = tl.load(place, mask=inside[None, :], other=0)
    return ((words >> (offsets % _WORD)[None, :]) & 1) != 0


@triton.jit(do_not_specialize=["splits"])
def _combine(  # noqa: PLR0917
    partial_ptr, sums_ptr, sinks_ptr, output_ptr, splits, out_width,
    SINKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One query's attention, from those of all splits and the sink of its head."""
    node, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    nodes, heads = tl.num_programs(0), tl.num_programs(1)
    place = ((b * heads + head) * nodes + node) * splits
    p, f = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_F)
    in_splits, in_out = p < splits, f < out_width
    sums = tl.load(sums_ptr + place + p, mask=in_splits, other=float("-inf"))
    peak = tl.max(sums, 0)
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(sums - peak)
    total = tl.sum(weights, 0) + tl.exp2(sink - peak)
    where = partial_ptr + (place + p)[:, None] * out_width + f[None, :]
    partial = tl.load(where, mask=in_splits[:, None] & in_out[None, :], other=0.0)
    output = tl.sum(partial * weights[:, None], 0) / total
    tl.store(output_ptr + ((b * nodes + node) * heads + head) * out_width + f, output, mask=in_out)
