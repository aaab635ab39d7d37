"""The engine: rows that come and go, ends inside accepted blocks, limits, faults, and who sees what of it."""

import dataclasses
import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import runs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import NumericsError, OptionError, PromptError
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters.prompt_lookup import Options as LookupOptions, PromptLookup
from foredraft.engine.generator import Generator, Result
from foredraft.engine.policy import Constant, Heuristic
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer
from runs import NEW, drafting, model, plain

KINDS = ("none", "lookup tree", "self", "other tree")
SAMPLED = {"temperature": 1.0, "seed": 11}
EACH = pytest.mark.parametrize(
    ("kind", "options"),
    [("none", SAMPLED), ("lookup tree", {}), ("self", SAMPLED), ("other tree", {}), ("other tree", SAMPLED)],
)
"""Each kind of draft, greedy or sampled, and both where drafts are drawn in trees and rejected."""


def again(g: Generator, prompt: list[int], result: Result, **options: Any) -> list[int]:
    """The same output, asked for alone by the seed that it was made with."""
    return g.generate(prompt, **{**options, "seed": result.seed}).tokens


# Acceptance: an error by one is lossless and silent, so it is pinned.


@pytest.mark.parametrize(
    ("depth", "branching", "temperature"),
    [
        *[(depth, None, temperature) for depth in (1, 2, 5) for temperature in (0.0, 1.0)],
        *[(3, (2, 2, 1), 0.0), (2, (1, 3), 0.0), (1, (4,), 0.0), (1, (4,), 1.0)],  # deeper ones: test_shared_trees
    ],
)
def test_a_draft_of_the_target_itself_is_accepted_to_its_full_depth(
    depth: int, branching: tuple[int, ...] | None, temperature: float
):
    drafter, policy = tiny.draft_model(model(), model(), depth, branching)
    g = tiny.generator(model(), drafter, policy)
    for result in g.generate(tiny.prompts(), max_new_tokens=4 * (depth + 1), temperature=temperature, seed=0):
        assert result.stats.acceptance_length == depth + 1
        assert result.stats.target_forwards == 4
        assert result.stats.accepted_by_depth == (4,) * depth
        assert result.stats.drafted == 4 * (depth if branching is None else drafter.needs.max_nodes)


def test_the_last_draft_is_no_longer_than_what_may_still_come():
    drafter, policy = tiny.draft_model(model(), model(), 5)
    result = tiny.generator(model(), drafter, policy).generate(tiny.prompts((9,))[0], max_new_tokens=10)
    assert result.stats.target_forwards == 2
    assert result.stats.drafted == 5 + 3


@functools.cache
def cycle() -> CausalLM:
    """Says 0, 1, 2, 3, 4, 0, 1, ...: what comes next depends on the last token alone."""
    raw = tiny.build("llama", vocab_size=8, tie_word_embeddings=False)
    for parameter in raw.parameters():
        parameter.data.zero_()
    raw.model.norm.weight.data.fill_(1.0)
    raw.model.embed_tokens.weight.data[:, :8] = torch.eye(8)
    for token in range(8):
        raw.lm_head.weight.data[(token + 1) % 5, token] = 20.0
    return CausalLM(raw)


