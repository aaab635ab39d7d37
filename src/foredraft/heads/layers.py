"""The forward of a head's decoder layers, in torch or on the native engine."""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn


class HeadLayers(ABC):
    """The layers of a head over a slot cache.

    ``reads_masks``: forwards attend by masks, and not by ``StepIn.visible``.
    """

    reads_masks: bool

    @abstractmethod
    def reserve(self, length: int) -> int:
        """Called with the largest position before forwards; a number that grows when what they read changes."""

    @abstractmethod
    def __call__(
        self, step: StepIn, cache: SlotCache, features: Float[Tensor, "B N F"], mask: Float[Tensor, "B 1 N S"] | None
    ) -> Float[Tensor, "B N H"]:
        """The states of a step; keys and values are written to their slots.

        Args:
            mask: what the nodes attend to, instead of ``step.visible``.
        """
