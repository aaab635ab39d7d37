"""The gateway before replicas, here in one process: answers are those of a server, and a replica's death is hidden."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence as Seq
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import tiny
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.serve.inprocess import AsgiRequest, InProcess
from foredraft.serve.options import ServeOptions
from foredraft_scale.gateway import Gateway, Message, ReplicaLost

PROMPT = {"prompt": list(range(1, 20)), "max_tokens": 12, "temperature": 0}


def generator() -> Generator:
    return tiny.generator(CausalLM(tiny.build("llama")))


class Pair:
    """Two replicas; the first one dies after ``lives`` messages of each answer."""

    def __init__(self, options: ServeOptions, lives: int) -> None:
        self.servers = {name: InProcess(generator(), ("tiny",), options) for name in "ab"}
        self.lives = lives
        self.asked: list[str] = []

    async def answer(self, call: AsgiRequest, blocks: tuple[bytes, ...]) -> AsyncGenerator[Message, None]:
        name = "ab"[len(self.asked) % 2]
        self.asked.append(name)
        count = 0
        async for message in self.servers[name].answer(call):
            if name == "a" and count >= self.lives:
                raise ReplicaLost
            count += 1
            yield message

    async def all_replicas(self, call: AsgiRequest) -> Mapping[str, Seq[Message]]:
        found = {}
        for name, server in self.servers.items():
            found[name] = [each async for each in server.answer(call)]
        return found


def through(work: Callable[[httpx.AsyncClient, Pair], Any], lives: int = 10**6, **options: Any) -> Any:
    """What ``work`` returns, with a client of a gateway before a pair."""

    async def run() -> Any:
        chosen = ServeOptions(**options)
        pair = Pair(chosen, lives)
        async with AsyncExitStack() as stack:
            for server in pair.servers.values():
                await server.start()
                stack.push_async_callback(server.stop)
            transport = httpx.ASGITransport(Gateway(pair, chosen))  # type: ignore[arg-type]
            client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://t"))
            return await work(client, pair)

    return asyncio.run(run())


def posted(body: dict[str, Any], lives: int = 10**6, **options: Any) -> tuple[httpx.Response, list[str]]:
    async def work(client: httpx.AsyncClient, pair: Pair) -> tuple[httpx.Response, list[str]]:
        return await client.post("/v1/completions", json=body), pair.asked

    return through(work, lives, **options)


def events(answer: httpx.Response) -> list[Any]:
    """The data lines of a stream without the last one, which is ``[DONE]``."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_are_those_of_a_replica():
    answer, asked = posted({**PROMPT, "return_token_ids": True})
    expected = generator().generate(PROMPT["prompt"], max_new_tokens=12).tokens
    assert answer.status_code == 200 and asked == ["a"]
    assert answer.json()["choices"][0]["token_ids"] == expected
    assert int(answer.headers["content-length"]) == len(answer.content) and "x-request-id" in answer.headers


@pytest.mark.parametrize("lives", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_got_nothing_is_repeated(lives: int, stream: bool):
    answer, asked = posted({**PROMPT, "stream": stream}, lives)
    assert answer.status_code == 200 and asked == ["a", "b"]
    if stream:
        found = events(answer)
        assert "error" not in found[-1]
        assert [each["choices"][0]["finish_reason"] for each in found].count("length") == 1
    else:
        assert answer.json()["usage"]["completion_tokens"] == 12


def test_a_stream_that_has_begun_ends_with_an_error_object():
    answer, asked = posted({**PROMPT, "stream": True}, 3)
    assert answer.status_code == 200 and asked == ["a"]
    *chunks, last = events(answer)
    assert len(chunks) == 2 and all("choices" in chunk for chunk in chunks)
    assert last["error"]["code"] == 503 and last["error"]["type"] == "ServiceUnavailableError"


def test_a_request_that_kills_every_replica_is_refused(monkeypatch: pytest.MonkeyPatch):
    async def answer(self: Pair, call: AsgiRequest, blocks: tuple[bytes, ...]) -> AsyncGenerator[Message, None]:
        self.asked.append("x")
        raise ReplicaLost
        yield {}

    monkeypatch.setattr(Pair, "answer", answer)
    monkeypatch.setattr("foredraft_scale.gateway._PAUSES", (0.0, 0.0, 0.0))
    refused, asked = posted(PROMPT)
    assert refused.status_code == 503 and len(asked) == 3
    assert refused.json()["error"]["code"] == 503 and refused.headers["retry-after"] == "1"


def test_keys_and_limits_hold_through_the_gateway():
    async def work(client: httpx.AsyncClient, pair: Pair) -> list[int]:
        key = {"authorization": "Bearer one"}
        answers = [
            await client.post("/v1/completions", json=PROMPT),
            await client.post("/v1/completions", json=PROMPT, headers=key),
            await client.post("/v1/completions", json={**PROMPT, "colour": 1}, headers=key),
            await client.post("/v1/completions", content=b"x" * 2000, headers=key),
            await client.get("/metrics"),
            await client.get("/metrics", headers=key),
            await client.get("/"),
            await client.get("/health"),
            await client.get("/nowhere", headers=key),
        ]
        assert all("error" in each.json() for each in answers if each.status_code >= 400)
        return [each.status_code for each in answers]

    found = through(work, api_key=("one",), max_body_bytes=1000)
    assert found == [401, 200, 400, 413, 401, 200, 200, 200, 404]


def test_metrics_name_the_replica_and_the_page_sees_the_sum():
    async def work(client: httpx.AsyncClient, pair: Pair) -> tuple[str, dict[str, Any]]:
        for _ in range(3):
            await client.post("/v1/completions", json=PROMPT)
        return (await client.get("/metrics")).text, (await client.get("/live")).json()

    text, live = through(work)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    prompts = {each.labels["replica"]: each.value for each in families["foredraft_prompt_tokens"].samples}
    assert prompts == {"a": 38.0, "b": 19.0}
    buckets = families["foredraft_e2e_request_latency_seconds"].samples
    assert {each.labels["replica"] for each in buckets} == {"a", "b"}
    assert live["max_rows"] == 2 * generator().engine.max_rows and live["running"] == 0


def test_leaving_an_answer_cancels_the_request():
    async def work(client: httpx.AsyncClient, pair: Pair) -> None:
        server = pair.servers["a"]
        call = AsgiRequest({"method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}, b"")
        body = json.dumps({**PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True}).encode()
        call = AsgiRequest({**call.scope, "headers": [(b"content-type", b"application/json")]}, body)
        messages = server.answer(call)
        for _ in range(3):
            await anext(messages)
        service = server._app.state.service
        assert not service.idle
        await messages.aclose()
        assert service.idle

    through(work)
