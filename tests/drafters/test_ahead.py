"""Drafts that are launched before the last step was read back are those that are made after it."""

from typing import Any

import pytest
import test_replayed_drafts as drafts_of

import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.prompt_lookup import Options as LookupOptions, PromptLookup
from foredraft.engine.ahead import Ahead
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant, Heuristic
from foredraft.engine.policy.throughput import Throughput
from foredraft.engine.request import Sequence
from foredraft.engine.step import Drafted
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.recording.recorder import Recorder
from traced import Traced

HEADS = ("eagle1", "eagle2", "eagle3", "eagle3 drawn", "medusa", "hydra", "hydra++", "blockwise")
METHODS = (*HEADS, "chain", "tree", "sequoia", "opt_tree", "specinfer", "cape")
QUICK = {("eagle3", 1.0), ("eagle3 drawn", 1.0), ("medusa", 0.0), ("hydra++", 0.0), ("chain", 1.0), ("tree", 0.0)}


class Counted(Ahead):
    """Counts the drafts that were taken and those that were dropped; the latter are no longer noted."""

    def __init__(self, noted: list[Any]) -> None:
        super().__init__(on=True)
        self._noted = noted
        self.taken = self.dropped = 0

    def take(self, sequences: tuple[Sequence, ...]) -> Drafted | None:
        kept = self._kept
        drafted = super().take(sequences)
        self.taken += drafted is not None
        if kept is not None and drafted is None:
            self._drop(kept[1])
        return drafted

    def drop(self) -> None:
        kept = self._kept
        super().drop()
        if kept is not None:
            self._drop(kept[1])

    def _drop(self, drafted: Drafted) -> None:
        self.dropped += 1
        if drafted.plan.length:
            self._noted.pop()


def ahead(method: str, recorder: Recorder | None = None) -> tuple[Generator, list[Any], Counted]:
    g, drafts = drafts_of.build(method, recorder)
    g.engine.ahead = counted = Counted(drafts)
    return g, drafts, counted


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("method", "temperature"),
    [
        pytest.param(method, heat, marks=() if (method, heat) in QUICK else pytest.mark.slow)
        for method in METHODS
        for heat in (0.0, 1.0)
    ],
)
def test_drafts_made_ahead_are_those_made_later(method: str, temperature: float, recorded: bool):
    """Rows come and go, some of them at the end of a text that no one knows before: these drafts are dropped."""
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    eager, expected = drafts_of.build(method)
    g, drafts, counted = ahead(method, Traced() if recorded else None)
    for prompts in (drafts_of.PROMPTS, tiny.prompts((230, 20), seed=2), drafts_of.PROMPTS[:2]):
        wanted = drafts_of.found(eager.generate(prompts, **options))
        assert drafts_of.found(g.generate(prompts, **options)) == wanted
    assert drafts == expected
    assert counted.taken > 10 and counted.dropped


def test_the_throughput_policy_chooses_ahead():
    texts = []
    for on in (False, True):
        g, _, counted = ahead("chain")
        counted.on = on
        g.engine.policy = policy = Throughput(g.engine.drafter.needs)
        texts.append([result.tokens for result in g.generate(drafts_of.PROMPTS, max_new_tokens=60, temperature=0.0)])
        assert bool(counted.taken) == on
        assert sum(pace.forward.steps for pace in policy._paces.values()) > 20
    assert texts[0] == texts[1]


def test_copies_of_a_prompt_are_drafted_ahead():
    results = []
    for on in (False, True):
        g = tiny.generator(CausalLM(tiny.build("llama")), PromptLookup(LookupOptions(prompt_lookup_num_tokens=3)))
        g.engine.ahead = counted = Counted([None] * 99)
        counted.on = on
        results.append(drafts_of.found(g.generate(drafts_of.PROMPTS, max_new_tokens=40)))
        assert (counted.taken > 10) == on
    assert results[0] == results[1]


@pytest.mark.parametrize("why", ["policy", "steps", "drafter", "limit", "prediction"])
def test_what_needs_the_last_steps_results_is_not_drafted_ahead(why: str):
    g, _, counted = ahead("windowed chain" if why == "drafter" else "chain")
    g.engine.policy = Heuristic(3) if why == "policy" else Constant(3)
    limit = 3 if why == "limit" else 24
    prediction = [1, 2, 3] if why == "prediction" else None
    params = SamplingParams(max_new_tokens=limit, record_steps=why == "steps", eos_token_id=(), prediction=prediction)
    g.engine.run(g.submit(drafts_of.PROMPTS[:1], params))
    assert not counted.taken


def test_drafts_are_made_ahead_again_after_a_prediction():
    g, _, counted = ahead("chain")
    for prediction in ([1, 2, 3], None):
        taken = counted.taken
        g.generate(drafts_of.PROMPTS[0], max_new_tokens=24, prediction=prediction)
        assert (counted.taken > taken) == (prediction is None)


def test_a_row_near_its_end_stops_drafts_ahead_of_few_rows_only():
    def taken(count: int) -> int:
        g, _ = drafts_of.build("chain")
        g = tiny.generator(g.engine.target, g.engine.drafter, max_rows=12, policy=Constant(3))
        g.engine.ahead = counted = Counted([None] * 999)
        params = [SamplingParams(max_new_tokens=n, eos_token_id=()) for n in [6] + [90] * (count - 1)]
        sequences = [
            g.submit([prompt], each)[0] for prompt, each in zip(tiny.prompts([20] * count), params, strict=True)
        ]
        while not sequences[0].finished:
            g.engine.step()
        return counted.taken

    assert taken(2) == 0 < taken(12)
