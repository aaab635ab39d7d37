"""``foredraft replicas``."""

import signal
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Annotated

import typer

from foredraft.cli.choices import ASKED_MODEL, ModelChoice
from foredraft.cli.config import CONFIG
from foredraft.cli.console import busy, errors, starting
from foredraft.cli.flags import FlagGroup, flags
from foredraft.core.errors import OptionError
from foredraft.serve.options import ServeOptions, free_port
from foredraft_scale.options import ScaleOptions

_REPLICAS = "Replicas behind one endpoint."
_ADDRESS = "Ray cluster that runs the replicas, or auto; default: start Ray on this machine."
EXAMPLES = (
    "foredraft replicas --replicas 4 --host 0.0.0.0",
    "foredraft replicas --config serve.yaml --address auto",
)


@flags(choice=ASKED_MODEL, server=FlagGroup(ServeOptions, "Server"))
def command(
    *,
    replicas: Annotated[int, typer.Option(metavar="INT", help=_REPLICAS)] = 2,
    address: Annotated[str | None, typer.Option(metavar="TEXT", help=_ADDRESS)] = None,
    config: CONFIG = None,
    choice: ModelChoice,
    server: ServeOptions,
) -> None:
    """Serve a model by several replicas.

    The options are those of foredraft serve. Without an address, the replicas run on this machine until Ctrl-C. With an
    address, the command exits when they are up.
    """
    serve_replicas(choice, server, ScaleOptions(replicas=replicas, address=address))


def serve_replicas(choice: ModelChoice, server: ServeOptions, scale: ScaleOptions) -> None:
    """Deploy replicas to a cluster; without an address start one here, and stop it after Ctrl-C or SIGTERM.

    Raises:
        OptionError: an option has no meaning here.
        ModelError: the replicas do not start.
    """
    with starting():
        from foredraft_scale.cluster import connected
        from foredraft_scale.replicas import deploy, stop
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
