"""Three levels and their parts: laws, policy, windows, what goes beyond a draft's context, and what cannot be."""

from dataclasses import replace

import pytest
import torch

import foredraft
import specs
import tiny
from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Plan, StepOut, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree
from foredraft.drafters.context import NestedDrafter
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions, WindowedRunner
from foredraft.drafters.states.draft_runner import Forwards
from foredraft.drafters.states.partial_cache import RECENT, PartialCacheSync
from foredraft.drafters.triforce import Options, TriForce
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.model.partial.kv_selection import Retrieval
from foredraft.model.partial.model import PartialLM
from foredraft.model.prefill import prefill
from reference import reference

SMALL = {"budget": 16, "chunk": 4, "room": 8}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny.build("llama"))


@pytest.fixture(scope="module")
def other() -> CausalLM:
    return CausalLM(tiny.build("llama", seed=8))


def small(draft: CausalLM, **options) -> DraftModel:
    return DraftModel(DraftOptions(num_assistant_tokens=2, **options), draft, draft.vocab_size)


def looped(target: CausalLM, options: Options, drafter) -> tuple[Generator, TriForce]:
    full = target.new_cache()
    three = TriForce(options, target, full, NestedDrafter(drafter, draws=True), target.vocab_size)
    return tiny.generator(target, three, cache=full), three


def view_of(texts: list[list[int]], temperature: float, seeds: list[int], full: SlotCache, target: CausalLM) -> View:
    """Rows as the engine shows them, their prompts read."""
    view = tiny.view(texts, SamplingParams(temperature=temperature), seeds=seeds, draws=True)
    prefill(target, full, view.rows, view.history[:, : max(view.host_lengths) - 1], [0] * len(texts))
    return view


def begun(
    target: CausalLM, draft: CausalLM, texts: list[list[int]], temperature: float = 0.0, gamma: int = 4
) -> tuple[TriForce, View]:
    """Three levels that have been told of these rows, whose seeds differ."""
    _, three = looped(target, Options(gamma=gamma, **SMALL), small(draft))
    tiny.admit(three, texts)
    return three, view_of(texts, temperature, list(range(len(texts))), three.full, target)


def at(view: View, *host_lengths: int) -> View:
    """The same rows when so many of their tokens had been committed."""
    return replace(view, lengths=torch.tensor(host_lengths), host_lengths=host_lengths)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_law_of_a_draft_is_that_of_the_middle_level_on_its_path(
    target: CausalLM, other: CausalLM, temperature: float
):
    """q of every token is what the target's weights say over the chosen chunks, read token by token without any loop;
    and a greedy draft is the middle's own greedy text."""
    three, view = begun(target, other, tiny.prompts((70, 25, 9, 40)), temperature, gamma=5)
    draft = three.propose(view, Plan((5, 5, 5, 5)))
    assert draft.law is (Law.FIXED if temperature == 0 else Law.CHAIN)
    assert draft.tree.valid.all() and draft.tree.tokens.shape == (4, 6)
    selection = Options(gamma=5, **SMALL).selection()
    middle = PartialLM(target, three.full, selection, 26)  # room, a chunk's rest, the root, and what may be ahead
    assert middle.sync(view.rows, view.host_lengths, 14) == [0, 3]
    for node in range(5):
        step = middle.address(TokenTree.root(draft.tree.tokens[:, node]), view.lengths - 1 + node, view.rows, 70 + node)
        path = replace(draft.tree, tokens=draft.tree.tokens[:, : node + 1], parents=draft.tree.parents[:, : node + 1])
        logits = middle.forward(step, middle.cache).logits
        if temperature == 0:
            assert torch.equal(logits[:, 0].argmax(-1), draft.tree.tokens[:, node + 1])
            continue
        assert draft.q is not None
        law = view.warp.law(logits, Paths(view.history, view.lengths, path, start=node))[:, 0]
        assert (draft.q[:, node + 1] - law).abs().max() < 1e-4


