"""Static trees with one head per level: the base class of Medusa and Hydra.

A node's children are the best guesses of its level's head; if drafts are drawn, they are drawn from the head's law.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Trainable, View
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.tree import TokenTree
from foredraft.drafters.states.feature_cache import FeatureCache
from foredraft.drafters.states.last_hidden import LastHidden
from foredraft.drafters.trees.builder import TreeBuilder
from foredraft.drafters.trees.candidates import at_places
from foredraft.drafters.trees.shapes import NAMED, Rates, Template, TreeLimits, TreeShape, best_template
from foredraft.drafters.trees.static import build_static_tree
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Medusa
from foredraft.model.linear.packed import any_weight
from foredraft.model.ops import Ops
from foredraft.model.recording.segment import Segment


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """The shape of the tree."""

    tree: str = option(
        "measured",
        "medusa (the published tree of 63 nodes), eagle (25 nodes), children by level, such as 4x2x1, or measured: "
        "the best tree for the heads' accuracies, which training saves with them.",
    )
    nodes: int = option(24, "nodes of a measured tree.")
    law = Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        check_bounds(self, least={"nodes": 1})
        if self.tree != "measured":
            Template.of(self.tree)

    def template(self, accuracies: Rates | None, heads: int) -> Template:
        """The chosen tree, no deeper than the number of heads.

        Without measured accuracies, ``measured`` uses the published tree, whose nodes are listed best first.
        """
        if self.tree != "measured":
            paths = Template.of(self.tree).paths
        elif accuracies:
            paths = best_template(accuracies[:heads], self.nodes).paths
        else:
            paths = NAMED["medusa"][: self.nodes]
        return Template(tuple(path for path in paths if len(path) <= heads))


N = TypeVar("N", Medusa, Hydra)


class LevelHeadsDrafter(Trainable, Generic[N]):
    """Builds a static tree with the heads. Subclasses compute the heads' logits.

    Args:
        state: of each row between steps, from which the heads draft.
        ops: of the target.
    """

    def __init__(self, options: Options, net: N, state: FeatureCache | LastHidden, ops: Ops) -> None:
        accuracies, device = net.config.accuracies, any_weight(net).device
        template = options.template(accuracies, net.config.num_heads)
        needs = Needs(max_nodes=template.nodes, max_depth=template.depth, scored=True, ahead=True)
        super().__init__(needs, state)
        self._state = state
        self._net = net
        self.ops = ops
        self._shape = TreeShape.of(template, device)
        self._tree = Segment("tree", self._build, state.rows)

    @property
    def network(self) -> N:
        return self._net

    @abstractmethod
    def logits(
        self, hidden: Float[Tensor, "B 1 H"], paths: Int[Tensor, "B F K"], head: int
    ) -> Float[Tensor, "B F v"] | Float[Tensor, "B 1 v"]:
        """Logits of one head after each of F paths of K = head + 1 tokens, root included."""

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        if not plan.length:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        hidden, known = self._state.extend(view, 1)
        allowed = plan.on(hidden.device) * known
        return self._tree(view, hidden, allowed, self._shape.limits.within(plan, view, cheap=True))

    def _build(
        self, view: View, hidden: Float[Tensor, "B 1 H"], allowed: Int[Tensor, "B"], limits: TreeLimits
    ) -> Draft:
        return build_static_tree(_HeadsBuilder(self, view, hidden), self._shape.levels, allowed, limits)


@final
class _HeadsBuilder(TreeBuilder):
    """A tree of heads: level i has the logits of head i. ``hidden``: the target's states at the roots.

    Logits that do not depend on the path are computed once for all nodes of a level. Shares say less about a path than
    the measured accuracies that give the tree its shape.
    """

    in_place = True

    def __init__(self, heads: LevelHeadsDrafter[Any], view: View, hidden: Float[Tensor, "B 1 H"]) -> None:
        self._heads = heads
        self._hidden = hidden
        self._paths = view.roots[:, None, None]  # [B, F, K]: the tokens from the root to each frontier node
        logits = heads.logits(hidden, self._paths, 0)
        super().__init__(view, logits, heads.network.target.vocab_size, ops=heads.ops)

    def _read_level(
        self, tokens: Int[Tensor, "B F"], places: Int[Tensor, "B F"]
    ) -> Float[Tensor, "B F v"] | Float[Tensor, "B 1 v"]:
        self._paths = torch.cat([at_places(self._paths, places), tokens[..., None]], 2)
        return self._heads.logits(self._hidden, self._paths, self._paths.shape[2] - 1)
