"""Prompts that a model writes itself, and the choice among prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.core.errors import DataError
from foredraft.engine.generator import Generator
from foredraft.train.data.answers import AnswerOptions
from foredraft.train.data.prompts import (
    Benchmarks,
    PromptOptions,
    choose,
    opening_of_user_turn,
    own_prompts,
    write_all,
)

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@pytest.fixture(scope="module")
def sample() -> Iterator[Generator]:
    """The bundled model, whose chat template has a user's turn."""
    with foredraft.load("sample", "none", device="cpu", dtype="float32", max_batch_size=4) as g:
        yield g


def silent(line: dict[str, Any]) -> None:
    """Reports nothing."""


def test_the_template_up_to_the_first_word_of_a_user(sample: Generator):
    assert sample.tokenizer is not None
    opening = opening_of_user_turn(sample.tokenizer)
    for content in ("Why?", "Write a poem.", "2 + 2"):
        chat = sample.tokenizer.encode_chat([{"role": "user", "content": content}])
        assert chat[: len(opening)] == opening
        assert sample.tokenizer.decode(chat[len(opening) :]).startswith(content)


def test_a_model_writes_what_it_samples_as_a_user(sample: Generator, tmp_path: Path):
    assert sample.tokenizer is not None
    out, opening = tmp_path / "prompts.jsonl", opening_of_user_turn(sample.tokenizer)
    found = own_prompts(sample, 6, out, 4, silent)
    expected = []
    for seed in range(1, 7):
        result = sample.generate(opening, max_new_tokens=128, temperature=1.0, seed=seed)
        if result.finish_reason == "stop" and result.text.strip():
            expected.append(result.text.strip())
    assert found == expected and found
    before = out.read_bytes()
    assert own_prompts(sample, 6, out, 4, silent) == found and out.read_bytes() == before
    out.write_bytes(before[: before.index(b"\n", 100) + 20])  # interrupted
    assert own_prompts(sample, 6, out, 4, silent) == found and out.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "overlaps"),
    [
        (f"Please: {LONG}!", True),
        (f"Count. {LONG.upper().replace(' ', ', ')}", True),
        (" ".join(LONG.split()[:12]) + " and so on", False),
        ("What is it?", True),
        ("what is IT", True),
        ("What is it? Tell me.", False),
    ],
)
def test_thirteen_words_in_a_row_or_the_whole_prompt(text: str, overlaps: bool):
    assert Benchmarks([f"{LONG} fifteen", "What is it?"]).overlap(text) is overlaps


def test_prompts_are_taken_once_and_none_of_a_benchmark(sample: Generator, tmp_path: Path):
    tokenizer, data = sample.tokenizer, tmp_path / "data.jsonl"
    assert tokenizer is not None
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}]} for text in ("Why?", "How?", "Where?", "word " * 3000)
    ]
    turns = [("user", "Hi."), ("assistant", "Hello."), ("user", "Bye.")]
    rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers, notes = AnswerOptions(new_tokens=8), []

    def chosen(written: list[str], sources: list[str], count: int, benchmarks: list[str]) -> list[list[int]]:
        options, apart = PromptOptions(count=count), Benchmarks(benchmarks)
        return choose(sample, written, sources, options, answers, benchmarks=apart, report=notes.append)

    taken = chosen(["When?", "When?", "Why?"], [str(data)], 20, ["where"])
    chats = [rows[1]["messages"], rows[4]["messages"][:1], rows[4]["messages"]]
    chats += [[{"role": "user", "content": text}] for text in ("When?", "Why?")]
    assert sorted(taken) == sorted(map(tokenizer.encode_chat, chats))
    assert notes == [
        {"note": "8 samples: 2 twice, 1 overlap with benchmarks; 5 of their 6 prompts fit the context"},
    ]
    assert len(chosen([], [str(data)], 2, [])) == 2
    with pytest.raises(DataError, match="No prompts are left"):
        chosen(["Where?"], [], 20, ["where"])


def test_each_prompt_is_answered_at_each_temperature(sample: Generator, tmp_path: Path):
    assert sample.tokenizer is not None
    prompts = [sample.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Why?", "How?")]
    kinds = [AnswerOptions(new_tokens=8, temperature=heat, batch=4) for heat in (0.0, 1.0)]
    files = write_all(sample, prompts, tmp_path / "answers", kinds, silent)
    assert [file.name for file in files] == ["T0.jsonl", "T1.jsonl"]
    for heat, file in zip((0.0, 1.0), files, strict=True):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for seed, (row, prompt) in enumerate(zip(rows, prompts, strict=True), start=1):
            expected = sample.generate(prompt, max_new_tokens=8, temperature=heat, seed=seed)
            assert row["ids"] == prompt + expected.tokens and row["prompt_length"] == len(prompt)
