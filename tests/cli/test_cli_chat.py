import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_cases import Ended, Run
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input

import foredraft
from foredraft.cli.chat_input import Turn, TurnReader
from foredraft.cli.console import TextOut, WordWrap
from foredraft.cli.conversation import Answer, Conversation
from foredraft.core.errors import PromptError
from foredraft.core.stats import DecodeStats
from foredraft.engine.generator import Generator

SHORT = ("--max-new-tokens", "8", "--eos-token-id", "8191")
Talk = Callable[..., Ended]


@pytest.fixture
def talk(run: Run, model: Path) -> Talk:
    """Runs a chat with these lines on standard input."""

    def talk(*lines: str, options: tuple[str, ...] = ()) -> Ended:
        return run("chat", "-m", model, *SHORT, *options, stdin="".join(f"{line}\n" for line in lines))

    return talk


@pytest.fixture
def params(monkeypatch: pytest.MonkeyPatch) -> list[foredraft.SamplingParams]:
    """The parameters of every turn."""
    found: list[foredraft.SamplingParams] = []
    submit = Generator.submit

    def spy(self: Generator, prompts: Any, chosen: foredraft.SamplingParams, *arguments: Any) -> Any:
        found.append(chosen)
        return submit(self, prompts, chosen, *arguments)

    monkeypatch.setattr(Generator, "submit", spy)
    return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The messages of every turn."""
    turns: list[list[dict[str, str]]] = []
    submit = Generator.submit

    def spy(self: Generator, prompts: Any, *arguments: Any) -> Any:
        turns.extend([dict(message) for message in prompt] for prompt in prompts)
        return submit(self, prompts, *arguments)

    monkeypatch.setattr(Generator, "submit", spy)
    return turns


def said(messages: list[dict[str, str]]) -> list[str]:
    """What the user said."""
    return [message["content"] for message in messages if message["role"] == "user"]


def test_every_turn_sends_the_whole_conversation(talk: Talk, sent):
    ended = talk("Hello", "", "  Who are you?  ", options=("--system", "Be brief."))
    assert (ended.status, ended.err) == (0, "")
    first, second = sent
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert second[:2] == first and second[3] == {"role": "user", "content": "Who are you?"}
    assert second[2]["role"] == "assistant" and second[2]["content"]
    assert ended.out.startswith(second[2]["content"] + "\n") and ended.out.endswith("\n")


def test_only_answers_go_to_stdout(talk: Talk):
    alone = talk("Hello").out
    ended = talk("/stats", "/help", "Hello", "/stats", "/draft off", "/reset", options=("--show-drafts",))
    assert ended.out == alone and "\x1b" not in ended.err
    assert "0 turns, 0 tokens in 0.0 s\n" in ended.err and "1 turn, 8 tokens in " in ended.err
    assert re.search(r"^/reset +start a new conversation$", ended.err, re.MULTILINE)
    assert ended.err.endswith("Drafts are off.\nStarted a new conversation.\n")


def test_reset_forgets_all_but_the_system_message(talk: Talk, sent):
    talk("Hello", "/reset", "Again", "/clear", "Third", options=("--system", "Be brief."))
    assert [[message["content"] for message in messages] for messages in sent[1:]] == [
        ["Be brief.", "Again"],
        ["Be brief.", "Third"],
    ]


@pytest.mark.parametrize("name", ["/quit", "/exit", "/bye"])
def test_quit(name: str, talk: Talk, sent):
    ended = talk("Hello", name, "never said")
    assert (ended.status, ended.err, len(sent)) == (0, "", 1)


def test_several_lines_are_one_turn(talk: Talk, sent):
    talk(
        '"""', "  def f():", "", '      pass"""', "one \\", "  two\\", "three", '"""/no command"""', '"""', "to the end"
    )
    assert said(sent[-1]) == ["  def f():\n\n      pass", "one \n  two\nthree", "/no command", "to the end"]


def test_retry_answers_the_last_message_again(talk: Talk, sent, params):
    ended = talk("Hello", "Who?", "/set seed 5", "/retry", "More")
    assert [said(messages) for messages in sent] == [["Hello"], *2 * [["Hello", "Who?"]], ["Hello", "Who?", "More"]]
    assert [each.seed for each in params] == [None, None, 5, 5] and len(ended.out.splitlines()) >= 4
    assert sent[1] == sent[2]
    assert "no message to answer again" in talk("/regen").sentence


def test_draft_turns_drafts_off_and_on(talk: Talk, params):
    ended = talk("/draft", "One", "/draft off", "Two", "/draft on", "Three", options=("-d", "prompt_lookup"))
    assert [each.speculate for each in params] == [True, False, True]
    assert ended.err == "Drafts are on.\nDrafts are off.\nDrafts are on.\n"
    assert "takes on or off, not 'maybe'" in talk("/draft maybe").sentence
    assert talk("/draft on", options=("-d", "none")).err.startswith("There is no drafter")


