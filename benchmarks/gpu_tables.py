"""Tables of docs/performance.md from benchmarks/results/gpu.jsonl, which ``benchmarks/gpu.py`` wrote on two GPUs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reading import markdown_table

Record = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.jsonl"
_NAMES = {"none": "plain", "eagle3 tree": "EAGLE-3, tree of 60", "eagle3 chain": "EAGLE-3, chain of 5"}
_NAMES |= {"draft_model": "draft model of 1B, chain of 5"}


def runs(path: Path = RESULTS) -> list[tuple[Record, list[Record]]]:
    """Each run's provenance and records."""
    found: list[tuple[Record, list[Record]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "provenance":
            found.append((record, []))
        else:
            found[-1][1].append(record)
    return found


def table() -> str:
    """All tables of the page."""
    found = runs()
    every = [record for _, records in found for record in records]
    parts = [_steps(found), _baselines(every), _kernel(every), _laws(every), _made(found)]
    return "\n\n".join(parts)


def _steps(found: Sequence[tuple[Record, list[Record]]]) -> str:
    """Milliseconds of a step, eager and captured, and tokens a second over those of plain decoding."""
    arms: dict[tuple[Any, ...], dict[str, Record]] = {}
    for origin, records in found:
        gpu = "H200" if "H200" in origin["device"] else "H100"
        for arm in records:
            if arm["kind"] == "arm" and arm["ahead"]:
                key = arm["batch"], arm["cached"], arm["temperature"], arm["method"]
                arms.setdefault(key, {})[f"{gpu} {'captured' if arm['options'] else 'eager'}"] = arm
    head = ["method", "rows", "cached tokens", "T", "tokens a step", "H100: ms a step", "H100, captured"]
    head += ["H200, captured", "H200: tokens/s", "over plain"]
    lines = []
    for (batch, cached, heat, method), each in arms.items():
        after = each.get("H200 captured")
        plain = arms.get((batch, cached, heat, "none"), {}).get("H200 captured")
        speed = f"{after['tokens_per_second']:,.0f}" if after else ""
        over = f"{after['tokens_per_second'] / plain['tokens_per_second']:.2f}" if after and plain else ""
        times = [
            f"{each[key]['step_ms']:.1f}" if key in each else ""
            for key in ("H100 eager", "H100 captured", "H200 captured")
        ]
        length = next(iter(each.values()))["acceptance_length"]
        lines.append([_NAMES[method], str(batch), f"{cached:,}", f"{heat:g}", f"{length:.2f}", *times, speed, over])
    return "\n".join(markdown_table(head, lines))


def _baselines(records: Sequence[Record]) -> str:
    found = {each["method"]: each for each in records if each["kind"] == "baseline" and each["batch"] == 1}
    said = ", ".join(f"{name} {each['ms_per_token']:.1f}" for name, each in found.items())
    return f"transformers, one row, 1,024 cached tokens, H100, ms a token: {said}."


def _kernel(records: Sequence[Record]) -> str:
    """The kernel beside masked attention and the time to read keys and values once."""
    head = ["rows", "cached tokens", "nodes", "kernel, ms", "masked attention, ms", "floor, ms", "error (masked)"]
    lines = []
    for each in records:
        if each["kind"] == "kernel" and each["runs"] and each["window"] is None:
            errors = f"{each['error']:.1e} ({each['masked_error']:.1e})"
            times = [f"{each[key]:.3f}" for key in ("ms", "masked_ms", "floor_ms")]
            lines.append([str(each["batch"]), f"{each['cached']:,}", str(each["nodes"]), *times, errors])
    return "\n".join(markdown_table(head, lines))


def _laws(records: Sequence[Record]) -> str:
    laws = [each for each in records if each["kind"] == "law"]
    methods = ", ".join(f"`{name}`" for name in dict.fromkeys(each["method"] for each in laws))
    equal = sum(each["greedy_passed"] and each["sampled_passed"] for each in laws)
    return (
        f"Greedy identity and the chi-square test on the bundled model in float32, eager and captured: {equal} of "
        f"{len(laws)} passed ({methods})."
    )


def _made(found: Sequence[tuple[Record, list[Record]]]) -> str:
    each = "; ".join(
        f"{origin['device']}: {', '.join(origin['parts'])} at commit {origin['commit'][:9]}, {origin['date']}"
        for origin, _ in found
    )
    torch = found[0][0]["torch"]
    return f"torch {torch}. {each}. Every record is in `benchmarks/results/gpu.jsonl`."
