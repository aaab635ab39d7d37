"""Plain decoding of a tiny model that can chat, and a file to write to."""

from pathlib import Path

import pytest
from bench_cases import TEMPLATE

import tiny
from foredraft.bench.measure.arms import LoopArm
from foredraft.model.hf import CausalLM
from foredraft.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def plain() -> LoopArm:
    inner = tiny.tokenizer()
    inner.chat_template = TEMPLATE
    return LoopArm("none", tiny.generator(CausalLM(tiny.build()), tokenizer=Tokenizer(inner)), 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run.jsonl"
