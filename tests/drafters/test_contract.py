"""What every drafter owes: the same text, alone and together, no traces, and an honest q. Runs over the table."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

import random_heads as heads
import specs
import tiny
from foredraft.compose.spec import Spec
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Plan, RowState, View
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters import METHODS
from foredraft.drafters.common.model_trees import ModelTreeDrafter
from foredraft.drafters.common.self_speculative import SelfSpeculativeDrafter
from foredraft.drafters.lookahead import NgramPool
from foredraft.drafters.partial import CACHES
from foredraft.drafters.states.read_rows import ReadRows
from foredraft.drafters.triforce import TriForce
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant, Policy
from foredraft.engine.step import StepResult
from foredraft.heads.glide_model import GlideLM
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.model.partial.model import PartialLM
from foredraft.model.prefill import prefill
from reference import reference

NEW = 10
SAMPLED = {"temperature": 0.9, "top_k": 12, "repetition_penalty": 1.2, "seed": 21}
RATES = ((0.6, 0.2, 0.1), (0.5, 0.2, 0.1), (0.4, 0.1, 0.1))

HEADS: specs.Heads = {
    **heads.HEADS,
    "eagle of two layers": lambda target: heads.eagle(target, num_layers=2),
    "eagle3": lambda target: heads.eagle3(target, vocabulary=two_of_three(target.vocab_size)),
    "eagle3 window": lambda target: heads.eagle3(target, block={"sliding_window": 6}),
    "medusa measured": lambda target: heads.medusa(target, accuracies=RATES),
    "hydra++ of two layers": lambda target: heads.hydra(target, prefix=True, layers=2),
}


def two_of_three(vocab_size: int) -> torch.Tensor:
    """A draft vocabulary."""
    return torch.tensor([i for i in range(vocab_size) if i % 3])


PAGES = Path(__file__).resolve().parents[2] / "docs" / "methods"
VARIANTS = {
    name: spec
    for method in METHODS
    for block in re.findall(r"<!-- contract\n(.*?)-->", (PAGES / f"{method}.md").read_text("utf-8"), re.DOTALL)
    for name, _, spec in (line.partition(": ") for line in block.splitlines())
}
"""Specs of each method's page; "other" is a draft that disagrees with "draft", "slim" a middle model that lacks two of
its tokens. Drafters around others have options with which they do not get to learning here."""


def spec(name: str) -> Spec:
    return Spec.parse(VARIANTS[name])


def build(name: str, target: CausalLM, draft: CausalLM, *, draws: bool = False) -> Drafter:
    other = far() if draft.vocab_size == tiny.VOCAB else narrow(3)
    models = {"draft": draft, "other": other, "slim": slim(target.vocab_size)}
    return specs.build(VARIANTS[name], target, models, HEADS, draws=draws)


def shared_cache(drafter: Drafter) -> SlotCache | None:
    """The target's cache, of a drafter that shares it."""
    if isinstance(drafter, SelfSpeculativeDrafter):
        return drafter.cache
    if isinstance(drafter, ModelTreeDrafter) and isinstance(drafter._runner.model, GlideLM):
        return drafter._runner.model.target_cache
    return drafter.full if isinstance(drafter, TriForce) else None


EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if " " in name else name for name in VARIANTS]
)
"""Each method once; its further configurations, whose names have two words, are among the long tests."""


def test_the_suite_covers_the_table():
    assert {spec(name).name for name in VARIANTS} == set(METHODS)
    for each in map(spec, VARIANTS):
        assert each.options.law in METHODS[each.name].laws or each.name == "none"


@functools.cache
def target() -> CausalLM:
    return CausalLM(tiny.build("llama"))


@functools.cache
def near() -> CausalLM:
    """A draft that is often right: the target, a little shaken."""
    model = tiny.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
    return CausalLM(model)


@functools.cache
def far() -> CausalLM:
    """A draft that is seldom right."""
    return CausalLM(tiny.build("llama", seed=5))


@functools.cache
def slim(vocab_size: int) -> CausalLM:
    """A middle model that lacks the last two tokens of so many."""
    return CausalLM(tiny.build("llama", seed=8, spread=1.0, vocab_size=vocab_size - 2))


