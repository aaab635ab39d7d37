"""Grammars and bodies that take long to convert: they end within their limits, and nobody waits for them."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import servers

from foredraft.core.sampling.grammar import Grammar
from foredraft.serve import conversions
from foredraft.serve.conversions import Apart, Conversions
from foredraft.serve.convert import Converter
from foredraft.serve.limited_calls import LimitedCalls, Limits
from foredraft.serve.options import ServeOptions
from foredraft.serve.schema import ChatRequest
from foredraft.serve.service import converter_for

_SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 5000} for i in range(30)}}
LONG: dict[str, Any] = {"json": _SCHEMA}
"""Compiles for more than 20 seconds."""
LARGE: dict[str, Any] = {"regex": "|".join(f"[ab]{{{size}}}" for size in range(1, 800))}
"""Takes more than 8 MiB."""


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grammars that were tried in a process."""
    seen: list[Any] = []
    run = LimitedCalls.run

    async def counted(self: LimitedCalls, function: Any, *args: Any, **options: Any) -> Any:
        if function is Apart.try_grammar:
            seen.append(args[0])
        return await run(self, function, *args, **options)

    monkeypatch.setattr(LimitedCalls, "run", counted)
    return seen


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def ask(server: servers.Running, grammar: dict[str, Any], **fields: Any) -> httpx.Response:
    return server.post({"prompt": "abc", "max_tokens": 2, "structured_outputs": grammar, **fields})


def trying(server: servers.Running, pool: ThreadPoolExecutor, tries: list[Any], **fields: Any) -> "Future[Any]":
    """A request whose grammar is being compiled."""
    asked = pool.submit(ask, server, LONG, **fields)
    servers.until(lambda: len(tries) > 1 or asked.done())  # the second, longer try
    return asked


@pytest.mark.parametrize(
    ("grammar", "limit", "option"),
    [
        (LONG, {"grammar_seconds": 0.5}, "--grammar-seconds"),
        (LARGE, {"grammar_memory_bytes": 2**23}, "--grammar-memory-bytes"),
    ],
)
def test_a_grammar_over_a_limit_is_a_400_that_names_the_option(
    tries: list[Any], grammar: dict[str, Any], limit: dict[str, Any], option: str
):
    with servers.served(servers.generator(), **limit) as server:
        answer = ask(server, grammar)
        assert answer.status_code == 400 and option in answer.json()["error"]["message"]
        before = len(tries)
        assert ask(server, grammar).json() == answer.json()
        assert len(tries) == before  # it is known by now
        assert ask(server, {"choice": ["ab", "ba"]}).json()["choices"][0]["text"] in ("ab", "ba")


def test_others_do_not_wait_for_a_long_compilation(tries: list[Any], pool: ThreadPoolExecutor):
    with servers.served(servers.generator(), grammar_seconds=60.0, request_timeout=30.0) as server:
        long = [trying(server, pool, tries) for _ in range(3)]
        assert server.post({"prompt": "abc", "max_tokens": 2}).status_code == 200
        assert server.post({"prompt": "abc"}, path="/tokenize").status_code == 200
        assert ask(server, {"choice": ["a", "b"]}).json()["choices"][0]["text"] in ("a", "b")
        assert not any(each.done() for each in long)
        assert tries.count(Grammar.json_schema(_SCHEMA)) == 2  # once, with little time and with all of it
        server.service.draining = True
        server.server.should_exit = True
        for each in long:
            answer = each.result()
            assert answer.status_code == 503 and "about to stop" in answer.text


