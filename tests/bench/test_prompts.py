"""Prompt files of every kind, and what is said of those that cannot be read."""

import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from bench_cases import Write

from foredraft.bench.prompts import STANDARD, BenchPrompt, read_prompts, standard_prompts
from foredraft.core.errors import DataError


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_spec_bench_question_keeps_its_number_category_and_turns(write: Write):
    row = {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["first", "second"]}
    (ask,) = read_prompts(write(row))
    assert ask == BenchPrompt("one", ("one", "two"), "writing", "81", "p")


def test_turns_are_played_only_as_a_chat(write: Write):
    path = write({"turns": ["one", "two", "three"]})
    assert read_prompts(path)[0].num_turns == 1
    ask = read_prompts(path, chat=True)[0]
    assert ask.num_turns == 3 and ask.prompt == [user("one")]
    assert ask.after([]) == [user("one")]
    assert ask.after(["A"]) == [user("one"), answered("A"), user("two")]
    assert ask.after(["A", "B"]) == [user("one"), answered("A"), user("two"), answered("B"), user("three")]


def test_humaneval_keeps_its_name(write: Write):
    row = {
        "task_id": "HumanEval/7",
        "prompt": "def f():\n    '''Doc.'''\n",
        "entry_point": "f",
        "test": "def check(f): ...",
        "canonical_solution": "    return 1\n",
    }
    (ask,) = read_prompts(write(row, name="humaneval.jsonl"))
    assert (ask.name, ask.category, ask.task) == ("HumanEval/7", "HumanEval", "humaneval")
    assert ask.prompt == "def f():\n    '''Doc.'''" and ask.num_turns == 1


def test_chats_are_asked_as_they_stand(write: Write):
    messages = [{"role": "system", "content": "Be brief."}, user("a"), answered("b"), user("c")]
    for chat in (False, True):
        (ask,) = read_prompts(write({"messages": messages}), chat)
        assert ask.prompt == messages and ask.turns == ("a", "c")
        assert ask.num_turns == 1, "the answers are in the file already"


def test_a_chat_without_a_user_is_one_round(write: Write):
    (ask,) = read_prompts(write({"messages": [{"role": "system", "content": "Speak."}]}))
    assert ask.turns == () and ask.num_turns == 1 and ask.after([]) == ask.prompt


def test_text_is_one_turn_of_a_chat_or_none(write: Write):
    path = write({"text": "a\u2028b"})
    assert read_prompts(path)[0].prompt == "a\u2028b"
    assert read_prompts(path, chat=True)[0].prompt == [user("a\u2028b")]


SPEED = {  # a row as SPEED-Bench's prepare_data.py writes it
    "question_id": "q-1",
    "category": "coding",
    "sub_category": "python",
    "turns": ["Write a loop.", "Make it shorter."],
    "source": "somewhere",
    "src_id": None,
    "difficulty": None,
    "multiturn": True,
}


