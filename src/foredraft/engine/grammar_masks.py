"""Masks of grammars over a step's draft tree.

p at a node is warp(mask(logits)), where the mask holds the tokens that may follow the node's path; see ``Matcher``.
Drafts are not masked: an illegal node has p = 0, so it is never accepted.

The host computes the masks. A step with a grammar reads the draft back before the target's forward, which then runs
while the host computes; other steps do not.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.engine.request import Sequence
from foredraft.model.text.grammar import Matcher, mask_words

Matchers = Seq[Matcher | None]
"""The matcher of each row; None for rows without a grammar."""


def matchers_of(sequences: Seq[Sequence]) -> Matchers | None:
    """The rows' matchers; None if no row has a grammar."""
    matchers = [sequence.matcher for sequence in sequences]
    return matchers if any(matchers) else None


class HostTree(NamedTuple):
    """A draft tree on the host: tokens and parents by row and node."""

    tokens: list[list[int]]
    parents: list[list[int]]

    @classmethod
    def of(cls, tree: TokenTree) -> "HostTree":
        """Read a tree back from the device."""
        tokens, parents = torch.stack([tree.tokens, tree.parents]).tolist()
        return cls(tokens, parents)


def masked(
    logits: Float[Tensor, "B N V"], tree: HostTree, matchers: Matchers, errors: dict[int, Exception]
) -> Float[Tensor, "B N V"]:
    """The logits with -inf at illegal tokens. A row whose matcher fails is not masked; its error goes to ``errors``."""
    count, vocab = logits.shape[1:]
    masks = torch.full((len(matchers), count, mask_words(vocab)), -1, dtype=torch.int32)
    for row, (matcher, tokens, parents) in enumerate(zip(matchers, tree.tokens, tree.parents, strict=True)):
        if matcher is not None:
            try:
                masks[row] = matcher.masks(tokens, parents)
            except Exception as error:
                errors[row] = error
    octets = masks.view(torch.uint8).to(logits.device)  # eight tokens each, as all our hosts are little-endian
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    legal = (octets[..., None] >> bits & 1).flatten(2)[..., :vocab].bool()
    return logits.masked_fill(~legal, -torch.inf)