def prompts() -> list[list[int]]:
    """Ragged; the longest repeats itself, so that there is something to look up."""
    return [*tiny.prompts((1, 5, 17)), tiny.prompts((9,), seed=1)[0] * 4]


def generator(name: str, **options: Any) -> Generator:
    drafter = build(name, target(), near())
    target().tap(drafter.needs.hidden_layers)
    return tiny.generator(target(), drafter, Constant(4), cache=shared_cache(drafter), **options)


@functools.cache
def expected() -> list[list[int]]:
    return [reference(tiny.oracle(), prompt, SamplingParams(max_new_tokens=NEW)) for prompt in prompts()]


@functools.cache
def expected_sampled() -> list[list[int]]:
    """What no draft may change, either."""
    return [generator("none").generate(prompt, max_new_tokens=NEW, **SAMPLED).tokens for prompt in prompts()]


@EVERY
def test_greedy_is_the_reference(name: str):
    """In a ragged batch and alone."""
    g = generator(name)
    results = g.generate(prompts(), max_new_tokens=NEW)
    assert [result.tokens for result in results] == expected()
    ends = (prompts()[0], prompts()[-1])
    assert [g.generate(p, max_new_tokens=NEW).tokens for p in ends] == [expected()[0], expected()[-1]]
    drafted, accepted = (sum(getattr(r.stats, field) for r in results) for field in ("drafted", "accepted"))
    assert (drafted > 0) == (name != "none")
    if spec(name).name in ("draft_model", "sequoia", "opt_tree", "layer_skip", "partial", "triforce"):
        assert 0 < accepted < drafted


@EVERY
def test_predictions_beside_it_change_nothing(name: str):
    """Rows whose outputs are predicted, in part, wrongly or not at all."""
    g = generator(name)
    first, second, third, _ = expected()
    given = [first, None, [*third[:5], (third[5] + 1) % tiny.VOCAB, *third[6:]], second]
    for options in ({}, SAMPLED):
        params = [SamplingParams(max_new_tokens=NEW, prediction=each, **options) for each in given]
        sequences = [g.submit([prompt], own)[0] for prompt, own in zip(prompts(), params, strict=True)]
        g.engine.run(sequences)
        assert [sequence.tokens for sequence in sequences] == (expected_sampled() if options else expected())
        if not options:
            stats = [sequence.stats for sequence in sequences]
            assert stats[0].accepted_prediction_tokens >= NEW - 2 and stats[2].accepted_prediction_tokens >= 5
            assert stats[1].accepted_prediction_tokens == stats[1].rejected_prediction_tokens == 0


