"""The warp where transformers says nothing: fast paths, devices, flags, narrow vocabularies, bad numbers."""

import math
import random
from dataclasses import replace

import pytest
import torch
from warp_cases import EOS, HISTORY, SAMPLING, V, doubled, random_case

import tiny
from foredraft.core.errors import OptionError
from foredraft.core.sampling import truncation
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, top_k=5)], ids=["greedy", "sampled"]
)
def test_half_precision_is_warped_as_float32(params):
    case = random_case(0)
    for dtype in (torch.bfloat16, torch.float16):
        half = case.logits.to(dtype)
        target = case.warp([params] * 2)(half, case.paths)
        wide = case.warp([params] * 2)(half.float(), case.paths)
        assert torch.equal(target.best, wide.best)
        assert target.p is wide.p is None or (target.p.dtype == torch.float32 and torch.equal(target.p, wide.p))
        assert case.warp([params] * 2).law(half, case.paths).dtype == torch.float32
    double = case.logits.double() / 3
    law = case.warp([replace(params, temperature=0.7)] * 2).law(double, case.paths)
    assert law.dtype == torch.float64 and (law.sum(-1) - 1).abs().max() < 1e-14


def test_greedy_without_rules_is_one_argmax_and_takes_the_first_of_equals():
    case = random_case(3)
    logits = case.logits.clone()
    logits[..., [5, 9, 20]] = 50.0
    warp = case.warp([SamplingParams(temperature=0.0, top_p=0.5, min_p=0.1)] * 2)  # nothing to truncate
    calls = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Spy():
        target = warp(logits, case.paths)
    assert target.p is None and (target.best == 5).all()
    wide = [name for name in calls if name in ("argmax", "softmax", "to", "float", "amax", "clone")]
    assert wide == ["argmax"]  # one look at V numbers; whether the best is a number is a look at one more
    assert torch.equal(warp.law(logits, case.paths).argmax(-1), target.best)
    assert warp.greedy and not warp.needs_paths


@pytest.mark.parametrize(
    "options",
    [{}, *(group[-1] for group in HISTORY.values()), {"logits_processor": (doubled,)}],
    ids=lambda options: str(list(options)),
)
def test_needs_paths_says_whether_the_path_matters(options):
    case = random_case(4)
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, **options)]
    here = not options or "logit_bias" in options or options == {"bad_words_ids": ((1,),)}
    assert case.warp(params).needs_paths is not here
    assert not case.warp(params).greedy
    assert case.warp([SamplingParams(min_new_tokens=3)] * 2, eos=()).needs_paths is False


def test_the_root_counts_once():
    """Both penalties take 1 + count from each generated token; the root stands in history and in the tree."""
    tree = TokenTree(torch.tensor([[7, 7, 5, 6]]), torch.tensor([[-1, 0, 0, 2]]), depth=2)
    paths = Paths(torch.tensor([[5, 7, 9, 9]]), torch.tensor([2]), tree, start=1)
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    warp = tiny.warp([params], 10)
    scores = warp.scores(torch.zeros(1, 3, 10), paths)[0]
    zeros = [0.0] * 5
    assert scores.tolist() == [
        [*zeros, 0.0, 0.0, -3.0, 0.0, 0.0],  # 7 7: the prompt's 5 does not count
        [*zeros, -2.0, 0.0, -2.0, 0.0, 0.0],  # 7 5
        [*zeros, -2.0, -2.0, -2.0, 0.0, 0.0],  # 7 5 6
    ]


def test_what_is_longer_than_the_path_has_not_begun():
    """After 5, neither the word 5 5 2 nor any 3-gram can end."""
    params = SamplingParams(bad_words_ids=((5, 5, 2),), no_repeat_ngram_size=3)
    warp = tiny.warp([params], 10)
    history, tree = torch.tensor([[5, 5, 5, 5]]), TokenTree.root(torch.tensor([5]))
    for length, banned in (1, []), (2, [2]), (3, [2, 5]):
        scores = warp.scores(torch.zeros(1, 1, 10), Paths(history, torch.tensor([length]), tree))
        assert scores.isneginf().nonzero()[:, 2].tolist() == banned


def test_narrower_logits_of_a_draft_are_the_targets_without_the_end():
    everything = {k: v for group in HISTORY.values() for k, v in group[0].items()}
    params = [SamplingParams(temperature=0.9, top_p=0.9, **everything), SamplingParams(**everything)]
    for width in (5, 20):
        case = random_case(5, alphabet=12)
        wide = case.logits.clone()
        wide[..., width:] = -math.inf
        law = case.warp(params).law(case.logits[..., :width], case.paths)
        torch.testing.assert_close(law, case.warp(params).law(wide, case.paths)[..., :width])


def test_nothing_is_read_from_the_device():
    """Tensors on the meta device hold no numbers, so whatever looked at one would raise."""
    sampling = {k: v for group in SAMPLING.values() for k, v in group[0].items()}
    history = {k: v for group in HISTORY.values() for k, v in group[1 % len(group)].items()}
    params = [SamplingParams(**sampling | {"temperature": 0.5}, **history), SamplingParams(**history)]
    for kind in ("tree", "chain"):
        case = random_case(6, kind=kind)
        tree = case.paths.tree
        tree = replace(tree, tokens=tree.tokens.to("meta"), parents=tree.parents.to("meta"))
        paths = Paths(case.paths.history.to("meta"), case.paths.lengths.to("meta"), tree)
        kwargs = {"vocab_size": V, "eos_token_ids": [EOS, ()], "prompt_lengths": [1, 2], "device": "meta"}
        target = Warp.of(params, **kwargs)(case.logits.to("meta"), paths)
        assert target.p.shape == case.logits.shape and target.p.device.type == "meta"
    long = torch.zeros(1, 2, 5000, device="meta")
    assert truncation._tail(long, torch.zeros(1, 1, 1, device="meta")).shape == long.shape


