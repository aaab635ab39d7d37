"""Tables of docs/performance.md from benchmarks/results/gpu.jsonl, which ``benchmarks/gpu.py`` wrote on two GPUs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reading import markdown_table

from foredraft.files.provenance import short_commit

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
    head = ["method", "rows", "cached tokens", "T", "tokens a step", "H100 eager: ms a step", "over plain"]
    head += [f"{gpu}: {what}" for gpu in ("H100", "H200") for what in ("ms a step", "tokens/s", "over plain")]
    lines = []
    for (batch, cached, heat, method), each in arms.items():
        plain = arms.get((batch, cached, heat, "none"), {})
        cells = []
        for run in ("H100 eager", "H100 captured", "H200 captured"):
            own, base = each.get(run), plain.get(run)
            rate = own["tokens_per_second"] if own else 0.0
            ratio = ""
            if own and base:
                median = own["acceptance_length"] / own["step_ms"] * base["step_ms"] / base["acceptance_length"]
                ratio = f"{rate / base['tokens_per_second']:.2f} / {median:.2f}"
            cells += [f"{own['step_ms']:.1f}" if own else "", f"{rate:,.0f}" if own else "", ratio]
        del cells[1]  # eager tokens a second
        length = next(iter(each.values()))["acceptance_length"]
        lines.append([_NAMES[method], str(batch), f"{cached:,}", f"{heat:g}", f"{length:.2f}", *cells])
    return (
        "\n".join(markdown_table(head, lines)) + "\n\nH100 and H200 without a word more: steps captured in CUDA graphs."
    )


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


def kernel_in_short() -> str:
    """The kernel's time over masked attention's, as ranges over contexts and draft sizes."""
    every = [record for _, records in runs() for record in records]
    shares: dict[bool, list[float]] = {}
    for each in every:
        if each["kind"] == "kernel" and each["runs"] and each["window"] is None:
            shares.setdefault(each["batch"] == 1, []).append(each["ms"] / each["masked_ms"])
    one, several = (f"{min(shares[alone]):.2f} to {max(shares[alone]):.2f}" for alone in (True, False))
    return f"{one} of masked attention's time for one row, {several} for 8 and 32 rows"


def _laws(records: Sequence[Record]) -> str:
    """Greedy identity of each method, and the chi-square test: one for all whose texts gave the same p-value."""
    laws = [each for each in records if each["kind"] == "law"]
    methods = ", ".join(f"`{name}`" for name in dict.fromkeys(each["method"] for each in laws))
    equal = sum(each["greedy_passed"] for each in laws)
    tests = {f"{each['p_value']:.2f}": each["sampled_passed"] for each in laws}
    drawn = ", ".join(f"p = {value}, {'passed' if passed else 'failed'}" for value, passed in tests.items())
    return (
        f"On the bundled model in float32, eager and captured ({methods}): greedy texts equal to plain decoding's in "
        f"{equal} of {len(laws)} runs. Sampled texts are a function of the seed, so the {len(laws)} runs are "
        f"{len(tests)} chi-square test{'s' if len(tests) > 1 else ''} of the law ({drawn})."
    )


def _made(found: Sequence[tuple[Record, list[Record]]]) -> str:
    each = "; ".join(
        f"{origin['device']}: {', '.join(origin['parts'])} at commit {short_commit(origin['commit'])}, {origin['date']}"
        for origin, _ in found
    )
    torch = found[0][0]["torch"]
    return f"torch {torch}. {each}. Every record is in `benchmarks/results/gpu.jsonl`."
