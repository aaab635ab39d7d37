"""Tokens of several requests that are chosen together: the interface of what chooses them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

DrawAll = Callable[[Float[Tensor, "R V"]], list[int]]
"""Draws a token of each request from its law, with the noise of the position; -1 where there is no law."""


class Choices(ABC):
    """Chooses the tokens of R requests together, once a position, from the first to the last."""

    @property
    @abstractmethod
    def open(self) -> Sequence[bool]:
        """Which requests go on after the last choice."""

    @abstractmethod
    def choose(self, logits: Float[Tensor, "R V"], draw: DrawAll) -> list[int]:
        """The next token of each request, -1 where none can be chosen. Logits of requests that do not go on are 0."""
