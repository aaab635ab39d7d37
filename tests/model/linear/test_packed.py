"""Packed linear layers: the same numbers, the same memory, and not a trace when they are taken off."""

import copy
import ctypes
import io
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import tiny
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.linear import packed as linear_packed
from foredraft.model.linear.packed import PackedLinear, PackedWeights, pack, packing_works

pytestmark = pytest.mark.skipif(not packing_works(), reason="this build of torch has no packed weights")


def dense(kind: str, inputs: int, outputs: int) -> nn.Module:
    if kind == "Conv1D":
        layer = Conv1D(outputs, inputs)
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
        return layer
    return nn.Linear(inputs, outputs, bias=kind == "Linear with bias")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Linear", "Linear with bias", "Conv1D"])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 96), (33, 7), (1, 5)])
def test_equals_the_dense_layer_for_any_number_of_rows(kind: str, inputs: int, outputs: int):
    layer = dense(kind, inputs, outputs)
    original = layer.weight.detach().clone()
    x = torch.randn(70, inputs)
    expected = layer(x)
    for keep, least in ((False, 2), (True, 2), (False, 4), (True, 4)):
        pack(layer, keep=keep)
        layer._pack.rows = least
        for rows in range(1, 71):
            assert torch.allclose(layer(x[:rows]), expected[:rows], atol=1e-4), rows
        assert layer(x[:0]).shape == (0, outputs)
        assert torch.allclose(layer(x.view(7, 5, 2, inputs)), expected.view(7, 5, 2, outputs), atol=1e-4)
        assert torch.allclose(
            layer(x.view(7, 10, inputs).transpose(0, 1)), expected.view(7, 10, -1).transpose(0, 1), atol=1e-4
        )
        assert torch.equal(layer.weight, original)
        layer.unpack()
        assert type(layer).__name__ == kind.partition(" ")[0]
        assert torch.equal(layer.weight, original) and layer.weight.is_contiguous()


@torch.no_grad()
@pytest.mark.parametrize("shape", [(384, 1024), (640, 1728), (33, 7)])
def test_a_row_has_the_same_result_however_many_there_are(shape: tuple[int, int]):
    """So the number of rows that a processor likes best changes no text."""
    layer, x = nn.Linear(*shape), torch.randn(8, shape[0])
    pack(layer, keep=False)
    expected = layer(x)
    for least in (2, 4):
        layer._pack.rows = least
        for rows in range(1, 9):
            assert torch.equal(layer(x[:rows]), expected[:rows])


@pytest.mark.parametrize(
    ("seconds", "best"), [({2: 3.0, 4: 1.0}, 4), ({2: 1.0, 4: 3.0}, 2), ({2: 1.0, 4: 0.96}, 2), ({2: 1.0, 4: 0.94}, 4)]
)
def test_few_rows_are_repeated_as_is_fastest(seconds: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch):
    """By a clock of its own, which stands still but for the products."""
    product, rows, now = torch.ops.mkldnn._linear_pointwise, list[int](), [0.0]

    def timed(x: Tensor, *rest: Any) -> Tensor:
        rows.append(x.shape[:-1].numel())
        now[0] += seconds.get(rows[-1], 0.0)
        return product(x, *rest)

    monkeypatch.setattr(linear_packed, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", timed)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    packed = PackedWeights(model, keep=True)
    rows.clear()
    with torch.no_grad():
        model(torch.randn(1, 16))
        model[0].weight.mul_(2)  # packed again
        model(torch.randn(1, 16))
    packed.undo()
    assert rows == [best] * 6


def test_a_weight_that_is_given_up_takes_no_memory_and_any_use_of_it_is_seen():
    layer = nn.Linear(64, 64)
    original = layer.weight.detach().clone()
    pack(layer, keep=False)
    (held,) = (each for name, each in layer.named_parameters() if name == "weight")
    assert held.is_meta and held.shape == (64, 64)
    assert torch.equal(layer.weight, original) and torch.equal(layer.state_dict()["weight"], original)
    layer.double()
    assert type(layer) is nn.Linear and torch.equal(layer.weight, original.double())


def test_a_weight_that_is_kept_may_change_and_the_layer_goes_along():
    layer, x = nn.Linear(16, 8), torch.randn(5, 16)
    pack(layer, keep=True)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2.0)
        assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5)
        assert not torch.allclose(layer(x), before, atol=1e-2)
        layer.load_state_dict(nn.Linear(16, 8).state_dict())
        assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5)
        layer.weight.data = torch.ones(8, 16)
        assert torch.allclose(layer(x), x.sum(1, keepdim=True) + layer.bias, atol=1e-4)
    assert isinstance(layer, PackedLinear), "none of this needs the plain layer"
    layer(x).sum().backward()
    assert torch.allclose(layer.weight.grad, x.sum(0).expand(8, -1), atol=1e-5)


def test_a_bias_may_be_replaced_or_learn_alone():
    for layer in (nn.Linear(16, 8), dense("Conv1D", 16, 8)):
        x = torch.randn(5, 16)
        pack(layer, keep=True)
        with torch.no_grad():
            before = layer(x)
            layer.bias = nn.Parameter(layer.bias + 1.0)
            assert torch.allclose(layer(x), before + 1.0, atol=1e-5)
            layer.load_state_dict({**layer.state_dict(), "bias": layer.bias + 1.0}, assign=True)
            assert torch.allclose(layer(x), before + 2.0, atol=1e-5)
            layer.bias.data = layer.bias.data + 1.0
            assert torch.allclose(layer(x), before + 3.0, atol=1e-5)
        assert "Packed" in type(layer).__name__, "none of this needs the plain layer"
        layer.weight.requires_grad_(False)
        layer(x).sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((8,), 5.0)) and layer.weight.grad is None


def test_copies_and_pickles_are_plain_layers_and_share_what_was_shared():
    for keep in (True, False):
        model = Twins()
        expected = model(torch.arange(8))
        packed = PackedWeights(model, keep=keep)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert type(other.a) is nn.Linear and other.a is other.b is other.inner["c"]
            assert other.head.weight is other.tied.weight and other.head.weight is not model.tied.weight
            assert torch.equal(other(torch.arange(8)), expected)
            assert all(not each.is_meta for each in other.parameters())
        assert len(packed) == 3 and isinstance(model.a, PackedLinear)


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


@torch.no_grad()
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
    """Bytes in use, without those that the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's own account of memory")
def test_packing_adds_one_layer_of_memory_at_most():
    width, count = 1024, 12
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    size = 4 * width * width
    before = resident()
    packed = PackedWeights(model)
    assert len(packed) == count
    assert resident() - before < 2 * size
    packed.undo()
    assert resident() - before < 2 * size


@torch.no_grad()
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
    assert isinstance(model.get_output_embeddings(), PackedLinear) or name == "opt" or not tied
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
