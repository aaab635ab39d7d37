"""Pruning to a shape: what is cut says what was masked, what matters is kept, a run ends in a draft of that shape."""

import contextlib
import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainees import assert_drafts_losslessly, assert_same_run, log_of, stop_at, train_draft

import tiny
from foredraft.core.errors import ModelError, OptionError
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.pruned_parts import Kept, Masks, TransformerSizes, top_parts, uniform_masks
from foredraft.model.hf.pruning import Masking, cut, resized, sizes_of
from foredraft.model.loading.load import load_model
from foredraft.train.drafts import importance
from foredraft.train.drafts.importance import select_by_importance
from foredraft.train.drafts.masks import Lagrange, PruningMasks
from foredraft.train.drafts.prune import Options, PrunedShape
from foredraft.train.partial import ResumableState
from foredraft.train.recipe import TrainBatch

SIZES = TransformerSizes(layers=4, hidden=32, intermediate=48, heads=4, groups=2)
KEPT = Kept((0, 3), tuple(range(1, 32, 2)), ((1,), (0,)), (tuple(range(0, 48, 2)), tuple(range(10, 34))))
"""Half of everything, of each layer other parts."""
STEP = 3e-3  # norms compute in float32: smaller differences would be noise
SLIDING = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}


def ids(count: int = 2, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(tiny.VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def lessons(count: int = 4, of: Any = None) -> list[TrainBatch]:
    """Random texts, or what a model says of itself: of all models, it says that best."""
    texts = ids(count) if of is None else of.generate(ids(count, 2), max_new_tokens=30, do_sample=False)
    return [TrainBatch(text[None], torch.ones(1, len(text)), {}, 0) for text in texts]


def masked_logits(model: Any, masks: Masks, tokens: Tensor) -> Tensor:
    with Masking(model, masks):
        return model(tokens, use_cache=False).logits


# Surgery.


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", SLIDING),
        ("qwen3", {}),
    ],
)
@torch.no_grad()
def test_the_cut_model_is_the_masked_model(name: str, changes: dict[str, Any], tmp_path: Path):
    model = tiny.build(name, num_hidden_layers=4, **changes)
    before = model(ids(), use_cache=False).logits
    wanted = masked_logits(model, KEPT.masks(sizes_of(model)), ids())
    small = cut(model, KEPT)
    torch.testing.assert_close(small(ids(), use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
    assert sizes_of(small) == TransformerSizes(layers=2, hidden=16, intermediate=24, heads=2, groups=1)
    assert torch.equal(model(ids(), use_cache=False).logits, before), "hooks are off and the model is as it was"
    assert (wanted - before).abs().mean() > 0.1, "what is masked matters"
    small.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu").model
    assert torch.equal(again(ids(), use_cache=False).logits, small(ids(), use_cache=False).logits)


def test_other_layouts_are_refused():
    for name in ("gpt2", "phi3", "gemma2", "mixtral"):
        with pytest.raises(ModelError, match="cannot be pruned: only llama, mistral, "):
            sizes_of(tiny.build(name))


def test_a_shape_that_cannot_be_saved_is_refused():
    model = tiny.build("llama", num_hidden_layers=4)
    with pytest.raises(ModelError, match="transformers refuses this shape: The hidden size \\(15\\) is not a multiple"):
        resized(model, replace(sizes_of(model), hidden=15))


# Shapes.


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layers=5", "Invalid layers=5: the model has 4, so it must be from 1 to 4."),
        ("hidden=0", "Invalid hidden=0: the model has 32, so it must be from 1 to 32."),
        ("intermediate=49", "Invalid intermediate=49: the model has 48, so it must be from 1 to 48."),
        ("heads=6", "Invalid heads=6: the model has 4, so it must be from 1 to 4."),
        ("kv_heads=3", "Invalid kv_heads=3: the model has 2, so it must be from 1 to 2."),
        (
            "heads=3",
            "Invalid heads=3: 2 query heads share a key-value head, and groups are pruned whole; use kv_heads=1 ",
        ),
        ("heads=4,kv_heads=1", "Invalid heads=4: 2 query heads share a key-value head, and groups are pruned whole;"),
        ("heads=1", "kv_heads=1 (heads=2)."),
        (
            "layers=4,hidden=32",
            "The shape equals the model's, so nothing is pruned: give a smaller one",
        ),
        ("width=3", "Unknown option of --shape 'width'. Known: heads, hidden, intermediate, kv_heads, layers."),
        ("layers", "The option 'layers' is not of the form option=value."),
        ("layers=two", "The option layers must be a whole number, not 'two'."),
    ],
)
def test_impossible_shapes_have_a_sentence_each(text: str, sentence: str):
    with pytest.raises(OptionError, match=re.escape(sentence)):
        PrunedShape.parse(text).of(SIZES)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("layers=2", replace(SIZES, layers=2)),
        ("heads=2", replace(SIZES, heads=2, groups=1)),
        ("kv_heads=1", replace(SIZES, heads=2, groups=1)),
        ("heads=2,kv_heads=1,hidden=8,intermediate=48", replace(SIZES, heads=2, groups=1, hidden=8)),
    ],
)
def test_what_a_shape_leaves_out_stays(text: str, sizes: TransformerSizes):
    assert PrunedShape.parse(text).of(SIZES) == sizes


