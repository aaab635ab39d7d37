"""Operations beside models on the kernels: those of ``Ops``, and heads with their draft trees in one call."""

import ctypes
from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import View
from foredraft.core.sampling.warp import Warp
from foredraft.core.tree import TokenTree
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.native import library as c
from foredraft.model.native.decoder import Decoder
from foredraft.model.native.families import ACTIVATIONS, Frequencies
from foredraft.model.native.linear import NativeEmbedding, NativeLinear
from foredraft.model.native.runner import KernelRuntime, Runner, RunnerShape
from foredraft.model.native.weights import PackedMatrix
from foredraft.model.ops import HeadLayers, HeadNet, Ops, TreeSize, Unread, UnreadStates
from foredraft.model.threads import kernel_threads

_ENTRIES = {"states": 1, "fused": 2, "beside": 3}
"""What the first layer reads; see ``kernels/engine.h``."""
MOST_GUESSES = 1024
"""Most guesses after a node that the kernels rank."""
_MOST_READ, _MOST_NODES = 1024, 1 << 16
"""Most nodes of a level that the kernels read, and of a tree."""
_UNLIMITED = 1 << 30
"""Heads have no largest position."""


@final
class NativeHeadLayers(HeadLayers):
    """Layers over a slot cache; the weights are those of the net, all of whose linear layers are packed.

    Args:
        target: has embedding and output layer of heads without their own.
        kv_cache_dtype: of keys and values; see ``runner.KV_DTYPES``.
    """

    def __init__(
        self, head: HeadNet, runtime: KernelRuntime, target: Decoder, *, kv_cache_dtype: str = "float16"
    ) -> None:
        super().__init__(head)
        self.reads_masks = False
        config, count = head.config, len(head.blocks)
        frequencies = Frequencies(head.rotary.frequencies.detach().cpu(), head.rotary.scale)
        sizes = (count, config.num_key_value_heads, config.head_dim, ("rows",), (frequencies,), _UNLIMITED)
        self.runner = Runner(runtime, RunnerShape(*sizes), kv_cache_dtype)
        self.model = _model(head, target, self.runner.kv)
        self._held = target
        self._tap = count + 1 if head.normed else count  # see ``c.Tap``
        self._carried = count + 1 if head.carries_norm else count
        self._count = target.shape.vocabulary if head.vocabulary is None else len(head.vocabulary)
        self._windows = c.numbers((head.window or 0,))
        self._fused = None if head.fusion is None else _matrix(head.fusion).struct()

    def reserve(self, length: int) -> int:
        """Make tables for positions below ``length``; 0, since no other forward reads them."""
        self.runner.reserve(length)
        return 0

    def __call__(
        self, step: StepIn, cache: SlotCache, features: Float[Tensor, "B N F"], mask: Float[Tensor, "B 1 N S"] | None
    ) -> Float[Tensor, "B N H"]:
        features = features.float().contiguous()
        states = torch.empty(*step.tokens.shape, self.model.hidden)
        with self.runner.engine.lock:
            given, held = self.runner.step(step, cache)
            given.states = features.data_ptr()
            given.taps, given.tap_count = (c.Tap * 1)(c.Tap(self._tap, states.data_ptr())), 1
            self.runner.forward(self.model, given, step.positions)
        del held
        return states

    def draft(self, view: View, size: TreeSize, unread: Unread, by_level: Callable[[], Draft]) -> Draft:
        """One call of the kernels, for rows without penalties, bans and truncation whose tokens are picked."""
        fits = size.top_k <= _MOST_READ and size.children <= MOST_GUESSES and size.nodes <= _MOST_NODES
        usual = self.head.drafts and view.warp.scales_only and not view.draws and not size.ablated
        if not (fits and usual and size.depth):
            return super().draft(view, size, unread, by_level)
        with unread(self.head.taps) as entries:
            return self._tree(view, size, entries)

    def _tree(self, view: View, size: TreeSize, unread: UnreadStates) -> Draft:
        """The cache has room for what is read, and the rotary tables for its positions."""
        rows, width, history, lengths = len(view.rows), 1 + size.nodes, view.history, view.lengths.contiguous()
        tokens, parents = torch.empty(rows, width, dtype=torch.long), torch.empty(rows, width, dtype=torch.long)
        scores, drafted = torch.empty(rows, width), c.numbers((0, 0))
        temperatures = (c.c_float * rows)(*view.warp.temperature_list(size.sharpest))
        rotary, positions = self.runner.tables()
        given = c.DraftStruct(
            rows=rows,
            width=unread.width,
            history=history.data_ptr(),
            history_stride=history.stride(0) if rows > 1 else history.shape[1],
            lengths=lengths.data_ptr(),
            buffer_rows=c.numbers(unread.cache.buffer_rows(view.rows)),
            ahead=1,
            cache=self.runner.cache_pointers(unread.cache),
            cache_rows=unread.cache.rows,
            cache_slots=unread.cache.slots,
            rotary=rotary,
            rotary_positions=positions,
            windows=self._windows,
            carried=self._carried,
            nodes=size.nodes,
            depth=size.depth,
            expanded=size.top_k,
            children=size.children,
            level_price=size.level_price.level,
            node_price=size.level_price.node,
            allowed=c.numbers(size.allowed),
            count=self._count,
            ids=c.pointer(self.head.vocabulary),
            temperatures=ctypes.addressof(temperatures),
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            scores=scores.data_ptr(),
            drafted=drafted,
            states=unread.states.data_ptr(),
            places=c.numbers(view.rows),
            state_rows=unread.states.shape[0],
            state_slots=unread.states.shape[1],
        )
        if unread.fresh:
            parts = [address for _, _, sources in unread.fresh for address in sources]
            given.fresh, given.parts = len(unread.fresh), len(unread.fresh[0][2])
            given.sources = (c.c_void_p * len(parts))(*parts)
            given.targets = c.numbers([row * given.state_slots + slot for row, slot, _ in unread.fresh])
            given.fused = None if self._fused is None else ctypes.pointer(self._fused)
        if not view.warp.greedy:
            noise, greedy = view.noise, view.warp.greedy_rows
            held = noise.seeds.contiguous(), noise.positions.contiguous(), None if greedy is None else ~greedy
            given.seeds, given.numbers, given.raced = (c.pointer(each) for each in held)
        engine = self.runner.engine
        with engine.lock:
            c.check(engine.library.draft(engine.handle, self.model, given, kernel_threads()))
        kept, depth = 1 + drafted[0], drafted[1]
        if kept < width:
            tokens, parents, scores = (each[:, :kept] for each in (tokens, parents, scores))
        return Draft(TokenTree(tokens, parents, depth, size.children == 1), Law.FIXED, scores=scores)


