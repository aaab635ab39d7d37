"""Medusa-2: heads and target that learn together, and the one folder that comes of it."""

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
    lesson,
    log_of,
    stop_at,
    train_head,
    weights_of,
)

import random_heads as heads
import tiny
from foredraft.core.errors import OptionError
from foredraft.heads.formats import inspect_head, load_head
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model
from foredraft.train.heads.medusa2 import Joint, Medusa2Recipe, Options
from foredraft.train.options import HeadShape
from foredraft.train.recipe import TrainBatch

LONG = replace(SHORT, tokens=40 * 64, lr=1e-2, validate=20, checkpoint=12, report=1)
"""Forty steps: twelve of the heads alone, eight in which they come to count, twenty."""
TWO_HEADS = HeadShape(heads=2)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    out = place / "whole"
    train_head("medusa2", place, out, LONG, shape=TWO_HEADS, recipe_options=Options(pace=0.2))
    return out


def recipe_of(own_heads: bool = True, **options: Any) -> tuple[Medusa2Recipe, CausalLM]:
    of = CausalLM(tiny.build("llama").double(), fast=False)
    joint = Joint(heads.medusa(of, own_heads=own_heads).double().requires_grad_(True), of)
    return Medusa2Recipe(joint, Options(**{"share": 1.0, **options})), of


def slow_loss(recipe: Medusa2Recipe, of: CausalLM, texts: TrainBatch, weight: float, before: Any = None) -> Tensor:
    """The target's loss, row by row, and that of each head against what the target says, taken as given."""
    head, rows = recipe.net.head, range(texts.tokens.shape[1] - 1)
    output = of.model(input_ids=texts.tokens, output_hidden_states=True, use_cache=False)
    hidden, log_p = output.hidden_states[-1], output.logits.log_softmax(-1)
    losses: dict[int, list[Tensor]] = {place: [] for place in range(-1, head.config.num_heads)}
    for text, counts in enumerate(texts.weights):
        for row in rows:
            if counts[row] and before is not None:
                p = before[text, row]
                losses[-1].append((p * (p.log() - log_p[text, row])).sum())
            elif counts[row]:
                losses[-1].append(-log_p[text, row, texts.tokens[text, row + 1]])
        for row in range(len(rows) - head.config.num_heads):
            for number in range(head.config.num_heads):
                if counts[row + 1 + number]:
                    log_q = head.logits(hidden[text, row][None, None], number).log_softmax(-1)
                    losses[number].append(-(log_p[text, row + 1 + number].exp().detach() * log_q[0, 0]).sum())
    means = [torch.stack(losses[number]).mean() for number in range(-1, head.config.num_heads)]
    return means[0] + weight * sum(0.8**number * mean for number, mean in enumerate(means[1:]))


@pytest.mark.parametrize("own_heads", [True, False])
def test_the_loss_and_its_gradients(own_heads: bool):
    recipe, of = recipe_of(own_heads)
    texts = replace(lesson(of, (), length=9), progress=0.4)  # halfway up
    weight = 0.2 * 0.5**0.5
    mine = recipe(texts)
    assert_same_gradients(recipe.net, mine["loss"], slow_loss(recipe, of, texts, weight))
    torch.testing.assert_close(mine["loss"].detach(), mine["own_loss"] + weight * mine["heads_loss"])
    again = recipe_of(own_heads, recompute=True)[0]
    assert_same_gradients(again.net, again(texts)["loss"], slow_loss(again, again.net._target, texts, weight))


def test_self_distillation_holds_the_target_to_what_it_said():
    recipe, of = recipe_of(own="kl")
    texts = lesson(of, (), length=9)
    before = of.stock_logits(texts.tokens).clone().softmax(-1)
    assert recipe(texts)["own_loss"].abs() < 1e-6
    with torch.no_grad():
        for weight in of.model.parameters():
            weight.mul_(1.05)
    assert_same_gradients(recipe.net, recipe(texts)["loss"], slow_loss(recipe, of, texts, 0.2, before))


def test_the_heads_learn_alone_at_first():
    recipe, of = recipe_of(own_heads=False)  # so that they speak through the target's output layer
    said = recipe(replace(lesson(of, ()), progress=0.29))
    said["loss"].backward()
    assert all(weight.grad is not None for weight in recipe.net.head.parameters())
    assert all(weight.grad is None for weight in recipe.net.model.parameters())
    assert "own_loss" not in said
    recipe(replace(lesson(of, ()), progress=0.3))["loss"].backward()
    assert all(weight.grad is not None for weight in recipe.net.parameters())


def test_nothing_is_left_to_chance_by_a_target_with_dropout():
    of = CausalLM(tiny.build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5), fast=False)
    recipe = Medusa2Recipe(Joint(heads.medusa(of).requires_grad_(True), of), Options())
    recipe.train()
    losses = [recipe(lesson(of, ()))["loss"] for _ in range(2)]
    assert torch.equal(*losses)


