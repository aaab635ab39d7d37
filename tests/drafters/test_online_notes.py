"""What a learning drafter writes down: when it looks, and what it leaves out."""

from typing import Any

import pytest
import torch
from online_cases import generator, stream

from foredraft.core.drafter import StepOut
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.online.recorded import RecordedRows
from foredraft.drafters.online.samples import StepRecord


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_text_ends_with_the_first_law_that_is_none(goes_on: bool):
    """In the fourth step the target breaks down in one of two rows; the row fails, or a processor mends its logits."""
    g, online = generator("eagle3", interval=10**6)
    served, calls = g.engine.target, 0
    compute = served.compute

    def breaking(*args: Any, **kwargs: Any) -> StepOut:
        nonlocal calls
        out = compute(*args, **kwargs)
        calls += 1
        if calls == 4:  # the prompts are read by ``forward``
            for each in (out.logits, *out.hidden.values()):
                each[1] = torch.nan
        return out

    served.compute = breaking  # type: ignore[method-assign]
    mend = (lambda ids, scores: scores.nan_to_num(),) if goes_on else ()
    params = SamplingParams(max_new_tokens=24, logits_processor=mend)
    sequences = g.submit(stream(2), params)
    g.engine.run(sequences)
    assert (sequences[1].error is None) == goes_on and len(sequences[0].tokens) == 24
    found = online._recorded.buffer.take()
    assert len(found) == 2
    for sample in found:
        assert sample.p.isfinite().all() and all(states.isfinite().all() for states in sample.hidden.values())
        tokens = sample.tokens.tolist()
        texts = [[*sequence.prompt, *sequence.tokens] for sequence in sequences]
        assert any(text[: len(tokens)] == tokens for text in texts), "nothing is left out in the middle"
    assert min(sample.places.shape[0] for sample in found) < 24


def test_plain_steps_are_not_looked_at_while_they_run(monkeypatch: pytest.MonkeyPatch):
    """Reading them in ``commit`` would wait for the forward; many of them wait together, and none is lost."""
    g, online = generator("draft_model", interval=10**6)
    inside, read = False, []
    commit, read_back = RecordedRows.commit, StepRecord.read_back

    def committing(*args: Any) -> None:
        nonlocal inside
        inside = True
        commit(*args)
        inside = False

    def reading(self: StepRecord) -> StepRecord:
        read.append(inside)
        return read_back(self)

    monkeypatch.setattr(RecordedRows, "commit", committing)
    monkeypatch.setattr(StepRecord, "read_back", reading)
    (short,) = g.batch(stream(1), max_new_tokens=20, speculate=False)
    assert read == [False] * 20
    (long,) = g.batch(stream(1), max_new_tokens=40, speculate=False)
    assert read[20:] == [True] * 32 + [False] * 8, "beyond that they are too many to keep"
    drafted = g.batch(stream(1), max_new_tokens=40)
    assert not any(read[60:]) and not online._recorded._steps
    for sample, result in zip(online._recorded.buffer.take(), (short, long, *drafted), strict=True):
        assert sample.tokens.tolist() == stream(1)[0] + result.tokens and sample.places.shape[0] == len(result.tokens)