def test_processors_see_each_path_and_other_rows_are_left_alone():
    seen = []

    def spy(input_ids, scores):
        seen.extend((ids, len(input_ids)) for ids in input_ids.tolist())
        return scores * 2

    case = random_case(8)
    params = [SamplingParams(), SamplingParams(logits_processor=(spy,))]
    scores = case.warp(params).scores(case.logits, case.paths)
    paths = [path for node in range(7) if (path := case.path(1, node))]
    assert sorted(ids for ids, _ in seen) == sorted(paths)
    assert all(together == sum(len(path) == len(ids) for path in paths) for ids, together in seen)
    assert torch.equal(scores[0], case.logits[0])
    assert torch.equal(scores[1, :6], case.logits[1, :6] * 2)


def test_extreme_temperatures_do_not_overflow():
    case = random_case(9)
    for temperature in (1e-300, 1e-9):
        law = case.warp([SamplingParams(temperature=temperature)] * 2).law(case.logits, case.paths)
        best = case.logits == case.logits.amax(-1, keepdim=True)
        assert torch.equal(law > 0, best)


@pytest.mark.parametrize(
    "options", [{"logit_bias": {V: 1.0}}, {"logit_bias": {-1: 1.0}}, {"bad_words_ids": ((1, V),)}], ids=str
)
def test_a_token_outside_the_vocabulary_is_an_error(options):
    with pytest.raises(OptionError, match=f"{next(iter(options))}: token .* is outside the vocabulary of {V} tokens"):
        random_case(0).warp([SamplingParams(), SamplingParams(**options)])


def test_long_rows_on_a_cpu_are_cut_as_if_sorted(monkeypatch):
    """Peaked and flat laws, ties across the cut, banned rows, rows without top-p: the head decides most."""
    sorted_rows = []
    by_sort = truncation._tail_by_sort
    monkeypatch.setattr(truncation, "_tail_by_sort", lambda s, m: sorted_rows.append(len(s)) or by_sort(s, m))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 12, 5000, generator=generator) * torch.tensor([1.0, 3.0, 5.0, 8.0]).view(4, 1, 1)
    logits[:, 4:6] = logits[:, 4:6].round()
    logits[:, 6, 30:] = -math.inf
    logits[:, 7, :] = 0.0
    tails = torch.tensor([0.5, 0.1, 0.05, -1.0]).view(4, 1, 1)
    for mass in (tails, tails.flip(0), torch.full_like(tails, 1e-7)):
        sorted_rows.clear()
        assert torch.equal(truncation._tail(logits, mass), by_sort(logits, mass))
        assert mass.amax() < 1e-3 or 0 < sum(sorted_rows) < 12


def test_a_cut_that_rounding_decides_is_left_to_the_sort():
    """The mass that may go is, to the last bit, a running sum of the sorted probabilities."""
    logits = 4 * torch.randn(1, 40, 5000, generator=torch.Generator().manual_seed(1))
    sums = logits.sort(dim=-1).values.softmax(-1).cumsum(-1)
    for row in range(40):
        mass = sums[:, row : row + 1, 4990:4991]
        own = logits[:, row : row + 1]
        assert torch.equal(truncation._tail(own, mass), truncation._tail_by_sort(own, mass))


EXTREMES = {
    "temperature": [0.0, 1e-300, 0.7, 1e30],
    "top_k": [None, 1, V, 2**63 - 1],
    "top_p": [None, 5e-324, 0.5, 1.0],
    "min_p": [None, 0.0, 5e-324, 1.0],
    "typical_p": [None, 5e-324, 0.5, 1.0],
    "epsilon_cutoff": [None, 5e-324, 1 - 1e-16],
    "eta_cutoff": [1e-300, 1 - 1e-16],
    "eta_alpha": [None, 5e-324, 1e30],
    "repetition_penalty": [1.0, 1e-9, 1e9],
    "presence_penalty": [0.0, -1e6, 1e6],
    "frequency_penalty": [0.0, -1e6, 1e6],
    "no_repeat_ngram_size": [0, 1, 100],
    "bad_words_ids": [(), tuple((each,) for each in range(V)), ((V - 1,) * 16, (0, 1)), ((0,),) * 4096],
    "logit_bias": [{}, dict.fromkeys(range(V), -math.inf), {0: 1e30, V - 1: -1e30}],
    "min_new_tokens": [0, 1, 256],
    "max_new_tokens": [256, 2**63 - 1],
    "grammar": [None, {"type": "object"}],
}


@pytest.mark.parametrize("seed", range(40))
def test_all_parameters_that_are_accepted_have_rules_that_run(seed):
    """For all rows at once, so an error would be one of all of them; and each row's result is its own."""
    source = random.Random(seed)
    params = [SamplingParams(**{name: source.choice(each) for name, each in EXTREMES.items()}) for _ in range(3)]
    case = random_case(seed, rows=3, kind=source.choice(["tree", "chain"]), alphabet=source.choice([1, 6]))
    eos = source.choice([(), EOS, (-1, 2**63 - 1), tuple(range(1024))])
    scores = case.warp(params, eos).scores(case.logits, case.paths)
    case.warp(params, eos)(case.logits, case.paths)
    for row, own in enumerate(params):
        alone = case.row(row)
        torch.testing.assert_close(
            scores[row], alone.warp([own], eos).scores(alone.logits, alone.paths)[0], equal_nan=True
        )
