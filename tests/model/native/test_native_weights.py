import pytest
import torch

from foredraft.core.errors import ModelError
from foredraft.model.native.library import MINIMA, library
from foredraft.model.native.weights import Codes, PackedMatrix
from native import needs_compiler

pytestmark = needs_compiler


def product(matrix: PackedMatrix, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """The kernels' product of one matrix."""
    engine = library().engine_new()
    y = torch.empty(len(x), matrix.width)
    x = x.contiguous()
    fault = library().product(engine, matrix.struct(), x.data_ptr(), len(x), y.data_ptr(), matrix.width, threads)
    library().engine_free(engine)
    assert fault == 0
    return y[:, : matrix.outputs]


def reference(matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
    """The product in float64, with the inputs rounded as the kernels round them."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    most = padded.abs().amax(-1, keepdim=True)
    codes = (padded * torch.where(most > 0, 127 / most, 0)).round().double()
    rounded = (codes * (most / 127)).flatten(1)[:, : x.shape[1]]
    y = rounded @ matrix.dequantised().double().T
    return y if matrix.bias is None else y + matrix.bias[: matrix.outputs].double()


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (7, 5), (50, 131), (1, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_equal_those_of_dequantised_weights(outputs, inputs, bits):
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    matrix = PackedMatrix.of_floats(library(), weight, bias, bits)
    for rows in (1, 2, 3, 7, 8, 9, 70):
        x = torch.randn(rows, inputs) * torch.rand(rows, 1) * 10
        torch.testing.assert_close(product(matrix, x).double(), reference(matrix, x), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_codes_do_not_overflow(bits):
    weight = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0).expand(32, 64)
    matrix = PackedMatrix.of_floats(library(), weight, None, bits)
    x = weight[:1] * 100
    torch.testing.assert_close(product(matrix, x).double(), reference(matrix, x), atol=0.01, rtol=1e-5)


def test_rounding_errors_are_those_of_the_number_of_bits():
    weight = torch.randn(64, 256)
    for bits, most in ((4, 0.09), (8, 0.008)):
        error = (PackedMatrix.of_floats(library(), weight, None, bits).dequantised() - weight).square().mean().sqrt()
        assert error < most


def test_zero_and_constant_weights_are_exact():
    weight = torch.cat([torch.zeros(3, 64), torch.full((3, 64), 0.5), torch.full((3, 64), -2.0)])
    for bits in (4, 8):
        found = PackedMatrix.of_floats(library(), weight, None, bits).dequantised()
        torch.testing.assert_close(found, weight, atol=0, rtol=1e-3)


def codes_of(kind: str, outputs: int = 40, inputs: int = 96) -> Codes:
    most, zero = {"Q4_0": (15, 8), "Q4_1": (15, None), "Q5_0": (31, 16), "Q5_1": (31, None), "Q8_0": (255, 128)}[kind]
    codes = torch.randint(0, most + 1, (outputs, inputs), dtype=torch.uint8)
    scales = torch.randn(outputs, inputs // 32).half()
    minima = torch.randn(outputs, inputs // 32).half() if zero is None else scales * -zero
    return Codes(codes, scales, minima)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_of_files_are_stored_without_another_rounding(kind):
    codes = codes_of(kind)
    matrix = PackedMatrix.of_codes(library(), codes)
    assert matrix.bits == int(kind[1])
    assert (matrix.form.zero == MINIMA) == kind.endswith("_1")
    torch.testing.assert_close(matrix.dequantised(), codes.dequantised(), atol=1e-6, rtol=1e-6)
    x = torch.randn(5, 96)
    torch.testing.assert_close(product(matrix, x).double(), reference(matrix, x), atol=2e-3, rtol=1e-4)


def test_floats_that_are_on_a_grid_of_four_bits_get_their_codes_back():
    codes = codes_of("Q4_1")
    codes.scales.abs_()
    codes.codes[:, ::32], codes.codes[:, 1::32] = 0, 15  # as the extremes of each group have
    found = PackedMatrix.of_floats(library(), codes.dequantised(), None, 4).dequantised()
    torch.testing.assert_close(found, codes.dequantised(), atol=2e-3, rtol=2e-3)


def test_codes_that_do_not_fit_are_refused():
    codes = codes_of("Q4_0")
    with pytest.raises(ModelError, match="one scale and one minimum for each group of 32 inputs"):
        PackedMatrix.of_codes(library(), Codes(codes.codes[:, :90], codes.scales, codes.minima))
    with pytest.raises(ModelError, match="one scale and one minimum"):
        PackedMatrix.of_codes(library(), Codes(codes.codes, codes.scales[:, :1], codes.minima))


def test_a_row_outside_of_a_matrix_is_refused():
    matrix = PackedMatrix.of_floats(library(), torch.randn(8, 32), None, 8)
    for bad in (-1, 8):
        with pytest.raises(ModelError, match="a token outside of the vocabulary"):
            matrix.rows(torch.tensor([0, bad]))
