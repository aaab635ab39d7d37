"""How chains are drawn from a model's own law: a token after another, each from what the model says after the last."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.rng import Stream, draw
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.tree_ops import normalize_or_uniform

ReadOn = Callable[[View, Int[Tensor, "B"], int], Float[Tensor, "B 1 V"]]
"""Logits after drafted token i of each row (0 is the root), those before it having been read."""


@dataclass(frozen=True, slots=True)
class ChainOptions(SizedOptions):
    """How long chains are; names and meanings are those of transformers.

    num_assistant_tokens: longest draft, in tokens.
    num_assistant_tokens_schedule: auto, the length with the most tokens a second; constant; heuristic,
        transformers' up and down; or calibrated, which chooses the threshold. See docs/schedules.md.
    assistant_confidence_threshold: a draft ends after its first token below this probability; that token is kept. 0:
        never.
    """

    num_assistant_tokens: int = 8
    assistant_confidence_threshold: float = 0.4

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.CHAIN

    @property
    def confidence(self) -> float:
        return self.assistant_confidence_threshold

    def __post_init__(self) -> None:
        if self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")


class Drawn(NamedTuple):
    """One token a row, the law [B, 1, V] that it was drawn from, and its probability; None where nobody asked."""

    token: Int[Tensor, "B"]
    law: Float[Tensor, "B 1 V"]
    chance: Float[Tensor, "B"] | None


def draw_chain(view: View, plan: Plan, depth: int, logits: Float[Tensor, "B 1 V"], read_on: ReadOn) -> Draft:
    """Draw up to ``depth`` tokens a row from q; a path ends after its first unsure token, which is kept.

    Greedy rows get the likeliest tokens, which are picked, not drawn. ``logits`` are those after the root.
    Where the plan has a confidence, tokens are scored.
    """
    tokens = [view.roots]
    laws = [logits.new_zeros(logits.shape, dtype=torch.float32)]  # the root's, never read
    scores = [logits.new_zeros(logits.shape[0], dtype=torch.float32)]
    lengths = torch.zeros_like(view.lengths)
    allowed = torch.tensor(plan.lengths, device=view.lengths.device)
    going = allowed > 0
    for i in range(1, depth + 1):
        paths = Paths(view.history, view.lengths, TokenTree.chain(torch.stack(tokens, 1)), start=i - 1)
        token, law, chance = _draw(view, plan, logits, paths, i)
        tokens.append(token)
        laws.append(law)
        lengths = lengths + going
        going = going & (i < allowed)
        if chance is not None:
            scores.append(scores[-1] + chance.log())
            going = going & (chance >= plan.confidence)
        last = i == depth or (going.device.type == "cpu" and not bool(going.any()))
        if last:
            break
        logits = read_on(view, token, i)
    tree = TokenTree.chain(torch.stack(tokens, 1), lengths + 1)
    held = torch.stack(scores, 1) if plan.confidence else None
    if view.warp.greedy:
        return Draft(tree, Law.FIXED, scores=held)
    return Draft(tree, Law.CHAIN, torch.cat(laws, 1), held)


def _draw(view: View, plan: Plan, logits: Float[Tensor, "B 1 V"], paths: Paths, index: int) -> Drawn:
    """Draw the node with this index in every row."""
    if view.warp.greedy:
        token = view.warp(logits, paths).best[:, 0]
        law = logits.float().softmax(-1) if plan.confidence else logits
    else:
        law = normalize_or_uniform(view.warp.law(logits, paths))
        token = draw(law[:, 0], view.noise.bits(Stream.DRAFT, torch.full_like(view.lengths, index)))
    if not plan.confidence:
        return Drawn(token, law, None)
    said = law
    if view.warp.greedy_rows is not None:  # the law of a greedy row is sure of everything
        said = torch.where(view.warp.greedy_rows, logits.float().softmax(-1), law)
    return Drawn(token, law, said[:, 0].gather(-1, token[:, None])[:, 0])
