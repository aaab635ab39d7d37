"""Heads on the native engine: layers are those of torch, drafts those of the reference, in any batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import random_heads as heads
import specs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import FREE, Drafter, LevelPrice, Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import PAD, TokenTree
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.engine.policy import Constant
from foredraft.heads.layers import described
from foredraft.heads.nets.blocks import fuse
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import Layout, address
from foredraft.model.linear.packed import copy_weights, plain_copy
from foredraft.model.native.linear import NativeLinear, quantise_linears
from foredraft.model.native.model import NativeLM
from foredraft.model.native.ops import NativeHeadLayers
from foredraft.model.ops import TORCH, HeadLayers, TreeSize
from native import native, needs_compiler

pytestmark = needs_compiler
HALF = torch.tensor([i for i in range(tiny.VOCAB) if i % 2])
"""A draft vocabulary."""
NETS: dict[str, Callable[[NativeLM], Any]] = {
    "eagle": heads.eagle,
    "eagle, two layers": lambda target: heads.eagle(target, num_layers=2, fc_bias=False, attention_bias=True),
    "eagle, window": lambda target: heads.eagle(target, sliding_window=5),
    "eagle3": heads.eagle3,
    "eagle3, vocabulary": lambda target: heads.eagle3(target, vocabulary=HALF),
    "eagle3, window": lambda target: heads.eagle3(target, block={"sliding_window": 5}),
    "eagle3, norms": lambda target: heads.eagle3(
        target,
        block={"qk_norm": True, "hidden_act": "gelu"},
        norm_before_residual=True,
        norm_before_fc=True,
        norm_carried=True,
    ),
    "eagle3, normed layers": lambda target: heads.eagle3(target, norm_carried=True, fc_norm=True),
    "eagle3, the target's output": lambda target: heads.eagle3(target, own_head=False, num_layers=2),
    "eagle3, own embedding": lambda target: heads.eagle3(target, own_embedding=True),
}


def quantised(kind: str, bits: int, weights: str = "int8") -> tuple[NativeLM, Any, Any]:
    """A target, a head on its engine, and the same head in torch's operators."""
    target = native("llama", weights)
    net = NETS[kind](target)
    fuse(net)
    plain = plain_copy(net, shared=(net.target,))
    quantise_linears(net, target.engine, bits)
    return target, net, plain


def states(layers: Any, net: Any, tree: TokenTree, features: Tensor) -> Tensor:
    """The states of a committed row of 12 entries and of a tree behind it."""
    cache = SlotCache(net.depth)
    cache.reserve(range(2), 64)
    layout, given = Layout({"rows": net.window}, by_type=False), torch.arange(24).view(2, 12) * 5 % tiny.VOCAB
    zeros, bases = torch.zeros(2, dtype=torch.long), torch.full((2,), 12)
    limit = {"max_position": 1 << 20}
    parts = [
        (address(TokenTree.chain(given), zeros, (0, 1), 12, layout, **limit), features[:, :12]),
        (address(tree, bases, (0, 1), 12 + tree.tokens.shape[1], layout, **limit), features[:, 12:]),
    ]
    layers.reserve(64)
    return torch.cat([layers(step, cache, own, None) for step, own in parts], 1)


@pytest.mark.parametrize("kind", NETS)
def test_layers_are_those_of_the_net(kind: str):
    """With float weights, keys and values."""
    target, net, plain = quantised(kind, 32, "float32")
    ops = target.ops
    assert type(ops.head_layers(described(net))) is NativeHeadLayers
    torch_layers = ops.head_layers(described(plain))
    assert type(torch_layers) is HeadLayers, "what is not packed stays in torch"
    layers = NativeHeadLayers(described(net), ops.runtime, target.decoder, kv_cache_dtype="float32")
    parents = torch.tensor([[-1, 0, 0, 1, 3, 2, 4], [-1, 0, 1, 2, 3, 4, PAD]])
    tree = TokenTree(torch.arange(14).view(2, 7), parents, depth=5)
    features = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(1))
    found, expected = states(layers, net, tree, features), states(torch_layers, plain, tree, features)
    real = torch.cat([torch.ones(2, 12, dtype=torch.bool), parents != PAD], 1)
    torch.testing.assert_close(found[real], expected[real], atol=2e-4, rtol=2e-4)


