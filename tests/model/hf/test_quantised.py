"""Quantised targets: greedy output is the model's own, and weights are counted as they are stored."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, QuantoConfig, TorchAoConfig

import foredraft
import random_heads
import tiny
from foredraft.core.errors import ModelError
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.model.hf.causal_lm import CausalLM, acquire
from foredraft.model.hf.head_parts import output_weight
from foredraft.model.memory import is_plain, stored_bytes
from foredraft.model.partial.skipping import layers_of
from foredraft.train.heads.init import new_eagle3, new_medusa

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
LINEAR = 3 * (128 * 128 * 2 + 2 * 64 * 128 + 3 * 128 * 256)  # weights in the layers of this shape


def torchao(name: str) -> Any:
    return TorchAoConfig(getattr(importlib.import_module("torchao.quantization"), name)())


def bits(count: int, **options: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(**{f"load_in_{count}bit": True}, **options)


CONFIGS: dict[str, tuple[str, Callable[[], Any], float]] = {
    "bitsandbytes 4": ("bitsandbytes", lambda: bits(4, bnb_4bit_compute_dtype=torch.float32), 0.5),
    "bitsandbytes 8": ("bitsandbytes", lambda: bits(8, llm_int8_threshold=0.0), 1.0),
    "torchao int8": ("torchao", lambda: torchao("Int8WeightOnlyConfig"), 1.0),
    "torchao float8": ("torchao", lambda: torchao("Float8WeightOnlyConfig"), 1.0),
    "quanto": ("optimum.quanto", lambda: QuantoConfig(weights="int8"), 1.0),
}
"""By name: the package, the config, and bytes per weight."""

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def load(folder: Path, config: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target and a draft model."""
    place = tmp_path_factory.mktemp("models")
    tiny.build("llama", **SHAPE).save_pretrained(place / "target")
    tiny.build("llama", seed=5).save_pretrained(place / "draft")
    return place / "target", place / "draft"


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_is_that_of_generate(name: str, folders: tuple[Path, Path]):
    package, config, size = CONFIGS[name]
    pytest.importorskip(package)
    model = load(folders[0], config())
    prompts = tiny.prompts((5, 17))
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
            for ids in prompts
        ]
    target = acquire(model, fast=True)
    head = Eagle3Drafter(Options(nodes=12, depth=3), random_heads.eagle3(target, taps=(0, 1, 3)))
    for drafter in ("none", "prompt_lookup", f"draft_model:{folders[1]}", "early_exit,assistant_early_exit=1", head):
        with foredraft.load(model, drafter) as g:
            assert [each.tokens for each in g.generate(prompts, max_new_tokens=16)] == expected, drafter
    assert target.packed_layers == 1, "the output layer alone is not quantised"
    rest = 4 * (tiny.VOCAB * 128 + 128 * 7)
    assert LINEAR * size <= target.weight_bytes - rest <= LINEAR * size * 1.1
    assert layers_of(target).first(1).cost == pytest.approx(1 - LINEAR * size * 2 / 3 / target.weight_bytes, abs=0.05)
    target.release()


def test_outliers_by_forward_are_refused(folders: tuple[Path, Path]):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ModelError, match="llm_int8_threshold=0.0"):
        foredraft.load(str(folders[0]), "none", device="cpu", model_options={"quantization_config": bits(8)})


class EightBits(nn.Module):
    """A linear layer with an integer parameter, which is not the weight."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.scale = plain.weight.detach().abs().max() / 127
        numbers = (plain.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.bias = plain.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def test_new_heads_start_from_what_a_quantised_output_layer_computes():
    model = tiny.build("llama", num_hidden_layers=3)
    plain = model.lm_head.weight.detach().clone()
    assert torch.equal(output_weight(model), plain)
    model.lm_head.bias = nn.Parameter(torch.ones(tiny.VOCAB))
    layer: Any = EightBits(model.lm_head)
    model.lm_head = layer
    model.model.layers[2].mlp.up_proj = EightBits(model.model.layers[2].mlp.up_proj)  # type: ignore[union-attr]
    torch.testing.assert_close(output_weight(model), layer.weight * layer.scale, rtol=0, atol=1e-5)
    assert (output_weight(model) - plain).abs().max() <= layer.scale / 2 + 1e-5
    target = CausalLM(model)
    for head in new_medusa(target, 2, own_heads=True).heads:
        torch.testing.assert_close(head.weight, output_weight(model))
    assert new_eagle3(target, None).midlayer.mlp.up_proj.weight.abs().max() < 5, "integers are no weights"


def test_weights_of_two_parts_are_counted_and_not_packed():
    layer = nn.Linear(16, 8, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(8, 16), torch.ones(8, 16)))
    assert stored_bytes(layer) == 2 * 8 * 16 * 4 and not is_plain(layer.weight)
    model = tiny.build("llama")
    proj: Any = model.model.layers[0].mlp.up_proj
    before = stored_bytes(model)
    proj.weight = nn.Parameter(TwoTensor(proj.weight.detach(), proj.weight.detach()))
    assert stored_bytes(model) == before + proj.weight.nbytes
    target = CausalLM(model)
    assert target.packed_layers == CausalLM(tiny.build("llama")).packed_layers - 1
