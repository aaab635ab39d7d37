"""Packed layers whose weights can be replaced, as online distillation does."""

from abc import ABC, abstractmethod
from typing import Any


class Repackable(ABC):
    """A layer that ``packed.copy_weights`` can fill."""

    @abstractmethod
    def repack(self, plain: Any) -> None:
        """Take over the weights of a plain layer of the same shape."""
