"""The target drafts without some of its attention and MLP blocks (Draft & Verify, Zhang et al., arXiv:2309.08168).

``foredraft skip`` searches for the blocks to skip on the user's own text. The draft shares the target's cache: its
layers read the full model's keys and values of committed tokens.
"""

from dataclasses import dataclass, replace
from typing import final

from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.options import option
from foredraft.drafters.common.self_speculative import SkippingDrafter
from foredraft.drafters.context import BuildContext
from foredraft.drafters.layer_skip.config import read_skip_config
from foredraft.drafters.trees.chain import ChainOptions
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.partial.skipping import layers_of


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Layers to skip, in addition to ``ChainOptions``."""

    skip_attention: tuple[int, ...] = option(
        (),
        "layers without attention, such as 3x5x6; the first layer is 0. A file of foredraft skip, given as "
        "layer_skip:FILE, sets this and skip_mlp.",
    )
    skip_mlp: tuple[int, ...] = option((), "layers without MLP. A layer in both lists is skipped entirely.")


@final
class LayerSkip(SkippingDrafter):
    """Drafts with ``target`` without the skipped blocks, in its ``cache``.

    Raises:
        ModelError: the target has no such layers, or its layers cannot be split into attention and MLP.
    """

    def __init__(self, options: Options, target: TargetModel, cache: SlotCache, vocab_size: int) -> None:
        rest = layers_of(target).without(options.skip_attention, options.skip_mlp)
        super().__init__(options, rest, cache, vocab_size)


def build(options: Options, context: BuildContext) -> LayerSkip:
    """layer_skip:FILE, or layer_skip,skip_attention=...,skip_mlp=..."""
    named = bool(options.skip_attention or options.skip_mlp)
    if context.argument is None and not named:
        raise DrafterError(
            "layer_skip needs layers to skip: write layer_skip:FILE with the file that foredraft skip wrote for this "
            "model, or layer_skip,skip_attention=3x5,skip_mlp=4x5."
        )
    if context.argument is not None:
        if named:
            raise OptionError(f"The layers to skip are given twice, in {context.argument} and as options: remove one.")
        skips = read_skip_config(context.argument)
        if skips.layers != context.target.layers:
            raise DrafterError(
                f"{context.argument} is for a model of {skips.layers} layers ({skips.model}); this one has "
                f"{context.target.layers}."
            )
        options = replace(options, skip_attention=skips.attention, skip_mlp=skips.mlp)
    return LayerSkip(options, context.target, context.cache, context.vocab_size)
