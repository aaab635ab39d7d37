"""Reading results files, medians with their spread, and Markdown tables."""

import functools
import json
import random
import statistics
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

T = TypeVar("T")


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


def interval(items: Sequence[T], of: Callable[[Sequence[T]], float], samples: int) -> tuple[float, float]:
    """The 95 % interval of a statistic by the bootstrap over these items."""
    source = random.Random(0)
    found = sorted(of(source.choices(items, k=len(items))) for _ in range(samples))
    return found[int(0.025 * samples)], found[int(0.975 * samples)]


def with_interval(items: Sequence[T], of: Callable[[Sequence[T]], float], samples: int) -> str:
    """A statistic with its ``interval``, two digits each."""
    low, high = interval(items, of, samples)
    return f"{of(items):.2f} ({low:.2f} to {high:.2f})"


def quotient(of: Callable[[Sequence[T]], float]) -> Callable[[Sequence[tuple[T, T]]], float]:
    """A statistic of pairs: that of the first items by that of the second ones."""

    def found(pairs: Sequence[tuple[T, T]]) -> float:
        first, second = zip(*pairs, strict=True)
        return of(first) / of(second)

    return found


def per_forward(prompts: Iterable[tuple[int, int]]) -> float:
    """Tokens per forward of prompts with so many tokens and forwards."""
    tokens, forwards = map(sum, zip(*prompts, strict=True))
    return tokens / max(1, forwards)


def acceptance_interval(arm: dict) -> str:
    """Tokens per forward with its 95 % interval; ``tokens`` and ``forwards`` of an arm are by prompt."""
    prompts = list(zip(arm["tokens"], arm["forwards"], strict=True))
    return with_interval(prompts, per_forward, 1000)


def interval_of_sums(
    rows: Sequence[Sequence[float]], of: Callable[[np.ndarray], np.ndarray], samples: int
) -> tuple[float, float]:
    """``interval`` of a statistic of the columns' sums, much faster: ``of`` gets those of all samples, [K, samples]."""
    found = np.sort(of((_times_drawn(len(rows), samples) @ np.array(rows, dtype=np.float64)).T))
    return float(found[int(0.025 * samples)]), float(found[int(0.975 * samples)])


@functools.cache
def _times_drawn(count: int, samples: int) -> np.ndarray:
    """How often each of ``count`` items is in each sample."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), samples).astype(np.float64)


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]], words: Container[int] = (0,)) -> list[str]:
    """A Markdown table, line by line. The columns in ``words`` are text, the others numbers."""
    rule = ["---" if column in words else "---:" for column in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *lines)]
