"""What is particular to Sequoia: measured acceptance, the shape that is made of it, and children of odd families."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import OptionError
from foredraft.core.rng import HashedRng, Noise, RandomStream, derive_seeds, draw_distinct, exponentials
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree_optimizer import OptimalTrees
from foredraft.core.verify import DEFAULT, RULES
from foredraft.drafters import sequoia
from foredraft.drafters.sequoia import Options, Sequoia, as_text, measure_acceptance, read_acceptance
from foredraft.engine.cost_model import CostTable
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from oracle import grow, loss, random_table
from reference import reference

VOCAB = 6
WIDTH = 3
RATES = "0.5/0.2/0.12/0.08"


@functools.cache
def model(seed: int) -> CausalLM:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2}
    return CausalLM(tiny.build("llama", seed=seed, spread=1.0, **sizes), fast=False)


def shown(
    drafter: Sequoia,
    texts: Sequence[Sequence[int]],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    draws: bool = False,
) -> View:
    """Rows in their first step."""
    tiny.admit(drafter, texts)
    return tiny.view(texts, params, VOCAB, seeds, draws=draws)


def law(seed: int, text: Sequence[int]) -> Tensor:
    """A model's own law after a text."""
    return model(seed).stock_logits(torch.tensor([list(text)]))[0, -1].double().softmax(-1)


def rates_of_one_level(p: Tensor, q: Tensor, width: int, draws: int = 200_000) -> list[float]:
    """How often the j-th of the draft's ranking is the target's token, both with the noise of one race."""
    times = torch.empty(draws, len(p), dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    order, token = (times / q).argsort(-1), (times / p).argmin(-1, keepdim=True)
    return (order[:, :width] == token).double().mean(0).tolist()


def test_greedy_acceptance_is_what_is_counted():
    prompts, tokens = tiny.prompts((1, 4, 9), vocab=VOCAB), 12
    counts = [0] * WIDTH
    for prompt in prompts:
        said = reference(model(1), prompt, SamplingParams(max_new_tokens=tokens))
        for place, token in enumerate(said):
            best = law(2, prompt + said[:place]).argsort(descending=True)[:WIDTH].tolist()
            if token in best:
                counts[best.index(token)] += 1
    measured = measure_acceptance(model(1), model(2), prompts=prompts, width=WIDTH, tokens=tokens)
    assert measured == pytest.approx([count / (3 * tokens) for count in counts])
    assert 0 < sum(counts) < 3 * tokens


def test_sampled_acceptance_is_the_chance_over_all_draws():
    prompt, rows = [0, 1, 0], 3000
    measured = measure_acceptance(model(1), model(2), 1.0, [prompt] * rows, width=WIDTH, tokens=1)
    exact = rates_of_one_level(law(1, prompt), law(2, prompt), WIDTH)
    assert measured == pytest.approx(exact, abs=0.02)
    assert all(rate > 0.03 for rate in exact), "else a wrong order would not be seen"


def test_trees_of_one_level_are_accepted_as_was_measured():
    """A direct count: the drafter's own trees, the default rule, real noise."""
    prompt, rows = [0, 1, 0], 6000
    drafter = Sequoia(Options(nodes=WIDTH, depth=1, acceptance=RATES), model(2), model(1), VOCAB)
    view = shown(drafter, [prompt] * rows, SamplingParams(temperature=1.0), derive_seeds(3, rows))
    draft = drafter.propose(view, Plan((1,) * rows))
    after = [law(1, prompt), *(law(1, [*prompt, token]) for token in range(VOCAB))]
    p = torch.stack(
        [after[0].expand(rows, -1), *(torch.stack(after[1:])[draft.tree.tokens[:, i]] for i in (1, 2, 3))], 1
    )
    verdict = RULES[DEFAULT].function(p.float(), draft, HashedRng(view.noise))
    counts = [float((verdict.path[:, 1] == child).double().mean()) for child in range(1, 1 + WIDTH)]
    measured = measure_acceptance(model(1), model(2), 1.0, [prompt] * rows, width=WIDTH, tokens=1)
    assert counts == pytest.approx(measured, abs=0.02)


def test_measuring_is_the_same_every_time_and_has_texts_of_its_own():
    for temperature in (0.0, 1.0):
        first = measure_acceptance(model(1), model(2), temperature, width=4, tokens=6)
        assert first == measure_acceptance(model(1), model(2), temperature, width=4, tokens=6)
        assert len(first) == 4 and 0.1 < sum(first) <= 1.0
    assert measure_acceptance(model(1), model(1), 0.0, width=4, tokens=6) == (1.0, 0.0, 0.0, 0.0)
    assert measure_acceptance(model(1), model(1), 1.0, width=9, tokens=6) == pytest.approx((1, *[0] * 5), abs=1e-5)


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []], [[1] * 10_000]])
def test_prompts_without_room_or_tokens_are_refused(prompts: list[list[int]]):
    with pytest.raises(OptionError, match="one token or more"):
        measure_acceptance(model(1), model(2), prompts=prompts)


