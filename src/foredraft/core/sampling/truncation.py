"""Temperature and the truncations after it, with separate values for each row.

Rules and order are those of transformers 5.23 (``generation/logits_process.py``, ``min_tokens_to_keep`` 1):
top-k, top-p, min-p, typical, epsilon, eta, each on the output of the previous stage. The same operations run in the
same order, so the supports agree exactly, ties included: torch's sort of the truncated row decides which of several
equal scores top-p keeps. A stage leaves rows that do not use it unchanged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.sampling.params import SamplingParams

_COLDEST = 1e-30
"""Lower bound on the temperature; lower values give the same law but overflow."""
_HEAD = 1024
"""Number of best scores that top-p examines on a CPU before it sorts a row."""
_TOLERANCE = 4e-6
"""Largest difference between two float32 sums of the same probabilities."""


def coldest(temperature: float) -> float:
    """The temperature, or the lowest that does not overflow, which gives the same law."""
    return max(temperature, _COLDEST)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Per-row values of the truncation stages; a stage that no row uses is None and does not run.

    Greedy rows and rows that do not use a stage hold its idle value, which removes nothing. Values are float64 and
    rounded to the scores' type at use, as torch does with Python numbers in transformers.
    """

    temperature: Float[Tensor, "B 1 1"] | None
    top_k: Int[Tensor, "B 1 1"] | None
    most_k: int  # the next power of two from the largest top_k of all rows
    tail: Float[Tensor, "B 1 1"] | None  # 1 - top_p: the mass that may be cut
    min_p: Float[Tensor, "B 1 1"] | None
    typical_p: Float[Tensor, "B 1 1"] | None
    epsilon: Float[Tensor, "B 1 1"] | None
    eta: Float[Tensor, "B 1 1"] | None
    alpha: Float[Tensor, "B 1 1"] | None  # of eta; 0: the square root of eta, as in transformers

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str) -> "Truncation":
        def column(
            read: Callable[[SamplingParams], float | None], idle: float | int, dtype: torch.dtype = torch.float64
        ) -> Tensor | None:
            values = [None if row.greedy else read(row) for row in params]
            if all(value is None or value == idle for value in values):
                return None
            filled = [idle if value is None else value for value in values]
            return torch.tensor(filled, dtype=dtype, device=device).view(-1, 1, 1)

        return cls(
            temperature=column(lambda row: coldest(row.temperature), 1.0),
            top_k=column(lambda row: row.top_k, 0, torch.int64),
            most_k=1 << (max((row.top_k or 1 for row in params if not row.greedy), default=1) - 1).bit_length(),
            tail=column(lambda row: None if row.top_p in (None, 1.0) else 1.0 - row.top_p, -1.0),
            min_p=column(lambda row: row.min_p, 0.0),
            typical_p=column(lambda row: None if row.typical_p == 1.0 else row.typical_p, 2.0),
            epsilon=column(lambda row: row.epsilon_cutoff, 0.0),
            eta=column(lambda row: row.eta_cutoff, 0.0),
            alpha=column(lambda row: row.eta_alpha, 0.0),
        )

    @property
    def cuts(self) -> bool:
        """Whether any token is cut."""
        stages = (self.top_k, self.tail, self.min_p, self.typical_p, self.epsilon, self.eta)
        return any(stage is not None for stage in stages)

    def __call__(self, scores: Float[Tensor, "B M V"]) -> Float[Tensor, "B M V"]:
        """Scores divided by the temperature, with -inf at every token that is cut."""
        dtype = scores.dtype
        if self.temperature is not None:
            scores = scores / self.temperature.to(dtype)
        if self.top_k is not None:
            scores = _keep_top_k(scores, self.top_k, self.most_k)
        if self.tail is not None:
            scores = scores.masked_fill(_tail(scores, self.tail.to(dtype)), -math.inf)
        if self.min_p is not None:
            probabilities = scores.softmax(-1)
            least = self.min_p.to(dtype) * probabilities.amax(-1, keepdim=True)
            scores = scores.masked_fill(probabilities < least, -math.inf)
        if self.typical_p is not None:
            scores = _keep_typical(scores, self.typical_p.to(dtype))
        if self.epsilon is not None:
            scores = _keep_likely(scores, self.epsilon.to(dtype))
        if self.eta is not None:
            eta = self.eta.to(dtype)
            alpha = eta.sqrt()
            if self.alpha is not None:
                alpha = torch.where(self.alpha > 0, self.alpha.to(dtype), alpha)
            scores = _keep_likely(scores, torch.minimum(eta, alpha * torch.exp(-_entropy(scores))))
        return scores


