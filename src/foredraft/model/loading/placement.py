"""Where a model's weights go: dtypes and devices by name, and whether there is room."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from foredraft.core.errors import ModelError, OptionError, first_line
from foredraft.model.memory import available_bytes, format_bytes

PLACEMENT = {"device_map", "tp_plan", "tp_size", "device_mesh", "distributed_config"}
"""Options of ``from_pretrained`` that say where weights go; transformers refuses a device map beside a tensor-parallel
plan."""


def as_dtype(name: str | torch.dtype) -> torch.dtype:
    """A floating-point dtype, from its name if needed.

    Raises:
        OptionError: unknown dtype; the message lists the known ones.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OptionError(f"Unknown dtype {name!r}. Known: auto, bfloat16, float16, float32, float64.")
    return dtype


def as_device(name: str | torch.device) -> torch.device:
    """A device, from its name if needed.

    Raises:
        OptionError: the device does not exist on this machine.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = first_line(error).partition(". ")[0].rstrip(".")
        raise OptionError(f"Cannot use the device {str(name)!r}: {reason}.") from error
    return device


def check_fits(name: str, config: PreTrainedConfig, given: Mapping[str, Any], device: str) -> None:
    """Raise a ``ModelError`` if the weights do not fit on the device, before reading them. Quantised weights and
    weights that are placed otherwise are not checked, since their size on the device is unknown."""
    free = available_bytes(torch.device(device))
    quantised = getattr(config, "quantization_config", None) is not None or "quantization_config" in given
    placed = {key for key in PLACEMENT & given.keys() if not isinstance(given[key], torch.device)}
    if free is None or quantised or placed:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=bool(given.get("trust_remote_code", False))
        )
    own: Any = config.dtype
    dtype = given["dtype"] if isinstance(given["dtype"], torch.dtype) else own or torch.float32
    size = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    if size > free:
        kind = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"The weights of {name!r} take {format_bytes(size)} in {kind}, and {format_bytes(free)} are free on "
            f"{device}: free some, load them in a smaller dtype or quantised, or use another device."
        )