def table(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_a_table_of_speed_bench_is_called_by_its_folder(tmp_path: Path):
    path = table(tmp_path / "speed" / "qualitative" / "test.parquet", [SPEED, {**SPEED, "turns": ["Why?"]}])
    first, second = read_prompts(path, chat=True)
    assert (first.task, first.name, first.category, first.num_turns) == ("qualitative", "q-1", "coding", 2)
    assert second.prompt == [user("Why?")] and second.name == "q-1-2"
    assert read_prompts(table(tmp_path / "mine.parquet", [{"text": "a", "turns": None}]))[0].prompt == "a"


def test_prompts_that_speed_bench_leaves_out_are_not_taken_for_prompts(tmp_path: Path, write: Write):
    gone = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    path = table(tmp_path / "test.parquet", [SPEED, {**SPEED, "turns": [gone]}])
    with pytest.raises(DataError, match=r"row 2: the file leaves this prompt out; .*prepare_data\.py"):
        read_prompts(path)
    with pytest.raises(DataError, match="line 1: the file leaves this prompt out"):
        read_prompts(write({"turns": ["fine", f"{gone}\n\n{{question}}"]}))


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "p.parquet"
    with pytest.raises(DataError, match=r"Cannot read the prompt file .*p\.parquet"):
        read_prompts(path)
    path.write_text("text")
    with pytest.raises(DataError, match=r"p\.parquet is not a Parquet file"):
        read_prompts(path)
    with pytest.raises(DataError, match=r"the file has no prompts\."):
        read_prompts(table(path, []))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs the package pyarrow: pip install 'foredraft\[train\]'\."):
        read_prompts(path)


def test_a_question_of_deep_spec_needs_only_its_turns(write: Write):
    (ask,) = read_prompts(write({"turns": ["What is 2 + 2?"]}, name="gsm8k.jsonl"), chat=True)
    assert (ask.task, ask.name, ask.category, ask.prompt) == ("gsm8k", "0", "text", [user("What is 2 + 2?")])


def test_plain_text_is_parted_by_lines_of_dashes(write: Write):
    path = write("", "first\n  line two", " --- ", "", "---", "last\n", name="p.txt")
    asks = read_prompts(path)
    assert [ask.prompt for ask in asks] == ["first\n  line two", "last"]
    assert [ask.name for ask in asks] == ["0", "1"] and {ask.task for ask in asks} == {"p"}
    assert [ask.category for ask in asks] == ["text", "text"]


@pytest.mark.parametrize("odd", ["\u2028", "\x0c", "\x85", "\x1c"], ids=ascii)
def test_what_python_takes_for_a_line_end_stays_in_the_prompt(write: Write, odd: str):
    assert [ask.prompt for ask in read_prompts(write(f"a{odd}b", name="p.txt"))] == [f"a{odd}b"]
    inside = '{"turns": ["a' + (odd if odd > "\x20" else "\\f") + 'b"]}'
    assert len(read_prompts(write(inside, "", '{"text": "c"}'))) == 2


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_line_ends_of_windows_and_a_byte_order_mark_are_no_part_of_a_prompt(write: Write, name: str):
    lines = ['\ufeff{"turns": ["a"]}', '{"turns": ["b"]}'] if name == "p.jsonl" else ["\ufeffa", "---", "b"]
    assert [ask.prompt for ask in read_prompts(write(*lines, name=name, end="\r\n"))] == ["a", "b"]


def test_a_question_file_is_called_by_its_folder(write: Write, monkeypatch: pytest.MonkeyPatch):
    path = write({"turns": ["a"]}, name="mt_bench/question.jsonl")
    assert read_prompts(path)[0].task == "mt_bench"
    monkeypatch.chdir(path.parent)
    assert read_prompts("question.jsonl")[0].task == "mt_bench"


def test_prompts_without_a_name_get_their_number_and_no_two_are_alike(write: Write):
    rows = [{"text": "a"}, {"text": "b", "question_id": 7}, {"text": "c", "question_id": "7"}]
    rows += [{"text": "d", "question_id": None, "category": None}, {"text": "e", "question_id": "7-2"}]
    asks = read_prompts(write(*rows))
    assert [ask.name for ask in asks] == ["0", "7", "7-2", "3", "7-2-2"]
    assert asks[3].category == "text"


def test_the_standard_prompts_are_eight_and_may_be_a_chat():
    plain, chats = standard_prompts(), standard_prompts(chat=True)
    assert [ask.prompt for ask in plain] == list(STANDARD) and len(STANDARD) == 8
    assert [ask.prompt for ask in chats] == [[user(text)] for text in STANDARD]
    assert [ask.name for ask in plain] == list("01234567") and {ask.task for ask in plain} == {"standard"}


GOOD = '{"turns": ["fine"]}'


@pytest.mark.parametrize(
    ("lines", "line", "sentence"),
    [
        ([GOOD, '{"turns": ["a"}'], 2, "invalid JSON"),
        ([GOOD, "", "hello"], 3, "invalid JSON (Expecting value, column 1)"),
        (['"turns"'], 1, "expected a JSON object"),
        ([GOOD, "{}"], 2, "missing field: turns, messages, prompt or text"),
        (['{"turns": "one"}'], 1, "turns must be a list of non-empty strings"),
        (['{"turns": ["one", ""]}'], 1, "turns must be a list of non-empty strings"),
        (['{"turns": ["one", 2]}'], 1, "turns must be"),
        (['{"messages": []}'], 1, "messages must be a list of objects with strings role and content"),
        (['{"messages": [{"role": "user", "content": null}]}'], 1, "messages must be"),
        (['{"messages": {"role": "user", "content": "a"}}'], 1, "messages must be"),
        (['{"prompt": "\\n"}'], 1, "prompt must be a non-empty string"),
        ([GOOD, '{"text": 3}'], 2, "text must be a non-empty string"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_field(write: Write, lines: list[str], line: int, sentence: str):
    path = write(*lines)
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}, line {line}: ") and sentence in str(error.value)


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_another_encoding_is_named_with_its_line(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(b'{"text": "a"}\n\n{"text": "' + "\u00fc".encode("latin-1") + b'"}\n')
    with pytest.raises(DataError, match=r"line 3: not valid UTF-8"):
        read_prompts(path)


@pytest.mark.parametrize(("name", "content"), [("p.jsonl", ""), ("p.jsonl", "\n \n"), ("p.txt", ""), ("p.txt", "---")])
def test_a_file_without_a_prompt_is_refused(write: Write, name: str, content: str):
    path = write(content, name=name)
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(error.value) == f"{path}: the file has no prompts."


def test_what_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"Cannot read the prompt file .*: No such file or directory\."):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"Cannot read the prompt file .*: Is a directory\."):
        read_prompts(tmp_path)
