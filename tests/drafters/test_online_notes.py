"""What a learning drafter writes down: when it looks, and what it leaves out."""

from typing import Any

import pytest
import torch
from online_cases import generator, stream

from foredraft.core.drafter import StepOut
from foredraft.core.params import SamplingParams


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_text_ends_with_the_first_law_that_is_none(goes_on: bool):
    """In the fourth step the target breaks down in one of two rows; the row fails, or a processor mends its logits."""
    g, online = generator("eagle3", interval=10**6)
    served, calls = g.engine.target, 0
    forward = served.forward

    def breaking(*args: Any, **kwargs: Any) -> StepOut:
        nonlocal calls
        out = forward(*args, **kwargs)
        calls += 1
        if calls == 5:  # the first reads the prompts
            for each in (out.logits, *out.hidden.values()):
                each[1] = torch.nan
        return out

    served.forward = breaking  # type: ignore[method-assign]
    mend = (lambda ids, scores: scores.nan_to_num(),) if goes_on else ()
    params = SamplingParams(max_new_tokens=24, logits_processor=mend)
    sequences = g.submit(stream(2), params)
    g.engine.run(sequences)
    assert (sequences[1].error is None) == goes_on and len(sequences[0].tokens) == 24
    found = online._shelf.take()
    assert len(found) == 2
    for passage in found:
        assert passage.p.isfinite().all() and all(states.isfinite().all() for states in passage.hidden.values())
        tokens = passage.tokens.tolist()
        texts = [[*sequence.prompt, *sequence.tokens] for sequence in sequences]
        assert any(text[: len(tokens)] == tokens for text in texts), "nothing is left out in the middle"
    assert min(passage.places.shape[0] for passage in found) < 24
