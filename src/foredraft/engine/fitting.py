"""From a drafter's draft to the one that a step verifies: what the plan asks for and what pays, in one shape."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan
from foredraft.core.transfer import to_device
from foredraft.core.tree import PAD, ROOT, TokenTree, host_depths
from foredraft.core.worth import DraftNodes, Worth

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Node counts used for forwards on a CPU; larger ones are multiples of 32."""
_ROOT_ALONE = DraftNodes((ROOT,), None)


def round_up(nodes: int) -> int:
    """The next larger node count used for forwards. CPU kernels are compiled for each new node count, which costs
    more than padding to a coarse set of counts."""
    return next((size for size in SIZES if size >= nodes), -(-nodes // 32) * 32)


def fitted(draft: Draft, plan: Plan, *, any_width: bool, exact: int = 0, recorded: bool = False) -> Draft:
    """The draft that is verified: no nodes in rows for which nothing was planned, those nodes of picked drafts that pay
    (``Plan.worth``), and a node count that forwards are made for.

    Args:
        any_width: on a CPU too, these are all counts; see ``TargetModel``.
        exact: the node count of every forward, if not 0.
        recorded: forwards are recorded, so they should have few shapes.
    """
    tree, scores, reads = draft.tree, draft.scores, draft.tree.tokens.device.type == "cpu"
    if tree.tokens.shape[1] == 1 and not exact:
        return draft
    if not all(map(max, plan.lengths, plan.copies) if plan.copies else plan.lengths):
        asked = to_device(plan.lengths, tree.tokens.device) > 0
        tree = tree.only(asked if draft.copied is None else asked | draft.copied)
    if plan.worth is not None and plan.worth.prices and draft.law is Law.FIXED:
        tree, scores = _paying(replace(draft, tree=tree), plan.worth)
    count = tree.tokens.shape[1]
    if exact:
        count = exact
    elif reads:  # reading values does not synchronise here
        count = tree.used if any_width else round_up(tree.used)
    elif recorded:
        count = round_up(count)
    draft = resized(replace(draft, tree=tree, scores=scores), count)
    if recorded and draft.tree.linear:  # chains of one node count have one shape
        return replace(draft, tree=replace(draft.tree, depth=count - 1))
    if recorded or exact or not reads or draft.tree.linear:
        return draft
    tree = draft.tree.as_chain() if draft.q is None else draft.tree.counted(without=draft.copied)
    return replace(draft, tree=tree)


def resized(draft: Draft, nodes: int) -> Draft:
    """The draft padded or cut at the end to exactly this many nodes."""
    tree, q, scores = draft.tree, draft.q, draft.scores
    missing = nodes - tree.tokens.shape[1]
    if missing == 0:
        return draft
    pad = torch.nn.functional.pad
    tokens, parents = pad(tree.tokens, (0, missing)), pad(tree.parents, (0, missing), value=PAD)
    if q is not None:
        q = pad(q, (0, 0, 0, missing))
    if scores is not None:
        scores = pad(scores, (0, missing))
    depth = min(tree.depth, nodes - 1)
    return replace(draft, tree=TokenTree(tokens, parents, depth, tree.linear, tree.turns), q=q, scores=scores)


def _paying(draft: Draft, worth: Worth) -> tuple[TokenTree, Float[Tensor, "B K"] | None]:
    """The tree of the nodes that pay, and of all nodes of copies, whose lengths the drafter has chosen, with their
    scores. A node comes with its parent."""
    tree, rows = draft.tree, draft.tree.lists[1]
    scores = [None] * len(rows) if draft.scores is None else draft.scores.tolist()
    copied = [False] * len(rows) if draft.copied is None else draft.copied.tolist()
    own = [DraftNodes(*row) for row in zip(rows, scores, strict=True)]
    own = [_ROOT_ALONE if copy else nodes for copy, nodes in zip(copied, own, strict=True)]
    kept = [
        [node for node, parent in enumerate(row) if parent != PAD] if copy else nodes
        for copy, row, nodes in zip(copied, rows, worth.keep(own), strict=True)
    ]
    width = max(map(len, kept))
    if width == tree.tokens.shape[1]:
        return tree, draft.scores
    if width == 1:
        return TokenTree.root(tree.tokens[:, 0]), None
    index, parents, depth = [], [], 0
    for old, nodes in zip(rows, kept, strict=True):
        places = {node: place for place, node in enumerate(nodes)}
        index.append(nodes + [0] * (width - len(nodes)))
        parents.append([places.get(old[node], ROOT) for node in nodes] + [PAD] * (width - len(nodes)))
        depth = max(depth, *host_depths(parents[-1]))
    chosen = to_device(index, tree.tokens.device)
    paying = TokenTree(tree.tokens.gather(1, chosen), to_device(parents, chosen.device), depth, tree.linear)
    return paying, None if draft.scores is None else draft.scores.gather(1, chosen)
