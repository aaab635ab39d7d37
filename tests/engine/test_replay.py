"""Steps that are replayed from tapes give the texts of steps that run as they are; see ``traced``."""

import logging
from collections import defaultdict
from typing import Any

import pytest
import test_identity as identity
import torch

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import DrafterError
from foredraft.core.tree import TokenTree
from foredraft.drafters.states.draft_runner import DraftRunner
from foredraft.engine.generator import Generator, Result
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.model.recording.recorder import PaddedSizes
from runs import with_tree
from traced import Traced

QUICK_MODELS = ("llama", "gemma2", "gpt2", "mixtral")
PROMPTS = tiny.prompts((18, 24, 17, 28, 20))


def traced(make: Any, *args: Any) -> tuple[Generator, Traced]:
    """The generator of ``make``, with tapes."""
    recorder, build = Traced(), tiny.generator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "generator", lambda *a, **options: build(*a, **options, recorder=recorder))
        return make(*args), recorder


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_MODELS else pytest.mark.slow) for name in tiny.MODELS]
)
@pytest.mark.parametrize("kind", ["none", "self tree", "lookup tree", "liar"])
def test_replayed_greedy_texts_are_those_of_transformers(name: str, kind: str):
    c = identity.case(name, True)
    g, recorder = traced(identity.with_drafter, c, kind)
    for _ in range(2):  # of some texts, few shapes come twice
        assert tokens(g.generate(c.prompts, max_new_tokens=identity.NEW)) == c.expected
    assert recorder.replays >= 2 * len(recorder.keys) and not recorder.fallbacks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_come_and_go_share_recordings(temperature: float):
    """More requests than rows, which end at different steps: rows are padded to powers of two."""
    prompts, ends = tiny.prompts((18, 24, 17, 28, 20, 9, 31)), range(8)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "seed": 2}
    expected = with_tree(eos=ends, max_rows=4).generate(prompts, **options)
    assert len({len(result.tokens) for result in expected}) > 3
    g, recorder = traced(lambda: with_tree(eos=ends, max_rows=4))
    sizes: dict[str, set[tuple[int, int]]] = defaultdict(set)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traced, "__call__", noting(sizes))
        assert tokens(g.generate(prompts, **options)) == tokens(expected)
    for own in sizes.values():
        assert {(4, 4), (3, 4), (1, 1)} <= own and {padded for _, padded in own} <= {1, 2, 4}
    made = len(recorder.keys)
    assert made == recorder.recordings.total()
    assert all(recorder.keys.count(each) <= 3 * 3 for each in ("forward", "tail"))
    assert recorder.keys.count("tree") <= 3 * 3 * 3  # rows, levels, and widths of what is new up to the root
    assert tokens(g.generate(prompts, **options)) == tokens(expected)
    assert len(recorder.keys) == made and not recorder.fallbacks  # the cache kept its memory


def noting(found: dict[str, set[tuple[int, int]]]) -> Any:
    """Replays that note their rows, and how many a recording has, by segment."""

    def play(
        self: Traced, segment: str, sizes: PaddedSizes, *args: Any, call: Any = Traced.__call__, **options: Any
    ) -> Any:
        found[segment].add(tuple(sizes))
        return call(self, segment, sizes, *args, **options)

    return play


def test_rows_that_may_hold_something_are_no_padding(monkeypatch: pytest.MonkeyPatch):
    prompts, ends = tiny.prompts((18, 24, 17, 28)), range(8)
    g, _ = traced(lambda: with_tree(eos=ends))
    sizes: dict[str, set[tuple[int, int]]] = defaultdict(set)
    monkeypatch.setattr(Traced, "__call__", noting(sizes))
    monkeypatch.setattr(g.engine._admission, "free_rows", lambda running: sorted({0, 1, 2, 3}.difference(running)))
    g.generate(prompts, max_new_tokens=30)
    assert (3, 4) in sizes["forward"] & sizes["tail"] & sizes["tree"]
    sizes.clear()
    monkeypatch.setattr(g.engine._admission, "free_rows", lambda running: [])
    monkeypatch.setattr(DraftRunner, "release", lambda self, row: None)
    g.generate(prompts, max_new_tokens=30)
    for own in sizes.values():
        assert (3, 3) in own and all(rows == padded for rows, padded in own)


def test_a_cache_that_grows_is_recorded_anew():
    g, recorder = traced(with_tree)
    short, long = tiny.prompts((20, 9)), tiny.prompts((220, 30, 50), seed=2)
    expected = [tokens(with_tree().generate(prompts, max_new_tokens=18)) for prompts in (short, long)]
    for prompts, texts in zip((short, long, short), (*expected, expected[0]), strict=True):
        assert tokens(g.generate(prompts, max_new_tokens=18)) == texts
    assert not recorder.fallbacks
    assert {"forward", "tail", "tree"} == set(recorder.recordings)
    g.close()
    assert not recorder.recordings.total()


