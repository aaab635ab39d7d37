"""Plain decoding of a tiny model that can chat, a file to write to, and files that are written."""

from pathlib import Path
from typing import Any

import pytest
from bench_cases import TEMPLATE, Write, write_lines

import tiny
from foredraft.bench.measure.arms import LoopArm
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def plain() -> LoopArm:
    inner = tiny.tokenizer()
    inner.chat_template = TEMPLATE
    return LoopArm("none", tiny.generator(CausalLM(tiny.build()), tokenizer=Tokenizer(inner)), 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run.jsonl"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of these lines, and returns its path."""

    def write(*rows: Any, name: str = "p.jsonl", end: str = "\n") -> Path:
        return write_lines(tmp_path / name, rows, end)

    return write
