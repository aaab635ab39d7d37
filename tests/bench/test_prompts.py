"""Prompt files of every kind, and what is said of those that cannot be read."""

from pathlib import Path

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
