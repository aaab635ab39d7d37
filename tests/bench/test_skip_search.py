"""The search for parts that a draft can do without: trials are what a draft would bring, and useless parts are found."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from foredraft.bench.skip_search import Effort, search
from foredraft.bench.skip_trials import Journal, Judge, Part, Said, Trial
from foredraft.core.errors import DataError, OptionError
from foredraft.core.params import SamplingParams
from foredraft.model.causal import CausalLM
from foredraft.model.taps import decoder_layers

LAYERS = 4
USELESS = {Part(1, "attention"), Part(2, "mlp"), Part(3, "attention"), Part(3, "mlp")}
PARTS = [Part(layer, kind) for layer in range(LAYERS) for kind in ("attention", "mlp")]


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
def said(temperature: float = 0.0) -> tuple[Said, ...]:
    """Answers of different lengths, in more than one group of rows."""
    prompts = tiny.prompts((3, 9, 5, 14, 2, 7, 4, 6, 8, 11))
    params = [SamplingParams(max_new_tokens=length, temperature=temperature) for length in (12, 9) * 5]
    g = tiny.generator(planted())
    results = [g.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    return tuple(Said((*prompt, *r.tokens), len(prompt)) for prompt, r in zip(prompts, results, strict=True))


def judge(temperature: float = 0.0, longest: int = 3) -> Judge:
    return Judge(planted(), said(temperature), temperature=temperature, longest=longest)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parts_that_add_nothing_are_found(temperature: float):
    own = judge(temperature)
    assert own.parts == PARTS and own.tokens == 5 * 12 + 5 * 9
    found = search(own.parts, own, Effort(trials=60))
    assert found.without >= USELESS
    exact = own(frozenset(USELESS))
    assert exact.tokens == pytest.approx((2.0, 3.0, 4.0), abs=1e-5) and exact.cost < 1
    assert own(frozenset({Part(0, "attention")})).tokens[0] < 1.9, "this test cannot fail"


def test_a_trial_is_what_the_slow_truth_says():
    """Tokens of the answers again, each after a forward in which the parts are silent at the last place alone."""
    own = judge()
    for without in (frozenset({Part(0, "attention")}), frozenset({Part(2, "attention"), Part(0, "mlp")})):
        runs, starts = torch.zeros(3), 0
        for text in said():
            agreed = torch.tensor([_agrees(text, place, without) for place in range(text.prompt, len(text.tokens))])
            windows = agreed.float().unfold(0, 3, 1).cumprod(1)
            runs, starts = runs + windows.sum(0), starts + len(windows)
        expected = 1 + (runs / starts).cumsum(0)
        assert own(without).tokens == pytest.approx(expected.tolist())
        assert 1 < own(without).tokens[0] < 2, "this shows nothing unless some are accepted and some are not"


def _agrees(text: Said, place: int, without: frozenset[Part]) -> bool:
    layers: Any = decoder_layers(planted().model)

    def hook(module: Any, args: tuple, output: Any) -> Any:
        states = (output if isinstance(output, torch.Tensor) else output[0]).clone()
        states[:, -1] = 0
        return states if isinstance(output, torch.Tensor) else (states, *output[1:])

    modules = [getattr(layers[part.layer], {"attention": "self_attn", "mlp": "mlp"}[part.kind]) for part in without]
    handles = [module.register_forward_hook(hook) for module in modules]
    best = int(planted().stock_logits(torch.tensor([text.tokens[:place]]))[0, -1].argmax())
    for handle in handles:
        handle.remove()
    return best == text.tokens[place]


def test_what_a_trial_is_worth():
    trial = Trial(frozenset({PARTS[0]}), 0.5, (1.8, 2.4, 2.6))
    assert [trial.rate(k) for k in (1, 2, 3)] == pytest.approx([1.2, 1.2, 1.04])
    assert trial.best == 1 and trial.score == pytest.approx(1.2), "of two that are worth the same, the shorter"


def made_up(weights: dict[Part, float]) -> Callable[[frozenset[Part]], Trial]:
    """Each part costs a sixteenth, and takes so much of the acceptance away; two of them need each other."""

    def judged(without: frozenset[Part]) -> Trial:
        odd = len(without & set(PARTS[4:6])) == 1
        share = max(1.0 - sum(weights[part] for part in without) - 0.3 * odd, 0.0)
        return Trial(without, 1 - len(without) / 10, (1 + share, 1 + share + share**2))

    return judged


def test_the_search_finds_the_best_of_all_sets():
    """Every set of eight parts, and parts that only pay together."""
    own = made_up(dict(zip(PARTS, (0.01, 0.5, 0.02, 0.4, 0.01, 0.03, 0.3, 0.05), strict=True)))
    sets = (frozenset(each) for size in range(1, 9) for each in itertools.combinations(PARTS, size))
    best = max((own(each) for each in sets), key=lambda trial: trial.score)
    assert set(PARTS[4:6]) <= best.without and len(best.without) == 5
    told: list[tuple[int, float]] = []
    found = search(PARTS, own, Effort(trials=120), lambda number, best: told.append((number, best.score)))
    assert found == best
    assert [number for number, _ in told] == list(range(1, len(told) + 1)) and len(told) <= 120
    assert [score for _, score in told] == sorted(score for _, score in told)
    assert search(PARTS, own, Effort(trials=120)) == found
    few = search(PARTS, own, Effort(trials=8))
    assert len(few.without) == 1, "no more than eight sets"


def test_a_search_that_was_cut_off_goes_on_where_it_was(tmp_path: Path):
    path, about = tmp_path / "trials.jsonl", {"seed": 1, "tuple": (1, 2)}
    own = judge()
    whole: list[frozenset[Part]] = []

    def counting(without: frozenset[Part]) -> Trial:
        whole.append(without)
        return own(without)

    expected = search(PARTS, counting, Effort(30, seed=1))

    tried: list[frozenset[Part]] = []

    def cut_off(without: frozenset[Part]) -> Trial:
        if len(tried) == 17:
            raise KeyboardInterrupt
        tried.append(without)
        return own(without)

    with pytest.raises(KeyboardInterrupt):
        search(PARTS, Journal(path, about).through(cut_off), Effort(30, seed=1))
    with path.open("a") as file:
        file.write('{"attention": [0], "ml')  # the machine went down in the middle of a line
    rest: list[frozenset[Part]] = []

    def going_on(without: frozenset[Part]) -> Trial:
        rest.append(without)
        return own(without)

    found = search(PARTS, Journal(path, about).through(going_on), Effort(30, seed=1))
    assert found == expected and [*tried, *rest] == whole
    assert len(path.read_text().splitlines()) == 1 + len(whole)
    again = search(PARTS, Journal(path, about).through(lambda _: pytest.fail("all is known")), Effort(30, seed=1))
    assert again == expected


def test_a_journal_of_another_search_is_refused(tmp_path: Path):
    path = tmp_path / "trials.jsonl"
    Journal(path, {"seed": 1})
    with pytest.raises(OptionError, match="another search"):
        Journal(path, {"seed": 2})
    path.write_text(json.dumps({"seed": 1}) + "\nnonsense\n{}\n")
    with pytest.raises(DataError, match="line 2"):
        Journal(path, {"seed": 1})
    with pytest.raises(OptionError, match="Cannot write"):
        Journal(tmp_path / "absent" / "trials.jsonl", {})


def test_answers_that_are_too_short_are_not_judged_by():
    texts = [*said(), Said((1, 2, 3), 2)]
    assert Judge(planted(), texts, temperature=0.0, longest=3).tokens == judge().tokens
    with pytest.raises(DataError, match="No answer has 13 tokens"):
        Judge(planted(), texts, temperature=0.0, longest=13)
    with pytest.raises(OptionError, match="1 or more"):
        Effort(trials=0)
