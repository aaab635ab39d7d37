"""The target's first layers draft (LayerSkip, Elhoushi et al., arXiv:2404.16710).

The final norm and the output layer are applied after E layers. The draft shares the target's cache: its keys and values
are those of the target's first layers.
"""

from dataclasses import dataclass
from typing import final

from foredraft.core.errors import DrafterError
from foredraft.core.options import check_bounds, option
from foredraft.drafters.common.self_speculative import SkippingDrafter
from foredraft.drafters.context import BuildContext
from foredraft.drafters.trees.chain import ChainOptions
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.partial.skipping import layers_of


@dataclass(frozen=True, slots=True)
class Options(ChainOptions):
    """The exit layer, in addition to ``ChainOptions``."""

    assistant_early_exit: int | None = option(None, "number of the target's first layers that draft.", unset="required")

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # super() does not work in a dataclass with slots
        check_bounds(self, least={"assistant_early_exit": 1})


@final
class EarlyExit(SkippingDrafter):
    """Drafts with the first ``assistant_early_exit`` layers of ``target``, in its ``cache``.

    Raises:
        DrafterError: ``assistant_early_exit`` is not set.
        ModelError: the target has fewer.
    """

    def __init__(self, options: Options, target: TargetModel, cache: SlotCache, vocab_size: int) -> None:
        if options.assistant_early_exit is None:
            raise DrafterError(
                f"early_exit needs the number of layers that draft, 1 to {target.layers} for this model: write "
                "early_exit,assistant_early_exit=E."
            )
        first = layers_of(target).first(options.assistant_early_exit)
        super().__init__(options, first, cache, vocab_size)


def build(options: Options, context: BuildContext) -> EarlyExit:
    """early_exit,assistant_early_exit=E"""
    return EarlyExit(options, context.target, context.cache, context.vocab_size)
