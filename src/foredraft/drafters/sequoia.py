"""Sequoia (Chen et al., arXiv:2402.12374): the best tree for given acceptance rates by rank and forward costs.

Acceptance by rank is measured once. A dynamic programme finds the best tree of each size, and measured costs decide the
size. Children are the best guesses in order; with a ratio rule they are drawn without replacement.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree
from foredraft.core.tree_optimizer import OptimalTrees, best_size
from foredraft.drafters.common.acceptance import measure_acceptance, read_acceptance
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.draft_runner import DraftRunner, Forwards, RunnerDrafter, RunnerTreeBuilder
from foredraft.drafters.common.drawn_tree import TreeShape, build_static_tree
from foredraft.drafters.common.dynamic_tree import TreeLimits
from foredraft.drafters.common.templates import Template
from foredraft.engine.cost_model import CostTable, measure_costs
from foredraft.engine.step import SIZES
from foredraft.model.base import TargetModel
from foredraft.model.recording.replay import EAGER, Replay

NODES, DEPTH = 63, 10
"""Largest tree if the size is chosen; with the root its node count is one of ``step.SIZES``."""


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Size of the tree and acceptance rates.

    nodes: drafted nodes; by default chosen by measured costs.
    depth: levels of drafted nodes; by default chosen by measured costs.
    acceptance: acceptance rates of the first, second, ... child, such as 0.62/0.14/0.06. By default measured when first
        needed, on outputs of the target, separately for greedy and sampled rows (temperature 1).
    sampled_acceptance: the same for sampled rows, if it differs from acceptance.
    num_assistant_tokens_schedule: levels of the tree that are drafted: auto, the number with the most tokens per
        second; constant, all; or heuristic, transformers' rule of two more and one less.
    """

    nodes: int | None = field(default=None, metadata={"unset": "by cost"})
    depth: int | None = field(default=None, metadata={"unset": "by cost"})
    acceptance: str | None = field(default=None, metadata={"unset": "measured"})
    sampled_acceptance: str | None = field(default=None, metadata={"unset": "as acceptance"})

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        if any(number is not None and number < 1 for number in (self.nodes, self.depth)):
            raise OptionError("nodes and depth must be 1 or more.")
        for text in (self.acceptance, self.sampled_acceptance):
            if text is not None:
                read_acceptance(text)


class Planner:
    """Chooses the tree shapes for greedy and for sampled rows, each once at first use."""

    def __init__(self, options: Options, target: TargetModel, draft: TargetModel) -> None:
        self._options = options
        self._target = target
        self._draft = draft
        self._shapes: dict[bool, TreeShape] = {}

    def shape(self, greedy: bool) -> TreeShape:
        """The best tree for greedy or for sampled rows; the first call measures acceptance and costs."""
        if greedy not in self._shapes:
            template = self._template(greedy)
            with torch.inference_mode(False):  # compilers reject tensors of inference mode
                self._shapes[greedy] = TreeShape.of(template, self._draft.device)
        return self._shapes[greedy]

    def acceptance(self, greedy: bool) -> tuple[float, ...]:
        """Acceptance by rank, as given or measured."""
        given = self._options.acceptance
        if not greedy:
            given = self._options.sampled_acceptance or given
        if given is not None:
            return read_acceptance(given)
        return measure_acceptance(self._target, self._draft, temperature=0.0 if greedy else 1.0)

    def _template(self, greedy: bool) -> Template:
        nodes, depth = self._options.nodes, self._options.depth
        most, deepest = nodes or NODES, depth or min(DEPTH, nodes or DEPTH)
        trees = OptimalTrees.of(self.acceptance(greedy), most, deepest)
        if nodes is None or depth is None:
            sizes = [nodes] if nodes is not None else [size - 1 for size in SIZES if 1 < size <= 1 + NODES]
            depths = [depth] if depth is not None else list(range(1, deepest + 1))
            most, deepest, _ = best_size(trees, sizes, depths, *self._costs())
        return Template(trees.paths(most, deepest) or ((0,),))  # at least one token, even if none is ever accepted

    def _costs(self) -> tuple[CostTable, CostTable]:
        """Costs of forwards of the draft and of the target by number of nodes."""
        return measure_costs(self._draft, longest=1 + NODES), measure_costs(self._target, longest=1 + NODES)


@final
class Sequoia(RunnerDrafter[DraftRunner]):
    """Drafts Sequoia trees with a small model; see ``DraftRunner``.

    Args:
        model, target: the draft model and the target.
        vocab_size: width of the laws.
        replay: how its drafts run; see ``DraftRunner``.
    """

    def __init__(
        self, options: Options, model: TargetModel, target: TargetModel, vocab_size: int, replay: Replay = EAGER
    ) -> None:
        self.planner = Planner(options, target, model)
        nodes = options.nodes or NODES
        needs = Needs(max_nodes=nodes, max_depth=options.depth or min(DEPTH, nodes), scored=True, ahead=True)
        super().__init__(needs, DraftRunner(model, vocab_size, replay))

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._runner.planned(view, plan)
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        limits = self.planner.shape(view.warp.greedy).limits.within(plan)
        allowed = plan.on(view.lengths.device)
        return self._runner.draft("tree", view, limits.expanded, self._tree, allowed, limits)

    def _tree(self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        levels = self.planner.shape(view.warp.greedy).levels
        return build_static_tree(RunnerTreeBuilder(forwards, view), levels, allowed, limits)


def build(options: Options, context: BuildContext) -> Sequoia:
    """sequoia:PATH"""
    return Sequoia(options, context.model(context.path), context.target, context.vocab_size, context.replay)
