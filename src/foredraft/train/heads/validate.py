"""Validation during training: loss on held-out samples, and acceptance length in the decoding loop."""

from collections.abc import Sequence

import torch

from foredraft.core.best import best_of
from foredraft.core.drafter import Drafter
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.target_parts import FINAL
from foredraft.engine.engine import Engine
from foredraft.engine.policy import Constant
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Medusa
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.train.data.batches import TrainBatches
from foredraft.train.devices import autocast
from foredraft.train.heads.medusa_hydra import logits_ahead
from foredraft.train.options import LoopOptions
from foredraft.train.recipe import Recipe, TrainBatch

_PROMPT, _NEW, _PROMPTS = 48, 48, 8  # tokens of a prompt, new tokens, prompts

RANKS = 10
"""Number of ranks for accuracies."""


def validation_losses(recipe: Recipe, batches: TrainBatches, loop: LoopOptions) -> dict[str, float]:
    """The recipe's mean metrics on held-out samples."""
    recipe.eval()
    with autocast(batches.device, loop.precision):
        return mean_losses(recipe, batches.held_out(_PROMPTS))


def validation_length(
    target: TargetModel, drafter: Drafter, batches: TrainBatches, cache: SlotCache | None = None
) -> float:
    """Acceptance length of a drafter, with the starts of held-out samples as prompts.

    Args:
        cache: the target's, if the drafter shares it.
    """
    prompts = [batch.tokens[0, :_PROMPT].tolist() for batch in batches.held_out(_PROMPTS, ())]
    return round(acceptance_length(target, drafter, prompts, _NEW, cache), 4)


def mean_losses(recipe: Recipe, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """The recipe's metrics, averaged over batches."""
    with torch.no_grad():
        found = [recipe(batch) for batch in batches]
    return {name: round(sum(float(each[name]) for each in found) / len(found), 6) for name in found[0]}


def acceptance_length(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    cache: SlotCache | None = None,
) -> float:
    """Tokens per target forward in the decoding loop, all prompts in one batch."""
    target.tap(drafter.needs.hidden_layers)
    engine = Engine(target, drafter, Constant(drafter.needs.longest), max_rows=len(prompts), cache=cache)
    params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    requests = [engine.request(prompt, params, ()) for prompt in prompts]
    sequences = engine.submit(requests, lambda tokens: "", derive_seeds(0, len(requests)))
    engine.run(sequences)
    stats = [sequence.counters.stats(len(sequence.prompt), "", True) for sequence in sequences]
    return sum(each.tokens for each in stats) / max(1, sum(each.target_forwards for each in stats))


@torch.no_grad()
def rank_accuracies(net: Medusa | Hydra, batches: Sequence[TrainBatch]) -> tuple[tuple[float, ...], ...]:
    """Accuracy of each head's k-th token, per rank k, against the target's argmax."""
    hits = torch.zeros(net.config.num_heads, RANKS)
    for batch in batches:
        size, length = batch.tokens.shape
        rows = torch.arange(length - 1 - net.config.num_heads, device=batch.tokens.device).expand(size, -1)
        choices = net.target.head(batch.hidden[FINAL]).argmax(-1)
        logits = logits_ahead(net, batch)
        for head in range(net.config.num_heads):
            best = best_of(logits(rows, head), RANKS).indices
            correct = best == choices[:, 1 + head : 1 + head + rows.shape[1], None]
            hits[head] += correct.float().mean((0, 1)).cpu()
    return tuple(tuple(round(float(rate), 4) for rate in head) for head in hits / max(1, len(batches)))
