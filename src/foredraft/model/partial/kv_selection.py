"""Which tokens a partial cache keeps: retrieved chunks, a window, or heavy hitters.

Each layer and each group of heads that share keys (K groups with G query heads each) selects its own tokens.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import check_known

SCORES = ("mean", "best")
"""Scores of a chunk; see ``Retrieval``."""


class Selection(ABC):
    """Selects ``budget`` of the tokens before a border; all tokens after the border are kept.

    ``slack``: most committed tokens after the border. ``counts``: whether it evicts by accumulated attention.
    """

    budget: int
    slack: int = 0
    counts: bool = False

    def border(self, committed: int) -> int:
        """End of the tokens to select from."""
        return committed

    @abstractmethod
    def choose(
        self, query: Float[Tensor, "K G E"], keys: Float[Tensor, "K T E"], scale: float
    ) -> Int[Tensor, "K budget"]:
        """The positions of the tokens to keep, in order.

        Args:
            query: of the newest token, after rotary embedding.
            keys: of all T tokens before the border, more than the budget.
            scale: of the attention scores before the softmax.
        """

    def evict(self, counts: Float[Tensor, "K T"]) -> Int[Tensor, "K budget"]:
        """The slots to keep of the T cached tokens, by accumulated attention."""
        raise NotImplementedError


@final
class Retrieval(Selection):
    """TriForce (arXiv:2404.11912, section 4.1): the chunks with the best scores.

    In the paper, a chunk's score is the product of the query and the mean of its keys; heads that share keys use the
    sum of their queries. The first chunk, which holds the attention sinks, is always kept.

    Args:
        budget: tokens.
        chunk: tokens per chunk.
        score: mean, the paper's, or best, the largest product of any key of the chunk and any head's query.
    """

    def __init__(self, budget: int, chunk: int = 8, score: str = "mean") -> None:
        check_known("score", {score: None}, SCORES)
        if chunk < 1 or budget < 2 * chunk or budget % chunk:
            raise OptionError(f"A budget of {budget} must be a multiple of the chunk size {chunk}, two chunks or more.")
        self.budget = budget
        self.slack = chunk - 1
        self._chunk = chunk
        self._score = score

    def border(self, committed: int) -> int:
        return committed // self._chunk * self._chunk

    def choose(
        self, query: Float[Tensor, "K G E"], keys: Float[Tensor, "K T E"], scale: float
    ) -> Int[Tensor, "K budget"]:
        if self._score == "best":
            scores = (query @ keys.transpose(1, 2)).amax(1).float().unflatten(1, (-1, self._chunk)).amax(-1)
        else:  # the product with the mean is the mean of the products: one pass over the keys, no copy
            each = (keys @ query.sum(1)[..., None])[..., 0].float()
            scores = each.unflatten(1, (-1, self._chunk)).mean(-1)
        scores[:, 0] = torch.inf
        best = scores.topk(self.budget // self._chunk, dim=1).indices.sort(dim=1).values
        inside = torch.arange(self._chunk, device=keys.device)
        return (best[..., None] * self._chunk + inside).flatten(1)


@final
class Window(Selection):
    """StreamingLLM (arXiv:2309.17453): the first tokens (attention sinks) and the latest ones."""

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
    """H2O (arXiv:2306.14048): the latest tokens, and those with the most accumulated attention.

    The first selection uses the newest query's attention only, since earlier queries were not observed.
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
