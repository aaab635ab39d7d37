"""Plain decoding with the model's own forward: the slow reference that the loop must equal."""

from collections.abc import Sequence

import torch

from foredraft.core.rng import HashedRng, Noise, resolve_seed
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.stop import StopRules
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.model.hf.causal_lm import CausalLM


@torch.inference_mode()
def reference(target: CausalLM, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> list[int]:
    """Continue one prompt token by token, with a full forward for each: no cache, no tree, no drafts.

    Shares the warp, the stop rules and the random numbers with the loop, so sampled outputs can be compared too.
    """
    device = target.device
    eos_ids = params.eos_token_id if params.eos_token_id is not None else tuple(eos)
    rules = StopRules(params.max_new_tokens, frozenset(eos_ids))
    warp = Warp.of(
        [params], vocab_size=target.vocab_size, eos_token_ids=[eos_ids], prompt_lengths=[len(prompt)], device=device
    )
    seed = resolve_seed(params.seed)
    tokens: list[int] = []
    while True:
        history = torch.tensor([[*prompt, *tokens]], device=device)
        lengths = torch.tensor([history.shape[1]], device=device)
        law = warp(target.stock_logits(history)[:, -1:], Paths(history, lengths, TokenTree.root(history[:, -1])))
        if law.p is None:
            token = law.best[0, 0]
        else:
            rng = HashedRng(Noise(torch.tensor([seed], device=device), lengths))
            token = rng.target(law.p[:, 0], 0, torch.tensor([True]))[0]
        cut = rules.cut(len(tokens), [int(token)])
        tokens.append(int(token))
        if cut.reason is not None:
            return tokens
