"""On the native engine every method verifies logits that are plain decoding's to the last bit; outputs are its, too."""

import functools
from typing import Any

import pytest
import test_contract as contract
import torch

import specs
import tiny
from foredraft.bench.bits import Comparing, PlainDecoding
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.engine.request import Sequence
from foredraft.model.native.model import NativeLM
from native import needs_compiler, on_native

pytestmark = needs_compiler
WEIGHTS = pytest.mark.parametrize("weights", ["int4", "int8"])
KV_CACHE_DTYPES = {"int4": "float16", "int8": "int8"}
PARTIAL = {
    name
    for name in contract.VARIANTS
    if name.endswith("h2o") or any(method in name for method in ("triforce", "partial", "glide"))
}
"""They read a part of the target's KV cache."""
NEW = 8


@functools.cache
def target(weights: str) -> NativeLM:
    return on_native(tiny.build("llama"), weights, KV_CACHE_DTYPES[weights])


@functools.cache
def models(weights: str) -> dict[str, NativeLM]:
    """Draft models in the precision of the target; see ``test_contract``."""
    near, far, slim = contract.near(), contract.far(), contract.slim(tiny.VOCAB)
    given = {"draft": near, "other": far, "slim": slim}
    return {name: on_native(each.model, weights, KV_CACHE_DTYPES[weights]) for name, each in given.items()}


@functools.cache
def plain(weights: str) -> PlainDecoding:
    return PlainDecoding(target(weights))


def build(name: str, weights: str) -> Drafter:
    """With draft models in floats where they are trained."""
    trained = name in ("online", "online tree")
    drafts = {"draft": contract.near()} if trained else models(weights)
    return specs.build(contract.VARIANTS[name], target(weights), drafts, contract.HEADS)


def comparing(drafter: Drafter, weights: str, **options: Any) -> tuple[Generator, Comparing]:
    target(weights).tap(drafter.needs.hidden_layers)
    watching = Comparing(drafter, plain(weights))
    cache = contract.shared_cache(drafter)
    return tiny.generator(target(weights), watching, Constant(4), cache=cache, **options), watching


def mixed() -> list[SamplingParams]:
    """Greedy rows, sampled ones with rules, which torch applies, and without, in turns."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 12, "repetition_penalty": 1.2},
        {"temperature": 1.1},
    ]
    return [SamplingParams(max_new_tokens=NEW, seed=i, **kinds[i % 3]) for i in range(5)]


def run(g: Generator) -> list[Sequence]:
    """Ragged prompts whose rows come and go."""
    prompts = [*contract.prompts(), contract.prompts()[1]]
    sequences = [g.submit([prompt], params)[0] for prompt, params in zip(prompts, mixed(), strict=True)]
    g.engine.run(sequences)
    return sequences


@functools.cache
def expected(weights: str) -> list[list[int]]:
    """Plain decoding, one request at a time."""
    return [sequence.tokens for sequence in run(tiny.generator(target(weights), max_rows=1))]


@WEIGHTS
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if " " in name else name
        for name in contract.VARIANTS
        if name not in PARTIAL
    ],
)
def test_outputs_and_logits_are_plain_decodings_to_the_last_bit(name: str, weights: str):
    g, watching = comparing(build(name, weights), weights, max_rows=3)
    sequences = run(g)
    assert [sequence.tokens for sequence in sequences] == expected(weights)
    assert watching.positions >= 5 * NEW and watching.different == 0, watching.first
    if name not in ("none", "bandit"):  # the clock decides what a bandit drafts
        assert sum(sequence.stats.drafted for sequence in sequences) > 0


@pytest.mark.parametrize("name", sorted(PARTIAL))
def test_methods_that_read_a_part_of_the_cache_say_that_the_engine_does_not(name: str):
    with pytest.raises(DrafterError, match="reads a part of the target's KV cache"):
        build(name, "int4")


def test_quantised_draft_models_are_not_trained():
    with pytest.raises(DrafterError, match="trains draft models in floats"):
        specs.build(contract.VARIANTS["online"], target("int4"), models("int4"))


@WEIGHTS
@pytest.mark.parametrize("name", ["none", "draft_model tree", "eagle3", "prompt_lookup tree"])
def test_a_prefix_that_another_row_has_read_has_the_same_bits(name: str, weights: str):
    """Ragged rows come and go; prompts begin with others, with their outputs, and with parts of them."""
    g, watching = comparing(build(name, weights), weights, max_rows=3, max_prefill_tokens=16, prefix_cache=True)
    alone = tiny.generator(target(weights), max_rows=1)
    system, *users = tiny.prompts((70, 3, 20, 1, 33, 9, 2))
    asked = [system + user for user in users] + [system[:40] + user for user in users[:3]]

    def submit(prompt: list[int], number: int) -> Sequence:
        params = SamplingParams(max_new_tokens=4 + 3 * (number % 3), temperature=float(number % 2), seed=number)
        (sequence,) = g.submit([prompt], params)
        (plainly,) = alone.submit([prompt], params)
        alone.engine.run([plainly])
        outputs.append(plainly.tokens)
        return sequence

    outputs: list[list[int]] = []
    first = [submit(prompt, number) for number, prompt in enumerate(asked)]
    for _ in range(6):  # others are in the batch, waiting and being read
        g.engine.step()
    first += [submit([*asked[number], *outputs[number], *users[1]], 10 + number) for number in range(4)]
    g.engine.run(first)
    assert [sequence.tokens for sequence in first] == outputs
    assert sum(sequence.stats.cached_tokens for sequence in first) > 300
    assert watching.positions > sum(map(len, outputs)) / 2 and watching.different == 0, watching.first


def test_a_row_that_reads_anothers_slot_is_found():
    """Not only outputs: one bit in one logit of one node."""
    drafter = build("eagle3", "int8")
    g, watching = comparing(drafter, "int8")
    before = g.engine.target.compute

    def compute(*given: Any) -> Any:
        out = before(*given)
        if out.logits.shape[1] > 2:
            out.logits.view(torch.int32)[0, 2, 7] ^= 1
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(g.engine.target), "compute", lambda self, *given: compute(*given))
        g.generate(contract.prompts()[2], max_new_tokens=4)
    assert watching.different > 0 and watching.first is not None and watching.first[1:3] == (1, 7)
