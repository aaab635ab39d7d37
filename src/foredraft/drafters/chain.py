"""A chain of tokens from a model that says one at a time: each is drawn from its law, or is its likeliest."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.noise import Stream, inverse_cdf
from foredraft.core.tree import TokenTree
from foredraft.core.warp import Paths
from foredraft.drafters.grow import proper

ReadOn = Callable[[Int[Tensor, "B"], int], Float[Tensor, "B 1 V"]]
"""Logits after drafted token ``index`` (from 1 on), which is given; those before it have been read."""


class Drawn(NamedTuple):
    """One token a row, the law [B, 1, V] that it was drawn from, and whether the draft was sure of it."""

    token: Int[Tensor, "B"]
    law: Float[Tensor, "B 1 V"]
    sure: Bool[Tensor, "B"]


def draw_chain(view: View, plan: Plan, depth: int, logits: Float[Tensor, "B 1 V"], read_on: ReadOn) -> Draft:
    """Draw token after token from q; a path ends after its first unsure token, which is kept.

    Args:
        view: its warp makes q of the logits; where all its rows are greedy, tokens are picked.
        plan: how long each row's path may be.
        depth: the longest of all, 1 or more.
        logits: after the roots.
        read_on: reads a drafted token and says what may follow.
    """
    tokens = [view.roots]
    laws = [logits.new_zeros(logits.shape, dtype=torch.float32)]  # the root's, never read
    lengths = torch.zeros_like(view.lengths)
    allowed = torch.tensor(plan.lengths, device=view.lengths.device)
    going = allowed > 0
    for i in range(1, depth + 1):
        paths = Paths(view.history, view.lengths, TokenTree.chain(torch.stack(tokens, 1)), start=i - 1)
        token, law, sure = _draw(view, plan, logits, paths, i)
        tokens.append(token)
        laws.append(law)
        lengths = lengths + going
        going = going & sure & (i < allowed)
        last = i == depth or (going.device.type == "cpu" and not bool(going.any()))
        if last:
            break
        logits = read_on(token, i)
    tree = TokenTree.chain(torch.stack(tokens, 1), lengths + 1)
    if view.warp.greedy:
        return Draft(tree, Law.FIXED)
    return Draft(tree, Law.CHAIN, torch.cat(laws, 1))


def _draw(view: View, plan: Plan, logits: Float[Tensor, "B 1 V"], paths: Paths, index: int) -> Drawn:
    """Draw the node with this index in every row."""
    if view.warp.greedy:
        token = view.warp(logits, paths).best[:, 0]
        law = logits.float().softmax(-1) if plan.confidence else logits
    else:
        law = proper(view.warp.law(logits, paths))
        u = view.noise.uniform(Stream.DRAFT, torch.full_like(view.lengths, index))
        token = inverse_cdf(law[:, 0], u)
    if plan.confidence:
        sure = law[:, 0].gather(-1, token[:, None])[:, 0] >= plan.confidence
    else:
        sure = torch.ones_like(token, dtype=torch.bool)
    return Drawn(token, law, sure)