def recorded(drafter: Drafter, drafts: dict[Any, tuple[Any, ...]], price: LevelPrice = FREE) -> Drafter:
    """The drafter, whose drafts of each row are stored by what they depend on: the row's tokens and its levels; and,
    with a price, the other rows."""
    propose = drafter.propose

    def watched(view: View, plan: Plan) -> Draft:
        draft = propose(view, replace(plan, level_price=price))
        for b, length in enumerate(view.lengths.tolist()):
            real = draft.tree.parents[b] != PAD
            parts = draft.tree.tokens[b], draft.tree.parents[b], draft.scores[b] if draft.scores is not None else None
            key = (tuple(view.history[b, :length].tolist()), plan.lengths[b], int(view.noise.seeds[b]))
            drafts[key] = tuple(None if part is None else part[real].tolist() for part in parts)
        return draft

    drafter.propose = watched  # type: ignore[method-assign]
    return drafter


def run(
    target: NativeLM,
    drafter: Drafter,
    rows: int,
    temperatures: tuple[float, ...],
    price: LevelPrice = FREE,
    **options: Any,
) -> dict[Any, Any]:
    """All drafts while ragged rows come and go."""
    drafts: dict[Any, tuple[Any, ...]] = {}
    target.tap(drafter.needs.hidden_layers)
    g = tiny.generator(target, recorded(drafter, drafts, price), Constant(4), max_rows=rows, **options)
    shared, *users = tiny.prompts((40, 3, 1, 9, 20, 14))
    prompts = [*users, *(shared + user for user in users)]
    asked = []
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            max_new_tokens=6 + 5 * (number % 3), temperature=temperatures[number % len(temperatures)], seed=number
        )
        asked += g.submit([prompt], params)
    g.engine.run(asked)
    return drafts