@final
class NativeOps(Ops):
    """Beside a model on the kernels.

    Args:
        decoder: the model.
    """

    walks = True

    def __init__(self, runtime: KernelRuntime, decoder: Decoder) -> None:
        self.runtime = runtime
        self.decoder = decoder

    def rank(
        self,
        logits: Float[Tensor, "B F v"],
        count: int,
        warp: Warp,
        times: Float[Tensor, "B v"] | None,
        sharpest: float,
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        if count > MOST_GUESSES or warp.truncation.cuts:
            return super().rank(logits, count, warp, times, sharpest)
        logits = logits.float()
        rows, nodes, width = logits.shape
        if logits.stride(2) != 1 or logits.stride(0) != nodes * logits.stride(1):
            logits = logits.contiguous()
        count, temperatures = min(count, width), warp.temperatures(rows, sharpest)
        raced = None if warp.greedy_rows is None else ~warp.greedy_rows[:, 0, 0]
        tokens = torch.empty(rows, nodes, count, dtype=torch.long)
        shares = torch.empty(rows, nodes, count)
        times = None if times is None else times.contiguous()
        given = c.Ranking(
            rows=rows,
            nodes=nodes,
            count=width,
            wanted=count,
            logits=logits.data_ptr(),
            stride=logits.stride(1),
            temperatures=temperatures.data_ptr(),
            times=c.pointer(times),
            raced=c.pointer(raced),
            tokens=tokens.data_ptr(),
            shares=shares.data_ptr(),
        )
        with self.runtime.lock:
            c.check(self.runtime.library.rank(self.runtime.handle, given))
        return tokens, shares

    def times(self, bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
        out = torch.empty(*bits.shape, count)
        self.runtime.library.exponentials(c.pointer(bits.contiguous()), bits.numel(), count, c.pointer(out))
        return out

    def choose(self, scores: Float[Tensor, "B N V"], row: int, node: int, temperature: float, bits: int) -> int:
        of_row, of_node, _ = scores.stride()
        first = scores.data_ptr() + 4 * (row * of_row + node * of_node)
        return self.runtime.library.choose(first, scores.shape[2], temperature, bits)

    def head_layers(self, head: HeadNet) -> HeadLayers:
        return NativeHeadLayers(head, self.runtime, self.decoder) if _is_packed(head) else super().head_layers(head)


def _is_packed(head: HeadNet) -> bool:
    """Whether its layers are on the kernels."""
    return isinstance(head.blocks[0].mlp.down_proj, NativeLinear)


def _model(head: HeadNet, target: Decoder, kv: int) -> c.Model:
    config = head.config
    each = [_layer(block, config) for block in head.blocks]
    return c.Model(
        layers=len(each),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        rotary_dim=2 * len(head.rotary.frequencies),
        rotary_tables=1,
        kinds=1,
        activation=ACTIVATIONS[config.hidden_act],
        gated=1,
        head_norm=int(config.qk_norm),
        kv=kv,
        eps=config.rms_norm_eps,
        residual_scale=1.0,
        attention_scale=config.head_dim**-0.5,
        layer=(c.Layer * len(each))(*each),
        final_norm=None if head.norm is None else head.norm.weight.data_ptr(),
        entry=_ENTRIES[head.entry],
        **_ends(head, target),
    )


def _layer(block: Any, config: Any) -> c.Layer:
    attention, mlp = block.self_attn, block.mlp
    each = (attention.fused, attention.o_proj, mlp.fused, mlp.down_proj)
    norms = {"before_mlp": block.post_attention_layernorm, "before_attention": block.input_layernorm}
    if config.qk_norm:
        norms |= {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
    pointers = {name: norm.weight.data_ptr() for name, norm in norms.items() if isinstance(norm, nn.RMSNorm)}
    return c.Layer(*(_matrix(layer).struct() for layer in each), **pointers)


def _ends(head: HeadNet, target: Decoder) -> dict[str, Any]:
    """What the first layer reads, and the output layer."""
    given: dict[str, Any] = {"normed_residual": int(head.normed_residual)}
    for name, layer in head.entry_layers.items():
        given[name] = layer.weight.data_ptr() if isinstance(layer, nn.RMSNorm) else _matrix(layer).struct()
    if not head.drafts:
        return given
    embedding, factor = target.embedding, target.embedding_factor
    if head.embedding is not None:
        embedding, factor = _matrix(head.embedding), 1.0
    output, shape = target.head, target.shape
    given |= {"logit_scale": shape.logit_scale, "logit_cap": shape.logit_cap}
    if head.output is not None:
        output = _matrix(head.output)
        given |= {"logit_scale": 1.0, "logit_cap": 0.0}
    given |= {"embedding": embedding.struct(), "embedding_scale": factor, "vocabulary": embedding.outputs}
    return given | {"head": output.struct(), "outputs": output.outputs}


def _matrix(layer: nn.Module) -> PackedMatrix:
    assert isinstance(layer, (NativeLinear, NativeEmbedding))
    return layer.matrix
