"""Drafts that are replayed from tapes are those of steps that run as they are, and as much of them is accepted.

Rows come and go and have different lengths, which grow over several host_lengths of the caches; see ``traced``.
"""

from typing import Any

import pytest

import random_heads as heads
import specs
import tiny
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, View
from foredraft.engine.generator import Generator, Result
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.recording.recorder import Recorder
from traced import Traced

PROMPTS = tiny.prompts((18, 50, 17, 28, 120))

HEADS = {**heads.HEADS, "blockwise": lambda target: heads.blockwise(target, heads=4)}
METHODS = {
    "eagle1": "eagle1:eagle,tree=3x2x1",
    "eagle2": "eagle2:eagle,nodes=6,depth=3,top_k=2",
    "eagle3": "eagle3:eagle3,nodes=6,depth=3,top_k=2",
    "eagle3 drawn": "eagle3:eagle3,nodes=6,depth=3,top_k=2",
    "medusa": "medusa:medusa,tree=3x2x1",
    "medusa drawn": "medusa:medusa,tree=3x2x1",
    "hydra": "hydra:hydra,tree=3x2x1",
    "hydra++": "hydra:hydra++,tree=3x2x1",
    "blockwise": "blockwise:blockwise",
    "chain": "draft_model:draft,num_assistant_tokens=3",
    "windowed chain": "draft_model:draft,num_assistant_tokens=3,window=32",
    "tree": "draft_model:draft,branching=2x2",
    "sequoia": "sequoia:draft,nodes=5,depth=2,acceptance=0.5/0.2/0.1",
    "opt_tree": "opt_tree:draft,nodes=6,depth=3,top_k=2",
    "specinfer": "specinfer:draft+target,expansion=2x2",
    "cape": "cape:draft,num_assistant_tokens=3,widths=3x2x1",
    "cascade": "cascade:draft+[draft_model:target,num_assistant_tokens=2],num_assistant_tokens=3",
    "early_exit chain": "early_exit,num_assistant_tokens=3,assistant_early_exit=1",
    "layer_skip chain": "layer_skip,num_assistant_tokens=3,skip_mlp=0",
}
QUICK = {
    ("early_exit chain", 1.0),
    ("eagle3", 0.0),
    ("medusa", 1.0),
    ("hydra++", 0.0),
    ("eagle3 drawn", 1.0),
    ("chain", 1.0),
}


def build(method: str, recorder: Recorder | None = None) -> tuple[Generator, list[Any]]:
    """A generator, and where its drafts are noted: heads with random weights are never right, so texts say little."""
    target, draft = CausalLM(tiny.build("llama")), CausalLM(tiny.build("llama", spread=1.4))
    cache, drafts = target.new_cache(), []
    drafter = specs.build(METHODS[method], target, {"draft": draft}, HEADS, cache=cache)
    target.tap(drafter.needs.hidden_layers)
    propose = drafter.propose

    def noted(view: View, plan: Plan) -> Draft:
        made = propose(view, plan)
        valid = made.tree.valid
        drafts.append((made.tree.tokens[valid].tolist(), made.tree.parents[valid].tolist(), made.law))
        return made

    drafter.propose = noted  # type: ignore[method-assign]
    rule = "traversal" if "drawn" in method else None
    return tiny.generator(target, drafter, eos=range(3), max_rows=3, recorder=recorder, cache=cache, rule=rule), drafts


def found(results: list[Result]) -> list[Any]:
    return [(result.tokens, result.stats.drafted, result.stats.accepted_by_depth) for result in results]


def segments_of(method: str) -> set[str]:
    """The segments of a draft."""
    if not method.startswith(("eagle", "medusa", "hydra", "blockwise")):
        return {"chain"} if "chain" in method or method == "cascade" else {"tree"}
    return {"tree", "catch-up"} if "eagle" in method or method == "hydra++" else {"tree"}


@pytest.mark.parametrize(
    ("method", "temperature"),
    [
        pytest.param(method, heat, marks=() if (method, heat) in QUICK else pytest.mark.slow)
        for method in METHODS
        for heat in (0.0, 1.0)
    ],
)
def test_replayed_drafts_are_those_of_steps_that_run_as_they_are(method: str, temperature: float):
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    recorder = Traced()
    (eager, expected), (g, drafts) = build(method), build(method, recorder)
    for prompts in (PROMPTS, tiny.prompts((230, 20), seed=2), PROMPTS[:2]):  # the second ones take larger caches
        assert found(g.generate(prompts, **options)) == found(eager.generate(prompts, **options))
        assert drafts == expected and any(len(tokens) > 3 for tokens, _, _ in drafts)
    segments = {*recorder.keys} - {"forward", "tail"}
    assert segments == segments_of(method)
    for segment in segments:
        assert recorder.plays.count(segment) > recorder.keys.count(segment) > 0
    assert not recorder.fallbacks and segments < set(recorder.recordings)
    g.close()
    assert not recorder.recordings.total()


@pytest.mark.parametrize("method", ["chain", "eagle3"])
def test_a_draft_from_a_cache_that_is_gone_is_seen(method: str, monkeypatch: pytest.MonkeyPatch):
    recorder = Traced()
    (eager, expected), (g, drafts) = build(method), build(method, recorder)
    of_steps, renew = recorder.of(g.engine._stepper._tail._rows), Traced.renew
    monkeypatch.setattr(Traced, "renew", lambda self, stamp: renew(self, stamp if self is of_steps else 0))
    texts = [
        [each.generate(prompt, max_new_tokens=12).tokens for prompt in (PROMPTS[0], PROMPTS[0] * 14, PROMPTS[3])]
        for each in (eager, g)
    ]
    assert texts[0] == texts[1] and drafts != expected
