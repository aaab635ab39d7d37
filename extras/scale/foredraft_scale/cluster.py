"""The connection to a Ray cluster: an existing one, or one that Ray starts on this machine."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from foredraft.core.errors import OptionError

_STORE_BYTES = 256 * 2**20
"""Requests and answers are small: Ray would take a third of the memory."""


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[None]:
    """Be connected to the cluster at ``address``; None: start one here, with at least ``cpus`` cores, until the end.

    Raises:
        OptionError: there is no cluster at this address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # replicas without a GPU of Ray's keep the device
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=max(cpus, os.cpu_count() or 1),
                object_store_memory=_STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.WARNING,
            )
        else:
            ray.init(address=address, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise OptionError(f"There is no Ray cluster at {address}: {' '.join(str(error).split())}") from None
    try:
        yield
    finally:
        ray.shutdown()


def has_gpus() -> bool:
    """Whether the cluster has GPUs."""
    return ray.cluster_resources().get("GPU", 0) > 0
