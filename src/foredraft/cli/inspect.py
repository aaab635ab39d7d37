"""``foredraft inspect``."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from foredraft.cli.console import output, starting

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
    with starting():
        from foredraft.drafters import bundled_drafts
        from foredraft.heads.formats import WholeModelError, inspect_head
        from foredraft.model.gguf.file import GgufFile
        from foredraft.model.gguf.load import is_gguf
        from foredraft.model.hf.hub import fetch_file
        from foredraft.model.loading.bundled import resolve
        from foredraft.model.loading.contents import contents_of_files
        from foredraft.model.loading.describe import inspect_gguf, inspect_model

    found: dict[str, Any]
    rows: Rows
    if is_gguf(source := resolve(path)):
        info = inspect_gguf(GgufFile(fetch_file(source)))
        bundled = bundled_drafts(path, contents_of_files(path))
        found, rows = {**asdict(info), "bundled": bundled}, [*_of_gguf(info), *_of_bundled(bundled)]
    else:
        try:
            found = to_json(inspect_head(source))
            rows = _of_head(found)
        except WholeModelError:
            model = inspect_model(path)
            bundled = bundled_drafts(path, contents_of_files(path))
            found, rows = {**asdict(model), "bundled": bundled}, [*_of_model(model), *_of_bundled(bundled)]
    if as_json:
        typer.echo(json.dumps({"path": path, **found}))
        return
    table = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, Text(value))
    output().print(Panel(table, title=Text(path, style="bold"), title_align="left", expand=False))


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


Rows = Iterable[tuple[str, str]]
"""Names and values; a value without a name belongs to the one above it."""


def _of_model(info: "ModelInfo") -> Rows:
    """The model's size and engine."""
    yield "model", info.model_type
    yield "parameters", f"{info.parameters:,}"
    yield "shape", f"{info.layers} layers, hidden size {info.hidden_size}, vocabulary {info.vocab_size}"
    yield "context", "no limit" if info.context is None else f"{info.context} tokens"
    yield "engine", _engine(info.engine, info.why)


def _of_bundled(drafts: dict[str, str]) -> Rows:
    """The bundled drafts that fit the model."""
    for number, (method, draft) in enumerate(drafts.items()):
        yield "" if number else "fits", f"--drafter {method} ({draft}, which is bundled)"


def _engine(name: str, why: str) -> str:
    """The engine with quantised weights; without, it is always transformers."""
    return f"with --weights int4, int8 or auto: {name}. {why}" if name == "native" else f"{name}. {why}"


def _of_gguf(info: "GgufInfo") -> Rows:
    """The model, its types of weights and its tokenizer."""
    from foredraft.model.memory import format_bytes

    yield "model", f"{info.name or 'no name'} ({info.architecture})"
    yield "parameters", f"{info.parameters:,} in {format_bytes(info.bytes)}"
    yield "shape", f"{info.layers} layers, hidden size {info.hidden_size}, vocabulary {info.vocab_size}"
    yield "context", f"{info.context} tokens"
    yield "tokenizer", info.tokenizer
    yield "chat template", "yes" if info.chat_template else "no"
    yield "engine", _engine(info.engine, info.why)
    for number, each in enumerate(info.types):
        tensors = "1 tensor" if each.tensors == 1 else f"{each.tensors} tensors"
        kept = each.native or f"read {each.read}"
        yield "" if number else "weights", f"{each.type}: {tensors}, {each.parameters:,} weights, {kept}"


def _of_head(found: dict[str, Any]) -> Rows:
    """Method, target requirements, shape and notes."""
    yield "method", f"{found['method']} ({found['format']})"
    yield "parameters", f"{found['parameters']:,} in {found['dtype']}"
    yield "target", _needs(found["target"])
    if found["method"] == "eagle3":
        yield "hidden layers", ", ".join(map(str, found["config"]["taps"])) or "the target's default"
    for name, value in _shape(found["config"]).items():
        yield name, str(value)
    for number, note in enumerate(found["notes"]):
        yield "" if number else "notes", note


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