def slow_draft(view: View, row: int, parents: Sequence[int], temperature: float) -> tuple[list[int], list[Tensor]]:
    """The tokens and laws of a tree of this shape, each node from the draft's own logits on its path."""
    text = view.history[row, : view.host_lengths[row]].tolist()
    tokens, laws = [text[-1]], [torch.zeros(VOCAB)]
    for node, parent in enumerate(parents, start=1):
        path, up = [], parent
        while up:
            path.insert(0, tokens[up])
            up = parents[up - 1]
        family = [other for other in range(1, 1 + len(parents)) if parents[other - 1] == parent]
        elders = [tokens[other] for other in family if other < node]
        logits = model(2).stock_logits(torch.tensor([text + path]))[0, -1]
        q = (logits / temperature).softmax(-1)
        index = sorted(set(parents)).index(parent)
        bits = view.noise.bits(RandomStream.DRAFT, torch.full((len(view.rows),), index))[row]
        drawn, _ = draw_distinct(q, exponentials(bits, VOCAB), len(family))
        tokens.append(int(drawn[len(elders)]))
        q[elders] = 0.0
        laws.append(q / q.sum())
    return tokens, laws


def test_every_child_is_drawn_from_the_law_that_is_said():
    """Families of every size on a level, against a loop over single nodes."""
    texts = [[0, 1, 0], [3], [5, 2, 4, 1, 1, 0, 2]]
    drafter = Sequoia(Options(nodes=14, depth=4, acceptance=RATES), model(2), model(1), VOCAB)
    view = shown(drafter, texts, SamplingParams(temperature=0.8), derive_seeds(4, 3), draws=True)
    draft = drafter.propose(view, Plan((4,) * 3))
    template = drafter.planner.shape(greedy=False).template
    first_level = [node for node, parent in enumerate(template.parents, start=1) if parent == 0]
    families = {template.parents.count(node) for node in first_level} - {0}
    assert template.nodes == 14 and template.depth == 4 and len(families) > 1
    assert draft.law is Law.WITHOUT_REPLACEMENT and draft.q is not None and draft.tree.valid.all()
    for row in range(3):
        assert draft.tree.parents[row].tolist() == [-1, *template.parents]
        tokens, laws = slow_draft(view, row, template.parents, 0.8)
        assert draft.tree.tokens[row].tolist() == tokens
        assert torch.allclose(draft.q[row, 1:], torch.stack(laws[1:]), atol=1e-5)


def test_each_step_has_random_numbers_of_its_own():
    drafter = Sequoia(Options(nodes=4, depth=2, acceptance=RATES), model(2), model(1), VOCAB)
    rows = 50
    text, seeds = [0, 1, 0], derive_seeds(5, rows)
    view = shown(drafter, [text] * rows, SamplingParams(temperature=1.0), seeds, draws=True)
    first = drafter.propose(view, Plan((2,) * rows)).tree.tokens
    later = replace(view, noise=Noise(view.noise.seeds, view.lengths + 1))
    assert not torch.equal(first, drafter.propose(later, Plan((2,) * rows)).tree.tokens)
    assert torch.equal(first, drafter.propose(view, Plan((2,) * rows)).tree.tokens)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("nodes", [3, 5])
