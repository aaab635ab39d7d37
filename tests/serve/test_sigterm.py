"""A real process of ``foredraft serve`` that is told to stop while it works."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from foredraft.bench.prompts import STANDARD
from processes import environment

TOKENS, COUNT = 48, 16
BODY: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


@contextmanager
def served(
    *options: str, log: list[str] | None = None, script: Sequence[str] = ("-m", "foredraft")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address; what it writes to stderr goes to ``log``."""
    command = [sys.executable, *script, "serve", "--port", "0", "-d", "prompt_lookup", *options]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(found[1] for line in process.stderr if (found := re.search(r"Serving on ([^\"]+)\.\"", line)))
            reader = threading.Thread(target=[].extend if log is None else log.extend, args=(process.stderr,))
            reader.start()
            yield process, url
            reader.join(30)
        finally:
            process.kill()


def plain(url: str, prompt: str) -> list[int]:
    answer = httpx.post(f"{url}/v1/completions", json={**BODY, "prompt": prompt}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def streamed(url: str, prompt: str) -> list[int]:
    tokens: list[int] = []
    body = {**BODY, "prompt": prompt, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        for found in re.findall(r'"token_ids":\[([\d,]*)\]', line):
            tokens += map(int, filter(None, found.split(",")))
    return tokens


def until_open(url: str, asked: list[Future[Any]]) -> None:
    """Wait until the server has all of these requests."""
    deadline = time.monotonic() + 60
    while (now := httpx.get(f"{url}/live").json())["running"] + now["waiting"] < len(asked):
        assert time.monotonic() < deadline and not any(each.done() for each in asked)
        time.sleep(0.01)


def test_sigterm_loses_no_accepted_request():
    """16 streams and 16 plain requests: each of them ends whole, and the process ends with status 0."""
    with served() as (process, url), ThreadPoolExecutor(2 * COUNT) as pool:
        prompts = [f"{STANDARD[i % len(STANDARD)]} {i}" for i in range(COUNT)]
        asked = [pool.submit(ask, url, prompt) for ask in (plain, streamed) for prompt in prompts]
        until_open(url, asked)
        process.send_signal(signal.SIGTERM)
        answers = [each.result() for each in asked]
        assert process.wait(30) == 0
    assert all(len(tokens) == TOKENS for tokens in answers)
    assert answers[:COUNT] == answers[COUNT:]


COMPILING = """
import sys, time
from foredraft.cli import main
from foredraft.model.text.grammar import GrammarCompiler
from foredraft.serve.workers import Limits, Worker

run = Worker.run


async def told(self, function, *args, limits=Limits()):
    if limits.seconds == 600:
        print("compiling", file=sys.stderr, flush=True)
    return await run(self, function, *args, limits=limits)


def endless(self, grammar):
    print("compiling", file=sys.stderr, flush=True)
    time.sleep(600)


place = sys.argv.pop(1)
if place == "process":
    Worker.run = told
else:
    GrammarCompiler.__call__ = endless  # in the server alone: processes import their own
sys.exit(main())
"""
"""Runs the command line; prints a line when a grammar is compiled for up to ten minutes in this place."""
OPTIONAL = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(3000)}}
"""Compiles for some 40 seconds."""
LARGE = "|".join(f"[ab]{{{size}}}" for size in range(1, 300))
"""Compiles in 0.1 s, to more than is handed over."""


@pytest.mark.parametrize(("place", "grammar"), [("process", {"json": OPTIONAL}), ("server", {"regex": LARGE})])
def test_sigterm_waits_for_no_compilation(place: str, grammar: dict[str, Any]):
    """Neither for the grammar, of which the client is told, nor for the end of the time to drain."""
    log: list[str] = []
    script = ("-c", COMPILING, place)
    with served("--grammar-seconds", "600", log=log, script=script) as (process, url), ThreadPoolExecutor(1) as pool:
        body = {**BODY, "prompt": "a", "structured_outputs": grammar}
        asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=120)
        deadline = time.monotonic() + 60
        while "compiling\n" not in log:
            assert time.monotonic() < deadline and not asked.done()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        answer = asked.result()
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "The server is about to stop."
    records = [json.loads(line) for line in log if line != "compiling\n"]  # a traceback would be no JSON
    assert not any("exception" in record or record["level"] == "error" for record in records)


@pytest.mark.slow  # test_service.py has the same in one process
def test_a_second_ctrl_c_leaves_no_traceback():
    """Running and waiting requests, streams and plain ones; Ctrl-C is pressed again and again."""
    log: list[str] = []
    with served("--max-batch-size", "2", log=log) as (process, url), ThreadPoolExecutor(6) as pool:
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
        asked = [
            pool.submit(httpx.post, f"{url}/v1/completions", json={**body, "stream": stream}, timeout=60)
            for stream in (True, False) * 3
        ]
        until_open(url, asked)
        for _ in range(10):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert all("The server stopped before the request ended." in each.result().text for each in asked)
        assert process.wait(30) in (0, -signal.SIGINT)
    records = [json.loads(line) for line in log]  # a traceback would be no JSON
    assert not any("exception" in record or record["level"] == "error" for record in records)
