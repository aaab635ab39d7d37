"""Writes a head in one of the published formats, atomically."""

import functools
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from foredraft.core.errors import DrafterError
from foredraft.files.outputs import RECORD, replaced_folder
from foredraft.heads.formats import eagle1, eagle3_export, hydra, medusa, native
from foredraft.heads.formats.info import Contents, ExportOptions
from foredraft.heads.nets.eagle import Eagle, Eagle3
from foredraft.heads.nets.glide import Glide
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa


@dataclass(frozen=True, slots=True)
class _HeadWriter:
    """How to write one kind of net in one format.

    ``unsupported``: features of a net that the format does not support, given the target's depth, if known.
    """

    write: Callable[[Any, ExportOptions], Contents]
    unsupported: Callable[[Any, int | None], list[str]] = lambda net, layers: []


def _eagle3(to: str, write: Callable[[Any, ExportOptions], Contents]) -> dict[type, _HeadWriter]:
    return {Eagle3: _HeadWriter(write, functools.partial(eagle3_export.unsupported, to))}


_WRITERS: dict[str, dict[type, _HeadWriter]] = {
    "eagle": {Eagle: _HeadWriter(eagle1.write, eagle1.unsupported), **_eagle3("eagle", eagle3_export.write_safeailab)},
    "sglang": _eagle3("sglang", eagle3_export.write_sglang),
    "speculators": _eagle3("speculators", eagle3_export.write_speculators),
    "vllm": _eagle3("speculators", eagle3_export.write_speculators),
    "medusa": {Medusa: _HeadWriter(medusa.write)},
    "hydra": {Hydra: _HeadWriter(hydra.write, hydra.unsupported)},
    "foredraft": dict.fromkeys((Eagle, Eagle3, Medusa, Hydra, Blockwise, Glide), _HeadWriter(native.write)),
}
FORMATS = tuple(_WRITERS)


def default_format(net: nn.Module) -> str:
    """The most widely supported format for this head; "foredraft" if no other can hold it."""
    for to in FORMATS if not isinstance(net, Eagle3) else ("speculators", "sglang", "foredraft"):
        writer = _WRITERS[to].get(type(net))
        if writer is not None and not writer.unsupported(net, None):
            return to
    raise DrafterError(f"{net.__class__.__name__} is not a draft head.")


def save_head(
    net: nn.Module,
    folder: str | Path,
    *,
    to: str,
    target_name: str,
    target_config: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    provenance: Mapping[str, Any] | None = None,
    embed: bool | None = None,
    command: str = "export",
) -> None:
    """Write config.json and weights in a format.

    Args:
        folder: made if missing; only what ``command`` wrote is replaced, see ``replaced_folder``.
        to: one of ``FORMATS``.
        target_name: the target's name, for formats that store it.
        target_config: the target's config as a dictionary.
        dtype: of the weights in the file.
        provenance: goes into provenance.json.
        embed: also store the target's embedding; by default only for EAGLE-1, whose original loader requires it.

    Raises:
        DrafterError: the format cannot hold this head (the message says why), or the folder cannot be written.
        OptionError: the folder has something that ``command`` did not write.
    """
    if to not in FORMATS:
        raise DrafterError(f"Unknown format {to!r}. Known: {', '.join(FORMATS)}.")
    writer = _WRITERS[to].get(type(net))
    if writer is None:
        raise DrafterError(f"A head of the kind {net.__class__.__name__} cannot be written in the format {to!r}.")
    text = target_config.get("text_config")
    target = {**target_config, **text} if isinstance(text, Mapping) else dict(target_config)
    depth = target.get("num_hidden_layers")
    unsupported = writer.unsupported(net, depth if isinstance(depth, int) else None)
    if unsupported:
        raise DrafterError(f"The format {to!r} cannot hold this head: {', '.join(unsupported)}.")
    embed = isinstance(net, Eagle) if embed is None else embed
    config, tensors = writer.write(net, ExportOptions(target, target_name, dtype, embed))
    stored = {name: _stored(tensor, dtype) for name, tensor in tensors.items()}
    jsons = {RECORD: dict(provenance or {}), "config.json": config}
    place, files = Path(folder).expanduser(), _files(net, to)
    try:
        with replaced_folder(place, command) as partial:
            for file in files:
                (partial / file).write_bytes(_WEIGHTS[Path(file).suffix](stored))
            for file, entries in jsons.items():
                (partial / file).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DrafterError(f"Cannot write to the folder {str(place)!r}: {error.strerror}.") from error


def _files(net: nn.Module, to: str) -> tuple[str, ...]:
    """The names of the weight files; the published loaders of Medusa (but for version 2) and Hydra read the pickle."""
    if to not in ("medusa", "hydra"):
        return ("model.safetensors",)
    pickled = not isinstance(net, Medusa) or net.config.own_heads
    return (f"{to}_lm_head.safetensors", *((f"{to}_lm_head.pt",) if pickled else ()))


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU copy in the file's dtype (safetensors rejects shared memory)."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()


def _safe(tensors: dict[str, Tensor]) -> bytes:
    return save(tensors, metadata={"format": "pt"})


def _pickled(tensors: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


_WEIGHTS: dict[str, Callable[[dict[str, Tensor]], bytes]] = {".safetensors": _safe, ".pt": _pickled}
"""The contents of a file of weights. Written by us: what the packages write differs in permissions and in errors."""