WARPS = [
    {"temperature": 0.3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {},
    {"temperature": 1.3, "top_k": 40, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
]
"""Of the rows of a batch, one after another, among them a greedy one."""


@functools.cache
def mixed() -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Requests of all warps and lengths with the reference's outputs."""
    params = [SamplingParams(max_new_tokens=4 + 3 * i, seed=i, **warp) for i, warp in enumerate(WARPS * 2)]
    return [(p, own, reference(tiny.oracle(), p, own)) for p, own in zip(prompts() * 3, params, strict=False)]


@EVERY
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_seed_gives_the_reference_at_any_temperature(name: str, rows: int):
    """In batches of rows that come and go, with other warps, beside greedy ones."""
    g = generator(name, max_rows=rows)
    sequences = [g.submit([prompt], params)[0] for prompt, params, _ in mixed()]
    g.engine.run(sequences)
    assert [sequence.tokens for sequence in sequences] == [expected for _, _, expected in mixed()]


def holdings(drafter: Any, shared: tuple[SlotCache, ...] = ()) -> dict[str, int]:
    """How much each attribute of a drafter, or of its memory, holds: entries of a container, rows of a cache.

    But for what stays: memory, and released rows for prompts that begin alike, also in caches that are ``shared``.
    """
    held = {}
    kept = (*shared, *(value._cache for value in vars(drafter).values() if isinstance(value, ReadRows)))
    for key, value in vars(drafter).items():
        if key in ("_features", "_used", "_current", "_left") or any(value is each for each in kept):
            continue
        if isinstance(value, ReadRows):
            held[key] = len(value.count)
        elif isinstance(value, SlotCache):
            held[key] = len(value._buffer_rows)
        elif isinstance(value, (NgramPool, torch.Tensor)):
            held[key] = value.nbytes
        elif isinstance(value, (dict, list, set)):
            held[key] = len(value)
        elif isinstance(value, (RowState, PartialLM)):
            held |= {f"{key}.{inner}": size for inner, size in holdings(value, kept).items()}
        elif isinstance(value, tuple):
            for number, part in enumerate(value):
                if isinstance(part, RowState):
                    held |= {f"{key}.{number}.{inner}": size for inner, size in holdings(part, kept).items()}
    return held


@EVERY
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_admit_and_release_leave_no_trace(name: str, options: dict[str, Any]):
    g = generator(name, max_rows=2)
    drafter = g.engine.drafter
    before = holdings(drafter)
    runs = []
    for order in (1, -1, 1):
        params = [SamplingParams(**{"max_new_tokens": 6, **options, "seed": seed}) for seed in range(len(prompts()))]
        asked = list(zip(prompts(), params, strict=True))[::order]
        sequences = [g.submit([prompt], each)[0] for prompt, each in asked]
        g.engine.run(sequences)
        assert holdings(drafter) == before
        runs.append([(s.tokens, s.stats.drafted, s.stats.accepted) for s in sequences][::order])
    if not drafter.needs.learns:
        assert runs[0] == runs[2]
    assert [tokens for tokens, _, _ in runs[0]] == [tokens for tokens, _, _ in runs[1]]
    cancelled = g.submit(prompts(), SamplingParams(max_new_tokens=NEW, **options))
    g.engine.step()
    g.engine.cancel(cancelled)
    assert holdings(drafter) == before


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if name.split()[0] in ("eagle3", "medusa", "hydra", "opt_tree", "cape", "glide")]
)
def test_of_fewer_nodes_the_likeliest_are_drafted(name: str):
    drafter = build(name, target(), near())
    view = admitted(drafter, prompts(), [SamplingParams()] * 4)
    whole = drafter.propose(view, Plan((9,) * 4))
    assert whole.scores is not None
    for nodes in (1, 2, 4):
        few = drafter.propose(view, Plan((9,) * 4, nodes=nodes))
        assert few.scores is not None
        for row in range(4):
            valid, every = few.tree.valid[row], whole.tree.valid[row]
            best = whole.scores[row][every].sort(descending=True).values[: 1 + nodes]
            if few.tree.depth == whole.tree.depth:
                assert torch.allclose(few.scores[row][valid].sort(descending=True).values, best, atol=1e-5)
            assert int(valid.sum()) == min(1 + nodes, int(every.sum()))


@EVERY
def test_no_more_is_drafted_than_was_said_and_asked_for(name: str):
    """Trees fit ``needs.max_nodes`` and each row's plan, node 0 is the root, and parents stand first."""
    drafter = build(name, target(), near())
    for params in (SamplingParams(), SamplingParams(**SAMPLED)):
        for lengths in ((4, 4, 4, 4), (1, 0, 2, 3), (0, 0, 0, 1)):
            view = admitted(drafter, prompts(), [params] * 4)
            draft = drafter.propose(view, Plan(lengths))
            tree = draft.tree
            assert torch.equal(tree.tokens[:, 0], view.roots)
            assert (tree.valid.sum(1) - 1 <= drafter.needs.max_nodes).all()
            assert (draft.q is None) == (draft.law is Law.FIXED)
            for row, most in enumerate(lengths):
                depth = {0: 0}
                for node in range(1, tree.tokens.shape[1]):
                    if tree.valid[row, node]:
                        depth[node] = depth[int(tree.parents[row, node])] + 1
                assert max(depth.values()) <= min(most, tree.depth)
            for row in view.rows:
                drafter.release(row)


