"""What of a model matters, from a few texts: layers taken out one by one, the rest by one pass of gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads.nets.pruning_masks import Kept, Masks, Sizes, top_parts, uniform_masks
from foredraft.model.head_parts import parts_of
from foredraft.model.pruning import Masking, sizes_of
from foredraft.model.taps import body
from foredraft.train.losses import weighted_mean
from foredraft.train.recipe import Lesson


def important(
    model: Any, texts: Sequence[Lesson], wanted: Sizes, say: Callable[[str], None] = lambda sentence: None
) -> Kept:
    """The parts to keep, of the wanted sizes. The model is one that runs with its own attention.

    Layers go first, always the one without which the loss on the texts is lowest. Of what is left, a part's score is
    the mean over texts of |dL/dm|, m being a factor on the part (Michel et al., arXiv:1905.10650): how much the loss
    would change, to first order, if it were gone.

    Args:
        say: told which layer went.
    """
    sizes = sizes_of(model)
    masks = Masks(*(mask.to(model.device) for mask in uniform_masks(sizes)))
    masking = Masking(model, masks)
    try:
        for _ in range(sizes.layers - wanted.layers):
            without, loss = _least_missed(model, masking, texts)
            masks.layers[without] = 0.0
            say(f"layer {without + 1} of {sizes.layers} goes · loss {loss:.3f}")
        scores = _scores(model, masking, texts)
    finally:
        masking.undo()
    return top_parts(scores, wanted)


@torch.no_grad()
def _least_missed(model: Any, masking: Masking, texts: Sequence[Lesson]) -> tuple[int, float]:
    """The layer that can best be done without, and the mean loss without it."""
    layers = masking.masks.layers
    losses = {}
    for layer in layers.nonzero()[:, 0].tolist():
        layers[layer] = 0.0
        losses[layer] = sum(float(_loss(model, text)) for text in texts) / len(texts)
        layers[layer] = 1.0
    layer = min(losses, key=losses.__getitem__)
    return layer, losses[layer]


def _scores(model: Any, masking: Masking, texts: Sequence[Lesson]) -> Masks:
    """Mean absolute gradients by part; layers keep their factors as scores."""
    factors = masking.masks
    masking.masks = Masks(factors.layers, *(mask.requires_grad_(True) for mask in factors[1:]))
    totals = [torch.zeros_like(mask) for mask in factors[1:]]
    for text in texts:
        with torch.enable_grad():
            found = torch.autograd.grad(_loss(model, text), masking.masks[1:])
        for total, gradient in zip(totals, found, strict=True):
            total += gradient.abs() / len(texts)
    return Masks(factors.layers, *totals)


def _loss(model: Any, text: Lesson) -> Tensor:
    """Cross-entropy of a language model on the tokens that count."""
    states = body(model)(input_ids=text.tokens, use_cache=False)[0][:, :-1]
    logits = parts_of(model).head(states).float()
    losses = F.cross_entropy(logits.transpose(1, 2), text.tokens[:, 1:], reduction="none")
    return weighted_mean(losses, text.weights[:, :-1])
