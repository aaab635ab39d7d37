"""Ctrl-C anywhere: what ran is cancelled, the interrupt itself is raised, and the generator is as good as new."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import foredraft
import random_heads as heads
import runs
import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.eagle3 import Eagle3Drafter, Options as Eagle3Options
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM

SOURCE = Path(foredraft.__file__).parent
ALWAYS = tuple(
    str(SOURCE / "model" / name) for name in ("attention/slot_attention.py", "hf/causal_lm.py", "hf/taps.py")
)
MODEL = (*ALWAYS, *(str(SOURCE / "model" / name) for name in ("kv/cache.py", "linear/packed.py")))
WATCHED = (str(SOURCE / "engine"), str(SOURCE / "drafters"), *MODEL)
Place = tuple[str, int]


class Tracer:
    """Notes each line of the watched files as it begins, and raises at the ``stop``-th (0: never)."""

    def __init__(self, stop: int = 0) -> None:
        self.places: list[Place] = []
        self._stop = stop

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(WATCHED) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.places) == self._stop:
                raise KeyboardInterrupt(f"sent at {frame.f_code.co_filename}:{frame.f_lineno}")
        return self._line


@contextmanager
def traced(stop: int = 0) -> Iterator[Tracer]:
    before, tracer = sys.gettrace(), Tracer(stop)
    sys.settrace(tracer)
    try:
        yield tracer
    finally:
        sys.settrace(before)


@functools.cache
def target() -> CausalLM:
    model = CausalLM(tiny.build("llama", num_hidden_layers=1, vocab_size=32))
    model.tap((0, 1))
    return model


def build(kind: str) -> Generator:
    if kind in ("none", "prefix cache"):
        return tiny.generator(target(), max_rows=2, prefix_cache=kind == "prefix cache", max_prefill_tokens=4)
    if kind == "draft_model":
        return tiny.generator(target(), *tiny.draft_model(target(), target(), 2), max_rows=2)
    drafter = Eagle3Drafter(Eagle3Options(nodes=4, depth=2, top_k=2), heads.eagle3(target(), taps=(0, 1)))
    return tiny.generator(target(), drafter, max_rows=2)


PROMPTS = tiny.prompts((3, 1, 6), vocab=32)
LENGTHS = (1, 3, 2)


def said(g: Generator) -> list[list[int]]:
    """Two rows at once; the third prompt is admitted beside the second, when the first has ended."""
    params = [SamplingParams(max_new_tokens=length) for length in LENGTHS]
    return [sequence.tokens for sequence in runs.run_each(g, PROMPTS, params)]


def first_events(places: list[Place]) -> dict[Place, int]:
    """At which event, counted from 1, each line first begins."""
    return {place: count for count, place in reversed(list(enumerate(places, start=1)))}


def chosen(places: list[Place], kind: str, stride: int) -> list[int]:
    """Which events to stop at: where each line that puts something on the user's model first begins,
    if nothing is drafted, and one in ``stride`` of the other lines, which differ by drafter."""
    first = first_events(places)
    always = {place for place in first if kind == "none" and place[0].startswith(ALWAYS)}
    others = sorted(first[place] for place in first.keys() - always)
    return sorted([*(first[place] for place in always), *others[::stride]])


def interrupted(call: Callable[[], object], stop: int) -> None:
    """Run it until line number ``stop`` begins; the interrupt that comes out is the one that was sent."""
    with pytest.raises(KeyboardInterrupt, match="^sent at "), traced(stop):
        call()


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize("kind", ["none", "draft_model", "eagle3", "prefix cache"])
def test_an_interruption_at_any_line_leaves_the_generator_as_it_was(
    kind: str, stride: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("foredraft.engine.prefix_cache.BLOCK", 1)
    g, model, ids = build(kind), target().model, torch.tensor([PROMPTS[2]])
    wanted, logits = said(g), model(ids).logits
    with traced() as tracer:
        said(g)
    for stop in chosen(tracer.places, kind, stride):
        interrupted(lambda: said(g), stop)
        assert torch.equal(model(ids).logits, logits), f"the model after an interruption at {tracer.places[stop - 1]}"
        assert said(g) == wanted, f"after an interruption at {tracer.places[stop - 1]}"
        assert kind == "prefix cache" or not g.engine._stepper.cache._buffer_rows
        assert not g.engine._running() and not g.engine.waiting


def test_the_watched_files_are_there():
    assert all(Path(path).exists() for path in WATCHED)


def test_a_second_interruption_while_the_first_is_cleaned_up_after():
    """The first one comes from inside the target's forward."""
    g = build("eagle3")
    wanted = said(g)

    def forward_fails(stop: int) -> list[Place]:
        calls = 0

        def second_forward(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:  # prompts are read, then a step is made
                sys.settrace(tracer)
                raise KeyboardInterrupt("the first")

        before, tracer = sys.gettrace(), Tracer(stop)
        hook = target().model.register_forward_pre_hook(second_forward)
        try:
            with pytest.raises(KeyboardInterrupt):
                said(g)
        finally:
            sys.settrace(before)
            hook.remove()
        return tracer.places

    places = forward_fails(0)
    assert {Path(name).name for name, _ in places} >= {"engine.py", "state.py", "request.py"}
    for stop in range(1, len(places) + 1, 6):
        forward_fails(stop)
        assert said(g) == wanted, f"after a second interruption at {places[stop - 1]}"


def test_an_interruption_while_one_stream_is_closed_leaves_the_other_alone():
    g = build("draft_model")
    wanted = g.generate(PROMPTS[2], max_new_tokens=12).tokens

    def closed(stop: int) -> list[Place]:
        first = g.stream(PROMPTS[0], max_new_tokens=12)
        second = g.stream(PROMPTS[2], max_new_tokens=12)
        next(first)
        next(second)
        if stop:
            interrupted(first.close, stop)
            places = []
        else:
            with traced() as tracer:
                first.close()
            places = tracer.places
        list(second)
        assert second.result.tokens == wanted, f"after an interruption at the {stop}. line"
        first.close()
        return places

    places = closed(0)
    for stop in range(1, len(places) + 1, 2):
        closed(stop)
    assert not len(g.engine._batch) and not g.engine._stepper.cache._buffer_rows


def whole(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    plain = not any("Packed" in type(module).__name__ or "_pack" in vars(module) for module in model.modules())
    same = found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
    return plain and same and model.training and "_foredraft" not in vars(model)


def test_an_interrupted_load_or_close_leaves_the_model_as_it_was():
    model = tiny.build("gpt2", num_hidden_layers=1, vocab_size=32).train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    ids = torch.tensor([PROMPTS[2]])
    wanted = model.eval()(ids).logits
    model.train()

    def loaded() -> None:
        held.append(CausalLM(model))

    held: list[CausalLM] = []
    with traced() as tracer:
        loaded()
    with traced() as closing:
        held.pop().close()
    for stop in sorted(first_events(tracer.places).values())[::2]:
        interrupted(loaded, stop)
        assert whole(model, state), f"after an interruption at {tracer.places[stop - 1]}"
        assert torch.equal(model.eval()(ids).logits, wanted)
        model.train()
    for stop in range(4, len(closing.places) + 1):  # from the first line on that takes something off
        interrupted(CausalLM(model, verify=False).close, stop)
        assert whole(model, state), f"after an interruption at {closing.places[stop - 1]}"
