"""Worker: foredraft. Options: model, weights, drafter, threads."""

import time

import numpy as np
import torch
from protocol import Output, Worker, serve

import foredraft
from foredraft.core.tree import TokenTree


def load(options: dict) -> Worker:
    torch.set_num_threads(options["threads"])
    generator = foredraft.load(options["model"], options["drafter"], weights=options["weights"])

    def generate(ids: list[int], tokens: int) -> Output:
        started = time.perf_counter()
        stream = generator.stream(ids, max_new_tokens=tokens, temperature=0, eos_token_id=())
        first = next(stream)
        seconds = time.perf_counter() - started
        pieces = [first, *stream]
        output = [token for piece in pieces for token in piece.tokens]
        accepted = sum(len(piece.tokens) for piece in pieces if piece.drafted)
        return Output(output, seconds, len(first.tokens), accepted if options["drafter"] else None)

    @torch.inference_mode()
    def logits(ids: list[int]) -> np.ndarray:
        target = generator.engine.target
        cache = target.new_cache()
        cache.reserve([0], len(ids))
        chain = TokenTree.chain(torch.tensor([ids]))
        step = target.address(chain, torch.zeros(1, dtype=torch.long), [0], len(ids))
        return target.forward(step, cache).logits[0].float().numpy()

    return Worker(generate, logits)


serve(load)
