"""Writes a head in one of the published formats, atomically."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from foredraft.core.errors import DrafterError
from foredraft.heads.formats import eagle1, eagle3_export, hydra, medusa, native
from foredraft.heads.formats.eagle1 import target_table
from foredraft.heads.nets.eagle import Eagle, Eagle3
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.model.hub import TRANSFORMERS

FORMATS = ("eagle", "sglang", "speculators", "medusa", "hydra", "foredraft")

Contents = tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]
"""config.json, tensors, and the names of the weight files."""


def default_format(net: nn.Module) -> str:
    """The most widely supported format for this head; "foredraft" if no other can hold it."""
    for to in FORMATS if not isinstance(net, Eagle3) else ("speculators", "sglang", "foredraft"):
        if isinstance(net, _kinds(to)) and not _unsupported(net, to, None):
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
) -> None:
    """Write config.json and weights in a format.

    Args:
        folder: created if missing; existing files of the same names are replaced one by one, config.json last.
        to: one of ``FORMATS``.
        target_name: the target's name, for formats that store it.
        target_config: the target's config as a dictionary.
        dtype: of the weights in the file.
        provenance: written to provenance.json.
        embed: also store the target's embedding; by default only for EAGLE-1, whose original loader requires it.

    Raises:
        DrafterError: the format cannot hold this head (the message says why), or the folder has other weights.
    """
    if to not in FORMATS:
        raise DrafterError(f"Unknown format {to!r}. Known: {', '.join(FORMATS)}.")
    if not isinstance(net, _kinds(to)):
        raise DrafterError(f"A head of the kind {net.__class__.__name__} cannot be written in the format {to!r}.")
    text = target_config.get("text_config")
    target = {**target_config, **text} if isinstance(text, Mapping) else dict(target_config)
    depth = target.get("num_hidden_layers")
    unsupported = _unsupported(net, to, depth if isinstance(depth, int) else None)
    if unsupported:
        raise DrafterError(f"The format {to!r} cannot hold this head: {', '.join(unsupported)}.")
    embed = isinstance(net, Eagle) if embed is None else embed
    config, tensors, files = _contents(net, to, target, target_name, dtype=dtype, embed=embed)
    stored = {name: _stored(tensor, dtype) for name, tensor in tensors.items()}
    extra = {"provenance.json": dict(provenance)} if provenance is not None else {}
    _write(Path(folder).expanduser(), {**extra, "config.json": config}, stored, files)


def _kinds(to: str) -> tuple[type, ...]:
    """The net classes that a format supports."""
    return {
        "eagle": (Eagle, Eagle3),
        "sglang": (Eagle3,),
        "speculators": (Eagle3,),
        "medusa": (Medusa,),
        "hydra": (Hydra,),
        "foredraft": (Eagle, Eagle3, Medusa, Hydra, Blockwise),
    }[to]


def _unsupported(net: nn.Module, to: str, layers: int | None) -> list[str]:
    """Config fields of this head that the format does not support."""
    if isinstance(net, Eagle) and to == "eagle":
        return eagle1.unsupported(net)
    if isinstance(net, Eagle3) and to == "eagle":
        return eagle3_export.unsupported_by_safeailab(net, layers)
    if isinstance(net, Eagle3) and to == "sglang":
        return eagle3_export.unsupported_by_sglang(net)
    if isinstance(net, Eagle3) and to == "speculators":
        return eagle3_export.unsupported_by_speculators(net)
    if isinstance(net, Hydra) and to == "hydra" and not net.config.own_heads:
        return ["own_heads=False"]
    return []


def _contents(
    net: nn.Module, to: str, target: Mapping[str, Any], name: str, *, dtype: torch.dtype, embed: bool
) -> Contents:
    plain = ("model.safetensors",)
    if to == "medusa":
        assert isinstance(net, Medusa)
        # the published loader reads the pickle; version 2 has none
        files = ("medusa_lm_head.safetensors", *(("medusa_lm_head.pt",) if net.config.own_heads else ()))
        return *medusa.write(net, target, name=name, version=TRANSFORMERS), files
    if to == "hydra":
        assert isinstance(net, Hydra)
        table = target_table(net) if embed else None
        config, tensors = hydra.write(net, target, name=name, version=TRANSFORMERS, table=table)
        return config, tensors, ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
    if to == "foredraft":
        assert isinstance(net, (Eagle, Eagle3, Medusa, Hydra, Blockwise))
        return *native.write(net, net.config, name=name), plain
    if isinstance(net, Eagle):
        return *eagle1.write(net, target, dtype=dtype, embed=embed), plain
    assert isinstance(net, Eagle3)
    if to == "speculators":
        write = functools.partial(eagle3_export.write_speculators, name=name, version=TRANSFORMERS)
    else:
        write = eagle3_export.write_sglang if to == "sglang" else eagle3_export.write_safeailab
    return *write(net, target, dtype=dtype, embed=embed), plain


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU copy in the file's dtype (safetensors rejects shared memory)."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()


def _write(folder: Path, jsons: Mapping[str, Any], tensors: dict[str, Tensor], files: tuple[str, ...]) -> None:
    """Write all files to a temporary folder, then move them; config.json last, so no incomplete head is ever read."""
    existing = [path.name for kind in ("safetensors", "bin", "pt") for path in folder.glob(f"*.{kind}")]
    others = sorted(set(existing) - set(files))
    if others:
        raise DrafterError(f"The folder {str(folder)!r} has other weights in it: {', '.join(others[:3])}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    except OSError as error:
        raise DrafterError(f"Cannot write to the folder {str(folder)!r}: {error.strerror}.") from error
    try:
        for file in files:
            _SAVERS[Path(file).suffix](tensors, temporary / file)
        for file, entries in jsons.items():
            (temporary / file).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
        for file in (*files, *jsons):
            os.replace(temporary / file, folder / file)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _safe(tensors: dict[str, Tensor], file: Path) -> None:
    # with default permissions; safetensors' own ``save_file`` makes files that only the owner can read
    file.write_bytes(save(tensors, metadata={"format": "pt"}))


_SAVERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {".safetensors": _safe, ".pt": torch.save}
