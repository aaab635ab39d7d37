"""Checks of weights as they are read: a damaged file gives numbers that no model has."""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.model.native.weights import Blocks, Codes


def checked(
    source: "Callable[[str], Tensor | Codes | Blocks | None]",
) -> "Callable[[str], Tensor | Codes | Blocks | None]":
    """A source whose weights are checked when they are read; see ``check_weight``. Blocks are when they are packed."""

    def read(name: str) -> Tensor | Codes | Blocks | None:
        found = source(name)
        if isinstance(found, Codes):
            parts = [getattr(found, each.name) for each in fields(found)]
            for part in parts:
                if isinstance(part, Tensor) and part.is_floating_point():
                    check_weight(name, part)
        elif isinstance(found, Tensor):
            check_weight(name, found)
        return found

    return read


def check_weight(name: str, weight: Tensor) -> None:
    """Raise a ``ModelError`` if a weight, or the scales of one, are no numbers that a model has."""
    kind = str(weight.dtype).removeprefix("torch.")
    if not weight.is_floating_point():
        raise ModelError(f"The weight {name} is damaged: it has the type {kind}, which holds no weights.")
    if weight.is_meta or not weight.numel():
        return
    values = weight.detach().float() if weight.itemsize < 2 else weight.detach()
    if not bool(torch.stack(torch.aminmax(values)).isfinite().all()):  # NaN comes through
        large = ", or they are too large for float16" if kind == "float16" else ""
        raise ModelError(f"The weight {name} has NaN or infinite values: it is damaged{large}.")
