"""A GLIDE head as a draft model: a forward over its own slot cache that also reads the target's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.drafter import StepOut
from foredraft.core.errors import DrafterError
from foredraft.core.tree import TokenTree
from foredraft.heads.nets.glide import Glide, GlideConfig
from foredraft.model.attention.slot_attention import masked_attention
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache, SlotView
from foredraft.model.kv.masks import Layout, StepIn, Visible, address
from foredraft.model.linear.packed import any_weight
from foredraft.model.memory import stored_bytes

_OWN, _TARGET = "own", "target"


def check_readable(config: GlideConfig, target: TargetModel) -> None:
    """Refuse a target whose keys the head cannot read.

    Raises:
        DrafterError: the layer attends within a window, or its keys have another shape.
    """
    layer, block = config.layer, config.block
    types = getattr(target.config, "layer_types", None)
    windows = target.layout.kinds
    window = windows[types[layer]] if types else next(iter(windows.values()))
    if window is not None:
        raise DrafterError(
            f"A GLIDE head reads the keys of all tokens, and layer {layer} of {target.name} attends to {window} tokens "
            "at most: use eagle3."
        )
    found = target.new_cache().shape_of(layer)
    if found not in (None, (block.num_key_value_heads, block.head_dim, block.head_dim)):
        raise DrafterError(
            f"A GLIDE head reads keys of {block.num_key_value_heads} heads of width {block.head_dim}, and "
            f"{target.name} stores others: use eagle3."
        )


@final
class GlideLM(TargetModel):
    """Rows of the head's own cache have the numbers of the target's; trees are addressed from their roots.

    A committed token reads the target's keys of the tokens before it, a drafted one those of the tokens before its
    root. What a committed token but the last one reads makes no difference: its keys depend on its token alone.

    Args:
        cache: the target's, which holds everything before each row's root.

    Raises:
        DrafterError: the head cannot read the target's keys.
    """

    layers = 1

    def __init__(self, net: Glide, target: CausalLM, cache: SlotCache) -> None:
        check_readable(net.config, target)
        self.name = f"The GLIDE head of {target.name}"
        self.config = target.config
        self.vocab_size = target.vocab_size
        self.max_length = target.max_length
        self.weight_bytes = stored_bytes(net)
        block = net.config.block
        self.token_bytes = 2 * block.num_key_value_heads * block.head_dim * any_weight(net).element_size()
        self.layout = Layout({_OWN: None}, by_type=False)
        self._net = net
        self.target_cache = cache

    @property
    def device(self) -> torch.device:
        return any_weight(self._net).device

    @property
    def dtype(self) -> torch.dtype:
        return any_weight(self._net).dtype

    def new_cache(self) -> SlotCache:
        return SlotCache(1)

    def empty_hidden(self) -> dict[int, Tensor]:
        return {}

    def address(
        self, tree: TokenTree, bases: Int[Tensor, "B"], rows: Sequence[int], used_slots: int, *, start: int = 0
    ) -> StepIn:
        """Addresses of committed tokens (``start`` is 0), or of the nodes of a draft from ``start`` on."""
        step = address(tree, bases, rows, used_slots, self.layout, max_position=self.max_length, start=start)
        ends = bases[:, None].expand_as(step.positions) if start else step.positions
        return replace(step, visible={**step.visible, _TARGET: Visible(None, ends, bases[:, None])})

    @torch.inference_mode()
    def compute(self, step: StepIn, cache: SlotCache, keep: Int[Tensor, "M"] | None = None) -> StepOut:
        step = step.within(cache.slots)
        self._net.rotary.reserve(step.kv_extent)
        chosen = keep if keep is None else keep.expand(len(step.tokens), -1)
        nodes = slice(None) if keep is None else keep
        view = SlotView(cache, step)
        own = step.visible[_OWN].mask(step.kv_extent, self.dtype)[:, :, nodes]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.write(layer, key, value, view)
            return masked_attention(query[:, :, nodes], keys, values, own)

        def attend_target(query: Tensor) -> Tensor:
            return self._read_target(query, step, nodes)

        states = self._net(step.tokens, step.positions, attend, attend_target, chosen)
        return StepOut(self._net.logits(states))

    def _read_target(self, query: Tensor, step: StepIn, nodes: slice | Tensor) -> Tensor:
        cache, layer = self.target_cache, self._net.config.layer
        assert cache is not None
        if not cache.holds(layer):  # no prompt has more than one token yet
            return query.new_zeros(query.shape).transpose(1, 2)
        step, visible = step.within(cache.slots), step.visible[_TARGET]
        keys, values = cache.read(layer, SlotView(cache, step))
        mask = visible.mask(step.kv_extent, self.dtype)[:, :, nodes]
        some = (visible.end[:, nodes] > 0)[..., None, None]
        return masked_attention(query, keys.to(query.dtype), values.to(query.dtype), mask) * some
