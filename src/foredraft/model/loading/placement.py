"""Dtypes and devices by name."""

import torch

from foredraft.core.errors import OptionError, first_line


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
        raise OptionError(f"Cannot use the device {str(name)!r}: {first_line(error)}") from error
    return device
