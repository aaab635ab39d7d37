"""Base class of drafters that copy tokens for some rows, beside the drafts of another drafter.

Whether a row has a copy, and how long it is, depends on outputs so far and on which rows run beside it: not on what is
drawn in this step. So drawn drafts of the other rows are verified as if there were no copies.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import ByRow, Drafter, Plan, RowState, View
from foredraft.core.transfer import to_device
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.drafters.common.wrapper import DrafterWrapper
from foredraft.engine.draft_check import form_fault
from foredraft.engine.fitting import SIZES, resized

NODES, NODES_GPU = 64, 256
"""Most nodes of a batch that is as wide as its longest copy, on a CPU and elsewhere."""
LONGEST_MATCH = 16
"""Tokens of a match that count for how likely its copy is."""
ODDS = ((-0.9, 1.3), (-2.2, 1.8))
"""Logistic regression: the token after a match of m tokens is right with log-odds of a + b * log m, for temperatures up
to 0.5 and above. Fitted on 9,400 positions of answers of SmolLM2-135M to edits, summaries, chats, code, questions
and maths at T=0 and T=1, where 25 % and 11 % are right after one token, 69 % and 53 % after three, and 97 % and 87 %
after sixteen. ``Worth`` calibrates it further."""


class CopyingDrafter(DrafterWrapper):
    """Copies for the rows that ``_chains`` names; the others have the inner drafter's copies or drafts."""

    def __init__(self, inner: Drafter, *states: RowState) -> None:
        self._copied = ByRow[Sequence[int]]()  # of the rows of the next draft
        super().__init__(inner, self._copied, *states)
        self._inner_copies: tuple[int, ...] = ()

    @abstractmethod
    def _chains(self, view: View, limits: Sequence[int]) -> list[Sequence[int]]:
        """The tokens that each row copies in the next step, as many as its limit at most."""

    def copies(self, view: View, limits: Sequence[int]) -> tuple[int, ...]:
        chains = self._chains(view, limits)
        self._copied.clear()
        self._copied.update(zip(view.rows, chains, strict=True))
        left = [0 if chain else limit for limit, chain in zip(limits, chains, strict=True)]
        self._inner_copies = self._inner.copies(view, left)
        own = tuple(map(len, chains))
        return tuple(map(max, own, self._inner_copies)) if self._inner_copies else own

    def propose(self, view: View, plan: Plan) -> Draft:
        chains = [self._copied.get(row, ()) for row in view.rows] if plan.copies else []
        if not any(chains):
            return self._inner.propose(view, plan)
        inner = self._inner_copies if any(self._inner_copies) else ()
        if not plan.length and not inner and view.lengths.device.type == "cpu":
            return _on_host(view.host_roots, chains)
        drafts = plan.length or inner
        draft = self._inner.propose(view, replace(plan, copies=inner)) if drafts else Draft(view.root_tree, Law.FIXED)
        if form_fault(draft, view) is not None:  # then the step refuses it
            return draft
        return with_copies(draft, chains)


def widest_copy(view: View) -> int:
    """The most nodes of a row with a copy: more would exceed the cache, or take the other rows too much time, since all
    rows of a forward have the same width."""
    most = (NODES if view.lengths.device.type == "cpu" else NODES_GPU) // len(view.rows)
    most = min(most, view.kv_size.slots - max(view.host_lengths) + 1)
    return max((size for size in SIZES if size <= most), default=1)


def with_copies(draft: Draft, chains: Sequence[Sequence[int]]) -> Draft:
    """The draft with these chains in place of the trees of their rows; rows without one keep theirs."""
    longest = max(map(len, chains))
    draft = resized(draft, max(draft.tree.tokens.shape[1], 1 + longest))
    tree, depth = draft.tree, max(draft.tree.depth, longest)
    rows, nodes = tree.tokens.shape
    table = [[*chain, *[PAD] * (nodes - 1 - len(chain))] for chain in chains]
    copied = to_device([token for line in table for token in line], tree.tokens.device).view(rows, nodes - 1)
    above = torch.where(copied >= 0, torch.arange(nodes - 1, device=copied.device), PAD)
    mine = copied[:, :1] >= 0
    tokens = torch.cat([tree.tokens[:, :1], torch.where(mine, copied.clamp(min=0), tree.tokens[:, 1:])], 1)
    parents = torch.cat([tree.parents[:, :1], torch.where(mine, above, tree.parents[:, 1:])], 1)
    whose = mine[:, 0] if draft.copied is None else mine[:, 0] | draft.copied
    return replace(draft, tree=TokenTree(tokens, parents, depth, tree.linear, tree.turns), copied=whose)


def _on_host(roots: Sequence[int], chains: Sequence[Sequence[int]]) -> Draft:
    """A draft of copies alone, without operators of torch."""
    longest = max(map(len, chains))
    missing = [longest - len(chain) for chain in chains]
    tokens = [[root, *chain, *[0] * left] for root, chain, left in zip(roots, chains, missing, strict=True)]
    parents = [[ROOT, *range(len(chain)), *[PAD] * left] for chain, left in zip(chains, missing, strict=True)]
    copied = torch.tensor([len(chain) > 0 for chain in chains])
    return Draft(TokenTree.on_host(tokens, parents, longest, linear=True), Law.FIXED, copied=copied)
