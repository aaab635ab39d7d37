"""Time to first token while a long prompt is read, and with the prefix cache: the bundled model, CPU time.

python benchmarks/admission.py [--target sample] [--long 1900] [--drafters eagle3 none] [--chunks 64]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import foredraft
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence

SHORT, NEW, REPEATS, TURNS = 40, 32, 9, 6


def submit(g: Generator, tokens: list[int], new: int = NEW) -> Sequence:
    return g.submit([tokens], foredraft.SamplingParams(max_new_tokens=new))[0]


def first_token(g: Generator, sequence: Sequence) -> float:
    """Seconds until the first token."""
    started = time.process_time()
    while not sequence.tokens:
        g.engine.step()
    return time.process_time() - started


def stalls(g: Generator, text: list[int], length: int, rows: int) -> str:
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
    return (
        f"{rows} rows, first token of {SHORT} tokens: {1e3 * once:.0f} ms alone, {1e3 * then:.0f} ms beside {length} "
        f"tokens ({then / once:.1f}x, at most {max(beside) / once:.1f}x). Steps: {1e3 * statistics.median(steps):.0f} "
        f"ms, while it is read {1e3 * statistics.median(during):.0f} ms, at most {1e3 * max(during):.0f} ms."
    )


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


def chat(g: Generator, text: list[int]) -> str:
    """Turns of a conversation: each prompt is the previous one, its answer, and new text."""
    prompt, spent, cached, read = text[:800], 0.0, 0, 0
    for turn in range(TURNS):
        sequence = submit(g, prompt)
        spent += first_token(g, sequence)
        g.engine.run([sequence])
        cached, read = cached + sequence.stats.cached_tokens, read + len(prompt)
        prompt = [*prompt, *sequence.tokens, *text[2000 + 60 * turn :][:60]]
    return f"{TURNS} turns: {1e3 * spent / TURNS:.0f} ms to the first token, {cached} of {read} prompt tokens cached"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="sample")
    parser.add_argument("--long", type=int, default=1900)
    parser.add_argument("--drafters", nargs="*", default=["eagle3", "draft_model", "none"])
    parser.add_argument("--chunks", nargs="*", type=int, default=[100_000, 128, 64])
    parser.add_argument(
        "--turns", action="store_true", help="also time a conversation with and without the prefix cache"
    )
    parser.add_argument("--text", default="docs/architecture.md")
    options = parser.parse_args()
    text = Path(options.text).read_text("utf-8")
    for drafter in options.drafters:
        for chunk in options.chunks:
            with foredraft.load(options.target, drafter, max_prefill_tokens=chunk) as g:
                for rows in (0, 8):
                    print(f"{drafter}, chunk {chunk}: {stalls(g, g.encode(text), options.long, rows)}", flush=True)
    for cache in (False, True) if options.turns else ():
        for drafter in ("none", "auto"):
            with foredraft.load(options.target, drafter, prefix_cache=cache) as g:
                print(f"prefix_cache={cache}, {drafter}: {chat(g, g.encode(text))}", flush=True)


if __name__ == "__main__":
    main()
