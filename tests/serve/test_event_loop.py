"""What grows with a body does not run on the event loop, which all requests share."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import servers
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.types import Message

from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import check_known
from foredraft.serve.bodies import SHORT_BYTES, Bodies
from foredraft.serve.errors import ApiError
from foredraft.serve.schema import CompletionRequest

ENTRIES = 50_000
COMPLETION: dict[str, Any] = {"prompt": "abc", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
WORDS = "some words " * 50_000
FUNCTION = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "a prediction": ("/v1/completions", {**COMPLETION, "prediction": {"type": "content", "content": WORDS}}, 200),
    "wrong biases": ("/v1/completions", {**COMPLETION, "logit_bias": {str(i): "" for i in range(ENTRIES)}}, 400),
    "biases": ("/v1/completions", {**COMPLETION, "logit_bias": {str(i): 1 for i in range(ENTRIES)}}, 400),
    "wrong metadata": ("/v1/completions", {**COMPLETION, "metadata": {str(i): 1 for i in range(ENTRIES)}}, 400),
    "metadata": (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 1, "metadata": {str(i): "" for i in range(ENTRIES)}},
        200,
    ),
    "a long name": ("/v1/completions", {"a" * 500_000: 1}, 400),
    "another model": ("/v1/completions", {**COMPLETION, "model": "a" * 500_000}, 404),
    "prompts": ("/v1/completions", {"prompt": ["a"] * ENTRIES}, 400),
    "a long prompt": ("/v1/completions", {"prompt": [1] * ENTRIES}, 400),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * ENTRIES}, 400),
    "tools": ("/v1/responses", {"input": "a", "tools": [{**FUNCTION["function"], "type": "function"}] * 5000}, 400),
    "tokens": ("/tokenize", {"prompt": WORDS, "return_token_strs": True}, 200),
    "text": ("/detokenize", {"tokens": [5] * ENTRIES}, 200),
}
"""By name: the path, a body, and the status of its answer."""


@pytest.fixture(scope="module")
def running() -> Iterator[servers.Running]:
    with servers.served(servers.generator()) as server:
        server.post({"tokens": [5] * ENTRIES}, "/detokenize")  # starts the process
        yield server


def calls_on_loop(running: servers.Running, act: Callable[[], Any]) -> "Counter[str]":
    """Calls of Python's and C's functions in the thread of the event loop while a function runs, by name."""
    loop = running.server._loop
    assert loop is not None
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1
        elif event == "c_call":
            found[argument.__name__] += 1

    loop.call_soon_threadsafe(sys.setprofile, note)
    try:
        act()
    finally:
        loop.call_soon_threadsafe(sys.setprofile, None)
    return found


@pytest.mark.parametrize("case", BODIES)
def test_a_long_body_is_not_read_on_the_loop(case: str, running: servers.Running):
    path, body, status = BODIES[case]
    raw = json.dumps(body)
    assert len(raw) > 4 * SHORT_BYTES

    def send() -> None:
        headers = {"content-type": "application/json"}
        answer = httpx.post(running.url + path, content=raw, headers=headers, timeout=600)
        assert answer.status_code == status, answer.text[:500]

    found = calls_on_loop(running, send)
    assert found["run_asgi"] or found["__call__"], "the right thread is watched"
    assert not found.keys() & {"raw_decode", "encode_many", "check_known", "get_close_matches"}
    assert found.total() < ENTRIES, found.most_common(5)


def test_a_short_body_is_not_read_on_the_loop_either(running: servers.Running):
    found = calls_on_loop(running, lambda: running.post({**COMPLETION, "metadata": {"a": "b"}}))
    assert not found.keys() & {"raw_decode", "encode_many", "check_known"}


def test_validation_stops_after_a_hundred_faults():
    entries: dict[str, Any] = {str(i): 1 for i in range(1000)}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "a", "metadata": entries})
    assert caught.value.error_count() <= 100 and "metadata.0" in str(caught.value)
    last = {**dict.fromkeys(entries, "x"), "999": 1}
    with pytest.raises(ValidationError, match=r"metadata\.999"):
        CompletionRequest.model_validate({"prompt": "a", "metadata": last})
    good = dict.fromkeys(entries, "x")
    assert CompletionRequest.model_validate({"prompt": "a", "metadata": good}).metadata == good


def test_long_names_are_not_compared_with_the_known_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("difflib.get_close_matches", lambda *_, **__: pytest.fail("it takes seconds"))
    with pytest.raises(OptionError, match="Unknown field"):
        check_known("field", {"a" * 4_000_000: 1}, ["seed"])


def received(bodies: Bodies, parts: list[bytes], hold: asyncio.Event) -> "asyncio.Task[bytes]":
    """Receive a body of several parts, and keep it until ``hold``."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request"})

    async def receive() -> Message:
        return messages.pop(0)

    async def run() -> bytes:
        async with bodies.received(Headers({}), receive) as body:
            await hold.wait()
            return body

    return asyncio.ensure_future(run())


def test_large_bodies_have_a_limit_together():
    async def main() -> None:
        most = 4 * SHORT_BYTES
        bodies, hold = Bodies(most), asyncio.Event()
        large = [b"a" * SHORT_BYTES, b"b" * (most - SHORT_BYTES)]
        held = [received(bodies, large, hold) for _ in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many large bodies") as refused:
            await received(bodies, large, hold)
        assert refused.value.status == 503 and refused.value.retry_after
        short = received(bodies, [b"c"], hold)
        hold.set()
        assert await short == b"c" and [await each for each in held] == [b"".join(large)] * 16
        assert await received(bodies, large, hold) == b"".join(large), "room again"
        with pytest.raises(ApiError, match=f"more than {most} bytes"):
            await received(bodies, [*large, b"x"], hold)

    asyncio.run(main())
