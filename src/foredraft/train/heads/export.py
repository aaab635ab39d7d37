"""What a run leaves behind: a head, or a tuned target with its heads in one folder, and what made them."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from foredraft.core.errors import DataError
from foredraft.heads import formats
from foredraft.heads.formats.medusa import write_second
from foredraft.heads.nets.medusa import Medusa
from foredraft.model.load import Loaded, quiet
from foredraft.train.heads.validate import rank_accuracies
from foredraft.train.recipe import Lesson


def note_accuracies(net: Any, lessons: Sequence[Lesson]) -> None:
    """Put into a head's config how often it was right by rank, where there is a place for it."""
    accuracies = rank_accuracies(net, lessons)
    if accuracies is not None and "accuracies" in {each.name for each in dataclasses.fields(net.config)}:
        net.config = dataclasses.replace(net.config, accuracies=accuracies)


def save_head(net: Any, folder: Path, loaded: Loaded, target_name: str, notes: dict[str, Any]) -> None:
    """A head for a target that is as it was."""
    formats.save_head(
        net,
        folder,
        to=formats.default_format(net),
        target_name=target_name,
        target_config=loaded.model.config.to_dict(),
        provenance=notes,
        embed=False,
    )


def save_both(net: Medusa, folder: Path, loaded: Loaded, notes: dict[str, Any]) -> None:
    """Heads and the target that has learned with them: a folder that is a model and a Medusa-2 checkpoint.

    Whole or not at all, and in bfloat16: the target in memory is rounded, too.

    Raises:
        DataError: it cannot be written.
    """
    words, tensors = write_second(net)
    loaded.model.config.update(words)
    kept = {name: tensor.detach().to("cpu", torch.bfloat16, copy=True) for name, tensor in tensors.items()}
    _save_model(loaded.model, folder, loaded, notes, kept)


def save_draft(model: Any, folder: Path, loaded: Loaded, notes: dict[str, Any]) -> None:
    """A whole small model with the target's tokenizer: a folder that transformers loads.

    Whole or not at all, and in bfloat16: the model in memory is rounded, too.

    Args:
        loaded: the target.

    Raises:
        DataError: it cannot be written.
    """
    _save_model(model, folder, loaded, notes, {})


def _save_model(model: Any, folder: Path, loaded: Loaded, notes: dict[str, Any], more: dict[str, torch.Tensor]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    model = model.bfloat16()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        with quiet():
            model.save_pretrained(partial, state_dict={**model.state_dict(), **more})
        if loaded.tokenizer is not None:
            loaded.tokenizer.inner.save_pretrained(partial)
        for file in partial.glob("*.safetensors"):
            shutil.copymode(partial / "config.json", file)  # as any file is made: safetensors' own is for us alone
        (partial / "provenance.json").write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
        _replace(folder, partial)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(f"The trained model cannot be written to {folder}: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Put a finished folder in the place of one that an earlier run has left; nothing else is thrown away.

    Raises:
        DataError: the place is taken by something else.
    """
    if not folder.exists():
        new.rename(folder)
        return
    if not all((folder / name).is_file() for name in ("config.json", "provenance.json")):
        raise DataError(f"{folder} is there already, and no run has left it: give another --out.")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
