"""The target over a part of its cache: what is kept, what that says, and how much memory it takes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from foredraft.core.errors import ModelError, OptionError
from foredraft.core.tree import TokenTree
from foredraft.model.attention.slot_attention import AttentionObserver
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import PassthroughView, SlotCache
from foredraft.model.kv.masks import StepIn
from foredraft.model.partial.kv_selection import SCORES, HeavyHitters, Retrieval, Selection, Window
from foredraft.model.partial.model import PartialLM
from slots import bases, read

TOLERANCE = 1e-4
TEXTS = tiny.prompts((70, 31, 9), seed=2)
KINDS = {"retrieval": Retrieval(16, 4), "window": Window(16, 3), "h2o": HeavyHitters(16, 6)}


class Recorder(Selection):
    """Notes what another selection is asked, and what it answers."""

    def __init__(self, inner: Selection) -> None:
        self.budget, self.slack, self.counts, self.inner = inner.budget, inner.slack, inner.counts, inner
        self.asked: list[tuple[Tensor, Tensor, float, Tensor]] = []
        self.border = inner.border

    def choose(self, query: Tensor, keys: Tensor, scale: float) -> Tensor:
        self.asked.append((query.clone(), keys.clone(), scale, self.inner.choose(query, keys, scale)))
        return self.asked[-1][3]

    def evict(self, counts: Tensor) -> Tensor:
        return self.inner.evict(counts)


def say(model: CausalLM | PartialLM, cache: SlotCache, trees: TokenTree, texts: list[list[int]], rows: list[int]):
    """Logits of trees whose roots are the last tokens of the texts."""
    cache.reserve(rows, max(map(len, texts)) + trees.tokens.shape[1])
    step = model.address(trees, bases(texts), rows, max(map(len, texts)) - 1 + trees.tokens.shape[1])
    return model.forward(step, cache).logits


def forward_roots(partial: PartialLM, rows: list[int], tokens: list[int], places: list[int]) -> None:
    """Read one token of each row, which stands at this place of its text."""
    step = partial.address(TokenTree.root(torch.tensor(tokens)), torch.tensor(places), rows, max(places) + 1)
    partial.forward(step, partial.cache)


def branching(texts: list[list[int]]) -> TokenTree:
    parents = torch.tensor([[-1, 0, 0, 1, 2]]).repeat(len(texts), 1)
    return TokenTree(torch.tensor([[text[-1], 5, 6, 7, 8] for text in texts]), parents, depth=2)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox", "granite"])
@pytest.mark.parametrize("kind", [Retrieval(80, 4), Window(80), HeavyHitters(80, 10)], ids=KINDS)
def test_a_full_budget_gives_the_full_logits(name: str, kind: Selection):
    model, rows = CausalLM(tiny.build(name)), [2, 0, 1]
    full = read(model, TEXTS, rows)
    partial = PartialLM(model, full, kind, 24)
    assert partial.sync(rows, [len(text) for text in TEXTS], 8) == []
    tree = branching(TEXTS)
    found = say(partial, partial.cache, tree, TEXTS, rows)
    assert (found - say(model, full, tree, TEXTS, rows)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_window_says_what_the_model_says_that_cannot_see_the_rest(name: str, monkeypatch: pytest.MonkeyPatch):
    """Positions stay those of the text, whatever slots the tokens are in."""
    model, rows = CausalLM(tiny.build(name)), [1, 0, 2]
    full, tree = read(model, TEXTS, rows), branching(TEXTS)
    partial = PartialLM(model, full, KINDS["window"], 12)
    assert partial.sync(rows, [len(text) for text in TEXTS], 8) == [1, 0]
    found = say(partial, partial.cache, tree, TEXTS, rows)
    step = model.address(tree, bases(TEXTS), rows, 80)
    masks = step.masks(model.dtype)
    for mask in masks.values():
        for line, text in enumerate(TEXTS[:2]):
            mask[line, :, :, 3 : len(text) - 1 - 13] = torch.finfo(mask.dtype).min
    monkeypatch.setattr(StepIn, "masks", lambda *_: masks)
    assert (found - model.forward(step, full).logits).abs().max() < TOLERANCE


class Hiding(AttentionObserver):
    """Hides slots from all layers but the first ones, over the whole cache."""

    def __init__(self, view: PassthroughView, hidden: Tensor, first: int) -> None:
        self.view, self.hidden, self.first = view, hidden, first

    def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return self.view.store.write(layer, key, value, self.view)

    def mask(self, layer: int, mask: Tensor) -> Tensor:
        least = torch.finfo(mask.dtype).min
        return mask if layer < self.first else mask.masked_fill(self.hidden[:, None, None], least)

    def record_weights(self, layer: int, weights: Tensor) -> None: ...


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("whole", [1, 2])
def test_whole_layers_attend_to_what_the_others_left_out(name: str, whole: int):
    """Against the whole cache with masks by layer, for rows that fit and rows that do not, and as they grow."""
    model, rows = CausalLM(tiny.build(name, num_hidden_layers=3)), [1, 0, 2]
    full = read(model, TEXTS, rows)
    partial = PartialLM(model, full, KINDS["window"], 16, whole_layers=whole)
    for cut in (4, 3, 0):
        texts = [text[: len(text) - cut] for text in TEXTS]
        tree, selected = branching(texts), partial.sync(rows, [len(text) for text in texts], 6)
        assert selected == ([1, 0] if cut == 4 else [])
        found = say(partial, partial.cache, tree, texts, rows)
        step = model.address(tree, bases(texts), rows, 80)
        hidden = torch.zeros(3, step.kv_extent, dtype=torch.bool)
        for line, text in enumerate(TEXTS[:2]):
            hidden[line, 3 : len(text) - 5 - 13] = True
        view = PassthroughView(read(model, TEXTS, rows), step)
        wanted = model.run(step, view, None, Hiding(view, hidden, whole)).logits
        assert (found - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", [Retrieval(16, 4), HeavyHitters(16, 6)], ids=["retrieval", "h2o"])
def test_after_a_whole_layer_queries_are_those_of_the_model(kind: Selection):
    """And a whole layer selects nothing."""
    model, asked = CausalLM(tiny.build("llama")), []
    full = read(model, TEXTS, [0, 1, 2])
    for whole in (0, 1):
        recorder = Recorder(kind)
        partial = PartialLM(model, full, recorder, 12, whole_layers=whole)
        partial.sync([0, 1, 2], [len(text) for text in TEXTS], 6)
        say(partial, partial.cache, branching(TEXTS), TEXTS, [0, 1, 2])
        asked.append([query for query, *_ in recorder.asked])
    assert len(asked[0]) == 4 and len(asked[1]) == 2
    queries: list[Tensor] = []
    step = model.address(branching(TEXTS), bases(TEXTS), [0, 1, 2], 80)
    view = PassthroughView(full, step)

    class Queries(Hiding):
        def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float):
            queries.append(query[:, :, 0].clone())
            return super().attend_to(layer, query, key, value, scale)

    model.run(step, view, None, Queries(view, torch.zeros(3, step.kv_extent, dtype=torch.bool), 0))
    for row in (0, 1):
        wanted = queries[1][row].unflatten(0, (2, -1))
        assert (asked[1][row] - wanted).abs().max() < TOLERANCE
        assert (asked[0][2 + row] - wanted).abs().max() > 10 * TOLERANCE


def test_a_model_needs_more_layers_than_whole_ones():
    model = CausalLM(tiny.build("llama"))
    with pytest.raises(ModelError, match="has 2 layers, so whole_layers must be 1 or less, not 2"):
        PartialLM(model, model.new_cache(), KINDS["retrieval"], 16, whole_layers=2)


def brute_force(query: Tensor, keys: Tensor, budget: int, chunk: int, score: str) -> list[list[int]]:
    """Chunk by chunk and head by head: by the mean key as the paper says it, for heads that share keys by their sum."""
    places = []
    for group in range(keys.shape[0]):
        scores = []
        for begin in range(0, keys.shape[1], chunk):
            own = [keys[group, begin + i] for i in range(chunk)]
            if score == "best":
                scores.append(max(float(head @ key) for head in query[group] for key in own))
            else:
                scores.append(sum(float(head @ (sum(own) / chunk)) for head in query[group]))
        best = sorted(range(1, len(scores)), key=lambda i: -scores[i])[: budget // chunk - 1]
        places.append([i * chunk + j for i in sorted([0, *best]) for j in range(chunk)])
    return places


@pytest.mark.parametrize("score", SCORES)
def test_chunks_are_those_of_a_brute_force_search_in_every_layer(score: str):
    model, rows = CausalLM(tiny.build("llama")), [1, 0, 2]
    full, kind = read(model, TEXTS, rows), Recorder(Retrieval(16, 4, score))
    partial = PartialLM(model, full, kind, 12)
    assert partial.sync(rows, [len(text) for text in TEXTS], 6) == [1, 0]
    say(partial, partial.cache, branching(TEXTS), TEXTS, rows)
    assert len(kind.asked) == 2 * model.layers
    for call, (query, keys, _, chosen) in enumerate(kind.asked):
        layer, (row, text) = call // 2, [(1, TEXTS[0]), (0, TEXTS[1])][call % 2]
        committed = len(text) - 1
        border = committed // 4 * 4
        stored = full.stored(layer)
        assert query.shape == (2, 2, 8) and torch.equal(keys, stored[0][row, :, :border])
        assert chosen.tolist() == brute_force(query, keys, 16, 4, score)
        for whole, own in zip(stored, partial.cache.stored(layer), strict=True):
            wanted = torch.stack([whole[row, k, chosen[k]] for k in range(2)])
            held = own[partial.cache.buffer_row(row)]
            assert torch.equal(held[:, :16], wanted)
            assert torch.equal(held[:, 16 : 16 + committed - border], whole[row, :, border:committed])
    assert any((a[3][0] != a[3][1]).any() for a in kind.asked), "every head has chosen the same"


def test_the_query_is_that_of_the_newest_token():
    """In the first layer it depends on the root alone: another root, other chunks."""
    model = CausalLM(tiny.build("llama"))
    texts = [[*TEXTS[0][:-1], token] for token in (3, 50)]
    full, kind = read(model, texts, [0, 1]), Recorder(KINDS["retrieval"])
    partial = PartialLM(model, full, kind, 12)
    partial.sync([0, 1], [70, 70], 6)
    say(partial, partial.cache, TokenTree.chain(torch.tensor([[3, 9], [50, 9]])), texts, [0, 1])
    (first, keys, _, a), (second, same, _, b) = kind.asked[:2]
    assert torch.allclose(keys, same) and not torch.allclose(first, second) and not torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_partial_cache_is_as_large_as_its_budget(kind: str):
    model = CausalLM(tiny.build("llama"))
    for length in (70, 110):
        texts = tiny.prompts((length, length), seed=4)
        full = read(model, texts, [0, 1])
        partial = PartialLM(model, full, KINDS[kind], 14)
        partial.sync([0, 1], [length] * 2, 8)
        say(partial, partial.cache, branching(texts), texts, [0, 1])
        slots = model.layers * 2 * 2 * (16 + 14)  # layers, rows, groups, budget and room
        assert partial.cache.nbytes == slots * (8 + 8) * 4
        assert partial.nbytes == partial.cache.nbytes + (slots * 4 if kind == "h2o" else 0)
        partial.clear()
        assert partial.nbytes == partial.cache.nbytes == slots * (8 + 8) * 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_later_is_taken_in_as_the_target_wrote_it(kind: str):
    """Over a text that grows, the latest tokens are the target's own keys and values, and never does anything overflow;
    the tokens that are kept are some of the target's too."""
    model, text = CausalLM(tiny.build("llama")), tiny.prompts((120,), seed=7)[0]
    full = read(model, [text], [0])
    partial = PartialLM(model, full, KINDS[kind], 16)
    chosen, last = 0, 0
    recent = {"retrieval": lambda length: (length - 1) % 4 or 4, "window": lambda _: 13, "h2o": lambda _: 6}
    for length in (5, 9, 27, 31, 39, 40, 62, 63, 90, 92, 120):
        chosen += len(partial.sync([0], [length], 6))
        tree = TokenTree.chain(torch.tensor([[text[length - 1], 1, 2, 3]]))
        step = partial.address(tree, torch.tensor([length - 1]), [0], length + 3)
        assert int(step.slots.max()) < partial.capacity
        assert step.positions.tolist() == [list(range(length - 1, length + 3))]
        partial.forward(step, partial.cache)
        partial.finalize(torch.tensor([1]))
        left = partial.left_out(0)
        assert left >= last and (left == 0) == (chosen == 0)
        last = left
        for layer in range(model.layers):
            whole, own = full.stored(layer)[0][0, :, : length - 1], partial.cache.stored(layer)[0][0]
            held = own[:, : length - 1 - left]
            assert torch.equal(held[:, -recent[kind](length) :], whole[:, -recent[kind](length) :])
            known = (held[:, :, None] == whole[:, None]).all(-1)
            assert known.any(-1).all()
            order = known.int().argmax(-1)
            assert (order[:, 1:] > order[:, :-1]).all(), "tokens stand in order, none of them twice"
    assert chosen >= 3


