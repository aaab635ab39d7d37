"""Chains, built token by token from a model's logits."""

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
from foredraft.drafters.common.tree_ops import normalize_or_uniform, ranked
from foredraft.model.native.runner import Engine

ReadNext = Callable[[Int[Tensor, "B"], int], Float[Tensor, "B 1 V"]]
"""Logits after drafted token i of each row (0 is the root); earlier tokens have been read."""


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """How far chains go: ``depth`` tokens, ``allowed`` of them in each row, up to the first one below ``confidence``,
    and up to the first one whose path is less probable than ``worth``, if there are such thresholds."""

    allowed: Int[Tensor, "B"]
    confidence: Float[Tensor, "B"] | None
    depth: int
    worth: Float[Tensor, "B"] | None = None

    @classmethod
    def of(cls, plan: Plan, depth: int, device: torch.device) -> "ChainLimits":
        """The plan's limits, for chains of at most ``depth`` tokens."""
        rows = len(plan.lengths)
        least = torch.full((rows,), plan.confidence, device=device) if plan.confidence else None
        share = plan.level_worth / max(sum(length > 0 for length in plan.lengths), 1)  # a level's price, by rows
        worth = torch.full((rows,), share) if share and device.type == "cpu" else None
        return cls(plan.on(device), least, depth, worth)


@dataclass(frozen=True, slots=True)
class ChainOptions(SizedOptions):
    """Length of chains; names and meanings as in transformers.

    num_assistant_tokens: longest draft, in tokens.
    num_assistant_tokens_schedule: auto, the length with the most tokens per second; constant; heuristic, transformers'
        rule of two more and one less; or calibrated, which tunes the threshold. See docs/schedules.md.
    assistant_confidence_threshold: a draft ends after its first token below this probability; that token is kept. 0:
        never.
    """

    num_assistant_tokens: int = 8
    assistant_confidence_threshold: float = 0.4

    @property
    def law(self) -> Law:
        return Law.CHAIN

    @property
    def confidence(self) -> float:
        return self.assistant_confidence_threshold

    def __post_init__(self) -> None:
        if self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")


def build_chain(
    view: View,
    limits: ChainLimits,
    logits: Float[Tensor, "B 1 V"],
    read_next: ReadNext,
    *,
    recorded: bool = False,
    engine: Engine | None = None,
) -> Draft:
    """Build a chain of tokens per row: of the best guesses, or drawn from q if drafts are drawn.

    Args:
        logits: after the root.
        engine: see ``ranked``.
        recorded: read no values; otherwise, on a CPU, the draft ends when the chains of all rows have.
    """
    tokens, scores = [view.roots], [torch.zeros_like(view.roots, dtype=torch.float32)]
    laws = [logits.new_zeros(logits.shape, dtype=torch.float32)]  # the root's, never read
    lengths = torch.zeros_like(view.lengths)
    depth, allowed = limits.depth, limits.allowed
    draws = view.draws and not view.warp.greedy
    going = allowed > 0
    for i in range(1, depth + 1):
        paths = Paths(view.history, view.lengths, TokenTree.chain(torch.stack(tokens, 1)), start=i - 1)
        token, chance, law = _drawn(view, logits, paths, i) if draws else _guess(view, logits, paths, i, engine)
        tokens.append(token)
        laws += [] if law is None else [law]
        scores.append(scores[-1] + chance)
        lengths = lengths + going
        going = going & (i < allowed)
        if limits.confidence is not None:
            going = going & (chance.exp() >= limits.confidence)
        if limits.worth is not None:
            going = going & (scores[-1].exp() >= limits.worth)
        if i == depth or (not recorded and going.device.type == "cpu" and not bool(going.any())):
            break
        logits = read_next(token, i)
    tree, path_scores = TokenTree.chain(torch.stack(tokens, 1), lengths + 1), torch.stack(scores, 1)
    if draws:
        return Draft(tree, Law.CHAIN, torch.cat(laws, 1), path_scores)
    return Draft(tree, Law.FIXED, scores=path_scores)


class _Next(NamedTuple):
    """One token per row, the log of its confidence, and the law [B, 1, V] that it was drawn from, if it was."""

    token: Int[Tensor, "B"]
    chance: Float[Tensor, "B"]
    law: Float[Tensor, "B 1 V"] | None = None


def _guess(view: View, logits: Float[Tensor, "B 1 V"], paths: Paths, index: int, engine: Engine | None) -> _Next:
    """The best guess for the node with this index in every row."""
    times = None if view.warp.greedy else view.noise.times(index - 1, logits.shape[-1])
    tokens, shares = ranked(view.warp.processed(logits, paths), 1, view.warp, times, 1.0, engine)
    return _Next(tokens[:, 0, 0], shares[:, 0, 0])


def _drawn(view: View, logits: Float[Tensor, "B 1 V"], paths: Paths, index: int) -> _Next:
    """Draw the node with this index in every row; greedy rows get the likeliest token."""
    law = normalize_or_uniform(view.warp.law(logits, paths))
    token = draw(law[:, 0], view.noise.bits(Stream.DRAFT, torch.full_like(view.lengths, index)))
    confidence = law
    if view.warp.greedy_rows is not None:  # the processed law of a greedy row is a one-hot
        confidence = torch.where(view.warp.greedy_rows, logits.float().softmax(-1), law)
    return _Next(token, confidence[:, 0].gather(-1, token[:, None])[:, 0].log(), law)
