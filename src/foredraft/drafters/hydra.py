"""Hydra and Hydra++ (Ankner et al., arXiv:2402.05109): Medusa heads that also read the tokens drafted before."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.target_parts import FINAL
from foredraft.drafters.common.level_heads import LevelHeadsDrafter, Options
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.feature_cache import FeatureCache
from foredraft.drafters.states.last_hidden import LastHidden
from foredraft.heads.layers import described_prefix
from foredraft.heads.nets.hydra import Hydra, PrefixLayer
from foredraft.model.ops import TORCH, Ops

__all__ = ["HydraDrafter", "Options"]


@final
class HydraDrafter(LevelHeadsDrafter[Hydra]):
    """A node's children depend on its path. With Hydra++, a prefix layer processes the target's states first."""

    def __init__(self, options: Options, net: Hydra, ops: Ops = TORCH) -> None:
        super().__init__(options, net, LastHidden() if net.prefix is None else _prefix_cache(net.prefix, ops), ops)

    def logits(self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int) -> Float[Tensor, "B F v"]:
        return self._net.logits(hidden.expand(-1, paths.shape[1], -1), paths, head)


def _prefix_cache(prefix: PrefixLayer, ops: Ops) -> FeatureCache:
    """The feature cache of a prefix layer."""
    layers = ops.head_layers(described_prefix(prefix))
    return FeatureCache(prefix, layers, lambda hidden: hidden[FINAL], (FINAL,), window=prefix.window)


def build(options: Options, context: BuildContext) -> HydraDrafter:
    """hydra:HEAD"""
    return HydraDrafter(options, context.head(), context.ops)