@pytest.mark.parametrize("continuations", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_prompt_lookup_copies_a_periodic_text(continuations: int, temperature: float):
    lookup = PromptLookup(LookupOptions(prompt_lookup_num_tokens=4, continuations=continuations))
    g = tiny.generator(cycle(), lookup, Constant(4))
    for prompt in ([0, 1, 2, 3, 4] * 3, [0, 1, 2, 3, 4] * 4 + [0, 1]):
        result = g.generate(prompt, max_new_tokens=20, temperature=temperature, seed=0)
        assert result.tokens == [(prompt[-1] + 1 + i) % 5 for i in range(20)]
        assert result.stats.acceptance_length == 5.0


def test_heuristic_lengths_go_up_and_down():
    """transformers' schedule: 2 more after a draft that was accepted whole, 1 less after any other."""
    drafter, _ = tiny.draft_model(model(), model(), 30)
    g = tiny.generator(model(), drafter, Heuristic(2, 1e-9))
    result = g.generate(tiny.prompts((9,))[0], max_new_tokens=3 + 5 + 7 + 9)
    assert result.stats.target_forwards == 4 and result.stats.drafted == 2 + 4 + 6 + 8
    drafter, _ = tiny.draft_model(tiny.stranger(), model(), 30)
    g = tiny.generator(model(), drafter, Heuristic(3, 1e-9))
    result = g.generate(tiny.prompts((9,))[0], max_new_tokens=NEW)
    assert result.tokens == plain(tiny.prompts((9,))[0])
    assert result.stats.drafted < 3 * result.stats.target_forwards


# Sampled texts: keyed by position, so those of picked drafts are the reference's, token for token.


@pytest.mark.parametrize("kind", ["none", "lookup tree", "liar"])
def test_sampled_text_of_picked_drafts_is_the_references(kind: str):
    prompts = tiny.prompts()
    seeds = derive_seeds(11, len(prompts))
    expected = [plain(prompt, **{**SAMPLED, "seed": seed}) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert len({tuple(text) for text in expected}) == len(prompts)
    truths = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    g = tiny.generator(model(), tiny.liar(truths)) if kind == "liar" else drafting(kind)
    together = g.generate(prompts, max_new_tokens=NEW, **SAMPLED)
    assert [result.tokens for result in together] == expected
    assert [result.seed for result in together] == seeds
    assert kind != "liar" or sum(result.stats.accepted for result in together) > 0
    for prompt, text, seed in zip(prompts, expected, seeds, strict=True):
        assert g.generate(prompt, max_new_tokens=NEW, temperature=1.0, seed=seed).tokens == text


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_and_sampled_rows_share_a_batch(kind: str):
    prompts = tiny.prompts()
    g = drafting(kind)
    settings = [SamplingParams(max_new_tokens=NEW, temperature=t, seed=3) for t in (0.0, 1.0, 0.0, 0.5)]
    together = [sequence.tokens for sequence in runs.run_each(g, prompts, settings)]
    alone = [g.generate(prompt, params).tokens for prompt, params in zip(prompts, settings, strict=True)]
    assert together == alone
    for index in (0, 2):
        assert alone[index] == plain(prompts[index])


def no_neighbours(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that depends on the path: a token next to the last one is banned."""
    for shift in (-1, 1):
        scores = scores.scatter(1, (ids[:, -1:] + shift) % tiny.VOCAB, -torch.inf)
    return scores


@pytest.mark.parametrize("kind", KINDS)
def test_what_depends_on_the_text_follows_each_nodes_own_path(kind: str):
    """Penalties, bans and processors, with drafts that are warped alike, hence accepted as ever."""
    prompt = tiny.prompts((17,))[0]
    whole = plain(prompt)
    for options in (
        {"repetition_penalty": 1.6, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"no_repeat_ngram_size": 2, "bad_words_ids": ((whole[1], whole[2]), (whole[6],))},
        {"logits_processor": (no_neighbours,)},
    ):
        result = drafting(kind).generate(prompt, max_new_tokens=NEW, **options)
        assert result.tokens == plain(prompt, **options) != whole
        assert kind != "self" or result.stats.acceptance_length == 4.0


# Rows come and go.


@EACH
def test_requests_wait_and_rows_are_used_again(kind: str, options: dict):
    """Two rows for five requests of different lengths: each says what it says alone."""
    prompts = tiny.prompts((3, 30, 1, 12, 7))
    lengths = (5, 11, 1, 9, 16)
    g = drafting(kind, max_rows=2)
    params = [SamplingParams(max_new_tokens=length, **options) for length in lengths]
    sequences = [g.submit([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    most = 0
    while not all(sequence.finished for sequence in sequences):
        g.engine.step()
        most = max(most, len(g.engine._batch))
    assert most == 2
    alone = drafting(kind)
    for prompt, p, sequence in zip(prompts, params, sequences, strict=True):
        assert sequence.tokens == alone.generate(prompt, p).tokens
        assert len(sequence.tokens) == p.max_new_tokens and sequence.finish_reason == "length"
    assert not g.engine._stepper.cache._buffer_rows and not g.engine.waiting


@pytest.mark.parametrize("kind", ["none", "other", "self tree", "lookup tree"])
def test_several_texts_of_one_prompt(kind: str):
    prompt = tiny.prompts((6,))[0]
    g = drafting(kind, max_rows=3)
    results = g.generate(prompt, num_return_sequences=5, max_new_tokens=12, **SAMPLED)
    texts = [result.tokens for result in results]
    assert len({tuple(text) for text in texts}) == 5
    assert results[0].seed == SAMPLED["seed"], "output 0 has the seed that was given"
    assert texts[0] == g.generate(prompt, max_new_tokens=12, **SAMPLED).tokens
    assert texts == [r.tokens for r in g.generate(prompt, num_return_sequences=5, max_new_tokens=12, **SAMPLED)]
    many = g.generate([prompt, prompt], num_return_sequences=2, max_new_tokens=12, **SAMPLED)
    assert [result.tokens for result in many] == texts[:4], "equal prompts of one call share no stream"
    assert texts[1:] == [again(g, prompt, result, max_new_tokens=12, **SAMPLED) for result in results[1:]]
    assert len(g.generate(prompt, num_return_sequences=40, max_new_tokens=1, **SAMPLED)) == 40


def test_speculation_is_switched_off_for_one_request():
    prompts = tiny.prompts((6, 11))
    g = drafting("self")
    params = [SamplingParams(max_new_tokens=NEW, speculate=speculate) for speculate in (True, False)]
    sequences = runs.run_each(g, prompts, params)
    assert [sequence.tokens for sequence in sequences] == [plain(prompt) for prompt in prompts]
    assert sequences[0].stats.acceptance_length == 4.0
    assert sequences[1].stats.drafted == 0 and sequences[1].stats.target_forwards == NEW
    assert g.generate(prompts[1], params[1]).stats.drafted == 0


# Ends.


def stopping(kind: str = "self") -> Generator:
    """With a tokenizer in which each token is one character."""
    return drafting(kind, tokenizer=Tokenizer(tiny.tokenizer()))


def text_of(tokens: list[int]) -> str:
    return "".join(chr(32 + token) for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_inside_a_block(kind: str):
    """Tokens up to and including the one that completes it are kept; the text ends before it."""
    prompt = tiny.prompts((6,))[0]
    whole = plain(prompt)
    text = text_of(whole)
    for begin, size in ((0, 1), (4, 2), (5, 3), (6, 1), (9, 4), (NEW - 2, 2)):
        stop = text[begin : begin + size]
        at = text.index(stop)
        result = stopping(kind).generate(prompt, max_new_tokens=NEW, stop_strings=(stop, "never said"))
        assert result.text == text[:at]
        assert result.tokens == whole[: at + size]
        assert result.finish_reason == "stop"
        assert result.stats.tokens == at + size
    result = stopping(kind).generate(prompt, max_new_tokens=NEW, stop_strings=("never said",))
    assert (result.text, result.finish_reason) == (text, "length")


@pytest.mark.parametrize("kind", KINDS)
def test_every_end_of_sequence_id_ends_the_text_wherever_it_stands_in_a_block(kind: str):
    prompt = tiny.prompts((6,))[0]
    whole = plain(prompt)
    for place in (0, 2, 3, 9):
        eos = (95, whole[place], 94)
        first = min(whole.index(token) for token in eos if token in whole)
        g = drafting(kind, eos=eos)
        result = g.generate(prompt, max_new_tokens=NEW)
        assert result.tokens == whole[: first + 1] and result.finish_reason == "stop"
        assert result.stats.tokens == first + 1
        assert plain(prompt, eos=eos) == result.tokens
        assert g.generate(prompt, max_new_tokens=NEW, eos_token_id=()).tokens == whole
        other = g.generate(prompt, max_new_tokens=NEW, eos_token_id=(whole[2],))
        assert other.tokens == whole[: whole.index(whole[2]) + 1]


@EACH
def test_least_new_tokens(kind: str, options: dict):
    prompt = tiny.prompts((6,))[0]
    eos = tuple(plain(prompt, **options)[:3])
    fixed = not options or kind in ("none", "lookup tree")
    for least in (1, 2, 5, 9):
        result = drafting(kind, eos=eos).generate(prompt, max_new_tokens=NEW, min_new_tokens=least, **options)
        assert len(result.tokens) >= least
        assert not set(result.tokens[:least]) & set(eos)
        if fixed:
            assert result.tokens == plain(prompt, eos=eos, min_new_tokens=least, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_one_new_token(kind: str):
    prompts = tiny.prompts()
    for result, prompt in zip(drafting(kind).generate(prompts, max_new_tokens=1), prompts, strict=True):
        assert result.tokens == plain(prompt, max_new_tokens=1)
        assert (result.finish_reason, result.stats.target_forwards, result.stats.drafted) == ("length", 1, 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("llama", kind) for kind in ("none", "lookup tree", "other", "self tree")],
        *[(name, kind) for name in ("gpt2", "opt") for kind in ("none", "self tree")],
    ],
)
def test_the_context_ends(name: str, kind: str):
    """A context of 48: rows reach its end at different times, with drafts that would reach beyond."""
    target = model(name, max_position_embeddings=48)
    assert target.max_length == 48
    prompts = tiny.prompts((40, 3, 45, 47))
    results = drafting(kind, target).generate(prompts, max_new_tokens=100)
    for prompt, result in zip(prompts, results, strict=True):
        remaining = 48 - len(prompt)
        assert result.tokens == plain(prompt, target, max_new_tokens=remaining)
        assert (len(result.tokens), result.finish_reason) == (remaining, "length")
    with pytest.raises(PromptError, match="has 48 tokens; the model's context of 48 leaves no room"):
        drafting(kind, target).generate(tiny.prompts((48,))[0])


# What is refused.


def test_bad_requests_are_refused_before_anything_is_queued():
    g = drafting("none")
    for prompt, match in (([], "empty"), ([1, 96], "outside the model's vocabulary of 96"), ([-1], "vocabulary")):
        with pytest.raises(PromptError, match=match):
            g.generate(prompt)
        with pytest.raises(PromptError):
            g.batch([[1, 2], prompt])
    with pytest.raises(PromptError, match="no prompts"):
        g.batch([])
    with pytest.raises(OptionError, match="Unknown generation option 'temprature'. Did you mean temperature"):
        g.generate([1], temprature=1.0)
    with pytest.raises(OptionError, match="max_new_tokens must be"):
        g.generate([1], max_new_tokens=0)
    with pytest.raises(OptionError, match="token 96 is outside the vocabulary"):
        g.generate([1], logit_bias={96: 1.0})
    assert not g.engine.waiting


# Cancelling, streaming.


@pytest.mark.parametrize("kind", KINDS)
def test_cancelling_between_steps_keeps_the_text(kind: str):
    prompts = tiny.prompts((6, 11))
    g = stopping(kind)
    first, second = g.submit(prompts, SamplingParams(max_new_tokens=NEW))
    g.engine.step()
    g.engine.step()
    said = list(first.tokens)
    g.engine.cancel([first])
    assert first.finished and first.finish_reason == "cancelled"
    g.engine.run([second])
    assert 2 <= len(said) < NEW and first.tokens == said == plain(prompts[0])[: len(said)]
    assert first.text == text_of(said)
    assert second.tokens == plain(prompts[1])
    waiting = g.submit([prompts[0]], SamplingParams(max_new_tokens=NEW))
    g.engine.cancel(waiting)
    assert waiting[0].tokens == [] and not g.engine.waiting
    g.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_the_text_in_pieces(kind: str):
    prompt = tiny.prompts((6,))[0]
    whole = plain(prompt)
    with stopping(kind).stream(prompt, max_new_tokens=NEW) as stream:
        pieces = list(stream)
    assert [token for piece in pieces for token in piece.tokens] == whole
    assert "".join(piece.text for piece in pieces) == text_of(whole) == stream.result.text
    assert stream.result.finish_reason == "length" and stream.result.pieces == pieces
    drafted = sum(len(piece.tokens) for piece in pieces if piece.drafted)
    assert drafted == stream.result.stats.accepted
    assert (drafted > 0) == (kind.startswith("self")) or kind in ("lookup tree", "other", "other tree")


@EACH
def test_streams_that_run_at_the_same_time(kind: str, options: dict):
    """Opened one after the other, read in turns, with a batch between: each says what it says alone."""
    prompts = tiny.prompts((6, 19, 2))
    g = drafting(kind)
    alone = [g.generate(prompt, max_new_tokens=NEW, **options).tokens for prompt in prompts]
    streams = [g.stream(prompts[0], max_new_tokens=NEW, **options)]
    said: list[list[int]] = [next(streams[0]).tokens, []]
    streams.append(g.stream(prompts[1], max_new_tokens=NEW, **options))
    said[1] += next(streams[1]).tokens
    assert g.generate(prompts[2], max_new_tokens=NEW, **options).tokens == alone[2]
    for index in (1, 0):
        for piece in streams[index]:
            said[index] += piece.tokens
    assert said == alone[:2]


# Log-probabilities.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "top_k": 5, "repetition_penalty": 1.5}], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_the_model_itself(kind: str, options: dict):
    prompts = tiny.prompts((6, 15))
    g = drafting(kind)
    whole = g.generate(prompts[0], max_new_tokens=NEW, **options).tokens
    params = [
        SamplingParams(max_new_tokens=NEW, logprobs=3, eos_token_id=(whole[9],), **options),
        SamplingParams(max_new_tokens=NEW, **options),
    ]
    scored, plain_one = runs.run_each(g, prompts, params)
    tokens, logprobs = scored.tokens, scored.logprobs
    assert plain_one.logprobs == []
    assert len(logprobs) == len(tokens) == whole.index(whole[9]) + 1
    laws = model().stock_logits(torch.tensor([prompts[0] + tokens]))[0].log_softmax(-1)
    for index, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
        law = laws[len(prompts[0]) - 1 + index]
        assert entry.token == token
        assert math.isclose(entry.logprob, float(law[token]), abs_tol=1e-4)
        best = law.topk(3)
        assert list(entry.top) == best.indices.tolist()
        assert torch.allclose(torch.tensor(list(entry.top.values())), best.values, atol=1e-4)
    assert g.generate(prompts[0], max_new_tokens=2, logprobs=0).logprobs[0].top == {}


# Faults.


@pytest.mark.parametrize("kind", ["none", "self tree", "other"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_nan_ends_one_row_and_the_others_do_not_notice(kind: str, options: dict):
    prompts = tiny.prompts((6, 11, 9, 3))
    prompts[1][4] = 77
    target = tiny.poisoned()
    g = drafting(kind, target, max_rows=2)
    params = SamplingParams(max_new_tokens=NEW, logit_bias={77: -1e4}, **options)
    sequences = g.submit(prompts, params)
    g.engine.run(sequences)
    assert isinstance(sequences[1].error, NumericsError) and sequences[1].tokens == []
    assert "0 tokens were generated before" in str(sequences[1].error)
    alone = drafting(kind, target)
    for index in (0, 2, 3):
        assert sequences[index].error is None
        own = replace(params, seed=sequences[index].seed)
        assert sequences[index].tokens == alone.generate(prompts[index], own).tokens
    with pytest.raises(NumericsError, match="NaN or \\+inf logits"):
        alone.generate(prompts[1], params)
    with pytest.raises(NumericsError), alone.stream(prompts[1], params) as stream:
        list(stream)
    assert alone.generate(prompts[0], params).tokens == sequences[0].tokens


def test_a_draft_model_that_says_nan_costs_nothing_but_speed():
    prompts = tiny.prompts((6, 11))
    prompts[1][4] = 77
    for kind in ("other", "other tree"):
        for options in ({}, SAMPLED):
            g = drafting(kind, draft=tiny.poisoned())
            results = g.generate(prompts, max_new_tokens=NEW, **options)
            assert options or [result.tokens for result in results] == [plain(prompt) for prompt in prompts]
            assert all(len(result.tokens) == NEW for result in results)


def failing(moment: str, *when: int) -> tiny.ScriptedDrafter:
    """A drafter that raises in these calls of this method, counted from 1."""

    def propose(view: View, plan: Plan) -> Draft:
        ones = torch.ones(len(view.rows), 2, dtype=torch.long)
        return Draft(TokenTree.chain(torch.cat([view.roots[:, None], ones], 1)), Law.FIXED)

    drafter, count = tiny.ScriptedDrafter(propose, max_nodes=2), 0
    method = getattr(drafter, moment)

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count in when:
            raise ZeroDivisionError("a fault of the drafter")
        return method(*arguments)

    setattr(drafter, moment, counted)
    return drafter


@pytest.mark.parametrize("moment", ["admit", "propose", "commit"])
def test_a_fault_of_the_drafter_leaves_the_engine_usable(moment: str):
    prompts = tiny.prompts((6, 11, 4))
    drafter = failing(moment, 2)
    g = tiny.generator(model(), drafter, Constant(2), max_rows=2)
    with pytest.raises(ZeroDivisionError, match="a fault of the drafter"):
        g.generate(prompts, max_new_tokens=NEW)
    assert len(g.engine._batch) == 0 and not g.engine.waiting and drafter.rows == set()
    assert [result.tokens for result in g.generate(prompts, max_new_tokens=NEW)] == [plain(p) for p in prompts]


def test_an_interruption_cancels_what_ran_and_keeps_what_was_said():
    prompts = tiny.prompts((6, 11))
    g = drafting("self")
    first, second = g.stream(prompts[0], max_new_tokens=NEW), g.stream(prompts[1], max_new_tokens=NEW)
    next(first), next(second)
    said = [list(stream._sequence.tokens) for stream in (first, second)]
    with runs.interrupted(model()):
        list(first)
    assert first.result.finish_reason == second.result.finish_reason == "cancelled"
    assert said == [first.result.tokens, second.result.tokens] and all(said)
    assert len(g.engine._batch) == 0
    assert g.generate(prompts[0], max_new_tokens=NEW).tokens == plain(prompts[0])


# What a drafter is told.


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(1,), (1, 5, 12), (7, 7)])
def test_a_drafter_that_needs_hidden_states_gets_them(lengths: tuple[int, ...]):
    """Of the prompt but for its last token when admitted, of every node when it commits."""
    target = CausalLM(tiny.build("llama"))
    drafter = tiny.ScriptedDrafter(tiny.Liar([]), max_nodes=7, hidden_layers=(0, 2))
    target.tap(drafter.needs.hidden_layers)
    prompts = tiny.prompts(lengths)
    results = tiny.generator(target, drafter).generate(prompts, max_new_tokens=6)
    assert len(drafter.admitted) == len(prompts) and not drafter.rows
    target.tap([])
    for (row, read, hidden), prompt in zip(drafter.admitted, prompts, strict=True):
        assert read == prompt[:-1]
        assert {layer: state.shape for layer, state in hidden.items()} == {0: (1, len(read), 32), 2: (1, len(read), 32)}
        assert torch.allclose(hidden[0][0], target.model.model.embed_tokens(torch.tensor(read, dtype=torch.long)))
        text = prompt + results[row].tokens
        for view, draft, verdict, out in drafter.committed:
            if row not in view.rows:
                continue
            index = view.rows.index(row)
            begin = view.host_lengths[index] - 1
            path = [node for node in verdict.path[index].tolist() if node >= 0]
            said = draft.tree.tokens[index, path].tolist()
            assert said == text[begin : begin + len(said)] or view.host_lengths[index] + len(said) > len(text)
            embedded = target.model.model.embed_tokens(draft.tree.tokens[index])
            assert torch.allclose(out.hidden[0][index], embedded)
            logits = target.model.lm_head(target.model.model.norm(out.hidden[2][index]))
            assert torch.allclose(logits, out.logits[index], atol=1e-4)
    target.close()


# Pairs that do not match in size.


@pytest.mark.parametrize(("narrow", "wide"), [(64, 72), (72, 64)], ids=["narrow draft", "wide draft"])
@pytest.mark.parametrize(
    ("branching", "options"),
    [(None, {}), (None, {"repetition_penalty": 1.5, **SAMPLED}), ((2, 2, 1), {}), ((2, 2, 1), SAMPLED)],
)
def test_a_padded_vocabulary(narrow: int, wide: int, branching: tuple[int, ...] | None, options: dict):
    """Draft and target with the same 64 tokens and 8 more that are padding in one of them."""
    small = tiny.build("llama", seed=3, vocab_size=64)
    large = tiny.build("llama", seed=3, vocab_size=72)
    for name, value in small.state_dict().items():
        large.state_dict()[name][: 64 if value.shape[0] == 64 else None].copy_(value)
    pair = {64: CausalLM(small), 72: CausalLM(large)}
    draft, target = pair[narrow], pair[wide]
    g = tiny.generator(target, *tiny.draft_model(draft, target, 3, branching))
    prompts = tiny.prompts(vocab=target.vocab_size)
    results = g.generate(prompts, max_new_tokens=NEW, **options)
    if not options:
        assert [result.tokens for result in results] == [plain(prompt, target) for prompt in prompts]
    assert all(len(result.tokens) == NEW for result in results)
    assert sum(result.stats.accepted for result in results) > NEW


@pytest.mark.parametrize(
    ("name", "branching", "options"),
    [("gpt2", None, {}), ("gpt2", (2, 2, 1), {}), ("llama", None, SAMPLED), ("llama", (2, 2, 1), {})],
)
def test_a_draft_with_a_shorter_context(name: str, branching: tuple[int, ...] | None, options: dict):
    """Rows go on without a draft once they have outgrown it; the others still get theirs."""
    target, short = tiny.build(name), tiny.build(name, max_position_embeddings=32)
    for key, value in short.state_dict().items():
        value.copy_(target.state_dict()[key][: value.shape[0]])  # GPT-2's positions are a table
    target, short = CausalLM(target), CausalLM(short)
    g = tiny.generator(target, *tiny.draft_model(short, target, 3, branching))
    prompts = tiny.prompts((20, 3, 40, 31, 33))
    params = SamplingParams(max_new_tokens=NEW, **options)
    results = g.generate(prompts, params)
    if not options:
        assert [result.tokens for result in results] == [plain(prompt, target) for prompt in prompts]
    alone = [g.generate(prompt, params, seed=result.seed) for prompt, result in zip(prompts, results, strict=True)]
    assert [result.tokens for result in results] == [result.tokens for result in alone]
    assert results[2].stats.drafted == results[4].stats.drafted == 0
    assert results[1].stats.acceptance_length == 4.0
    assert 1.0 < results[0].stats.acceptance_length < 4.0


# Exact mode.


@pytest.mark.parametrize("kind", ["lookup tree", "self", "other", "other tree"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_exact_mode_is_bit_equal_in_half_precision(kind: str, name: str):
    """The same shapes with speculation on and off, hence the same kernels, hence the same tokens."""
    target = CausalLM(tiny.build(name).bfloat16())
    g = drafting(kind, target, target if kind.startswith("self") else CausalLM(tiny.build("llama", seed=9).bfloat16()))
    nodes = 1 + g.engine.drafter.needs.max_nodes
    g.engine._stepper = dataclasses.replace(g.engine._stepper, exact_nodes=nodes)
    prompts = tiny.prompts()
    on = g.generate(prompts, max_new_tokens=20)
    off = g.generate(prompts, max_new_tokens=20, speculate=False)
    assert [result.tokens for result in on] == [result.tokens for result in off]
    assert sum(result.stats.drafted for result in on) > 0 == sum(result.stats.drafted for result in off)


def test_a_failure_while_prompts_are_read_reaches_their_owners():
    g = tiny.generator(model(), failing("admit", 1, 2, 3, 4), Constant(2))
    sequences = g.submit(tiny.prompts(), SamplingParams(max_new_tokens=4))
    with pytest.raises(ZeroDivisionError, match="a fault of the drafter"):
        g.engine.step()
    for sequence in sequences:
        assert sequence.finish_reason == "cancelled"
        assert "Prefill of this request failed: a fault of the drafter" in str(sequence.error)


def test_a_stream_that_is_closed_from_inside_a_step_leaves_at_its_end():
    """As a finaliser may do it, which runs wherever memory is collected."""
    prompts = tiny.prompts((6, 11))
    drafter = tiny.ScriptedDrafter(lambda view, plan: Draft(TokenTree.root(view.roots), Law.FIXED))
    g = tiny.generator(model(), drafter)
    first, second = (g.stream(prompt, max_new_tokens=NEW) for prompt in prompts)
    next(first)
    drafter._propose = lambda view, plan: (first.close(), Draft(TokenTree.root(view.roots), Law.FIXED))[1]
    list(second)
    assert first.result.finish_reason == "cancelled" and len(first.result.tokens) == 1
    assert second.result.tokens == plain(prompts[1]) and drafter.rows == set()