def test_greedy_texts_are_the_targets_whatever_drafts_for_the_middle(target: CausalLM, other: CausalLM):
    prompts = tiny.prompts((90, 1, 33))
    wanted = [reference(target, prompt, SamplingParams(max_new_tokens=32)) for prompt in prompts]
    few, many = "gamma=6,budget=16,chunk=4,room=8", "gamma=2,budget=64,room=1"
    for spec in (
        f"[draft_model:other,num_assistant_tokens=2],{few}",
        f"[draft_model:other,num_assistant_tokens=2],{many}",
        f"[draft_model:target,num_assistant_tokens=2],{many}",
        f"[draft_model:other,num_assistant_tokens=2,window=30],{few}",
        f"[draft_model:other,branching=2x2],{few}",
        f"[prompt_lookup,prompt_lookup_num_tokens=3,continuations=2],{many}",  # trees inside
    ):
        full = target.new_cache()
        three = specs.build(f"triforce:{spec}", target, {"other": other}, cache=full)
        g = tiny.generator(target, three, cache=full)
        assert [result.tokens for result in g.generate(prompts, max_new_tokens=32)] == wanted


def judged(accepted: int, drafted: int = 4) -> tuple[Draft, Verdict]:
    tree = TokenTree.chain(torch.zeros(1, drafted + 1, dtype=torch.long))
    path = torch.tensor([[i if i <= accepted else -1 for i in range(drafted + 1)]])
    return Draft(tree, Law.FIXED), Verdict(path, torch.zeros(1, dtype=torch.long))


def test_chunks_are_chosen_anew_when_acceptance_has_fallen(target: CausalLM):
    """Against the text's own mean, by the last four drafts since the last choice, and by nothing else."""
    text = tiny.prompts((200,))[0]
    full = target.new_cache()
    view = view_of([text], 0.0, [0], full, target)
    sync = PartialCacheSync(PartialLM(target, full, Retrieval(16, 4), 100), ahead=6, refresh=0.75)
    sync.admit(0, torch.tensor(text[:1]), {})
    chosen = []

    def steps(*accepted: int) -> None:
        for count in accepted:
            length = 130 + len(chosen)
            now = at(view, length)
            before = sync.model.left_out(0)
            sync.sync(now)
            chosen.append(sync.model.left_out(0) != before)
            tree = TokenTree.root(now.roots)
            step = sync.model.address(tree, now.lengths - 1, (0,), length)
            sync.model.forward(step, sync.model.cache)
            sync.commit(now, *judged(count), StepOut(torch.zeros(1, 1, 1)))

    steps(4, 4, 4, 4, 4, 4, 4, 4, 2, 2, 4, 2, 4, 4)
    wanted = [True, *[False] * 11]  # 12 of 16 are not less than 0.75 of 44 of 48 ... until 10 of 16 are
    assert chosen == [*wanted, True, False]
    chosen.clear()
    steps(1, 1, 1, 1, 1, 1, 1)
    assert chosen.index(True) >= RECENT - 3, "a new choice is given time"


def test_no_choice_depends_on_what_is_drawn_afterwards(target: CausalLM, other: CausalLM):
    """Rows of one text with different seeds: before the first of them has been judged all have chosen alike, and the
    choice of a step is made before anything is drawn in it."""
    three, view = begun(target, other, tiny.prompts((60,)) * 6, temperature=1.0)
    draft = three.propose(view, Plan((4,) * 6))
    assert len({tuple(line) for line in draft.tree.tokens.tolist()}) > 1
    keys = three._cache_sync.model.cache.stored(1)[0]
    assert all(torch.equal(keys[0, :, :16], keys[row, :, :16]) for row in range(1, 6))


def second(forwards: Forwards) -> torch.Tensor:
    return forwards.next(torch.tensor([5, 6]), 1)[:, 0]