def _keep_top_k(scores: Float[Tensor, "B M V"], top_k: Int[Tensor, "B 1 1"], most_k: int) -> Float[Tensor, "B M V"]:
    """Keep the k best scores and all ties with the k-th; ``top_k`` 0 keeps everything."""
    most_k = min(most_k, scores.shape[-1])
    best = scores.topk(most_k, dim=-1).values
    last = (top_k - 1).clamp(0, most_k - 1).expand(-1, scores.shape[1], 1)
    least = best.gather(-1, last).masked_fill(top_k == 0, -math.inf)
    return scores.masked_fill(scores < least, -math.inf)


def _tail(scores: Float[Tensor, "B M V"], mass: Float[Tensor, "B 1 1"]) -> Bool[Tensor, "B M V"]:
    """Mask of the tokens that top-p (Holtzman et al. 2020) cuts; ``mass`` is 1 - top_p, negative to cut nothing."""
    host = scores.device.type == "cpu" and not torch.compiler.is_compiling()
    if host and scores.shape[-1] > 4 * _HEAD:
        return _tail_by_head(scores, mass)
    return _tail_by_sort(scores, mass)


def _tail_by_sort(scores: Float[Tensor, "B M V"], mass: Float[Tensor, "B 1 1"]) -> Bool[Tensor, "B M V"]:
    """Cut the least likely tokens up to a cumulative sum of ``mass``; the last in sort order always stays."""
    ordered, index = scores.sort(dim=-1)
    cut = ordered.softmax(-1).cumsum(-1) <= mass
    cut[..., -1] = False
    return cut.scatter(-1, index, cut)


def _tail_by_head(scores: Float[Tensor, "B M V"], mass: Float[Tensor, "B 1 1"]) -> Bool[Tensor, "B M V"]:
    """Like ``_tail_by_sort`` for long rows on a CPU, in a tenth of the time: sums from the best score down.

    Falls back to sorting for nodes whose cut is outside the head, separates equal scores, or could move with the
    order of summation. Reading these flags is free on a CPU.
    """
    probabilities = scores.softmax(-1)
    best, index = scores.topk(_HEAD, dim=-1)
    likely = probabilities.gather(-1, index).double()
    # running[..., i]: the sum, in ascending order, up to and including the i-th best
    running = probabilities.sum(-1, keepdim=True, dtype=torch.float64) - likely.cumsum(-1) + likely
    kept = (running > mass).sum(-1, keepdim=True).clamp(min=1)
    least, next_ = best.gather(-1, kept - 1), best.gather(-1, kept.clamp(max=_HEAD - 1))
    # if the whole head is kept, least equals next_
    ambiguous = (least == next_) | ((running - mass).abs() < _TOLERANCE).any(-1, keepdim=True)
    cut = (scores < least) & (mass >= 0)
    to_sort = (ambiguous & (mass >= 0)).squeeze(-1)
    if to_sort.any():
        some = mass.expand(-1, scores.shape[1], -1)[to_sort]
        cut[to_sort] = _tail_by_sort(scores[to_sort][:, None], some[:, None]).squeeze(1)
    return cut


def _keep_typical(scores: Float[Tensor, "B M V"], mass: Float[Tensor, "B 1 1"]) -> Float[Tensor, "B M V"]:
    """Locally typical sampling (Meister et al. 2022): keep tokens whose surprisal is close to the entropy."""
    logs = scores.log_softmax(-1)
    entropy = -(logs * logs.exp()).nansum(-1, keepdim=True)
    distance = (-logs - entropy).abs()
    ordered, index = distance.sort(dim=-1)
    running = scores.gather(-1, index).softmax(-1).cumsum(-1)
    last = (running < mass).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    return scores.masked_fill(distance > ordered.gather(-1, last), -math.inf)


def _keep_likely(scores: Float[Tensor, "B M V"], least: Float[Tensor, "B #M 1"]) -> Float[Tensor, "B M V"]:
    """Cut tokens less likely than ``least`` (Hewitt et al. 2022), but never the best."""
    cut = (scores.softmax(-1) < least) & (scores < scores.amax(-1, keepdim=True))
    return scores.masked_fill(cut, -math.inf)


def _entropy(scores: Float[Tensor, "B M V"]) -> Float[Tensor, "B M 1"]:
    """Entropy in nats, computed as ``torch.distributions.Categorical`` does."""
    logs = scores - scores.logsumexp(-1, keepdim=True)
    logs_finite = logs.clamp(min=torch.finfo(scores.dtype).min)
    return -(logs_finite * logs.softmax(-1)).sum(-1, keepdim=True)
