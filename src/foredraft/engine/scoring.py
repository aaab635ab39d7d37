"""Log-probabilities of given tokens: one pass of the target over a text, without generating."""

from collections.abc import Iterator, Sequence as Seq

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.errors import NumericsError, OptionError, PromptError
from foredraft.core.tree import TokenTree
from foredraft.engine.engine import Engine
from foredraft.engine.request import TokenLogprobs, token_logprobs
from foredraft.model.kv.cache import SlotCache

CHUNK = 128
"""Tokens per forward. All of their logits are kept, unlike in prefill, so this bounds N * V."""


def check(engine: Engine, tokens: Seq[int]) -> None:
    """Check a text to be scored.

    Raises:
        PromptError: it is empty, has ids outside the vocabulary, or is longer than the context.
        ModelError: the engine or its target was closed, or the target was changed.
        OptionError: the target runs on several processes.
    """
    engine.check_tokens(tokens)
    if engine.target.ranks > 1:  # the others would have to run these forwards too
        raise OptionError("A target on several processes (tensor_parallel) generates only: it scores no prompts.")
    if len(tokens) > engine.target.max_length:
        raise PromptError(f"The prompt has {len(tokens)} tokens; the model's context is {engine.target.max_length}.")


def score(engine: Engine, tokens: Seq[int], top: int, chunk: int = CHUNK) -> Iterator[list[TokenLogprobs | None]]:
    """Yield the log-probabilities of checked tokens, in order, a chunk at a time.

    They are those of the target itself: log_softmax of its logits in float32. The first token follows nothing and has
    None. The cache is the text's own. The engine's lock is held during a forward only, so other requests' steps run
    between chunks.

    Args:
        top: likeliest tokens to return at each place; may be 0.
        chunk: tokens per forward.

    Raises:
        NumericsError: the model returned NaN.
    """
    yield [None]
    if len(tokens) == 1:
        return
    target = engine.target
    row = torch.tensor(tokens, dtype=torch.long, device=target.device)[None]
    cache = target.new_cache()
    for begin in range(0, len(tokens) - 1, chunk):
        end = min(begin + chunk, len(tokens) - 1)
        with engine.exclusive():
            found = _read(engine, cache, row[:, begin:end], begin, tokens[begin + 1 : end + 1], top)
        yield list(found)


@torch.inference_mode()
def _read(
    engine: Engine, cache: SlotCache, piece: Int[Tensor, "1 N"], begin: int, following: Seq[int], top: int
) -> list[TokenLogprobs]:
    """Read tokens from slot ``begin`` on; return the scores of the tokens that follow each of them."""
    used_slots = begin + piece.shape[1]
    cache.reserve([0], used_slots)
    base = torch.full((1,), begin, dtype=torch.long, device=piece.device)
    step = engine.target.address(TokenTree.chain(piece), base, [0], used_slots)
    laws = engine.target.forward(step, cache).logits[0].float().log_softmax(-1)
    if laws.isnan().any():
        raise NumericsError("The prompt cannot be scored: the model returned NaN or +inf logits.")
    return token_logprobs(laws, list(following), top)
