"""Lookahead decoding against the published algorithm, as slow as it reads, on toy models that are functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.compose.spec import Spec
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, StepOut, View
from foredraft.core.rng import Noise, RandomStream
from foredraft.core.tree import PAD, TokenTree, merge_paths
from foredraft.core.verify import greedy
from foredraft.drafters.lookahead import Lookahead, NgramPool, Options
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM

CPU = torch.device("cpu")
Model = Callable[[Sequence[int]], int]
VOCAB = 1020
SAID = 20
"""The toy models say only tokens from this one on; prompts consist of those below."""


def wandering(text: Sequence[int]) -> int:
    """Mostly the last two tokens decide, so that texts go in circles; now and then the length does."""
    last, before = text[-1], text[-2] if len(text) > 1 else 0
    odd = len(text) // 3 if len(text) % 11 == 0 else 0
    return SAID + (7 * last + 3 * before + odd) % 9


def chaotic(text: Sequence[int]) -> int:
    """Every token of the text decides, so that no guess is ever right."""
    return SAID + hash(tuple(text)) % (VOCAB - SAID)


def circle(text: Sequence[int]) -> int:
    """One long circle, in which the last token decides."""
    return SAID + (text[-1] - SAID + 1) % 12


def by_place(text: Sequence[int]) -> int:
    """The same circle, in which the place decides: what Jacobi iteration is best at."""
    return SAID + len(text) % 12


def prompts(*lengths: int) -> list[list[int]]:
    return tiny.prompts(lengths, vocab=SAID)


def guess(text: Sequence[int], place: int) -> int:
    """What stands at a place of a window that has just been begun."""
    u = Noise(torch.tensor([0]), torch.tensor([0])).uniform_at(
        torch.tensor([place]), RandomStream.DRAFT, torch.tensor([0])
    )
    return text[int(float(u) * len(text))]


class SlowPool:
    """A list in order of age."""

    def __init__(self, per_key: int, size: int) -> None:
        self.per_key, self.size = per_key, size
        self.ngrams: list[tuple[int, ...]] = []

    def add(self, ngrams: Sequence[tuple[int, ...]]) -> None:
        for ngram in ngrams:
            self.ngrams = [ngram, *(other for other in self.ngrams if other != ngram)]
            mates = [other for other in self.ngrams if other[0] == ngram[0]]
            self.ngrams = [other for other in self.ngrams if other not in mates[self.per_key :]]
        self.ngrams = self.ngrams[: self.size]


@dataclass
class Slow:
    """The algorithm for one text, token by token. Columns are lists of N - 1 tokens."""

    options: Options
    model: Model
    text: list[int]
    columns: list[list[int]] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    pool: SlowPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = SlowPool(self.options.guess_set_size, self.options.pool_size)
        if self.options.prompt_ngrams:
            size = self.options.ngram_size
            ngrams = [tuple(self.text[i : i + size]) for i in range(len(self.text) - size + 1)]
            self.pool.add(ngrams[-self.options.pool_size :])

    def paths(self, most: int) -> list[list[int]]:
        """Column by column what leads to its last token; empty where that is deeper than may be drafted."""
        levels = self.options.ngram_size - 1
        if not self.columns:
            root = len(self.text) - 1
            self.columns = [
                [guess(self.text, root + i + level) for level in range(levels)] for i in range(self.options.window_size)
            ]
            self.said = [0] * len(self.columns)
        self.columns[0][0] = self.text[-1]
        first = [column[0] for column in self.columns]
        paths = [first[1 : i + 1] + column[1:] for i, column in enumerate(self.columns)]
        return [path if len(path) <= most else [] for path in paths]

    def guesses(self, most: int) -> list[list[int]]:
        found = [list(ngram[1:]) for ngram in self.pool.ngrams if ngram[0] == self.text[-1]]
        return [path[:most] for path in found]

    def step(self, most: int) -> list[int]:
        """One step in which no path may be longer than ``most`` (more than 0); the new tokens."""
        paths, guesses, text = self.paths(most), self.guesses(most), self.text
        emitted = [self.model(text)]
        while any(path[: len(emitted)] == emitted for path in paths + guesses):
            emitted.append(self.model(text + emitted))
        fresh = []
        ran = any(paths) or self.options.ngram_size == 2
        after = [*range(1, len(paths)), 0]  # as the window moves on, a column that waits takes what its place holds
        waiting = [(list(self.columns[i]), self.said[i]) for i in after]
        for i, path in enumerate(paths):
            if not path and i + self.options.ngram_size > 2:  # column 0 of a window of one level ends in the root
                if ran:
                    self.columns[i], self.said[i] = waiting[i]
                continue
            new = self.model(text + path)
            if self.said[i] >= self.options.ngram_size - 2 and self.options.guess_set_size:
                fresh.append((*self.columns[i], new))
            self.columns[i] = [*self.columns[i][1:], new]
            self.said[i] += 1
        self.pool.add(fresh)
        passed = (len(emitted) - (1 if ran else 0)) % len(self.columns)
        self.columns = self.columns[passed:] + self.columns[:passed]
        self.said = self.said[passed:] + self.said[:passed]
        self.text = [*text, *emitted]
        return emitted


def paths_of(draft: Draft, row: int) -> list[list[int]]:
    """All nodes of a row, each by what leads to it."""
    return [list(path) for path in tiny.paths(draft.tree, row).values() if path]


def run_step(drafter: Lookahead, model: Model, view: View, lengths: Sequence[int]) -> tuple[Draft, list[list[int]]]:
    """What the engine does in a greedy step, with a function for the target."""
    draft = drafter.propose(view, Plan(tuple(lengths)))
    texts = [view.history[b, :length].tolist() for b, length in enumerate(view.host_lengths)]
    logits = torch.zeros(*draft.tree.tokens.shape, VOCAB)
    for b, text in enumerate(texts):
        for node, path in tiny.paths(draft.tree, b).items():
            logits[b, node, model([*text, *path])] = 1.0
    verdict = greedy(logits.argmax(-1), draft.tree)
    drafter.commit(view, draft, verdict, StepOut(logits))
    emitted = verdict.emitted(draft.tree).tolist()
    return draft, [[token for token in line if token >= 0] for line in emitted]


def prefixes(paths: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(path[:k]) for path in paths for k in range(1, len(path) + 1)}


def pooled(drafter: Lookahead, owner: int) -> list[tuple[int, ...]]:
    """The pool in order of age, the latest first."""
    assert drafter._pool is not None
    return [tuple(ngram) for ngram in drafter._pool._tokens[owner].tolist() if ngram[0] >= 0]


SHAPES = [
    Options(window_size=5, ngram_size=4, guess_set_size=5),
    Options(window_size=3, ngram_size=3, guess_set_size=1),
    Options(window_size=7, ngram_size=5, guess_set_size=2, pool_size=11),
    Options(window_size=1, ngram_size=4, guess_set_size=3),
    Options(window_size=1, ngram_size=2, guess_set_size=2),
    Options(window_size=6, ngram_size=2, guess_set_size=3),
    Options(window_size=4, ngram_size=4, guess_set_size=0),
    Options(window_size=6, ngram_size=2, guess_set_size=0),
    Options(window_size=3, ngram_size=3, guess_set_size=2, prompt_ngrams=True),
    Options(window_size=2, ngram_size=2, guess_set_size=2, pool_size=3, prompt_ngrams=True),
]


def name(options: Options) -> str:
    return f"W{options.window_size} N{options.ngram_size} G{options.guess_set_size} prompt {options.prompt_ngrams}"


@pytest.mark.parametrize("model", [wandering, circle])
@pytest.mark.parametrize("options", SHAPES, ids=name)
def test_it_is_the_algorithm_step_by_step(options: Options, model: Model):
    """The same trees, tokens, windows and pools, for rows of different lengths, plans cut short now and then."""
    drafter = Lookahead(options, CPU)
    slow = [Slow(options, model, list(prompt)) for prompt in prompts(1, 4, 9)]
    tiny.admit(drafter, [each.text for each in slow])
    for count in range(40):
        full = drafter.needs.longest
        lengths = [full if (count + row) % 5 else 1 + (count + row) % full for row in range(3)]
        draft, emitted = run_step(drafter, model, tiny.view([each.text for each in slow], vocab=VOCAB), lengths)
        assert draft.law is Law.FIXED and draft.q is None
        for row, (each, most) in enumerate(zip(slow, lengths, strict=True)):
            nodes = paths_of(draft, row)
            assert len(nodes) == len(prefixes(nodes)), "no node stands twice"
            assert prefixes(nodes) == prefixes(each.paths(most) + each.guesses(most))
            assert emitted[row] == each.step(most)
            if options.guess_set_size:
                assert pooled(drafter, row) == each.pool.ngrams


def admitted(options: Options, text: list[int]) -> Lookahead:
    """With one row, of this text."""
    drafter = Lookahead(options, CPU)
    drafter.admit(0, torch.tensor(text[:-1]), {})
    return drafter


def test_levels_fill_and_ngrams_come_as_published():
    """The published window in its own shape: level 0 is W + N - 3 long at first, and each step fills a level.

    (arXiv:2402.02057, section 3.1; nothing is ever accepted here, so that all windows move by one.)
    """
    options = Options(window_size=4, ngram_size=5, guess_set_size=3)
    width, size = options.window_size, options.ngram_size
    text = prompts(7)[0]
    drafter = admitted(options, text)
    levels = [[guess(text, len(text) + i) for i in range(width + size - 3)]]
    pool: set[tuple[int, ...]] = set()
    for _ in range(12):
        if len(levels) == 1:
            results = [chaotic(text + levels[0][: i + 1]) for i in range(len(levels[0]))]
            levels = [levels[0][1:], results]
        else:  # below the root and level 0, which is short of it by one
            columns = [[level[i] for level in levels[1:]] for i in range(len(levels[1]))]
            results = [chaotic(text + levels[0][:i] + column) for i, column in enumerate(columns)]
            if len(levels) < size - 1:
                levels = [*(level[1:] for level in levels), results[1:]]
            else:
                first = [text[-1], *levels[0]]
                pool |= {(*ngram[:1], *ngram[1], ngram[2]) for ngram in zip(first, columns, results, strict=True)}
                levels = [levels[1][1:], *levels[2:], results]
        _, ((new,),) = run_step(drafter, chaotic, tiny.view([text], vocab=VOCAB), [drafter.needs.longest])
        text = [*text, new]
        assert set(pooled(drafter, 0)) == pool
    assert len(pool) == width * (12 - (size - 2))


def test_a_filling_step_is_a_chain():
    """At first all columns guess alike, so that the window costs W + N - 3 nodes and no more."""
    options = Options(window_size=4, ngram_size=5, guess_set_size=3)
    text = prompts(30)[0]
    drafter = admitted(options, text)
    draft, _ = run_step(drafter, chaotic, tiny.view([text], vocab=VOCAB), [drafter.needs.longest])
    assert int(draft.tree.valid.sum()) == 1 + 4 + 5 - 3


def test_ngrams_are_the_targets_own():
    """Prompts and first guesses are of tokens that the model never says: in n-grams these are keys at most."""
    options = Options(window_size=6, ngram_size=4, guess_set_size=4)
    text = prompts(9)[0]
    drafter = admitted(options, text)
    count = 0
    for _ in range(30):
        _, (emitted,) = run_step(drafter, wandering, tiny.view([text], vocab=VOCAB), [drafter.needs.longest])
        text = text + emitted
        count = max(count, len(pooled(drafter, 0)))
        assert all(min(ngram[1:]) >= SAID for ngram in pooled(drafter, 0))
    assert count > 20


def lengths_on(options: Options, model: Model, steps: int) -> list[int]:
    """Tokens that each step gives."""
    text = prompts(5)[0]
    drafter = admitted(options, text)
    lengths = []
    for _ in range(steps):
        _, (emitted,) = run_step(drafter, model, tiny.view([text], vocab=VOCAB), [drafter.needs.longest])
        text = text + emitted
        lengths.append(len(emitted))
    return lengths


def test_a_text_that_repeats_is_accepted():
    """Once it has gone round, what follows each token is in the pool, and every step gives N tokens at least."""
    lengths = lengths_on(Options(window_size=5, ngram_size=4, guess_set_size=5), circle, 40)
    assert lengths[0] == 1
    assert min(lengths[20:]) >= 4


def test_jacobi_iteration_gives_a_window_where_its_guesses_come_right_at_once():
    """The window moves by what was accepted: of two steps one finds out what stands where, and the other takes it."""
    lengths = lengths_on(Options(window_size=6, ngram_size=2, guess_set_size=0), by_place, 40)
    assert lengths == [1, 6] * 20


def test_a_row_without_a_plan_waits():
    """Its window stands still, whatever the others do; where nobody has a plan, all wait."""
    drafter = Lookahead(Options(window_size=3, ngram_size=3, guess_set_size=2), CPU)
    texts = prompts(6, 6)
    tiny.admit(drafter, texts)
    full = drafter.needs.longest
    for _ in range(4):
        _, emitted = run_step(drafter, wandering, tiny.view(texts, vocab=VOCAB), [full, full])
        texts = [text + new for text, new in zip(texts, emitted, strict=True)]
    drafter.propose(tiny.view(texts, vocab=VOCAB), Plan((full, full)))  # now the window stands at the root
    before, pool = drafter._window[1].clone(), pooled(drafter, 1)
    draft, emitted = run_step(drafter, wandering, tiny.view(texts, vocab=VOCAB), [full, 0])
    assert not draft.tree.valid[1, 1:].any() and len(emitted[1]) == 1
    after = drafter._window[1]
    assert torch.equal(after[1:], before[1:]) and torch.equal(after[0, 1:], before[0, 1:])  # but for the root
    assert pooled(drafter, 1) == pool


@pytest.mark.parametrize("most", [2, 4, 6])
@torch.inference_mode()
def test_columns_that_wait_hold_what_is_guessed_for_their_places(most: int):
    """Where the place alone decides what stands there, a window that is right stays right as it moves on."""
    drafter, view, _ = begun(Options(window_size=5, ngram_size=4, guess_set_size=0), prompts(20)[0])
    places = torch.arange(5)[:, None] + torch.arange(3)
    anchor = int(drafter._anchors[0])
    drafter._window[0] = SAID + (anchor + places) % 12
    run_step(drafter, by_place, tiny.view([view.history[0, : view.host_lengths[0]].tolist()], vocab=VOCAB), [most])
    assert int(drafter._anchors[0]) == anchor + 1
    right = drafter._window[0] == SAID + (anchor + 1 + places) % 12
    assert right[:4].all(), "the last column is that of the place that was left, or has moved on itself"
    assert bool(right[4].all()) == (most == 6)


def begun(options: Options, text: list[int]) -> tuple[Lookahead, View, Draft]:
    """A drafter that has been asked once."""
    drafter = admitted(options, text)
    view = tiny.view([text], vocab=VOCAB)
    return drafter, view, drafter.propose(view, Plan((drafter.needs.longest,)))


@pytest.mark.parametrize(("nodes", "moved"), [(2, 1), (3, 2), (4, 3), (9, 3)])
def test_of_a_tree_that_was_cut_or_padded_the_columns_move_that_the_target_has_seen(nodes: int, moved: int):
    drafter, view, draft = begun(Options(window_size=3, ngram_size=3, guess_set_size=0), prompts(20)[0])
    assert int(draft.tree.valid.sum()) == 4, "all columns lie on one chain at first"
    pad = (0, nodes - draft.tree.tokens.shape[1])
    tokens = torch.nn.functional.pad(draft.tree.tokens, pad)
    parents = torch.nn.functional.pad(draft.tree.parents, pad, value=PAD)
    draft = replace(draft, tree=TokenTree(tokens, parents, depth=min(3, nodes - 1)))
    logits = torch.nn.functional.one_hot(torch.full((1, nodes), VOCAB - 1), VOCAB).float()
    drafter.commit(view, draft, greedy(logits.argmax(-1), draft.tree), StepOut(logits))
    assert (drafter._window[0, :, -1] == VOCAB - 1).tolist() == [i < moved for i in range(3)]


def test_what_was_asked_of_another_draft_moves_nothing():
    """Neither the root alone, nor the rows of somebody else."""
    text = prompts(20)[0]
    for others in (tiny.view([text], vocab=VOCAB), tiny.view([text, text], vocab=VOCAB)):
        drafter, _, _ = begun(Options(window_size=3, ngram_size=3, guess_set_size=0), text)
        before = drafter._window.clone()
        alone = Draft(TokenTree.root(others.roots), Law.FIXED)
        logits = torch.zeros(len(others.rows), 1, VOCAB)
        drafter.commit(others, alone, greedy(logits.argmax(-1), alone.tree), StepOut(logits))
        assert torch.equal(drafter._window, before)


def test_a_text_that_is_taken_back_finds_its_window():
    text = prompts(12)[0]
    drafter, view, _ = begun(Options(window_size=4, ngram_size=3, guess_set_size=2), text)
    before = drafter._window[0].clone()
    drafter.propose(tiny.view([[*text, 3, 4]], vocab=VOCAB), Plan((4,)))
    assert not torch.equal(drafter._window[0], before)
    drafter.rewind(0, len(text))
    drafter.propose(view, Plan((4,)))
    before[2, 0] = 4  # what was guessed for the root's place is gone
    assert torch.equal(drafter._window[0], before)


@pytest.mark.parametrize(("per_key", "size", "count"), [(2, 7, 4), (3, 50, 5), (1, 3, 8), (4, 4, 1)])
def test_the_pool_is_a_list_in_order_of_age(per_key: int, size: int, count: int):
    """Bounded by key and in all, keyed by the first token, each owner for itself, and never with a twin."""
    pool, slow = NgramPool(3, per_key, size, CPU), [SlowPool(per_key, size) for _ in range(3)]
    for row in range(3):
        pool.admit(row, torch.tensor([1]), {})
    source = torch.Generator().manual_seed(1)
    full = False
    for _ in range(60):
        owners = torch.randperm(3, generator=source)[:2]
        ngrams = torch.randint(0, 4, (2, count, 3), generator=source)
        wanted = torch.rand(2, count, generator=source) < 0.7
        pool.add(owners, ngrams, wanted)
        for owner, own, some in zip(owners.tolist(), ngrams.tolist(), wanted.tolist(), strict=True):
            for begin in range(0, count, size):  # never more at once than there is room for
                part = zip(own[begin : begin + size], some[begin : begin + size], strict=True)
                slow[owner].add([tuple(ngram) for ngram, yes in part if yes])
        for key in range(4):
            found = pool.find(torch.arange(3), torch.full((3,), key))
            for owner in range(3):
                known = [ngram[1:] for ngram in slow[owner].ngrams if ngram[0] == key]
                assert [tuple(each) for each in found.tokens[owner][found.exist[owner]].tolist()] == known
                full |= len(known) == per_key
    assert full
    pool.release(1)
    assert not pool.find(torch.tensor([1]), torch.tensor([0])).exist.any()
    assert pool.find(torch.tensor([0, 2]), torch.tensor([0, 0])).exist.any()
    pool.release(0)
    assert pool.nbytes > 0
    pool.release(2)
    assert pool.nbytes == 0


def tiny_text() -> tuple[CausalLM, list[int]]:
    return CausalLM(tiny.build("llama")), tiny.prompts((9,), seed=1)[0] * 3


@pytest.mark.parametrize("pool", ["request", "shared"])
def test_a_shared_pool_outlives_its_texts_and_changes_none(pool: str):
    target, prompt = tiny_text()
    drafter = Lookahead(Options(window_size=4, ngram_size=3, guess_set_size=4, pool=pool, pool_size=64), CPU)
    g = tiny.generator(target, drafter, Constant(drafter.needs.longest), max_rows=2)
    plain = tiny.generator(target).generate(prompt, max_new_tokens=40).tokens
    first, second = (g.generate(prompt, max_new_tokens=40) for _ in range(2))
    assert first.tokens == second.tokens == plain
    if pool == "request":
        assert second.stats.accepted == first.stats.accepted
        assert drafter._pool is not None and drafter._pool.nbytes == 0
    else:
        assert second.stats.target_forwards < first.stats.target_forwards
        assert 0 < len(pooled(drafter, 0)) <= 64
    results = g.generate([prompt, prompt[:5], prompt[2:]], max_new_tokens=12)
    assert results[0].tokens == plain[:12]
    wild = {"temperature": 1.0, "seed": 4, "max_new_tokens": 24}
    assert g.generate(prompt, **wild).tokens == tiny.generator(target).generate(prompt, **wild).tokens


@pytest.mark.parametrize("pool", ["request", "shared"])
def test_ngrams_of_the_prompt_are_drafted_at_once(pool: str):
    """The prompt ends with the token that the second of two identical passages begins with."""
    text = [1, 2, 3, 4, 5, 6, 2]
    for given, wanted in ((False, False), (True, True)):
        drafter = admitted(Options(window_size=1, ngram_size=4, pool=pool, prompt_ngrams=given), text)
        draft = drafter.propose(tiny.view([text], vocab=VOCAB), Plan((3,)))
        assert ([3, 4, 5] in paths_of(draft, 0)) is wanted


def test_a_spec_names_every_option():
    spec = Spec.parse(
        "lookahead,window_size=7,ngram_size=5,guess_set_size=6,pool=shared,pool_size=99,prompt_ngrams=yes"
    )
    assert spec.options == Options(7, 5, 6, "shared", 99, True)


def test_merged_paths_know_their_nodes():
    paths = torch.tensor([[[1, 2, 3], [1, 2, 4], [1, 5, 5], [7, 7, 7]]])
    tree, nodes = merge_paths(torch.tensor([9]), paths, torch.tensor([[3, 3, 2, 0]]))
    tokens: Tensor = tree.tokens[0][nodes[0]]
    assert tokens.tolist() == [[1, 2, 3], [1, 2, 4], [1, 5, 9], [9, 9, 9]]
    assert (nodes[0, 0, :2] == nodes[0, 1, :2]).all() and nodes[0, 2, 0] == nodes[0, 0, 0]
