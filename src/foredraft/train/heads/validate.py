"""What a head is worth while it learns: its loss on texts that it never sees, and its acceptance in the real loop."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from foredraft.core.drafter import Drafter
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.engine import Engine
from foredraft.engine.policy import Constant
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.heads.nets.target_parts import FINAL
from foredraft.heads.nets.ttt_attention import Unrolled
from foredraft.model.hf import CausalLM
from foredraft.train.data.batches import Lessons
from foredraft.train.loop import LoopOptions
from foredraft.train.precision import autocast
from foredraft.train.recipe import Lesson, Recipe

_PROMPT, _NEW, _PROMPTS = 48, 48, 8  # tokens of a prompt, new tokens, prompts

RANKS = 10
"""So many ranks of each head are counted."""


def losses_now(recipe: Recipe, lessons: Lessons, loop: LoopOptions) -> dict[str, float]:
    """What the recipe says of held-out texts, on average."""
    recipe.eval()
    with autocast(lessons.device, loop.precision):
        return mean_losses(recipe, lessons.held_out(_PROMPTS))


def length_now(target: CausalLM, drafter: Drafter, lessons: Lessons) -> float:
    """The acceptance length of this drafter on the beginnings of held-out texts."""
    prompts = [lesson.tokens[0, :_PROMPT].tolist() for lesson in lessons.held_out(_PROMPTS, ())]
    return round(acceptance_length(target, drafter, prompts, _NEW), 4)


def mean_losses(recipe: Recipe, lessons: Sequence[Lesson]) -> dict[str, float]:
    """What the recipe says of these lessons, on average."""
    with torch.no_grad():
        said = [recipe(lesson) for lesson in lessons]
    return {name: round(sum(float(each[name]) for each in said) / len(said), 6) for name in said[0]}


def acceptance_length(
    target: CausalLM, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 0.0
) -> float:
    """Tokens a target forward in the loop that users run, all prompts as one batch."""
    target.tap(drafter.needs.hidden_layers)
    engine = Engine(target, drafter, Constant(drafter.needs.longest), max_rows=len(prompts))
    params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens, temperature=temperature)
    requests = [engine.request(prompt, params, ()) for prompt in prompts]
    sequences = engine.submit(requests, lambda tokens: "", derive_seeds(0, len(requests)))
    engine.run(sequences)
    stats = [sequence.counters.stats(len(sequence.prompt), "", True) for sequence in sequences]
    return sum(each.tokens for each in stats) / max(1, sum(each.target_forwards for each in stats))


@torch.no_grad()
def rank_accuracies(net: nn.Module, lessons: Sequence[Lesson]) -> tuple[tuple[float, ...], ...] | None:
    """How often the token of each rank of each head is the target's choice; None for nets that have no heads.

    Hydra's heads are told the tokens of the text, as if all before had been accepted.
    """
    if not isinstance(net, (Medusa, Hydra, Blockwise)):
        return None
    hits = torch.zeros(net.count, RANKS)
    seen = 0
    for lesson in lessons:
        rows = lesson.tokens.shape[1] - 1 - net.count
        choices = net.target.head(lesson.hidden[FINAL]).argmax(-1)
        for head in range(net.count):
            best = _head_logits(net, lesson, head, rows).topk(RANKS, dim=-1).indices
            right = best == choices[:, 1 + head : 1 + head + rows, None]
            hits[head] += right.float().mean((0, 1)).cpu()
        seen += 1
    return tuple(tuple(round(float(rate), 4) for rate in head) for head in hits / max(1, seen))


def _head_logits(net: Medusa | Hydra | Blockwise, lesson: Lesson, head: int, rows: int) -> Float[Tensor, "B M V"]:
    hidden = lesson.hidden[FINAL]
    if not isinstance(net, Hydra):
        return net.logits(net.states(hidden[:, :rows], head), head)
    if net.prefix is not None:
        place = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)
        hidden = net.prefix(hidden, place, Unrolled(place).first)
    tokens = torch.stack([lesson.tokens[:, 1 + i : 1 + i + rows] for i in range(head + 1)], -1)
    return net.logits(hidden[:, :rows], tokens, head)
