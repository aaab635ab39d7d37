"""No drafting: every step is one forward and one token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Plan, Rewindable, StepOut, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.supplies import Supplies


@dataclass(frozen=True, slots=True)
class Options:
    """There is nothing to choose."""

    @property
    def law(self) -> Law:
        return Law.FIXED


@final
class NoDrafter(Rewindable):
    """Plain decoding, and the smallest drafter there is."""

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None: ...

    def propose(self, view: View, plan: Plan) -> Draft:
        return Draft(TokenTree.root(view.roots), Law.FIXED)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None: ...

    def rewind(self, row: int, length: int) -> None: ...

    def release(self, row: int) -> None: ...


def build(options: Options, supplies: Supplies) -> NoDrafter:
    """none"""
    return NoDrafter()
