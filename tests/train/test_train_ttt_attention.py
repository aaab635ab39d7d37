"""EAGLE-3's training-time test against a slow one with the whole mask, L x kL, and against its own definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from trainees import assert_same_gradients, assert_unbiased, gradients, lesson, target

import random_heads as heads
import tiny
from foredraft.core.errors import OptionError
from foredraft.core.target_parts import FINAL
from foredraft.heads.nets.eagle import Eagle3
from foredraft.heads.nets.ttt_attention import sample_rows, take
from foredraft.train.devices import autocast
from foredraft.train.heads.eagle3 import Eagle3Recipe, Options
from foredraft.train.recipe import TrainBatch

VOCABULARY = torch.tensor([i for i in range(tiny.VOCAB) if i % 3])
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one step": ({}, {"steps": 1}),
    "window": ({"block": {"sliding_window": 3}}, {}),
    "a window shorter than the steps": ({"block": {"sliding_window": 2}}, {"steps": 5}),
    "layers": ({"num_layers": 3}, {}),
    "one head for each key": ({"block": {"num_key_value_heads": 4}}, {}),
    "one key for all heads": ({"block": {"num_key_value_heads": 1}}, {}),
    "reduced": ({"vocabulary": VOCABULARY}, {}),
    "reduced, any label": ({"vocabulary": VOCABULARY}, {"any_label": True}),
    "norms elsewhere": ({"norm_carried": True, "norm_before_residual": True, "fc_norm": True}, {}),
    "another decay and loss": ({}, {"decay": 0.5, "loss": "lk_hybrid"}),
    "the loss on features, too": ({}, {"regression": 0.7, "steps": 3}),
}


def made(**head: Any) -> Eagle3:
    return heads.eagle3(target(double=True), **head).double().requires_grad_(True)


def whole_mask(rows: int, step: int, window: int | None) -> Tensor:
    """[rows, (step + 1) rows]: keys of step 0 up to the row, of each later step the row's own."""
    sees = torch.zeros(rows, (step + 1) * rows, dtype=torch.bool)
    for row in range(rows):
        for key_step in range(step + 1):
            for key in range(rows):
                age = (row + step) - (key + key_step)
                near = window is None or age < window
                sees[row, key_step * rows + key] = near and (key <= row if key_step == 0 else key == row)
    return sees


def slow_attention(rows: int, window: int | None) -> Callable[[int], Any]:
    """Attention of one step over the keys of all steps so far, by that mask."""
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def of_step(step: int) -> Any:
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kept.setdefault(layer, []).append((key, value))
            mask, mixed = whole_mask(rows, step, window), []
            keys = torch.cat([k for k, _ in kept[layer]], 2)
            values = torch.cat([v for _, v in kept[layer]], 2)
            for head in range(query.shape[1]):
                group = head * key.shape[1] // query.shape[1]
                scores = query[:, head] @ keys[:, group].transpose(1, 2) / query.shape[-1] ** 0.5
                mixed.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values[:, group])
            return torch.stack(mixed, 2)

        return attend

    return of_step


