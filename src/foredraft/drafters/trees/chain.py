"""Chains, built token by token from a model's logits.

In sampled rows a chain of guesses has siblings: further guesses for its tokens, which take no forward of the draft. The
tree has as many nodes as the chain; the second guess for a token is often right where the first is not. A chain that
ends below a threshold has none: its forward is meant to be small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.rng import RandomStream, draw
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree
from foredraft.drafters.trees.candidates import GUESSES, Candidates, keep_best, normalize_or_uniform
from foredraft.model.ops import TORCH, Ops

ReadNext = Callable[[Int[Tensor, "B"], int], Float[Tensor, "B 1 V"]]
"""Logits after drafted token i of each row (0 is the root); earlier tokens have been read."""


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """How far chains go: ``depth`` tokens, ``allowed`` of them in each row, up to the first one below ``confidence``,
    and up to the first one whose path is less probable than ``worth``, if there are such thresholds. ``siblings``:
    guesses for sampled rows may have some, in a tree of ``depth`` nodes."""

    allowed: Int[Tensor, "B"]
    confidence: Float[Tensor, "B"] | None
    depth: int
    worth: Float[Tensor, "B"] | None = None
    siblings: bool = False

    @classmethod
    def of(cls, plan: Plan, depth: int, device: torch.device) -> "ChainLimits":
        """The plan's limits, for chains of at most ``depth`` tokens."""
        rows = len(plan.lengths)
        least = torch.full((rows,), plan.confidence, device=device) if plan.confidence else None
        level, node = plan.level_price
        share = level / max(sum(length > 0 for length in plan.lengths), 1)  # a level's price, by rows
        worth = torch.full((rows,), share + node) if share and device.type == "cpu" else None
        return cls(plan.on(device), least, depth, worth, siblings=not (plan.chain or plan.confidence))


@dataclass(frozen=True, slots=True)
class ChainOptions(SizedOptions):
    """Length of chains; names and meanings as in transformers."""

    num_assistant_tokens: int = option(8, "longest draft, in tokens.")
    num_assistant_tokens_schedule: str = option(
        "auto",
        "auto, the length with the most tokens per second; constant; heuristic, transformers' rule of two more and one "
        "less; or calibrated, which tunes the threshold. See docs/schedules.md.",
        kw_only=True,
    )
    assistant_confidence_threshold: float = option(
        0.4, "a draft ends after its first token below this probability; that token is kept. 0: never."
    )
    law = Law.CHAIN

    @property
    def confidence(self) -> float:
        return self.assistant_confidence_threshold

    def __post_init__(self) -> None:
        check_bounds(self, least={"num_assistant_tokens": 1})


def build_chain(
    view: View,
    limits: ChainLimits,
    logits: Float[Tensor, "B 1 V"],
    read_next: ReadNext,
    ops: Ops = TORCH,
) -> Draft:
    """Build a chain of tokens per row: of the best guesses, or drawn from q if drafts are drawn.

    Where values may be read, it ends when the chains of all rows have.

    Args:
        logits: after the root.
        ops: which rank the guesses.
    """
    tokens, scores = [view.roots], [torch.zeros_like(view.roots, dtype=torch.float32)]
    levels: list[_ChainLevel] = []
    lengths = torch.zeros_like(view.lengths)
    depth, allowed = limits.depth, limits.allowed
    draws = view.draws and not view.warp.greedy
    siblings = limits.siblings and depth > 1 and not (draws or view.warp.greedy)
    reads = view.readable
    going = allowed > 0
    for i in range(1, depth + 1):
        paths = Paths(view.history, view.lengths, TokenTree.chain(torch.stack(tokens, 1)), start=i - 1)
        width = GUESSES if siblings else 1
        level = _drawn(view, logits, paths, i) if draws else _guesses(view, logits, paths, i, width, ops)
        levels.append(level)
        tokens.append(level.tokens[:, 0])
        scores.append(scores[-1] + level.shares[:, 0])
        lengths = lengths + going
        going = going & (i < allowed)
        if limits.confidence is not None:
            going = going & (level.shares[:, 0].exp() >= limits.confidence)
        if limits.worth is not None:
            going = going & (scores[-1].exp() >= limits.worth)
        if siblings and reads and i * GUESSES >= depth:  # a child scores less than its parent: it needs room after it
            going = going & (scores[-1] >= _scores(levels, scores).topk(depth).values[:, -1])
        if i == depth or (reads and not bool(going.any())):
            break
        logits = read_next(tokens[-1], i)
    if siblings:
        return keep_best(_candidates(levels, scores), view.roots, depth, lengths)
    tree, path_scores = TokenTree.chain(torch.stack(tokens, 1), lengths + 1), torch.stack(scores, 1)
    laws = [level.law for level in levels if level.law is not None]
    if not laws:
        return Draft(tree, Law.FIXED, scores=path_scores)
    return Draft(
        tree, Law.CHAIN, torch.cat([torch.zeros_like(laws[0]), *laws], 1), path_scores
    )  # the root's is not read


class _ChainLevel(NamedTuple):
    """Tokens for a position of each row, best first: the chain's and its siblings. ``shares``: the logs of their
    confidences. ``law``: from which the chain's was drawn, if it was."""

    tokens: Int[Tensor, "B K"]
    shares: Float[Tensor, "B K"]
    law: Float[Tensor, "B 1 V"] | None = None


def _guesses(view: View, logits: Float[Tensor, "B 1 V"], paths: Paths, index: int, count: int, ops: Ops) -> _ChainLevel:
    """The best guesses for the node with this index in every row."""
    times = None if view.warp.greedy else view.noise.times(index - 1, logits.shape[-1])
    tokens, shares = ops.rank(view.warp.processed(logits, paths), count, view.warp, times, 1.0)
    return _ChainLevel(tokens[:, 0], shares[:, 0])


def _drawn(view: View, logits: Float[Tensor, "B 1 V"], paths: Paths, index: int) -> _ChainLevel:
    """Draw the node with this index in every row; greedy rows get the likeliest token."""
    law = normalize_or_uniform(view.warp.law(logits, paths))
    token = draw(law[:, 0], view.noise.bits(RandomStream.DRAFT, torch.full_like(view.lengths, index)))[:, None]
    confidence = law
    if view.warp.greedy_rows is not None:  # the processed law of a greedy row is a one-hot
        confidence = torch.where(view.warp.greedy_rows, logits.float().softmax(-1), law)
    return _ChainLevel(token, confidence[:, 0].gather(-1, token).log(), law)


def _scores(levels: Sequence[_ChainLevel], chain: Sequence[Float[Tensor, "B"]]) -> Float[Tensor, "B C"]:
    """Scores of the paths to all guesses; ``chain``: to the tokens of the chain, root first."""
    return torch.cat([above[:, None] + level.shares for above, level in zip(chain, levels, strict=False)], 1)


def _candidates(levels: Sequence[_ChainLevel], chain: Sequence[Float[Tensor, "B"]]) -> Candidates:
    """All guesses; the first of each level is the parent of the next."""
    tokens, count, width = torch.cat([level.tokens for level in levels], 1), len(levels), levels[0].tokens.shape[1]
    above = torch.arange(count, device=tokens.device).repeat_interleave(width)
    parents = (1 + (above - 1) * width).clamp(min=0).expand_as(tokens)
    return Candidates(tokens, parents, _scores(levels, chain), above + 1, count)
