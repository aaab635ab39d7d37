"""Which tokens of a text a partial cache keeps: chunks that the query asks for, a window, or heavy hitters.

Each layer and each group of heads that share keys (K of them, G query heads each) chooses for itself.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import OptionError


class Selection(ABC):
    """Chooses ``budget`` tokens of those that stand before a border; what comes behind it is kept whole.

    ``slack``: at most so many committed tokens lie behind the border. ``counts``: it wants to know the attention that
    tokens have got so far, and evicts by that.
    """

    budget: int
    slack: int = 0
    counts: bool = False

    def border(self, committed: int) -> int:
        """Where the tokens that are chosen from end."""
        return committed

    @abstractmethod
    def choose(
        self, query: Float[Tensor, "K G E"], keys: Float[Tensor, "K T E"], scale: float
    ) -> Int[Tensor, "K budget"]:
        """The places of the tokens to keep, in order.

        Args:
            query: of the newest token, after its rotation.
            keys: of all tokens before the border, T of them, more than the budget.
            scale: of scores, before a softmax.
        """

    def evict(self, counts: Float[Tensor, "K T"]) -> Int[Tensor, "K budget"]:
        """The places to keep of the T that are left, by the attention that each has got so far."""
        raise NotImplementedError


@final
class Retrieval(Selection):
    """TriForce's (arXiv:2404.11912, section 4.1): the text in chunks, and those with the best scores.

    A chunk's score is query . mean of its keys; heads that share keys share their queries' sum. The first chunk, where
    attention sinks are, is always kept.

    Args:
        budget: tokens.
        chunk: tokens of a chunk.
    """

    def __init__(self, budget: int, chunk: int = 8) -> None:
        if chunk < 1 or budget < 2 * chunk or budget % chunk:
            raise OptionError(f"A budget of {budget} is not two chunks or more of {chunk} tokens each.")
        self.budget = budget
        self.slack = chunk - 1
        self._chunk = chunk

    def border(self, committed: int) -> int:
        return committed // self._chunk * self._chunk

    def choose(
        self, query: Float[Tensor, "K G E"], keys: Float[Tensor, "K T E"], scale: float
    ) -> Int[Tensor, "K budget"]:
        # a mean's product is the mean of products: one pass over the keys, and no copy
        each = (keys @ query.sum(1)[..., None])[..., 0].float()
        scores = each.unflatten(1, (-1, self._chunk)).mean(-1)
        scores[:, 0] = torch.inf
        best = scores.topk(self.budget // self._chunk, dim=1).indices.sort(dim=1).values
        inside = torch.arange(self._chunk, device=keys.device)
        return (best[..., None] * self._chunk + inside).flatten(1)


@final
class Window(Selection):
    """StreamingLLM's (arXiv:2309.17453): the first tokens, attention's sinks, and the latest ones."""

    def __init__(self, budget: int, sinks: int = 4) -> None:
        if not 0 <= sinks < budget:
            raise OptionError(f"sinks={sinks} leaves no room for a window in a budget of {budget} tokens.")
        self.budget = budget
        self._sinks = sinks

    def choose(
        self, query: Float[Tensor, "K G E"], keys: Float[Tensor, "K T E"], scale: float
    ) -> Int[Tensor, "K budget"]:
        groups, length = keys.shape[:2]
        first = torch.arange(self._sinks, device=keys.device)
        last = torch.arange(length - self.budget + self._sinks, length, device=keys.device)
        return torch.cat([first, last]).expand(groups, -1)


@final
class HeavyHitters(Selection):
    """H2O's (arXiv:2306.14048): the latest tokens, and those that have got the most attention.

    The first choice is by the newest query's attention to the whole text, since nobody watched the queries before it.
    """

    counts = True

    def __init__(self, budget: int, recent: int) -> None:
        if not 0 < recent < budget:
            raise OptionError(f"recent={recent} leaves no room for heavy hitters in a budget of {budget} tokens.")
        self.budget = budget
        self._recent = recent

    def choose(
        self, query: Float[Tensor, "K G E"], keys: Float[Tensor, "K T E"], scale: float
    ) -> Int[Tensor, "K budget"]:
        scores = (query * scale) @ keys.transpose(1, 2)
        return self.evict(scores.softmax(-1, dtype=torch.float32).sum(1))

    def evict(self, counts: Float[Tensor, "K T"]) -> Int[Tensor, "K budget"]:
        groups, length = counts.shape
        border = length - self._recent
        heavy = counts[:, :border].topk(self.budget - self._recent, dim=1).indices.sort(dim=1).values
        last = torch.arange(border, length, device=counts.device).expand(groups, -1)
        return torch.cat([heavy, last], 1)
