"""The target's own words as training text."""

import copy
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainees import save_texts, target

import foredraft
from foredraft.core.errors import DataError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.contents import contents_of
from foredraft.model.text.tokenizer import Tokenizer
from foredraft.train.data.answers import AnswerOptions, _AnswerProgress, write_answers
from foredraft.train.data.sources import read_sources
from foredraft.train.data.tokens import encoded
from reference import reference

COUNT = 7
GREEDY = AnswerOptions(new_tokens=9, temperature=0.0, batch=3)


@pytest.fixture(scope="module")
def speaker(place: Path) -> Iterator[Generator]:
    generator = foredraft.load(str(place / "target"), "prompt_lookup", device="cpu", dtype="float32")
    yield generator
    generator.close()


def prompts_of(speaker: Generator, source: Path, count: int = COUNT) -> list[list[int]]:
    """The first six tokens of texts."""
    texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    assert speaker.tokenizer is not None
    return [ids[:6] for ids in speaker.tokenizer.encode_many(texts[:count])]


def answers(
    speaker: Generator, source: Path, out: Path, options: AnswerOptions = GREEDY, report: Any = lambda line: None
):
    write_answers(speaker, prompts_of(speaker, source), out, options, report)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def steps(speaker: Generator, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with each step of the engine; a step takes a second."""
    done: list[None] = []
    step = speaker.engine.step
    monkeypatch.setattr(speaker.engine, "step", lambda: (done.append(None), step()))
    clock = SimpleNamespace(perf_counter=lambda: float(len(done)), monotonic=lambda: float(len(done)))
    for module in ("data.answers", "pace"):
        monkeypatch.setattr(f"foredraft.train.{module}.time", clock)
    return done


def test_answers_are_what_the_target_says(place: Path, speaker: Generator, tmp_path: Path):
    rows = answers(speaker, place / "texts.jsonl", tmp_path / "answers.jsonl")
    assert speaker.tokenizer is not None
    by = {"model": contents_of(speaker.engine.target.module), "tokenizer": speaker.tokenizer.tokens_hash()}
    for row, prompt in zip(rows, prompts_of(speaker, place / "texts.jsonl"), strict=True):
        said = reference(target(), prompt, SamplingParams(max_new_tokens=9))
        assert row == {"ids": prompt + said, "prompt_length": 6, **by}


def test_a_file_of_another_models_answers_is_not_continued(
    place: Path, speaker: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its prompts are the same, since both have one tokenizer."""
    out = tmp_path / "answers.jsonl"
    rows = answers(speaker, place / "texts.jsonl", out)
    with out.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[:4])
    monkeypatch.setattr(CausalLM, "contents", lambda self: "another")
    with pytest.raises(DataError, match="answers.jsonl has answers of another model; delete it, or use another folder"):
        answers(speaker, place / "texts.jsonl", out)
    monkeypatch.undo()
    assert answers(speaker, place / "texts.jsonl", out) == rows


def test_tokens_of_padded_vocabularies_mean_the_same(place: Path, speaker: Generator):
    assert speaker.tokenizer is not None
    wanted = speaker.tokenizer.tokens_hash()
    padded = copy.deepcopy(speaker.tokenizer.inner)
    padded.add_tokens([f"[PAD{number}]" for number in range(len(padded), len(padded) + 3)])
    assert Tokenizer(padded).tokens_hash() == wanted
    padded.add_tokens(["<another>"])
    assert Tokenizer(padded).tokens_hash() != wanted


@pytest.mark.parametrize("batch", [3, 7])
def test_progress_is_told_while_answers_are_made(
    place: Path, speaker: Generator, tmp_path: Path, steps: list[None], batch: int
):
    out, told = tmp_path / "answers.jsonl", []

    def report(line: dict[str, Any]) -> None:
        written = out.read_text().count("\n") if out.exists() else 0
        assert line["answers"] == written, "an interruption says how many are kept"
        told.append((len(steps), line))

    options = replace(GREEDY, new_tokens=40, batch=batch)
    answers(speaker, place / "texts.jsonl", out, options, report)
    assert told[0] == (0, {"answers": 0, "of": 7})
    assert told[-1][0] == len(steps) and told[-1][1].items() >= {"answers": 7, "of": 7, "left": 0.0}.items()
    times = [at for at, _ in told]
    assert len(told) > 4 and all(later - at <= 5 for at, later in pairwise(times))
    for at, line in told[:-1]:
        assert ("left" in line) == ("rate" in line) == (at >= 15), "first there is nothing to estimate from"
        assert "left" not in line or "bound" in line or line["left"] == 0, "few answers have ended"


