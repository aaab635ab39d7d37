"""What a forward costs by its number of rows, measured on the machine that will run it."""

import bisect
import statistics
import time
from dataclasses import dataclass

import torch

from foredraft.core.tree import TokenTree
from foredraft.model.causal import CausalLM

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one forward by rows (nodes times batch rows); straight lines between what was measured."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int | float) -> float:
        """Seconds of a forward with so many rows; beyond the table, in proportion to its last slope."""
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        right = min(max(bisect.bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), self.seconds[0] if rows >= self.rows[0] else 0.0)


def measure_costs(target: CausalLM, cached: int = 128, budget: float = 2.0) -> CostTable:
    """Time forwards of 1, 2, 4, ... rows over ``cached`` tokens, interleaved, and keep the median of each.

    Stops after about ``budget`` seconds, so that a large model on a slow machine gets a shorter table. Medians
    are made to rise with the rows: a forward of more rows that looks cheaper is noise.
    """
    cached = max(0, min(cached, target.max_length - _ROWS[-1] - 1))
    cache = target.new_cache()
    cache.reserve(1, cached + _ROWS[-1])
    base = torch.tensor([cached], device=target.device)
    times: dict[int, list[float]] = {rows: [] for rows in _ROWS}
    begun = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        for rows in _ROWS:
            late = time.perf_counter() - begun > budget
            if late and (repeat > 1 or rows > 16):
                continue
            tree = TokenTree.chain(torch.ones(1, rows, dtype=torch.long, device=target.device))
            step = target.address(tree, base, (0,), cached + rows)
            start = time.perf_counter()
            target.forward(step, cache).logits.argmax(-1).tolist()  # reading back waits for the device
            if repeat:  # the first round warms up
                times[rows].append(time.perf_counter() - start)
    known = [(rows, statistics.median(values)) for rows, values in times.items() if values]
    rising = [max(seconds for _, seconds in known[: i + 1]) for i in range(len(known))]
    return CostTable(tuple(rows for rows, _ in known), tuple(rising))