def admitted(
    drafter: Drafter,
    texts: list[list[int]],
    params: list[SamplingParams],
    seeds: list[int] | None = None,
    *,
    draws: bool = False,
) -> View:
    """Rows as the engine would show them to the drafter in the first step. Small ids are of the narrow models."""
    taps = drafter.needs.hidden_layers
    reader = narrow(1) if max(map(max, texts)) < NARROW else target()
    states = {tuple(text): reader.read(torch.tensor([text]), taps) if taps else {} for text in set(map(tuple, texts))}
    for row, text in enumerate(texts):
        hidden = {tap: h[:, :-1] for tap, h in states[tuple(text)].items()}
        drafter.admit(row, torch.tensor(text[:-1], dtype=torch.long), drafter.fuse(hidden))
    view = tiny.view(texts, params, NARROW if max(map(max, texts)) < NARROW else tiny.VOCAB, seeds, draws=draws)
    full, longest = shared_cache(drafter), max(view.host_lengths)
    if full is not None and longest > 1:
        prefill(reader, full, view.rows, view.history[:, : longest - 1], [0] * len(texts))
    return view


NARROW = 6
ROWS = 2000


@functools.cache
def narrow(seed: int) -> CausalLM:
    return CausalLM(tiny.build("llama", seed=seed, spread=1.0, vocab_size=NARROW, num_hidden_layers=2))


def alike(tree: TokenTree) -> list[tuple[int, list[int]]]:
    """Nodes, each with rows in which the same was drawn before it: on its path, and by its elder siblings."""
    found: list[tuple[int, list[int]]] = []
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    for node in range(1, tree.tokens.shape[1]):
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, (above, said) in enumerate(zip(parents, tokens, strict=True)):
            if above[node] >= 0:
                elders = [said[i] for i in range(1, node) if above[i] == above[node]]
                path, up = [], above[node]
                while up > 0:
                    path.append(said[up])
                    up = above[up]
                groups.setdefault((len(path), *path, *elders), []).append(row)
        found += [(node, rows) for rows in groups.values()]
    return found


def chi_square(draft: Draft, groups: list[tuple[int, list[int]]]) -> float:
    """The p-value of all drawn tokens against the q that was claimed for them, by groups of ``alike``."""
    assert draft.q is not None
    statistic, freedom = 0.0, 0
    for node, rows in groups:
        q = draft.q[rows, node].double()
        assert (q - q[0]).abs().max() < 1e-5, "one and the same past, hence one and the same law"
        assert abs(float(q[0].sum()) - 1) < 1e-5
        counts = draft.tree.tokens[rows, node].bincount(minlength=NARROW).double()
        if counts[q[0] == 0].sum() > 0:
            return 0.0
        wanted = q[0] * len(rows)
        enough = wanted >= 5
        if int(enough.sum()) < 2:
            continue
        seen = torch.cat([counts[enough], counts[~enough].sum()[None]])
        wanted = torch.cat([wanted[enough], wanted[~enough].sum()[None]])
        seen, wanted = seen[wanted > 0.5], wanted[wanted > 0.5]
        statistic += float(((seen - wanted) ** 2 / wanted).sum())
        freedom += len(wanted) - 1
    assert freedom > 10
    return float(stats.chi2.sf(statistic, freedom))


@EVERY
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_k=4, repetition_penalty=1.3)],
    ids=["pure", "warped"],
)
def test_a_claimed_q_is_what_tokens_are_drawn_from(name: str, params: SamplingParams):
    drafter = build(name, narrow(1), narrow(2), draws=True)
    rows = 50 if METHODS[spec(name).name].laws == (Law.FIXED,) else ROWS
    view = admitted(drafter, [[0, 1, 0]] * rows, [params] * rows, derive_seeds(5, rows), draws=True)
    draft = drafter.propose(view, Plan((3,) * rows))
    if not METHODS[spec(name).name].around:
        declared = spec(name).options.law
        assert draft.law is (drafter.needs.law or declared), "verifiers are checked against this when a loop is made"
    if draft.law is Law.FIXED:
        assert draft.q is None
        return
    assert draft.law in METHODS[spec(name).name].laws
    groups = alike(draft.tree)
    assert chi_square(draft, groups) > 1e-3
    assert draft.q is not None
    flatter = Draft(draft.tree, draft.law, draft.q * 0.5 + 0.5 / NARROW)
    assert chi_square(flatter, groups) < 1e-9, "this test cannot fail"