def test_attention_counts_for_the_root_and_what_was_accepted():
    model = CausalLM(tiny.build("llama"))
    full = read(model, TEXTS, [0, 1, 2])
    partial = PartialLM(model, full, KINDS["h2o"], 16)
    lengths = [len(text) for text in TEXTS]
    partial.sync([0, 1, 2], lengths, 4)
    for index in range(3):  # a chain of a root and two drafted tokens, read one by one
        forward_roots(partial, [0, 1, 2], [7, 8, 9], [length - 1 + index for length in lengths])
    assert partial._scores is not None
    assert float(partial._scores.of(0, 0).sum()) == 0, "nothing counts before the verdict"
    partial.finalize(torch.tensor([0, 2, 1]))
    for layer in range(model.layers):
        for row, heads in enumerate((2.0, 6.0, 4.0)):  # two query heads a group, each of them spends 1 a token
            assert torch.allclose(partial._scores.of(layer, row).sum(1), torch.full((2,), heads), atol=1e-4)


def test_eviction_keeps_the_latest_and_the_heaviest():
    kind = HeavyHitters(6, 2)
    counts = torch.tensor([[9.0, 1.0, 5.0, 0.0, 7.0, 6.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 9.0]])
    assert kind.evict(counts).tolist() == [[0, 2, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]


def test_after_many_steps_without_a_draft_the_newest_tokens_are_kept():
    """The cache has grown since any attention was noted, and what was never attended to here counts nothing."""
    model, text = CausalLM(tiny.build("llama")), tiny.prompts((400,), seed=9)[0]
    full = read(model, [text], [0])
    partial = PartialLM(model, full, HeavyHitters(200, 30), 190)
    for length, evicted in ((9, []), (386, [0])):
        assert partial.sync([0], [length], 6) == evicted
        forward_roots(partial, [0], [text[length - 1]], [length - 1])
        partial.finalize(torch.tensor([0]))
    assert partial.left_out(0) == 385 - 200
    for layer in range(model.layers):
        whole, own = full.stored(layer)[0][0], partial.cache.stored(layer)[0][0]
        assert torch.equal(own[:, 170:200], whole[:, 355:385])
        assert torch.equal(own[:, 0], whole[:, 0]), "what had attention is kept, too"


def test_evicted_tokens_are_those_with_least_attention_so_far():
    """The cache itself, against a slow bookkeeping of every weight."""
    model, text = CausalLM(tiny.build("llama", num_hidden_layers=1)), tiny.prompts((60,), seed=9)[0]
    full = read(model, [text], [0])
    partial = PartialLM(model, full, HeavyHitters(12, 4), 10)
    kept: list[list[int]] = [[], []]  # by group, the positions in the cache
    sums = [dict.fromkeys(range(60), 0.0) for _ in range(2)]
    evictions, upto = 0, 0
    for length in range(4, 56):
        evicted = partial.sync([0], [length], 3)
        for group in range(2):
            kept[group] += range(upto, length - 1)
            if evicted:
                heavy = sorted(kept[group][:-4], key=lambda place: -sums[group][place])[:8]
                kept[group] = sorted(heavy) + kept[group][-4:]
        evictions += len(evicted)
        upto = length - 1
        forward_roots(partial, [0], [text[length - 1]], [length - 1])
        assert partial._scores is not None
        noted = partial._scores._pending[0][0][1][0]
        partial.finalize(torch.tensor([0]))
        keys = partial.cache.stored(0)[0][0]
        for group in range(2):
            held = keys[group, : len(kept[group])]
            assert torch.equal(held, full.stored(0)[0][0, group, kept[group]])
            for slot, place in enumerate([*kept[group], length - 1]):
                sums[group][place] += float(noted[group, slot])
    assert evictions > 3


class Counting(TorchDispatchMode):
    """Counts writes by index, and writes of pieces."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_ragged_rows_are_taken_in_together_as_one_by_one():
    """Some have nothing new, some a few tokens, some many, and of some a part has been left out."""
    model, rows = CausalLM(tiny.build("llama")), [4, 0, 3, 1, 2]
    texts = tiny.prompts((100, 70, 90, 60, 80), seed=4)
    full = read(model, texts, rows)
    for sets in ([50, 31, 9, 12, 45], [50, 32, 17, 21, 46], [56, 33, 17, 60, 47], [57, 40, 70, 60, 55]):
        one, all_at_once = (PartialLM(model, full, KINDS["window"], 60) for _ in range(2))
        for host_lengths in ([12, 31, 5, 9, 45], sets):
            for row, length in zip(rows, host_lengths, strict=True):
                one.sync([row], [length], 6)
            all_at_once.sync(rows, host_lengths, 6)
        for layer in range(model.layers):
            for slow, fast in zip(one.cache.stored(layer), all_at_once.cache.stored(layer), strict=True):
                for row, length in zip(rows, sets, strict=True):
                    assert one.left_out(row) == all_at_once.left_out(row)
                    end = min(length - 1 - one.left_out(row), all_at_once.capacity)
                    alone, together = slow[one.cache.buffer_row(row)], fast[all_at_once.cache.buffer_row(row)]
                    assert torch.equal(alone[:, :end], together[:, :end])


@torch.inference_mode()
def test_any_number_of_rows_is_taken_in_by_one_write_a_layer():
    model, rows = CausalLM(tiny.build("llama")), [3, 1, 0, 2]
    texts = tiny.prompts((50, 40, 45, 42), seed=4)
    partial = PartialLM(model, read(model, texts, rows), KINDS["window"], 60)
    partial.sync(rows, [30, 31, 29, 33], 6)
    with Counting() as seen:
        partial.sync(rows, [32, 34, 36, 34], 6)
    assert seen.count == 2 * model.layers


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_text_that_is_taken_back_is_taken_in_again(kind: str):
    """As far as what was kept still stands only the rest is; else all is as if the other text had been the first."""
    model, text = CausalLM(tiny.build("llama")), TEXTS[0]
    for stands in (42, 30):
        other = text[:stands] + tiny.prompts((60,), seed=8)[0]
        full = read(model, [text], [0])
        partial = PartialLM(model, full, KINDS[kind], 24)
        for length in (41, 46):
            partial.sync([0], [length], 6)
            say(partial, partial.cache, branching([text[:length]]), [text[:length]], [0])
            partial.finalize(torch.tensor([0]))
        left = partial.left_out(0)
        assert left in (24, 25)
        other_full = read(model, [other], [0])
        for whole, new in zip(full._keys + full._values, other_full._keys + other_full._values, strict=True):
            assert whole is not None and new is not None
            whole.copy_(new)  # as the target does, when it goes on with another text
        partial.rewind(0, stands)
        assert bool(partial.sync([0], [46], 6)) == (stands == 30)
        say(partial, partial.cache, branching([other[:46]]), [other[:46]], [0])
        if stands == 42:
            for layer in range(2):
                own, whole = partial.cache.stored(layer)[0][0], full.stored(layer)[0][0]
                assert torch.equal(own[:, 40 - left : 45 - left], whole[:, 40:45])
        else:
            fresh = PartialLM(model, full, KINDS[kind], 24)
            fresh.sync([0], [46], 6)
            say(fresh, fresh.cache, branching([other[:46]]), [other[:46]], [0])
            for layer in range(2):
                own, new = partial.cache.stored(layer)[0][0], fresh.cache.stored(layer)[0][0]
                assert torch.equal(own[:, : 45 - left], new[:, : 45 - left])


@pytest.mark.parametrize("name", ["mistral", "gemma2", "llama4_text"])
def test_windows_of_the_models_own_are_refused(name: str):
    model = CausalLM(tiny.build(name))
    with pytest.raises(ModelError, match="layers with a sliding or chunked attention window"):
        PartialLM(model, model.new_cache(), KINDS["retrieval"], 16)


@pytest.mark.parametrize("name", ["gptj", "falcon", "diffllama", "deepseek_v3"])
def test_models_that_do_not_show_their_queries_are_refused(name: str):
    model = CausalLM(tiny.build(name))
    with pytest.raises(ModelError, match="partial-cache drafting is unavailable"):
        PartialLM(model, model.new_cache(), KINDS["retrieval"], 16)


def test_more_nodes_than_there_is_room_for_are_refused():
    model = CausalLM(tiny.build("llama"))
    partial = PartialLM(model, read(model, TEXTS, [0, 1, 2]), KINDS["retrieval"], 16)
    assert partial.most_ahead == 12
    with pytest.raises(ModelError, match="room for 12 nodes ahead cannot take 13"):
        partial.sync([0], [70], 13)


def test_budgets_that_cannot_be():
    for budget, chunk in ((20, 8), (8, 8), (0, 8), (16, 0)):
        with pytest.raises(OptionError, match="two chunks or more"):
            Retrieval(budget, chunk)
    with pytest.raises(OptionError, match="no room for a window"):
        Window(4, 4)
    with pytest.raises(OptionError, match="no room for heavy hitters"):
        HeavyHitters(8, 8)


def test_a_cache_in_which_nothing_stands_says_so():
    with pytest.raises(ModelError, match="run a forward of the prompt first"):
        SlotCache(1).stored(0)
