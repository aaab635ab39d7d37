"""Time to first token while a long prompt is read, and with the prefix cache: the bundled model, CPU time."""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import foredraft
from benchmarks.kit.experiment import Cell, Experiment, Line, option
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence as Request

SHORT, NEW, REPEATS, TURNS = 40, 32, 9, 6


def submit(g: Generator, tokens: list[int], new: int = NEW) -> Request:
    return g.submit([tokens], foredraft.SamplingParams(max_new_tokens=new))[0]


def first_token(g: Generator, sequence: Request) -> float:
    """Seconds until the first token."""
    started = time.process_time()
    while not sequence.tokens:
        g.engine.step()
    return time.process_time() - started


def stalls(g: Generator, text: list[int], length: int, rows: int) -> dict[str, float]:
    """Delays while a long prompt is read beside ``rows`` running requests and short prompts keep arriving."""
    running = [submit(g, text[37 * i :][:100], 400) for i in range(rows)]
    steps = [seconds(g.engine.step) for _ in range(REPEATS)] if rows else [0.0]
    alone = [arrival(g, text[500 + i :][:SHORT], steps) for i in range(REPEATS)]
    long = submit(g, text[1000:][:length], 8)
    beside, during = [], []
    while not long.finished:
        during.append(seconds(g.engine.step))
        if len(during) % 3 == 0 and not long.finished:
            beside.append(arrival(g, text[700 + len(during) :][:SHORT], during[-1:]))
    g.engine.cancel(running)
    once, then = statistics.median(alone), statistics.median(beside)
    return {
        "first_alone_ms": 1e3 * once,
        "first_beside_ms": 1e3 * then,
        "most_beside_ms": 1e3 * max(beside),
        "step_ms": 1e3 * statistics.median(steps),
        "step_while_read_ms": 1e3 * statistics.median(during),
        "most_step_while_read_ms": 1e3 * max(during),
    }


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def arrival(g: Generator, tokens: list[int], steps: list[float]) -> float:
    """Seconds to the first token of a prompt that arrives in the middle of one of these steps."""
    sequence = submit(g, tokens, 2)
    found = statistics.median(steps) / 2 + first_token(g, sequence)
    g.engine.run([sequence])
    return found


def chat(g: Generator, text: list[int]) -> dict[str, float]:
    """Turns of a conversation: each prompt is the previous one, its answer, and new text."""
    prompt, spent, cached, read = text[:800], 0.0, 0, 0
    for turn in range(TURNS):
        sequence = submit(g, prompt)
        spent += first_token(g, sequence)
        g.engine.run([sequence])
        cached, read = cached + sequence.stats.cached_tokens, read + len(prompt)
        prompt = [*prompt, *sequence.tokens, *text[2000 + 60 * turn :][:60]]
    return {"turns": TURNS, "first_ms": 1e3 * spent / TURNS, "cached": cached, "read": read}


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    text = Path(args.text).read_text("utf-8")
    for cell in cells:
        turns = cell["kind"] == "turns"
        options: dict[str, Any] = {"prefix_cache": cell["cache"]} if turns else {"max_prefill_tokens": cell["chunk"]}
        with foredraft.load(args.target, cell["drafter"], **options) as g:
            ids = g.encode(text)
            yield {**cell, **(chat(g, ids) if turns else stalls(g, ids, args.long, cell["rows"]))}


EXPERIMENT = Experiment(
    name="admission",
    question="time to first token while a long prompt is read, and with the prefix cache",
    options={
        "target": option("sample"),
        "long": option(1900, "tokens of the long prompt"),
        "drafters": option(["eagle3", "draft_model", "none"]),
        "chunks": option([100_000, 128, 64]),
        "turns": option(False, "also time a conversation with and without the prefix cache"),
        "text": option("docs/architecture.md"),
    },
    cells=lambda args: (
        [
            {"kind": "stalls", "drafter": drafter, "chunk": chunk, "rows": rows}
            for drafter in args.drafters
            for chunk in args.chunks
            for rows in (0, 8)
        ]
        + [{"kind": "turns", "cache": cache, "drafter": name} for cache in (False, True) for name in ("none", "auto")]
        * args.turns
    ),
    measure=measure,
    threads=None,
    results=(),
)
