from pathlib import Path
from typing import Any

import pytest
from cli_cases import Run

from foredraft.engine.generator import Generator

SHORT = ("--max-new-tokens", "8", "--eos-token-id", "8191")


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


def test_every_turn_sends_the_whole_conversation(run: Run, model: Path, sent):
    ended = run("chat", "-m", model, *SHORT, "--system", "Be brief.", stdin="Hello\n\n  Who are you?  \n")
    assert (ended.status, ended.err) == (0, "")
    first, second = sent
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert second[:2] == first and second[3] == {"role": "user", "content": "Who are you?"}
    assert second[2]["role"] == "assistant" and second[2]["content"]
    assert ended.out.startswith(second[2]["content"] + "\n") and ended.out.endswith("\n")


def test_reset_forgets_all_but_the_system_message(run: Run, model: Path, sent):
    ended = run("chat", "-m", model, *SHORT, "--system", "Be brief.", stdin="Hello\n/reset\nAgain\n")
    assert ended.status == 0 and "Started a new conversation." in ended.out
    assert [message["content"] for message in sent[1]] == ["Be brief.", "Again"]


def test_commands(run: Run, model: Path, sent):
    ended = run("chat", "-m", model, *SHORT, stdin="/stats\nHello\n/stats\n/help\n/nonsense\n/exit\nnever said\n")
    assert ended.status == 0
    assert "0 turns · 0 tokens" in ended.out and "1 turn · 8 tokens" in ended.out
    assert "/reset  start a new conversation" in ended.out
    assert ended.sentence == "Unknown command '/nonsense'. Known: /help, /reset, /stats, /exit."
    assert len(sent) == 1


def test_a_talk_that_outgrows_the_context_ends_with_a_sentence(run: Run, model: Path):
    ended = run("chat", "-m", model, *SHORT, stdin="Hello\n" + "word " * 5000 + "\nnever said\n")
    assert ended.status == 2
    assert "4096" in ended.sentence and ended.out.count("\n") >= 1


def test_sampling_with_a_seed_is_repeatable(run: Run, model: Path):
    options = ("chat", "-m", model, *SHORT, "--temperature", "1", "--seed", "3")
    first, second = (run(*options, stdin="Hello\n").out for _ in range(2))
    assert first == second != run(*options[:-1], "4", stdin="Hello\n").out
