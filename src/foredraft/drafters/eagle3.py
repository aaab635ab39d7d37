"""EAGLE-3 (Li et al., arXiv:2503.01840): a head on three fused layers of the target, and EAGLE-2's tree."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.drafters.dynamic import DynamicTree, Shape
from foredraft.nets.eagle import EagleNet


@dataclass(frozen=True, slots=True)
class Options:
    """The shape of the tree.

    nodes: drafted nodes at most (the published code's total_token less the root).
    depth: levels of drafted nodes (the published code's depth plus one).
    top_k: nodes of a level that are expanded, and children that are scored of each.
    num_assistant_tokens_schedule: constant, always the whole tree; cost, what the measured costs make best; heuristic,
        transformers' up and down of the depth; auto is cost.
    rope_theta: the base of the head's rotary positions, where its config is wrong about it.
    taps: the target's hidden layers that the head reads, such as 2x16x29, where its files are wrong or silent.
    """

    nodes: int = 23
    depth: int = 6
    top_k: int = 4
    num_assistant_tokens_schedule: str = "auto"
    rope_theta: float | None = None
    taps: tuple[int, ...] | None = None

    @property
    def law(self) -> Law:
        return Law.FIXED

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.top_k) < 1:
            raise OptionError("nodes, depth and top_k must be 1 or more.")


@final
class Eagle3Drafter(Drafter):
    """EAGLE-2's tree on an EAGLE-3 head, whose features are fused and whose vocabulary may be smaller."""

    def __init__(self, options: Options, net: EagleNet) -> None:
        self._tree = DynamicTree(net, Shape(options.nodes, options.depth, options.top_k))
        self.needs = Needs(net.taps, options.nodes, options.depth, scored=True)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._tree.admit(row, hidden)

    def propose(self, view: View, plan: Plan) -> Draft:
        return self._tree.propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._tree.commit(view, verdict, out)

    def release(self, row: int) -> None:
        self._tree.release(row)
