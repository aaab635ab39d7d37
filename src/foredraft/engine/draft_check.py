"""Validate drafts, so that a faulty drafter raises an error and never changes the output.

Shapes, types and the law are checked on the host before the target's forward, and so are the values of a draft that is
there. Values on a device are checked by it, and the outcome is read back with the step's results, without an extra
synchronisation.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import View
from foredraft.core.errors import DrafterError
from foredraft.core.tree import PAD, ROOT, TokenTree, host_depths

_ROUNDING = 1e-2
"""Tolerance for the sum of q; half-precision rounding stays below it."""


class Proposed(NamedTuple):
    """A draft as proposed, the rows whose values passed the device check, and what an exact diagnosis needs."""

    sound: Bool[Tensor, "B"]
    draft: Draft
    view: View
    vocab_size: int
    name: str

    @property
    def columns(self) -> Int[Tensor, "B 4"]:
        """The check's outcome for each row, to be read back with the step's results."""
        tree = self.draft.tree
        return torch.cat([self.sound[:, None], tree.parents[:, :1], tree.tokens[:, :1], self.view.roots[:, None]], 1)

    def judge(self, table: list[list[int]], depths: list[int], most: int) -> None:
        """Raise for the first faulty row.

        Args:
            table: the values of ``columns``.
            depths: of the longest path in each row.
            most: the depth of the tree that was verified.

        Raises:
            DrafterError: names the drafter and the fault.
        """
        for row, ((sound, parent, token, root), depth) in enumerate(zip(table, depths, strict=True)):
            fault = None
            if not (sound and parent == ROOT and token == root):
                fault = _fault(self.draft, self.view, self.vocab_size, row, root)
            if depth > most:
                fault = fault or f"a path of {depth} tokens is deeper than the {most} of tree.depth"
            if fault is not None:
                raise DrafterError(f"{self.name} proposed a draft that cannot be verified: {fault} (row {row}).")


def checked(draft: object, view: View, vocab_size: int, name: str) -> tuple[Draft, Proposed | None]:
    """Check a draft and make it safe to index: nodes with an invalid parent or token become padding.

    Returns:
        the safe draft, and what is left to judge; None if the host has found nothing wrong.

    Raises:
        DrafterError: its shapes, types or law are wrong.
    """
    fault = form_fault(draft, view, vocab_size)
    if fault is not None or not isinstance(draft, Draft):
        raise DrafterError(f"{name} proposed a draft that cannot be verified: {fault}.")
    draft = _bounded(draft)
    tree = draft.tree
    if draft.q is None and tree.tokens.device.type == "cpu" and _is_sound(draft, view, vocab_size):
        return draft, None
    tokens, parents = tree.tokens, tree.parents
    above = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
    absent = parents == PAD
    clamped = tokens.clamp(0, vocab_size - 1)
    right = parents == above if tree.linear else (parents >= above.clamp(max=0)) & (parents <= above)
    right = (right & (clamped == tokens)) | absent
    sound = right
    if draft.law is Law.CHAIN and not tree.linear:
        sound = sound & ~_has_elder_sibling(parents)
    if draft.q is not None and not view.warp.greedy:
        totals = draft.q.sum(-1)
        # ``verify`` skips nodes whose q is all 0 or NaN
        drawn = (draft.q.gather(2, clamped[..., None])[..., 0] > 0) & ((totals - 1).abs() <= _ROUNDING) | absent
        drawn = drawn | ~(totals > 0)
        if view.warp.greedy_rows is not None:
            drawn = drawn | view.warp.greedy_rows[..., 0]
        drawn[:, 0] = True
        if draft.copied is not None:
            drawn |= draft.copied[:, None]
        sound = sound & drawn
    placed = torch.where(right, parents, PAD)
    placed[:, 0] = ROOT
    safe = TokenTree(clamped, placed, tree.depth, tree.linear, tree.turns)
    return replace(draft, tree=safe), Proposed(sound.all(1), draft, view, vocab_size, name)


def _bounded(draft: Draft) -> Draft:
    """The draft with bounds that its nodes could reach: tensors are as large as ``depth`` and ``turns`` say."""
    tree, most = draft.tree, draft.tree.tokens.shape[1] - 1
    turns = None if tree.turns is None else tuple(min(count, most) for count in tree.turns[:most])
    if tree.depth <= most and turns == tree.turns:
        return draft
    return replace(draft, tree=replace(tree, depth=min(tree.depth, most), turns=turns))


def _is_sound(draft: Draft, view: View, vocab_size: int) -> bool:
    """Whether no row of picked tokens has a fault, its padding holds tokens and its nodes keep to ``tree.depth``; reads
    the values."""
    tree = draft.tree
    for root, tokens, parents in zip(view.host_roots, *tree.lists, strict=True):
        if _node_fault(root, tokens, parents, tree.linear, vocab_size) is not None:
            return False
        if len(parents) - 1 > tree.depth and max(host_depths(parents)) > tree.depth:
            return False
    return True


def _fault(draft: Draft, view: View, vocab_size: int, row: int, root: int) -> str | None:
    """Describe the fault of a row, on the host. None if the only fault is a q that is all 0 or NaN: ``verify``
    skips such nodes."""
    greedy = view.warp.greedy_rows
    drawn = None if draft.q is None or view.warp.greedy or (greedy is not None and bool(greedy[row])) else draft.q
    drawn = None if draft.copied is not None and bool(draft.copied[row]) else drawn
    tokens, parents = (values[row] for values in draft.tree.lists)
    held = [0 if parent == PAD else token for token, parent in zip(tokens, parents, strict=True)]
    fault = _node_fault(root, held, parents, draft.tree.linear, vocab_size)
    if fault is not None:
        return fault
    seen: set[int] = set()
    for node in (node for node in range(1, len(tokens)) if parents[node] != PAD):
        token, parent = tokens[node], parents[node]
        if draft.law is Law.CHAIN and parent in seen:
            return f"its law is {draft.law.value!r}, but node {parent} has several children"
        seen.add(parent)
        total = 0.0 if drawn is None else float(drawn[row, node].sum())
        if drawn is None or not total > 0:
            continue
        if abs(total - 1) > _ROUNDING:
            return f"the q of node {node} sums to {total:.4g}, and must sum to 1"
        if drawn[row, node, token] <= 0:
            return f"node {node} is token {token}, to which its q gives no probability, so q is not its law"
    return None


def _node_fault(root: int, tokens: list[int], parents: list[int], linear: bool, vocab_size: int) -> str | None:
    """What is wrong with a row's root, parents or tokens. Every step of picked drafts asks, so it is quick."""
    if tokens[0] != root or parents[0] != ROOT:
        return f"node 0 is token {tokens[0]} below {parents[0]}, and must be the root, token {root} below {ROOT}"
    for before, parent in enumerate(parents[1:]):
        if not (parent == before if linear else 0 <= parent <= before) and parent != PAD:
            expected = before if linear else f"one of 0 to {before}"
            return f"the parent of node {before + 1} is {parent}, and must be {expected}, or {PAD} for padding"
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        node, token = next((node, token) for node, token in enumerate(tokens) if not 0 <= token < vocab_size)
        return f"node {node} is token {token}, and the target's tokens are 0 to {vocab_size - 1}"
    return None


