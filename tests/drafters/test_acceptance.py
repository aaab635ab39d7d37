"""What the bundled heads are worth: off-by-one errors are lossless and silent, and lower it.

The figures were measured when the heads were shipped; a fault of position, shift, norm or layer costs more than the
three percent that are allowed here. In sampled rows, so does the noise of another position.
"""

import functools
import json
from pathlib import Path

import pytest

import foredraft
from foredraft.engine.generator import Generator, Result
from foredraft.engine.policy import Constant
from foredraft.model.native.linear import NativeLinear
from native import needs_compiler

SHIPPED = json.loads((Path(__file__).parent / "acceptance.json").read_text("utf-8"))
PROMPTS = [
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""',
    "import os\n\n\ndef read_lines(path):",
    "class Stack:\n    def __init__(self):",
    'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number.\n    >>> is_prime(7)\n    True\n    """',
    [{"role": "user", "content": "Tom has 12 apples. He eats 3 and buys 5 more. How many apples does he have?"}],
    [{"role": "user", "content": "A train travels 60 miles in an hour. How far does it travel in 4 hours?"}],
    [{"role": "user", "content": "What is the capital of France?"}],
    "The purpose of this module is to",
]


EVERY = pytest.mark.parametrize(
    ("weights", "spec", "temperature"),
    [
        pytest.param(weights, spec, heat, marks=[needs_compiler] if weights == "int8" else [])
        for weights, specs in SHIPPED.items()
        for spec, heats in specs.items()
        for heat in heats
    ],
)
"""Heads in float32 on transformers, and in int8 on the native engine."""


def loaded(weights: str, spec: str, fast: bool = True) -> Generator:
    """``fast`` False: heads stay in float32 also beside a quantised target."""
    precision = {"dtype": "float32"} if weights == "float32" else {"weights": weights}
    return foredraft.load("sample", spec, device="cpu", fast=fast, **precision)


@functools.cache
def results(weights: str, spec: str, temperature: str, fast: bool = True) -> list[Result]:
    g = loaded(weights, spec, fast)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "temperature": float(temperature), "seed": 0}
    if spec == "none":
        return g.batch(PROMPTS, **options)
    depth = g.engine.drafter.needs.longest
    fixed = foredraft.load(g.engine.target, g.engine.drafter, tokenizer=g.tokenizer.inner, policy=Constant(depth))
    return fixed.batch(PROMPTS, **options)


def length(found: list[Result]) -> float:
    """Tokens per forward."""
    return sum(len(r.tokens) for r in found) / sum(r.stats.target_forwards for r in found)


@pytest.mark.slow
@EVERY
def test_the_bundled_heads_accept_as_much_as_when_they_were_shipped(weights: str, spec: str, temperature: str):
    assert length(results(weights, spec, temperature)) > 0.97 * SHIPPED[weights][spec][temperature]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize(
    "spec", [spec for spec in SHIPPED["int8"] if spec.startswith(("eagle", "medusa", "blockwise"))]
)
def test_heads_in_int8_accept_as_much_as_the_same_heads_in_floats(spec: str, temperature: str):
    """For one target, which is in int8 both times."""
    for fast in (True, False):
        modules = loaded("int8", spec, fast).engine.drafter._net.modules()
        assert any(isinstance(module, NativeLinear) for module in modules) == fast
    kernels, floats = (results("int8", spec, temperature, fast) for fast in (True, False))
    assert [r.tokens for r in kernels] == [r.tokens for r in floats]
    assert length(kernels) > 0.98 * length(floats)


@pytest.mark.slow
@EVERY
def test_they_say_what_the_model_says(weights: str, spec: str, temperature: str):
    plain = results(weights, "none", temperature)
    assert [r.tokens for r in results(weights, spec, temperature)] == [r.tokens for r in plain]
