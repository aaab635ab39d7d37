"""What was computed from weights is not used after they have changed: cached prefixes, features of heads, keys of
drafts, packed copies. Each text and each draft is that of a new generator around a copy of the changed model."""

import copy
import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import foredraft
import random_heads as heads
import tiny
from foredraft.compose.load import load, load_many
from foredraft.core.errors import ModelError
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.engine.results import Result
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.head_parts import parts_of, with_int8_output
from foredraft.model.hf.weight_state import WeightState
from foredraft.model.linear.packed import packing_works
from native import needs_compiler

PROMPT = random.Random(4).choices(range(1, tiny.VOCAB), k=70)
NEW = 12
ALL = len(PROMPT) - 1
LENGTH, DEEP = "num_assistant_tokens=4,num_assistant_tokens_schedule=constant", {"num_hidden_layers": 4}


def other(seed: int = 77) -> PreTrainedModel:
    return tiny.build("llama", seed=seed, **DEEP)


def model() -> PreTrainedModel:
    return tiny.build("llama", **DEEP)


def said(g: foredraft.Generator) -> Result:
    return g.generate(PROMPT, max_new_tokens=NEW, record_steps=True)


def drafts(result: Result) -> list[list[int]]:
    return [list(step.tokens) for step in result.steps]


def headed(m: PreTrainedModel) -> foredraft.Generator:
    """A generator with a random EAGLE-3 head that reads layers 1, 2 and 4."""
    with load(m, "none") as plain:
        target = plain.engine.target
        assert isinstance(target, CausalLM)
        head = heads.eagle3(target, taps=(1, 2, 4))
        return load(plain, Eagle3Drafter(Options(nodes=7, depth=3, top_k=2), head), prefix_cache=True)


def with_draft(m: PreTrainedModel) -> foredraft.Generator:
    return load(m, ("draft_model," + LENGTH, other(5)), prefix_cache=True)


def looked_up(m: PreTrainedModel) -> foredraft.Generator:
    return load(m, "prompt_lookup," + LENGTH, prefix_cache=True)


def train(m: Any) -> None:
    m.train()
    ids = torch.tensor([PROMPT])
    m(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(m.parameters(), 0.5).step()
    m.eval()


def write_one_norm(m: Any) -> None:
    with torch.no_grad():
        m.model.layers[0].input_layernorm.weight.mul_(torch.linspace(0.5, 2, 32))


def assign(m: Any) -> None:
    m.load_state_dict({name: tensor.clone() for name, tensor in other().state_dict().items()}, assign=True)


def replace_layer(m: Any) -> None:
    m.model.layers[1] = copy.deepcopy(m.model.layers[2])
    m.model.layers[1].self_attn.layer_idx = 1


def replace_forward(m: Any) -> None:
    mlp = m.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, x: x, mlp)


