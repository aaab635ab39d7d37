"""Predicted outputs on an edit: the output is known but for one name.

The bundled model does not follow instructions, so the edit is made backwards: the output is what the model generates,
and the prediction is that text with one name changed. The target's work is that of a real edit. Arms are interleaved
prompt by prompt; each output is compared with that of plain decoding.
"""

import json
import re
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table
from foredraft.bench.prompts import standard_prompts

FILE = RESULTS / "prediction.jsonl"
UNRELATED = "The weather in the mountains was fine, and the travellers walked on until the evening. " * 12


def edited(text: str) -> str | None:
    """The text with all occurrences of its most frequent word of four letters or more changed; None without one."""
    words = Counter(re.findall(r"[A-Za-z_]{4,}", text)).most_common(1)
    return None if not words else re.sub(rf"\b{words[0][0]}\b", f"{words[0][0]}_changed", text)


def run(g: Any, prompt: Any, tokens: int, prediction: str | None) -> tuple[float, Any]:
    started = time.perf_counter()
    result = g.generate(prompt, max_new_tokens=tokens, eos_token_id=(), prediction=prediction)
    return time.perf_counter() - started, result


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    every = standard_prompts()
    prompts = [each.prompt for each in every[:: max(1, len(every) // args.prompts)]][: args.prompts]
    for drafter in args.drafters:
        yield from of_drafter(drafter, prompts, args.tokens)


def of_drafter(drafter: str, prompts: list[Any], tokens: int) -> Iterator[Line]:
    """One line per prompt and prediction, with the time of the same output without a prediction."""
    g = foredraft.load("sample", drafter, device="cpu")
    for warm, prompt in enumerate([prompts[0], *prompts]):
        text = run(g, prompt, tokens, None)[1].text
        given = {"edit": edited(text), "exact": text, "unrelated": UNRELATED}
        if given["edit"] is None:
            continue
        seconds, plain = run(g, prompt, tokens, None)
        found = {name: run(g, prompt, tokens, prediction) for name, prediction in given.items()}
        again, _ = run(g, prompt, tokens, None)
        for name, (took, result) in found.items() if warm else ():
            yield {
                "kind": "run",
                "drafter": drafter,
                "prediction": name,
                "without": (seconds + again) / 2,
                "seconds": took,
                "length": result.stats.acceptance_length,
                "same": result.tokens == plain.tokens,
            }


def table(path: Path = FILE) -> str:
    """Median speed-up by drafter and prediction, with the range, and where it was measured."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    origin, runs = lines[0], lines[1:]
    drafters, rows = dict.fromkeys(run["drafter"] for run in runs), []
    for drafter in drafters:
        cells = [f"`{drafter}`"]
        for name in ("edit", "exact", "unrelated"):
            own = [r["without"] / r["seconds"] for r in runs if (r["drafter"], r["prediction"]) == (drafter, name)]
            cells.append(f"{statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f})")
        rows.append(cells)
    count = len({(r["drafter"], i) for i, r in enumerate(runs) if r["prediction"] == "edit"}) // len(drafters)
    lines = markdown_table(["drafter", "edit", "the exact text", "an unrelated text"], rows)
    return "\n".join(lines) + (
        f"\n\nMedians and ranges of {count} outputs of {origin['tokens']} tokens; {sum(r['same'] for r in runs)} of "
        f"{len(runs)} outputs are those without a prediction. Bundled model, greedy, {origin_line(origin)}. Made by "
        f"`{origin['command']}`."
    )


EXPERIMENT = Experiment(
    name="prediction",
    question="predicted outputs: serving.md",
    options={
        "drafters": option(["none", "prompt_lookup", "eagle3"]),
        "tokens": option(192),
        "prompts": option(8, "how many"),
    },
    measure=measure,
    facts=lambda args: {"tokens": args.tokens},
    shown=table,
    threads=None,
    tables={"docs/serving.md": {"prediction": table}},
    hours=0.1,
)
