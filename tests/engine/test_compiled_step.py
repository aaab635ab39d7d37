"""``torch.compile`` takes the target's forward and the tail of a step whole: one graph each, without breaks."""

import shutil
from typing import Any

import pytest
from torch._dynamo.utils import counters

import random_heads as heads
import tiny
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.recording.recorder import Compiled, Recorder, recorder_on

PROMPTS = tiny.prompts((18, 24))


def logged(recorder: Recorder) -> set[tuple[str, str]]:
    """What ran as it is, and why."""
    return recorder._logged.union(*map(logged, recorder._children.values()))


@pytest.mark.parametrize(
    ("backend", "temperature", "branching"),
    [
        pytest.param("eager", 1.0, None),
        *(
            pytest.param("aot_eager", heat, shape, marks=pytest.mark.slow)
            for heat in (0.0, 1.0)
            for shape in ((2, 1), None)
        ),
        pytest.param("inductor", 1.0, (2, 1), marks=(pytest.mark.slow, pytest.mark.filterwarnings("ignore"))),
    ],
)
def test_compiled_texts(backend: str, temperature: float, branching: tuple[int, ...] | None):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    target, draft = CausalLM(tiny.build("llama"), fast=False), CausalLM(tiny.build("llama", seed=8), fast=False)
    target.tap((0, 1, 2))
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": temperature, "seed": 4}
    counters.clear()
    recorder, found = recorder_on(target.device, compile=True, cuda_graphs=False), []
    if backend != "inductor":
        recorder = Compiled(backend)
    assert isinstance(recorder, Compiled)
    for choice in (None, recorder):
        g = tiny.generator(target, *tiny.draft_model(draft, target, 2, branching), recorder=choice)
        found.append([result.tokens for result in g.generate(PROMPTS, **options)])
    assert found[0] == found[1]
    whole = "tree" if branching else "chain"
    # on a CPU none with random numbers
    assert set(recorder.recordings) == ({"draft", "forward"} if backend == "inductor" else {whole, "forward", "tail"})
    made = recorder.recordings.total()
    assert counters["stats"]["unique_graphs"] == made, "a segment is compiled once for each shape"
    assert not logged(recorder)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, "traversal"])
def test_compiled_drafts_of_a_head(rule: str | None):
    target = CausalLM(tiny.build("llama"), fast=False)
    shape = Options(nodes=4, depth=2, top_k=2)
    recorder, found = Compiled("eager"), []
    for choice in (None, recorder):
        drafter = Eagle3Drafter(shape, heads.eagle3(target))
        target.tap(drafter.needs.hidden_layers)
        results = tiny.generator(target, drafter, recorder=choice, rule=rule).generate(
            PROMPTS, max_new_tokens=5, temperature=1.0, seed=4
        )
        found.append([(result.tokens, result.stats.drafted, result.stats.accepted) for result in results])
    assert found[0] == found[1]
    assert set(recorder.recordings) == {"catch-up", "tree", "forward", "tail"}
    assert not logged(recorder)