def _has_elder_sibling(parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """True for nodes with an earlier sibling."""
    same = (parents[:, :, None] == parents[:, None]) & (parents != PAD)[:, None]
    return same.tril(-1).any(2)


def form_fault(draft: object, view: View, vocab_size: int | None = None) -> str | None:
    """What is wrong with a draft's shapes, types or law; None if nothing is. ``vocab_size``: see ``checked``; None for
    any."""
    if not isinstance(draft, Draft) or not isinstance(draft.tree, TokenTree) or not isinstance(draft.law, Law):
        return "propose must return a Draft with a TokenTree and a Law"
    optional = {"q": draft.q, "scores": draft.scores, "copied": draft.copied}
    for name, values in {"tokens": draft.tree.tokens, "parents": draft.tree.parents, **optional}.items():
        if values is None and name in optional:
            continue
        if not isinstance(values, torch.Tensor):
            return f"its {name} must be a tensor, not a {values.__class__.__name__}"
        if values.device != view.history.device:
            return f"its {name} must be on {view.history.device}, not on {values.device}"
    tokens, parents, q = draft.tree.tokens, draft.tree.parents, draft.q
    rows = len(view.rows)
    if tokens.ndim != 2 or tokens.shape[0] != rows or not tokens.shape[1]:
        return f"its tokens have shape {tuple(tokens.shape)}, and must have {rows} rows of one node or more"
    if parents.shape != tokens.shape:
        return f"its parents have shape {tuple(parents.shape)}, and its tokens {tuple(tokens.shape)}"
    if tokens.dtype != torch.long or parents.dtype != torch.long:
        return f"its tokens and parents must be torch.int64, not {tokens.dtype} and {parents.dtype}"
    if not isinstance(draft.tree.depth, int) or draft.tree.depth < 0:
        return f"its depth must be a whole number, 0 or more, not {draft.tree.depth!r}"
    turns = draft.tree.turns
    if turns is not None and not (isinstance(turns, tuple) and all(isinstance(n, int) and n >= 0 for n in turns)):
        return f"its turns must be whole numbers, 0 or more, not {turns!r}"
    if (q is None) != (draft.law is Law.FIXED):
        return f"its law is {draft.law.value!r}, so it must {'come with' if q is None else 'have no'} q"
    shape = (*tokens.shape, *(() if q is None else q.shape[2:] if vocab_size is None else (vocab_size,)))
    if q is not None and (tuple(q.shape) != shape or not q.is_floating_point()):
        return f"its q has shape {tuple(q.shape)} and type {q.dtype}, and must be floating-point of shape {shape}"
    if draft.scores is not None and (draft.scores.shape != tokens.shape or not draft.scores.is_floating_point()):
        kind = f"shape {tuple(draft.scores.shape)} and type {draft.scores.dtype}"
        return f"its scores have {kind}, and must be floating-point of shape {tuple(tokens.shape)}"
    copied = draft.copied
    if copied is not None and (tuple(copied.shape) != (rows,) or copied.dtype != torch.bool):
        return f"its copied has shape {tuple(copied.shape)} and type {copied.dtype}, and must be torch.bool of {rows}"
    return None
