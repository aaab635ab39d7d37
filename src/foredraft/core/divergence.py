"""Divergences between the target's law p and the draft's law q, one number per row; q is given as log q.

``ce`` and ``kl`` differ by the entropy of p, so their gradients are equal. ``kl`` (forward) is mode-covering,
``reverse_kl`` mode-seeking, ``jensen_shannon`` between the two. ``tv`` is the rejection probability. ``lk`` is minus
the log of the acceptance probability; ``lk_hybrid`` moves from KL to TV as acceptance grows (LK losses,
arXiv:2602.23881).
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "*rows v"]
Distance = Callable[[Rows, Rows], Float[Tensor, "*rows"]]

_ETA = 3.0  # how fast lk_hybrid moves from KL to TV
_LEAST = 1e-9  # lower bound on probabilities before a logarithm


def acceptance(p: Float[Tensor, "*k V"], q: Float[Tensor, "*k V"]) -> Float[Tensor, "*k"]:
    """Probability that a token drawn from q is accepted under p: sum min(p, q) (arXiv:2211.17192, Corollary 3.6).

    Equals 1 minus the total variation distance. Both laws must sum to 1. Computed in float64 and capped at 1.
    """
    return torch.minimum(p.double(), q.double()).sum(-1).clamp(max=1.0)


def ce(p: Rows, log_q: Rows) -> Float[Tensor, "*rows"]:
    return -(p * log_q).sum(-1)


def kl(p: Rows, log_q: Rows) -> Float[Tensor, "*rows"]:
    """Forward KL(p || q)."""
    return torch.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)


def reverse_kl(p: Rows, log_q: Rows) -> Float[Tensor, "*rows"]:
    """Reverse KL(q || p)."""
    return (log_q.exp() * (log_q - p.clamp(min=_LEAST).log())).sum(-1)


def jensen_shannon(p: Rows, log_q: Rows, weight: float = 0.5) -> Float[Tensor, "*rows"]:
    """The generalised Jensen-Shannon divergence (GKD, arXiv:2306.13649, equation 1).

    w KL(p || m) + (1 - w) KL(q || m) with m = w p + (1 - w) q, for 0 < w < 1. For w = 1/2 it is symmetric and at most
    ln 2. Divided by w it tends to the forward KL as w goes to 0; divided by 1 - w, to the reverse KL as w goes to 1.
    """
    log_p = p.clamp(min=_LEAST).log()
    log_m = torch.logaddexp(log_p + math.log(weight), log_q + math.log1p(-weight))
    return weight * (p * (log_p - log_m)).sum(-1) + (1 - weight) * (log_q.exp() * (log_q - log_m)).sum(-1)


def tv(p: Rows, log_q: Rows) -> Float[Tensor, "*rows"]:
    return 0.5 * (p - log_q.exp()).abs().sum(-1)


def lk(p: Rows, log_q: Rows) -> Float[Tensor, "*rows"]:
    return -overlap(p, log_q).clamp(min=1e-6).log()


def lk_hybrid(p: Rows, log_q: Rows) -> Float[Tensor, "*rows"]:
    distance = tv(p, log_q)
    share = torch.exp(-_ETA * (1 - distance.detach()))
    return share * kl(p, log_q) + (1 - share) * distance


def overlap(p: Rows, log_q: Rows) -> Float[Tensor, "*rows"]:
    """Acceptance probability of a token drawn from q: sum min(p, q) (Leviathan et al., arXiv:2211.17192, 3.5)."""
    return torch.minimum(p, log_q.exp()).sum(-1)
