"""The search for parts that a draft can do without: a trial says what the loop does, and useless parts are found."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from foredraft.core.errors import DataError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.layer_skip.method import LayerSkip, Options
from foredraft.drafters.layer_skip.search import SearchBudget, SkipTrial, Sublayer, search
from foredraft.drafters.layer_skip.trials import SkipEvaluator, TrialLog, TrialSample
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.taps import decoder_layers

LAYERS = 4
USELESS = {Sublayer(1, "attention"), Sublayer(2, "mlp"), Sublayer(3, "attention"), Sublayer(3, "mlp")}
PARTS = [Sublayer(layer, kind) for layer in range(LAYERS) for kind in ("attention", "mlp")]


@functools.cache
def planted() -> CausalLM:
    """A model in which some parts add nothing."""
    raw = tiny.build("llama", num_hidden_layers=LAYERS)
    layers: Any = decoder_layers(raw)
    with torch.no_grad():
        for part in USELESS:
            layer = layers[part.layer]
            (layer.self_attn.o_proj if part.kind == "attention" else layer.mlp.down_proj).weight.zero_()
    return CausalLM(raw)


@functools.cache
def said(temperature: float = 0.0) -> tuple[TrialSample, ...]:
    """Answers of different lengths, in more than one group of rows."""
    prompts = tiny.prompts((3, 9, 5, 14, 2, 7, 4, 6, 8, 11))
    params = [SamplingParams(max_new_tokens=length, temperature=temperature, seed=0) for length in (12, 24) * 5]
    g = tiny.generator(planted())
    results = [g.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    return tuple(TrialSample((*prompt, *r.tokens), len(prompt)) for prompt, r in zip(prompts, results, strict=True))


def judge(temperature: float = 0.0, longest: int = 3) -> SkipEvaluator:
    return SkipEvaluator(planted(), said(temperature), temperature=temperature, longest=longest)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parts_that_add_nothing_are_found(temperature: float):
    own = judge(temperature)
    assert own.parts == PARTS and own.tokens == 5 * 12 + 5 * 24
    found = search(own.parts, own, SearchBudget(trials=60))
    assert found.without >= USELESS
    exact = own(frozenset(USELESS))
    assert exact.tokens == pytest.approx((2.0, 3.0, 4.0), abs=1e-5) and exact.cost < 1
    assert own(frozenset({Sublayer(0, "attention")})).tokens[0] < 1.9, "this test cannot fail"


@pytest.mark.slow
@pytest.mark.parametrize("without", [{Sublayer(0, "attention")}, {Sublayer(2, "attention"), Sublayer(0, "mlp")}])
def test_a_trial_is_what_the_loop_does(without: set[Sublayer]):
    """Greedy, to the last step: the drafter of these parts, in the loop, with drafts of each length."""
    trial = judge()(frozenset(without))
    layers = {kind: tuple(part.layer for part in without if part.kind == kind) for kind in ("attention", "mlp")}
    for length in (1, 2, 3):
        options = Options(num_assistant_tokens=length, skip_attention=layers["attention"], skip_mlp=layers["mlp"])
        drafter = LayerSkip(options, planted(), planted().new_cache(), planted().vocab_size)
        g = tiny.generator(planted(), drafter, Constant(length), cache=drafter.cache)
        steps, tokens = 0, 0
        for text in said():
            count = len(text.tokens) - text.prompt
            result = g.generate(list(text.tokens[: text.prompt]), max_new_tokens=count)
            assert tuple(result.tokens) == text.tokens[text.prompt :]
            steps, tokens = steps + result.stats.target_forwards, tokens + count
        assert trial.tokens[length - 1] == pytest.approx(tokens / steps)
        assert 1 < tokens / steps < 1.9, "this shows nothing unless some are accepted and some are not"


def test_a_trial_of_sampled_texts_is_what_the_loop_is_expected_to_do():
    """One text, every way that its two drafted tokens can go, weighted."""
    text = said(1.0)[0]
    without = frozenset({Sublayer(0, "attention")})
    own = SkipEvaluator(planted(), [text], temperature=1.0, longest=2)
    rates = own(without).tokens
    count = len(text.tokens) - text.prompt
    assert all(1 < rate < 3 for rate in rates) and own.tokens == count
    accepted = [[_overlap(text, root, place, without) for place in (root, root + 1)] for root in _roots(text)]
    for length in (1, 2):
        assert rates[length - 1] == pytest.approx(count / _walked(accepted, 0, length), rel=1e-4)


def _roots(text: TrialSample) -> range:
    return range(text.prompt - 1, len(text.tokens) - 1)


def _walked(accepted: list[list[float]], place: int, length: int) -> float:
    """Steps to the end, by trying every outcome of every step."""
    if place >= len(accepted):
        return 0.0
    total, chance = 1.0, 1.0
    for j in range(length):
        total += chance * (1 - accepted[place][j]) * _walked(accepted, place + j + 1, length)
        chance *= accepted[place][j]
    return total + chance * _walked(accepted, place + length + 1, length)


def _overlap(text: TrialSample, root: int, place: int, without: frozenset[Sublayer]) -> float:
    """The overlap of the laws after ``place``, the parts being silent from ``root`` on; 0 behind the text."""
    if place >= len(text.tokens) - 1:
        return 0.0

    def hook(module: Any, args: tuple, output: Any) -> Any:
        states = (output if isinstance(output, torch.Tensor) else output[0]).clone()
        states[:, root:] = 0
        return states if isinstance(output, torch.Tensor) else (states, *output[1:])

    layers: Any = decoder_layers(planted().model)
    tokens = torch.tensor([text.tokens[: place + 1]])
    p = planted().stock_logits(tokens)[0, -1].softmax(-1)
    names = {"attention": "self_attn", "mlp": "mlp"}
    handles = [layers[part.layer].get_submodule(names[part.kind]).register_forward_hook(hook) for part in without]
    q = planted().stock_logits(tokens)[0, -1].softmax(-1)
    for handle in handles:
        handle.remove()
    return float(torch.minimum(p, q).sum())


def test_what_a_trial_is_worth():
    trial = SkipTrial(frozenset({PARTS[0]}), 0.5, (1.8, 2.4, 2.6))
    assert [trial.rate(k) for k in (1, 2, 3)] == pytest.approx([1.2, 1.2, 1.04])
    assert trial.best == 1 and trial.score == pytest.approx(1.2), "of two that are worth the same, the shorter"


def made_up(weights: dict[Sublayer, float]) -> Callable[[frozenset[Sublayer]], SkipTrial]:
    """Each part costs a sixteenth, and takes so much of the acceptance away; two of them need each other."""

    def judged(without: frozenset[Sublayer]) -> SkipTrial:
        odd = len(without & set(PARTS[4:6])) == 1
        share = max(1.0 - sum(weights[part] for part in without) - 0.3 * odd, 0.0)
        return SkipTrial(without, 1 - len(without) / 10, (1 + share, 1 + share + share**2))

    return judged


def test_the_search_finds_the_best_of_all_sets():
    """Every set of eight parts, and parts that only pay together."""
    own = made_up(dict(zip(PARTS, (0.01, 0.5, 0.02, 0.4, 0.01, 0.03, 0.3, 0.05), strict=True)))
    sets = (frozenset(each) for size in range(1, 9) for each in itertools.combinations(PARTS, size))
    best = max((own(each) for each in sets), key=lambda trial: trial.score)
    assert set(PARTS[4:6]) <= best.without and len(best.without) == 5
    told: list[tuple[int, float]] = []
    found = search(PARTS, own, SearchBudget(trials=120), lambda number, best: told.append((number, best.score)))
    assert found == best
    assert [number for number, _ in told] == list(range(1, len(told) + 1)) and len(told) <= 120
    assert [score for _, score in told] == sorted(score for _, score in told)
    assert search(PARTS, own, SearchBudget(trials=120)) == found
    few = search(PARTS, own, SearchBudget(trials=8))
    assert len(few.without) == 1, "no more than eight sets"


def test_a_search_that_was_cut_off_goes_on_where_it_was(tmp_path: Path):
    path, about, own = tmp_path / "trials.jsonl", {"seed": 1, "tuple": (1, 2)}, judge()

    def noting(tried: list[frozenset[Sublayer]], most: int | None = None) -> Callable[[frozenset[Sublayer]], SkipTrial]:
        """Notes what is tried, and is interrupted after the first ``most``."""

        def judged(without: frozenset[Sublayer]) -> SkipTrial:
            if len(tried) == most:
                raise KeyboardInterrupt
            tried.append(without)
            return own(without)

        return judged

    whole: list[frozenset[Sublayer]] = []
    tried: list[frozenset[Sublayer]] = []
    expected = search(PARTS, noting(whole), SearchBudget(30, seed=1))
    with pytest.raises(KeyboardInterrupt):
        search(PARTS, TrialLog(path, about).cached(noting(tried, most=17)), SearchBudget(30, seed=1))
    with path.open("a") as file:
        file.write('{"attention": [0], "ml')  # the machine went down in the middle of a line
    found = search(PARTS, TrialLog(path, about).cached(noting(tried)), SearchBudget(30, seed=1))
    assert found == expected and tried == whole
    assert len(path.read_text().splitlines()) == 1 + len(whole)
    again = search(PARTS, TrialLog(path, about).cached(lambda _: pytest.fail("all is known")), SearchBudget(30, seed=1))
    assert again == expected


def test_a_journal_of_another_search_is_refused(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    TrialLog(path, {"seed": 1})
    with pytest.raises(OptionError, match="another search"):
        TrialLog(path, {"seed": 2})
    path.write_text(json.dumps({"seed": 1}) + "\nnonsense\n{}\n")
    with pytest.raises(DataError, match="line 2"):
        TrialLog(path, {"seed": 1})
    with pytest.raises(OptionError, match="Cannot write"):
        TrialLog(path / "trials.jsonl", {})  # below a file


def test_nothing_can_be_said_from_too_little():
    with pytest.raises(DataError, match="No answer has 25 tokens"):
        judge(longest=25)
    with pytest.raises(OptionError, match="1 or more"):
        SearchBudget(trials=0)
