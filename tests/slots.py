"""Texts in the slots of a cache, for tests of forwards over them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from foredraft.core.tree import TokenTree
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.prefill import prefill


def padded(texts: Sequence[list[int]]) -> Tensor:
    """[R, longest]: the texts, with zeros behind the shorter ones."""
    width = max(map(len, texts))
    return torch.tensor([text + [0] * (width - len(text)) for text in texts], dtype=torch.long)


def read(
    model: CausalLM,
    texts: Sequence[list[int]],
    rows: Sequence[int],
    receive: Callable[[int, Mapping[int, Tensor]], None] = lambda begin, hidden: None,
) -> SlotCache:
    """A cache that holds all but the last token of each text, which is to be a root."""
    cache = model.new_cache()
    cache.reserve(rows, 128)
    prefill(model, cache, rows, padded([text[:-1] for text in texts]), [0] * len(rows), receive)
    return cache


def bases(texts: Sequence[list[int]]) -> Tensor:
    """[R]: where the roots of texts stand."""
    return torch.tensor([len(text) - 1 for text in texts])


def whole(model: CausalLM, texts: Sequence[list[int]]) -> tuple[StepIn, SlotCache]:
    """A step that reads texts from their first tokens on, and the empty cache that it fills."""
    tokens, rows = padded(texts), tuple(range(len(texts)))
    cache = model.new_cache()
    cache.reserve(rows, tokens.shape[1])
    begins = torch.zeros(len(rows), dtype=torch.long)
    return model.address(TokenTree.chain(tokens), begins, rows, tokens.shape[1]), cache
