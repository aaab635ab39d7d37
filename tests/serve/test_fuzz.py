"""Whatever a body holds, the answer is one or an error object, and the server lives."""

import asyncio
import gc
import json
import random
from typing import Any

import httpx
import openai
import pytest
import schemathesis
import servers
from hypothesis import HealthCheck, given, settings, strategies as st

import tiny
from foredraft.engine.request import Sequence
from foredraft.serve.responses.schema import ResponsesRequest
from foredraft.serve.schema import ChatRequest, CompletionRequest

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-3, 25) | st.floats() | st.text(max_size=8)
)
SURROGATES = st.sampled_from(["\ud800", "\udfff x", "\x00"])
JSON = st.recursive(
    SCALARS | SURROGATES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "x"])}, optional={"content": JSON}),
    max_size=2,
)


def bodies(model: Any, own: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Bodies with known fields of any value, most of them with a valid prompt."""
    names = sorted(set(model.model_fields) - own.keys() - {"max_tokens", "max_completion_tokens", "n"})
    some = st.dictionaries(st.sampled_from(names) | st.text(max_size=4), JSON, max_size=3)
    return st.builds(lambda a, b: {**a, **b}, some, st.fixed_dictionaries(own))


SMALL = {"max_tokens": st.integers(-1, 3) | SCALARS.filter(lambda x: x is not None and not isinstance(x, int))}
COMPLETIONS = bodies(CompletionRequest, {"prompt": st.just("ab") | JSON, **SMALL})
CHATS = bodies(ChatRequest, {"messages": st.just([{"role": "user", "content": "a"}]) | MESSAGES | JSON, **SMALL})
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["message", "function_call", "function_call_output", "x"]) | JSON,
            "role": st.sampled_from(["user", "assistant", "developer"]),
            "content": st.just([{"type": "output_text", "text": "a"}]) | JSON,
            "call_id": SCALARS,
            "output": JSON,
        },
    ),
    max_size=2,
)
RESPONSES = bodies(ResponsesRequest, {"input": st.just("a") | ITEMS | JSON, "max_output_tokens": SMALL["max_tokens"]})
ANY = (
    st.tuples(st.just("completions"), COMPLETIONS)
    | st.tuples(st.just("chat/completions"), CHATS)
    | st.tuples(st.just("responses"), RESPONSES)
)


def is_error_object(answer: Any) -> None:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == answer.status_code >= 400
    assert error["message"] and "Traceback" not in answer.text


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_malformed_bodies_get_error_objects(server: servers.Running, examples: int):
    with httpx.Client(base_url=server.url, timeout=60) as client:

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(ANY)
        def check(sent: tuple[str, Any]) -> None:
            path, body = sent
            answer = client.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
            if answer.status_code == 200:
                return
            assert answer.status_code < 500, (answer.text, body)
            is_error_object(answer)

        check()
        assert client.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_schemathesis_finds_no_failure_of_the_server():
    with servers.served(servers.generator(), default_max_tokens=4) as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        statuses: set[int] = set()
        for found in schema.get_all_operations():
            operation = found.ok()

            @settings(max_examples=60, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def one(case: Any) -> None:
                if isinstance(case.body, dict) and "tokens" not in case.body:
                    case.body["max_tokens"] = 2
                answer = case.call(timeout=60)
                assert answer.status_code < 500, answer.text
                if answer.status_code >= 400:
                    is_error_object(answer)
                statuses.add(answer.status_code)

            one()
        assert {200, 400} <= statuses
        assert running.get("/health").status_code == 200


@pytest.mark.slow
def test_a_thousand_requests_over_64_streams_and_200_vanishing_clients():
    choose = random.Random(1)
    cases = [([choose.randrange(96) for _ in range(choose.randint(1, 40))], choose.randint(1, 40)) for _ in range(100)]
    drafter = tiny.ScriptedDrafter(tiny.Liar([]), max_nodes=7)
    alone = [servers.generator().generate(prompt, max_new_tokens=new).text for prompt, new in cases]

    async def main(url: str) -> None:
        gate = asyncio.Semaphore(64)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:

            async def one(number: int) -> None:
                prompt, new = cases[number % len(cases)]
                options: Any = {"model": servers.NAME, "prompt": prompt, "max_tokens": new, "temperature": 0.0}
                async with gate:
                    stream = await client.completions.create(stream=True, **options)
                    text = "".join([chunk.choices[0].text async for chunk in stream])
                assert text == alone[number % len(cases)]

            async def vanishing(number: int) -> None:
                prompt, _ = cases[number % len(cases)]
                options: Any = {"model": servers.NAME, "prompt": prompt, "max_tokens": 500, "temperature": 0.0}
                async with gate:
                    call = client.completions.create(stream=bool(number % 2), **options)
                    task = asyncio.ensure_future(call)  # type: ignore[arg-type]
                    await asyncio.sleep(choose.random() * 0.3)
                    if task.done() and number % 2:
                        await task.result().close()
                    task.cancel()

            await asyncio.gather(*map(one, range(1000)), *map(vanishing, range(200)))

    with servers.served(servers.generator(drafter=drafter), max_queue=2000) as running:
        asyncio.run(main(running.url))
        servers.until(lambda: running.service.idle and running.generator.engine.running == 0)
        assert running.generator.engine.waiting == 0
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is Sequence]
        assert running.get("/health").status_code == 200