@EVERY
def test_what_is_drawn_depends_on_the_rows_seed_and_place_alone(name: str):
    drafter = build(name, narrow(1), narrow(2))
    params = [SamplingParams(temperature=1.0)] * 4
    view = admitted(drafter, [[0, 1, 0]] * 4, params, [7, 8, 7, 9])
    draft = drafter.propose(view, Plan((3,) * 4))
    assert torch.equal(draft.tree.tokens[0], draft.tree.tokens[2])
    again = drafter.propose(view, Plan((3,) * 4))
    assert torch.equal(draft.tree.tokens, again.tree.tokens) and torch.equal(draft.tree.parents, again.tree.parents)


WHOLE = [
    ("sequoia:target,nodes=9,depth=4,acceptance=0.5/0.2/0.12/0.08", 4, (0.0,)),
    # one path: of several, the likeliest whole need not be the one whose every token is the likeliest
    ("opt_tree:target,nodes=4,depth=4,top_k=1", 4, (0.0,)),
    ("cape:target,num_assistant_tokens=3", 3, (0.0,)),
    ("cascade:target+[draft_model:far,num_assistant_tokens=3],num_assistant_tokens=5", 5, (0.0, 1.0)),
    ("triforce:[draft_model:far,num_assistant_tokens=2],gamma=4,budget=128", 4, (0.0, 1.0)),
    *[(f"partial,cache={kind},budget=128,num_assistant_tokens=4", 4, (0.0, 1.0)) for kind in CACHES],
]
"""Drafters whose tokens are the target's own, how deep they draft, and at which temperatures this is so."""


@pytest.mark.parametrize(
    ("text", "depth", "temperature"), [(text, depth, heat) for text, depth, heats in WHOLE for heat in heats]
)
def test_a_draft_that_is_the_target_is_accepted_to_the_end(text: str, depth: int, temperature: float):
    """Each step says the whole path and the bonus; one root, position or slot off would show."""
    steps, cache = 10, target().new_cache()
    drafter = specs.build(text, target(), {"far": far()}, cache=cache)
    chains = Constant(depth, confidence=1e-9)  # without siblings, where there would be some
    results = tiny.generator(target(), drafter, chains, cache=cache).generate(
        tiny.prompts((1, 7, 20)), max_new_tokens=steps * (depth + 1), temperature=temperature, seed=0
    )
    assert [result.stats.target_forwards for result in results] == [steps] * 3


