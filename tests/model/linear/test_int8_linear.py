"""Int8 layers of drafts on a CPU: near the plain product, the same for a row in any batch, and plain when undone."""

import copy

import pytest
import torch
from test_packed import dense
from torch import nn

import tiny
from foredraft.model.hf.head_parts import parts_of, with_int8_output
from foredraft.model.linear.packed import PackedLinear, PackedWeights, draft_dtype, pack

pytestmark = pytest.mark.skipif(draft_dtype() is not torch.int8, reason="no fast int8 instructions on this processor")
INPUTS, OUTPUTS = 512, 300


def int8_layer(kind: str) -> tuple[nn.Module, nn.Module]:
    """A plain layer, and the same in int8."""
    layer = dense(kind, INPUTS, OUTPUTS)
    packed = copy.deepcopy(layer)
    pack(packed, torch.int8, keep=False)
    return layer, packed


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Linear", "Linear with bias", "Conv1D"])
def test_a_row_is_near_the_plain_product_and_the_same_in_any_batch(kind: str):
    plain, packed = int8_layer(kind)
    scales = torch.logspace(-3, 3, 40)[:, None]  # each row has a scale of its own
    x = torch.randn(40, INPUTS) * scales
    expected, found = plain(x), packed(x)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < error.max() < 0.02
    for rows in (1, 2, 7):
        assert torch.equal(packed(x[:rows]), found[:rows])
    assert torch.equal(packed(x.view(5, 8, INPUTS)), found.view(5, 8, OUTPUTS))
    assert packed(x[:0].view(1, 0, INPUTS)).shape == (1, 0, OUTPUTS)
    assert torch.equal(packed(torch.zeros(2, INPUTS)), plain(torch.zeros(2, INPUTS)))
    assert packed(x.bfloat16()).dtype == torch.bfloat16


def test_copies_and_files_hold_the_rounded_weights_in_float32():
    plain, packed = int8_layer("Linear with bias")
    step = plain.weight.abs().amax(1, keepdim=True) / 127
    for weight in (packed.weight, copy.deepcopy(packed).weight, packed.state_dict()["weight"]):
        assert weight.dtype == torch.float32
        assert ((weight - plain.weight).abs() <= 0.5001 * step).all()
    packed.double()
    assert type(packed) is nn.Linear


def test_it_trains_through_the_rounded_weights():
    _, packed = int8_layer("Linear")
    x = torch.randn(3, INPUTS, requires_grad=True)
    packed(x).sum().backward()
    assert torch.allclose(x.grad, packed.weight.sum(0).expand(3, -1), atol=1e-4)


def test_small_layers_stay_in_float32():
    net = nn.ModuleList([nn.Linear(512, 300), nn.Linear(64, 64)])
    assert len(PackedWeights(net, torch.int8)) == 2
    assert all(isinstance(layer, PackedLinear) for layer in net)
    assert [layer._pack.dtype for layer in net] == [torch.int8, torch.float32]


@torch.no_grad()
def test_an_int8_copy_of_the_output_layer_leaves_the_target_alone():
    model = tiny.build(vocab_size=2048, hidden_size=64)
    parts = parts_of(model)
    states = torch.randn(2, 3, 64)
    expected = parts.head(states)
    drafting = with_int8_output(parts, model, lambda: 0)
    error = (drafting.head(states) - expected).norm() / expected.norm()
    assert 0 < error < 0.02
    assert torch.equal(parts.head(states), expected) and drafting.embed is parts.embed
