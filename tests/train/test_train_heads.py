"""The recipes of EAGLE-1, Medusa, blockwise decoding and Hydra against slow ones, row by row."""

from typing import Any

import pytest
import torch
from torch import Tensor
from trainees import assert_same_gradients, assert_unbiased, lesson, target
from transformers import DynamicCache

import random_heads as heads
from foredraft.core.errors import OptionError
from foredraft.core.target_parts import FINAL
from foredraft.heads.nets.hydra import Hydra
from foredraft.model.partial.skipping import LastLayer
from foredraft.train.heads import eagle, glide, medusa_hydra as recipes
from foredraft.train.heads.recipes import RECIPES
from foredraft.train.recipe import Recipe, TrainBatch

AHEAD = {
    "medusa": heads.medusa,
    "medusa, the target's output layer": lambda of: heads.medusa(of, own_heads=False, layers=2),
    "blockwise": heads.blockwise,
    "hydra": heads.hydra,
    "hydra++": lambda of: heads.hydra(of, prefix=True, layers=2),
}
NETS = {**AHEAD, "eagle": heads.eagle, "eagle3": heads.eagle3, "glide": heads.glide}


def made(name: str, **shape: Any) -> Any:
    return NETS[name](target(double=True), **shape).double().requires_grad_(True)


def recipe_of(net: Any, **options: Any) -> Recipe[Any]:
    return recipes.AheadRecipe(net, recipes.Options(**{"share": 1.0, **options}))


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax over the rows up to one's own, with keys repeated for the heads that share them."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(ahead, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def logits_of(net: Any, of: TrainBatch, text: int, row: int, head: int) -> Tensor:
    """What head ``head`` says at this row, alone."""
    hidden = of.hidden[FINAL]
    if not isinstance(net, Hydra):
        return net.logits(hidden[text, row][None, None], head)[0, 0]
    if net.prefix is not None:
        place = torch.arange(hidden.shape[1]).expand(hidden.shape[0], -1)
        hidden = net.prefix(hidden, place, causal)
    tokens = of.tokens[text, row + 1 : row + 2 + head]
    return net.logits(hidden[text, row][None, None], tokens[None, None], head)[0, 0]


def slow_loss(net: Any, of: TrainBatch, *, teacher: bool = True, decay: float = 1.0) -> Tensor:
    """Head i at row j says token j + 2 + i: its label is that token, or the law that the target had of it."""
    batch, length = of.tokens.shape
    total = torch.zeros((), dtype=torch.float64)
    for head in range(net.config.num_heads):
        said = []
        for text in range(batch):
            for row in range(length - 1 - net.config.num_heads):
                if not of.weights[text, row + 1 + head]:  # whether the token after this row counts
                    continue
                log_q = logits_of(net, of, text, row, head).log_softmax(-1)
                p = net.target.head(of.hidden[FINAL][text, row + 1 + head]).softmax(-1)
                said.append(-(p * log_q).sum() if teacher else -log_q[of.tokens[text, row + 2 + head]])
        total = total + decay**head * torch.stack(said).mean()
    return total


@pytest.mark.parametrize("teacher", [True, False], ids=["soft labels", "the text"])
@pytest.mark.parametrize("name", AHEAD)
def test_heads(name: str, teacher: bool):
    net = made(name)
    of = lesson(target(double=True), (FINAL,), batch=2, length=9)
    mine = recipe_of(net, teacher=teacher, decay=0.8)(of)["loss"]
    assert_same_gradients(net, mine, slow_loss(net, of, teacher=teacher, decay=0.8))


@pytest.mark.parametrize("name", ["medusa", "hydra++"])
def test_a_share_of_the_rows_estimates_without_bias(name: str):
    net = made(name)
    once = lesson(target(double=True), (FINAL,), batch=1, length=12, all_count=True)
    assert_unbiased(recipe_of(net), recipe_of(net, share=0.3), once, most_error=0.06)


def test_heads_that_are_told_how_to_fail():
    with pytest.raises(OptionError, match="share must be above 0"):
        recipes.Options(share=0.0)
    with pytest.raises(OptionError, match="Samples of 4 tokens are too short for 3 heads"):
        recipe_of(made("medusa"))(lesson(target(double=True), (FINAL,), length=4))


