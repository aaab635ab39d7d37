"""What is counted of a step in which an output ends: what was accepted behind the end is no output."""

from typing import Any

import pytest

import runs
import tiny
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.engine.generator import Generator
from foredraft.engine.results import Result
from foredraft.serve.metrics import ServerMetrics

PROMPT = tiny.prompts((7,))[0]
OUTPUT = runs.plain(PROMPT, max_new_tokens=40)
AHEAD = 12
PLACE = next(place for place in range(2, AHEAD - 2) if OUTPUT[place] not in OUTPUT[:place])
"""Of a token that is an end: the first step accepts a draft beyond it."""


def knowing() -> Generator:
    """Drafts what the model says next."""

    def propose(view: View, plan: Plan) -> Draft:
        begin = view.host_lengths[0] - len(PROMPT)
        ahead = OUTPUT[begin : begin + AHEAD]
        return Draft(TokenTree.chain(view.roots.new_tensor([[view.host_roots[0], *ahead]])), Law.FIXED)

    return tiny.generator(runs.model(), tiny.ScriptedDrafter(propose, max_nodes=AHEAD))


def check(result: Result, tokens: int) -> None:
    stats = result.stats
    drafted = sum(len(piece.tokens) for piece in result.pieces if piece.drafted)
    assert (len(result.tokens), stats.tokens, stats.accepted) == (tokens, tokens, drafted)
    assert sum(stats.accepted_by_depth) == drafted
    assert [token for step in result.steps for token in step.emitted] == result.tokens == OUTPUT[:tokens]
    assert sum(len(step.path) for step in result.steps) == drafted


@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 1, "repetition_penalty": 1.0}], ids=["end", "minimum"])
def test_tokens_behind_an_end_are_not_counted(options: dict[str, Any]):
    generator = knowing()
    sequence = generator.submit([PROMPT], SamplingParams(eos_token_id=(OUTPUT[PLACE],), record_steps=True, **options))[
        0
    ]
    generator.engine.run([sequence])
    check(generator.result_of(sequence), PLACE + 1)
    assert sequence.stats.drafted == AHEAD and sequence.stats.accepted == PLACE + 1
    metrics = ServerMetrics(generator)
    metrics.ended(sequence, 0.0, 1.0)
    page = metrics.text().decode()
    assert f"vllm:spec_decode_num_accepted_tokens_total {PLACE + 1}.0" in page
    assert f'num_accepted_tokens_per_pos_total{{position="{PLACE}"}} 1.0' in page and f'"{PLACE + 1}"' not in page


def test_an_output_that_ends_with_its_last_step_has_all_its_tokens():
    result = knowing().generate(PROMPT, max_new_tokens=20, record_steps=True)
    check(result, 20)
    assert result.stats.target_forwards == 2 and result.stats.accepted == AHEAD + (20 - AHEAD - 1)


def test_copies_behind_an_end_are_rejected():
    result = tiny.generator(runs.model()).generate(
        PROMPT, prediction=OUTPUT, eos_token_id=OUTPUT[PLACE], record_steps=True
    )
    check(result, PLACE + 1)
    stats = result.stats
    assert stats.accepted_prediction_tokens == stats.accepted
    assert stats.rejected_prediction_tokens == stats.drafted - stats.accepted > 0
