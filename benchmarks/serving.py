"""The server under load: throughput and latency by concurrency, with speculation and without.

Starts ``foredraft serve`` and sends it streams. Arms are interleaved round by round; the table has medians over rounds.

    python benchmarks/serving.py --concurrency 1 4 16 64 --rounds 3
    python benchmarks/serving.py --overhead --first-token    # against the bare engine; while a long prompt is read

``--cpus`` binds the server to cores of its own, so that this client does not compete with it.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

import foredraft
from foredraft.bench.prompts import STANDARD


@dataclass(frozen=True)
class Stream:
    """One request as its client saw it: seconds to the first text and to the end, and the number of tokens."""

    first: float
    total: float
    tokens: int


@contextmanager
def server(model: str, drafter: str, cpus: str | None) -> Iterator[str]:
    """The address of a running server."""
    command = ["taskset", "-c", cpus] if cpus else []
    command += [sys.executable, "-m", "foredraft", "serve", "--port", "0", "-m", model, "-d", drafter]
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


async def one(client: httpx.AsyncClient, prompt: Any, tokens: int, speculative: bool) -> Stream:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "speculative": speculative}
    started = time.perf_counter()
    first, count = 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - started
            if '"choices":[]' in line:
                count = json.loads(line[6:])["usage"]["completion_tokens"]
    return Stream(first, time.perf_counter() - started, count)


async def load(url: str, concurrency: int, requests: int, tokens: int, speculative: bool) -> tuple[float, list[Stream]]:
    """Seconds of all requests together, and each of them."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def gated(number: int) -> Stream:
            async with gate:
                return await one(client, STANDARD[number % len(STANDARD)], tokens, speculative)

        started = time.perf_counter()
        streams = await asyncio.gather(*map(gated, range(requests)))
        return time.perf_counter() - started, list(streams)


def table(url: str, options: argparse.Namespace) -> None:
    """Throughput and latency by concurrency."""
    rates: dict[tuple[int, bool], list[float]] = {}
    seen: dict[tuple[int, bool], list[Stream]] = {}
    asyncio.run(load(url, 4, 4, options.tokens, True))  # warm up
    for round_number in range(options.rounds):
        for concurrency in options.concurrency:
            for speculative in (True, False) if round_number % 2 else (False, True):
                requests = max(concurrency, options.requests)
                seconds, streams = asyncio.run(load(url, concurrency, requests, options.tokens, speculative))
                rates.setdefault((concurrency, speculative), []).append(sum(s.tokens for s in streams) / seconds)
                seen.setdefault((concurrency, speculative), []).extend(streams)
    print("| streams | speculation | tokens/s | gain | first token, p50 / p99 s | per token, p50 / p99 ms |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for (concurrency, speculative), values in sorted(rates.items()):
        rate, plain = statistics.median(values), statistics.median(rates[concurrency, False])
        streams = seen[concurrency, speculative]
        firsts = percentiles([s.first for s in streams])
        each = percentiles([1e3 * (s.total - s.first) / max(1, s.tokens - 1) for s in streams])
        gain = f"{rate / plain:.2f}x" if speculative else ""
        print(
            f"| {concurrency} | {'on' if speculative else 'off'} | {rate:.1f} | {gain} | {firsts[0]:.3f} / "
            f"{firsts[1]:.3f} | {each[0]:.1f} / {each[1]:.1f} |",
            flush=True,
        )


def percentiles(values: list[float]) -> tuple[float, float]:
    """The 50th and the 99th."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def overhead(url: str, options: argparse.Namespace) -> None:
    """The server against the bare engine: 16 requests at once, rounds interleaved."""
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    prompts = [STANDARD[i % len(STANDARD)] for i in range(16)]
    bare: list[float] = []
    served: list[float] = []
    with foredraft.load(options.model, options.drafter) as g:
        for round_number in range(options.rounds + 1):
            started = time.perf_counter()
            results = g.batch(prompts, max_new_tokens=options.tokens, eos_token_id=())
            rate = sum(len(result.tokens) for result in results) / (time.perf_counter() - started)
            seconds, streams = asyncio.run(load(url, 16, 16, options.tokens, True))
            if round_number:  # the first one warms up
                bare.append(rate)
                served.append(sum(s.tokens for s in streams) / seconds)
    ratio = statistics.median(b / s for b, s in zip(bare, served, strict=True)) - 1
    print(f"16 streams: bare engine {statistics.median(bare):.1f} tokens/s, server {statistics.median(served):.1f}")
    print(f"overhead of the server: {ratio:+.1%} (at most 10 % wanted)")


async def first_tokens(url: str, rounds: int, long: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a short prompt, alone and while a prompt of ``long`` tokens is read."""
    alone: list[float] = []
    beside: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        for number in range(rounds + 1):
            short = (await one(client, STANDARD[0], 8, True)).first
            ids = [(7 * number + 31 * i) % 4000 + 100 for i in range(long)]  # new each time: no prefix is shared
            task = asyncio.ensure_future(one(client, ids, 1, True))
            await asyncio.sleep(0.02)
            busy = (await one(client, STANDARD[1], 8, True)).first
            await task
            if number:
                alone.append(short)
                beside.append(busy)
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sample")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=32, help="of each round and concurrency, at least")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpus", help="cores of the server, such as 0,1")
    parser.add_argument("--overhead", action="store_true", help="compare with the bare engine instead")
    parser.add_argument("--first-token", action="store_true", help="time short prompts while a long one is read")
    parser.add_argument("--long", type=int, default=1900, help="tokens of that long prompt")
    options = parser.parse_args()
    with server(options.model, options.drafter, options.cpus) as url:
        if options.overhead:
            overhead(url, options)
        if options.first_token:
            alone, beside = map(statistics.median, asyncio.run(first_tokens(url, options.rounds, options.long)))
            print(f"first token of a short prompt: {alone:.3f} s alone, {beside:.3f} s while {options.long} are read")
            print(f"ratio {beside / alone:.2f} (at most 2 wanted)")
        if not options.overhead and not options.first_token:
            table(url, options)


if __name__ == "__main__":
    main()
