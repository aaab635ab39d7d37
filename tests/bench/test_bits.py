"""``check --bits``: silent on a sound engine; a single planted bit is found and named."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import foredraft
import tiny
from foredraft.bench import bits
from foredraft.bench.bits import BitsCheck, check_bits
from foredraft.cli import main
from foredraft.core.drafter import StepOut
from foredraft.core.errors import OptionError
from foredraft.engine.generator import Generator
from foredraft.model.native.model import NativeLM
from foredraft.model.threads import kernel_threads
from native import needs_compiler

pytestmark = needs_compiler
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8] * 3, [9, 1], [3] * 6]


def loaded(drafter: str, weights: str = "int4") -> Generator:
    return foredraft.load(tiny.build("llama", seed=2, vocab_size=67), drafter, weights=weights)


def found(generator: Generator, tokens: int = 6) -> BitsCheck:
    return list(check_bits(generator, PROMPTS, tokens))[-1]


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_no_bit_of_the_engine_differs(weights: str):
    before = torch.get_num_threads()
    seen = found(loaded("prompt_lookup", weights))
    assert seen.passed and seen.first is None and torch.get_num_threads() == before
    drafts = dict.fromkeys(cell.drafts for cell in seen.cells)
    assert list(drafts) == ["plain rows", "chains", "trees", "prompt_lookup"]
    settings = {(cell.threads, cell.batch) for cell in seen.cells}
    assert settings == {(threads, batch) for threads in (1, 2) for batch in (1, 2, 4, 8, 16, 32)}
    assert all(cell.positions >= cell.batch for cell in seen.cells)
    assert sum(cell.positions for cell in seen.cells if cell.drafts == "trees") > 800


def planted(where: Callable[[StepOut], tuple[int, ...] | None]) -> Callable[..., StepOut]:
    """A forward of which one logit differs in its last bit, at this index if any."""
    before = NativeLM.compute

    def compute(self: NativeLM, *given: Any) -> StepOut:
        out = before(self, *given)
        if (index := where(out)) is not None:
            out.logits.view(torch.int32)[index] ^= 1
        return out

    return compute


@pytest.mark.parametrize(
    ("where", "drafts", "batch"),
    [
        (lambda out: (1, 0, 5) if len(out.logits) == 2 and out.logits.shape[1] == 1 else None, "plain rows", 2),
        (lambda out: (0, 1, 5) if out.logits.shape[1] > 1 else None, "chains", 1),
        (lambda out: (31, 0, 5) if len(out.logits) == 32 else None, "plain rows", 32),
        (lambda out: (0, 0, 5) if kernel_threads() == 2 else None, "plain rows", 1),
    ],
)
def test_one_bit_in_one_logit_is_found(where: Any, drafts: str, batch: int, monkeypatch: pytest.MonkeyPatch):
    generator = loaded("none")
    monkeypatch.setattr(NativeLM, "compute", planted(where))
    seen = found(generator)
    assert not seen.passed and seen.first is not None
    assert (seen.first.drafts, seen.first.batch, seen.first.logits, seen.first.token) == (drafts, batch, 1, 5)
    assert 0 < abs(seen.first.found - seen.first.expected) < 1e-6
    assert all(cell.different <= cell.positions for cell in seen.cells)


def test_a_cache_that_keeps_rejected_tokens_is_found(monkeypatch: pytest.MonkeyPatch):
    from foredraft.model.kv.cache import SlotCache

    generator = loaded("none")
    monkeypatch.setattr(SlotCache, "compact", lambda *args: None)
    wrong = {cell.drafts for cell in found(generator, 12).cells if cell.different}
    assert wrong == {"trees"}


def test_a_text_is_that_of_the_path():
    tree = tiny.TokenTree(torch.tensor([[9, 4, 5, 6, 0]]), torch.tensor([[-1, 0, 0, 1, -2]]), depth=2)
    assert bits.paths_of([7, 9], tree, 0) == {0: (7, 9), 1: (7, 9, 4), 2: (7, 9, 5), 3: (7, 9, 4, 6)}


def test_transformers_models_are_told_what_is_promised():
    with pytest.raises(OptionError, match="equal up to rounding.*--weights int4 or int8"):
        found(foredraft.load(tiny.build("llama"), "none"))


def test_the_command_prints_a_table_and_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bits, "BATCHES", (1, 2))
    arguments = ["check", "-m", "sample", "-d", "prompt_lookup", "--weights", "int4", "--bits", "--output-tokens", "4"]
    assert main([*arguments, "--count", "2"]) == 0
    out = capsys.readouterr().out
    assert "batch 2" in out and "positions have the bits of plain decoding's." in out
    monkeypatch.setattr(NativeLM, "compute", planted(lambda out: (0, 0, 5) if len(out.logits) == 2 else None))
    assert main([*arguments, "--count", "2"]) == 1
    assert "positions differ from plain decoding, first with plain rows, 2 rows and 1 thread" in capsys.readouterr().out
    assert main([*arguments, "--count", "2", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["lossless"] is False and told["different"] > 0 and told["first"]["token"] == 5
    assert main(["check", "-m", "sample", "-d", "prompt_lookup", "--bits"]) == 2
    assert "runs on transformers" in capsys.readouterr().err


def test_on_the_engine_no_near_tie_is_excused(capsys: pytest.CaptureFixture[str]):
    arguments = ["check", "-m", "sample", "-d", "eagle3", "--weights", "int8", "--count", "2", "--output-tokens", "10"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["lossless"] and all(each["found"]["exact"] for each in told["identity"])
