"""Replicas of the server, from the command line."""

import signal
from dataclasses import replace
from functools import partial
from threading import Event

from foredraft.cli.choices import ModelChoice
from foredraft.cli.console import busy, errors, starting
from foredraft.cli.exit_status import needing
from foredraft.core.errors import OptionError
from foredraft.scale.options import ScaleOptions
from foredraft.serve.options import ServeOptions, free_port


def serve_replicas(choice: ModelChoice, server: ServeOptions, scale: ScaleOptions) -> None:
    """Deploy replicas to a cluster; without an address start one here, and stop it after Ctrl-C or SIGTERM.

    Raises:
        OptionError: a package is missing, or an option has no meaning here.
        ModelError: the replicas do not start.
    """
    with starting(), needing("Replicas need", "scale"):
        from foredraft.scale.cluster import connected
        from foredraft.scale.replicas import deploy, stop
    if choice.tensor_parallel > 1:
        raise OptionError("A replica runs in one process: leave out --tensor-parallel or the replicas.")
    local = scale.address is None
    if local:
        server = replace(server, port=free_port(server.host, server.port))
    load = partial(choice.load, prefix_cache=server.prefix_cache)
    with connected(scale.address, scale.replicas):
        with busy(f"Starting replicas of {choice.model}"):
            url = deploy(load, server.served_model_name or (choice.name,), server, scale)
        errors().print(f"Replicas of {choice.model} answer on {url}", soft_wrap=True, markup=False, highlight=False)
        if local:
            _wait_for_a_signal()
            stop(server.drain_seconds)


def _wait_for_a_signal() -> None:
    """Wait for SIGINT or SIGTERM; a second one interrupts what follows."""
    stopped = Event()

    def note(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)
        stopped.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, note)
    while not stopped.wait(1.0):  # without a limit it would not see the signal
        pass
