"""Importance of a model's parts, from a few samples: layers by removing them one by one, the rest by gradients."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.hf.head_parts import parts_of
from foredraft.model.hf.pruned_parts import Kept, Masks, TransformerSizes, top_parts, uniform_masks
from foredraft.model.hf.pruning import Masking, sizes_of
from foredraft.model.hf.taps import body
from foredraft.train.losses import weighted_mean
from foredraft.train.partial import ResumableState
from foredraft.train.recipe import TrainBatch

START: dict[str, Any] = {"removed": [], "losses": {}, "scored": 0, "totals": []}
"""Nothing is known: layers removed, losses without each of the others, samples scored, and sums of their gradients."""


def select_by_importance(
    model: Any,
    samples: Sequence[TrainBatch],
    wanted: TransformerSizes,
    report: Callable[[str], None] = lambda sentence: None,
    partial: ResumableState | None = None,
) -> Kept:
    """Select the parts to keep. The model must run with its own attention.

    First remove layers, each time the one whose removal gives the lowest loss. Then score the other parts by the mean
    over samples of |dL/dm| for a factor m on the part (Michel et al., arXiv:1905.10650), the first-order change of the
    loss without it.

    Args:
        wanted: the sizes to keep.
        report: called with a message for each removed layer.
        partial: keeps the results of an interrupted call, from ``START``.
    """
    sizes = sizes_of(model)
    masks = Masks(*(mask.to(model.device) for mask in uniform_masks(sizes)))
    with Masking(model, masks) as masking, partial or ResumableState(None, {}, copy.deepcopy(START)) as work:
        for layer in work.state["removed"]:
            masks.layers[layer] = 0.0
        while len(work.state["removed"]) < sizes.layers - wanted.layers:
            without, loss = _least_important_layer(model, masking, samples, work)
            with work.update() as state:
                state["removed"].append(without)
                state["losses"] = {}
            masks.layers[without] = 0.0
            report(f"removed layer {without + 1} of {sizes.layers} · loss {loss:.3f}")
        scores = _scores(model, masking, samples, work)
    return top_parts(scores, wanted)


@torch.no_grad()
def _least_important_layer(
    model: Any, masking: Masking, samples: Sequence[TrainBatch], work: ResumableState
) -> tuple[int, float]:
    """The layer whose removal gives the lowest mean loss, and that loss."""
    layers = masking.masks.layers
    for layer in layers.nonzero()[:, 0].tolist():
        if layer in work.state["losses"]:
            continue
        layers[layer] = 0.0
        loss = sum(float(_loss(model, sample)) for sample in samples) / len(samples)
        layers[layer] = 1.0
        with work.update() as state:
            state["losses"][layer] = loss
    losses = work.state["losses"]
    layer = min(losses, key=losses.__getitem__)
    return layer, losses[layer]


def _scores(model: Any, masking: Masking, samples: Sequence[TrainBatch], work: ResumableState) -> Masks:
    """Mean absolute gradients by part; layers keep their factors as scores."""
    factors = masking.masks
    masking.masks = Masks(factors.layers, *(mask.requires_grad_(True) for mask in factors[1:]))
    if not work.state["totals"]:
        work.state["totals"] = [torch.zeros_like(mask, requires_grad=False) for mask in factors[1:]]
    for sample in samples[work.state["scored"] :]:
        with torch.enable_grad():
            found = torch.autograd.grad(_loss(model, sample), masking.masks[1:])
        with work.update() as state:
            state["scored"] += 1
            for total, gradient in zip(state["totals"], found, strict=True):
                total += gradient.abs().to(total.device) / len(samples)
    return Masks(factors.layers, *(total.to(factors.layers.device) for total in work.state["totals"]))


def _loss(model: Any, sample: TrainBatch) -> Tensor:
    """Cross-entropy on the tokens that count."""
    states = body(model)(input_ids=sample.tokens, use_cache=False)[0][:, :-1]
    logits = parts_of(model).head(states).float()
    losses = F.cross_entropy(logits.transpose(1, 2), sample.tokens[:, 1:], reduction="none")
    return weighted_mean(losses, sample.weights[:, :-1])
