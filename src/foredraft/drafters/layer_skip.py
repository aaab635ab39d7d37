"""The target drafts without some of its attention and MLP parts (Draft & Verify, Zhang et al., arXiv:2309.08168).

Which ones is looked for on the user's own text, by ``foredraft skip``. The draft shares the target's cache: the layers
that it keeps see the keys and values that the whole model has left of what is committed.
"""

from dataclasses import dataclass, replace
from typing import final

from foredraft.core.errors import DrafterError, OptionError
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.chain import ChainOptions
from foredraft.drafters.common.self_speculative import OwnLayers
from foredraft.drafters.common.skip_config import read_skips
from foredraft.model.cache import SlotCache
from foredraft.model.hf import CausalLM
from foredraft.model.skipping import Layers


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """Those of every chain (``ChainOptions``), and

    skip_attention: layers without attention, such as 3x5x6; the first layer is 0. A file of foredraft skip, as
        layer_skip:FILE, sets this and skip_mlp.
    skip_mlp: layers without MLP. A layer in both lists is skipped altogether.
    """

    skip_attention: tuple[int, ...] = ()
    skip_mlp: tuple[int, ...] = ()


@final
class LayerSkip(OwnLayers):
    """Drafts with what the options leave of ``target``, in its ``cache``.

    Raises:
        ModelError: the target has no such layers, or theirs do not come apart.
    """

    def __init__(self, options: Options, target: CausalLM, cache: SlotCache, vocab_size: int) -> None:
        partial = Layers(target).without(options.skip_attention, options.skip_mlp)
        super().__init__(options, partial, cache, vocab_size)


def build(options: Options, context: BuildContext) -> LayerSkip:
    """layer_skip:FILE, or layer_skip,skip_attention=...,skip_mlp=..."""
    named = bool(options.skip_attention or options.skip_mlp)
    if context.argument is None and not named:
        raise DrafterError(
            "layer_skip needs layers to leave out: write layer_skip:FILE with what foredraft skip found for this "
            "model, or layer_skip,skip_attention=3x5,skip_mlp=4x5."
        )
    if context.argument is not None:
        if named:
            raise OptionError(f"The layers to leave out are named twice: in {context.argument} and as options.")
        skips = read_skips(context.argument)
        if skips.layers != context.target.layers:
            raise DrafterError(
                f"{context.argument} is for a model of {skips.layers} layers ({skips.model}); this one has "
                f"{context.target.layers}."
            )
        options = replace(options, skip_attention=skips.attention, skip_mlp=skips.mlp)
    return LayerSkip(options, context.target, context.cache, context.vocab_size)