# Importance.


@torch.no_grad()
def planted() -> Any:
    """A model in which only the parts of KEPT do anything: the rest is multiplied with a hundredth."""
    model = tiny.build("llama", num_hidden_layers=4, tie_word_embeddings=True)
    less = Masks(*(mask.clamp(min=0.01) for mask in KEPT.masks(SIZES)))
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight *= less.groups[number].repeat_interleave(16)
        layer.mlp.down_proj.weight *= less.intermediate[number]
        for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output.weight *= (less.layers[number] * less.hidden)[:, None]
    model.model.embed_tokens.weight *= less.hidden
    return model


def test_importance_keeps_the_planted_parts():
    wanted, said = TransformerSizes(layers=2, hidden=16, intermediate=24, heads=2, groups=1), []
    model = planted()
    assert select_by_importance(model, lessons(8, model), wanted, said.append) == KEPT
    assert sorted(sentence.split(" · ")[0] for sentence in said) == ["removed layer 2 of 4", "removed layer 3 of 4"]


def test_scores_are_mean_absolute_gradients_of_the_factors():
    """Against differences of the loss itself."""
    model = tiny.build("llama", num_hidden_layers=2).double()
    texts, sizes = lessons(3), sizes_of(model)

    def loss(masks: Masks, text: TrainBatch) -> float:
        log_q = masked_logits(model, masks, text.tokens)[0, :-1].log_softmax(-1)
        return -float(log_q.gather(-1, text.tokens[0, 1:, None]).mean())

    def moved(name: str, place: tuple[int, ...], by: float) -> Masks:
        masks = Masks(*(mask.double() for mask in uniform_masks(sizes)))
        getattr(masks, name)[place] += by
        return masks

    @torch.no_grad()
    def score(name: str, place: tuple[int, ...]) -> float:
        slopes = [(loss(moved(name, place, STEP), t) - loss(moved(name, place, -STEP), t)) / (2 * STEP) for t in texts]
        return sum(map(abs, slopes)) / len(texts)

    groups = torch.tensor([[score("groups", (layer, group)) for group in range(2)] for layer in range(2)])
    inner = torch.tensor([[score("intermediate", (layer, dim)) for dim in range(48)] for layer in range(2)])
    kept = select_by_importance(model, texts, replace(sizes, heads=2, groups=1, intermediate=5))
    assert kept.groups == tuple((int(row.argmax()),) for row in groups)
    assert kept.intermediate == tuple(tuple(sorted(row.topk(5).indices.tolist())) for row in inner)


# Masks.


