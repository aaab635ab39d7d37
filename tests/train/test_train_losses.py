"""Distances between laws, against their formulas, and at their edges."""

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.train.losses import LOSSES, loss_of, weighted_mean

FORMULAS = {
    "ce": lambda p, q: -sum(p * q.log()),
    "kl": lambda p, q: sum(p * (p / q).log()),
    "reverse_kl": lambda p, q: sum(q * (q / p).log()),
    "tv": lambda p, q: sum((p - q).abs()) / 2,
    "lk": lambda p, q: -sum(torch.minimum(p, q)).log(),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


def laws(rows: int = 6, size: int = 5) -> tuple[Tensor, Tensor]:
    """p, and logits of q."""
    return torch.randn(rows, size, dtype=torch.float64).mul(2).softmax(-1), torch.randn(rows, size, dtype=torch.float64)


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name: str):
    p, logits = laws()
    q = logits.softmax(-1)
    wanted = torch.stack([FORMULAS[name](p[row], q[row]) for row in range(6)])
    torch.testing.assert_close(LOSSES[name](p, q.log()), wanted)


def test_lk_hybrid_goes_from_kl_to_tv_as_acceptance_grows():
    p, logits = laws()
    q = logits.softmax(-1)
    kl, tv = LOSSES["kl"](p, q.log()), LOSSES["tv"](p, q.log())
    share = torch.exp(-3 * torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(LOSSES["lk_hybrid"](p, q.log()), share * kl + (1 - share) * tv)
    torch.testing.assert_close(
        gradient("lk_hybrid", p, logits),
        share[:, None] * gradient("kl", p, logits) + (1 - share[:, None]) * gradient("tv", p, logits),
    )


def gradient(name: str, p: Tensor, logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_(True)
    LOSSES[name](p, logits.log_softmax(-1)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_cross_entropy_and_kl_pull_alike():
    p, logits = laws()
    torch.testing.assert_close(gradient("ce", p, logits), gradient("kl", p, logits))
    torch.testing.assert_close(gradient("ce", p, logits), logits.softmax(-1) - p)


@EVERY
def test_nothing_pulls_where_both_are_the_same(name: str):
    p, _ = laws()
    here = LOSSES[name](p, p.log())
    entropy = -(p * p.log()).sum(-1)
    torch.testing.assert_close(here, entropy if name == "ce" else torch.zeros(6, dtype=torch.float64))
    if name not in ("tv", "lk", "lk_hybrid"):  # these have a kink there
        torch.testing.assert_close(gradient(name, p, p.log()), torch.zeros_like(p))
    worse = LOSSES[name](p, (p.log() + 0.1 * torch.randn_like(p)).log_softmax(-1))
    assert (worse > here).all()


@EVERY
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0, 1e4])
def test_values_and_gradients_are_finite_at_the_extremes(name: str, scale: float):
    """Sure and wrong, sure and right, and a p with zeros."""
    p = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    logits = torch.tensor([[0.0, 1.0, 0.0]]).expand(4, -1) * scale
    assert LOSSES[name](p, logits.log_softmax(-1)).isfinite().all()
    assert gradient(name, p, logits).isfinite().all()


def test_names():
    assert loss_of("kl") is LOSSES["kl"]
    with pytest.raises(OptionError, match="Unknown loss 'lkhybrid'. Did you mean lk_hybrid"):
        loss_of("lkhybrid")


def test_the_mean_is_of_what_weighs():
    values, weights = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 1.0])
    assert float(weighted_mean(values, weights)) == 2.5
    assert float(weighted_mean(values, torch.zeros(3))) == 0.0
