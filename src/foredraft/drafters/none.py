"""No drafting: every step is one forward and one token."""

from dataclasses import dataclass
from typing import final

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, Rewindable, View
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

    def propose(self, view: View, plan: Plan) -> Draft:
        return Draft(TokenTree.root(view.roots), Law.FIXED)

    def rewind(self, row: int, length: int) -> None: ...


def build(options: Options, supplies: Supplies) -> NoDrafter:
    """none"""
    return NoDrafter()
