"""The warp equals transformers' own processors: each alone, in any mixture, on every path of a tree."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from warp_cases import HISTORY, SAMPLING, V, check, doubled, random_case, shifted

from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp


@pytest.mark.parametrize("options", [o for group in SAMPLING.values() for o in group], ids=str)
def test_each_truncation_equals_transformers(options):
    for seed in range(2):
        check(random_case(seed), [SamplingParams(**{"temperature": 1.0, **options})] * 2)


def test_the_alpha_of_eta_is_each_rows_own():
    """Hewitt et al., equation 9: what is less likely than min(epsilon, alpha exp(-entropy)) goes, never the best."""
    case = random_case(3)
    alphas = [0.02, None, 5.0]
    params = [SamplingParams(temperature=1.0, eta_cutoff=0.09, eta_alpha=alpha) for alpha in alphas]
    logits = case.logits[:1].expand(3, -1, -1).double()
    warp = Warp.of(params, vocab_size=V, eos_token_ids=[()] * 3, prompt_lengths=[1] * 3, device="cpu")
    kept = warp.truncation(logits).isfinite()
    assert len({tuple(row) for row in kept.flatten(1).tolist()}) == 3, "each alpha must matter"
    for row, alpha in enumerate(alphas):
        for node, line in enumerate(logits[row]):
            p = line.softmax(-1)
            least = min(0.09, (0.3 if alpha is None else alpha) * float(torch.exp(-torch.special.entr(p).sum())))
            assert torch.equal(kept[row, node], (p >= least) | (p == p.max()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["tree", "chain"])
@pytest.mark.parametrize("options", [o for group in HISTORY.values() for o in group], ids=str)
def test_each_rule_of_history_equals_transformers_on_every_path(options, kind, temperature):
    for seed in range(2):
        check(random_case(seed, kind=kind), [SamplingParams(temperature=temperature, **options)] * 2)


def choices(groups: dict[str, list[dict]]) -> st.SearchStrategy[dict]:
    """Any options, at most one of each group."""
    picks = st.tuples(*(st.none() | st.sampled_from(group) for group in groups.values()))
    return picks.map(lambda some: {k: v for option in some if option for k, v in option.items()})


OPTIONS = st.builds(
    lambda temperature, sampling, history, processors: {
        "temperature": temperature,
        "logits_processor": processors,
        **history,
        **(sampling if temperature else {}),
    },
    st.sampled_from([0.0, 0.7, 1.0, 1.0]),
    choices(SAMPLING),
    choices(HISTORY),
    st.sampled_from([(), (), (doubled,), (doubled, shifted)]),
)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(
    st.lists(OPTIONS, min_size=1, max_size=3),
    st.integers(0, 999),
    st.sampled_from(["tree", "chain"]),
    st.data(),
)
def test_any_mixture_of_rows_equals_transformers(options, seed, kind, data):
    params = [SamplingParams(**row) for row in options]
    case = random_case(seed, rows=len(params), nodes=5, kind=kind)
    start = data.draw(st.integers(0, 4))
    check(case, params, start, data.draw(st.integers(1, 5 - start)))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(OPTIONS, min_size=2, max_size=4), st.integers(0, 999))
def test_a_row_does_not_feel_its_neighbours(options, seed):
    params = [SamplingParams(**row) for row in options]
    case = random_case(seed, rows=len(params))
    together = case.warp(params).law(case.logits, case.paths)
    for row, own in enumerate(params):
        alone = case.row(row)
        law = alone.warp([own]).law(alone.logits, alone.paths)[0]
        assert torch.equal(together[row].nan_to_num(-1.0), law.nan_to_num(-1.0))
