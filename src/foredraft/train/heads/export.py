"""Saves a run's result: a head, a tuned target, or a draft model, with provenance."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from foredraft.core.errors import DataError
from foredraft.files.outputs import replaced_folder
from foredraft.heads import formats
from foredraft.heads.formats.medusa import write_second
from foredraft.heads.nets.hydra import HydraConfig
from foredraft.heads.nets.medusa import Medusa, MedusaConfig
from foredraft.model.loading.load import Loaded, quiet
from foredraft.train.heads.validate import rank_accuracies
from foredraft.train.recipe import TrainBatch


def record_accuracies(net: Any, batches: Sequence[TrainBatch]) -> None:
    """Store the accuracy by rank in the config of Medusa and Hydra heads."""
    if isinstance(net.config, (MedusaConfig, HydraConfig)):
        net.config = dataclasses.replace(net.config, accuracies=rank_accuracies(net, batches))


def save_head(net: Any, folder: Path, loaded: Loaded, target_name: str, notes: dict[str, Any]) -> None:
    """Save a head of an unchanged target."""
    formats.save_head(
        net,
        folder,
        to=formats.default_format(net),
        target_name=target_name,
        target_config=loaded.model.config.to_dict(),
        provenance=notes,
        embed=False,
        command="train",
    )


def save_target_and_heads(net: Medusa, folder: Path, loaded: Loaded, notes: dict[str, Any]) -> None:
    """Save a tuned target with its heads: a folder that is both a model and a Medusa-2 checkpoint.

    Atomic, in bfloat16; also converts the target in memory.

    Raises:
        DataError: it cannot be written.
    """
    words, tensors = write_second(net)
    loaded.model.config.update(words)
    kept = {name: tensor.detach().to("cpu", torch.bfloat16, copy=True) for name, tensor in tensors.items()}
    _save_model(loaded.model, folder, loaded, notes, kept)


def save_model(model: Any, folder: Path, loaded: Loaded, notes: dict[str, Any]) -> None:
    """Save a trained model with the target's tokenizer, as a folder that transformers loads.

    Atomic, in bfloat16; also converts the model in memory.

    Args:
        loaded: the target.

    Raises:
        DataError: it cannot be written.
    """
    _save_model(model, folder, loaded, notes, {})


def _save_model(model: Any, folder: Path, loaded: Loaded, notes: dict[str, Any], more: dict[str, torch.Tensor]) -> None:
    model = model.bfloat16()
    try:
        with replaced_folder(folder, "train") as partial:
            with quiet():
                model.save_pretrained(partial, state_dict={**model.state_dict(), **more})
            if loaded.tokenizer is not None:
                loaded.tokenizer.save(partial)
            for file in partial.glob("*.safetensors"):
                shutil.copymode(partial / "config.json", file)  # safetensors makes files private
            (partial / "provenance.json").write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(f"Cannot write the trained model to {folder}: {error}.") from error
