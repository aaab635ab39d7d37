"""LayerSkip's training: the loss against its definition, layer dropout, and a copy of the target whose exits draft."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainees import (
    SHORT,
    Killed,
    assert_drafts_losslessly,
    assert_same_gradients,
    assert_same_run,
    assert_unbiased,
    lesson,
    log_of,
    stop_at,
    target,
    train_draft,
    weights_of,
)

import tiny
from benchmarks.experiments import early_exit
from foredraft.core.errors import OptionError
from foredraft.core.target_parts import FINAL
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model
from foredraft.train.drafts.early_exit import EarlyExitRecipe, Options
from foredraft.train.recipe import TrainBatch

LAYERS = 4


def recipe_of(seed: int | None = 5, **options: Any) -> tuple[EarlyExitRecipe, CausalLM]:
    """A recipe for a model that is not the target, and the target."""
    of = CausalLM(tiny.build("llama", num_hidden_layers=LAYERS), fast=False)
    tuned = CausalLM(tiny.build("llama", num_hidden_layers=LAYERS, seed=seed), fast=False)
    return EarlyExitRecipe(tuned, of, Options(**options)), of


def slow_loss(recipe: EarlyExitRecipe, of: CausalLM, texts: TrainBatch, exits: dict[int, float], loss: str) -> Tensor:
    """Of exits with these weights, one after the other, row by row."""
    p, total = of.stock_logits(texts.tokens).softmax(-1), torch.zeros(())
    model: Any = recipe.net.model
    hidden = model(texts.tokens, output_hidden_states=True, use_cache=False).hidden_states
    for exit, weight in exits.items():
        final = hidden[exit] if exit == LAYERS else model.model.norm(hidden[exit])
        log_q = model.lm_head(final).log_softmax(-1)
        losses = []
        for text, counts in enumerate(texts.weights):
            for row in range(texts.tokens.shape[1] - 1):
                if counts[row] and loss == "text":
                    losses.append(-log_q[text, row, texts.tokens[text, row + 1]])
                elif counts[row]:
                    losses.append((p[text, row] * (p[text, row].log() - log_q[text, row])).sum())
        total = total + weight * torch.stack(losses).mean()
    return total / sum(exits.values())


@pytest.mark.parametrize("loss", ["forward_kl", "text"])
@pytest.mark.parametrize(
    ("options", "step", "progress", "exits"),
    [  # e(l) = scale * (0 + ... + l), and for the last layer L - 1 + scale * (0 + ... + L - 2)
        ({"every": 2}, 1, 0.0, {2: 1.0, 4: 3.0 + 3.0}),
        ({"every": 2}, 2, 0.0, {3: 3.0, 4: 3.0 + 3.0}),
        ({"every": 1, "scale": 0.5}, 9, 0.0, {2: 0.5, 3: 1.5, 4: 3.0 + 1.5}),
        ({"every": 9}, 7, 0.0, {4: 1.0}),
        ({"scale": 0.0, "every": 1}, 0, 0.0, {4: 1.0}),
        ({"curriculum": "gradual"}, 0, 0.0, {4: 1.0}),
        ({"curriculum": "gradual"}, 0, 0.25, {2: 1.0, 3: 3.0, 4: 6.0}),
        ({"curriculum": "gradual"}, 0, 0.9, {2: 1.0, 3: 3.0, 4: 6.0}),
    ],
)
def test_the_loss_and_its_gradients(
    options: dict[str, Any], step: int, progress: float, exits: dict[int, float], loss: str
):
    recipe, of = recipe_of(dropout=0.0, loss=loss, rows=7, **options)
    texts = replace(lesson(of, (FINAL,)), step=step, progress=progress)
    said = recipe(texts)
    assert_same_gradients(recipe.net, said["loss"], slow_loss(recipe, of, texts, exits, loss), 1e-4)


def test_a_share_of_the_positions_is_the_whole_loss_on_average():
    (whole, of), (sampled, _) = recipe_of(dropout=0.0), recipe_of(dropout=0.0, share=0.3)
    assert_unbiased(whole, sampled, lesson(of, (FINAL,), batch=1, length=24), 0.05)


def test_deeper_layers_are_skipped_more_often_and_none_in_evaluation(monkeypatch: pytest.MonkeyPatch):
    recipe, of = recipe_of(dropout=0.5)
    assert Options(dropout=0.5).rates(3) == pytest.approx([0.0, 0.5 * (2**0.5 - 1), 0.5])
    texts, skipped = lesson(of, (FINAL,)), torch.zeros(LAYERS)
    states = recipe._exits.states

    def counted(tokens: Tensor, exits: Any, dropped: Any) -> Tensor:
        skipped[list(dropped)] += 1
        return states(tokens, exits, dropped)

    monkeypatch.setattr(recipe._exits, "states", counted)
    count = 400
    with torch.no_grad():
        for seed in range(count):
            recipe(replace(texts, seed=seed))
    expected = torch.tensor(Options(dropout=0.5).rates(LAYERS))
    assert skipped[0] == 0 and (skipped / count - expected).abs().max() < 4 * (0.25 / count) ** 0.5
    losses = {float(recipe(replace(texts, seed=seed))["full_loss"]) for seed in range(9)}
    assert len(losses) > 1 and float(recipe(replace(texts, seed=3))["full_loss"]) in losses
    recipe.eval()
    skipped.zero_()
    losses = {float(recipe(replace(texts, seed=seed))["full_loss"]) for seed in range(9)}
    assert len(losses) == 1 and not skipped.any()


def test_a_skipped_layer_learns_nothing():
    recipe, of = recipe_of(dropout=0.999)
    recipe(lesson(of, (FINAL,), seed=2))["loss"].backward()
    learned = [layer.mlp.up_proj.weight.grad is not None for layer in recipe.net.model.model.layers]
    assert learned[0] and not all(learned)


def test_a_copy_of_the_target_has_only_its_exits_to_learn():
    recipe, of = recipe_of(seed=None, exit=2)
    recipe.eval()
    said = recipe(lesson(of, (FINAL,)))
    assert said["full_loss"].abs() < 1e-6 and said["full_agreement"] == 1.0 and said["loss"] > 0.01
    assert said["early_agreement"] < 1.0
    torch.testing.assert_close(said["text_loss"], said["target_text_loss"])


# Runs.

LONG = replace(SHORT, tokens=120 * 64, lr=1e-2, validate=40, checkpoint=60, report=20)


@pytest.fixture(scope="module")
def learned(place: Path) -> Path:
    """A place whose target has learned the texts, with all its layers but not with its exits."""
    own = place / "own"
    own.mkdir()
    (own / "texts.jsonl").symlink_to(place / "texts.jsonl")
    knows = Options(loss="text", scale=0.0, dropout=0.0)
    (made,) = train_draft("early_exit", place, place / "one", LONG, recipe_options=knows)
    (own / "target").symlink_to(made)
    return own


def test_a_whole_model_learns_at_a_lower_rate_than_a_head(place: Path, tmp_path: Path):
    for recipe, lr, peak in (("early_exit", None, 3e-4), ("early_exit", 2e-3, 2e-3), ("draft", None, 1e-3)):
        out = tmp_path / f"{recipe} {lr}"
        drafts = {"drafts": (str(place / "target"),)} if recipe == "draft" else {}
        train_draft(recipe, place, out, replace(SHORT, tokens=64, lr=lr, warmup=0.0), **drafts)
        assert log_of(out)[0]["lr"] == pytest.approx(peak)


def validations(out: Path) -> list[dict[str, float]]:
    return [line["validation"] for line in log_of(out) if "validation" in line]


def test_early_exits_learn_to_draft_and_the_target_stays_what_it_was(learned: Path, tmp_path: Path):
    options = Options(exit=1, every=1)
    (made,) = train_draft("early_exit", learned, tmp_path / "run", LONG, recipe_options=options)
    assert made == tmp_path / "run" / "model"
    once = replace(LONG, tokens=64, lr=1e-9)
    train_draft("early_exit", learned, tmp_path / "before", once, recipe_options=options)
    (before,), (*_, after) = validations(tmp_path / "before"), validations(tmp_path / "run")
    assert before["acceptance_length"] + 0.5 < after["acceptance_length"]
    assert before["early_agreement"] + 0.05 < after["early_agreement"]
    assert before["full_loss"] < 1e-3 and before["perplexity"] == pytest.approx(before["target_perplexity"], rel=1e-3)
    assert after["perplexity"] < 1.1 * after["target_perplexity"]
    lines = [line for line in log_of(tmp_path / "run") if "validation" not in line]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert_drafts_losslessly(made, "early_exit,assistant_early_exit=1")
    first = load_model(str(learned / "target"), device="cpu").model.state_dict()
    last = {name.removeprefix("model."): weight for name, weight in weights_of(tmp_path / "run").items()}
    assert first.keys() == last.keys() and all(not torch.equal(weight, first[name]) for name, weight in last.items())
    notes = json.loads((made / "provenance.json").read_text())
    assert notes["exit"] == 1 and notes["validation"] == after
    run = early_exit.training(made)
    assert run["tokens"] == LONG.tokens and run["validation"] == after, "what the benchmark says of a run"
    assert notes["target"] == "the model here, tuned from target: lossless for it, not for target"


@pytest.mark.parametrize("store", [0.0, 0.5])
def test_a_killed_run_ends_where_it_would_have_ended(place: Path, tmp_path: Path, store: float):
    given: dict[str, Any] = {"recipe_options": Options(dropout=0.5, share=0.5), "store": store}
    train_draft("early_exit", place, tmp_path / "whole", **given)
    for by in (Killed, KeyboardInterrupt):
        with pytest.raises(by):
            train_draft("early_exit", place, tmp_path / "cut", report=stop_at(5 if by is Killed else 6, by=by), **given)
    train_draft("early_exit", place, tmp_path / "cut", **given)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    files = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert files[0] == files[1]
    with pytest.raises(OptionError, match="started with another dropout;"):
        train_draft("early_exit", place, tmp_path / "cut", recipe_options=Options(share=0.5))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"curriculum": "linear"}, "Unknown curriculum 'linear'. Known: "),
        ({"dropout": 1.0}, "dropout must be below 1, not 1.0"),
        ({"scale": 1.5}, "scale must be 1 or less, not 1.5"),
        ({"every": 0}, "every must be 1 or more, not 0"),
        ({"share": 0.0}, "share must be above 0, not 0.0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], sentence: str):
    with pytest.raises(OptionError, match=sentence):
        Options(**options)


def test_an_exit_that_the_target_does_not_have():
    with pytest.raises(OptionError, match="The target has 3 layers, so exit must be 3 or less, not 4."):
        EarlyExitRecipe(CausalLM(tiny.build("llama", num_hidden_layers=3), fast=False), target(), Options(exit=4))
    assert Options().exit_of(3) == 1 and Options().exit_of(30) == 7 and Options(exit=3).exit_of(3) == 3
