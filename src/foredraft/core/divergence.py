"""How far two laws are from each other, one number a row, in nats: what a draft is distilled by.

Laws are given as logits [*k, V]. A token that a law forbids has the logit -inf and counts nothing there.
"""

import torch
from jaxtyping import Float
from torch import Tensor

Logits = Float[Tensor, "*k V"]
Rows = Float[Tensor, "*k"]


def forward_kl(p_logits: Logits, q_logits: Logits) -> Rows:
    """KL(p || q): q learns to cover all that p may say. Infinite where q forbids what p allows."""
    return _kl(p_logits.float().log_softmax(-1), q_logits.float().log_softmax(-1))


def reverse_kl(p_logits: Logits, q_logits: Logits) -> Rows:
    """KL(q || p): q learns to say only what p may say. Infinite where p forbids what q allows."""
    return forward_kl(q_logits, p_logits)


def jensen_shannon(p_logits: Logits, q_logits: Logits, weight: float = 0.5) -> Rows:
    """w KL(p || m) + (1 - w) KL(q || m) with the mixture m = w p + (1 - w) q; never infinite.

    Args:
        weight: w, above 0 and below 1; the smaller, the more its gradients for q are those of the forward KL.
    """
    log_p, log_q = p_logits.float().log_softmax(-1), q_logits.float().log_softmax(-1)
    parts = torch.tensor([weight, 1 - weight], device=log_p.device).log()
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)  # nothing counts there, and its gradient would be NaN
    mixed = torch.logaddexp(log_p.masked_fill(neither, 0.0) + parts[0], log_q.masked_fill(neither, 0.0) + parts[1])
    return weight * _kl(log_p, mixed) + (1 - weight) * _kl(log_q, mixed)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Sum of a (log a - log b) over the tokens that a allows; elsewhere neither value nor gradient is NaN."""
    allowed = log_a > -torch.inf
    ratio = torch.where(allowed, log_a, 0.0) - torch.where(allowed, log_b, 0.0)
    return (log_a.exp() * ratio).sum(-1)
