"""Prompts that begin like an earlier one are not read again, and say what they say without that."""

import gc
import itertools
import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

import random_heads as heads
import runs
import tiny
from foredraft.compose.load import load
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import NumericsError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.stop import StopRules
from foredraft.drafters.online.method import Online
from foredraft.drafters.online.trainer import Options as OnlineOptions
from foredraft.engine.generator import Generator
from foredraft.engine.prefix_cache import BLOCK, PrefixCache, block_keys
from foredraft.engine.request import Request, Sequence
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import BUCKET
from runs import tapped

KINDS = ["none", "draft model", "eagle3", "medusa"]
NEW = 20
SAMPLED = {"temperature": 1.0, "seed": 3}


def build(kind: str = "none", **options: Any) -> Generator:
    return runs.small(kind, **{"prefix_cache": True, **options})


def say(g: Generator, prompt: Seq[int], *, new: int = NEW, tenant: str = "", **options: Any) -> Sequence:
    [sequence] = g.submit([list(prompt)], SamplingParams(max_new_tokens=new, **options), tenant=tenant)
    g.engine.run([sequence])
    return sequence


def cached(sequence: Sequence) -> int:
    return sequence.stats.cached_tokens


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("none", SAMPLED),
        ("draft model", {}),
        ("draft model", SAMPLED),
        ("eagle3", SAMPLED),
        ("medusa", {}),
        ("relay", SAMPLED),
        ("cascade", SAMPLED),
    ],
)
def test_turns_of_a_chat_are_read_once(kind: str, options: dict):
    """Each prompt is all that was said before and a new message. Heads need features, which outputs do not leave."""
    g, plain = build(kind), build(kind, prefix_cache=False)
    said, before = tiny.prompts((60,))[0], 0
    for message in tiny.prompts((30, 1, 45, 9), seed=5):
        result, alone = say(g, said, **options), say(plain, said, **options)
        assert result.tokens == alone.tokens and result.stats.accepted == alone.stats.accepted
        assert cached(result) == before and cached(alone) == 0
        before = len(said) - 1 + (0 if kind in ("eagle3", "medusa") else NEW)
        said = [*said, *result.tokens, *message]
    assert len(g.engine.prefixes) == 1, "a prompt that continues a row takes that row"
    assert 0 < g.engine.prefixes.hits < g.engine.prefixes.queried
    g.engine.close()
    assert not g.engine._stepper.cache._buffer_rows


@pytest.mark.parametrize("kind", KINDS)
def test_requests_at_the_same_time_share_what_they_begin_with(kind: str):
    """With rows that still run, that have ended, and with one that is read first because the others follow it."""
    system, *users = tiny.prompts((300, 9, 40, 17, 25, 1, 33))
    prompts = [system + user for user in users]
    g, plain = build(kind, max_prefill_tokens=16, max_rows=4), build(kind, prefix_cache=False)
    sequences = [g.submit([prompt], SamplingParams(max_new_tokens=NEW))[0] for prompt in prompts]
    g.engine.run(sequences)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.tokens == plain.generate(prompt, max_new_tokens=NEW).tokens
    shared = [0, *[300] * 5]
    if kind in ("eagle3", "medusa"):
        shared[prompts.index(system + users[4])] = 299  # the state of its last token is not stored
    assert sorted(cached(each) for each in sequences) == sorted(shared)
    g.engine.close()


def test_what_is_cached_is_not_read():
    prompt = tiny.prompts((200,))[0]
    g = build()
    say(g, prompt, new=4)
    with runs.forwards(tapped()) as read:
        other = say(g, [*prompt[:150], 1, 2, 3], new=1)
        same = say(g, prompt, new=1)
    assert read == [(1, 2), (1, 1), (1, 1)]
    assert (cached(other), cached(same)) == (150, 199)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_head_gets_the_last_state_of_a_prompt_that_another_continues(kind: str):
    prompt = tiny.prompts((80,))[0]
    g, plain = build(kind), build(kind, prefix_cache=False)
    say(g, prompt)
    result, alone = say(g, prompt[:50]), say(plain, prompt[:50])
    assert cached(result) == 48 and result.tokens == alone.tokens and result.stats.accepted == alone.stats.accepted


