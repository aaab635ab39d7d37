"""The rows in flight: buffers that are updated in place, and keys and values that are read in place."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import random_heads as heads
import runs
import tiny
from foredraft.core.draft import Verdict
from foredraft.core.drafter import KVSize
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.stop import StopRules
from foredraft.engine.policy import Constant
from foredraft.engine.state import Batch
from foredraft.engine.tail import RowStep, StepEnd
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotView


def sequence(prompt: list[int], stream: int) -> Any:
    """What a batch reads of a sequence."""
    return SimpleNamespace(
        prompt=prompt,
        tokens=[],
        stream=stream,
        finished=False,
        params=SamplingParams(),
        rules=StopRules(10, frozenset()),
        length=len(prompt),
    )


def end(emitted: Tensor, counts: list[int], *, known: bool) -> StepEnd:
    """The end of a step of rows with these new tokens, known to the host or not."""
    if known:
        new = [tokens[:count] for tokens, count in zip(emitted.tolist(), counts, strict=True)]
        return StepEnd.known([RowStep(own, 0, 0, 0, healthy=True) for own in new], emitted.shape[1])
    return StepEnd(Verdict(torch.zeros_like(emitted), emitted[:, 0]), emitted, torch.tensor(counts))


def check(batch: Batch, of: dict[int, Any]) -> None:
    view = batch.view(KVSize())
    assert dict(zip(batch.rows, batch.sequences, strict=True)) == of and batch.rows == view.rows
    assert view.lengths.tolist() == list(view.host_lengths) == [of[row].length for row in view.rows]
    assert view.noise.seeds.tolist() == [of[row].stream for row in view.rows]
    for line, row in enumerate(view.rows):
        assert view.history[line, : of[row].length].tolist() == [*of[row].prompt, *of[row].tokens]


@pytest.mark.parametrize("seed", range(8))
def test_lines_hold_the_rows_in_flight_whatever_comes_and_goes(seed: int):
    source, batch = random.Random(seed), Batch(100, torch.device("cpu"))
    of: dict[int, Any] = {}
    for _ in range(30):
        rows = [row for row in range(9) if row not in of and source.random() < 0.3]
        if rows:
            new = [sequence([source.randrange(100) for _ in range(source.randint(1, 300))], row + 50) for row in rows]
            batch.admit(dict(zip(rows, new, strict=True)))
            of.update(zip(rows, new, strict=True))
        if of:
            check(batch, of)
            counts = [source.randint(1, 3) for _ in of]
            emitted = torch.randint(100, (len(of), 3))
            batch.append(end(emitted, counts, known=source.random() < 0.5))
            for row, tokens, count in zip(batch.rows, emitted.tolist(), counts, strict=True):
                of[row].tokens += tokens[:count]
                of[row].length += count
            check(batch, of)
        for each in of.values():
            each.finished = source.random() < 0.3
        before = batch.rows
        batch.retire()
        of = {row: each for row, each in of.items() if not each.finished}
        assert [row for row in batch.rows if row in before[: len(of)]] == [
            row for row in before[: len(of)] if row in of
        ]
        if of:
            check(batch, of)


def test_an_interrupted_change_leaves_the_batch_as_it_was():
    batch, of = Batch(100, torch.device("cpu")), {row: sequence([row, 7], row) for row in range(4)}
    batch.admit(of)
    of[1].finished = True
    before = batch._rows
    batch.retire()
    batch._rows = before  # as if it had been interrupted before the assignment
    batch.retire()
    check(batch, {row: of[row] for row in (0, 3, 2)})


@pytest.mark.parametrize("kind", ["none", "draft model", "eagle3"])
def test_no_step_copies_keys_and_values_after_the_first_rows_have_left(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Neither the target's nor the drafter's; and each output is the one that its prompt gets alone."""
    target = CausalLM(tiny.build("llama"))
    target.tap((0, 1, 2))
    drafter = heads.small_drafter(kind, target)
    prompts = tiny.prompts((5, 9, 3, 12, 7, 4, 8, 6))
    g = tiny.generator(target, drafter, Constant(2, 1e-9) if drafter is not None else None)
    alone = [g.generate(prompt, max_new_tokens=12).tokens for prompt in prompts]
    sequences = [
        g.submit([prompt], SamplingParams(max_new_tokens=count))[0]
        for prompt, count in zip(prompts, (3, 12, 12, 6, 12, 4, 12, 12), strict=True)
    ]
    g.engine.step()  # which reads the prompts
    made = runs.noted(monkeypatch, SlotView, "__init__")
    while not all(each.finished for each in sequences):
        g.engine.step()
    assert all(each.tokens == wanted[: len(each.tokens)] for each, wanted in zip(sequences, alone, strict=True))
    views = [view for view, *_ in made]
    assert {len(view.buffer_rows) for view in views} >= {7, 5} and all(view.adjacent is not None for view in views)
