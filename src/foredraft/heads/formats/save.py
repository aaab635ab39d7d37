"""Writing a head in one of the published formats, whole or not at all."""

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
from foredraft.heads.formats import eagle1, eagle3_export as eagle3_out, hydra, medusa, native
from foredraft.heads.formats.eagle1 import target_table
from foredraft.heads.nets.eagle import Eagle, Eagle3
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.model.hub import TRANSFORMERS

FORMATS = ("eagle", "sglang", "speculators", "medusa", "hydra", "foredraft")

Made = tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]
"""config.json, tensors, and the names of the files that get them."""


def default_format(net: nn.Module) -> str:
    """The format that most programs read this head in; "foredraft" where none can hold it."""
    for to in FORMATS if not isinstance(net, Eagle3) else ("speculators", "sglang", "foredraft"):
        if isinstance(net, _kinds(to)) and not _objections(net, to, None):
            return to
    raise DrafterError(f"{net.__class__.__name__} is no draft head.")


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
    """Write config.json and weights as the format's readers want them.

    Args:
        folder: made if it is not there; files of the same names in it are replaced one by one, config.json last.
        to: one of ``FORMATS``.
        target_name: what the target is called, for those formats that say so.
        target_config: the target's config as a dictionary.
        dtype: of the weights in the file.
        provenance: written beside, as provenance.json.
        embed: store the target's embedding, too; by default only for EAGLE-1, whose first loader insists on it.

    Raises:
        DrafterError: a format that cannot hold this head, with what it lacks; a folder that has other weights in it.
    """
    if to not in FORMATS:
        raise DrafterError(f"Unknown format {to!r}. Known: {', '.join(FORMATS)}.")
    if not isinstance(net, _kinds(to)):
        raise DrafterError(f"A head of the kind {net.__class__.__name__} cannot be written in the format {to!r}.")
    text = target_config.get("text_config")
    target = {**target_config, **text} if isinstance(text, Mapping) else dict(target_config)
    depth = target.get("num_hidden_layers")
    objections = _objections(net, to, depth if isinstance(depth, int) else None)
    if objections:
        raise DrafterError(f"The format {to!r} cannot hold this head: {', '.join(objections)}.")
    wanted = isinstance(net, Eagle) if embed is None else embed
    words, tensors, files = _made(net, to, target, target_name, dtype=dtype, embed=wanted)
    stored = {name: _stored(tensor, dtype) for name, tensor in tensors.items()}
    notes = {"provenance.json": dict(provenance)} if provenance is not None else {}
    _write(Path(folder).expanduser(), {**notes, "config.json": words}, stored, files)


def _kinds(to: str) -> tuple[type, ...]:
    """The nets that a format is made for."""
    return {
        "eagle": (Eagle, Eagle3),
        "sglang": (Eagle3,),
        "speculators": (Eagle3,),
        "medusa": (Medusa,),
        "hydra": (Hydra,),
        "foredraft": (Eagle, Eagle3, Medusa, Hydra, Blockwise),
    }[to]


def _objections(net: nn.Module, to: str, layers: int | None) -> list[str]:
    """What the format cannot say of this head."""
    if isinstance(net, Eagle) and to == "eagle":
        return eagle1.objections(net)
    if isinstance(net, Eagle3) and to == "eagle":
        return eagle3_out.objections_safeailab(net, layers)
    if isinstance(net, Eagle3) and to == "sglang":
        return eagle3_out.objections_sglang(net)
    if isinstance(net, Eagle3) and to == "speculators":
        return eagle3_out.objections_speculators(net)
    if isinstance(net, Hydra) and to == "hydra" and not net.config.own_heads:
        return ["own_heads=False"]
    return []


def _made(net: nn.Module, to: str, target: Mapping[str, Any], name: str, *, dtype: torch.dtype, embed: bool) -> Made:
    plain = ("model.safetensors",)
    if to == "medusa":
        assert isinstance(net, Medusa)
        # the published loader looks for the pickle; version 2 has none
        files = ("medusa_lm_head.safetensors", *(("medusa_lm_head.pt",) if net.config.own_heads else ()))
        return *medusa.write(net, target, name=name, version=TRANSFORMERS), files
    if to == "hydra":
        assert isinstance(net, Hydra)
        table = target_table(net) if embed else None
        made = hydra.write(net, target, name=name, version=TRANSFORMERS, table=table)
        return *made, ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
    if to == "foredraft":
        assert isinstance(net, (Eagle, Eagle3, Medusa, Hydra, Blockwise))
        return *native.write(net, net.config, name=name), plain
    if isinstance(net, Eagle):
        return *eagle1.write(net, target, dtype=dtype, embed=embed), plain
    assert isinstance(net, Eagle3)
    if to == "speculators":
        made = eagle3_out.write_speculators(net, target, dtype=dtype, embed=embed, name=name, version=TRANSFORMERS)
        return *made, plain
    write = eagle3_out.write_sglang if to == "sglang" else eagle3_out.write_safeailab
    return *write(net, target, dtype=dtype, embed=embed), plain


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU, in the type of the file, with memory of its own (safetensors shares none)."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()


def _write(folder: Path, texts: Mapping[str, Any], tensors: dict[str, Tensor], files: tuple[str, ...]) -> None:
    """Everything into a folder beside, then into its place: config.json comes last, so no half head is ever read."""
    others = [path.name for kind in ("safetensors", "bin", "pt") for path in folder.glob(f"*.{kind}")]
    strange = sorted(set(others) - set(files))
    if strange:
        raise DrafterError(f"The folder {str(folder)!r} has other weights in it: {', '.join(strange[:3])}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    except OSError as error:
        raise DrafterError(f"Cannot write to the folder {str(folder)!r}: {error.strerror}.") from error
    try:
        for file in files:
            _SAVERS[Path(file).suffix](tensors, beside / file)
        for file, words in texts.items():
            (beside / file).write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
        for file in (*files, *texts):
            os.replace(beside / file, folder / file)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _safe(tensors: dict[str, Tensor], file: Path) -> None:
    file.write_bytes(save(tensors, metadata={"format": "pt"}))  # as any file is made: safetensors' own is for us alone


_SAVERS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {".safetensors": _safe, ".pt": torch.save}