@pytest.mark.parametrize("kind", heads.READERS)
@pytest.mark.parametrize("together", [False, True], ids=["after", "beside"])
def test_a_drafter_takes_over_what_it_has_read(kind: str, together: bool, monkeypatch: pytest.MonkeyPatch):
    """In the same row or in another one; its drafts are those of a drafter that reads everything, and at once."""
    system, *users = tiny.prompts((300, 9, 40))
    g, plain = build(kind), build(kind, prefix_cache=False, max_prefill_tokens=10_000)
    written = heads.own_reads(monkeypatch, g.engine._stepper.cache)
    if together:
        [first] = g.submit([system + users[0]], SamplingParams(max_new_tokens=100))
        while len(first.tokens) < 5:
            g.engine.step()
    else:
        first = say(g, system + users[0])
    assert sum(written) > 300
    written.clear()
    drafts: dict[Generator, list[list[int]]] = {g: [], plain: []}
    for each, trees in drafts.items():

        def propose(view: View, plan: Plan, each: Generator = each, trees: list[list[int]] = trees) -> Draft:
            draft = type(each.engine.drafter).propose(each.engine.drafter, view, plan)
            trees.append(draft.tree.tokens[-1][draft.tree.valid[-1]].tolist())  # the row that was admitted last
            return draft

        monkeypatch.setattr(each.engine.drafter, "propose", propose)
    second = say(g, system + users[1])
    assert cached(second) == 300 and 0 < max(written) < 60
    alone = say(plain, system + users[1])
    steps = 15 if kind == "eagle3" else 2  # the last drafts are as short as the output's rest
    if kind == "bandit":
        steps = 0  # what is played depends on what was played before
    assert second.tokens == alone.tokens and drafts[g][:steps] == drafts[plain][:steps]
    g.engine.cancel([first])


@pytest.mark.parametrize("kind", ["draft model", "eagle3"])
def test_a_drafter_that_has_learned_reads_again(kind: str, monkeypatch: pytest.MonkeyPatch):
    """What was read before a change of its weights is not handed on."""
    inner: Any = heads.small_drafter(kind, CausalLM(tiny.build("llama", max_position_embeddings=1024)))
    drafter = Online(OnlineOptions(interval=2, background=False), inner)
    g = tiny.generator(tapped(), drafter, prefix_cache=True)
    written = heads.own_reads(monkeypatch, g.engine._stepper.cache)
    prompt = tiny.prompts((300,))[0]
    reads = []
    for end in range(4):
        written.clear()
        assert cached(say(g, [*prompt, end])) == (300 if end else 0)
        reads.append(max(written) > 60)
    assert drafter.version == 2 and reads == [True, False, True, False]


def test_short_prefixes_are_read_again():
    g = build()
    say(g, [*range(15), *range(40)])
    assert cached(say(g, [*range(15), 50, 51, 52])) == 0


def held(prompt: Seq[int], output: Seq[int] = (), tenant: str = "") -> Sequence:
    params = SamplingParams()
    sequence = Sequence(Request(tuple(prompt), params, StopRules(9, frozenset())), lambda ids: "", 0, 0, tenant=tenant)
    sequence.tokens += output
    return sequence


@pytest.mark.parametrize("features", [False, True], ids=["all", "prompts"])
def test_the_longest_prefix_is_found_as_by_comparing_with_every_row(features: bool):
    """Outputs grow, rows end, are dropped and are held again; queries end anywhere in a row's text or leave it."""
    choose = random.Random(5)
    prefixes, rows = PrefixCache(enabled=True), {}
    texts = [[choose.randrange(3) for _ in range(90)] for _ in range(3)]
    text = lambda: [*choose.choice(texts)[: choose.randrange(1, 90)], *choose.choice(texts)[: choose.randrange(1, 30)]]  # noqa: E731
    found_lengths = set()
    for _ in range(600):
        row = choose.randrange(8)
        action = choose.randrange(4)
        if action == 0:
            rows[row] = held(text(), tenant=choose.choice("ab"))
            states = {0: torch.zeros(1, len(rows[row].prompt) - 1, 1)} if features else {}
            prefixes.hold(row, rows[row], states, 0)
        elif action == 1 and row in prefixes:
            rows[row].tokens += text()[: choose.randrange(20)] if row in prefixes._running else []
        elif action == 2 and row in prefixes:
            prefixes.end(row, rows[row])
        elif choose.randrange(4) == 0:
            prefixes.drop([row])
        query, tenant = np.array(text()), choose.choice("ab")
        best = 0
        for each in (rows[row] for row in range(8) if row in prefixes and rows[row].tenant == tenant):
            kept = (each.prompt if features else [*each.prompt, *each.tokens])[:-1]
            same = next(
                (i for i, (a, b) in enumerate(zip(kept, query, strict=False)) if a != b), min(len(kept), len(query))
            )
            best = max(best, same - (features and same == len(query) < len(kept)))
        found = prefixes.find(tenant, query, choose.choice([None, block_keys(tenant, query)]))
        assert (found.length if found else 0) == (best if best >= BLOCK else 0)
        if found:
            assert rows[found.row].tenant == tenant and all(each.shape[1] == best for each in found.features.values())
            found_lengths.add(found.length % BLOCK)
    assert found_lengths == set(range(BLOCK))
    prefixes.drop(range(8))
    assert not prefixes._index and not prefixes._rows and not prefixes._running


