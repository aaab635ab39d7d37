"""Base classes of drafters of trees with a draft model."""

from abc import abstractmethod
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.states.draft_runner import DraftRunner, Forwards
from foredraft.drafters.trees.builder import TreeBuilder
from foredraft.drafters.trees.dynamic import build_dynamic_tree
from foredraft.drafters.trees.shapes import TreeLimits


@final
class RunnerTreeBuilder(TreeBuilder):
    """A tree built with a draft model."""

    def __init__(self, forwards: Forwards, view: View) -> None:
        logits = forwards.root()
        super().__init__(view, logits, logits.shape[-1], ops=forwards.ops)
        self._forwards = forwards

    def _read_level(self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]) -> Float[Tensor, "B F V"]:
        return self._forwards.level(self.read, self.starts[-1])


class ModelTreeDrafter(Rewindable):
    """A drafter of trees with one draft model. Subclasses say how large a tree is, and how it is built."""

    def __init__(self, needs: Needs, runner: DraftRunner) -> None:
        super().__init__(needs, runner)
        self._runner = runner
        self._tree = runner.drafting("tree", self._built)

    @abstractmethod
    def limits(self, view: View) -> TreeLimits:
        """The limits of a draft for these rows, apart from the plan's."""

    @abstractmethod
    def tree(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        """The tree; ``allowed`` is the number of levels that each row may have."""

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        plan = self._runner.within_context(view, plan)
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        limits = self.limits(view).within(plan, view)
        return self._runner.draft(self._tree, view, limits.expanded, plan.on(view.lengths.device), limits)

    def _built(self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        return self.tree(RunnerTreeBuilder(forwards, view), allowed, limits)


class DynamicModelDrafter(ModelTreeDrafter):
    """A drafter of dynamic trees with one draft model, within limits that do not change."""

    def __init__(self, limits: TreeLimits, runner: DraftRunner) -> None:
        self._limits = limits
        depth = min(limits.depth, limits.nodes)
        super().__init__(Needs(max_nodes=limits.nodes, max_depth=depth, scored=True, ahead=True), runner)

    def limits(self, view: View) -> TreeLimits:
        return self._limits

    def tree(self, builder: RunnerTreeBuilder, allowed: Int[Tensor, "B"], limits: TreeLimits) -> Draft:
        return build_dynamic_tree(builder, allowed, limits)
