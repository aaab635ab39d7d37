"""Hydra and Hydra++ (Ankner et al., arXiv:2402.05109): Medusa heads that also read the tokens drafted before."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.target_parts import FINAL
from foredraft.drafters.common.level_heads import LevelHeadsDrafter, Options
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.feature_cache import FeatureCache, TorchLayers
from foredraft.drafters.states.last_hidden import LastHidden
from foredraft.heads.native_layers import head_layers
from foredraft.heads.nets.blocks import Attend
from foredraft.heads.nets.hydra import Hydra
from foredraft.model.linear.packed import any_weight
from foredraft.model.ops import TORCH, Ops

__all__ = ["HydraDrafter", "Options"]


@final
class HydraDrafter(LevelHeadsDrafter[Hydra]):
    """A node's children depend on its path. With Hydra++, a prefix layer processes the target's states first."""

    def __init__(self, options: Options, net: Hydra, ops: Ops = TORCH) -> None:
        super().__init__(options, net, LastHidden() if net.prefix is None else _prefix_cache(net), ops)

    def logits(self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int) -> Float[Tensor, "B F v"]:
        return self._net.logits(hidden.expand(-1, paths.shape[1], -1), paths, head)


def _prefix_cache(net: Hydra) -> FeatureCache:
    """The feature cache of a prefix layer, which reads the target's states but not the tokens."""
    prefix = net.prefix
    assert prefix is not None

    def read(tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return prefix(features, positions, attend)

    layers = head_layers(prefix, net.target) or TorchLayers(read, any_weight(prefix).device)
    return FeatureCache(prefix, layers, lambda hidden: hidden[FINAL], (FINAL,), window=prefix.window)


def build(options: Options, context: BuildContext) -> HydraDrafter:
    """hydra:HEAD"""
    return HydraDrafter(options, context.head(), context.ops)