def test_equal_hashes_of_other_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "foredraft.engine.prefix_cache.block_keys", lambda tenant, tokens, before=None: [7] * (len(tokens) // BLOCK)
    )
    prefixes = PrefixCache(enabled=True)
    prefixes.hold(3, held(range(100)), {}, 0)
    assert prefixes.find("", np.arange(1, 90)) is None
    found = prefixes.find("", np.array([*range(40), *range(60)]))
    assert found and found.length == 40


def test_of_rows_that_hold_as_much_the_latest_used_is_taken():
    prefixes = PrefixCache(enabled=True)
    for row in (4, 2, 6):
        prefixes.hold(row, held([*range(50), row]), {}, 0)
    query = np.array([*range(50), 70])
    found = prefixes.find("", query)
    assert found and (found.row, found.length) == (6, 50)
    prefixes.end(4, held([]))
    found = prefixes.find("", query)
    assert found and found.row == 4


def test_tenants_do_not_share():
    prompt = tiny.prompts((90,))[0]
    g = build()
    for tenant, hit in (("a", 0), ("b", 0), ("", 0), ("a", 89), ("b", 89), ("", 89)):
        assert cached(say(g, prompt, tenant=tenant)) == hit
    first, second = (g.submit([[*prompt, 5]], SamplingParams(max_new_tokens=2), tenant=t)[0] for t in ("c", "d"))
    g.engine.run([first, second])
    assert cached(first) == cached(second) == 0


def test_the_least_recently_used_contents_make_room():
    a, b, c, d = tiny.prompts((50, 50, 50, 50), seed=9)
    g = build(max_rows=3)
    for prompt in (a, b, c, a, d):  # d takes the row of b
        say(g, prompt)
    assert [bool(cached(say(g, prompt))) for prompt in (a, c, d)] == [True] * 3
    assert cached(say(g, b)) == 0 and cached(say(g, a)) == 0, "b took the row of a"
    assert len(g.engine.prefixes) == 3


def test_contents_make_room_for_requests_that_need_the_memory():
    """Three rows of 256 slots fit, or one of 768: nobody waits for what has ended."""
    g, plain = build(max_slots=3 * BUCKET, max_rows=8), build(prefix_cache=False)
    prompts = [*tiny.prompts((60,) * 6, seed=4), tiny.prompts((600,))[0], *tiny.prompts((60,) * 3, seed=6)]
    token_bytes = tapped().token_bytes
    for prompt in prompts:
        result = say(g, prompt)
        assert result.tokens == plain.generate(prompt, max_new_tokens=NEW).tokens
        assert g.engine._stepper.cache.nbytes <= 3 * BUCKET * token_bytes
    sequences = [g.submit([prompt], SamplingParams(max_new_tokens=NEW))[0] for prompt in prompts]
    g.engine.run(sequences)
    assert [s.tokens for s in sequences] == [plain.generate(p, max_new_tokens=NEW).tokens for p in prompts]


def test_a_row_with_nan_is_never_taken_over():
    g = tiny.generator(tiny.poisoned(), prefix_cache=True)
    prompt = tiny.prompts((40,), vocab=70)[0]
    bad = say(g, [*prompt, 77, 5])
    assert isinstance(bad.error, NumericsError) and len(g.engine.prefixes) == 0
    good = say(g, prompt, logit_bias={77: -1e4})
    assert good.error is None and cached(good) == 0 and len(good.tokens) == NEW


