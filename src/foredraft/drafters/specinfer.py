"""SpecInfer (Miao et al., arXiv:2305.09781): one or several small models each draft a tree, and the trees are merged.

Each model expands its own tree; the expansion gives the number of children per node for each level. Merging makes equal
prefixes one node with the children of all trees. With a ratio rule, children are drawn independently from the model's
law, and each is verified with the law of the model that drew it: by traversal, or by the paper's multi-step speculative
sampling (algorithm 2, ``recursive`` here).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions, option
from foredraft.core.tree import TokenTree, merge_duplicates
from foredraft.drafters.common.model_trees import RunnerTreeBuilder
from foredraft.drafters.context import BuildContext
from foredraft.drafters.states.draft_runner import DraftRunner, Forwards
from foredraft.drafters.trees.shapes import Template, TreeLimits, TreeShape
from foredraft.drafters.trees.static import build_static_tree
from foredraft.model.base import TargetModel


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """The shape of the trees."""

    expansion: tuple[int, ...] = option(
        (1, 1, 3, 1), "children per node by level, for each model. The paper uses 1x1x3x1x1x1x1x1 for large targets."
    )
    merge: bool = option(True, "merge equal prefixes of the models' trees into one node.")

    law = Law.IID
    """The law of drafts for sampled rows with one model; with several it is ``IID_MANY``."""

    def __post_init__(self) -> None:
        if not self.expansion or min(self.expansion) < 1:
            raise OptionError("expansion must be whole numbers of 1 or more, one per level, such as 1x1x3x1.")


@final
class SpecInfer(Rewindable):
    """Drafts one tree with several models.

    Args:
        models: the draft models, all with the target's tokenizer.
        vocab_size: of the target.
    """

    def __init__(self, options: Options, models: Sequence[TargetModel], vocab_size: int) -> None:
        if not models:
            raise OptionError("specinfer needs at least one draft model.")
        self._options = options
        self._shape = TreeShape.of(Template.regular(options.expansion), models[0].device)
        self._law = Law.IID if len(models) == 1 else Law.IID_MANY
        limits = self._shape.limits
        needs = Needs(max_nodes=len(models) * limits.nodes, max_depth=limits.depth, law=self._law, ahead=True)
        self._runners = [DraftRunner(model, vocab_size) for model in models]
        self._trees = [runner.drafting("tree", self._tree) for runner in self._runners]
        super().__init__(needs, *self._runners)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        for runner in self._runners:  # the shortest context limits all
            plan = runner.within_context(view, plan)
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        limits = self._shape.limits.within(replace(plan, nodes=0), view)
        allowed = plan.on(view.lengths.device)
        drafts = []
        for number, (runner, tree) in enumerate(zip(self._runners, self._trees, strict=True)):
            drafts.append(runner.draft(tree, view, limits.expanded, allowed, limits, number))
        draft = _joined(drafts)
        if draft.q is None:
            return replace(draft, tree=merge_duplicates(draft.tree, keep_duplicates=False))
        return replace(draft, tree=merge_duplicates(draft.tree, keep_duplicates=True)) if self._options.merge else draft

    def _tree(
        self, view: View, forwards: Forwards, allowed: Int[Tensor, "B"], limits: TreeLimits, number: int
    ) -> Draft:
        """The tree of the model of this number."""
        builder, first = RunnerTreeBuilder(forwards, view), number * (self._shape.limits.nodes + 1)
        return build_static_tree(builder, self._shape.levels, allowed, limits, self._law, first)


def _joined(drafts: Sequence[Draft]) -> Draft:
    """All trees below one root: the first model's nodes, then the second's, ..."""
    tokens, parents = [drafts[0].tree.tokens], [drafts[0].tree.parents]
    before = tokens[0].shape[1] - 1
    for draft in drafts[1:]:
        own = draft.tree.parents[:, 1:]
        tokens.append(draft.tree.tokens[:, 1:])
        parents.append(torch.where(own > 0, own + before, own))
        before += own.shape[1]
    depth = max(draft.tree.depth for draft in drafts)
    whole = TokenTree(torch.cat(tokens, 1), torch.cat(parents, 1), depth=depth)

    def joined(values: Sequence[Tensor | None]) -> Tensor | None:
        parts = [each[:, min(number, 1) :] for number, each in enumerate(values) if each is not None]
        return torch.cat(parts, 1) if parts else None

    q, scores = joined([draft.q for draft in drafts]), joined([draft.scores for draft in drafts])
    return replace(drafts[0], tree=whole, q=q, scores=scores)


def build(options: Options, context: BuildContext) -> SpecInfer:
    """specinfer:PATH, specinfer:PATH+PATH"""
    models = [context.model(path) for path in context.paths]
    return SpecInfer(options, models, context.vocab_size)
