"""What is done to a head before it drafts changes nothing that it says: fused layers, looked-up positions, packing."""

import pytest
import torch
from torch import Tensor

import random_heads as heads
import tiny
from foredraft.heads.nets.blocks import Rotary, fuse
from foredraft.heads.nets.ttt_attention import Unrolled
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.linear.packed import PackedWeights, packing_works


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny.build("llama"), fast=False)


def states(net: heads.Eagle3, tokens: Tensor) -> Tensor:
    place = torch.arange(tokens.shape[1]).expand_as(tokens)
    features = net.features({tap: torch.randn(1, 9, 32, generator=torch.manual_seed(tap)) for tap in net.taps})
    with torch.no_grad():
        return net.logits(net(tokens, features, place, Unrolled(place).first))


@pytest.mark.parametrize("bias", [False, True])
def test_fused_layers_say_the_same(target: CausalLM, bias: bool):
    net = heads.eagle3(target, num_layers=2, block={"attention_bias": bias, "mlp_bias": bias, "qk_norm": bias})
    tokens = torch.arange(9)[None]
    before = states(net, tokens)
    fuse(net)
    assert not any("gate_proj" in name or "q_proj" in name for name in net.state_dict())
    assert torch.allclose(before, states(net, tokens), atol=1e-5)


@pytest.mark.skipif(not packing_works(), reason="this build of torch has no packed products")
def test_packed_in_bfloat16_they_say_nearly_the_same(target: CausalLM):
    net = heads.eagle3(target)
    tokens = torch.arange(9)[None]
    before = states(net, tokens)
    packed = PackedWeights(net, torch.bfloat16)
    after = states(net, tokens)
    assert len(packed) > 5 and after.dtype == torch.float32
    assert 0 < (after - before).square().mean().sqrt() < 0.05 * before.std()
    packed.undo()
    rounded = states(net, tokens)
    assert (rounded - after).square().mean().sqrt() < 0.05 * before.std()


def test_positions_looked_up_are_positions_computed():
    rotary = Rotary(1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8), scale=0.7)
    positions = torch.tensor([[0, 5, 1023, 700], [3, 3, 4, 900]])
    computed = rotary(positions)
    rotary.reserve(10)  # a table has a grain of 1024
    for found, wanted in zip(rotary(positions), computed, strict=True):
        assert torch.equal(found, wanted)
    rotary.reserve(5000)
    later = positions + 3000
    for found, wanted in zip(rotary(later), rotary._computed(later), strict=True):
        assert torch.equal(found, wanted)
    rotary.reserve(1 << 20)  # too long for a table
    assert rotary._table is None
