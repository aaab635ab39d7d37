"""Blocks of GGUF tensors against the gguf package's arithmetic, to the last bit."""

import gguf
import numpy as np
import pytest
import torch

from foredraft.core.errors import ModelError
from foredraft.model.gguf.blocks import KINDS, BlockType, dequantize, is_kept, unpack
from foredraft.model.native.weights import GROUP

NUMBERS = {kind.name: number for number, kind in KINDS.items()}
KEPT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
OWN = [*KEPT, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
PACKAGE = ["IQ4_NL", "IQ2_XXS", "MXFP4", "TQ1_0"]


def raw(kind: BlockType, rows: int = 7, blocks: int = 3) -> torch.Tensor:
    """Rows of blocks with every pattern of bits, but with scales that are finite."""
    data = torch.randint(0, 256, (rows, blocks, kind.bytes), dtype=torch.uint8)
    scales = {
        "Q2_K": [81, 83],
        "Q3_K": [109],
        "Q6_K": [209],
        "Q4_1": [1, 3],
        "Q5_1": [1, 3],
        "Q4_K": [1, 3],
        "Q5_K": [1, 3],
    }
    for high in scales.get(kind.name, [1]):
        data[..., high] &= 0b10110111  # the exponent of a float16 below 2**6
    return data.view(rows, -1)


def reference(kind: BlockType, data: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType(NUMBERS[kind.name])))


def test_the_table_of_types_is_the_package_s():
    sizes = {int(number): size for number, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (kind.values, kind.bytes) for number, kind in KINDS.items() if number in sizes} == {
        number: size for number, size in sizes.items() if number in KINDS
    }
    assert [kind.name for kind in KINDS.values() if is_kept(kind)] == KEPT


@pytest.mark.parametrize("name", [*OWN, *PACKAGE])
def test_floats(name: str):
    kind = KINDS[NUMBERS[name]]
    data = raw(kind)
    assert torch.equal(dequantize(kind, data, torch.float32), reference(kind, data))
    half = dequantize(kind, data, torch.bfloat16)
    assert torch.equal(half, reference(kind, data).bfloat16()), "rounded once"


@pytest.mark.parametrize("name", KEPT)
def test_codes_are_the_weights_without_another_rounding(name: str):
    kind = KINDS[NUMBERS[name]]
    data = raw(kind)
    blocks = unpack(kind, data)
    assert blocks is not None
    assert blocks.codes.dtype == torch.uint8 and blocks.codes.shape == (7, 3 * GROUP)
    assert blocks.scales.dtype == blocks.minima.dtype == torch.float16 and blocks.scales.shape == (7, 3)
    assert int(blocks.codes.max()) == (255 if name == "Q8_0" else 31 if "5" in name else 15)
    assert torch.equal(blocks.dequantised(), reference(kind, data))
    exact = blocks.codes.double() * blocks.scales.double().repeat_interleave(GROUP, 1)
    exact += blocks.minima.double().repeat_interleave(GROUP, 1)
    assert torch.equal(blocks.dequantised(), exact.float())


@pytest.mark.parametrize("name", KEPT)
def test_more_weights_than_are_read_at_a_time(name: str):
    kind = KINDS[NUMBERS[name]]
    data = raw(kind, rows=40, blocks=40)
    blocks = unpack(kind, data)
    assert blocks is not None
    assert torch.equal(blocks.dequantised(), reference(kind, data))
    assert torch.equal(dequantize(kind, data, torch.float32), reference(kind, data))


def test_a_scale_too_large_for_its_minimum_is_left_to_floats():
    kind = KINDS[NUMBERS["Q8_0"]]
    array = np.full((1, 32), 1e5, dtype=np.float32)
    data = torch.from_numpy(gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0))
    assert unpack(kind, data) is None
    assert torch.equal(dequantize(kind, data, torch.float32), reference(kind, data))


@pytest.mark.parametrize("name, dtype", [("F32", np.float32), ("F16", np.float16), ("F64", np.float64)])
def test_plain_numbers(name: str, dtype: type):
    array = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
    data = torch.from_numpy(array.view(np.uint8))
    assert torch.equal(dequantize(KINDS[NUMBERS[name]], data, torch.float32), torch.from_numpy(array).float())


def test_bfloat16():
    weights = torch.randn(3, 5).bfloat16()
    assert torch.equal(dequantize(KINDS[NUMBERS["BF16"]], weights.view(torch.uint8), torch.float32), weights.float())


def test_integers_are_no_weights():
    with pytest.raises(ModelError, match="holds weights of the type I32"):
        dequantize(KINDS[NUMBERS["I32"]], torch.zeros(1, 4, dtype=torch.uint8), torch.float32)
