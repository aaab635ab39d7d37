"""What the folder of a head or draft model says about its acceptance, and what ``bench --calibrate`` adds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.compose.arguments import as_spec, drafting_spec
from foredraft.compose.spec import Spec
from foredraft.core.errors import OptionError
from foredraft.files.outputs import locked
from foredraft.files.read import read_json
from foredraft.files.write import atomic_write_text
from foredraft.model.loading.bundled import resolve


def stored_acceptance_length(folder: str) -> float | None:
    """The greedy acceptance length that training recorded for a head or draft model; None if not recorded."""
    try:
        validation = json.loads((Path(folder) / "provenance.json").read_text(encoding="utf-8"))["validation"]
        return max(float(validation["acceptance_length"]), 1.0)
    except (OSError, ValueError, KeyError, TypeError):
        return None


CALIBRATION = "calibration.json"
"""In the folder of a head or draft model: by method, the weights of its acceptance model; see ``Policy.state``."""


def stored_calibration(folder: str, method: str) -> dict[str, Any]:
    """What ``store_calibration`` has stored for a method, as a policy's state; empty if there is nothing."""
    try:
        return {"weights": json.loads((Path(folder) / CALIBRATION).read_text(encoding="utf-8"))[method]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def store_calibration(folder: str, method: str, weights: Mapping[str, Any]) -> Path:
    """Store the acceptance weights of a method, by temperature, beside those of other methods and temperatures.

    Raises:
        OptionError: the file cannot be written, or is no calibration.
    """
    path = Path(folder) / CALIBRATION
    rounded = {heat: [round(weight, 4) for weight in each] for heat, each in weights.items()}
    with locked(path):
        known = check_calibration(folder)
        try:
            whole = {**known, method: {**known.get(method, {}), **rounded}}
            atomic_write_text(path, json.dumps(whole, indent=2) + "\n")
        except OSError as error:
            raise OptionError(f"Cannot write {path}: {error.strerror}; remove --calibrate.") from None
    return path


def check_calibration(folder: str) -> dict[str, Any]:
    """All that is stored in a folder, by method.

    Raises:
        OptionError: its file is no calibration.
    """
    path = Path(folder) / CALIBRATION
    known = read_json(path, OptionError, remedy="remove it, or leave out --calibrate") if path.exists() else {}
    if not all(isinstance(each, dict) for each in known.values()):
        raise OptionError(f"{path} is no calibration: remove it, or leave out --calibrate.")
    return known


def calibrated_folder(target: Any, drafter: str) -> str | None:
    """The folder of a spec's head or draft model, where its calibration is kept; None if it has no folder.

    Raises:
        OptionError: the spec is not valid.
    """
    spec = as_spec(target, drafter)
    path = drafting_spec(target, spec).path if isinstance(spec, Spec) else None
    folder = None if path is None else resolve(path)
    return folder if folder is not None and Path(folder).is_dir() else None
