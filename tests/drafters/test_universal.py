"""A draft with another tokenizer: nothing it says changes a text, and what it may say it says in the right place."""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
import tiny
from dialects import EXACT, NAMES, TEXTS, dialect, size, strangers, toy
from foredraft.core.draft import Law
from foredraft.core.drafter import EMPTY_KV, Drafter, KVSize, Plan, RowState, View
from foredraft.core.errors import DrafterError, LawError
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.verify import RULES
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.states.draft_runner import Forwards
from foredraft.drafters.universal.method import Options, Universal, coverage
from foredraft.drafters.universal.retokenizer import Retokenizer
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.model.text.vocab_mapping import VocabMapping
from oracle import Table, grow, loss, random_table
from reference import reference

NEW = 8
WAYS = ("slem", "slrs", "tli")


@functools.cache
def model(vocab: int, seed: int = 3) -> CausalLM:
    return CausalLM(tiny.build("llama", seed=seed, vocab_size=vocab), fast=False)


@functools.cache
def bridge(target: str, draft: str) -> VocabMapping:
    return VocabMapping(dialect(target), dialect(draft), size(target), size(draft))


def universal(target: str, draft: str, **options: Any) -> Universal:
    """Drafts for a target of one dialect with a random model of another."""
    return Universal(Options(**options), model(size(draft), seed=5), bridge(target, draft))


def view_of(texts: Sequence[Sequence[int]], params: SamplingParams, vocab: int) -> View:
    """Rows whose committed tokens are these."""
    return tiny.view(texts, params, vocab, derive_seeds(3, len(texts)), draws=True)


def admit(drafter: Drafter, view: View) -> None:
    for row, length in zip(view.rows, view.host_lengths, strict=True):
        drafter.admit(row, view.history[row, : length - 1], {})


def written(name: str, text: str) -> list[int]:
    return list(dialect(name).inner(text)["input_ids"])


# Whatever it says, the text is the target's.


