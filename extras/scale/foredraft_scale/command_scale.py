"""``foredraft scale``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.choices import ModelChoice
from foredraft.cli.config import read_config
from foredraft.serve.options import ServeOptions
from foredraft_scale.command_replicas import serve_replicas
from foredraft_scale.options import ScaleOptions, deployment

_FILE = "YAML or TOML with the sections model, server and scale (see docs/scaling.md)."
_ADDRESS = "Ray cluster; overrides the file's. auto: the one that runs on this machine."
EXAMPLES = ("foredraft scale deploy.yaml", "foredraft scale deploy.yaml --address auto")


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_FILE)],
    *,
    address: Annotated[str | None, typer.Option(metavar="TEXT", help=_ADDRESS)] = None,
) -> None:
    """Serve a model by several replicas, as a file describes them.

    Without an address, they run on this machine until Ctrl-C. With an address, the command exits when they are up; run
    again with a changed file, it replaces them, a few at a time, without dropping requests.
    """
    found = deployment(read_config(file), {"model": ModelChoice, "server": ServeOptions, "scale": ScaleOptions})
    scale = found["scale"] if address is None else replace(found["scale"], address=address)
    serve_replicas(found["model"], found["server"], scale)