def test_gates_reach_the_wanted_sizes_and_come_to_a_decision():
    """Where only the planted parts help, they are what stays open, to the size that is asked for."""
    wanted = TransformerSizes(layers=2, hidden=16, intermediate=24, heads=2, groups=1)
    gates, lagrange, useful = PruningMasks(SIZES), Lagrange(SIZES, wanted), KEPT.masks(SIZES)
    groups = [{"params": gates.parameters()}, {"params": lagrange.parameters(), "lr": 1.0}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    for step in range(600):
        optimizer.zero_grad()
        masks = gates.sample(torch.Generator().manual_seed(step))
        gain = sum((mask * use).mean() for mask, use in zip(masks, useful, strict=True))
        (lagrange.penalty(gates.shares(), min(1.0, step / 200)) - gain).backward()
        optimizer.step()
    shares = gates.shares()
    for share in (shares.layers, shares.hidden, shares.groups[[0, 3]], shares.intermediate[[0, 3]]):
        assert (share.detach() - 0.5).abs().max() < 0.05
    assert gates.kept(wanted) == KEPT


def test_the_price_goes_down_for_gates_and_up_for_multipliers():
    gates, lagrange = PruningMasks(SIZES), Lagrange(SIZES, replace(SIZES, layers=2))
    with torch.no_grad():
        for name, place in gates.places.items():
            place.fill_(20.0 if name != "layers" else 1.0)  # all is open, but for some of the layers
        lagrange.linear["layers"].fill_(0.3)
        lagrange.square["layers"].fill_(2.0)
    beyond = gates.shares().layers.item() - 0.75
    price = lagrange.penalty(gates.shares(), 0.5)
    assert price.item() == pytest.approx(0.3 * beyond + 2.0 * beyond**2, rel=1e-4)
    price.backward()
    assert lagrange.linear["layers"].grad.item() == pytest.approx(-beyond, rel=1e-4)  # type: ignore[union-attr]
    assert lagrange.square["layers"].grad.item() == pytest.approx(-(beyond**2), rel=1e-4)  # type: ignore[union-attr]
    assert (gates.places["layers"].grad > 0).all()  # type: ignore[operator]


def test_gates_are_drawn_by_their_law():
    """The share of gates that are not shut is what ``shares`` expects."""
    sizes = TransformerSizes(layers=1, hidden=200_000, intermediate=1, heads=1, groups=1)
    gates = PruningMasks(sizes)
    with torch.no_grad():
        gates.places["hidden"].fill_(-0.7)
    drawn = gates.sample(torch.Generator().manual_seed(0)).hidden.detach()
    assert float((drawn > 0).float().mean()) == pytest.approx(gates.shares().hidden.item(), abs=4e-3)
    assert 0.0 <= float(drawn.min()) and float(drawn.max()) <= 1.0 and (drawn == 1).any()


def test_the_best_are_as_many_as_are_wanted():
    scores = Masks(torch.tensor([0.0, 3.0, 1.0]), torch.ones(4), torch.rand(3, 2), torch.rand(3, 5))
    kept = top_parts(scores, TransformerSizes(layers=2, hidden=3, intermediate=2, heads=2, groups=1))
    assert kept.layers == (1, 2) and kept.hidden == (0, 1, 2)
    assert kept.intermediate[0] == tuple(sorted(scores.intermediate[1].topk(2).indices.tolist()))
    assert kept.groups[1] == (int(scores.groups[2].argmax()),)


def test_scores_that_are_interrupted_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At each loss that is computed once: at most the losses of one layer, or one gradient, are computed again."""
    model, samples = tiny.build("llama", num_hidden_layers=3), lessons(3)
    wanted = replace(sizes_of(model), layers=1, hidden=12, intermediate=9)
    whole, calls = select_by_importance(model, samples, wanted), []
    loss = importance._loss

    def counted(*given: Any) -> Any:
        calls.append(None)
        if len(calls) in (2, 5, 12, 19):
            raise KeyboardInterrupt
        return loss(*given)

    monkeypatch.setattr(importance, "_loss", counted)
    found = None
    for _ in range(5):
        partial = ResumableState(tmp_path / "importance.pt", {"samples": 3}, copy.deepcopy(importance.START), 1e9)
        with contextlib.suppress(KeyboardInterrupt):
            found = select_by_importance(model, samples, wanted, partial=partial)
    assert found == whole and len(calls) <= 3 * (3 + 2) + 3 + 4 * 3
    assert ResumableState(tmp_path / "importance.pt", {"samples": 4}, {}).state == {}, "with other terms it starts over"


# Runs.

HALF = PrunedShape(layers=2, hidden=24, intermediate=20, heads=2)


@pytest.mark.parametrize(
    "options", [Options(samples=3), Options(by="masks", mask_tokens=4 * 64, tune=0.01)], ids=["importance", "masks"]
)
def test_a_killed_run_ends_where_it_would_have_ended(place: Path, tmp_path: Path, options: Options):
    given: dict[str, Any] = {"shape": HALF, "recipe_options": options}
    whole = train_draft("prune", place, tmp_path / "whole", **given)[0]
    for step, stage in ((3, 1), (5, 2)) if options.by == "masks" else ((5, 1),):
        with pytest.raises(KeyboardInterrupt):
            train_draft("prune", place, tmp_path / "cut", report=stop_at(step, stage), **given)
    assert log_of(tmp_path / "cut")[-1]["step"] == 5
    again = train_draft("prune", place, tmp_path / "cut", **given)[0]
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    if options.by == "masks":
        assert_same_run(tmp_path / "cut" / "masks", tmp_path / "whole" / "masks")
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_the_outcome_is_a_model_of_that_shape_that_drafts(place: Path, tmp_path: Path):
    draft = train_draft("prune", place, tmp_path, shape=HALF, recipe_options=Options(samples=3))[0]
    assert draft == tmp_path / "draft"
    model = load_model(str(draft), device="cpu").model
    assert sizes_of(model) == TransformerSizes(layers=2, hidden=24, intermediate=20, heads=2, groups=1)
    assert json.loads((draft / "config.json").read_text())["dtype"] == "bfloat16"
    notes = json.loads((draft / "provenance.json").read_text())
    assert notes["recipe"] == "prune" and notes["start"] == "target" and notes["shape"]["hidden"] == 24
    assert notes["validation"]["acceptance_length"] >= 1.0
    assert_drafts_losslessly(place / "target", f"draft_model:{draft}")


def test_stored_hidden_states_change_nothing(place: Path, tmp_path: Path):
    """Scores of importance read no hidden states, what follows does."""
    given: dict[str, Any] = {"shape": HALF, "recipe_options": Options(samples=3)}
    whole, stored = (train_draft("prune", place, tmp_path / str(size), store=size, **given)[0] for size in (0.0, 0.1))
    assert list((tmp_path / "0.1" / "cache").rglob("states.bin"))
    assert (stored / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_another_shape_begins_anew_or_is_refused(place: Path, tmp_path: Path):
    train_draft("prune", place, tmp_path, shape=HALF, recipe_options=Options(samples=3))
    with pytest.raises(OptionError, match="started with another shape; use the same options to resume it"):
        train_draft("prune", place, tmp_path, shape=replace(HALF, layers=1), recipe_options=Options(samples=3))
    (tmp_path / "checkpoint.pt").unlink()  # then what is kept of the first shape must not be taken
    train_draft("prune", place, tmp_path, shape=replace(HALF, layers=1), recipe_options=Options(samples=3))
    assert len(json.loads((tmp_path / "kept.json").read_text())["layers"]) == 1


def test_masks_leave_a_model_alone_that_is_not_tuned(place: Path, tmp_path: Path):
    options = Options(by="masks", mask_tokens=4 * 64)
    train_draft("prune", place, tmp_path, shape=HALF, recipe_options=options)
    kept = torch.load(tmp_path / "masks" / "checkpoint.pt", weights_only=True)["net"]
    assert {name.split(".")[0] for name in kept} == {"gates", "lagrange"}, "no weights are kept that do not learn"
    lines = [line for line in log_of(tmp_path / "masks") if "loss" in line]
    assert len(lines) == 4 and all(0 < line["open_hidden"] <= 1 for line in lines)


def test_the_target_is_as_it_was(place: Path):
    target = CausalLM(tiny.build("llama", num_hidden_layers=4), fast=False)
    before = copy.deepcopy(target.model.state_dict())
    select_by_importance(target.model, lessons(), replace(SIZES, layers=1))
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.state_dict().items())


@pytest.mark.slow
def test_learned_masks_come_to_the_shape(place: Path, tmp_path: Path):
    options = Options(by="masks", mask_tokens=250 * 64)
    shape = PrunedShape(layers=2, hidden=24, intermediate=24)
    train_draft("prune", place, tmp_path, shape=shape, recipe_options=options)
    last = [line for line in log_of(tmp_path / "masks") if "loss" in line][-1]
    assert last["open_layers"] == pytest.approx(2 / 3, abs=0.05)
    assert last["open_hidden"] == pytest.approx(0.75, abs=0.05)
    assert last["open_intermediate"] == pytest.approx(0.5, abs=0.05)
    assert last["open_groups"] == pytest.approx(1.0, abs=0.05)
