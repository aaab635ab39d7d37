"""Distances of laws against sums written out, their identities, and laws made coarse."""

import math

import pytest
import torch
from torch import Tensor

from foredraft.core.divergence import jensen_shannon, kl, overlap, reverse_kl, tv
from foredraft.core.topk_distribution import coarsen, topk_distribution


def laws() -> Tensor:
    """p and q, each [40, 7]."""
    logits = torch.randn(2, 40, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits.mul(2).softmax(-1)


def summed(p: Tensor, q: Tensor) -> Tensor:
    """KL, token by token."""
    rows = zip(p.tolist(), q.tolist(), strict=True)
    sums = [sum(a * math.log(a / b) for a, b in zip(x, y, strict=True) if a > 0) for x, y in rows]
    return torch.tensor(sums, dtype=torch.float64)


def test_forward_and_reverse_against_sums():
    p, q = laws()
    torch.testing.assert_close(kl(p, q.log()), summed(p, q))
    torch.testing.assert_close(reverse_kl(p, q.log()), summed(q, p))
    torch.testing.assert_close(reverse_kl(p, q.log()), kl(q, p.log()))


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_jensen_shannon_against_its_definition(weight: float):
    p, q = laws()
    mixed = weight * p + (1 - weight) * q
    wanted = weight * summed(p, mixed) + (1 - weight) * summed(q, mixed)
    torch.testing.assert_close(jensen_shannon(p, q.log(), weight), wanted)


def test_what_jensen_shannon_is_known_for():
    p, q = laws()
    half = jensen_shannon(p, q.log())
    torch.testing.assert_close(half, jensen_shannon(q, p.log()))
    assert (half >= 0).all() and (half <= math.log(2)).all()
    torch.testing.assert_close(jensen_shannon(p, p.log()), torch.zeros(40, dtype=torch.float64))
    apart = jensen_shannon(torch.tensor([[1.0, 0.0]]), torch.tensor([[-30.0, 0.0]]))
    assert apart.item() == pytest.approx(math.log(2), abs=1e-4)
    small = 1e-6
    torch.testing.assert_close(jensen_shannon(p, q.log(), small) / small, kl(p, q.log()), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        jensen_shannon(p, q.log(), 1 - small) / small, reverse_kl(p, q.log()), rtol=1e-3, atol=1e-4
    )


def test_what_is_accepted_and_what_is_rejected_make_one():
    p, q = laws()
    torch.testing.assert_close(overlap(p, q.log()) + tv(p, q.log()), torch.ones(40, dtype=torch.float64))
    assert (tv(p, q.log()) <= (kl(p, q.log()) / 2).sqrt() + 1e-12).all(), "Pinsker's inequality"


def known(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def test_a_law_but_for_one_token_is_the_law():
    logits, other = torch.randn(2, 30, 9, generator=torch.Generator().manual_seed(1))
    kept = topk_distribution(logits, 64)
    assert kept.ids.shape == (30, 8) and kept.p.dtype == torch.float16
    ids = kept.ids.long()
    p, log_q = coarsen(other, ids, known(ids), kept.p)
    whole = kl(logits.softmax(-1), other.log_softmax(-1))
    torch.testing.assert_close(kl(p, log_q), whole, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(p.sum(-1), torch.ones(30))
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(30))


@pytest.mark.parametrize("distance", [kl, reverse_kl, jensen_shannon, tv])
def test_coarse_laws_are_no_further_apart(distance):
    logits, other = torch.randn(2, 200, 50, generator=torch.Generator().manual_seed(2)).mul(2)
    whole = distance(logits.softmax(-1), other.log_softmax(-1))
    before = torch.zeros(200)
    for count in (1, 4, 16, 48):
        kept = topk_distribution(logits, count)
        ids = kept.ids.long()
        now = distance(*coarsen(other, ids, known(ids), kept.p))
        assert (now <= whole + 5e-3).all() and (now >= before - 5e-3).all()
        before = now


def test_of_a_smaller_vocabulary_only_what_it_has_counts():
    """Tokens that the draft cannot say are left out of p, as training leaves them out."""
    logits, source = torch.randn(20, 9, generator=torch.Generator().manual_seed(3)), torch.Generator().manual_seed(4)
    own = torch.tensor([0, 2, 3, 5, 8])
    said = torch.randn(20, 5, generator=source)
    kept = topk_distribution(logits, 8)
    place = torch.searchsorted(own, kept.ids.long()).clamp(max=4)
    has = own[place] == kept.ids
    last = logits.argmin(-1)  # the one token without a name; where the draft has it too, the laws are the same
    rows = torch.isin(last, own)
    assert rows.any()
    p, log_q = coarsen(said, place, has, kept.p)
    wanted = kl(logits[:, own].softmax(-1), said.log_softmax(-1))
    torch.testing.assert_close(kl(p, log_q)[rows], wanted[rows], atol=5e-3, rtol=1e-2)


def test_gradients_are_numbers_where_nothing_is_left_over():
    logits = torch.tensor([[80.0, 0.0, 0.0, 0.0]], requires_grad=True)
    kept = topk_distribution(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2)
    ids = kept.ids.long()
    for distance in (kl, reverse_kl, jensen_shannon):
        (gradient,) = torch.autograd.grad(distance(*coarsen(logits, ids, known(ids), kept.p)).sum(), logits)
        assert gradient.isfinite().all()
