"""Compact storage of a law: its k likeliest tokens, and the total probability of all others.

By the data processing inequality, the divergence of two laws coarsened in the same way is a lower bound on that of the
full laws. Training on it loses only the distinction between tokens outside the top k.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.best import best_of

_LEAST = 1e-6  # lower bound on the remaining probability


class TopKDistribution(NamedTuple):
    """``ids`` [..., k] of the likeliest tokens; ``p`` [..., k + 1]: their probabilities, then that of all others."""

    ids: Int[Tensor, "*rows k"]
    p: Tensor


def topk_distribution(logits: Float[Tensor, "*rows V"], count: int) -> TopKDistribution:
    """The law of the logits at temperature 1, coarsened to its min(``count``, V - 1) likeliest tokens.

    Ids are int32, probabilities float16.
    """
    best = best_of(logits.float().softmax(-1), min(count, logits.shape[-1] - 1))
    rest = (1 - best.values.sum(-1, keepdim=True)).clamp(min=0)
    return TopKDistribution(best.indices.int(), torch.cat([best.values, rest], -1).half())


class TopKPair(NamedTuple):
    """p and log q over the same k + 1 outcomes."""

    p: Tensor
    log_q: Tensor


def coarsen(
    logits: Float[Tensor, "*rows v"], ids: Int[Tensor, "*rows k"], known: Bool[Tensor, "*rows k"], p: Tensor
) -> TopKPair:
    """Coarsen a draft's law to the outcomes of a stored law p.

    Args:
        logits: of the draft, over its own vocabulary.
        ids: the likeliest tokens of p, as draft token ids. Where ``known`` is False the token is not in the draft's
            vocabulary; its id is then arbitrary, and p is renormalised without it.
    """
    own = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    q = torch.where(known, own.exp(), 0)
    rest = (1 - q.sum(-1, keepdim=True)).clamp(min=_LEAST).log()
    log_q = torch.cat([torch.where(known, own, rest), rest], -1)
    p = torch.cat([p[..., :-1] * known, p[..., -1:]], -1).float()
    p = p / p.sum(-1, keepdim=True).clamp(min=_LEAST)
    weight = torch.cat([known, torch.ones_like(known[..., :1])], -1)
    return TopKPair(p, torch.where(weight, log_q, -30.0))
