"""Sequoia (Chen et al., arXiv:2402.12374): the tree that is best for how often each child is accepted, and for what
forwards cost.

How often the j-th child of a node is the accepted one is measured once. A dynamic programme finds the best tree of each
size, and measured costs choose the size. Children are drawn without replacement, with fresh random numbers each step.
"""

from dataclasses import dataclass, field
from typing import final

import torch

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree
from foredraft.core.tree_optimizer import OptimalTrees, best_size
from foredraft.drafters.common.acceptance import measure_acceptance, read_acceptance
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.draft_runner import DraftRunner, ReaderGrowing, ReadingDrafter
from foredraft.drafters.common.templates import Template
from foredraft.drafters.common.tree_builder import Level, fill
from foredraft.engine.cost_model import CostTable, measure_costs
from foredraft.engine.step import SIZES
from foredraft.model.base import TargetModel

NODES, DEPTH = 63, 10
"""Of trees whose size is chosen: at most so many drafted nodes, which with the root make a size of forwards."""
ROW = 1 / 40
"""What another node adds to a forward of one, where no time may be measured: about that of packed weights on a CPU."""


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """The tree, or what it is made from.

    nodes: drafted nodes; by default the measured costs decide.
    depth: levels of drafted nodes; by default the measured costs decide.
    acceptance: how often the first, second, ... child is the accepted one, such as 0.62/0.14/0.06. By default it is
        measured when first needed, on outputs of the target, for greedy and for sampled rows (temperature 1) apart.
    sampled_acceptance: the same for sampled rows, if it differs from acceptance.
    num_assistant_tokens_schedule: how many levels of the tree are drafted: auto, what brings the most tokens a second;
        constant, all; or heuristic, transformers' up and down. With constant and heuristic the tree for sampled rows
        is sized by what forwards have to read instead of by the clock, so that a seed reproduces the output.
    """

    nodes: int | None = field(default=None, metadata={"unset": "by cost"})
    depth: int | None = field(default=None, metadata={"unset": "by cost"})
    acceptance: str | None = field(default=None, metadata={"unset": "measured"})
    sampled_acceptance: str | None = field(default=None, metadata={"unset": "as acceptance"})

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.WITHOUT_REPLACEMENT

    @property
    def timed(self) -> bool:
        """Whether the size of trees for sampled rows may depend on measured times."""
        return self.num_assistant_tokens_schedule == "auto"

    def __post_init__(self) -> None:
        if any(number is not None and number < 1 for number in (self.nodes, self.depth)):
            raise OptionError("nodes and depth must be 1 or more.")
        for text in (self.acceptance, self.sampled_acceptance):
            if text is not None:
                read_acceptance(text)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree's form: its template, and the same level by level as tensors."""

    template: Template
    levels: tuple[Level, ...]


class Planner:
    """The shapes for greedy and for sampled rows. Each is settled when it is first wanted, and stays."""

    def __init__(self, options: Options, target: TargetModel, draft: TargetModel) -> None:
        self._options = options
        self._target = target
        self._draft = draft
        self._shapes: dict[bool, Shape] = {}

    def shape(self, greedy: bool) -> Shape:
        """The best tree for greedy rows, or for sampled ones; the first time, this measures what it has to."""
        if greedy not in self._shapes:
            template = self._template(greedy)
            self._shapes[greedy] = Shape(template, Level.all_of(template, self._draft.device))
        return self._shapes[greedy]

    def acceptance(self, greedy: bool) -> tuple[float, ...]:
        """As given, or measured."""
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
            most, deepest, _ = best_size(trees, sizes, depths, *self._costs(timed=greedy or self._options.timed))
        return Template(trees.paths(most, deepest) or ((0,),))  # a draft that is never right is asked for one token

    def _costs(self, timed: bool) -> tuple[CostTable, CostTable]:
        """What a forward of the draft and of the target costs by its number of nodes."""
        if timed:
            return measure_costs(self._draft, longest=1 + NODES), measure_costs(self._target, longest=1 + NODES)
        bytes_read = (self._draft.weight_bytes, self._target.weight_bytes)
        draft, target = (CostTable((1, 2), (read, read * (1 + ROW))) for read in map(float, bytes_read))
        return draft, target


@final
class Sequoia(ReadingDrafter[DraftRunner]):
    """Drafts with a model that reads each text beside the target; see ``DraftRunner``.

    Args:
        model, target: acceptance and costs are theirs.
        vocab_size: how wide laws are.
    """

    def __init__(self, options: Options, model: TargetModel, target: TargetModel, vocab_size: int) -> None:
        self.planner = Planner(options, target, model)
        nodes = options.nodes or NODES
        needs = Needs(max_nodes=nodes, max_depth=options.depth or min(DEPTH, nodes))
        super().__init__(DraftRunner(model, vocab_size), needs)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._reader.within_context(view, plan)
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        shape = self.planner.shape(view.warp.greedy)
        logits = self._reader.read(view, shape.template.nodes)
        allowed = torch.tensor(plan.lengths, device=view.lengths.device)
        return fill(ReaderGrowing(self._reader, view, logits), shape.levels[: plan.length], allowed)


def build(options: Options, context: BuildContext) -> Sequoia:
    """sequoia:PATH"""
    return Sequoia(options, context.model(context.path), context.target, context.vocab_size)
