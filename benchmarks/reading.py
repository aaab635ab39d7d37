"""Reading results files, and medians with their spread."""

import json
import statistics
from pathlib import Path


def read(path: Path) -> dict[str, list[dict]]:
    """Lines of a results file by their kind."""
    kinds: dict[str, list[dict]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        kinds.setdefault(record["kind"], []).append(record)
    return kinds


def quartiles(values: list[float]) -> str:
    """Median and quartiles, two digits each."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
