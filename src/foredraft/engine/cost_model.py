"""Measured cost of a forward by its number of rows, on the machine that will run it."""

import bisect
import statistics
import time
from dataclasses import dataclass
from itertools import accumulate

import torch

from foredraft.core.tree import TokenTree
from foredraft.engine.fitting import SIZES
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache

_REPEATS = 4


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one forward by rows (nodes times batch rows), linear between measured points."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int | float) -> float:
        """Seconds of a forward with ``rows`` rows; beyond the table, extrapolated with its last slope."""
        if len(self.rows) == 1:
            return self.seconds[0] * rows / self.rows[0]
        right = min(max(bisect.bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), self.seconds[0] if rows >= self.rows[0] else 0.0)


def measure_costs(
    target: TargetModel, cached: int = 128, budget: float = 1.0, longest: int = 16, batch: int = 1
) -> CostTable:
    """Time forwards of 1, 2, 4, ... ``longest`` nodes over ``cached`` tokens, interleaved, and take medians.

    Stops after about ``budget`` seconds; a model whose single forward takes longer is timed once. Medians are made
    non-decreasing in the rows: a larger forward that looks cheaper is noise.

    Args:
        batch: batch rows of each forward; the table's rows are nodes times batch rows.
    """
    sizes = [nodes for nodes in SIZES if nodes <= longest]
    cached = max(0, min(cached, target.max_length - sizes[-1] - 1))
    cache = target.new_cache()
    cache.reserve(range(batch), cached + sizes[-1])
    times: dict[int, list[float]] = {nodes: [] for nodes in sizes}
    started = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        for nodes in sizes:
            if repeat and time.perf_counter() - started > budget:
                continue
            if repeat == 1:
                times[nodes].clear()  # the first round is a warm-up, used only if there is no second
            times[nodes].append(_seconds(target, cache, nodes, cached, batch))
    medians = [statistics.median(times[nodes]) for nodes in sizes]
    return CostTable(tuple(batch * nodes for nodes in sizes), tuple(accumulate(medians, max)))


def _seconds(target: TargetModel, cache: SlotCache, nodes: int, cached: int, batch: int) -> float:
    """Seconds of one forward of ``batch`` rows with ``nodes`` nodes each, until its result is on the host."""
    device = target.device
    tree = TokenTree.chain(torch.ones(batch, nodes, dtype=torch.long, device=device))
    bases = torch.full((batch,), cached, device=device)
    step = target.address(tree, bases, tuple(range(batch)), cached + nodes)
    started = time.perf_counter()
    target.forward(step, cache).logits.argmax(-1).tolist()
    return time.perf_counter() - started


def measure_bandwidth(device: torch.device, mebibytes: int = 256) -> float:
    """Memory read bandwidth of the device in bytes per second: the best of a few sums over a tensor larger than its
    caches."""
    numbers = torch.ones(mebibytes * 2**18, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        numbers.sum().item()
        best = max(best, numbers.nbytes / (time.perf_counter() - started))
    return best
