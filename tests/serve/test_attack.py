"""An attack with bodies made from the schema and by hand: none harms the requests beside it."""

import asyncio
import functools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import servers
from pydantic import BaseModel

import tiny
from foredraft.drafters.prompt_lookup import Options, PromptLookup
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.serve.responses.schema import ResponsesRequest
from foredraft.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, SamplingFields, TokenizeRequest

WHOLE = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**70]
FRACTIONS = ["0.5", "-0.0", "1e-9", "1e-38", "1e-45", "5e-324", "1e-400", "1e16", "1e38", "3.5e38", "-1e39", "1e300"]
WRONG = ["1.7976931348623157e308", "1e999", "NaN", "Infinity", "-Infinity", "true", '"1"', "null", "[]", "{}"]
DIGITS = ["9" * 40, "9" * 400, "-" + "9" * 400, "9" * 4000, "9" * 5000]
EXTREMES = [*map(str, WHOLE), *FRACTIONS, *WRONG, *DIGITS]
"""Numbers in JSON."""
MANY, LONG = 10_000, 2**16
TEXTS = [json.dumps(text) for text in ("a" * LONG, "", "\x00", "\ud800", "{" * 1000, "é")]
HOLE = "@@"
MESSAGE = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": HOLE}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BASES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": [MESSAGE], "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "ab", "max_output_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"prompt": "ab"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
Sent = tuple[str, str]
"""A path and a body."""


