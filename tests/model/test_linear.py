"""Packed linear layers: the same numbers, the same memory, and not a trace when they are taken off."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import tiny
from foredraft.model.causal import CausalLM
from foredraft.model.linear import PackedLinear, PackedWeights, packing_works

pytestmark = pytest.mark.skipif(not packing_works(), reason="this build of torch has no packed weights")


def dense(kind: str, inputs: int, outputs: int) -> nn.Module:
    if kind == "Conv1D":
        layer = Conv1D(outputs, inputs)
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
        return layer
    return nn.Linear(inputs, outputs, bias=kind == "Linear with bias")


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["Linear", "Linear with bias", "Conv1D"])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 96), (33, 7), (1, 5)])
def test_equals_the_dense_layer_for_any_number_of_rows(kind: str, inputs: int, outputs: int):
    layer = dense(kind, inputs, outputs)
    original = layer.weight.detach().clone()
    x = torch.randn(70, inputs)
    expected = layer(x)
    packed = PackedLinear(layer, keep_dense=False)
    for rows in range(1, 71):
        assert torch.allclose(packed(x[:rows]), expected[:rows], atol=1e-4), rows
    assert packed(x[:0]).shape == (0, outputs)
    assert torch.allclose(packed(x.view(7, 5, 2, inputs)), expected.view(7, 5, 2, outputs), atol=1e-4)
    assert torch.allclose(
        packed(x.view(7, 10, inputs).transpose(0, 1)), expected.view(7, 10, -1).transpose(0, 1), atol=1e-4
    )
    assert torch.equal(packed.weight, original if kind != "Conv1D" else original.t())
    assert packed.unpacked() is layer
    assert torch.equal(layer.weight, original) and layer.weight.is_contiguous()


def test_the_plain_weight_is_gone_while_it_is_packed_unless_it_is_shared():
    layer = nn.Linear(64, 64)
    storage = layer.weight.untyped_storage()
    PackedLinear(layer, keep_dense=False)
    assert layer.weight.numel() == 0 and layer.weight.untyped_storage().data_ptr() != storage.data_ptr()
    layer = nn.Linear(64, 64)
    packed = PackedLinear(layer, keep_dense=True)
    assert layer.weight.shape == (64, 64)
    assert packed.unpacked().weight.shape == (64, 64)


class Twins(nn.Module):
    """One linear layer under two names and in two parents, and a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.inner = nn.ModuleDict({"c": self.a, "d": nn.Linear(8, 8)})
        self.tied = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(self.tied(x)))
        return self.head(self.inner["d"](self.inner["c"](h)))


@torch.inference_mode()
def test_layers_that_are_used_twice_and_weights_that_are_tied():
    model = Twins()
    x = torch.arange(8)
    expected, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    packed = PackedWeights(model)
    assert isinstance(model.a, PackedLinear) and model.a is model.b is model.inner["c"]
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert model.tied.weight.shape == (8, 8)
    packed.undo()
    assert torch.equal(model(x), expected)
    assert model.head.weight is model.tied.weight and model.a is model.b is model.inner["c"]
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {k: v.tolist() for k, v in state.items()}
    assert len(packed) == 0
    packed.undo()


class Odd(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + 1


def test_what_is_no_plain_float32_layer_is_left_alone():
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *args: None)
    layers = nn.ModuleList([Odd(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4, device="meta"), hooked])
    assert len(PackedWeights(layers)) == 0
    assert len(PackedWeights(nn.ModuleList([nn.Linear(4, 4)]))) == 1


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's own account of memory")
def test_packing_adds_one_layer_of_memory_at_most():
    width, count = 1024, 12
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    size = 4 * width * width
    before = resident()
    packed = PackedWeights(model)
    held = [sum(p.packed.untyped_storage().nbytes() if p.packed.layout == torch.strided else size for p in model)]
    assert len(packed) == count and held[0] <= 1.01 * count * size
    assert resident() - before < 4 * size  # a third of what twelve copies would be
    packed.undo()
    assert resident() - before < 4 * size  # a third of what twelve copies would be


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "opt", "mixtral", "phi3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_packed_model_computes_the_same_and_close_leaves_it_as_it_was(name: str, tied: bool):
    model = tiny.build(name, tie_word_embeddings=tied)
    model.train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    attention, training = model.config._attn_implementation, [m.training for m in model.modules()]
    text = torch.tensor(tiny.prompts((21,)))
    expected = model.eval()(text, use_cache=False).logits
    model.train()
    lm = CausalLM(model)
    assert lm.packed_layers > 0 and not model.training
    assert torch.allclose(lm.stock_logits(text), expected, atol=1e-4)
    embedding = model.get_input_embeddings().weight
    assert embedding.shape == (tiny.VOCAB, 32), "an embedding that is tied keeps its weight"
    assert (model.get_output_embeddings().packed is not None) if tied else True
    lm.tap([1])
    lm.close()
    assert {key: id(module) for key, module in model.named_modules()} == {k: id(m) for k, m in modules.items()}
    assert model.config._attn_implementation == attention
    assert [m.training for m in model.modules()] == training
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.eval()(text, use_cache=False).logits, expected)
    if tied:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
