"""The server under load: throughput and latency by concurrency, with and without speculation.

Starts ``foredraft serve`` and sends it streams; compares it with the bare engine at 16 outputs; times short prompts
while a long one is read. A round runs every arm once, alternating which of speculation on and off comes first; rounds
repeat until the time is up. The client shares the cores with the server, and this counts as the server's overhead.

    python -m benchmarks serving --prompts ../shared/data/prompts/eagle/gsm8k/question.jsonl

It takes 10 minutes; without files, the prompts are those of ``foredraft bench``.
"""

import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import read
from foredraft.bench.prompts import STANDARD, read_prompts, standard_prompts
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence as Request

FILE = RESULTS / "serving.jsonl"
BARE = 16
"""Outputs at once in the comparison with the bare engine."""
WHOLE = (8, 16)
"""Concurrencies that are also run without streaming, which costs the server less."""


@dataclass(frozen=True)
class Stream:
    """One request as its client saw it: seconds to the first text and to the end, and the number of tokens."""

    first: float
    total: float
    tokens: int


@contextmanager
def server(model: str, drafter: str) -> Iterator[str]:
    """The address of a running server."""
    command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", "-m", model, "-d", drafter]
    process = subprocess.Popen([*command, "--served-model-name", "m"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next((m for line in process.stderr if (m := re.search(r"Serving on (http://[^\"]+?)\.\"", line))), None)
        if found is None:
            raise SystemExit("The server has not started.")
        sink = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield found[1]
        process.terminate()
        process.wait(60)
        sink.wait(10)
    finally:
        process.kill()


def _client(url: str) -> aiohttp.ClientSession:
    """A client without limits that raises an error from status 400 on; it takes a third of httpx's time."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(url, connector=connector, timeout=timeout, raise_for_status=True)


def _request(prompt: Any, tokens: int, speculative: bool) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request; a prompt is a text, token ids or messages."""
    chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
    return f"/v1/{'chat/' * chat}completions", {
        "messages" if chat else "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "speculative": speculative,
    }


async def whole(client: aiohttp.ClientSession, prompt: Any, tokens: int, speculative: bool) -> Stream:
    """A request without streaming."""
    started = time.perf_counter()
    path, body = _request(prompt, tokens, speculative)
    async with client.post(path, json=body) as answer:
        count = (await answer.json())["usage"]["completion_tokens"]
    seconds = time.perf_counter() - started
    return Stream(seconds, seconds, count)


async def one(client: aiohttp.ClientSession, prompt: Any, tokens: int, speculative: bool) -> Stream:
    path, body = _request(prompt, tokens, speculative)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    first, count = 0.0, 0
    async with client.post(path, json=body) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {") or b'"role"' in line:  # the first chunk of a chat has no text
                continue
            first = first or time.perf_counter() - started
            if b'"choices":[]' in line:
                count = json.loads(line[6:])["usage"]["completion_tokens"]
    return Stream(first, time.perf_counter() - started, count)


async def load(
    url: str, concurrency: int, speculative: bool, options: Namespace, ask: Any = one
) -> tuple[float, list[Stream]]:
    """Seconds of all requests together, and each request; ``ask`` sends one."""
    gate, prompts = asyncio.Semaphore(concurrency), options.texts
    requests = max(options.requests, options.waves * concurrency)
    async with _client(url) as client:

        async def gated(number: int, length: int) -> Stream:
            async with gate:
                return await ask(client, prompts[number % len(prompts)], length, speculative)

        started = time.perf_counter()
        streams = await asyncio.gather(*map(gated, range(requests), lengths(requests, options.tokens)))
        return time.perf_counter() - started, list(streams)


def lengths(count: int, tokens: int) -> list[int]:
    """New tokens of each request: 0.5 to 1.5 times ``tokens``, so that requests end at different times."""
    return [tokens * (2 + number % 5) // 4 for number in range(count)]


def served(url: str, concurrency: int, speculative: bool, options: Namespace, ask: Any = one) -> dict[str, Any]:
    """One run of an arm."""
    seconds, streams = asyncio.run(load(url, concurrency, speculative, options, ask))
    return {
        "kind": "run",
        "arm": f"{'whole ' if ask is whole else ''}{'on' if speculative else 'off'}",
        "streams": concurrency,
        "rate": sum(s.tokens for s in streams) / seconds,
        "first": [round(s.first, 4) for s in streams],
        "each": [round((s.total - s.first) / max(1, s.tokens - 1), 5) for s in streams],
    }


def bare(g: Generator, options: Namespace) -> dict[str, Any]:
    """The plain arm's outputs without a server."""
    started = time.perf_counter()
    sequences: list[Request] = []
    for number, length in enumerate(lengths(options.waves * BARE, options.tokens)):
        params = SamplingParams(max_new_tokens=length, eos_token_id=(), speculate=False)
        sequences += g.submit([options.texts[number % len(options.texts)]], params)
    g.engine.run(sequences)
    rate = sum(len(sequence.tokens) for sequence in sequences) / (time.perf_counter() - started)
    return {"kind": "run", "arm": "bare", "streams": BARE, "rate": rate}


def rounds(url: str, g: Generator, options: Namespace) -> Iterator[dict[str, Any]]:
    """The runs of as many rounds as the time allows, at least one, after a warm-up."""
    bare(g, options)
    for speculative in (True, False):
        asyncio.run(load(url, BARE, speculative, options))
    started = before = time.perf_counter()
    number, longest = 0, 0.0
    while not number or before + longest < started + 60 * options.minutes:
        for concurrency in options.concurrency:
            for speculative in (True, False) if number % 2 else (False, True):
                yield {**served(url, concurrency, speculative, options), "round": number}
                if concurrency == BARE and not speculative:
                    yield {**bare(g, options), "round": number}
                if concurrency in WHOLE:
                    yield {**served(url, concurrency, speculative, options, whole), "round": number}
        now = time.perf_counter()
        number, longest, before = number + 1, max(longest, now - before), now


async def first_tokens(url: str, rounds: int, long: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a short prompt, alone and while a prompt of ``long`` tokens is read."""
    alone: list[float] = []
    beside: list[float] = []
    async with _client(url) as client:
        for number in range(rounds + 1):
            short = (await one(client, f"{number} {STANDARD[0]}", 8, True)).first
            ids = [(7 * number + 31 * i) % 4000 + 100 for i in range(long)]  # new each time: no prefix is shared
            task = asyncio.ensure_future(one(client, ids, 1, True))
            await asyncio.sleep(0.02 + 0.03 * number)  # at any moment of a step
            busy = (await one(client, f"{number} {STANDARD[0]}"[::-1], 8, True)).first
            await task
            if number:
                alone.append(short)
                beside.append(busy)
    return alone, beside


def table(path: Path = FILE) -> str:
    """Throughput and latency by concurrency, the overhead, and the wait beside a long prompt."""
    kinds = read(path)
    origin, runs = kinds["provenance"][0], kinds["run"]
    lines = ["| at once | speculation | tokens/s | gain | first token, p50 / p99 s | per token, p50 / p99 ms |"]
    lines.append("| ---: | --- | ---: | ---: | ---: | ---: |")
    for at_once, arm in sorted({(r["streams"], r["arm"]) for r in runs if r["arm"] != "bare"}):
        unstreamed, _, speculation = arm.rpartition(" ")
        own = [r for r in runs if (r["streams"], r["arm"]) == (at_once, arm)]
        gain = f"{_ratio(runs, at_once, arm, arm.replace('on', 'off')):.2f}" if speculation == "on" else ""
        first = _percentiles([value for r in own for value in r["first"]])
        each = _percentiles([1e3 * value for r in own for value in r["each"]])
        times = "| |" if unstreamed else f"{first[0]:.2f} / {first[1]:.2f} | {each[0]:.1f} / {each[1]:.1f} |"
        rate = statistics.median(r["rate"] for r in own)
        what = f"{at_once} {'whole answer' if unstreamed else 'stream'}{'s' * (at_once > 1)}"
        lines.append(f"| {what} | {speculation} | {rate:.0f} | {gain} | {times}")
    waits = kinds["waits"][0]
    alone, beside = statistics.median(waits["alone"]), statistics.median(waits["beside"])
    over_streams, over_whole = (_ratio(runs, BARE, "bare", arm) for arm in ("off", "whole off"))
    rest = (
        f"Medians of {_rounds(runs)}; gain: median over rounds. Without speculation, "
        f"the bare engine with {BARE} outputs at once is {over_whole:.2f} times as fast as {BARE} clients that take "
        f"their answers whole, and {over_streams:.2f} times as fast as {BARE} streams. First token of a short "
        f"prompt: {1e3 * alone:.0f} ms alone, {1e3 * beside:.0f} ms while one of {origin['long']} tokens "
        f"is read ({beside / alone:.1f} times). {origin['target']} with {origin['drafter']}, greedy, "
        f"{origin['prompts']}, {origin['tokens']} new tokens each on average, "
        f"{origin_line(origin)}. Made by `{origin['command']}`."
    )
    return "\n".join([*lines, "", rest])


def _rounds(runs: list[dict[str, Any]]) -> str:
    """The number of rounds; it may differ between concurrencies."""
    pairs = {(r["streams"], r["round"]) for r in runs}
    counts = Counter(streams for streams, _ in pairs).values()
    few, most = min(counts), max(counts)
    return f"{few} to {most} rounds" if few < most else f"{most} round{'s' * (most > 1)}"


def _ratio(runs: list[dict[str, Any]], streams: int, top: str, bottom: str) -> float:
    """Median over rounds of the ratio of two arms' rates, so that a slow minute of the machine cancels out."""
    rates = {(r["round"], r["arm"]): r["rate"] for r in runs if r["streams"] == streams}
    count = 1 + max(number for number, _ in rates)
    both = [number for number in range(count) if {(number, top), (number, bottom)} <= rates.keys()]
    return statistics.median(rates[number, top] / rates[number, bottom] for number in both)


def _percentiles(values: list[float]) -> tuple[float, float]:
    """The 50th and the 99th percentile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    if BARE not in args.concurrency:
        raise SystemExit(f"--concurrency needs {BARE}, for the comparison with the bare engine.")
    files = [read_prompts(file, chat=True)[: args.count] for file in args.prompts] or [standard_prompts()]
    args.texts = [ask.prompt for asks in zip(*files, strict=True) for ask in asks]
    names = ", ".join(file.parent.name for file in args.prompts)
    prompts = f"{len(args.texts)} chats of {names}" if names else "foredraft bench's prompts"
    yield {"kind": "provenance", "prompts": prompts}
    with server(args.model, args.drafter) as url:
        with foredraft.load(args.model, args.drafter, prefix_cache=True, max_batch_size=BARE) as g:
            yield from rounds(url, g, args)
        alone, beside = asyncio.run(first_tokens(url, args.waits, args.long))
        yield {"kind": "waits", "alone": alone, "beside": beside}


EXPERIMENT = Experiment(
    name="serving",
    question="the server under load: serving.md",
    options={
        "model": option("sample"),
        "drafter": option("eagle3"),
        "prompts": option([], "files of prompts, which are sent as chats", type=Path),
        "count": option(8, "prompts of each file"),
        "concurrency": option([1, 4, 8, 16, 64]),
        "requests": option(16, "fewest requests of a run"),
        "waves": option(2, "requests of a run, as a multiple of its streams"),
        "tokens": option(256, "new tokens of a request, on average"),
        "minutes": option(9.0, "time for all rounds"),
        "long": option(1900, "tokens of the long prompt"),
        "waits": option(12, "short prompts beside a long one"),
    },
    measure=measure,
    facts=lambda args: {
        "target": args.model,
        **{name: getattr(args, name) for name in ("drafter", "tokens", "long")},
    },
    shown=table,
    threads=None,
    tables={"docs/serving.md": {"serving": table}},
    hours=0.2,
    needs=lambda inputs: (inputs.prompts,),
    commands=lambda inputs: [measured("serving", "--prompts", *inputs.questions())],
)
