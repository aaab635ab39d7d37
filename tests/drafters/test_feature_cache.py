"""What a head remembers while drafting rests: features made later, all at once, are those made step by step."""

import itertools
from collections.abc import Sequence

import pytest

import random_heads as heads
import tiny
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, View
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.drafters.states import feature_cache
from foredraft.model.hf.causal_lm import CausalLM


def seldom() -> tiny.ScriptedPolicy:
    """A draft in every fifth step."""
    steps = itertools.count(1)

    def plan(view: View, limits: Sequence[int]) -> Plan:
        length = 0 if next(steps) % 5 else 3
        return Plan(tuple(min(length, limit) for limit in limits))

    return tiny.ScriptedPolicy(plan)


def drafted(monkeypatch: pytest.MonkeyPatch, waiting: int, exact: int) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of all drafts, and the texts, while rows end and others take their places."""
    monkeypatch.setattr(feature_cache, "_MAX_PENDING", waiting)
    target = CausalLM(tiny.build("llama"))
    drafter = Eagle3Drafter(Options(nodes=9, depth=3, top_k=3), heads.eagle3(target))
    target.tap(drafter.needs.hidden_layers)
    drafts: list[list[int]] = []
    propose = drafter.propose

    def watched(view: View, plan: Plan) -> Draft:
        draft = propose(view, plan)
        drafts.append(draft.tree.tokens[draft.tree.valid].tolist())
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    g = tiny.generator(target, drafter, policy=seldom(), max_rows=2, exact_nodes=exact)
    texts = [
        result.tokens
        for news in (12, 31, 23)
        for result in g.generate(tiny.prompts((3, 9, 20)), min_new_tokens=news, max_new_tokens=news)
    ]
    return drafts, texts


@pytest.mark.parametrize("exact", [0, 10], ids=["each its nodes", "always ten nodes"])
def test_features_that_waited_are_those_made_at_once(monkeypatch: pytest.MonkeyPatch, exact: int):
    at_once = drafted(monkeypatch, 1, exact)
    assert len(at_once[0]) > 10
    assert drafted(monkeypatch, 32, exact) == drafted(monkeypatch, 3, exact) == at_once
