"""Time to first token beside a long prompt, and what the prefix cache saves: the bundled model, CPU seconds.

python benchmarks/admission.py [--target sample] [--long 1900]
"""

import argparse
import statistics
import time
from pathlib import Path

import foredraft
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence

SHORT, NEW, REPEATS, TURNS = 40, 32, 9, 6


def submit(g: Generator, tokens: list[int], new: int = NEW) -> Sequence:
    return g.submit([tokens], foredraft.SamplingParams(max_new_tokens=new))[0]


def first_token(g: Generator, sequence: Sequence) -> tuple[float, int]:
    """Seconds and steps until the first token."""
    started, steps = time.process_time(), 0
    while not sequence.tokens:
        g.engine.step()
        steps += 1
    return time.process_time() - started, steps


def stalls(g: Generator, text: list[int], length: int) -> str:
    """What waits how long: a long prompt is read beside eight rows; short ones arrive meanwhile."""
    rows = [submit(g, text[37 * i :][:100], 400) for i in range(8)]
    g.engine.step()
    alone = [first_token(g, submit(g, text[500 + i :][:SHORT], 2)) for i in range(REPEATS)]
    steps = []
    for _ in range(REPEATS):
        started = time.process_time()
        g.engine.step()
        steps.append(time.process_time() - started)
    long = submit(g, text[1000:][:length], 1)
    beside, during = [], []
    while not long.finished:
        started = time.process_time()
        g.engine.step()
        during.append(time.process_time() - started)
        if len(during) % 3 == 0 and not long.finished:
            beside.append(first_token(g, submit(g, text[700 + len(during) :][:SHORT], 2)))
    g.engine.cancel(rows)
    return (
        f"first token of {SHORT} tokens: {summary(alone)} alone, {summary(beside)} beside {length} tokens. "
        f"Steps of the others: {1e3 * statistics.median(steps):.0f} ms, "
        f"while it is read {1e3 * statistics.median(during):.0f} ms, at most {1e3 * max(during):.0f} ms."
    )


def summary(waits: list[tuple[float, int]]) -> str:
    if not waits:
        return "not possible"
    return f"{1e3 * statistics.median(seconds for seconds, _ in waits):.0f} ms ({max(n for _, n in waits)} steps)"


def chat(g: Generator, text: list[int]) -> str:
    """A conversation whose prompts are all that was said before and a new message."""
    said, seconds, cached, read = text[:800], 0.0, 0, 0
    for turn in range(TURNS):
        sequence = submit(g, said)
        seconds += first_token(g, sequence)[0]
        g.engine.run([sequence])
        cached, read = cached + sequence.stats.cached_tokens, read + len(said)
        said = [*said, *sequence.tokens, *text[2000 + 60 * turn :][:60]]
    return f"{TURNS} turns: {1e3 * seconds / TURNS:.0f} ms to the first token, {cached} of {read} prompt tokens cached"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="sample")
    parser.add_argument("--long", type=int, default=1900)
    parser.add_argument("--text", default="docs/architecture.md")
    options = parser.parse_args()
    for chunk in (100_000, 128, 64):
        with foredraft.load(options.target, max_prefill_tokens=chunk) as g:
            text = g.encode(Path(options.text).read_text("utf-8"))
            print(f"chunk {chunk}: {stalls(g, text, options.long)}", flush=True)
    for cache in (False, True):
        for drafter in ("none", "auto"):
            with foredraft.load(options.target, drafter, prefix_cache=cache) as g:
                print(f"prefix_cache={cache}, {drafter}: {chat(g, text)}", flush=True)


if __name__ == "__main__":
    main()
