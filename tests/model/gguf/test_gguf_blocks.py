"""Blocks of GGUF tensors against the gguf package's arithmetic, to the last bit."""

import gguf
import numpy as np
import pytest
import torch

from foredraft.core.errors import ModelError
from foredraft.model.gguf.blocks import KEPT, KINDS, BlockType, dequantize, number_of
from foredraft.model.native import library as c
from foredraft.model.native.build import compiler
from foredraft.model.native.weights import Blocks, PackedMatrix

needs_compiler = pytest.mark.skipif(compiler() is None, reason="the kernels need a C compiler")
NUMBERS = {kind.name: number for number, kind in KINDS.items()}
OWN = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
PACKAGE = ["IQ4_NL", "IQ4_XS", "IQ2_XXS", "MXFP4", "TQ1_0"]


def raw(kind: BlockType, rows: int = 7, blocks: int = 3) -> torch.Tensor:
    """Rows of blocks with every pattern of bits, but with scales that are finite."""
    data = torch.randint(0, 256, (rows, blocks, kind.bytes), dtype=torch.uint8)
    scales = {
        "Q2_K": [81, 83],
        "Q3_K": [109],
        "Q6_K": [209],
        "IQ4_XS": [1],
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
    assert all(KINDS[number_of(kind)] is kind for kind in KINDS.values())


@needs_compiler
def test_the_types_that_the_kernels_store_as_they_are():
    forms = {}
    for number, kind in KINDS.items():
        form = c.Form()
        if c.library().block_form(number, form) == 0:
            forms[kind.name] = form.bits
    assert forms == KEPT


@pytest.mark.parametrize("name", [*OWN, *PACKAGE])
def test_floats(name: str):
    kind = KINDS[NUMBERS[name]]
    data = raw(kind)
    assert torch.equal(dequantize(kind, data, torch.float32), reference(kind, data))
    half = dequantize(kind, data, torch.bfloat16)
    assert torch.equal(half, reference(kind, data).bfloat16()), "rounded once"


@needs_compiler
@pytest.mark.parametrize("name", KEPT)
def test_the_kernels_have_the_weights_without_another_rounding(name: str):
    kind = KINDS[NUMBERS[name]]
    data, other = raw(kind, 21, 16), raw(kind, 5, 16)
    blocks = Blocks("w", NUMBERS[name], (data, other), 16 * kind.values, torch.arange(26).flip(0))
    expected = torch.cat([reference(kind, data), reference(kind, other)]).flip(0)
    matrix = PackedMatrix.of_blocks(c.library(), [blocks])
    assert matrix.bits == KEPT[name] and torch.equal(matrix.dequantised(), expected)
    twice = PackedMatrix.of_blocks(c.library(), [blocks, Blocks("w", NUMBERS[name], (other,), blocks.inputs)])
    assert torch.equal(twice.dequantised(), torch.cat([expected, reference(kind, other)]))


@needs_compiler
@pytest.mark.parametrize("name", KEPT)
def test_a_scale_that_is_no_number_is_refused(name: str):
    kind = KINDS[NUMBERS[name]]
    data = raw(kind, 3, 8)
    where = {"Q3_K": 108, "Q6_K": 208}.get(name, 0)
    data[1, kind.bytes * 5 + where : kind.bytes * 5 + where + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    with pytest.raises(ModelError, match="The weight w has NaN or infinite values"):
        PackedMatrix.of_blocks(c.library(), [Blocks("w", NUMBERS[name], (data,), 8 * kind.values)])


@pytest.mark.parametrize("name", OWN)
def test_more_weights_than_are_read_at_a_time(name: str):
    kind = KINDS[NUMBERS[name]]
    data = raw(kind, rows=40, blocks=40)
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
