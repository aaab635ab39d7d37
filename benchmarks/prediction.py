"""Predicted outputs on an edit: the output is known before but for one name.

The bundled model does not follow instructions, so the edit is made the other way round: the output is what the model
writes, and the prediction is that text with one name changed. The target's work is that of a real edit. Arms are
interleaved prompt by prompt; each output is compared with that of plain decoding.

    python benchmarks/prediction.py --drafter none --drafter eagle3
"""

import argparse
import re
import statistics
import time
from collections import Counter
from typing import Any

import foredraft
from foredraft.bench.prompts import standard_prompts

UNRELATED = "The weather in the mountains was fine, and the travellers walked on until the evening. " * 12


def edited(text: str) -> str | None:
    """The text with its most frequent word of four letters or more changed wherever it stands; None without one."""
    words = Counter(re.findall(r"[A-Za-z_]{4,}", text)).most_common(1)
    return None if not words else re.sub(rf"\b{words[0][0]}\b", f"{words[0][0]}_changed", text)


def run(g: Any, prompt: Any, tokens: int, prediction: str | None) -> tuple[float, Any]:
    started = time.perf_counter()
    result = g.generate(prompt, max_new_tokens=tokens, eos_token_id=(), prediction=prediction)
    return time.perf_counter() - started, result


def measure(drafter: str, prompts: list[Any], tokens: int) -> None:
    g = foredraft.load("sample", drafter, device="cpu")
    ratios: dict[str, list[float]] = {"edit": [], "exact": [], "unrelated": []}
    steps: dict[str, list[float]] = {"without": [], **{name: [] for name in ratios}}
    changed = 0
    for warm, prompt in enumerate([prompts[0], *prompts]):
        text = run(g, prompt, tokens, None)[1].text
        given = {"edit": edited(text), "exact": text, "unrelated": UNRELATED}
        if given["edit"] is None:
            continue
        seconds, plain = run(g, prompt, tokens, None)
        found = {name: run(g, prompt, tokens, prediction) for name, prediction in given.items()}
        again, _ = run(g, prompt, tokens, None)
        if not warm:
            continue
        steps["without"].append(len(plain.tokens) / plain.stats.target_forwards)
        for name, (took, result) in found.items():
            changed += result.tokens != plain.tokens
            ratios[name].append((seconds + again) / 2 / took)
            steps[name].append(result.stats.acceptance_length)
    for name, values in ratios.items():
        without, with_copies = statistics.mean(steps["without"]), statistics.mean(steps[name])
        cells = [f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"]
        cells += [f"{without:.2f}", f"{with_copies:.2f}", str(len(values)), str(changed)]
        print(f"| {' | '.join([drafter, name, *cells])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    every = standard_prompts(False)
    prompts = [each.prompt for each in every[:: max(1, len(every) // args.prompts)]][: args.prompts]
    print("| drafter | prediction | median speed-up | range | tokens a step without | with | outputs | changed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for drafter in args.drafter or ["none"]:
        measure(drafter, prompts, args.tokens)


if __name__ == "__main__":
    main()
