"""The protocol of workers: JSON lines on standard input and output. Standard library only: peers have own interpreters.

A worker's argument is a JSON object of options. It loads its model and writes ``{"load_seconds", "pid"}``, the process
that holds the model. Then it answers

    {"ids", "tokens"}  with  {"output", "first_seconds", "first_tokens", "seconds"}, and "accepted" if it drafts
    {"ids", "logits"}  with  {"positions"}, after writing logits in float32 [len(ids), V] to the file ``logits``

until its input ends. ``accepted``: drafted tokens that are in the output, where an engine tells, and ``drafted``: all
of them. ``first_seconds``: from the call to the first token, of which ``first_tokens`` came at once. Other lines that a
library prints are ignored if they do not begin with "{".
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Output(NamedTuple):
    """Generated ids, when the first of them and all were there, in seconds from the call, and how many were drafted."""

    output: list[int]
    first_seconds: float
    first_tokens: int = 1
    accepted: int | None = None
    drafted: int | None = None
    seconds: float | None = None
    """None: as measured around the call."""


class Worker(NamedTuple):
    """``generate`` takes prompt ids and the exact number of new tokens; ``logits`` takes ids, returns [T, V]."""

    generate: Callable[[list[int], int], Output]
    logits: Callable[[list[int]], Any] | None = None
    pid: int | None = None
    close: Callable[[], object] | None = None


def serve(load: Callable[[dict], Worker]) -> None:
    """Load a worker and answer requests until the input ends."""
    options = json.loads(sys.argv[1])
    started = time.perf_counter()
    worker = load(options)
    try:
        _write({"load_seconds": time.perf_counter() - started, "pid": worker.pid or os.getpid()})
        for line in sys.stdin:
            _answer(worker, json.loads(line))
    finally:
        if worker.close is not None:
            worker.close()


def free_port() -> int:
    """A port of this machine that no program listens on."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def _answer(worker: Worker, request: dict) -> None:
    if "logits" in request:
        assert worker.logits is not None
        worker.logits(request["ids"]).astype("float32").tofile(request["logits"])
        _write({"positions": len(request["ids"])})
        return
    started = time.perf_counter()
    found = worker.generate(request["ids"], request["tokens"])
    answer = {"seconds": time.perf_counter() - started}
    _write(answer | {name: value for name, value in found._asdict().items() if value is not None})


def _write(line: dict) -> None:
    print(json.dumps(line), flush=True)
