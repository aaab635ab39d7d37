"""Plain decoding with the model's own forward and cache: the slow truth that the loop must equal."""

from collections.abc import Sequence

import torch

from foredraft.core.rng import HashedRng, Noise, resolve_seed
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.stop import StopRules
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.model.hf import CausalLM


@torch.inference_mode()
def reference(target: CausalLM, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> list[int]:
    """Continue one prompt token by token, reading the whole text anew for each: no cache, no tree, no drafts.

    It shares the warp, the stop rules and the random numbers with the loop, so that sampled texts can be compared
    as well as greedy ones.
    """
    device = target.device
    ends = params.eos_token_id if params.eos_token_id is not None else tuple(eos)
    rules = StopRules(params.max_new_tokens, frozenset(ends))
    warp = Warp.of(
        [params], vocab_size=target.vocab_size, eos_token_ids=[ends], prompt_lengths=[len(prompt)], device=device
    )
    seed = resolve_seed(params.seed)
    tokens: list[int] = []
    while True:
        text = torch.tensor([[*prompt, *tokens]], device=device)
        lengths = torch.tensor([text.shape[1]], device=device)
        law = warp(target.stock_logits(text)[:, -1:], Paths(text, lengths, TokenTree.root(text[:, -1])))
        if law.p is None:
            token = law.best[0, 0]
        else:
            coins = HashedRng(Noise(torch.tensor([seed], device=device), lengths))
            token = coins.target(law.p[:, 0], 0)[0]
        cut = rules.cut(len(tokens), [int(token)])
        tokens.append(int(token))
        if cut.reason is not None:
            return tokens