def check_same(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    """The same drafts, up to the rounding of scores."""
    assert found.keys() == expected.keys() and len(found) > 30
    for key, (tokens, parents, scores) in found.items():
        assert (tokens, parents) == expected[key][:2]
        assert scores == pytest.approx(expected[key][2], abs=1e-4)


def eagle(target: NativeLM, net: Any) -> Eagle3Drafter:
    return Eagle3Drafter(Options(nodes=9, depth=4, top_k=3), net, target.ops)


@pytest.mark.parametrize("heat", [(0.0,), (0.9,), (0.0, 1.3)], ids=["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("kind", NETS)
def test_trees_of_one_call_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, kind: str, heat: tuple[float, ...]
):
    target, net, _ = quantised(kind, 8)
    found = run(target, eagle(target, net), 3, heat)
    monkeypatch.setattr(NativeHeadLayers, "draft", HeadLayers.draft)
    check_same(found, run(target, eagle(target, net), 3, heat))


FITTING = TreeSize(9, 4, 3, 8, FREE, (4,), 0.8)
HANDED_ON: dict[str, tuple[SamplingParams, bool, TreeSize]] = {
    "penalties": (SamplingParams(repetition_penalty=1.3), False, FITTING),
    "a cut law": (SamplingParams(temperature=1.0, top_k=3), False, FITTING),
    "drawn tokens": (SamplingParams(temperature=1.0), True, FITTING),
    "an ablation": (SamplingParams(), False, FITTING._replace(ablated=True)),
    "nothing planned": (SamplingParams(), False, FITTING._replace(depth=0)),
    "many nodes of a level": (SamplingParams(), False, FITTING._replace(top_k=1025)),
    "many children": (SamplingParams(), False, FITTING._replace(children=1025)),
    "many nodes": (SamplingParams(), False, FITTING._replace(nodes=1 << 17)),
}


@pytest.mark.parametrize("kind", HANDED_ON)
def test_what_one_call_does_not_build_is_built_by_level(kind: str):
    params, draws, size = HANDED_ON[kind]
    target, net, _ = quantised("eagle3", 8)
    layers, view = target.ops.head_layers(described(net)), tiny.view([[3, 1]], params, draws=draws)
    with pytest.raises(InterruptedError):
        layers.draft(tiny.view([[3, 1]]), FITTING, interrupted, unexpected)
    root = Draft(TokenTree.root(view.roots), Law.FIXED)
    assert layers.draft(view, size, unexpected, lambda: root) is root


def interrupted(taps: tuple[int, ...]) -> Any:
    raise InterruptedError


def unexpected(*_: object) -> Any:
    raise AssertionError


@pytest.mark.parametrize("price", [LevelPrice(0.4), LevelPrice(0.15, 0.1)], ids=["level", "nodes"])
def test_levels_that_do_not_pay_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, price: LevelPrice):
    target, net, _ = quantised("eagle3", 8)
    found = run(target, eagle(target, net), 1, (0.0,), price)
    assert 1 < len({len(set(parents)) for _, parents, _ in found.values()})
    assert found != run(target, eagle(target, net), 1, (0.0,))
    monkeypatch.setattr(NativeHeadLayers, "draft", HeadLayers.draft)
    check_same(found, run(target, eagle(target, net), 1, (0.0,), price))


@pytest.mark.parametrize("heat", [(0.0,), (0.8, 1.3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["eagle, window", "eagle3, vocabulary"])
def test_a_rows_drafts_have_the_same_bits_in_any_batch(kind: str, heat: tuple[float, ...]):
    """Padded and ragged rows that come and go, with prompts read in parts, and begun with others'."""
    target, net, _ = quantised(kind, 8)
    alone = run(target, eagle(target, net), 1, heat)
    for rows in (3, 8):
        found = run(target, eagle(target, net), rows, heat, prefix_cache=True, max_prefill_tokens=16)
        assert {key: found[key] for key in alone} == alone


def test_weights_that_were_trained_are_packed_in_place():
    """Online distillation trains a copy in floats."""
    target, net, _ = quantised("eagle3", 8)
    layers = target.ops.head_layers(described(net))
    before = [module.matrix.data.clone() for module in net.modules() if isinstance(module, NativeLinear)]
    trained = plain_copy(net, shared=(net.target,))
    assert not any(isinstance(module, NativeLinear) for module in trained.modules())
    tiny.shake(trained, 1.0)
    copy_weights(net, trained)
    after = [module.matrix for module in net.modules() if isinstance(module, NativeLinear)]
    assert all(not torch.equal(old, new.data) for old, new in zip(before, after, strict=True))
    assert layers.model.layer[0].out.data == net.midlayer.self_attn.o_proj.matrix.data.data_ptr()
    torch.testing.assert_close(after[-1].dequantised(), trained.lm_head.weight, atol=0.02, rtol=0.0)


@pytest.mark.parametrize("heat", [(0.0,), (0.9,), (0.0, 1.3)], ids=["greedy", "sampled", "mixed"])
@pytest.mark.parametrize(
    "spec", ["medusa:medusa,nodes=9", "hydra:hydra++,nodes=9", "blockwise:blockwise", "eagle1:eagle"]
)
def test_guesses_are_ranked_as_in_torch(monkeypatch: pytest.MonkeyPatch, spec: str, heat: tuple[float, ...]):
    target, drafts = native("llama", "int8"), []
    for ops in (target.ops, TORCH):
        with monkeypatch.context() as built:
            built.setattr(target, "ops", ops)
            drafter = specs.build(spec, target, heads=heads.HEADS)
        drafts.append(run(target, drafter, 3, heat))
    check_same(*drafts)
