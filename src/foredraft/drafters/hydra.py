"""Hydra and Hydra++ (Ankner et al., arXiv:2402.05109): Medusa's heads, each told what was drafted before it."""

from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.feature_cache import FeatureCache
from foredraft.drafters.common.last_hidden import LastHidden
from foredraft.drafters.common.static_tree import FilledTree, Options
from foredraft.heads.nets.hydra import Hydra, Prefix
from foredraft.heads.nets.target_parts import FINAL

__all__ = ["HydraDrafter", "Options"]


@final
class HydraDrafter(FilledTree):
    """A node's children come from its own path. With a prefix layer (Hydra++), that goes over the target's states
    first."""

    def __init__(self, options: Options, net: Hydra) -> None:
        memory = LastHidden() if net.prefix is None else _prefix_memory(net.prefix)
        template = options.template(net.config.accuracies, net.count)
        super().__init__(template, memory)
        self._net = net

    @property
    def network(self) -> Hydra:
        return self._net

    def _logits(self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int) -> Float[Tensor, "B F v"]:
        return self._net.logits(hidden.expand(-1, paths.shape[1], -1), paths, head)


def _prefix_memory(prefix: Prefix) -> FeatureCache:
    """The prefix layer reads the target's states alone; the tokens that a memory offers are not looked at."""
    return FeatureCache(
        prefix,
        lambda tokens, features, positions, attend: prefix(features, positions, attend),
        lambda hidden: hidden[FINAL],
        window=prefix.window,
    )


def build(options: Options, context: BuildContext) -> HydraDrafter:
    """hydra:HEAD"""
    return HydraDrafter(options, context.head(options.law))
