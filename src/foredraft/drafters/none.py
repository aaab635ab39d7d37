"""No drafting: every step is one forward and one token."""

from dataclasses import dataclass
from typing import final

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, Rewindable, View
from foredraft.core.options import DrafterOptions
from foredraft.core.tree import TokenTree
from foredraft.drafters.context import BuildContext


@dataclass(frozen=True, slots=True)
class Options(DrafterOptions):
    """No options."""


@final
class NoDrafter(Rewindable):
    """Plain decoding: always drafts the root alone."""

    def propose(self, view: View, plan: Plan) -> Draft:
        return Draft(TokenTree.root(view.roots), Law.FIXED)


def build(options: Options, context: BuildContext) -> NoDrafter:
    """none"""
    return NoDrafter()