def test_a_window_reads_as_if_the_rest_had_never_been(other: CausalLM):
    """Equal to a fresh forward over sinks and window, positions from 0 on, at every length, also far beyond the draft's
    context and after a text has been taken back."""
    draft = CausalLM(tiny.build("llama", seed=8, max_position_embeddings=48))
    reader = WindowedRunner(draft, draft.vocab_size, 40, 4, 3)
    two = reader.drafting("two", lambda _, forwards: [forwards.root()[:, 0], second(forwards)])
    texts = tiny.prompts((230, 190), seed=5)
    for row in (0, 1):
        reader.admit(row, torch.zeros(0, dtype=torch.long), {})
    view = view_of(texts, 0.0, [0, 0], other.new_cache(), other)
    for length in (3, 20, 37, 38, 39, 60, 61, 57, 90, 190, 150):
        host_lengths = (length, max(length - 20, 1))
        now = at(view, *host_lengths)
        for row in (0, 1):
            reader.rewind(row, host_lengths[row])
        logits = reader.draft(two, now, 3)
        for row, length in enumerate(host_lengths):
            left = reader.dropped(length)
            assert (left == 0) == (length <= 37) and length - left + 3 <= 40
            kept = texts[row][:4] + texts[row][4 + left : length] if left else texts[row][:length]
            for drafted in (0, 1):
                fresh = draft.stock_logits(torch.tensor([kept + [5 + row] * drafted]))[0, -1]
                assert (logits[drafted][row] - fresh).abs().max() < 1e-4
    assert (reader.cache.rows, reader.cache.slots) == (2, 256), "one bucket of slots, whatever the text's length"
    assert reader.cache.nbytes <= 2 * 2 * 2 * 2 * 128 * 8 * 4


