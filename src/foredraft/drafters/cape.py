"""CaPE (Du et al., "GliDe with a CaPE", arXiv:2402.02082): a chain with more siblings where the draft is less sure.

The draft model drafts a chain of its best guesses; at each position the next best are candidates too, the more the
lower the confidence in the first.
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
from foredraft.drafters.common.draft_runner import DraftRunner, Forwards, RunnerDrafter
from foredraft.drafters.common.tree_ops import Candidates, keep_best, ranked, worth_a_level
from foredraft.model.base import TargetModel
from foredraft.model.recording.replay import EAGER, Replay


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Size of the tree; names as in transformers where it has them.

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
            raise OptionError("widths must be whole numbers of 1 or more, one per confidence band, such as 7x5x3x1.")


@final
class Cape(RunnerDrafter[DraftRunner]):
    """Drafts a draft model's best chain with siblings; for the arguments see ``DraftRunner``."""

    def __init__(self, options: Options, model: TargetModel, vocab_size: int, replay: Replay = EAGER) -> None:
        self._options = options
        self._widths = torch.tensor(options.widths, device=model.device)
        depth = options.num_assistant_tokens
        needs = Needs(max_nodes=depth * max(options.widths), max_depth=depth, scored=True, ahead=True)
        super().__init__(needs, DraftRunner(model, vocab_size, replay))

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._runner.planned(view, plan)
        depth = min(plan.length, self.needs.longest)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        nodes, worth = plan.at_most(self.needs.max_nodes), plan.level_bound
        allowed = plan.on(view.lengths.device)
        return self._runner.draft("tree", view, self.needs.longest, self._tree, allowed, depth, nodes, worth)

    def _tree(
        self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], depth: int, nodes: int, worth: float
    ) -> Draft:
        return keep_best(self._levels(view, forwards, allowed, depth, worth), view.roots, nodes, allowed)

    def _levels(
        self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], depth: int, worth: float
    ) -> Candidates:
        """The candidates level by level; the chain continues from the first of each."""
        logits = forwards.root()
        chain = [view.roots]
        tokens, scores, parents, numbers = [], [], [], []
        above = torch.zeros_like(view.roots, dtype=torch.float32)[:, None]  # score of the path so far
        parent, reached = 0, 0
        for level in range(1, depth + 1):
            paths = Paths(view.history, view.lengths, TokenTree.chain(torch.stack(chain, 1)), start=level - 1)
            times = None if view.warp.greedy else view.noise.times(level - 1, logits.shape[-1])
            ids, chances = ranked(view.warp.processed(logits, paths), max(self._options.widths), view.warp, times)
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
            if level == depth or not worth_a_level(above, allowed > level, worth):
                break
            logits = forwards.next(ids[:, 0], level)
        joined = (torch.cat(each, 1) for each in (tokens, parents, scores))
        return Candidates(*joined, levels=torch.cat(numbers), depth=len(tokens))

    def _width(self, best: Float[Tensor, "B 1"]) -> Int[Tensor, "B 1"]:
        """Number of candidates for a log-probability of the first."""
        band = (best.exp() * len(self._options.widths)).long().clamp(max=len(self._options.widths) - 1)
        return self._widths[band]


def build(options: Options, context: BuildContext) -> Cape:
    """cape:PATH"""
    return Cape(options, context.model(context.path), context.vocab_size, context.replay)
