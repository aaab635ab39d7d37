"""Grammars and bodies that take long to convert: they end within their limits, and nobody waits for them."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import servers

from foredraft.core.sampling.grammar import Grammar
from foredraft.serve import conversions
from foredraft.serve.conversions import _REST_SECONDS, _WORK_SECONDS, Apart, Conversions
from foredraft.serve.options import ServeOptions
from foredraft.serve.reading import BodyReader, RequestLabel
from foredraft.serve.schema import ChatRequest
from foredraft.serve.service import converter_for
from foredraft.serve.workers import Limits, Worker

_SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(3000)}}
LONG: dict[str, Any] = {"json": _SCHEMA}
"""Compiles for more than 20 seconds."""
LARGE: dict[str, Any] = {"regex": "|".join(f"[ab]{{{size}}}" for size in range(1, 800))}
"""Takes more than 8 MiB."""


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grammars that were tried in a process."""
    seen: list[Any] = []
    run = Worker.run

    async def counted(self: Worker, function: Any, *args: Any, **options: Any) -> Any:
        if function is Apart.try_grammar:
            seen.append(args[0])
        return await run(self, function, *args, **options)

    monkeypatch.setattr(Worker, "run", counted)
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
        assert tries.count(Grammar.json_schema(_SCHEMA)) <= 3  # once a level, for all three of them
        server.service.draining = True
        server.server.should_exit = True
        for each in long:
            answer = each.result()
            assert answer.status_code == 503 and "about to stop" in answer.text


TRIED = [Grammar.regex("|".join(f"[{letter}]{{{size}}}" for size in range(1, 300))) for letter in ("ab", "cd")]
"""Each takes about 0.1 s, and is too large to be handed over."""


def compiled_by(conversions: Callable[[], Conversions], grammars: list[Grammar]) -> list[Any]:
    """The grammars, compiled at once."""

    async def all_of_them() -> list[Any]:
        made = conversions()
        try:
            return await asyncio.gather(*map(made.compiled, grammars))
        finally:
            made.close()

    return asyncio.run(all_of_them())


def made_conversions(busy: Callable[[], bool] = lambda: False) -> Conversions:
    generator = servers.generator()
    options = ServeOptions(grammar_seconds=10.0)
    return Conversions(
        BodyReader(converter_for(generator, 7), (servers.NAME,)), generator.engine.compile_grammar, options, busy
    )


def test_long_grammars_have_processes_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversions, "_FIRST_SECONDS", (0.002, 0.004))
    tried: list[float] = []
    workers: dict[float, set[Worker]] = {}
    run = Worker.run

    async def trying(self: Worker, function: Any, grammar: Any, limits: Limits) -> Any:
        assert limits.seconds is not None
        tried.append(limits.seconds)
        workers.setdefault(limits.seconds, set()).add(self)
        return await run(self, function, grammar, limits=limits)

    monkeypatch.setattr(Worker, "run", trying)
    compiled_by(made_conversions, TRIED)
    assert sorted(tried) == [0.002, 0.002, 0.004, 0.004, 10.0, 10.0]
    assert [len(each) for each in workers.values()] == [1, 1, 1] and len(set[Worker]().union(*workers.values())) == 3


def test_small_grammars_are_handed_over_and_large_ones_compiled_again(monkeypatch: pytest.MonkeyPatch):
    small = Grammar.regex("[ab]{40}")
    again: list[Grammar] = []
    here = Conversions._here

    async def compiling(self: Conversions, thread: Any, grammar: Grammar) -> Any:
        again.append(grammar)
        return await here(self, thread, grammar)

    monkeypatch.setattr(Conversions, "_here", compiling)
    found = compiled_by(made_conversions, [small, TRIED[0]])
    assert again == [TRIED[0]] and None not in found


def test_grammars_rest_while_requests_run_and_go_on_when_none_run(
    monkeypatch: pytest.MonkeyPatch, tries: list[Any], pool: ThreadPoolExecutor
):
    told: list[int] = []
    tell = Conversions._tell
    monkeypatch.setattr(Conversions, "_tell", lambda self, number: told.append(number) or tell(self, number))
    with servers.served(servers.generator(), grammar_seconds=60.0, request_timeout=30.0) as server:
        asked = trying(server, pool, tries)
        time.sleep(5 * (_WORK_SECONDS + _REST_SECONDS))
        assert not told
        while signal.SIGSTOP not in told:
            assert server.post({"prompt": "abc", "max_tokens": 200, "ignore_eos": True}).status_code == 200
        servers.until(lambda: server.service.idle and told[-1] == signal.SIGCONT)
        count = len(told)
        time.sleep(5 * (_WORK_SECONDS + _REST_SECONDS))
        assert told == [signal.SIGSTOP, signal.SIGCONT] * (count // 2) and not asked.done()
        server.service.draining = True
        server.server.should_exit = True
        assert asked.result().status_code == 503


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


def test_long_bodies_are_read_alike_in_a_process(monkeypatch: pytest.MonkeyPatch):
    label = RequestLabel("1", 2)
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi there"}] * 50,
        "stop": ["x"],
        "max_tokens": 3,
        "return_token_ids": True,
        "stream": True,
        "prediction": {"type": "content", "content": "what is expected"},
    }
    wrong = {**fields, "chat_template_kwargs": {"tokenize": True}}
    sent: list[Any] = []
    run = Worker.run

    async def running(self: Worker, *args: Any) -> Any:
        sent.append(args)
        return await run(self, *args)

    monkeypatch.setattr(Worker, "run", running)

    async def both() -> None:
        made = made_conversions()

        async def read(body: dict[str, Any], shortest: int) -> Any:
            monkeypatch.setattr(conversions, "SHORT_BYTES", shortest)
            return await made.read(BodyReader.chat, json.dumps(body).encode(), label)

        try:
            short, long = [await read(fields, size) for size in (10**6, 0)]
            assert short == long and short.stream and short.renderer.return_token_ids
            job = short.renderer.job
            assert job.prompts == converter_for(servers.generator(), 7).chat(ChatRequest(**fields)).prompts
            assert job.params.prediction == tuple(servers.tokenizer().encode_many(["what is expected"])[0])
            assert sent == [(Apart.read, "chat", json.dumps(fields).encode(), label)]
            errors = []
            for size in (10**6, 0):
                with pytest.raises(Exception, match="is not a variable") as caught:
                    await read(wrong, size)
                errors.append((type(caught.value), str(caught.value)))
            assert errors[0] == errors[1]
        finally:
            made.close()

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