def fields(schema: dict[str, Any], defs: dict[str, Any], depth: int = 0) -> Iterator[tuple[list[str], Any]]:
    """The leaves of a JSON schema: what to try there, in JSON, and a value with a hole in their place."""
    schema = defs[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for part in schema.get("anyOf", []) + schema.get("oneOf", []):
        yield from fields(part, defs, depth)
    kind = schema.get("type")
    if kind in ("integer", "number"):
        yield EXTREMES, HOLE
    if kind == "string":
        yield TEXTS, HOLE
    if kind == "array":
        one = json.dumps(example(schema.get("items", {}), defs))
        yield [f"[{', '.join([one] * MANY)}]", f"[{', '.join([one] * 10)}, 1e999]"], HOLE
    if depth > 5:
        return
    if kind == "array":
        for leaf, value in fields(schema.get("items", {}), defs, depth + 1):
            yield leaf, [value]
    for name, own in schema.get("properties", {}).items():
        required = {other: example(schema["properties"][other], defs) for other in schema.get("required", [])}
        for leaf, value in fields(own, defs, depth + 1):
            yield leaf, {**required, name: value}
    if isinstance(schema.get("additionalProperties"), dict):
        for leaf, value in fields(schema["additionalProperties"], defs, depth + 1):
            yield leaf, {"3": value}


def example(schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """A value that the schema allows."""
    schema = defs[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "anyOf" in schema:
        return example(schema["anyOf"][0], defs)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", ["user"])[-1])
    if schema.get("type") == "object":
        return {name: example(schema["properties"][name], defs) for name in schema.get("required", [])}
    items = schema.get("items", {})
    return {"integer": 1, "number": 1.0, "array": [example(items, defs)] if items else []}.get(
        schema.get("type", ""), "a"
    )


def filled(body: dict[str, Any], raw: str) -> str:
    """The body with this JSON in its hole."""
    return json.dumps(body).replace(json.dumps(HOLE), raw)


@functools.cache
def from_schema() -> list[Sent]:
    """Each number at its extremes, each list with many entries, each text at its limit."""
    found = []
    for path, (model, base) in BASES.items():
        schema = model.model_json_schema(by_alias=True)
        for tried, value in fields(schema, schema.get("$defs", {})):
            assert isinstance(value, dict)
            own = value.keys() - base.keys()
            if model is ResponsesRequest and own and own <= SamplingFields.model_fields.keys():
                continue  # the same code as in the other two
            body = {**{name: own for name, own in base.items() if name not in value}, **value}
            if "stream_options" in value:
                body["stream"] = True
            found += [(path, filled(body, raw)) for raw in tried]
    return found


@functools.cache
def by_hand() -> list[Sent]:
    """What people tried."""
    whole = list(range(96))
    completions: list[dict[str, Any]] = [
        {"stop_token_ids": whole, "min_tokens": 2, "ignore_eos": True},
        {"bad_words_ids": [[token] for token in whole]},
        {"bad_words_ids": [[1] * LONG, [1, 2]]},
        {"logit_bias": {str(token): -100 for token in range(MANY)}},
        {"logit_bias": {"9" * 5000: 1}},
        {"prompt": [2**31], "echo": True},
        {"prompt": [96], "echo": True, "max_tokens": 0, "logprobs": 1},
        {"prompt": [[1], [2**33]], "echo": True, "logprobs": 0},
        {"stop": ["a" * size for size in range(1, 200)], "max_tokens": 8},
        {"prediction": {"type": "content", "content": "a" * LONG}, "max_tokens": 8},
        {"repetition_penalty": 1e-9, "temperature": 1e30},
        {"repetition_penalty": 1e9, "presence_penalty": -100, "frequency_penalty": 100, "temperature": 1e-300},
        {"no_repeat_ngram_size": 100, "max_tokens": 8},
        {"response_format": {"type": "json_object"}, "bad_words_ids": [[token] for token in whole]},
        {"structured_outputs": {"regex": "a{2}" * 50}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": nested(500)}},
    ]
    arguments = ["[" * 100_000, "9" * 4000, "9" * 5000, '{"a": ' * 900 + "1" + "}" * 900, "{", "", "1e999", "NaN"]
    calls = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "x"}]
    bodies = [("/v1/completions", json.dumps({"prompt": "ab", "max_tokens": 2, **each})) for each in completions]
    chat = {"messages": [MESSAGE, *calls, MESSAGE], "max_tokens": 2}
    bodies += [("/v1/chat/completions", filled(chat, json.dumps(each))) for each in arguments]
    chat = {"messages": [MESSAGE], "max_tokens": 2, "chat_template_kwargs": {"x": HOLE}}
    bodies += [("/v1/chat/completions", filled(chat, each)) for each in ("[" * 900 + "]" * 900, "9" * 4000)]
    bodies += [(path, raw) for path in BASES for raw in ("[" * 100_000, "{" * 100_000, "9" * 5000, "", "null", "[]")]
    return bodies


def nested(depth: int) -> dict[str, Any]:
    """A schema of arrays in arrays."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


INNOCENT: list[dict[str, Any]] = [
    {"prompt": "abcabcab", "temperature": 0.0, "max_tokens": 12},
    {"prompt": "the innocent", "temperature": 1.2, "seed": 7, "top_p": 0.9, "max_tokens": 10},
    {"prompt": "xyz", "temperature": 0.8, "seed": 8, "repetition_penalty": 1.2, "min_tokens": 3, "max_tokens": 12},
]


def generator() -> Generator:
    target = CausalLM(tiny.build("llama", num_hidden_layers=1, max_position_embeddings=64))
    drafter = PromptLookup(Options(prompt_lookup_num_tokens=4))
    return tiny.generator(target, drafter, Constant(4), tokenizer=servers.tokenizer(), max_rows=8)


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@dataclass
class Outcome:
    """Statuses of the bodies, answers that are wrong, and seconds of each innocent answer."""

    statuses: list[int] = field(default_factory=list)
    wrong: list[tuple[str, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


async def attack(url: str, bodies: list[Sent], wanted: list[str], streams: int = 6) -> Outcome:
    """Send all bodies beside innocent requests."""
    left, found = iter(bodies), Outcome()
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def attacker() -> None:
            for path, body in left:
                answer = await client.post(path, content=body, headers=headers)
                found.statuses.append(answer.status_code)
                refused = answer.status_code >= 400 and 0 < len(answer.json()["error"]["message"]) <= 2000
                if answer.status_code >= 500 or not (answer.status_code == 200 or refused):
                    found.wrong.append((path, body[:200], answer.text[:300]))

        async def innocent(number: int, attackers: list[asyncio.Task[None]]) -> None:
            while not all(task.done() for task in attackers):
                started = time.perf_counter()
                answer = await client.post("/v1/completions", json=INNOCENT[number])
                found.seconds.append(time.perf_counter() - started)
                await asyncio.sleep(0.05)
                if answer.status_code != 200 or answer.json()["choices"][0]["text"] != wanted[number]:
                    found.wrong.append(("innocent", answer.text[:300], wanted[number]))

        tasks = [asyncio.create_task(attacker()) for _ in range(streams)]
        await asyncio.gather(*tasks, *(innocent(number, tasks) for number in range(len(INNOCENT))))
    return found


def test_no_body_harms_the_requests_beside_it():
    bodies = [*from_schema(), *by_hand()]
    assert len(bodies) >= 2000 and len(EXTREMES) == 40
    records = Records()
    with servers.served(generator()) as running:
        wanted = [running.post(each).json()["choices"][0]["text"] for each in INNOCENT]
        loggers = [logging.getLogger(name) for name in ("foredraft", "uvicorn")]
        for logger in loggers:
            logger.addHandler(records)
        try:
            found = asyncio.run(attack(running.url, bodies, wanted))
        finally:
            for logger in loggers:
                logger.removeHandler(records)
        servers.until(lambda: running.service.idle)
    assert not found.wrong
    assert len(found.statuses) == len(bodies) and {200, 400} <= set(found.statuses)
    assert not [record.getMessage() for record in records.kept if record.exc_info]
    assert max(found.seconds) < 30  # generous, for machines that others use; see docs/log/serving.md for times
