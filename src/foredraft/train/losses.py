"""Distances between the target's law p and the draft's law q, one number a row.

``ce`` and ``kl`` differ by the entropy of p, a constant: same gradients. ``tv`` is the share of drafts that would be
rejected. ``lk`` is minus the log of the share that would be accepted, and ``lk_hybrid`` goes from KL to TV as
acceptance grows (LK losses, arXiv:2602.23881).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.params import check_known

Rows = Float[Tensor, "*rows v"]
Loss = Callable[[Rows, Rows], Float[Tensor, "*rows"]]

_ETA = 3.0  # how fast lk_hybrid moves from KL to TV


def ce(p: Rows, log_q: Rows) -> Tensor:
    return -(p * log_q).sum(-1)


def kl(p: Rows, log_q: Rows) -> Tensor:
    return torch.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)


def reverse_kl(p: Rows, log_q: Rows) -> Tensor:
    return (log_q.exp() * (log_q - p.clamp(min=1e-9).log())).sum(-1)


def tv(p: Rows, log_q: Rows) -> Tensor:
    return 0.5 * (p - log_q.exp()).abs().sum(-1)


def lk(p: Rows, log_q: Rows) -> Tensor:
    return -torch.minimum(p, log_q.exp()).sum(-1).clamp(min=1e-6).log()


def lk_hybrid(p: Rows, log_q: Rows) -> Tensor:
    distance = tv(p, log_q)
    share = torch.exp(-_ETA * (1 - distance.detach()))
    return share * kl(p, log_q) + (1 - share) * distance


LOSSES: dict[str, Loss] = {
    "ce": ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": tv,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def loss_of(name: str) -> Loss:
    """The loss of that name.

    Raises:
        OptionError: there is none; the sentence lists those that there are.
    """
    check_known("loss", {name: None}, list(LOSSES))
    return LOSSES[name]


def weighted_mean(values: Float[Tensor, "*rows"], weights: Float[Tensor, "*rows"]) -> Float[Tensor, ""]:
    """Mean of the rows by weight; 0 where nothing weighs."""
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)
