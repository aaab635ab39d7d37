"""Answers with many log-probabilities are written in a process, so that no other request waits for them."""

from typing import Any

import pytest
import servers

from foredraft.serve import conversions
from foredraft.serve.conversions import Apart
from foredraft.serve.workers import Worker

GREEDY = {"temperature": 0.0, "min_tokens": 40, "ignore_eos": True}
LONG: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["abc", "xyz"], "n": 2, "max_tokens": 40, "logprobs": 15, "echo": True, **GREEDY},
    "/v1/completions?scores": {"prompt": ["abc" * 20, "xyz" * 20], "max_tokens": 0, "logprobs": 20, "echo": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "abc"}],
        "n": 3,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 20,
        "return_steps": True,
        **GREEDY,
    },
    "/v1/responses": {
        "input": "abc",
        "max_output_tokens": 120,
        "top_logprobs": 20,
        "temperature": 0.0,
        "include": ["message.output_text.logprobs"],
    },
}


def plain(answer: Any) -> Any:
    """An answer without what differs from run to run: ids and times."""
    if isinstance(answer, list):
        return [plain(each) for each in answer]
    if isinstance(answer, dict):
        differ = ("id", "created", "created_at", "draft_seconds", "seconds", "prompt_tokens_details")
        return {name: plain(value) for name, value in answer.items() if name not in differ}
    return answer


def test_long_answers_are_written_alike_in_a_process(monkeypatch: pytest.MonkeyPatch):
    rendered: list[Any] = []
    run = Worker.run

    async def counted(self: Worker, function: Any, *args: Any, **options: Any) -> Any:
        rendered.append(function)
        return await run(self, function, *args, **options)

    monkeypatch.setattr(Worker, "run", counted)
    with servers.served(servers.generator()) as server:
        apart = [server.post(body, path) for path, body in LONG.items()]
        assert rendered == [Apart.render] * len(LONG)
        monkeypatch.setattr(conversions, "_SHORT_VALUES", 10**6)
        here = [server.post(body, path) for path, body in LONG.items()]
    assert rendered == [Apart.render] * len(LONG)
    for first, second in zip(apart, here, strict=True):
        assert first.status_code == 200, first.text
        assert first.headers["content-type"] == second.headers["content-type"] == "application/json"
        assert plain(first.json()) == plain(second.json())
        assert "logprobs" in first.text
