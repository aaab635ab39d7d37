"""A packed model takes the weights of a plain copy that was trained beside it."""

import pytest
import torch

import random_heads as heads
import tiny
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.linear.packed import PackedWeights, copy_weights, plain_copy


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("gpt2", {})]
)
def test_a_model_says_what_its_trained_copy_says(name: str, changes: dict, fast: bool):
    text = torch.tensor(tiny.prompts((12,)))
    served = CausalLM(tiny.build(name, **changes), fast=fast)
    assert bool(served.packed_layers) == fast
    before, copied = served.stock_logits(text), served.plain_copy()
    torch.testing.assert_close(copied(text).logits, before, atol=1e-4, rtol=1e-4)
    tiny.nudge(copied, 0.05)
    torch.testing.assert_close(served.stock_logits(text), before)
    copy_weights(served.model, copied)
    wanted = copied(text).logits
    assert (wanted - before).abs().max() > 0.05
    torch.testing.assert_close(served.stock_logits(text), wanted, atol=1e-4, rtol=1e-4)
    copied(text).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in copied.named_parameters() if "wpe" not in n)
    served.close()  # what was packed is given back as it is now
    torch.testing.assert_close(served.model(text).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_tied_copy_stays_tied():
    served = CausalLM(tiny.build("llama", tie_word_embeddings=True))
    copied = served.plain_copy()
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight is not served.model.model.embed_tokens.weight
    assert copied.config._attn_implementation == served.model.config._attn_implementation == "sdpa"


def test_a_head_packed_in_half_precision_takes_weights_and_leaves_its_target_alone():
    target = CausalLM(tiny.build("llama"))
    net = heads.medusa(target, own_heads=False)
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    plain = plain_copy(net, shared=(net.target,))
    assert plain.target is net.target
    assert len(PackedWeights(net, torch.bfloat16)) == 3
    copied = plain_copy(net, shared=(net.target,)).requires_grad_(True)
    tiny.nudge(copied, 0.05)
    copy_weights(net, copied)
    wanted = copied.logits(hidden, 1)
    torch.testing.assert_close(net.logits(hidden, 1), wanted, atol=5e-2, rtol=5e-2)
    wanted.sum().backward()  # through the target's packed output layer
    assert copied.blocks[1].linear.weight.grad.abs().sum() > 0


def test_gradients_pass_through_a_packed_layer_as_through_a_plain_one():
    layer, x = torch.nn.Linear(24, 40), torch.randn(7, 24, requires_grad=True)
    holder = torch.nn.Sequential(layer)
    wanted = torch.autograd.grad(layer(x).square().sum(), x)
    assert len(PackedWeights(holder)) == 1
    torch.testing.assert_close(torch.autograd.grad(holder(x).square().sum(), x), wanted)
