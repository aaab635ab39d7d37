"""Nested values of tensors and of numbers on the host, taken apart and put together again."""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """A tensor in a form: its number in the list of tensors, and what a recording depends on."""

    number: int
    shape: tuple[int, ...]  # without rows
    dtype: torch.dtype


class Node(NamedTuple):
    """A dataclass, tuple, list or mapping in a form. ``names``: fields or keys; None for sequences."""

    kind: type
    names: tuple[Any, ...] | None
    parts: tuple[Any, ...]


_HOST = (type(None), bool, int, float, str, Enum, torch.dtype)


def split(value: object, tensors: list[Tensor]) -> Any:
    """The form of a nested value, which is hashable. Its tensors are appended to ``tensors``, each one once.

    Raises:
        TypeError: the value holds something else than tensors and plain values, such as a function.
    """
    if isinstance(value, Tensor):
        number = next((i for i, tensor in enumerate(tensors) if tensor is value), len(tensors))
        if number == len(tensors):
            tensors.append(value)
        return Place(number, tuple(value.shape[1:]), value.dtype)
    if isinstance(value, _HOST):
        return value
    if isinstance(value, Mapping):
        return Node(dict, tuple(value), tuple(split(part, tensors) for part in value.values()))
    if dataclasses.is_dataclass(value):
        names = tuple(each.name for each in dataclasses.fields(value) if each.init)
        return Node(type(value), names, tuple(split(getattr(value, name), tensors) for name in names))
    if isinstance(value, tuple):
        return Node(type(value), None, tuple(split(part, tensors) for part in value))
    raise TypeError(f"it depends on a {'function' if callable(value) else type(value).__name__} on the host")


def joined(form: Any, tensors: Sequence[Tensor]) -> Any:
    """The nested value of this form with other tensors."""
    if isinstance(form, Place):
        return tensors[form.number]
    if not isinstance(form, Node):
        return form
    parts = [joined(part, tensors) for part in form.parts]
    if form.names is not None:
        named = dict(zip(form.names, parts, strict=True))
        return named if form.kind is dict else form.kind(**named)
    return form.kind(*parts) if hasattr(form.kind, "_fields") else tuple(parts)