def test_a_recording_that_outlives_its_cache_gives_a_wrong_text(monkeypatch: pytest.MonkeyPatch):
    """These tests would see it."""
    monkeypatch.setattr(SlotCache, "version", property(lambda self: 0, lambda self, value: None), raising=False)
    g, _ = traced(with_tree)
    prompts = tiny.prompts((20, 220, 20))  # the second takes a larger cache
    texts = [tokens(g.generate([prompt], max_new_tokens=18)) for prompt in prompts]
    expected = [tokens(with_tree().generate([prompt], max_new_tokens=18)) for prompt in prompts]
    assert texts[:2] == expected[:2] and texts[2] != expected[2]


@pytest.mark.parametrize("segment", ["tree", "forward", "tail"])
def test_an_interruption_leaves_recordings_that_work(segment: str, monkeypatch: pytest.MonkeyPatch):
    g, recorder = traced(with_tree)
    expected = tokens(g.generate(PROMPTS, max_new_tokens=20))
    play, calls = Traced.__call__, []

    def interrupted(self: Any, name: str, *args: Any, **options: Any) -> Any:
        calls.append(name)
        if calls.count(segment) == 3:
            raise KeyboardInterrupt
        return play(self, name, *args, **options)

    monkeypatch.setattr(Traced, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        g.generate(PROMPTS, max_new_tokens=20)
    calls.clear()
    monkeypatch.setattr(Traced, "__call__", play)
    assert tokens(g.generate(PROMPTS, max_new_tokens=20)) == expected
    assert not recorder.fallbacks


def test_logits_processors_run_eagerly(caplog: pytest.LogCaptureFixture):
    def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([3, 5, 8]), -torch.inf)

    g, recorder = traced(with_tree)
    options: dict[str, Any] = {"max_new_tokens": 20, "logits_processor": [ban], "temperature": 1.0, "seed": 3}
    assert tokens(g.generate(PROMPTS, **options)) == tokens(with_tree().generate(PROMPTS, **options))
    assert set(recorder.recordings) == {"forward", "draft"}
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"The {segment} of a step runs eagerly: it depends on a function on the host." for segment in ("tree", "tail")
    ]
    g.generate(PROMPTS, max_new_tokens=20)
    assert set(recorder.recordings) == {"forward", "tail", "draft", "tree"}


def test_logprobs_and_scores_of_replayed_steps():
    options: dict[str, Any] = {"max_new_tokens": 20, "logprobs": 2, "temperature": 1.0, "seed": 3}
    g, recorder = traced(with_tree)
    for found, expected in zip(g.generate(PROMPTS, **options), with_tree().generate(PROMPTS, **options), strict=True):
        assert found.tokens == expected.tokens and found.logprobs == expected.logprobs
        assert found.stats.accepted_by_depth == expected.stats.accepted_by_depth
    assert not recorder.fallbacks


def test_a_rotary_embedding_that_follows_the_length_runs_eagerly():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = CausalLM(tiny.build("llama", rope_parameters=rope, max_position_embeddings=64))
    expected = tokens(tiny.generator(target).generate(tiny.prompts((20, 9)), max_new_tokens=30))
    recorder = Traced()
    g = tiny.generator(target, recorder=recorder)
    assert tokens(g.generate(tiny.prompts((20, 9)), max_new_tokens=30)) == expected
    assert set(recorder.recordings) == {"tail"} and "rope_type dynamic" in str(recorder.fallbacks)


def test_a_model_that_reads_values_runs_eagerly(monkeypatch: pytest.MonkeyPatch):
    target = CausalLM(tiny.build("llama"))
    expected = tokens(tiny.generator(target).generate(PROMPTS, max_new_tokens=10))
    inner = target.model.model.norm
    inner.register_forward_hook(lambda module, args, output: output * float(output.sum() * 0 + 1))
    recorder = Traced()
    g = tiny.generator(target, recorder=recorder)
    assert tokens(g.generate(PROMPTS, max_new_tokens=10)) == expected
    assert set(recorder.recordings) == {"tail"}
    assert recorder.fallbacks == {
        ("forward", "recording failed with RuntimeError: _local_scalar_dense cannot be recorded")
    }


def test_a_faulty_draft_is_still_an_error():
    def propose(view: View, plan: Plan) -> Draft:
        return Draft(TokenTree.chain(torch.stack([view.roots + 1, view.roots], 1)), Law.FIXED)

    recorder = Traced()
    g = tiny.generator(CausalLM(tiny.build("llama")), tiny.ScriptedDrafter(propose, max_nodes=1), recorder=recorder)
    with pytest.raises(DrafterError, match="node 0"):
        g.generate(PROMPTS, max_new_tokens=10)
    assert not recorder.fallbacks
