"""CaPE (Du et al., "GliDe with a CaPE", arXiv:2402.02082): a chain that is wider where the draft is unsure.

The draft model says its likeliest token again and again; beside each the next likeliest are candidates, too, and the
less sure it is of its first choice the more of them. All of them are picked by rank, so how many there are may depend
on what was picked, and every node may be left out.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.draft_runner import DraftRunner, ReadingDrafter
from foredraft.drafters.common.tree_ops import Candidates, keep_best, ranked
from foredraft.model.base import TargetModel


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Names as in transformers where it has them.

    num_assistant_tokens: longest path of the tree.
    widths: candidates per position by the draft's confidence in the first, in bands of equal width: 7x5x3x1 means 7
        below 0.25, 5 below 0.5, 3 below 0.75 and 1 above.
    """

    num_assistant_tokens: int = 5
    widths: tuple[int, ...] = (7, 5, 3, 1)

    def __post_init__(self) -> None:
        if self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")
        if not self.widths or min(self.widths) < 1:
            raise OptionError("widths must be whole numbers, 1 or more, one a band of confidence, such as 7x5x3x1.")


@final
class Cape(ReadingDrafter[DraftRunner]):
    """A draft model's likeliest chain, with siblings.

    Args:
        model: the draft.
        vocab_size: of the target.
    """

    def __init__(self, options: Options, model: TargetModel, vocab_size: int) -> None:
        self._options = options
        self._widths = torch.tensor(options.widths, device=model.device)
        depth = options.num_assistant_tokens
        needs = Needs(max_nodes=depth * max(options.widths), max_depth=depth, scored=True)
        super().__init__(DraftRunner(model, vocab_size), needs)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._reader.within_context(view, plan)
        depth = min(plan.length, self._options.num_assistant_tokens)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        levels = self._levels(view, plan, depth)
        allowed = torch.tensor(plan.lengths, device=view.lengths.device)
        return keep_best(levels, view.roots, plan.at_most(self.needs.max_nodes), allowed)

    def _levels(self, view: View, plan: Plan, depth: int) -> Candidates:
        """The chain level by level, its first node on each being the one that goes on."""
        logits = self._reader.read(view, depth)
        chain = [view.roots]
        tokens, scores, parents, numbers = [], [], [], []
        above = torch.zeros_like(view.roots, dtype=torch.float32)[:, None]  # of the path so far
        parent, reached = 0, 0
        for level in range(1, depth + 1):
            paths = Paths(view.history, view.lengths, TokenTree.chain(torch.stack(chain, 1)), start=level - 1)
            likely = view.warp.processed(logits, paths).float()
            cut_off = view.warp.truncation(likely).isneginf()
            allowed = likely.masked_fill(cut_off, torch.finfo(torch.float32).min)
            ids, chances = ranked(allowed, max(self._options.widths), view.warp)
            ids, chances = ids[:, 0], chances[:, 0]
            count = ids.shape[1]
            outside = torch.arange(count, device=ids.device) >= self._width(chances[:, :1])
            tokens.append(ids)
            scores.append((above + chances).masked_fill(outside, -torch.inf))
            parents.append(torch.full_like(ids, parent))
            numbers.append(torch.full((count,), level, device=ids.device))
            parent, reached = reached + 1, reached + count
            above = above + chances[:, :1]
            chain.append(ids[:, 0])
            if level == depth or self._too_unlikely(above, plan):
                break
            logits = self._reader.read_on(view, ids[:, 0], level)
        joined = (torch.cat(each, 1) for each in (tokens, parents, scores))
        return Candidates(*joined, levels=torch.cat(numbers), depth=len(tokens))

    def _width(self, best: Float[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
        """How many candidates there are where the draft is so sure of the first."""
        band = (best.exp() * len(self._options.widths)).long().clamp(max=len(self._options.widths) - 1)
        return self._widths[band]

    def _too_unlikely(self, paths: Float[Tensor, "B 1"], plan: Plan) -> bool:
        """Whether another level is not worth a forward of the draft; on a CPU a look at the values costs nothing."""
        return bool(plan.level_worth) and paths.device.type == "cpu" and float(paths.exp().sum()) < plan.level_worth


def build(options: Options, context: BuildContext) -> Cape:
    """cape:PATH"""
    return Cape(options, context.model(context.path), context.vocab_size)
