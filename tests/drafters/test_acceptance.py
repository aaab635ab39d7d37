"""What the bundled heads are worth: off-by-one errors are lossless and silent, and lower it (heads.md 6.1).

The figures were measured when the heads were shipped; a fault of position, shift, norm or layer costs more than the
three percent that are allowed here. In sampled rows, so does the noise of another position.
"""

import functools
import json
from pathlib import Path

import pytest

import foredraft
from foredraft.engine.generator import Result
from foredraft.engine.policy import Constant
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


@functools.cache
def results(weights: str, spec: str, temperature: str) -> list[Result]:
    precision = {"dtype": "float32"} if weights == "float32" else {"weights": weights}
    g = foredraft.load("sample", spec, device="cpu", **precision)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "temperature": float(temperature), "seed": 0}
    if spec == "none":
        return g.batch(PROMPTS, **options)
    depth = g.engine.drafter.needs.longest
    fixed = foredraft.load(g.engine.target, g.engine.drafter, tokenizer=g.tokenizer.inner, policy=Constant(depth))
    return fixed.batch(PROMPTS, **options)


@pytest.mark.slow
@EVERY
def test_the_bundled_heads_accept_as_much_as_when_they_were_shipped(weights: str, spec: str, temperature: str):
    said = results(weights, spec, temperature)
    length = sum(len(r.tokens) for r in said) / sum(r.stats.target_forwards for r in said)
    assert length > 0.97 * SHIPPED[weights][spec][temperature]


@pytest.mark.slow
@EVERY
def test_they_say_what_the_model_says(weights: str, spec: str, temperature: str):
    plain = results(weights, "none", temperature)
    assert [r.tokens for r in results(weights, spec, temperature)] == [r.tokens for r in plain]
