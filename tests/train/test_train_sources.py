"""Texts to learn from: what is read, and what is said of what cannot be."""

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from foredraft.core.errors import DataError
from foredraft.train.data.sources import Sample, read_sources

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(*sources: Path | str) -> list[Sample]:
    return list(read_sources([str(source) for source in sources]))


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def sentence(*sources: Path | str) -> str:
    with pytest.raises(DataError) as info:
        read(*sources)
    assert "\n" not in str(info.value)
    return str(info.value)


def test_lines_of_all_kinds(tmp_path: Path):
    share_gpt = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = written(
        tmp_path / "a.jsonl",
        {"text": "hello", "source": "x"},
        "",
        {"messages": CHAT},
        {"conversations": share_gpt},
        {"ids": [1, 2, 3], "prompt_length": 2},
        {"ids": []},
    )
    assert read(path) == [
        Sample(f"{path}:1", text="hello"),
        Sample(f"{path}:3", messages=CHAT),
        Sample(f"{path}:4", messages=[{"role": "system", "content": "s"}, *CHAT]),
        Sample(f"{path}:5", ids=[1, 2, 3], prompt_length=2),
        Sample(f"{path}:6", ids=[]),
    ]


@pytest.mark.parametrize(("suffix", "press"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_compressed(tmp_path: Path, suffix: str, press: Callable[[bytes], bytes]):
    lines = tmp_path / f"a.jsonl{suffix}"
    lines.write_bytes(press('{"text": "Grüße"}\n'.encode()))
    plain = tmp_path / f"a.txt{suffix}"
    plain.write_bytes(press(b"one\ntwo\n"))
    assert [sample.text for sample in read(lines, plain)] == ["Grüße", "one\ntwo\n"]
    lines.write_bytes(lines.read_bytes()[:-9])
    assert sentence(lines).startswith(f"Cannot read {lines}: ")
    plain.write_bytes(b"not pressed at all")
    assert sentence(plain).startswith(f"Cannot read {plain}: ")


def test_a_damaged_stream(tmp_path: Path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"")[:10] + b"\xff" * 40)
    assert sentence(path).startswith(f"Cannot read {path}: ")


def test_a_folder_is_read_in_order_without_what_is_hidden(tmp_path: Path):
    for name in ("b.txt", "a/z.md", ".git/config", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    written(tmp_path / "c.jsonl", {"text": "c"})
    assert [sample.text for sample in read(tmp_path)] == ["a/z.md", "b.txt", "c"]
    (tmp_path / "none" / ".git").mkdir(parents=True)
    assert sentence(tmp_path / "none") == f"The folder {str(tmp_path / 'none')!r} has no files."
    assert sentence(tmp_path / "absent") == f"Training data not found: {str(tmp_path / 'absent')!r}."


def test_empty_files_have_nothing_to_say(tmp_path: Path):
    assert read(written(tmp_path / "a.jsonl")) == []
    assert [sample.text for sample in read(written(tmp_path / "a.txt"))] == [""]


def test_a_mark_at_the_beginning_is_no_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8-sig")
    assert [sample.text for sample in read(path)] == ["a"]


def test_what_is_no_utf_8(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    assert sentence(path) == f"{path} is not valid UTF-8 (byte 3)."


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"text": ', "invalid JSON (Expecting value, column 10)"),
        ("[1]", "expected a JSON object, not list"),
        ({"txt": "a", "b": 1}, "no field text, messages or ids (fields: txt, b)"),
        ({}, "no field text, messages or ids (fields: none)"),
        ({"text": None}, "no field text, messages or ids (fields: text)"),
        ({"messages": []}, "messages must be a list of turns"),
        ({"messages": "hello"}, "messages must be a list of turns"),
        ({"messages": [*CHAT, {"role": "user"}]}, "turn 3 needs role and content, both strings"),
        ({"conversations": [CHAT[0], "b"]}, "turn 2 needs role and content, both strings"),
        ({"ids": "1 2"}, "ids must be a list of integers"),
        ({"ids": [1, 2.5]}, "ids must be a list of integers"),
        ({"ids": [1, -2]}, "ids must be a list of integers of 0 or more"),
        ({"ids": [1, 2**40]}, "ids must be a list of integers of 0 or more"),
        ({"ids": [1, True]}, "ids must be a list of integers"),
        ({"ids": [1, 2], "prompt_length": 3}, "prompt_length must be an integer from 0 to the number of ids"),
        ({"ids": [1, 2], "prompt_length": "x"}, "prompt_length must be an integer"),
        ({"ids": [1, 2], "prompt_length": -1}, "prompt_length must be an integer"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, row: Any, said: str):
    path = written(tmp_path / "a.jsonl", {"text": "fine"}, row)
    assert sentence(path).startswith(f"{path}:2: {said}")


# The Hugging Face hub.


@pytest.fixture
def load_dataset(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """In place of the function of ``datasets``."""
    made = Mock()
    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", made)
    return made


def test_a_dataset_by_name(load_dataset: Mock):
    load_dataset.return_value = [{"text": "a", "id": 1}, {"messages": CHAT}]
    assert read("datasets:me/mine") == [Sample("me/mine[0]", text="a"), Sample("me/mine[1]", messages=CHAT)]
    read("datasets:me/mine:test")
    assert load_dataset.call_args_list == [call("me/mine", split=each, streaming=True) for each in ("train", "test")]


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no such split\nat all"), "no such split"), (RuntimeError(), "RuntimeError")]
)
def test_a_dataset_that_is_not_there(load_dataset: Mock, error: Exception, said: str):
    load_dataset.side_effect = error
    assert sentence("datasets:me/mine") == f"Cannot read the dataset 'me/mine': {said}"


def test_a_row_of_a_dataset_is_named(load_dataset: Mock):
    load_dataset.return_value = [{"text": "a"}, {"body": "b"}]
    assert sentence("datasets:a") == "a[1]: no field text, messages or ids (fields: body)."


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert sentence("datasets:a") == "datasets:a needs the package datasets: pip install 'foredraft[train]'."
