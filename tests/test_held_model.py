"""A user's model while generators hold it: it stays whole and usable, and it is let go when nobody uses it any more."""

import contextlib
import copy
import gc
import io
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import foredraft
import tiny
from foredraft.compose.load import load
from foredraft.core.errors import ModelError, UsageError
from foredraft.model.linear.packed import PackedLinear, packing_works

PROMPT = [5, 6, 7, 5, 6, 7]


def said(g: foredraft.Generator) -> list[int]:
    return g.generate(PROMPT, max_new_tokens=6).tokens


def by_itself(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


def packed(model: PreTrainedModel) -> int:
    return sum("Packed" in type(module).__name__ for module in model.modules())


def saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    assert "slots" not in (folder / "config.json").read_text()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def pickled(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def restored(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    other = tiny.build("gpt2" if model.config.model_type == "gpt2" else "llama", seed=77)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 has Conv1D layers and a tied output layer
@pytest.mark.parametrize("way", [saved, pickled, restored, lambda model, _: copy.deepcopy(model)])
def test_a_held_model_is_saved_pickled_and_copied_as_a_whole(name: str, way: Any, tmp_path: Path):
    model = tiny.build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    logits = by_itself(model)
    with load(model, "prompt_lookup") as g:
        wanted = said(g)
        assert packed(model) > 0 or not packing_works()
        other = way(model, tmp_path)
        assert torch.equal(by_itself(other), logits), "and it runs by itself"
        with load(other, "none") as theirs:
            assert said(theirs) == wanted
        assert torch.allclose(by_itself(model), logits, atol=1e-4), "so does the held one"
        state = model.state_dict()
        assert state.keys() == before.keys() and all(torch.equal(state[key], before[key]) for key in before)
        assert all(torch.equal(each, before[key]) for key, each in model.named_parameters())
    assert packed(model) == 0 and torch.equal(by_itself(model), logits)


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_generator_is_neither_pickled_nor_copied(way: Any):
    with load(tiny.build("llama"), "none") as g:
        with pytest.raises(TypeError, match="load the model in each process"):
            way(g)
        assert said(g)


def test_a_model_of_our_own_is_saved_as_a_whole_too(tmp_path: Path):
    tiny.build("llama").save_pretrained(tmp_path / "a")
    with load(str(tmp_path / "a"), "none", device="cpu") as g:
        g.engine.target.model.save_pretrained(tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_held_model_can_be_trained_and_what_it_has_learned_is_what_is_generated():
    model = tiny.build("llama")
    with load(model, "prompt_lookup") as g:
        before = said(g)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        (-model(torch.tensor([PROMPT])).logits.log_softmax(-1)[..., 9].sum()).backward()
        assert all(each.grad is not None for each in model.parameters())
        optimizer.step()
        wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0, len(PROMPT) :].tolist()
        assert said(g) == wanted != before


def test_what_generating_cannot_go_along_with_is_said_in_a_sentence():
    model = tiny.build("llama")
    g = load(model, "none")
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        said(g)
    model.eval().to(torch.bfloat16)
    assert packed(model) == 0
    with pytest.raises(ModelError, match=r"is now on cpu in torch.bfloat16: call close\(\)"):
        said(g)
    with load(model, "none") as other:
        assert len(said(other)) == 6
    with pytest.raises(UsageError, match="closed"):
        said(g)


def test_a_model_that_is_converted_while_a_text_streams_says_so_in_a_sentence():
    model = tiny.build("llama")
    with load(model, "none") as g:
        stream = g.stream(PROMPT, max_new_tokens=6)
        next(stream)
        model.double()
        with pytest.raises(ModelError, match=r"is now on cpu in torch.float64: call close\(\)"):
            list(stream)


@pytest.mark.skipif(not packing_works(), reason="this build of torch has no packed weights")
def test_a_model_that_is_converted_back_is_packed_again():
    model = tiny.build("llama")
    with load(model, "none") as g:
        wanted, count = said(g), packed(model)
        model.double().float()
        assert packed(model) == 0 and said(g) == wanted and packed(model) == count > 0
    assert packed(model) == 0


def test_release_waits_for_a_forward_that_another_thread_is_in():
    model = tiny.build("llama")
    g = load(model, "none")
    entered, seen = threading.Event(), []
    releasing = threading.Thread(target=lambda: (entered.wait(), foredraft.release(model)))

    def inside(*_: object) -> None:
        entered.set()
        releasing.join(0.2)  # longer than it takes to release a model of this size
        seen.append(packed(model))

    releasing.start()
    count = packed(model)
    hook = model.model.register_forward_hook(inside)
    with contextlib.suppress(ModelError):
        said(g)
    hook.remove()
    releasing.join()
    assert seen[0] == count and packed(model) == 0
    g.close()


def test_a_dropped_generator_lets_the_model_go(caplog):
    caplog.set_level(logging.INFO)  # pytest keeps the records, which must not keep the generator
    model = tiny.build("llama")
    wanted = said(g := load(model, "prompt_lookup"))
    assert packed(model) > 0 or not packing_works()
    del g
    gc.collect()
    assert packed(model) == 0 and type(model.lm_head) is torch.nn.Linear
    assert "_foredraft" not in vars(model)
    assert model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0, 6:].tolist() == wanted
    with load(model, "none") as g:
        assert said(g) == wanted


def test_a_cell_that_is_run_twice_and_two_generators_at_once():
    model = tiny.build("llama")
    g = load(model, "prompt_lookup")
    wanted = said(g)
    g = load(model, "prompt_lookup")  # the first one lives while this one is made
    gc.collect()
    assert said(g) == wanted
    with load(model, "none") as other:
        assert other.engine.target is g.engine.target, "packed once, with one set of hooks"
        assert said(other) == wanted
    assert said(g) == wanted, "closing one of them leaves the other as it is"
    g.close()
    g.close()
    assert packed(model) == 0


def test_release_takes_everybody_off():
    model = tiny.build("llama").train()
    foredraft.release(model)
    a, b = load(model, "none"), load(model, "prompt_lookup")
    foredraft.release(model)
    assert packed(model) == 0 and model.training
    for g in (a, b):
        with pytest.raises(ModelError, match="released or closed"):
            said(g)
        g.close()
    with load(model, "none") as g:
        assert len(said(g)) == 6
    with pytest.raises(ModelError, match="release takes"):
        foredraft.release("sample")


@pytest.mark.parametrize("call", ["generate", "stream", "batch", "beam_search"])
def test_after_close_every_call_says_so(call: str):
    with load(tiny.build("llama"), "none") as g:
        pass
    with pytest.raises(ModelError, match="closed"):
        getattr(g, call)([PROMPT] if call == "batch" else PROMPT)
    with pytest.raises(ModelError, match="This generator is closed"), g:
        pass


def test_inside_transformers_generate_a_model_in_training_stays_so():
    model = tiny.build("llama").train()
    custom = foredraft.speculative("prompt_lookup", fast=True)
    ids = torch.tensor([PROMPT])
    first = model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=custom)
    assert model.training and isinstance(model.lm_head, PackedLinear) == packing_works()
    foredraft.release(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=custom), first)
    model.double()
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, custom_generate=custom), first)
    custom.close()
    assert model.training and packed(model) == 0