@pytest.mark.parametrize("patience", [60.0, 1e-4])
def test_long_grammars_take_turns_after_everything_else(monkeypatch: pytest.MonkeyPatch, patience: float):
    """Where nothing is left for them they get a share."""
    monkeypatch.setattr(conversions, "_FIRST_SECONDS", 0.004)
    monkeypatch.setattr(conversions, "_PATIENCE", patience)
    tried: list[tuple[float | None, bool]] = []
    active = [0, 0]  # now, at most
    run, here = LimitedCalls.run, Conversions._here

    async def counted(method: Any, *args: Any, long: bool, **options: Any) -> Any:
        active[0] += long
        active[1] = max(active)
        try:
            return await method(*args, **options)
        finally:
            active[0] -= long

    async def trying(self: LimitedCalls, function: Any, grammar: Any, limits: Limits) -> Any:
        tried.append((limits.seconds, limits.last))
        return await counted(run, self, function, grammar, limits=limits, long=limits.seconds == 10.0)

    async def compiling(self: Conversions, thread: Any, grammar: Any) -> Any:
        assert thread is self._long_compiler
        return await counted(here, self, thread, grammar, long=True)

    monkeypatch.setattr(LimitedCalls, "run", trying)
    monkeypatch.setattr(Conversions, "_here", compiling)
    generator = servers.generator()

    async def both() -> None:
        options = ServeOptions(grammar_seconds=10.0)
        made = Conversions(converter_for(generator, 7), generator.engine.compile_grammar, options)
        try:
            texts = ["|".join(f"[{letter}]{{{size}}}" for size in range(1, 300)) for letter in ("ab", "cd")]
            await asyncio.gather(*(made.compiled(Grammar.regex(text)) for text in texts))
        finally:
            made.close()

    asyncio.run(both())
    assert active == [0, 1]
    each = [(0.004, False), (10.0, True)] + [(10.0, False)] * (patience < 1)
    assert sorted(tried) == sorted(each * 2)


def test_a_compilation_ends_with_its_request(pool: ThreadPoolExecutor):
    with servers.served(servers.generator(), grammar_seconds=600.0, request_timeout=5.0) as server:
        conversions: Conversions = server.server.app.state.api.conversions
        began = time.monotonic()
        answer = pool.submit(ask, server, LONG)
        servers.until(lambda: conversions.compiling == 1)
        assert answer.result().status_code == 408 and time.monotonic() - began >= 5.0
        servers.until(lambda: conversions.compiling == 0)
        body = {"prompt": "abc", "structured_outputs": LONG}
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(server.url + "/v1/completions", json=body, timeout=1.0)
        servers.until(lambda: conversions.compiling == 0)
        assert server.get("/metrics").text.count('foredraft_errors_total{code="408"} 2.0') == 1


def test_long_bodies_are_converted_alike_in_a_process():
    generator = servers.generator()
    converter = converter_for(generator, 7)
    chat: Any = [{"role": "user", "content": "hi there"}] * 50
    body = ChatRequest(messages=chat, temperature=0.5, stop=["x"])
    wrong = ChatRequest(messages=chat, chat_template_kwargs={"tokenize": True})

    async def both() -> None:
        conversions = Conversions(converter, generator.engine.compile_grammar, ServeOptions())
        try:
            short, long = [await conversions.convert(Converter.chat, body, size) for size in (100, 10**6)]
            assert short == long
            assert short.prompts == converter.chat(body).prompts
            errors = []
            for size in (100, 10**6):
                with pytest.raises(Exception, match="is not a variable") as caught:
                    await conversions.convert(Converter.chat, wrong, size)
                errors.append((type(caught.value), str(caught.value)))
            assert errors[0] == errors[1]
        finally:
            conversions.close()

    asyncio.run(both())


def test_a_grammar_that_delays_the_steps_of_others_ends():
    """Each token can belong to more parts than the one before, so masks take longer and longer."""
    many = {"grammar": 'root ::= root root root | root root | "a" | ""'}
    one = {"grammar": 'root ::= "a" root | ""'}
    fields: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 0.0}
    with servers.served(servers.generator(), grammar_delay_seconds=0.2) as server:
        answer = ask(server, many, **fields)
        assert answer.status_code == 400 and "--grammar-delay-seconds" in answer.json()["error"]["message"]
        whole = ask(server, one, **fields).json()
        assert whole["usage"]["completion_tokens"] == 900 and set(whole["choices"][0]["text"]) == {"a"}
