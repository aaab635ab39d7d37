"""A law in little space: its likeliest tokens, and the probability of all the others together.

A divergence of laws that are made coarse in the same way is never more than that of the laws themselves (data
processing), so what is learned from a coarse law is learned about the whole one, but for who is who among the others.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_LEAST = 1e-6  # of what a law has left over


class TopKDistribution(NamedTuple):
    """``ids`` [..., k] of the likeliest tokens, and ``p`` [..., k + 1]: theirs, then that of all the others."""

    ids: Int[Tensor, "*rows k"]
    p: Tensor


def top_law(logits: Float[Tensor, "*rows V"], count: int) -> TopKDistribution:
    """The law of some logits at temperature 1, by its so many likeliest tokens: in 32 bits the ids, in 16 the rest.

    Of V tokens at most V - 1 are kept by name.
    """
    best = logits.float().softmax(-1).topk(min(count, logits.shape[-1] - 1), dim=-1)
    rest = (1 - best.values.sum(-1, keepdim=True)).clamp(min=0)
    return TopKDistribution(best.indices.int(), torch.cat([best.values, rest], -1).half())


class Pair(NamedTuple):
    """p and log q over the same k + 1 outcomes."""

    p: Tensor
    log_q: Tensor


def coarse(
    logits: Float[Tensor, "*rows v"], ids: Int[Tensor, "*rows k"], known: Bool[Tensor, "*rows k"], p: Tensor
) -> Pair:
    """A draft's law made as coarse as a stored law p is.

    Args:
        logits: of the draft, over its own vocabulary.
        ids: the likeliest tokens of p by the draft's numbers; where ``known`` is False the draft cannot say the token
            (any number then), and p is what it is among the tokens that the draft can say.
    """
    own = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    said = torch.where(known, own.exp(), 0)
    rest = (1 - said.sum(-1, keepdim=True)).clamp(min=_LEAST).log()
    log_q = torch.cat([torch.where(known, own, rest), rest], -1)
    p = torch.cat([p[..., :-1] * known, p[..., -1:]], -1).float()
    p = p / p.sum(-1, keepdim=True).clamp(min=_LEAST)
    weight = torch.cat([known, torch.ones_like(known[..., :1])], -1)
    return Pair(p, torch.where(weight, log_q, -30.0))
