"""Forwards without some layers, or parts of them, are those of a stock model that never had them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from foredraft.core.errors import ModelError
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.taps import decoder_layers
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import address_segments
from foredraft.model.partial.skipping import Exits, LayerSkipLM, layers_of
from native import needs_compiler, on_native
from slots import read, whole

TOLERANCE = 1e-4
NAMES = [*tiny.MODELS, *tiny.MORE]
PARTS = {
    "llama": ("self_attn", "mlp"),
    "gemma2": ("self_attn", "mlp"),
    "gpt2": ("attn", "mlp"),
    "gpt_neox": ("attention", "mlp"),
    "opt": ("self_attn", "fc2"),
    "mixtral": ("self_attn", "mlp"),
    "gpt_oss": ("self_attn", "mlp"),
    "llama4_text": ("self_attn", "feed_forward"),
    "falcon": ("self_attention", "mlp"),
    "jetmoe": ("self_attention", "mlp"),
}
"""What attention and MLP are called, for a slow truth that knows."""


def said(model: LayerSkipLM, texts: list[list[int]]) -> list[Tensor]:
    """Logits at every place of each text, read by this model alone."""
    logits = model.forward(*whole(model.model, texts)).logits
    return [logits[row, : len(text)] for row, text in enumerate(texts)]


def forwards(model: nn.Module) -> list[nn.Module]:
    """Modules with a forward of their own."""
    return [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_layers_are_the_model_cut_off_behind_them(name: str):
    """Windows of 8, texts longer than that, layers of two kinds."""
    raw = tiny.four(name)
    short = tiny.build(name)
    wanted = short.state_dict()
    short.load_state_dict({key: value for key, value in raw.state_dict().items() if key in wanted})
    texts = tiny.prompts((17, 5))
    with torch.inference_mode():
        expected = [short(torch.tensor([text])).logits[0] for text in texts]
    model = CausalLM(raw)
    found = said(layers_of(model).first(2), texts)
    assert all((a - b).abs().max() < TOLERANCE for a, b in zip(found, expected, strict=True))
    every = said(layers_of(model).first(4), texts)
    for logits, text in zip(every, texts, strict=True):
        assert (logits - model.stock_logits(torch.tensor([text]))[0]).abs().max() < TOLERANCE
    assert (every[0] - found[0]).abs().max() > 0.1, "this test cannot fail"


def zeroed(raw: Any, numbers: tuple[int, ...], child: str, start: int = 0) -> list[Any]:
    """Let these children say nothing from a place of the text on."""

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        states = (output if isinstance(output, Tensor) else output[0]).clone()
        states[..., start:, :] = 0
        return states if isinstance(output, Tensor) else (states, *output[1:])

    layers = decoder_layers(raw)
    return [layers[number].get_submodule(child).register_forward_hook(hook) for number in numbers]


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "olmo2"])
@pytest.mark.parametrize(("attention", "mlp"), [((1,), ()), ((), (2, 3)), ((0, 3), (0, 1)), ((1, 2), (1, 2))])
def test_on_the_native_engine_the_same_parts_are_left_out(name: str, attention: tuple[int, ...], mlp: tuple[int, ...]):
    raw, texts = tiny.four(name), tiny.prompts((17, 5))
    native = on_native(raw, "float32", "float32")
    ours, stock = layers_of(native), layers_of(CausalLM(raw))
    pairs = [(each.without(attention, mlp), each.first(1 + len(mlp))) for each in (ours, stock)]
    for ours_drafts, stock_drafts in zip(*pairs, strict=True):
        found, expected = said(ours_drafts, texts), said(stock_drafts, texts)
        assert all((a - b).abs().max() < TOLERANCE for a, b in zip(found, expected, strict=True))
    every = torch.tensor([texts[0]])
    assert (native.stock_logits(every) - stock.model.stock_logits(every)).abs().max() < TOLERANCE, "nothing stays"
    assert layers_of(native).without((), ()).cost == 1.0
    assert layers_of(native).first(2).cost == pytest.approx(layers_of(CausalLM(raw)).first(2).cost, abs=0.05)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("attention", "mlp"), [((1,), ()), ((), (2, 3)), ((0, 3), (0, 1))])
def test_without_a_part_is_the_model_in_which_it_says_nothing(
    name: str, attention: tuple[int, ...], mlp: tuple[int, ...]
):
    raw = tiny.four(name)
    texts = tiny.prompts((17, 5))
    handles = [*zeroed(raw, attention, PARTS[name][0]), *zeroed(raw, mlp, PARTS[name][1])]
    with torch.inference_mode():
        expected = [raw(torch.tensor([text])).logits[0] for text in texts]
    for handle in handles:
        handle.remove()
    found = said(layers_of(CausalLM(raw)).without(attention, mlp), texts)
    assert all((a - b).abs().max() < TOLERANCE for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4_text"])
def test_beside_a_text_pieces_of_it_see_what_the_whole_model_has_left(name: str):
    """A piece read without some parts, all before it read with them: a stock forward in which they fall silent there.
    Pieces overlap, windows are 8 wide, and the second text has one piece less, hence padding."""
    raw = tiny.four(name)
    texts = tiny.prompts((20, 7))
    attention, mlp = PARTS.get(name, ("self_attn", "mlp"))
    starts, length = [[3, 5, 16], [0, 4]], 3
    expected = []
    for text, own in zip(texts, starts, strict=True):
        for start in own:
            handles = [*zeroed(raw, (1,), attention, start), *zeroed(raw, (2,), mlp, start)]
            with torch.inference_mode():
                expected += raw(torch.tensor([text[: start + length]])).logits[0, start:]
            for handle in handles:
                handle.remove()
    model = CausalLM(raw)
    cache = read(model, [[*text, 0] for text in texts], (0, 1))  # the whole texts: the last token is left out
    places = [[start + i for start in own for i in range(length)] for own in starts]
    tokens = [[text[place] for place in own] for text, own in zip(texts, places, strict=True)]
    roots = [[start for start in own for _ in range(length)] for own in starts]
    padded = [torch.tensor([rows[0], rows[1] + [pad] * 3]) for rows, pad in ((tokens, 0), (places, 0), (roots, -1))]
    step = address_segments(*padded, 20, (0, 1), model.layout)
    found = layers_of(model).without((1,), (2,)).forward(step, cache).logits
    assert (torch.cat([found[0], found[1, :6]]) - torch.stack(expected)).abs().max() < TOLERANCE


def test_nothing_stays_on_the_model():
    raw = tiny.four("llama")
    model = CausalLM(raw)
    before = {id(module): len(module._forward_hooks) for module in raw.modules()}
    layers = layers_of(model)
    partial = layers.without((1, 2), (2,))
    assert not forwards(raw)
    text = tiny.prompts((9,))[0]
    logits = model.stock_logits(torch.tensor([text]))
    said(partial, [text])
    assert not forwards(raw)
    step, _ = whole(model, [text])
    with pytest.raises(IndexError):
        partial.forward(step, SlotCache(0))  # a cache without layers
    assert not forwards(raw)
    assert {id(module): len(module._forward_hooks) for module in raw.modules()} == before
    assert torch.equal(model.stock_logits(torch.tensor([text])), logits)
    model.close()


def test_a_forward_that_was_there_before_comes_back():
    """As accelerate has them for layers that are kept elsewhere."""
    raw = tiny.four("llama")
    layer = decoder_layers(raw)[2]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    kept = layer.forward
    partial = layers_of(CausalLM(raw)).first(1)
    said(partial, [[1, 2, 3]])
    assert forwards(raw) == [layer] and layer.forward is kept


def test_what_is_left_out_leaves_no_keys_and_values():
    model = CausalLM(tiny.four("llama"))
    layers = layers_of(model)
    for partial, expected in (
        (layers.first(2), [True, True, False, False]),
        (layers.without((1,), (1, 3)), [True, False, True, True]),
    ):
        step, cache = whole(model, [[1, 2]])
        partial.forward(step, cache)
        assert [bool(cache.stored(layer)[0].any()) for layer in range(4)] == expected


@pytest.mark.parametrize("fast", [True, False])
def test_the_cost_is_the_share_of_the_weights_that_are_read(fast: bool):
    raw = tiny.four("llama")
    count = {name: sum(p.numel() for p in module.parameters()) for name, module in raw.named_modules()}
    head, layer = count["lm_head"] + count["model.norm"], count["model.layers.0"]
    layers = layers_of(CausalLM(raw, fast=fast))
    assert layers.first(1).cost == pytest.approx((head + layer) / (head + 4 * layer))
    attention, mlp = count["model.layers.0.self_attn"], count["model.layers.0.mlp"]
    left = head + 4 * layer - 2 * attention - mlp
    assert layers.without((1, 2), (0,)).cost == pytest.approx(left / (head + 4 * layer))
    assert layers.without((), ()).cost == 1.0


class Quantised(nn.Module):
    """A linear layer whose weight is a buffer of eight-bit numbers, with a scale for each output, as GPTQ has it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (plain.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales).T


