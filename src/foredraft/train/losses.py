"""Losses of heads by name (see ``core/divergence``), and metrics."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.divergence import Distance, ce, jensen_shannon, kl, lk, lk_hybrid, reverse_kl, tv
from foredraft.core.sampling.params import check_known

LOSSES: dict[str, Distance] = {
    "ce": ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def loss_of(name: str) -> Distance:
    """The loss of that name.

    Raises:
        OptionError: unknown name.
    """
    check_known("loss", {name: None}, list(LOSSES))
    return LOSSES[name]


def weighted_mean(values: Float[Tensor, "*rows"], weights: Float[Tensor, "*rows"]) -> Float[Tensor, ""]:
    """Weighted mean of the rows; 0 if all weights are 0."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def feature_loss(
    states: Float[Tensor, "B M H"], truth: Float[Tensor, "B M H"], weights: Float[Tensor, "B M"]
) -> Float[Tensor, ""]:
    """EAGLE-1's smooth L1 loss on features (arXiv:2401.15077, section 4)."""
    return weighted_mean(F.smooth_l1_loss(states.float(), truth.float(), reduction="none").mean(-1), weights)


def likeliest(scores: Float[Tensor, "*rows v"]) -> Int[Tensor, "*rows"]:
    """The argmax of each row, of logits or laws."""
    return scores.detach().max(-1).indices  # on CPUs argmax takes twice as long


def agree(scores: Float[Tensor, "*rows v"], p: Float[Tensor, "*rows v"]) -> Bool[Tensor, "*rows"]:
    """Rows in which the draft's argmax (of logits or laws) is the target's."""
    return likeliest(scores) == likeliest(p)


def hit_rate(
    scores: Float[Tensor, "*rows v"], p: Float[Tensor, "*rows v"], weights: Float[Tensor, "*rows"]
) -> Float[Tensor, ""]:
    """Weighted share of the rows that ``agree``."""
    return weighted_mean(agree(scores, p).float(), weights).detach()


def chain_metrics(hits: Sequence[Float[Tensor, ""]]) -> dict[str, Tensor]:
    """The hit rate of each level, and the expected acceptance length of a chain with these hit rates."""
    levels = {f"hit_{level}": rate for level, rate in enumerate(hits)}
    return {**levels, "length": 1 + torch.stack(list(hits)).cumprod(0).sum()}
