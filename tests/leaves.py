"""Nested arguments of operators: as ``torch.utils._pytree``, several times as fast, for plain containers only.

And which operators make the host wait for the device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")
_SHAPED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "bincount")


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same tuples, lists and dicts with ``function`` of each leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(function, each) for each in value])
    if kind is dict:
        return {key: mapped(function, each) for key, each in value.items()}
    return function(value)


def tensors(value: Any) -> Iterator[Tensor]:
    """The leaves that are tensors, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))


def waits(name: str, args: Any) -> bool:
    """Whether an operator (without its overload) reads values, or has results whose shape depends on them."""
    by_mask = name.startswith("index") and any(each.dtype is torch.bool for each in tensors(args[1:2]))
    return name in _READS or name in _SHAPED_BY_VALUES or by_mask