def test_set(talk: Talk, params):
    lines = ("/set temperature 0.7", "/set top_k=40", '/set stop_strings ["a", "b"]', "/set max_new_tokens 4")
    ended = talk(*lines, "One", "/set top_k off", "/set max_new_tokens none", "/set", "Two", options=("--seed", "3"))
    first, second = params
    assert (first.temperature, first.top_k, first.stop_strings, first.max_new_tokens) == (0.7, 40, ("a", "b"), 4)
    assert (second.temperature, second.top_k, second.max_new_tokens, second.seed) == (0.7, None, 1024, 3)
    assert ended.err.endswith(
        'max_new_tokens 1024\ntemperature 0.7\nseed 3\nstop_strings ["a", "b"]\neos_token_id [8191]\n'
    )
    assert "Unknown setting 'temperatur'. Did you mean temperature?" in talk("/set temperatur 1").sentence
    assert "temperature must be 0 (greedy) or more" in talk("/set temperature hot").sentence
    assert "needs a value" in talk("/set temperature").sentence
    assert "Unknown setting 'speculate'" in talk("/set speculate off").sentence


def test_the_system_message_can_be_changed(talk: Talk, sent):
    ended = talk("Hello", "/system Answer in French.", "Who?", '/system ""', "More", "/system")
    assert [message["content"] for message in sent[1]][::3] == ["Answer in French.", "Who?"]
    assert [message["role"] for message in sent[2]] == ["user", "assistant"] * 2 + ["user"]
    assert ended.err.splitlines()[0] == "System message: Answer in French."


def test_a_saved_chat_goes_on(talk: Talk, sent, tmp_path: Path):
    path = tmp_path / "a chat.json"
    ended = talk("Hello", f"/save {path}", options=("--system", "Be brief."))
    assert ended.err == f"Saved to {path}.\n"
    again = talk(f"/load {path}", "Who?", f"/save {path}")
    assert again.status == 0 and again.err.startswith(f"Loaded 2 messages from {path}.\n")
    assert [message["content"] for message in sent[1]][::3] == ["Be brief.", "Who?"] and sent[1][:2] == sent[0]
    saved = json.loads(path.read_text())
    assert saved["model"] == "tiny" and saved["messages"][:4] == sent[1]


def test_files_that_hold_no_chat(talk: Talk, tmp_path: Path):
    notes = tmp_path / "notes.py"
    notes.write_text("print(1)")
    assert "is no saved chat: choose another name" in talk(f"/save {notes}").sentence
    assert notes.read_text() == "print(1)"
    assert "is not JSON" in talk(f"/load {notes}").sentence
    notes.write_text('{"messages": [{"role": "user", "content": 3}]}')
    assert "holds no chat: give a file of /save" in talk(f"/load {notes}").sentence
    assert "No such file" in talk("/load nowhere.json").sentence
    assert "needs a file, as in /save chat.json" in talk("/save").sentence


def test_an_error_ends_a_script(talk: Talk, sent):
    ended = talk("Hello", "/nonsense", "never said")
    assert ended.status == 2 and len(sent) == 1
    assert ended.sentence.startswith("Unknown command '/nonsense'. Known: /help, /reset, ")


def test_a_message_that_outgrows_the_context_ends_with_a_sentence(talk: Talk):
    ended = talk("Hello", "word " * 5000, "never said")
    assert ended.status == 2
    assert "4096" in ended.sentence and ended.out.count("\n") >= 1


def test_a_chat_that_outgrows_the_context_drops_its_oldest_turns(talk: Talk, sent, tmp_path: Path):
    long, path = "word " * 900, tmp_path / "chat.json"
    lines = [f"{number} {long}" for number in range(5)]
    ended = talk(*lines, f"/save {path}", "last", options=("--system", "Be brief."))
    assert ended.status == 0
    started = [[text.split()[0] for text in said(messages)] for messages in sent]
    assert started == [["0"], ["0", "1"], ["0", "1", "2"], ["0", "1", "2", "3"], ["3", "4"], ["3", "4", "last"]]
    assert all(messages[0]["role"] == "system" for messages in sent)
    told = "The chat outgrows the model's context of 4,096 tokens: its 3 oldest turns are no longer read."
    assert " ".join(ended.err.split()).startswith(told) and ended.err.count("outgrows the") == 1
    assert len(json.loads(path.read_text())["messages"]) == 11