def test_the_cost_of_a_quantised_model_counts_its_buffers():
    raw = tiny.four("llama")
    for layer in decoder_layers(raw):
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Quantised(child))
    raw.model.register_buffer("mask", torch.ones(512, 512, dtype=torch.bool))  # is no weight
    model = CausalLM(raw)
    layer = decoder_layers(raw)[0]
    one = sum(each.nbytes for each in (*layer.parameters(), *layer.buffers()))
    head = raw.lm_head.weight.nbytes + raw.model.norm.weight.nbytes
    assert one > 3 * sum(each.nbytes for each in layer.parameters())
    assert model.weight_bytes == head + 4 * one
    layers = layers_of(model)
    assert layers.first(1).cost == pytest.approx((head + one) / (head + 4 * one))
    mlp = sum(each.nbytes for each in layer.mlp.buffers())
    assert layers.without((), (2,)).cost == pytest.approx(1 - mlp / (head + 4 * one)), "the MLP is seen as one"


def test_impossible_wishes_are_refused():
    layers = layers_of(CausalLM(tiny.four("llama")))
    for count in (0, 5, -1):
        with pytest.raises(ModelError, match="1 to 4 of them"):
            layers.first(count)
    for attention, mlp in (((4,), ()), ((), (-1,))):
        with pytest.raises(ModelError, match="layers 0 to 3"):
            layers.without(attention, mlp)


