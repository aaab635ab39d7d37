"""What a probe writes down of steps, and that what it reads off them is what smaller options would have done."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import foredraft
import tiny
from foredraft.bench.tune.probe import DraftSize, Probe, ProbeStep, StepOutcome
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, ROOT, TokenTree
from foredraft.drafters.hybrid import Hybrid, Options as HybridOptions
from foredraft.drafters.none import NoDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM

TEXTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""',
    "- red\n- green\n- blue\n- red\n- green\n-",
    "Once upon a time there was a small town by the sea, where",
)


def made(
    depths: Sequence[int], path: Sequence[int] = (), scores: Sequence[float] = (), *, levels: int | None = None
) -> ProbeStep:
    levels = max(depths, default=0) if levels is None else levels
    return ProbeStep(tuple(depths), tuple(scores), tuple(path), levels, 0.0, 0.0, short=False, first=False)


CHAIN = made((1, 2, 3, 4), path=(0, 1, 2))
#        0
#    1     2      and by score, best first: 0, 1, 3, 2, 4, with 5 as good as 2
#   3 5    4
TREE = made((1, 1, 1, 2, 2, 2), (1, 3), (-0.1, -0.5, -2.0, -0.7, -3.0, -2.0))


@pytest.mark.parametrize(("depth", "tokens"), [(1, 2), (2, 3), (3, 4), (4, 4), (9, 4), (0, 4)])
def test_a_shorter_chain_is_the_beginning_of_a_chain(depth: int, tokens: int):
    deep = min(depth or 4, 4)
    assert CHAIN.under(DraftSize(depth=depth)) == StepOutcome(tokens, deep, deep)


@pytest.mark.parametrize(
    ("nodes", "tokens"),
    [(1, 1), (2, 2), (3, 3), (4, 3), (6, 3), (50, 3)],
)
def test_a_smaller_tree_has_the_likeliest_nodes(nodes: int, tokens: int):
    assert TREE.under(DraftSize(nodes=nodes)) == StepOutcome(tokens, min(nodes, 6), 2)


def test_of_equal_scores_the_earlier_node_is_taken():
    tied = made((1, 1, 1), (1,), (-1.0, -1.0, -1.0))
    assert [tied.under(DraftSize(nodes)).tokens for nodes in (1, 2, 3)] == [1, 2, 2]
    late = made((1, 1, 2, 2), (0, 3), (-0.1, -0.2, -2.0, -2.0))
    assert [late.under(DraftSize(nodes)).tokens for nodes in (3, 4)] == [2, 3]


def test_a_tree_has_both_limits():
    assert TREE.under(DraftSize(nodes=2, depth=1)) == StepOutcome(2, 2, 1)
    assert TREE.under(DraftSize(nodes=1, depth=1)) == StepOutcome(1, 1, 1)
    assert TREE.under(DraftSize(nodes=3, depth=2)) == StepOutcome(3, 3, 2)


def test_room_that_deeper_nodes_had_is_filled():
    """Of the six nodes three are too deep: the smaller tree would have had others, which were not good enough here."""
    assert TREE.under(DraftSize(nodes=5, depth=1)) == StepOutcome(2, 5, 1)
    assert TREE.under(DraftSize(nodes=9, depth=1)).nodes == 6, "but not more than could be drafted at all"


def test_nodes_that_are_not_scored_are_taken_in_their_order():
    plain = made((1, 1, 2, 2), (1, 3))
    assert [plain.under(DraftSize(nodes)) for nodes in (1, 2, 3, 4)] == [(1, 1, 2), (2, 2, 2), (2, 3, 2), (3, 4, 2)]


def test_where_nothing_was_drafted_there_is_the_bonus():
    for shape in (DraftSize(), DraftSize(5, 3), DraftSize(depth=2)):
        assert made(()).under(shape) == StepOutcome(1, 0, 0)


def test_levels_that_were_drafted_in_vain_are_counted():
    """They took their time, though no node of them was good enough."""
    step = made((1, 1, 2), (), (-1.0, -1.1, -1.2), levels=5)
    assert step.under(DraftSize()).levels == step.under(DraftSize(3, 8)).levels == 5
    assert step.under(DraftSize(3, 4)).levels == 4


def test_no_size_limits_a_copy():
    copied = replace(made((1, 2, 3, 4), (0, 1)), copied=True)
    assert {copied.under(shape) for shape in (DraftSize(), DraftSize(1, 1), DraftSize(depth=2))} == {(3, 4, 4)}


def watched(target: CausalLM, drafter: Drafter, *, confidence: float = 0.0, rows: int = 1) -> tuple[Generator, Probe]:
    probe = Probe(drafter.needs.longest, confidence)
    return tiny.generator(target, drafter, probe, max_rows=rows), probe


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny.build("llama"))


@pytest.fixture(scope="module")
def truths(target: CausalLM) -> list[list[int]]:
    """Prompts with what the tiny model says after them."""
    prompts = tiny.prompts()
    results = tiny.generator(target).batch(prompts, SamplingParams(max_new_tokens=40))
    return [prompt + result.tokens for prompt, result in zip(prompts, results, strict=True)]


def test_copies_of_hybrid_are_recorded_beside_the_drafts_of_its_inner_drafter(target: CausalLM):
    """At first the inner drafter knows what the target says; at the end the target repeats itself."""
    prompt = [41] * 6
    truth = tiny.generator(target).batch([prompt], SamplingParams(max_new_tokens=90))[0].tokens
    generator, probe = watched(target, Hybrid(HybridOptions(), tiny.liar([[*prompt, *truth]])))
    result = generator.batch([prompt], SamplingParams(max_new_tokens=90))[0]
    copied, drafted = ([step for step in probe.steps if step.copied == kind] for kind in (True, False))
    assert any(step.path for step in copied) and any(step.path for step in drafted)
    assert sum(len(step.path) for step in probe.steps) == result.stats.accepted
    assert sum(len(step.depths) for step in probe.steps) == result.stats.drafted


@pytest.mark.parametrize("length", [2, 3, 17, 24])
def test_the_steps_of_a_text_are_all_there(target: CausalLM, truths: list[list[int]], length: int):
    """All but a last one that had room for the bonus alone."""
    generator, probe = watched(target, tiny.liar(truths))
    for prompt, truth in zip(tiny.prompts(), truths, strict=True):
        probe.steps.clear()
        result = generator.batch([prompt], SamplingParams(max_new_tokens=length))[0]
        assert result.tokens == truth[len(prompt) :][:length]
        missing = result.stats.target_forwards - len(probe.steps)
        assert missing in (0, 1) and sum(1 + len(step.path) for step in probe.steps) == length - missing
        assert sum(len(step.path) for step in probe.steps) == result.stats.accepted
        assert sum(len(step.depths) for step in probe.steps) == result.stats.drafted
        assert [step.first for step in probe.steps] == [True, *[False] * (len(probe.steps) - 1)]
        assert not any(step.short for step in probe.steps)
        for step in probe.steps:
            assert [step.depths[place] for place in step.path] == list(range(1, len(step.path) + 1))
            assert step.under(DraftSize()).tokens == 1 + len(step.path)


def test_some_of_these_steps_say_something(target: CausalLM, truths: list[list[int]]):
    generator, probe = watched(target, tiny.liar(truths))
    generator.batch(tiny.prompts()[:1], SamplingParams(max_new_tokens=40))
    assert any(step.path and step.path[0] > 0 for step in probe.steps), "a path begins behind another branch"
    assert any(not step.path for step in probe.steps) and max(len(step.path) for step in probe.steps) > 2


def test_texts_side_by_side_are_parted(target: CausalLM, truths: list[list[int]]):
    generator, probe = watched(target, tiny.liar(truths), rows=4)
    results = generator.batch(tiny.prompts(), SamplingParams(max_new_tokens=16))
    assert sum(step.first for step in probe.steps) == 4
    assert sum(len(step.depths) for step in probe.steps) == sum(result.stats.drafted for result in results)
    assert sum(len(step.path) for step in probe.steps) == sum(result.stats.accepted for result in results)


def test_short_drafts_are_short_and_marked(target: CausalLM, truths: list[list[int]]):
    generator, probe = watched(target, tiny.liar(truths))
    for probe.short in (1, 2):
        probe.steps.clear()
        generator.batch(tiny.prompts()[:1], SamplingParams(max_new_tokens=20))
        assert all(step.short for step in probe.steps)
        assert max(max(step.depths, default=0) for step in probe.steps) == probe.short


def test_around_plain_decoding_every_step_is_there_and_has_a_time(target: CausalLM):
    generator, probe = watched(target, NoDrafter())
    generator.batch(tiny.prompts()[:1], SamplingParams(max_new_tokens=9))
    assert [(step.depths, step.path, step.levels) for step in probe.steps] == 9 * [((), (), 0)]
    assert all(step.verify_seconds > 0 for step in probe.steps)


def test_scores_are_those_of_the_nodes_that_are_there(target: CausalLM, truths: list[list[int]]):
    prompt = tiny.prompts()[1]
    says = truths[1][len(prompt) :]

    def propose(view: View, plan: Plan) -> Draft:
        place = view.host_lengths[0] - len(prompt)
        wrong = (says[place] + 1) % tiny.VOCAB
        tokens = torch.tensor([[int(view.roots[0]), wrong, 5, says[place], 7, says[place + 1]]])
        parents = torch.tensor([[ROOT, 0, PAD, 0, 1, 3]])
        scores = torch.tensor([[0.0, -1.0, -9.0, -2.0, -4.0, -3.0]])
        return Draft(TokenTree(tokens, parents, depth=2), Law.FIXED, scores=scores)

    generator, probe = watched(target, tiny.ScriptedDrafter(propose, max_nodes=5))
    generator.batch([prompt], SamplingParams(max_new_tokens=9))
    step = probe.steps[0]
    assert (step.depths, step.scores, step.path) == ((1, 1, 2, 2), (-1.0, -2.0, -4.0, -3.0), (1, 3))
    assert [step.under(DraftSize(nodes)).tokens for nodes in (1, 2, 3, 4)] == [1, 2, 3, 3]


def one_step(generator: Generator, prompt: list[int], params: SamplingParams) -> None:
    sequences = generator.submit([prompt], params)
    generator.engine.step()
    generator.engine.cancel(sequences)


@pytest.fixture(scope="module")
def plain() -> Generator:
    return foredraft.load("sample", "none", device="cpu")


TREES = [(15, 2), (31, 4), (11, 8), (47, 8)]
WHOLE = "nodes=47,depth=8"
CASES = {
    "trees": ("eagle3:sample-eagle3", WHOLE, [(f"nodes={n},depth={d}", DraftSize(n, d)) for n, d in TREES], 0.0),
    "chains of a head": (
        "eagle3:sample-eagle3",
        "nodes=6,depth=6,top_k=1",
        [(f"nodes={k},depth={k},top_k=1", DraftSize(k, k)) for k in (1, 3, 5)],
        0.0,
    ),
    "a draft model": (
        "draft_model:sample-draft",
        "num_assistant_tokens=10",
        [(f"num_assistant_tokens={k}", DraftSize(k, k)) for k in (1, 4, 8)],
        0.4,
    ),
    "a lookup": (
        "prompt_lookup",
        "prompt_lookup_num_tokens=10",
        [(f"prompt_lookup_num_tokens={k}", DraftSize(depth=k)) for k in (1, 3, 10)],
        0.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_probe_replayed_is_what_the_smaller_options_do(plain: Generator, case: str):
    """After the same prompt the first step of a loop that really has these options, by that loop's own account."""
    base, whole, smaller, confidence = CASES[case]
    both = [SamplingParams(max_new_tokens=12, temperature=temperature, seed=5) for temperature in (0.0, 0.9)]
    asked = [(plain.encode(text), params) for params in both for text in TEXTS]
    shared = plain.engine.target

    def opened(options: str) -> Generator:
        return foredraft.load(shared, f"{base},{options}", tokenizer=plain.tokenizer)

    large = opened(whole)
    generator, probe = watched(shared, large.engine.drafter, confidence=confidence)
    for prompt, params in asked:
        one_step(generator, prompt, params)
    large.close()
    differ = set()
    for options, shape in smaller:
        small = opened(options)
        for (prompt, params), step in zip(asked, probe.steps, strict=True):
            policy = tiny.ScriptedPolicy(Constant(small.engine.drafter.needs.longest, confidence).plan)
            loop = Generator(Engine(shared, small.engine.drafter, policy, max_rows=1), None, (), small.kind)
            one_step(loop, prompt, params)
            first = policy.observed[0][1]
            seen, wanted = (1 + first.rows[0].accepted, first.rows[0].drafted), step.under(shape)
            assert seen == (wanted.tokens, wanted.nodes), (options, prompt, params.temperature)
            assert first.levels <= wanted.levels, "a small tree is full after fewer levels"
            differ.add(seen)
        small.close()
    assert len(differ) > 2, "sizes that all do the same would show nothing"