@pytest.mark.parametrize("mean", [25, 1e9], ids=["ended", "cut off"])
def test_time_left_is_told_from_answers_that_have_ended(monkeypatch: pytest.MonkeyPatch, mean: float):
    """600 answers of at most 200 tokens, 16 at once, a second a token."""
    clock, told = SimpleNamespace(now=0.0), []
    for module in ("data.answers", "pace"):
        time = SimpleNamespace(perf_counter=lambda: clock.now, monotonic=lambda: clock.now)
        monkeypatch.setattr(f"foredraft.train.{module}.time", time)
    chance = random.Random(0)
    lengths = [min(200, 1 + int(chance.expovariate(1 / mean))) for _ in range(600)]
    progress = _AnswerProgress(lambda line: told.append((clock.now, line)), 0, len(lengths), 200)
    waiting, running = deque(range(600)), deque()
    while waiting or running:
        while waiting and sum(not each.finished for each in running) < 16:
            running.append(SimpleNamespace(number=waiting.popleft(), generated=[], tokens=[], finished=False))
        while running and running[0].finished:
            progress.wrote(running.popleft())
        clock.now += 1
        for each in running:
            if not each.finished:
                each.generated.append(0)
                each.tokens = each.generated
                each.finished = len(each.generated) == lengths[each.number]
        progress.update(running)
    estimates = [(at, line["left"]) for at, line in told if "left" in line and "bound" not in line]
    assert len(estimates) > 20
    for at, left in estimates:
        assert at + left == pytest.approx(clock.now, rel=0.5 if at < 0.1 * clock.now else 0.2)
    bounds = [at + line["left"] for at, line in told if "bound" in line]
    assert bounds and all(end >= 0.98 * clock.now for end in bounds)


def test_sampled_answers_differ_and_come_again(place: Path, speaker: Generator, tmp_path: Path):
    options = replace(GREEDY, temperature=1.0, batch=4)
    same = tmp_path / "same.jsonl"
    same.write_text('{"text": "hello there"}\n' * 8)
    rows = answers(speaker, same, tmp_path / "a.jsonl", options)
    assert rows == answers(speaker, same, tmp_path / "b.jsonl", options)
    assert len({tuple(row["ids"]) for row in rows}) == 7


@pytest.mark.parametrize("left", [0, 2, 3, 4, 6, 7])
def test_it_goes_on_after_a_line_that_was_cut_off(place: Path, speaker: Generator, tmp_path: Path, left: int):
    """With a temperature: what is made later is what would have been made."""
    options = replace(GREEDY, temperature=1.0)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    answers(speaker, place / "texts.jsonl", whole, options)
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text("".join([*lines[:left], *(line[:12] for line in lines[left : left + 1])]))
    answers(speaker, place / "texts.jsonl", cut, options)
    assert cut.read_text() == whole.read_text()


@pytest.mark.parametrize("begun", [0, 3])
def test_processes_answer_a_part_each(place: Path, speaker: Generator, tmp_path: Path, begun: int):
    """In the order of one process, with its seeds, also where one process began."""
    options = replace(GREEDY, temperature=1.0)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    answers(speaker, place / "texts.jsonl", whole, options)
    lines = whole.read_text().splitlines(keepends=True)
    if begun:
        parts.write_text("".join(lines[:begun]))
        (tmp_path / ".parts.jsonl.0-2").write_text("of a call with more processes")
    for index in (2, 1, 0):  # the first process waits for the others, and puts the parts together
        process: Any = SimpleNamespace(
            num_processes=3, process_index=index, is_main_process=index == 0, wait_for_everyone=lambda: None
        )
        write_answers(speaker, prompts_of(speaker, place / "texts.jsonl"), parts, options, accelerator=process)
    assert parts.read_text() == whole.read_text()
    assert not list(tmp_path.glob(".parts.jsonl.*-*"))


def test_two_calls_never_write_one_file(place: Path, speaker: Generator, tmp_path: Path):
    refused: list[str] = []

    def report(line: dict[str, Any]) -> None:
        with pytest.raises(OptionError) as info:
            answers(speaker, place / "texts.jsonl", tmp_path / "answers.jsonl")
        refused.append(str(info.value))

    write_answers(speaker, prompts_of(speaker, place / "texts.jsonl", 2), tmp_path / "answers.jsonl", GREEDY, report)
    assert len(refused) == 2 and all(f"Another run uses {tmp_path}: " in each for each in refused)


def test_answers_to_other_prompts_are_refused(place: Path, speaker: Generator, tmp_path: Path):
    out = tmp_path / "answers.jsonl"
    answers(speaker, place / "texts.jsonl", out)
    other = Path(save_texts(tmp_path / "other.jsonl", seed=5))
    with pytest.raises(DataError, match="has answers to other prompts; delete it"):
        answers(speaker, other, out)


def test_of_an_answer_the_prompt_does_not_count(place: Path, speaker: Generator, tmp_path: Path):
    rows = answers(speaker, place / "texts.jsonl", tmp_path / "answers.jsonl")
    assert speaker.tokenizer is not None
    made = list(encoded(read_sources([str(tmp_path / "answers.jsonl")]), speaker.tokenizer, 95))
    assert made == [(row["ids"], [0] * 6 + [1] * 9) for row in rows]