def test_a_cancelled_request_leaves_what_it_has_said():
    prompt = tiny.prompts((40,))[0]
    g = build()
    with g.stream(prompt, max_new_tokens=100) as stream:
        said = [token for piece in itertools.islice(stream, 30) for token in piece.tokens]
    assert cached(say(g, [*prompt, *said, 1])) == len(prompt) + len(said) - 1
    half = build(max_prefill_tokens=8)
    running = half.submit([[1]], SamplingParams(max_new_tokens=90))
    half.engine.step()
    reading = half.submit([tiny.prompts((200,))[0]], SamplingParams(max_new_tokens=9))
    half.engine.step()
    half.engine.cancel(reading)
    assert len(half.engine.prefixes) == 1, "a prompt that was not read to its end leaves nothing"
    half.engine.cancel(running)


def test_an_error_forgets_everything():
    g = build()
    prompt = tiny.prompts((40,))[0]
    wanted = say(g, prompt).tokens
    with runs.interrupted(tapped()):
        say(g, prompt)
    assert len(g.engine.prefixes) == 0
    again = say(g, prompt)
    assert again.tokens == wanted and cached(again) == 0


def test_the_exact_mode_reads_every_prompt():
    with load(tiny.build("llama"), "prompt_lookup", exact=True, prefix_cache=True, max_prefill_tokens=8) as g:
        prompt = tiny.prompts((40,))[0]
        assert [g.generate(prompt, max_new_tokens=4).stats.cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("kind", ["none", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_requests(kind: str):
    g = build(kind, max_rows=4)
    source = [*tiny.prompts([20 + 3 * (i % 17) for i in range(40)]), *([tiny.prompts((60,))[0]] * 10)]
    sizes = []
    for count, prompt in enumerate(source * 6, start=1):
        [sequence] = g.submit([prompt], SamplingParams(max_new_tokens=1 + count % 5))
        if count % 3 == 0:
            g.engine.run([sequence])
        if count % 100 == 0:
            while g.engine.running + g.engine.waiting:
                g.engine.step()
            gc.collect()
            held = sum(type(each) is Sequence for each in gc.get_objects())
            sizes.append((g.engine._stepper.cache.nbytes, len(g.engine.prefixes), held))
    assert len(set(sizes)) == 1 and sizes[0][1] == 4


# The queue.


def test_lower_priorities_go_first_and_equal_ones_in_order():
    g = build(max_rows=1, prefix_cache=False)
    order: list[int] = []
    running = g.submit([[1, 2]], SamplingParams(max_new_tokens=6))
    g.engine.step()
    priorities = (0, 5, -1, 0, -1, 5)
    queued = [
        g.submit([[3, number + 4]], SamplingParams(max_new_tokens=2), priority=priority)[0]
        for number, priority in enumerate(priorities)
    ]
    while not all(each.finished for each in queued):
        g.engine.step()
        order += [number for number, each in enumerate(queued) if each.finished and number not in order]
    assert running[0].finished and order == [2, 4, 0, 3, 1, 5]


def test_a_request_that_does_not_fit_yet_is_not_passed_over():
    g = build(max_slots=3 * BUCKET, max_rows=8, prefix_cache=False)
    first = g.submit([tiny.prompts((200,))[0]], SamplingParams(max_new_tokens=5))[0]
    g.engine.step()
    large = g.submit([tiny.prompts((500,))[0]], SamplingParams(max_new_tokens=5))[0]
    small = g.submit([tiny.prompts((10,))[0]], SamplingParams(max_new_tokens=5))[0]
    g.engine.step()
    assert (g.engine.running, g.engine.waiting) == (1, 2)
    g.engine.run([small])
    assert first.finished and 0 < large.counters.admitted_at < small.counters.admitted_at
    g.engine.run([large])


def test_the_engine_counts_requests_and_prefixes():
    g = build(max_rows=2, max_prefill_tokens=16)
    engine = g.engine
    sequences = [g.submit([[1, 2, 3]], SamplingParams(max_new_tokens=30))[0]]
    engine.step()
    sequences += [g.submit([prompt], SamplingParams(max_new_tokens=30))[0] for prompt in tiny.prompts((90, 8))]
    assert (engine.running, engine.prefilling, engine.waiting) == (1, 0, 2)
    engine.step()
    assert (engine.running, engine.prefilling, engine.waiting) == (2, 1, 1)
    engine.run(sequences)
    assert (engine.running, engine.prefilling, engine.waiting) == (0, 0, 0)
    assert (len(engine.prefixes), engine.prefixes.queried, engine.prefixes.hits) == (2, 2 + 89 + 7, 0)
    assert engine._admission.free_rows(()) == [], "a recorded step must not use a row with contents as padding"