def test_a_window_is_read_again_a_few_times_only(other: CausalLM):
    reader = WindowedRunner(other, other.vocab_size, 64, 4, 4)
    lefts = [reader.dropped(length) for length in range(1, 256)]
    assert lefts == sorted(lefts) and len(set(lefts)) == 1 + -(-(255 - 60) // 14)
    assert min(length - left for length, left in enumerate(lefts, 1) if left) >= 64 - 4 - 14


def read_in_a_loop(target: CausalLM, ahead: int) -> list[list[int]]:
    """What a window leaves out, reading by reading, of a text of which 8 tokens are drafted at once and 1 is kept."""
    reader, text = WindowedRunner(target, target.vocab_size, 64, 4, 4, ahead), tiny.prompts((130,))[0]
    reader.admit(0, torch.zeros(0, dtype=torch.long), {})
    view, lefts = view_of([text], 0.0, [0], target.new_cache(), target), []
    for committed in range(40, 120):
        lefts.append([])
        for length in (committed, committed + 4, committed + 7):
            logits = reader.draft(reader.drafting("root", lambda _, forwards: forwards.root()), at(view, length), 4)
            left = reader._dropped.get(0, 0)
            lefts[-1].append(left)
            kept = text[:4] + text[4 + left : length] if left else text[:length]
            assert len(kept) + 4 <= 64
            if committed % 7 == 0:
                assert (logits[0, 0] - target.stock_logits(torch.tensor([kept]))[0, -1]).abs().max() < 1e-4
        reader.rewind(0, committed)
    return lefts


def test_a_window_in_a_loop_does_not_move_there_and_back(target: CausalLM):
    steady, loose = read_in_a_loop(target, 11), read_in_a_loop(target, 0)
    assert all(len(set(step)) == 1 for step in steady)
    flat = [step[0] for step in steady]
    assert flat == sorted(flat) and len(set(flat)) == 1 + -(-(119 + 11 - 60) // 14)
    moves = [left for step in loose for left in step]
    assert moves != sorted(moves), "what ahead is for"


def test_what_a_window_in_a_loop_leaves_out_does_not_depend_on_how_far_a_neighbour_went(target: CausalLM):
    """Beyond what a window has room for it moves, and comes back."""
    text, found = tiny.prompts((130,))[0], []
    for run_on in (False, True):
        reader = WindowedRunner(target, target.vocab_size, 64, 4, 4, 6)
        reader.admit(0, torch.zeros(0, dtype=torch.long), {})
        view = view_of([text], 0.0, [0], target.new_cache(), target)
        found.append([])
        for committed in range(50, 90):
            for length in (committed, committed + 5, *([committed + 30] if run_on else [])):
                logits = reader.draft(reader.drafting("root", lambda _, forwards: forwards.root()), at(view, length), 4)
                if length <= committed + 5:
                    found[-1].append((reader._dropped.get(0, 0), logits))
            reader.rewind(0, committed)
    for (left, logits), (other_left, others) in zip(*found, strict=True):
        assert left == other_left and torch.allclose(logits, others, atol=1e-4)


def test_a_draft_with_a_window_drafts_beyond_its_context(target: CausalLM):
    narrow = CausalLM(tiny.build("llama", max_position_embeddings=64))  # the target's own weights
    prompt = tiny.prompts((100,))[0]
    wanted = reference(target, prompt, SamplingParams(max_new_tokens=30))
    drafted = []
    for options in ({}, {"window": 48}):
        drafter = DraftModel(DraftOptions(num_assistant_tokens=3, **options), narrow, target.vocab_size)
        result = tiny.generator(target, drafter).generate(prompt, max_new_tokens=30)
        assert result.tokens == wanted
        drafted.append(result.stats.drafted)
    assert drafted[0] == 0 < drafted[1]


def test_memory_of_the_middle_is_its_budget_however_long_the_text(target: CausalLM, other: CausalLM):
    for length in (90, 180):
        g, three = looped(target, Options(gamma=4, **SMALL), small(other, window=24))
        sizes: set[int] = set()
        commit = three._loop.extend

        def watched(view, lengths, commit=commit, three=three, sizes=sizes):
            draft = commit(view, lengths)
            sizes.add(three._cache_sync.model.nbytes)
            return draft

        three._loop.extend = watched
        g.generate(tiny.prompts((length,))[0], max_new_tokens=40)
        # budget, room, a chunk's rest, the root, and what an inner loop may have in flight
        slots = 16 + 8 + 3 + 1 + (2 * 4 + 4)
        assert sizes == {2 * 2 * slots * (8 + 8) * 4}
        assert three._cache_sync.model.nbytes in sizes, "it stays allocated for the next text"


def test_specs():
    g = foredraft.load("sample", drafter="triforce:sample-draft,gamma=5,budget=64,window=128")
    assert g.engine.drafter.needs.max_nodes == 5
    plain = foredraft.load("sample", drafter=None).generate("def add(a, b):", max_new_tokens=12)
    assert g.generate("def add(a, b):", max_new_tokens=12).tokens == plain.tokens
    for spec in ("triforce:[prompt_lookup,prompt_lookup_num_tokens=3],budget=64", "partial,cache=h2o,budget=64"):
        assert (
            foredraft.load("sample", drafter=spec).generate("def add(a, b):", max_new_tokens=12).tokens == plain.tokens
        )


def test_what_was_accepted_of_a_text_is_not_held_against_the_next(target: CausalLM, other: CausalLM):
    """Verdicts are looked at in the next step, when a row's number may have been given to another text."""
    three, view = begun(target, other, tiny.prompts((30,)) * 2)
    draft = three.propose(view, Plan((4, 4)))
    three.commit(view, draft, Verdict(torch.tensor([[0, 1, -1, -1, -1]] * 2), view.roots), out())
    three.release(0)
    three.admit(0, view.history[0, : view.host_lengths[0] - 1], {})
    three.propose(view, Plan((4, 4)))
    assert [three._cache_sync._records[row].drafted for row in (0, 1)] == [0, 4]


def out() -> StepOut:
    return StepOut(torch.zeros(1, 1, tiny.VOCAB))


def test_a_step_without_a_draft_is_told_and_forgotten(target: CausalLM, other: CausalLM):
    """A row for which nothing was drafted says nothing about acceptance."""
    three, view = begun(target, other, tiny.prompts((30,)))
    draft, verdict = judged(0, drafted=0)
    three.commit(view, draft, verdict, out())
    three.propose(view, Plan((2,)))
    assert three._cache_sync._records[0].drafted == 0


def test_what_others_drafted_is_not_held_against_the_chosen_tokens(target: CausalLM, other: CausalLM):
    """As for an arm of a bandit: every step is told, but this one drafted in the first of them only."""
    three, view = begun(target, other, tiny.prompts((30,)))
    mine = three.propose(view, Plan((4,)))
    three.commit(view, mine, judged(1)[1], out())
    for _ in range(5):
        three.commit(view, *judged(3), out())
    three.propose(view, Plan((4,)))
    record = three._cache_sync._records[0]
    assert (list(record.recent), record.accepted, record.drafted) == ([(1, 4)], 1, 4)