def scaled(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return out * 1.5


CHANGES: dict[str, Callable[[Any], object]] = {
    "load_state_dict": lambda m: m.load_state_dict(other().state_dict()),
    "assign": assign,
    "a training step": train,
    "one norm": write_one_norm,
    "a tensor in place of another": lambda m: setattr(m.model.norm.weight, "data", torch.linspace(0.5, 2, 32)),
    "a layer": replace_layer,
    "an MLP": lambda m: setattr(m.model.layers[2], "mlp", copy.deepcopy(m.model.layers[1].mlp)),
    "the output layer": lambda m: m.set_output_embeddings(copy.deepcopy(other().get_output_embeddings())),
    "a hook": lambda m: m.model.layers[1].mlp.register_forward_hook(scaled),
    "a forward of its own": replace_forward,
}
KINDS = {"look-ups": looked_up, "a head": headed, "a draft": with_draft}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_changed_weights_is_used(kind: str, change: str):
    m = model()
    with KINDS[kind](m) as g:
        before = said(g)
        again = said(g)
        assert again.tokens == before.tokens and again.stats.cached_tokens >= ALL - 1, "unchanged weights still hit"
        CHANGES[change](m)
        after = said(g)
        assert after.stats.cached_tokens == 0
        with KINDS[kind](copy.deepcopy(m)) as fresh:
            wanted = said(fresh)
        assert after.tokens == wanted.tokens and after.tokens != before.tokens
        assert drafts(after) == drafts(wanted), "features and keys of drafts are new, too"
        hit = said(g)
        assert hit.tokens == after.tokens and hit.stats.cached_tokens >= ALL - 1, "and are kept from then on"


def test_changes_of_a_draft():
    """Its keys are read again; the target's texts stay."""
    m, draft = model(), other(5)
    with load(m, ("draft_model," + LENGTH, draft), prefix_cache=True) as g:
        before = said(g)
        draft.load_state_dict(m.state_dict())
        after = said(g)
        assert after.tokens == before.tokens
        assert after.stats.target_forwards < before.stats.target_forwards
        with load(m, ("draft_model," + LENGTH, m), prefix_cache=True) as fresh:
            assert drafts(after) == drafts(said(fresh))


def test_generators_that_share_a_target_all_notice():
    m = model()
    with load_many(m, ["prompt_lookup", "none"], prefix_cache=True)[0] as first:
        second = load(first, "none", prefix_cache=True)
        assert said(first).tokens == said(second).tokens
        m.load_state_dict(other().state_dict())
        found = [said(g) for g in (first, second)]
        assert [each.stats.cached_tokens for each in found] == [0, 0]
        with load(copy.deepcopy(m), "none") as fresh:
            assert found[0].tokens == found[1].tokens == said(fresh).tokens
        second.close()


def test_a_prompt_that_is_read_in_part_is_read_again():
    """A request with the same prompt, made after the change, may join it."""
    m, params = model(), SamplingParams(max_new_tokens=NEW)
    with load(m, "none", prefix_cache=True, max_prefill_tokens=16) as g:
        [busy] = g.submit([[3, 4]], SamplingParams(max_new_tokens=60))
        g.engine.step()
        [early] = g.submit([PROMPT], params)
        g.engine.step()
        assert g.engine.prefilling == 1
        m.load_state_dict(other().state_dict())
        [late] = g.submit([PROMPT], params)
        g.engine.run([busy, early, late])
        with load(copy.deepcopy(m), "none") as fresh:
            wanted = said(fresh).tokens
        assert early.tokens == late.tokens == wanted


def test_a_call_forgets_what_torch_does_not_show():
    m = model()
    with looked_up(m) as g:
        before = said(g)
        for parameter in m.parameters():
            parameter.data.mul_(1.1).add_(torch.linspace(0, 0.3, parameter.shape[-1]))
        g.clear_cache()
        after = said(g)
        plain = {name: tensor.clone() for name, tensor in m.state_dict().items()}
    fresh = model()
    fresh.load_state_dict(plain)
    with looked_up(fresh) as g:
        assert after.tokens == said(g).tokens != before.tokens and after.stats.cached_tokens == 0


def test_a_vocabulary_of_another_size_is_refused():
    m = model()
    with looked_up(m) as g:
        said(g)
        m.resize_token_embeddings(tiny.VOCAB + 8)
        for _ in range(2):
            with pytest.raises(ModelError, match=f"had {tiny.VOCAB} tokens when .* has {tiny.VOCAB + 8} now.*again"):
                said(g)
        m.resize_token_embeddings(tiny.VOCAB)
        assert len(said(g).tokens) == NEW, "and the generator is usable when it is back"


@needs_compiler
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_quantised_weights_of_a_changed_model_are_refused(weights: str):
    m = model()
    with load(m, "prompt_lookup", weights=weights, prefix_cache=True) as g:
        before = said(g).tokens
        assert said(g).tokens == before
        write_one_norm(m)
        with pytest.raises(ModelError, match=f"have changed since they were quantised to {weights}: load it again"):
            said(g)
    m = model()
    with load(m, "prompt_lookup", weights=weights) as g:
        m.to("meta")
        assert said(g).tokens == before, "a model that is moved away is not needed"
        del m
        gc.collect()
        assert said(g).tokens == before


@pytest.mark.skipif(not packing_works(), reason="needs oneDNN")
def test_the_output_layer_in_int8_follows_its_weights():
    m = tiny.build("llama", hidden_size=256, intermediate_size=32, vocab_size=640, head_dim=64)
    version = [0]
    parts = with_int8_output(parts_of(m), m, lambda: version[0])
    states = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    old = parts.head(states)
    with torch.no_grad():
        m.get_output_embeddings().weight.neg_()
    assert torch.equal(parts.head(states), old)
    version[0] += 1
    assert torch.allclose(parts.head(states), -old, atol=0.05 * float(old.abs().max()))


class Adapter(nn.Linear):
    """Like PEFT's layers, which say in attributes which adapters they add."""


def test_adapters_that_are_switched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Adapter, "__module__", "peft.tuners.lora.layer")
    net = nn.Sequential(Adapter(4, 4), nn.ReLU())
    vars(net[0])["_active_adapter"] = ["default"]
    state = WeightState(net)
    assert state.same(net)
    vars(net[0])["_active_adapter"] = ["other"]
    assert not state.same(net) and not state.same_structure(net)


def test_a_state_keeps_nothing_alive_and_knows_a_new_tensor_in_an_old_place():
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    state, gone = WeightState(net), weakref.ref(net[0])
    assert state.same(net) and state.same(net)
    net[0] = nn.Linear(64, 64)
    gc.collect()
    assert gone() is None and not state.same_structure(net)
    state = WeightState(net)
    for _ in range(5):  # an allocator gives freed memory out again
        first = net[0].weight.detach().clone()
        net.load_state_dict({**net.state_dict(), "0.weight": first}, assign=True)
        del first
        assert not state.same(net) and not state.same_structure(net)
    state = WeightState(net)
    with torch.no_grad():
        net[0].bias.add_(1)
    assert state.same_structure(net) and not state.same(net)
