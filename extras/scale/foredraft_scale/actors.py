"""Offline batches by several generators: Ray Data sends parts of the file to actors and keeps the order."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow
import ray
from ray.data import ActorPoolStrategy, DataContext

from foredraft.core.errors import OptionError
from foredraft.engine.generator import Generator
from foredraft.serve.batch_answers import Answered, BatchAnswers, BatchOptions, Numbered

_PART = 64
"""Requests that an actor takes at a time: a few times its rows, and little to repeat if it dies."""


class _Actor:
    """A generator in a process of its own."""

    def __init__(self, load: Callable[[], Generator], options: BatchOptions) -> None:
        self._answers = BatchAnswers(load(), options)

    def __call__(self, part: pyarrow.Table) -> Iterator[dict[str, Any]]:
        requests = zip(part["number"].to_pylist(), part["line"].to_pylist(), strict=True)
        for line, failed in self._answers.of(requests):
            yield {"line": [line], "failed": [failed]}


def actor_count(wanted: int) -> int:
    """How many actors to start: as many as wanted, or for 0 one for each GPU of the cluster.

    Raises:
        OptionError: it has none.
    """
    count = wanted or int(ray.cluster_resources().get("GPU", 0))
    if not count:
        raise OptionError("There are no GPUs to count: give --actors.")
    return count


def by_actors(
    load: Callable[[], Generator], options: BatchOptions, count: int
) -> Callable[[Iterable[Numbered]], Iterator[Answered]]:
    """Answer requests by ``count`` actors of the connected cluster, in order. An actor that dies is started again.

    Args:
        load: makes a generator, in each actor.
    """

    def answers(requests: Iterable[Numbered]) -> Iterator[Answered]:
        items = [{"number": number, "line": line} for number, line in requests]
        if not items:
            return
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        resources = ray.cluster_resources()
        found = ray.data.from_items(items, override_num_blocks=-(-len(items) // _PART)).map_batches(
            _Actor,
            fn_constructor_args=(load, options),
            batch_size=_PART,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=count),
            num_cpus=max(1, resources["CPU"] // count),
            num_gpus=min(1, resources.get("GPU", 0)),
        )
        for row in found.iter_rows():
            yield Answered(row["line"], row["failed"])

    return answers
