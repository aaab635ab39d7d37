"""CaPE (Du et al., "GliDe with a CaPE", arXiv:2402.02082): a chain with more siblings where the draft is less sure.

The draft model drafts a chain of its best guesses; at each position the next best are candidates too, the more the
lower the confidence in the first.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft
from foredraft.core.drafter import Needs, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.drafters.common.model_trees import ModelTreeDrafter, RunnerTreeBuilder
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.draft_runner import DraftRunner
from foredraft.drafters.trees.candidates import Candidates, keep_best, worth_a_level
from foredraft.drafters.trees.shapes import TreeLimits
from foredraft.model.base import TargetModel


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Size of the tree; names as in transformers where it has them."""

    num_assistant_tokens: int = option(5, "longest path of the tree.")
    widths: tuple[int, ...] = option(
        (7, 5, 3, 1),
        "candidates per position by the draft's confidence in the first, in bands of equal width: 7x5x3x1 means 7 "
        "below 0.25, 5 below 0.5, 3 below 0.75 and 1 above.",
    )

    def __post_init__(self) -> None:
        check_bounds(self, least={"num_assistant_tokens": 1})
        if not self.widths or min(self.widths) < 1:
            raise OptionError("widths must be whole numbers of 1 or more, one per confidence band, such as 7x5x3x1.")


@final
class Cape(ModelTreeDrafter):
    """Drafts a draft model's best chain with siblings; for the arguments see ``DraftRunner``."""

    def __init__(self, options: Options, model: TargetModel, vocab_size: int) -> None:
        self._widths = torch.tensor(options.widths, device=model.device)
        depth, self._widest = options.num_assistant_tokens, max(options.widths)
        needs = Needs(max_nodes=depth * self._widest, max_depth=depth, scored=True, ahead=True)
        self._limits = TreeLimits(needs.max_nodes, depth, top_k=1)
        super().__init__(needs, DraftRunner(model, vocab_size))

    def limits(self, view: View) -> TreeLimits:
        return self._limits

    def tree(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        return keep_best(self._candidates(builder, allowed, limits), builder.view.roots, limits.nodes, allowed)

    def _candidates(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Candidates:
        """The candidates level by level; the chain continues from the first of each."""
        roots = builder.view.roots
        tokens, scores, parents, numbers = [], [], [], []
        above = torch.zeros_like(roots, dtype=torch.float32)[:, None]  # score of the path so far
        parent, reached = 0, 0
        for level in range(1, limits.depth + 1):
            ids, shares = (each[:, 0] for each in builder.ranked(self._widest))
            count = ids.shape[1]
            outside = torch.arange(count, device=ids.device) >= self._width(shares[:, :1])
            tokens.append(ids)
            scores.append((above + shares).masked_fill(outside, -torch.inf))
            parents.append(torch.full_like(ids, parent))
            numbers.append(torch.full((count,), level, device=ids.device))
            parent, reached = reached + 1, reached + count
            above = above + shares[:, :1]
            if level == limits.depth or not worth_a_level(above, allowed > level, limits.level_price):
                break
            builder.add_level(ids[:, :1], torch.zeros_like(ids[:, :1]))
        joined = (torch.cat(each, 1) for each in (tokens, parents, scores))
        return Candidates(*joined, levels=torch.cat(numbers), depth=len(tokens))

    def _width(self, best: Float[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
        """Number of candidates for a log-probability of the first."""
        band = (best.exp() * len(self._widths)).long().clamp(max=len(self._widths) - 1)
        return self._widths[band]


def build(options: Options, context: BuildContext) -> Cape:
    """cape:PATH"""
    model = context.glide() if context.names_head else context.model(context.path)
    return Cape(options, model, context.vocab_size)