def test_layers_that_do_not_come_apart_are_left_out_whole_or_not_at_all():
    raw = tiny.four("llama")
    layer = decoder_layers(raw)[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) + 1.0
    layers = layers_of(CausalLM(raw))
    with pytest.raises(ModelError, match="only whole layers"):
        layers.without((0,), ())
    text = tiny.prompts((7,))[0]
    found = said(layers.without((1, 2), (2, 1)), [text])[0]
    layer.forward = own
    assert torch.equal(found, said(layers_of(layers.model).without((1, 2), (1, 2)), [text])[0])


def test_layers_that_hand_on_something_else_are_refused():
    raw = tiny.four("llama")
    model = CausalLM(raw)
    layer = decoder_layers(raw)[3]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: [own(*args, **kwargs)]
    with pytest.raises(ModelError, match="cannot run with skipped layers"):
        layers_of(model)


@pytest.mark.parametrize("name", NAMES)
def test_exits_are_what_a_model_says_that_ends_there(name: str):
    """One forward for several exits, through the model's own final norm and output layer, and with gradients."""
    raw = tiny.four(name)
    model, text = CausalLM(raw, fast=False), tiny.prompts((17,))[0]
    layers, head = layers_of(model), model.parts().head
    tokens, exits = torch.tensor([text]), [1, 3, 4]
    states = Exits(model).states(tokens, exits)
    for found, exit in zip(states, exits, strict=True):
        (expected,) = said(layers.first(exit), [text])
        assert (head(found)[0] - expected).abs().max() < TOLERANCE
    (expected,) = said(layers.without((1, 2), (1, 2)), [text])
    dropped = Exits(model).states(tokens, [4], dropped=(1, 2))
    assert (head(dropped[0])[0] - expected).abs().max() < TOLERANCE
    assert (dropped[0] - states[2]).abs().max() > 1e-3, "this test cannot fail"
    assert not forwards(raw)
    raw.requires_grad_(True)
    Exits(model).states(tokens, [3])[0].square().sum().backward()
    learns = [any(weight.grad is not None for weight in layer.parameters()) for layer in decoder_layers(raw)]
    assert learns == [True, True, True, False]