def slow_loss(
    net: Eagle3,
    of: TrainBatch,
    *,
    steps: int = 5,
    decay: float = 0.8,
    regression: float = 0.0,
    loss: str = "ce",
    any_label: bool = False,
):
    """Section 3 of the paper, row by row."""
    batch, length = of.tokens.shape
    rows = length - steps
    attention = slow_attention(rows, net.config.block.sliding_window)
    states, total = net.features(of.hidden)[:, :rows], torch.zeros((), dtype=torch.float64)
    for step in range(steps):
        place = torch.arange(rows).expand(batch, -1)
        before = net.carry(states) if step else states
        states = net(of.tokens[:, step + 1 : step + 1 + rows], before, place + step, attention(step))
        logits, said, missed = net.logits(states), [], []
        for text in range(batch):
            for row in range(rows):
                label = row + step + 1
                p = net.target.head(of.hidden[FINAL][text, label])
                known = net.vocabulary is None or any_label or int(p.argmax()) in net.vocabulary.tolist()
                if of.weights[text, label] and known:
                    p = (p if net.vocabulary is None else p[net.vocabulary]).softmax(-1)
                    said.append(row_loss(loss, p, logits[text, row].softmax(-1)))
                if of.weights[text, label]:
                    gap = (states[text, row] - of.hidden[FINAL][text, label]).abs()
                    missed.append(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
        total = total + decay**step * (torch.stack(said).mean() + regression * torch.stack(missed).mean())
    return total


def row_loss(name: str, p: Tensor, q: Tensor) -> Tensor:
    if name == "ce":
        return -(p * q.log()).sum()
    tv, kl = (p - q).abs().sum() / 2, (p * (p / q).log()).sum()
    share = (-3.0 * (1 - tv)).exp().detach()
    return share * kl + (1 - share) * tv


@pytest.mark.parametrize("case", CASES)
def test_the_unrolled_loss_is_that_of_the_whole_mask(case: str):
    head, options = CASES[case]
    net = made(**head)
    of = lesson(target(double=True), (*net.taps, FINAL), length=13)
    mine = Eagle3Recipe(net, Options(share=1.0, **options))(of)["loss"]
    assert_same_gradients(net, mine, slow_loss(net, of, **options))


def test_what_does_not_count_is_not_looked_at():
    """Labels whose next token does not count may be anything; those that count may not."""
    net = made()
    of = lesson(target(double=True), (*net.taps, FINAL))
    recipe = Eagle3Recipe(net, Options(share=1.0, steps=3))
    before = recipe(of)["loss"]
    for count in (0.0, 1.0):
        other = dict(of.hidden)
        other[FINAL] = other[FINAL] + (of.weights == count)[..., None] * torch.randn_like(other[FINAL])
        after = recipe(TrainBatch(of.tokens, of.weights, other, of.seed))["loss"]
        assert torch.equal(before, after) == (count == 0.0)


def test_a_sample_of_rows_estimates_the_later_steps_without_bias():
    net = made()
    once = lesson(target(double=True), (*net.taps, FINAL), batch=1, length=14, all_count=True)
    whole, sampled = (Eagle3Recipe(net, Options(share=share, steps=4)) for share in (1.0, 0.3))
    assert_unbiased(whole, sampled, once, most_error=0.02)


def test_a_sampled_row_computes_what_it_would_among_all():
    """The first step is of all rows, and of a later one each row's state is its own affair."""
    net = made(num_layers=2, block={"sliding_window": 4})
    of = lesson(target(double=True), (*net.taps, FINAL), all_count=True)
    states: dict[float, list[Tensor]] = {}
    for share in (1.0, 0.4):
        seen = states[share] = []
        hook = net.register_forward_hook(lambda module, given, out, seen=seen: seen.append(out))
        Eagle3Recipe(net, Options(share=share, steps=3))(of)
        hook.remove()
    rows = sample_rows(9, 2, 0.4, of.rng())
    assert rows.shape == (2, 4)
    for step in (1, 2):
        torch.testing.assert_close(states[0.4][step], take(states[1.0][step], rows))


def test_rows_are_drawn_alike_in_order_and_once():
    drawn = torch.stack([sample_rows(10, 3, 0.3, torch.Generator().manual_seed(seed)) for seed in range(600)])
    assert drawn.shape == (600, 3, 3) and (drawn.diff(dim=-1) > 0).all()
    counts = drawn.flatten().bincount(minlength=10).double()
    assert (counts / counts.sum() - 0.1).abs().max() < 0.015
    assert not torch.equal(drawn[:, 0], drawn[:, 1])
    assert sample_rows(10, 1, 0.01, torch.Generator()).shape == (1, 1)


def test_what_is_said_along_the_way():
    net = made()
    of = lesson(target(double=True), (*net.taps, FINAL))
    said = Eagle3Recipe(net, Options(steps=3))(of)
    hits = [float(said[f"hit_{step}"]) for step in range(3)]
    assert set(said) == {"loss", "length", "hit_0", "hit_1", "hit_2"}
    assert float(said["length"]) == pytest.approx(1 + hits[0] + hits[0] * hits[1] + hits[0] * hits[1] * hits[2])
    assert [name for name, value in said.items() if value.requires_grad] == ["loss"]


def test_what_cannot_be():
    for name, value, bound in (("steps", 0, "1 or more"), ("share", 0.0, "above 0"), ("share", 1.5, "1 or less")):
        with pytest.raises(OptionError, match=f"{name} must be {bound}, not {value}."):
            Options(**{name: value})
    net = made()
    with pytest.raises(OptionError, match="Unknown loss 'cc'.*Known: ce, jsd, kl"):
        Eagle3Recipe(net, Options(loss="cc"))
    with pytest.raises(OptionError, match="Samples of 5 tokens are too short for 5 steps"):
        Eagle3Recipe(net, Options())(lesson(target(double=True), (*net.taps, FINAL), length=5))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch on norms in bfloat16: slower
def test_in_bfloat16_it_is_the_same_up_to_rounding():
    net = heads.eagle3(target()).requires_grad_(True)
    of = lesson(target(), (*net.taps, FINAL))
    recipe = Eagle3Recipe(net, Options(share=1.0, steps=3))
    exact = recipe(of)["loss"]
    with autocast(of.tokens.device, "bf16"):
        rounded = recipe(of)["loss"]
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    for name, gradient in gradients(net, rounded).items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
