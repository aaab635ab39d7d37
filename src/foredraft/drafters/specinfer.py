"""SpecInfer (Miao et al., arXiv:2305.09781): one or several small models each draft a tree, and the trees become one.

Each model expands a tree of its own, as many children a node on each level as the expansion says, drawn independently
from its law. Merged, equal prefixes are one node with the children of all, which is what lets one model go on from the
other's guess. Each child is verified by the law of the model that drew it: by traversal, or by the paper's multi-step
speculative sampling (algorithm 2, ``recursive`` here). A greedy batch gets the likeliest tokens of each model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree, merge_duplicates
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.draft_runner import DraftRunner, ReaderGrowing
from foredraft.drafters.common.templates import Template
from foredraft.drafters.common.tree_builder import Level, SiblingSampling, fill
from foredraft.drafters.common.tree_ops import draw_independent
from foredraft.model.base import TargetModel


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Of SpecInfer.

    expansion: children of a node by level, for each model. The paper uses 1x1x3x1x1x1x1x1 for large targets.
    merge: merge equal prefixes of the models' trees into one node.
    """

    expansion: tuple[int, ...] = (1, 1, 3, 1)
    merge: bool = True

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows of one model; of several it is ``IID_MANY``."""
        return Law.IID

    def __post_init__(self) -> None:
        if not self.expansion or min(self.expansion) < 1:
            raise OptionError("expansion must be whole numbers, 1 or more, one a level, such as 1x1x3x1.")


@final
class SpecInfer(Rewindable):
    """Several models that read along, and one tree.

    Args:
        models: the drafts, all of the target's tokenizer.
        vocab_size: of the target.
    """

    def __init__(self, options: Options, models: Sequence[TargetModel], vocab_size: int) -> None:
        if not models:
            raise OptionError("specinfer needs at least one draft model.")
        self._options = options
        self._readers = [DraftRunner(model, vocab_size) for model in models]
        template = Template.regular(options.expansion)
        self._levels = Level.all_of(template, models[0].device)
        self._nodes = template.nodes
        self._law = Law.IID if len(models) == 1 else Law.IID_MANY
        self.needs = Needs(max_nodes=len(models) * self._nodes, max_depth=len(options.expansion), law=self._law)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        for reader in self._readers:
            reader.admit(row)

    def rewind(self, row: int, length: int) -> None:
        for reader in self._readers:
            reader.rewind(row, length)

    def release(self, row: int) -> None:
        for reader in self._readers:
            reader.release(row)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        for reader in self._readers:  # the shortest context of all
            plan = reader.within_context(view, plan)
        levels = self._levels[: plan.length]
        if not levels:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        allowed = torch.tensor(plan.lengths, device=view.lengths.device)
        grown = []
        for number, reader in enumerate(self._readers):
            growing = ReaderGrowing(reader, view, reader.read(view, self._nodes))
            drawing = SiblingSampling(draw_independent, self._law, number * (self._nodes + 1))
            grown.append(fill(growing, levels, allowed, drawing))
        draft = _side_by_side(grown)
        if draft.q is None:
            return replace(draft, tree=merge_duplicates(draft.tree, keep_duplicates=False))
        return replace(draft, tree=merge_duplicates(draft.tree, keep_duplicates=True)) if self._options.merge else draft


def _side_by_side(grown: Sequence[Draft]) -> Draft:
    """All trees below one root: the first model's nodes, then the second's, ..."""
    first, count = grown[0].tree, grown[0].tree.tokens.shape[1] - 1
    tokens, parents = [first.tokens], [first.parents]
    for number, draft in enumerate(grown[1:], start=1):
        own = draft.tree.parents[:, 1:]
        tokens.append(draft.tree.tokens[:, 1:])
        parents.append(torch.where(own > 0, own + number * count, own))
    whole = TokenTree(torch.cat(tokens, 1), torch.cat(parents, 1), depth=first.depth)
    laws = [draft.q[:, min(number, 1) :] for number, draft in enumerate(grown) if draft.q is not None]
    return replace(grown[0], tree=whole, q=torch.cat(laws, 1) if laws else None)


def build(options: Options, context: BuildContext) -> SpecInfer:
    """specinfer:PATH, specinfer:PATH+PATH"""
    return SpecInfer(options, [context.model(path) for path in context.paths], context.vocab_size)