def test_the_shapes_are_exact_under_traversal(nodes: int, zeros: float):
    """Every draft and every coin, summed, for the shape that the programme makes."""
    template = sequoia.Template(OptimalTrees.of((0.5, 0.3, 0.1), nodes, 2).paths(nodes, 2))
    p, q = random_table(3, 3, 11, zeros), random_table(3, 3, 12, zeros)
    draws = grow([-1, *template.parents], Law.WITHOUT_REPLACEMENT, p, q)
    assert loss(RULES["traversal"].function, draws, p) < 1e-12


def costs(draft: float, target: float):
    """What ``measure_costs`` would find; the draft is the model that is asked for first."""
    tables = iter((CostTable((1, 64), (draft, draft)), CostTable((1, 64), (1.0, target))))
    return lambda model, longest: next(tables)


def test_sizes_follow_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    shapes = {}
    for name, (draft, target) in {"cheap": (0.001, 1.0), "wide": (0.9, 1.0), "dear": (0.9, 60.0)}.items():
        monkeypatch.setattr(sequoia, "measure_costs", costs(draft, target))
        shapes[name] = Sequoia(Options(acceptance=RATES), model(2), model(1), VOCAB).planner.shape(greedy=True).template
    assert shapes["cheap"].nodes == sequoia.NODES and shapes["cheap"].depth > 4
    assert shapes["wide"].depth == 1 and shapes["wide"].nodes >= 3
    assert shapes["dear"].nodes == 1


@pytest.mark.parametrize("size", [{}, {"nodes": 5, "depth": 3}], ids=["measured", "given"])
def test_a_draft_that_is_never_right_is_asked_for_one_token(size: dict):
    """No tree is worth a node then, but a draft has one."""
    target = CausalLM(tiny.build("llama"))
    drafter = Sequoia(
        Options(acceptance="0/0", **size), CausalLM(tiny.build("llama", seed=4)), target, target.vocab_size
    )
    assert drafter.planner.shape(greedy=True).template.paths == ((0,),)
    g = tiny.generator(target, drafter, Constant(1))
    for temperature in (0.0, 1.0):
        assert g.generate(tiny.prompts((4,)), max_new_tokens=6, temperature=temperature, seed=2)[0].stats.drafted > 0


def test_a_shape_is_made_once_and_each_kind_of_row_has_its_own(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def measured(target: CausalLM, draft: CausalLM, temperature: float) -> tuple[float, ...]:
        asked.append(temperature)
        return (0.6, 0.1) if temperature else (0.5, 0.3)

    monkeypatch.setattr(sequoia, "measure_acceptance", measured)
    drafter = Sequoia(Options(nodes=5, depth=3), model(2), model(1), VOCAB)
    for greedy in (True, False, True, False):
        drafter.planner.shape(greedy)
    assert asked == [0.0, 1.0]
    assert drafter.planner.shape(True).template.paths != drafter.planner.shape(False).template.paths
    given = Sequoia(
        Options(nodes=5, depth=3, acceptance="0.5/0.3", sampled_acceptance="0.6/0.1"), model(2), model(1), VOCAB
    )
    for greedy in (True, False):
        assert given.planner.shape(greedy).template == drafter.planner.shape(greedy).template
    assert asked == [0.0, 1.0]


def test_acceptance_as_text():
    rates = (0.625, 0.14, 0.0)
    assert as_text(rates) == "0.625/0.14/0" and read_acceptance(as_text(rates)) == rates


def test_a_draft_is_never_larger_than_the_plan():
    drafter = Sequoia(Options(nodes=9, depth=4, acceptance=RATES), model(2), model(1), VOCAB)
    view = shown(drafter, [[0, 1], [2]], SamplingParams(temperature=1.0), [1, 2])
    draft: Draft = drafter.propose(view, Plan((2, 0)))
    assert draft.tree.depth == 2 and int(draft.tree.valid[1].sum()) == 1 and int(draft.tree.valid[0].sum()) > 3