@functools.cache
def continued(target: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts for a target of this dialect, and what it says after them."""
    source = random.Random(target)
    prompts = [written(target, text)[:24] for text in TEXTS[::3]]
    prompts += [[source.randrange(size(target)) for _ in range(length)] for length in (1, 14)]
    own, params = model(size(target)), SamplingParams(max_new_tokens=NEW)
    return prompts, [reference(own, prompt, params) for prompt in prompts]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draft", NAMES)
def test_no_draft_of_any_tokenizer_changes_a_text(draft: str, way: str):
    """Prompts of all scripts and of random tokens: halves of characters, special tokens, unknown words."""
    for target in ("bytes", "sentencepiece", "wordpiece"):
        prompts, expected = continued(target)
        g = tiny.generator(model(size(target)), universal(target, draft, method=way, num_assistant_tokens=4))
        results = g.generate(prompts, max_new_tokens=NEW)
        assert [r.tokens for r in results] == expected
        if {target, draft} <= {*EXACT}:
            assert sum(r.stats.drafted for r in results) > 0


def test_rows_of_all_temperatures_share_a_batch():
    own, prompts = model(size("bytes")), [written("bytes", text)[:20] for text in TEXTS[:4]]
    sampled = SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=4)
    params = [sampled, SamplingParams(max_new_tokens=NEW), replace(sampled, temperature=1.3), sampled]
    for way in (*WAYS, "auto"):
        g = tiny.generator(own, universal("bytes", "digits", method=way, assistant_confidence_threshold=0.0))
        rows = [row for prompt, each in zip(prompts, params, strict=True) for row in g.submit([prompt], each)]
        while not all(row.finished for row in rows):
            g.engine.step()
        together = [row.tokens for row in rows]
        assert together == [g.generate(prompt, each).tokens for prompt, each in zip(prompts, params, strict=True)]


# What it may say, it says: faults of place are silent and would show here.


def renamed(target: CausalLM, order: Sequence[int]) -> CausalLM:
    """The same model in a vocabulary of another order: its token i is the target's ``order[i]``."""
    twin = tiny.build("llama", seed=3, vocab_size=tiny.VOCAB)
    with torch.no_grad():
        twin.get_input_embeddings().weight.copy_(target.model.get_input_embeddings().weight[list(order)])
        if not twin.config.tie_word_embeddings:
            twin.lm_head.weight.copy_(target.model.lm_head.weight[list(order)])
    return CausalLM(twin, fast=False)


@pytest.mark.parametrize("way", ["slem", "tli", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_drafts_for_itself_in_other_tokens_is_accepted_whole(way: str, temperature: float):
    own, order = model(tiny.VOCAB), random.Random(1).sample(range(tiny.VOCAB), tiny.VOCAB)
    inner = tiny.tokenizer()
    shuffled = toy([inner.convert_ids_to_tokens(index) for index in order])
    pair = VocabMapping(Tokenizer(inner), shuffled, tiny.VOCAB, tiny.VOCAB)
    assert [order[other] for other in pair.shared.tolist()] == list(range(tiny.VOCAB))
    drafter = Universal(Options(num_assistant_tokens=5, method=way), renamed(own, order), pair)
    chains = Constant(5, confidence=1e-9)  # without siblings
    results = tiny.generator(own, drafter, chains).generate(
        tiny.prompts((1, 5, 17, 40)), max_new_tokens=18, temperature=temperature, seed=0
    )
    for r in results:
        if temperature and way == "slem":  # its likeliest token is not always the one that is drawn
            assert 0 < r.stats.accepted < r.stats.drafted
        else:
            assert (r.stats.accepted, r.stats.drafted, r.stats.target_forwards) == (15, 15, 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, repetition_penalty=1.2, seed=0)])
def test_with_the_targets_own_tokenizer_it_is_draft_model(way: str, params: SamplingParams):
    if way == "slrs" or (way == "slem" and params.temperature):
        pytest.skip("by text nothing is drawn, and slrs has other drafts")
    own, draft, one = model(tiny.VOCAB), model(tiny.VOCAB, seed=4), Tokenizer(tiny.tokenizer())
    ours = Universal(Options(method=way), draft, VocabMapping(one, one, tiny.VOCAB, tiny.VOCAB))
    theirs = DraftModel(DraftOptions(), draft, tiny.VOCAB)
    view = view_of(tiny.prompts(), params, tiny.VOCAB)
    drafts = []
    for drafter in (ours, theirs):
        admit(drafter, view)
        drafts.append(drafter.propose(view, Plan((8, 3, 0, 8), confidence=0.2)))
    mine, other = drafts
    assert torch.equal(mine.tree.parents[:, : other.tree.parents.shape[1]], other.tree.parents)
    valid = other.tree.valid
    assert torch.equal(mine.tree.tokens[:, : valid.shape[1]][valid], other.tree.tokens[valid])
    if other.q is not None:
        assert mine.q is not None and torch.equal(mine.q, other.q)
    stats = [
        [
            (r.tokens, r.stats.drafted, r.stats.accepted)
            for r in tiny.generator(own, drafter, Constant(4, 0.1)).generate(tiny.prompts(), replace(params, seed=1))
        ]
        for drafter in (
            Universal(Options(method=way), draft, VocabMapping(one, one, tiny.VOCAB, tiny.VOCAB)),
            DraftModel(DraftOptions(), draft, tiny.VOCAB),
        )
    ]
    assert stats[0] == stats[1] and sum(drafted for _, drafted, _ in stats[0]) > 0


@pytest.mark.parametrize(
    ("target", "draft", "tokens"), [("digits", "bytes", {8: 5, 3: 3, 1: 1}), ("bytes", "digits", {8: 8, 3: 3, 1: 1})]
)
def test_by_text_no_more_is_drafted_than_fills_the_plan(
    target: str, draft: str, tokens: dict[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Where the target needs two tokens for one of the draft's, half as many and one more."""
    drafter = universal(target, draft, method="slem")
    view = view_of([written(target, "abc 1234567890 " * 4)], SamplingParams(), size(target))
    admit(drafter, view)
    own = drafter._retokenizer.view(view)[0]
    assert own.host_lengths[0] / view.host_lengths[0] == (0.5 if target == "digits" else 2.0)
    asked: list[int] = []
    read_next = Forwards.next
    monkeypatch.setattr(Forwards, "next", lambda *given: asked.append(1) or read_next(*given))
    for length, wanted in tokens.items():
        asked.clear()
        drafter.propose(view, Plan((length,)))
        assert 1 + len(asked) == wanted, "a forward each but for the last"


# The window and the rewound cache are what the slow way gives.


@pytest.mark.parametrize("target", EXACT)
@pytest.mark.parametrize("draft", NAMES)
def test_a_text_told_again_bit_by_bit_is_the_text_told_at_once(target: str, draft: str):
    pair = bridge(target, draft)
    for number, text in enumerate(TEXTS):
        source, tokens = random.Random(number), written(target, text * 2)
        texts = Retokenizer(pair, lookbehind=10)
        texts.admit(0, torch.zeros(0, dtype=torch.long), {})
        before: list[int] = []
        length = 1
        while length < len(tokens):
            view, (stand,) = texts.view(view_of([tokens[:length]], SamplingParams(), size(target)))
            told = view.history[0].tolist()
            assert told[:stand] == before[:stand]
            before = told
            assert told == (pair.to_draft(tokens[:length]) or [0])
            if source.random() < 0.1:
                length = source.randrange(max(length - 12, 1), length + 1)
                texts.rewind(0, length)
            length += source.randrange(1, 9)


class Told(RowState):
    """What is kept of a row in the draft's tokens: those that were read ahead, and how many were taken over."""

    def read_ahead(self, row: int, prompt: torch.Tensor, hidden: Any, kv_size: KVSize) -> None:
        self.tokens = prompt.tolist()

    def fork(self, row: int, source: int, length: int) -> None:
        self.begun = length


@pytest.mark.parametrize("draft", NAMES)
def test_a_text_read_in_parts_or_begun_by_another_is_the_text_told_at_once(draft: str):
    pair, kept, shared = bridge("digits", draft), 0, 0
    for text, other in list(itertools.pairwise(TEXTS))[::2]:
        told_so_far = Told()
        texts, tokens = Retokenizer(pair, 10, told_so_far), written("digits", text * 2)
        whole = pair.to_draft(tokens) or [0]
        texts.admit(0, torch.zeros(0, dtype=torch.long), {})
        for length in range(12, len(tokens), 12):
            texts.read_ahead(0, torch.tensor(tokens[:length]), {}, EMPTY_KV)
            assert told_so_far.tokens == whole[: len(told_so_far.tokens)]
        texts.release(0)
        same = len(tokens) // 2
        continued = [*tokens[:same], *written("digits", other)]
        texts.fork(0, 0, same)
        view, (stand,) = texts.view(view_of([continued], SamplingParams(), size("digits")))
        told = pair.to_draft(continued) or [0]
        assert view.history[0].tolist() == told
        assert stand <= told_so_far.begun and whole[:stand] == told[:stand]
        kept, shared = kept + stand, shared + len(pair.to_draft(tokens[:same]))
    assert kept > 0.8 * shared


@pytest.mark.parametrize("run", ["-", "天", "ab"])
def test_a_run_without_an_end_does_not_make_steps_longer_and_longer(run: str):
    pair, tokens = bridge("digits", "bytes"), written("digits", run * 900)
    texts = Retokenizer(pair, lookbehind=3)
    texts.admit(0, torch.zeros(0, dtype=torch.long), {})
    widths: list[int] = []
    told = pair.to_draft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "to_draft", lambda window, first=True: widths.append(len(window)) or told(window, first))
        for length in range(1, len(tokens), 3):
            view, _ = texts.view(view_of([tokens[:length]], SamplingParams(), size("digits")))
            said = pair.draft.decode(view.history[0].tolist())
            assert said == pair.target.decode(tokens[:length]), "however it is written, it is the same text"
    assert len(tokens) > 200 and max(widths) < 60


@pytest.mark.parametrize("way", WAYS)
def test_a_rewound_cache_drafts_what_a_fresh_one_drafts(way: str):
    """The slow reference: a new drafter each time, which writes and reads everything anew."""
    tokens = [written("bytes", text * 2) for text in TEXTS]
    source, lengths, whole = random.Random(2), [3] * len(tokens), [len(text) for text in tokens]
    kept = universal("bytes", "digits", method=way, target_lookbehind=6)
    params = SamplingParams(temperature=0.7) if way == "tli" else SamplingParams()
    admit(kept, view_of([text[:3] for text in tokens], params, size("bytes")))
    for _ in range(25):
        view = view_of([text[:n] for text, n in zip(tokens, lengths, strict=True)], params, size("bytes"))
        fresh = universal("bytes", "digits", method=way, target_lookbehind=10_000)
        admit(fresh, view)
        mine, other = (drafter.propose(view, Plan((4,) * len(tokens))) for drafter in (kept, fresh))
        assert torch.equal(mine.tree.tokens, other.tree.tokens) and torch.equal(mine.tree.parents, other.tree.parents)
        if mine.q is not None and other.q is not None:
            assert torch.allclose(mine.q, other.q, atol=1e-5)
        for row, most in enumerate(whole):
            if source.random() < 0.1:
                lengths[row] = source.randrange(1, lengths[row] + 1)
                kept.rewind(row, lengths[row])
            lengths[row] = min(most, lengths[row] + source.randrange(0, 7))


# The law of what is drawn.


def table_of(pair: VocabMapping, draft: Table) -> Table:
    """The restricted law q' by its definition, one token at a time; a prefix with an unshared token never comes up."""
    shared, width = pair.shared.tolist(), len(pair.shared)
    table = []
    for level, laws in enumerate(draft):
        rows = torch.full((width**level, width), 1 / width, dtype=torch.float64)
        for number in range(width**level):
            digits = [shared[number // width**i % width] for i in reversed(range(level))]
            if -1 not in digits:
                mine = sum(digit * laws.shape[1] ** i for i, digit in enumerate(reversed(digits)))
                weights = torch.tensor([float(laws[mine, other]) if other >= 0 else 0.0 for other in shared])
                rows[number] = weights.double() / weights.double().sum()
        table.append(rows)
    return table


@pytest.mark.parametrize("rule", ["token", "block"])
def test_by_tokens_the_law_is_kept_exactly(rule: str):
    pair = VocabMapping(*strangers(5), 5, 5)
    assert 0 < int((pair.shared >= 0).sum()) < 5
    p, q = random_table(5, 3, seed=1), table_of(pair, random_table(5, 3, seed=2))
    assert loss(RULES[rule].function, grow([-1, 0, 1], Law.CHAIN, p, *[q]), p) < 1e-12
    wrong = random_table(5, 3, seed=3)
    draws = grow([-1, 0, 1], Law.CHAIN, p, q)
    assert draws.draft.q is not None
    lying = replace(draws, draft=replace(draws.draft, q=wrong[0][0].expand_as(draws.draft.q)))
    assert loss(RULES[rule].function, lying, p) > 1e-2, "this test cannot fail"


@torch.inference_mode()
def draft_law(drafter: CausalLM, told: list[int], temperature: float) -> Tensor:
    return (drafter.stock_logits(torch.tensor([told]))[0, -1].double() / temperature).softmax(-1)


def test_what_is_drawn_by_tokens_has_the_drafts_law_on_the_shared_ones():
    pair, draft, rows = bridge("bytes", "digits"), model(size("digits"), seed=5), 30
    drafter = Universal(Options(method="tli"), draft, pair)
    texts = [written("bytes", TEXTS[0])[: 5 + row % 9] for row in range(rows)]
    view = view_of(texts, SamplingParams(temperature=0.8), size("bytes"))
    admit(drafter, view)
    proposed = drafter.propose(view, Plan((3,) * rows))
    assert proposed.law is Law.CHAIN and proposed.q is not None
    shared = pair.shared
    for row, text in enumerate(texts):
        told = pair.to_draft(text)
        for node in (1, 2, 3):
            law = draft_law(draft, told, 0.8)
            wanted = torch.where(shared >= 0, law[shared.clamp(min=0)], 0.0)
            wanted = wanted / wanted.sum()
            assert torch.allclose(proposed.q[row, node].double(), wanted, atol=1e-5)
            token = int(proposed.tree.tokens[row, node])
            assert shared[token] >= 0
            told = [*told, int(shared[token])]


def psi(draft: CausalLM, pair: VocabMapping, text: list[int], depth: int, temperature: float) -> dict[int, float]:
    """The paper's sum over all sequences of ``depth`` draft tokens, for each target token that may come next."""
    found: dict[int, float] = {}
    paths: list[tuple[list[int], float]] = [([], 1.0)]
    for _ in range(depth):
        laws = [(path, weight, draft_law(draft, pair.to_draft(text) + path, temperature)) for path, weight in paths]
        paths = [([*path, i], weight * float(q)) for path, weight, law in laws for i, q in enumerate(law)]
    for path, weight in paths:
        if not any(pair.silent[token] for token in path):
            for token in pair.to_target(text, path)[:1]:
                found[token] = found.get(token, 0.0) + weight
    return found


@torch.inference_mode()
def test_the_law_by_strings_is_the_sum_over_all_sequences():
    """With room for all sequences of two draft tokens, which are up to two of the target's."""
    target, other = toy(["a", "b", "ab", "c", "abc"]), toy(["a", "b", "c", "bc"])
    pair, draft = VocabMapping(target, other, 5, 4), model(4, seed=5)
    drafter = Universal(Options(method="slrs", sequences=16), draft, pair)
    text = [0, 3, 1]
    view = view_of([text], SamplingParams(temperature=0.8), 5)
    admit(drafter, view)
    proposed = drafter.propose(view, Plan((2,)))
    assert proposed.law is Law.CHAIN and proposed.q is not None
    wanted = psi(draft, pair, text, 2, 0.8)
    assert len(wanted) >= 4
    for token in range(5):
        share = wanted.get(token, 0.0) / sum(wanted.values())
        assert float(proposed.q[0, 1, token]) == pytest.approx(share, abs=1e-5)


def test_auto_goes_by_text_if_greedy_and_by_shared_tokens_if_these_have_the_drafts_mass():
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0)
    for target, draft, enough in (("bytes", "bytes", True), ("bytes", "slow", False)):
        drafter = universal(target, draft, method="auto")
        share = coverage(model(size(draft), seed=5), bridge(target, draft))
        assert (share > 0.9) if enough else (share < 0.5)
        assert drafter.needs.law is (Law.CHAIN if enough else Law.FIXED)
        for params, law in ((greedy, Law.FIXED), (sampled, Law.CHAIN if enough else Law.FIXED)):
            view = view_of([written(target, TEXTS[0])], params, size(target))
            admit(drafter, view)
            assert drafter.propose(view, Plan((3,))).law is law
            drafter.release(0)


def test_a_rule_for_drawn_tokens_is_refused_where_auto_goes_by_text():
    own = model(size("bytes"))
    with pytest.raises(LawError, match="'token' would not be lossless for a 'fixed' draft"):
        foredraft.load(own, universal("bytes", "slow", method="auto"), verifier="token")
    foredraft.load(own, universal("bytes", "bytes", method="auto"), verifier="token")


# Edges.


def test_a_draft_with_a_context_shorter_than_the_sample_of_its_coverage():
    short = CausalLM(tiny.build("gpt2", vocab_size=size("digits"), max_position_embeddings=128, n_positions=128))
    assert short.max_length == 128
    assert 0 < coverage(short, bridge("bytes", "digits")) <= 1


def test_a_draft_of_a_text_that_says_nothing_to_it_is_nonsense_but_no_error():
    drafter = universal("bytes", "no unknown", method="slem")
    view = view_of([written("bytes", "中文"), [0], written("bytes", "ab")], SamplingParams(), size("bytes"))
    admit(drafter, view)
    tree = drafter.propose(view, Plan((3, 3, 3))).tree
    said = dialect("bytes").inner.convert_ids_to_tokens(tree.tokens[2, 1:][tree.valid[2, 1:]].tolist())
    assert {*"".join(said)} <= {"a", "b"} and said


def test_a_text_that_has_outgrown_the_drafts_context_goes_on_alone():
    small = CausalLM(tiny.build("llama", seed=5, vocab_size=size("digits"), max_position_embeddings=48), fast=False)
    own, prompt = model(size("bytes")), written("bytes", TEXTS[0])
    for way in WAYS:
        g = tiny.generator(own, Universal(Options(method=way), small, bridge("bytes", "digits")))
        results = g.generate([prompt * 3, prompt[:4]], max_new_tokens=NEW)
        assert [r.tokens for r in results] == [
            reference(own, p, SamplingParams(max_new_tokens=NEW)) for p in (prompt * 3, prompt[:4])
        ]
        assert results[0].stats.drafted == 0 < results[1].stats.drafted


def test_the_drafts_model_stays_as_it_is():
    inner = tiny.build("llama", seed=5, vocab_size=size("digits"))
    head, before = inner.lm_head, {name: value.clone() for name, value in inner.state_dict().items()}
    own = CausalLM(inner)
    drafter = Universal(Options(method="tli"), own, bridge("bytes", "digits"))
    tiny.generator(model(size("bytes")), drafter).generate(
        written("bytes", "fox"), max_new_tokens=4, temperature=1.0, seed=0
    )
    own.close()
    assert inner.lm_head is head and inner.config.vocab_size == size("digits")
    assert all(torch.equal(value, before[name]) for name, value in inner.state_dict().items())


def test_a_tokenizer_is_missing(tmp_path: Path):
    own, folder = tiny.build("llama"), str(tmp_path)
    tiny.build("llama", seed=4).save_pretrained(folder)
    with pytest.raises(DrafterError, match="the target has no tokenizer here: give load one with tokenizer="):
        foredraft.load(own, f"universal:{folder}")
    with pytest.raises(DrafterError, match="the draft .* has no tokenizer in its folder"):
        foredraft.load(own, f"universal:{folder}", tokenizer=tiny.tokenizer())
    with pytest.raises(DrafterError, match="universal needs a small model with any tokenizer"):
        foredraft.load(own, "universal", tokenizer=tiny.tokenizer())


@pytest.mark.slow
def test_the_bundled_draft_as_if_it_were_a_stranger():
    """With the same tokenizer on both sides it accepts what draft_model accepts, on real texts."""
    prompts = ["def fibonacci(n):\n", "import os\n\n\ndef read_lines(path):"]
    schedule = "num_assistant_tokens_schedule=constant,num_assistant_tokens=5"
    found = []
    for spec in ("none", f"draft_model,{schedule}", f"universal:sample-draft,{schedule}"):
        g = foredraft.load("sample", spec, dtype="float32", device="cpu")
        found.append([(r.tokens, r.stats.drafted, r.stats.accepted) for r in g.generate(prompts, max_new_tokens=40)])
    assert [tokens for tokens, _, _ in found[0]] == [tokens for tokens, _, _ in found[2]]
    assert found[1] == found[2] and sum(accepted for _, _, accepted in found[2]) > 20