class Refusals(Policy):
    """Drafts whole trees, and counts the accepted nodes whose children were all refused."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.accepted = self.refused = 0

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan(tuple(min(self._depth, limit) for limit in limits))

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        for result in step.rows:
            self.accepted += result.accepted
            self.refused += max((0, *result.path)) in result.nodes.parents[1:]


@pytest.mark.parametrize(
    "text",
    [
        "sequoia:target,nodes=9,depth=4,acceptance=0.5/0.2/0.12/0.08",
        "opt_tree:target,nodes=9,depth=4,top_k=3",
        "draft_model:target,branching=3x2x1",
        "draft_model:target,num_assistant_tokens=4",
        "specinfer:target,expansion=1x2x1",
        "cape:target,num_assistant_tokens=3",
    ],
)
def test_a_tree_of_the_target_itself_is_never_refused(text: str):
    """Its guesses are ranked with the noise of their own position, on each level: paths end where the tree does."""
    policy, rows = Refusals(4), tiny.prompts((1, 7, 20))
    drafter = specs.build(text, target(), {"far": far()})
    tiny.generator(target(), drafter, policy).generate(rows, max_new_tokens=40, temperature=1.0, seed=0)
    assert policy.accepted > 0
    assert policy.refused == 0


# What is particular to a method.


def test_prompt_lookup_takes_the_longest_match_first_and_of_these_the_latest():
    drafter = build("prompt_lookup", target(), near())
    texts = [
        [1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3],  # three tokens match at the beginning, two later
        [2, 3, 5, 6, 2, 3, 7, 8, 2, 3],  # two places, equally long
        [1, 2, 3, 4],  # nothing
        [5],
    ]
    view = admitted(drafter, texts, [SamplingParams()] * 4)
    tree = drafter.propose(view, Plan((3, 4, 4, 4))).tree
    said = [tree.tokens[row, 1:][tree.valid[row, 1:]].tolist() for row in range(4)]
    assert said == [[9, 8, 2], [7, 8, 2, 3], [], []]


def test_prompt_lookup_merges_what_several_places_have_in_common():
    drafter = build("prompt_lookup tree", target(), near())
    text = [2, 3, 5, 6, 1, 2, 3, 5, 7, 1, 4, 2, 3, 8, 8, 8, 2, 3]
    view = admitted(drafter, [text], [SamplingParams()])
    tree = drafter.propose(view, Plan((3,))).tree
    paths = list(tiny.paths(tree, 0).values())
    assert set(paths) == {(), (8,), (8, 8), (8, 8, 8), (5,), (5, 7), (5, 7, 1), (5, 6), (5, 6, 1)}
    assert len(paths) == 9


def test_prompt_lookup_copies_nothing_beyond_the_end_of_a_row():
    """A row that is shorter than its neighbours looks at its own text only."""
    drafter = build("prompt_lookup", target(), near())
    view = admitted(drafter, [[1, 2, 1, 2], [9] * 12], [SamplingParams()] * 2)
    view.history[0, 4:] = 2  # rubbish
    tree = drafter.propose(view, Plan((4, 4))).tree
    assert tree.tokens[0, 1:][tree.valid[0, 1:]].tolist() == [1, 2, 1, 2]  # on with itself, not with the rubbish


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unsure_token_is_kept_and_ends_its_path(temperature: float):
    drafter = build("draft_model", narrow(1), narrow(2))
    params = [SamplingParams(temperature=temperature)] * 200
    plan = Plan((3,) * 200, confidence=0.3)
    texts = [[0, 1, row % NARROW] for row in range(200)]
    draft = drafter.propose(admitted(drafter, texts, params, derive_seeds(1, 200), draws=True), plan)
    free = build("draft_model", narrow(1), narrow(2))
    whole = free.propose(admitted(free, texts, params, derive_seeds(1, 200), draws=True), Plan((3,) * 200))
    assert whole.tree.valid.all()
    lengths = set()
    for row in range(200):
        sure = True
        for node in range(1, 4):
            valid = node < draft.tree.tokens.shape[1] and bool(draft.tree.valid[row, node])
            assert valid == sure
            if not valid:
                break
            assert draft.tree.tokens[row, node] == whole.tree.tokens[row, node]
            sure = chance(draft, row, node, texts[row]) >= 0.3
        lengths.add(int(draft.tree.valid[row].sum()) - 1)
    assert lengths >= {1, 2}


def chance(draft: Draft, row: int, node: int, text: list[int]) -> float:
    """The draft model's own probability of a drafted token."""
    token = int(draft.tree.tokens[row, node])
    if draft.q is not None:
        return float(draft.q[row, node, token])
    path = text + draft.tree.tokens[row, 1:node].tolist()
    return float(narrow(2).stock_logits(torch.tensor([path]))[0, -1].softmax(-1)[token])


def test_a_tree_wider_than_the_vocabulary_has_as_many_children_as_there_are_tokens():
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)):
        drafter = specs.build("draft_model:draft,branching=9x2", narrow(1), {"draft": narrow(2)})
        draft = drafter.propose(admitted(drafter, [[0, 1, 0]] * 3, [params] * 3, [1, 2, 3]), Plan((2, 2, 1)))
        for row in range(3):
            children = draft.tree.tokens[row][draft.tree.parents[row] == 0].tolist()
            assert len(set(children)) == len(children) == min(NARROW, params.top_k or NARROW)
