"""``foredraft capacity``."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foredraft.cli.console import output, starting
from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from foredraft.bench.capacity import Capacity

_MODEL = "Target: folder, hub name or GGUF file; its weights are not read."
_DRAFTER = "none, prompt_lookup, max_gram, eagle1, eagle2, eagle3 or draft_model:CONFIG."
_CONTEXT = "Tokens of a request, prompt and output together."
_NODES = "Largest number of draft nodes in a step."
_DTYPE = "Of weights, keys and values; auto: the config's own, and quantised weights as they are stored."
_BANDWIDTH = "Memory bandwidth of a device; adds a lower bound for the time of a step."
_COLUMNS = ("devices", "replicas", "tensor parallel", "rows per replica", "weights", "KV per row", "logits per row")
EXAMPLES = (
    "foredraft capacity -m meta-llama/Llama-3.1-8B-Instruct -d eagle3 --concurrency 64 --context 8192 --memory 80",
    "foredraft capacity -m PATH -d draft_model:SMALL --concurrency 16 --context 4096 --memory 24 --json",
)


def command(
    *,
    model: Annotated[str, typer.Option("--model", "-m", metavar="TEXT", help=_MODEL)],
    concurrency: Annotated[int, typer.Option(metavar="INT", help="Concurrent requests.")],
    context: Annotated[int, typer.Option(metavar="INT", help=_CONTEXT)],
    memory: Annotated[float, typer.Option(metavar="GB", help="Memory of one device, in GB.")],
    drafter: Annotated[str, typer.Option("--drafter", "-d", metavar="SPEC", help=_DRAFTER)] = "none",
    draft_nodes: Annotated[int, typer.Option(metavar="INT", help=_NODES)] = 60,
    dtype: Annotated[str, typer.Option(metavar="TEXT", help=_DTYPE)] = "auto",
    bandwidth: Annotated[float | None, typer.Option(metavar="GB/S", help=_BANDWIDTH)] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the devices that a load needs, from a model's config.

    Counts weights, keys and values, and the logits of a step; a tenth of each device stays free. All requests count as
    long as --context.
    """
    with starting():
        from foredraft.bench.capacity import Load, deployments, drafter_sizes
        from foredraft.model.loading.sizes import model_sizes

    if memory <= 0 or (bandwidth is not None and bandwidth <= 0):
        raise OptionError("--memory and --bandwidth must be above 0.")
    load = Load(concurrency, context, draft_nodes)
    target = model_sizes(model, dtype)
    own = drafter_sizes(drafter, target, dtype)
    reads = None if bandwidth is None else bandwidth * 1e9
    plans = deployments(target, own, load, int(memory * 1e9), bandwidth=reads)
    if as_json:
        shown = [{**asdict(plan), "devices": plan.devices} for plan in plans]
        typer.echo(json.dumps({"target": asdict(target), "drafter": asdict(own), "deployments": shown}))
        return
    console = output()
    console.print(_table(plans))
    best = plans[0]
    console.print(
        f"Fewest devices: {best.devices}, as {best.replicas} x {best.tensor_parallel}, for {concurrency} requests of "
        f"{context} tokens.",
        soft_wrap=True,
    )


def _table(plans: "list[Capacity]") -> Table:
    from foredraft.model.memory import format_bytes

    table = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, justify="right")
    timed = plans[0].step_seconds is not None
    if timed:
        table.add_column("least ms per step", justify="right")
    for plan in plans:
        counts = (plan.devices, plan.replicas, plan.tensor_parallel, plan.rows)
        sizes = (plan.weights, plan.row, plan.workspace)
        cells = [*map(str, counts), *map(format_bytes, sizes)]
        table.add_row(*cells, *([f"{1e3 * plan.step_seconds:.1f}"] if plan.step_seconds is not None else []))
    return table
