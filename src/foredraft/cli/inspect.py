"""``foredraft inspect``."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foredraft.cli.console import output

if TYPE_CHECKING:
    from foredraft.heads.formats import HeadInfo
    from foredraft.model.loading.describe import GgufInfo, ModelInfo


EXAMPLES = (
    "foredraft inspect run/head",
    "foredraft inspect yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --json",
    "foredraft inspect model.gguf",
)


def command(
    path: Annotated[
        str,
        typer.Argument(
            help="A draft head or a model: folder, hub name, bundled (sample-eagle3), or a GGUF file.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
) -> None:
    """Describe a trained draft head, a model, or a GGUF file.

    A head: its method and the target that it needs. A model: its size, and which engine runs it with quantised weights,
    and why. A GGUF file: also how each type of its weights is read.
    """
    from foredraft.heads.formats import WholeModelError, inspect_head
    from foredraft.model.gguf.file import GgufFile
    from foredraft.model.gguf.load import is_gguf
    from foredraft.model.hf.hub import fetch_file
    from foredraft.model.loading.bundled import resolve
    from foredraft.model.loading.describe import inspect_gguf, inspect_model

    found: dict[str, Any]
    if is_gguf(source := resolve(path)):
        info = inspect_gguf(GgufFile(fetch_file(source)))
        found, panel = asdict(info), _gguf_panel(path, info)
    else:
        try:
            found = to_json(inspect_head(source))
            panel = _panel(path, found)
        except WholeModelError:
            model = inspect_model(path)
            found, panel = asdict(model), _model_panel(path, model)
    if as_json:
        typer.echo(json.dumps({"path": path, **found}))
        return
    output().print(panel)


def to_json(info: "HeadInfo") -> dict[str, Any]:
    """A head's description in JSON types."""
    return {
        "method": info.method,
        "format": info.format,
        "parameters": info.parameters,
        "dtype": str(info.dtype).removeprefix("torch."),
        "target": asdict(info.target),
        "config": asdict(info.config),
        "notes": list(info.notes),
    }


def _model_panel(path: str, info: "ModelInfo") -> Panel:
    """The model's size and engine."""
    table = _grid()
    table.add_row("model", info.model_type)
    table.add_row("parameters", f"{info.parameters:,}")
    table.add_row("shape", f"{info.layers} layers, hidden size {info.hidden_size}, vocabulary {info.vocab_size}")
    table.add_row("context", "no limit" if info.context is None else f"{info.context} tokens")
    table.add_row("engine", Text(_engine(info.engine, info.why)))
    return Panel(table, title=Text(path, style="bold"), title_align="left", expand=False)


def _engine(name: str, why: str) -> str:
    """The engine with quantised weights; without, it is always transformers."""
    return f"with --weights int4, int8 or auto: {name}. {why}" if name == "native" else f"{name}. {why}"


def _gguf_panel(path: str, info: "GgufInfo") -> Panel:
    """The model, its types of weights and its tokenizer."""
    from foredraft.model.memory import format_bytes

    rows = {
        "model": f"{info.name or 'no name'} ({info.architecture})",
        "parameters": f"{info.parameters:,} in {format_bytes(info.bytes)}",
        "shape": f"{info.layers} layers, hidden size {info.hidden_size}, vocabulary {info.vocab_size}",
        "context": f"{info.context} tokens",
        "tokenizer": info.tokenizer,
        "chat template": "yes" if info.chat_template else "no",
        "engine": _engine(info.engine, info.why),
    }
    table = _grid()
    for name, value in rows.items():
        table.add_row(name, Text(value))
    for number, each in enumerate(info.types):
        tensors = "1 tensor" if each.tensors == 1 else f"{each.tensors} tensors"
        row = f"{each.type}: {tensors}, {each.parameters:,} weights, {each.native or f'read {each.read}'}"
        table.add_row("" if number else "weights", Text(row))
    return Panel(table, title=Text(path, style="bold"), title_align="left", expand=False)


def _grid() -> Table:
    """Names and values beside each other."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _panel(path: str, found: dict[str, Any]) -> Panel:
    """Method, target requirements, shape and notes."""
    table = _grid()
    table.add_row("method", f"{found['method']} ({found['format']})")
    table.add_row("parameters", f"{found['parameters']:,} in {found['dtype']}")
    table.add_row("target", Text(_needs(found["target"])))
    if found["method"] == "eagle3":
        taps = ", ".join(map(str, found["config"]["taps"])) or "the target's default"
        table.add_row("hidden layers", taps)
    for name, value in _shape(found["config"]).items():
        table.add_row(name, Text(str(value)))
    for number, note in enumerate(found["notes"]):
        table.add_row("" if number else "notes", Text(note))
    return Panel(table, title=Text(path, style="bold"), title_align="left", expand=False)


def _needs(target: dict[str, Any]) -> str:
    parts = [target["name"]] if target["name"] else []
    parts.append(f"hidden size {target['hidden_size']}")
    if target["vocab_size"] is not None:
        parts.append(f"vocabulary {target['vocab_size']}")
    if target["layers"] is not None:
        parts.append(f"{target['layers']} layers or more")
    return ", ".join(parts)


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    """The config, flattened, without unset flags."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and name != "rope_scaling":
            flat |= _shape(value)
        elif name not in ("taps", "accuracies") and value not in (False, None):
            flat[name] = "yes" if value is True else value
    return flat