def test_both_learn_and_the_target_does_not_forget(place: Path, whole: Path):
    lines = [line for line in log_of(whole) if "validation" not in line]
    assert ["own_loss" in line for line in lines] == [False] * 12 + [True] * 28
    assert sum(line["loss"] for line in lines[8:12]) < sum(line["loss"] for line in lines[:4])
    checked = [line["validation"] for line in log_of(whole) if "validation" in line]
    assert checked[1]["own_loss"] < checked[0]["own_loss"] and checked[1]["heads_loss"] < checked[0]["heads_loss"]
    first = load_model(str(place / "target"), device="cpu").model.state_dict()
    last = {name.removeprefix("model."): weight for name, weight in weights_of(whole).items() if "head." not in name}
    assert all(not torch.equal(weight, first[name]) for name, weight in last.items())


def test_the_target_stays_as_it_is_in_the_warm_up(place: Path):
    out = place / "warm"
    train_head("medusa2", place, out, shape=TWO_HEADS, recipe_options=Options(alone=0.999))
    first = load_model(str(place / "target"), device="cpu").model.state_dict()
    kept = weights_of(out)
    assert all(torch.equal(kept[f"model.{name}"], weight) for name, weight in first.items())
    assert all(weight.any() for name, weight in kept.items() if name.startswith("head."))
    assert {len(group["params"]) for group in torch.load(out / "checkpoint.pt")["optimizer"]["param_groups"]} == {
        4,
        len(first),
    }


def test_a_killed_run_ends_where_it_would_have_ended(place: Path):
    """Six steps, of which two are the heads' alone; it is killed after the fifth and goes on from the fourth."""
    train_head("medusa2", place, place / "undisturbed")
    with pytest.raises(Killed):
        train_head("medusa2", place, place / "killed", report=stop_at(5, by=Killed))
    kept = torch.load(place / "killed" / "checkpoint.pt")
    assert kept["step"] == 4 and len(kept["optimizer"]["state"]) == len(kept["net"])
    train_head("medusa2", place, place / "killed")
    assert_same_run(place / "killed", place / "undisturbed")
    files = [(place / name / "head" / "model.safetensors").read_bytes() for name in ("killed", "undisturbed")]
    assert files[0] == files[1]


def test_one_folder_is_the_target_and_its_heads(whole: Path):
    folder = str(whole / "head")
    assert_drafts_losslessly(folder, f"medusa:{folder}")
    kept, of = weights_of(whole), CausalLM(load_model(folder, dtype="float32", device="cpu").model, fast=False)
    net: Any = load_head(folder, of).net
    for part, name in ((of.model, "model"), (net, "head")):
        for key, weight in part.state_dict().items():
            assert torch.equal(weight, kept[f"{name}.{key}"].bfloat16().float()), key
    assert len(net.config.accuracies) == 2
    of.close()


def test_the_files_say_whose_heads_they_are(place: Path, whole: Path):
    info = inspect_head(str(whole / "head"))
    assert info.format == "Medusa-2" and any("lossless relative to the tuned model" in note for note in info.notes)
    for file in (whole / "run.json", whole / "head" / "provenance.json"):
        said = json.loads(file.read_text())
        assert said["model"] == "target"
        assert said["target"].startswith(
            "the model in head/, tuned from target together with the heads: lossless for it"
        )


def test_it_goes_on_from_heads_that_learned_alone(place: Path):
    start = train_head("medusa", place, place / "first", shape=TWO_HEADS)
    out = place / "second"
    head = train_head("medusa2", place, out, shape=HeadShape(start=str(start)), recipe_options=Options(alone=0.0))
    assert json.loads((head / "provenance.json").read_text())["start"] == "head"
    assert json.loads((out / "run.json").read_text())["start"] == str(start)
    assert "start" not in json.loads((start / "provenance.json").read_text())
    assert load_model(str(head), device="cpu").model.config.medusa_num_heads == 2
    assert all("own_loss" in line for line in log_of(out) if "validation" not in line)


def test_states_cannot_be_kept_of_a_target_that_changes(place: Path):
    sentence = "medusa2 trains the target too, so hidden states cannot be stored: remove --store."
    with pytest.raises(OptionError, match=sentence):
        train_head("medusa2", place, place / "stored", store=1.0)
    assert not (place / "stored").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"own": "mse"}, "Unknown own loss 'mse'. Known: ce, kl"),
        ({"alone": 1.0}, "alone must be below 1, not 1.0"),
        ({"ramp": -0.1}, "ramp must be 0 or more, not -0.1"),
        ({"pace": 0.0}, "pace must be above 0, not 0.0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], sentence: str):
    with pytest.raises(OptionError, match=sentence):
        Options(**options)
