"""The protocol of workers: JSON lines on standard input and output. Standard library only: peers have own interpreters.

A worker's argument is a JSON object of options. It loads its model and writes ``{"load_seconds"}``. Then it answers

    {"ids", "tokens"}  with  {"output", "first_seconds", "first_tokens", "seconds"}
    {"ids", "logits"}  with  {"positions"}, after writing logits in float32 [len(ids), V] to the file ``logits``

until its input ends. ``first_seconds``: from the call to the first token, of which ``first_tokens`` came at once.
Other lines that a library prints are ignored if they do not begin with "{".
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Output(NamedTuple):
    """Generated ids, and when the first of them were there, in seconds from the call."""

    output: list[int]
    first_seconds: float
    first_tokens: int = 1


class Worker(NamedTuple):
    """``generate`` takes prompt ids and the exact number of new tokens; ``logits`` takes ids, returns [T, V]."""

    generate: Callable[[list[int], int], Output]
    logits: Callable[[list[int]], Any] | None = None


def serve(load: Callable[[dict], Worker]) -> None:
    """Load a worker and answer requests until the input ends."""
    options = json.loads(sys.argv[1])
    started = time.perf_counter()
    worker = load(options)
    _write({"load_seconds": time.perf_counter() - started})
    for line in sys.stdin:
        request = json.loads(line)
        if "logits" in request:
            assert worker.logits is not None
            worker.logits(request["ids"]).astype("float32").tofile(request["logits"])
            _write({"positions": len(request["ids"])})
            continue
        started = time.perf_counter()
        found = worker.generate(request["ids"], request["tokens"])
        _write({**found._asdict(), "seconds": time.perf_counter() - started})


def _write(line: dict) -> None:
    print(json.dumps(line), flush=True)