def slow_eagle(net: Any, of: TrainBatch, regression: float = 1.0, classification: float = 0.1) -> Tensor:
    """Row j reads f_j and token j + 1 at position j, and is to be f_{j+1}."""
    batch, length = of.tokens.shape
    truth = of.hidden[FINAL]
    place = torch.arange(length - 1).expand(batch, -1)
    states = net(of.tokens[:, 1:], truth[:, :-1], place, causal)
    features, laws = [], []
    for text in range(batch):
        for row in range(length - 1):
            if not of.weights[text, row + 1]:
                continue
            gap = (states[text, row] - truth[text, row + 1]).abs()
            features.append(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
            p = net.target.head(truth[text, row + 1]).softmax(-1)
            laws.append(-(p * net.target.head(states[text, row]).log_softmax(-1)).sum())
    return regression * torch.stack(features).mean() + classification * torch.stack(laws).mean()


@pytest.mark.parametrize("weights", [{}, {"regression": 0.3, "classification": 0.9}], ids=["paper", "others"])
def test_eagle(weights: dict[str, float]):
    net = made("eagle", num_layers=2)
    of = lesson(target(double=True), (FINAL,))
    said = eagle.EagleRecipe(net, eagle.Options(noise=0.0, share=1.0, **weights))(of)
    assert_same_gradients(net, said["loss"], slow_eagle(net, of, **weights))
    assert set(said) == {"loss", "hit_0", "feature_loss", "law_loss"}


def test_eagles_noise_is_uniform_around_nothing_and_only_on_what_is_read():
    net = made("eagle")
    of = lesson(target(double=True), (FINAL,), length=16)
    read: list[Tensor] = []
    hook = net.register_forward_hook(lambda module, given, out: read.append(given[1] - of.hidden[FINAL][:, :-1]))
    recipe = eagle.EagleRecipe(net, eagle.Options())
    first, again = recipe(of), recipe(of)
    hook.remove()
    most = 0.2 * 512 / 16 / 2
    assert torch.equal(read[0], read[1]) and torch.equal(first["loss"], again["loss"]), "chance is the lesson's seed"
    assert 0.95 * most < read[0].abs().max() <= most
    assert read[0].mean().abs() < 0.1 * most and abs(float(read[0].std()) - most / 3**0.5) < 0.05 * most


def glide_of(net: Any, **options: Any) -> glide.GlideRecipe:
    return glide.GlideRecipe(net, glide.Options(**{"share": 1.0, **options}), target(double=True))


def slow_glide(net: Any, of: TrainBatch, starts: Tensor) -> Tensor:
    """Row j reads token j and, of the target's last layer, the keys of the tokens before ``starts[text, j]``."""
    lm, said = target(double=True), []
    for text, tokens in enumerate(of.tokens):
        cache = DynamicCache()
        final = lm.model.model(input_ids=tokens[None], past_key_values=cache, use_cache=True)[0]
        keys, values = cache.layers[-1].keys, cache.layers[-1].values
        for row in range(len(tokens)):
            if not of.weights[text, row]:
                continue
            end = int(starts[text, row])

            def verified(query: Tensor, end: int = end, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                if not end:
                    return torch.zeros_like(query.transpose(1, 2))
                share = query.shape[1] // keys.shape[1]
                k, v = (each[:, :, :end].repeat_interleave(share, 1) for each in (keys, values))
                return ((query[:, :, -1:] @ k.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2)

            place = torch.arange(row + 1)[None]
            states = net(tokens[None, : row + 1], place, causal, verified)[0, -1]
            p = net.target.head(final[0, row]).softmax(-1)
            said.append(-(p * net.logits(states).log_softmax(-1)).sum())
    return torch.stack(said).mean()


@pytest.mark.parametrize("block", [1, 3, 6])
def test_glide_sees_the_targets_keys_of_the_tokens_before_its_block(block: int):
    net = made("glide")
    of = lesson(target(double=True), (net.config.layer,), batch=3, length=11)
    offsets = torch.randint(block, (3, 1), generator=of.rng())
    place = torch.arange(11)
    starts = (place - (place + offsets) % block).clamp(min=0)
    assert len(set(offsets.flatten().tolist())) > 1 or block == 1
    said = glide_of(net, block=block)(of)
    assert_same_gradients(net, said["loss"], slow_glide(net, of, starts))
    assert set(said) == {"loss", "length", *(f"hit_{age}" for age in range(block))}


def test_what_the_target_writes_after_the_block_has_begun_is_not_seen(monkeypatch: pytest.MonkeyPatch):
    """Other keys there change nothing; other keys before it do."""
    net, block = made("glide"), 4
    of = lesson(target(double=True), (net.config.layer,), batch=1, length=12, all_count=True)
    offset = int(torch.randint(block, (1, 1), generator=of.rng()))
    begin = 8 - (8 + offset) % block  # of the block of token 8
    recipe, found = glide_of(net, block=block), []
    logits = net.logits
    monkeypatch.setattr(net, "logits", lambda states: found.append(states.detach()) or logits(states))
    for first in (12, begin, begin - 1):
        last = recipe._last

        def other(tokens: Tensor, states: Tensor, last: Any = last, first: int = first) -> Any:
            keys, values, final = last(tokens, states)
            keys[:, :, first:] += 1.0
            values[:, :, first:] += 1.0
            return LastLayer(keys, values, final)

        monkeypatch.setattr(recipe, "_last", other)
        recipe(of)
        monkeypatch.setattr(recipe, "_last", last)
    own = slice(begin, begin + block)
    assert torch.equal(found[0][0, own], found[1][0, own])
    assert not torch.allclose(found[0][0, own], found[2][0, own])
    assert not torch.allclose(found[0][0, begin + block :], found[1][0, begin + block :]) or begin + block >= 12


def test_a_share_of_glides_rows_estimates_without_bias():
    net = made("glide")
    once = lesson(target(double=True), (net.config.layer,), batch=1, length=12, all_count=True)
    assert_unbiased(glide_of(net, block=1), glide_of(net, block=1, share=0.3), once, most_error=0.06)


def test_glide_is_told_how_to_fail():
    with pytest.raises(OptionError, match="block must be 1 or more"):
        glide.Options(block=0)
    with pytest.raises(OptionError, match="Samples of 5 tokens are too short for blocks of 6: raise --length"):
        glide.Options().check_length(5, 4)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "hydra++", "glide"])
def test_computing_again_gives_the_same_gradients(name: str):
    net, kind = made(name), RECIPES[name]
    of, options = target(double=True), [kind.options(share=0.5, recompute=again) for again in (False, True)]
    pair = [kind.trained(net, of, each) for each in options]
    of = lesson(target(double=True), pair[0].taps)
    said = [recipe(of) for recipe in pair]
    assert_same_gradients(net, said[1]["loss"], said[0]["loss"], tolerance=1e-12)
    assert all(torch.equal(said[0][key], said[1][key]) for key in said[0])