def test_sampling_with_a_seed_is_repeatable(talk: Talk):
    options = ("--temperature", "1", "--seed")
    first, second = (talk("Hello", options=(*options, "3")).out for _ in range(2))
    assert first == second != talk("Hello", options=(*options, "4")).out


def test_the_next_turn_reads_only_what_is_new(talk: Talk, monkeypatch: pytest.MonkeyPatch):
    found: list[DecodeStats] = []
    answer = Conversation.answer

    def spy(self: Conversation, text: str) -> Answer:
        ended = answer(self, text)
        found.append(ended.stats)
        return ended

    monkeypatch.setattr(Conversation, "answer", spy)
    talk("Hello, this is a message of more than sixteen tokens, so that it is kept.", "Go on.")
    assert found[0].cached_tokens == 0 and found[1].cached_tokens > 16


def wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *pieces: str) -> str:
    out = TextOut()
    out.terminal = True
    monkeypatch.setenv("COLUMNS", "20")
    wrap = WordWrap(out)
    for piece in pieces:
        wrap(piece)
    wrap("\n")
    return capsys.readouterr().out


def test_lines_break_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = "The quick brown fox jumps over\n\n  the lazy dog, 12345678901234567890123 times.  "
    expected = "The quick brown fox\njumps over\n\n  the lazy dog,\n12345678901234567890123\ntimes.  \n"
    for size in (1, 3, 7, 100):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert wrapped(monkeypatch, capsys, *pieces) == expected
    assert wrapped(monkeypatch, capsys, "狐狸 狐狸 狐狸 狐狸 狐狸") == "狐狸 狐狸 狐狸 狐狸\n狐狸\n"


def test_code_keeps_its_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code = "```python\nif this and that and those:\n    pass\n```\n"
    text = wrapped(monkeypatch, capsys, *code, "and then some prose, which is wrapped")
    assert text == f"{code}and then some prose,\nwhich is wrapped\n"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Types keys on a terminal."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with create_pipe_input() as keys, create_app_session(input=keys):
        yield lambda text: keys.send_bytes(text.encode(errors="surrogateescape"))


UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


def test_the_history_outlives_the_chat(typed: Callable[[str], None], tmp_path: Path):
    path = tmp_path / "state" / "history"
    typed("one\rone\r\r" + pasted("two\nlines") + f"\rgröße\r{CTRL_D}")
    reader = TurnReader(path, {})
    assert list(iter(reader.read, None)) == [Turn(text, False) for text in ("one", "one", "two\nlines", "größe")]
    assert list(FileHistory(str(path)).load_history_strings()) == ["größe", "two\nlines", "one"]
    assert path.parent.stat().st_mode & 0o777 == 0o700
    again = TurnReader(path, {})
    typed("new\r")
    assert again.read() == Turn("new", False)  # by then the history is loaded
    typed(f"{UP}{UP}{UP}\r{CTRL_D}")
    assert again.read() == Turn("two\nlines", False) and again.read() is None


def test_a_history_that_cannot_be_written_ends_no_chat(typed: Callable[[str], None], tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "history", tmp_path / "folder", None):
        typed("one\r")
        assert TurnReader(path, {}).read() == Turn("one", False)


def test_tab_completes_commands_and_what_is_behind_them(typed: Callable[[str], None], tmp_path: Path):
    (tmp_path / "a chat.json").write_text("")
    reader = TurnReader(None, {"/draft": ("on", "off"), "/set": ("top_k", "seed"), "/load": (), "/help": None})
    for keys, text in (
        ("/dr\t of\t", "/draft off"),
        ("/s\t t\t 4", "/set top_k 4"),
        (f"/load {tmp_path}/a c\t", f"/load {tmp_path}/a chat.json"),
        ("/help me\t", "/help me"),
        ("dr\tx", "drx"),
    ):
        typed(f"{keys}\r")
        assert reader.read() == Turn(text, text.startswith("/"))


def test_ctrl_c_drops_what_was_typed(typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]):
    typed(f'"""\rdropped\r{CTRL_C}kept \\\ron\r{CTRL_D}')
    reader = TurnReader(None, {})
    assert reader.read() == Turn("kept \non", False) and reader.read() is None
    said = capsys.readouterr()
    assert "Ctrl-D or /quit quits." in said.err and said.out == ""  # stdout is a file here, for answers alone
    assert said.err.count("you> ") >= 3 and said.err.count("...> ") >= 3


def test_keys_that_are_not_utf_8(typed: Callable[[str], None], tmp_path: Path):
    typed("a\udcff\r")
    with pytest.raises(PromptError, match=r"What was typed is not valid UTF-8\."):
        TurnReader(tmp_path / "history", {}).read()


def test_standard_input_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(PromptError, match="not valid UTF-8"):
        TurnReader(None, {}).read()
