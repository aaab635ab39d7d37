"""A user's script that type checkers accept, with the types that they must see."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from typing_extensions import assert_type

import foredraft
from foredraft import AsyncStream, Completed, Generator, Piece, Result, SamplingParams, Stream

g = foredraft.load("sample", "prompt_lookup", device="cpu", max_batch_size=4)
assert_type(g, Generator)
assert_type(foredraft.load(g, None, dtype=torch.float16, device=torch.device("cpu")), Generator)
assert_type(foredraft.load_many("sample", ["none", "auto"], weights="int8", exact=True), list[Generator])
assert_type(foredraft.speculative("auto", stop_strings=["x"], max_batch_size=4), foredraft.speculative)
assert_type(g.generate("one", max_new_tokens=4, temperature=0.5, stop_strings="x", seed=None), Result)
assert_type(g.generate([1, 2, 3], SamplingParams(max_new_tokens=4)), Result)
assert_type(g.generate([{"role": "user", "content": "Hello!"}], eos_token_id=2), Result)
assert_type(g.generate(["one", "two"], stop_strings=["x", "y"]), list[Result])
assert_type(g.generate([[1, 2], [3]], bad_words_ids=[[4, 5]]), list[Result])
assert_type(g.generate([[{"role": "user", "content": "Hello!"}], "2 + 2 ="]), list[Result])
assert_type(g.generate("one", num_return_sequences=3, temperature=1.0), list[Result])
assert_type(g.generate(torch.tensor([1, 2])), Result | list[Result])
assert_type(g.generate(np.array([1, 2]), max_new_tokens=4), Result | list[Result])
assert_type(g.generate(("one", "two")), list[Result])
assert_type(g.batch(["one"], top_p=0.9), list[Result])

for piece in g.stream("one", max_new_tokens=4):
    assert_type(piece, Piece)
with g.stream("one") as stream:
    assert_type(stream, Stream)
    assert_type(stream.result.tokens, list[int])

finished = g.as_completed((f"prompt {i}" for i in range(3)), progress=lambda done, tokens: None, max_new_tokens=4)
assert_type(finished, Iterator[Completed])
for completed in finished:
    print(completed.index, completed.error or completed.result.text)


def one_or_several(prompts: Sequence[str], count: int | None) -> None:
    assert_type(g.generate(prompts), list[Result])
    assert_type(g.generate("one", num_return_sequences=count), Result | list[Result])
    assert_type(g.generate(["one"], num_return_sequences=count), list[Result])


best = g.beam_search("one", num_beams=2, max_new_tokens=4, early_stopping="never")
assert_type(best[0].score, float)
assert_type(g.beam_search(["one", "two"])[0][0].tokens, list[int])
found = g.beam_search(np.array([[1, 2]]), num_beams=2)


async def run() -> None:
    assert_type(await g.agenerate("one", top_k=4), Result)
    assert_type(await g.agenerate(["one", "two"]), list[Result])
    assert_type(await g.agenerate(np.array([1, 2])), Result | list[Result])
    assert_type(await g.agenerate("one", num_return_sequences=2), list[Result])
    async with g.astream("one", min_p=0.1) as stream:
        assert_type(stream, AsyncStream)
        async for piece in stream:
            assert_type(piece, Piece)
    assert_type(stream.result, Result)
