"""Reading results files, medians with their spread, and Markdown tables."""

import json
import statistics
from collections.abc import Container, Iterable, Sequence
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


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]], words: Container[int] = (0,)) -> list[str]:
    """A Markdown table, line by line. The columns in ``words`` are text, the others numbers."""
    rule = ["---" if column in words else "---:" for column in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *lines)]
