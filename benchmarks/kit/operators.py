"""Counts of operators, and of reads that would make a GPU's host wait."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_FREE = {"_unsafe_view", "detach", "lift", "lift_fresh", "empty", "new_empty", "empty_strided", "new_empty_strided"}
"""Operators that launch no kernel and are not marked as views."""
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2"}
_TENSOR_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}


class Operators(TorchDispatchMode):
    """Counts dispatched operators, without views and allocations, in ``count``.

    ``waits``: operators after which the host of a GPU would wait: values that are read, selections by a mask, and
    tensors made from Python numbers (``lift_fresh``), which are copied from pageable memory. ``HostReads`` adds the
    reads that are not dispatched on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        self.count += not (name in _FREE or (func.is_view and _shares(result, args[0])))
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        copied = name == "lift_fresh" and args[0].ndim > 0  # single numbers become arguments of kernels
        self.waits += name in _READS or copied or by_mask
        return result


def _shares(result: Any, source: Any) -> bool:
    """Whether an operator marked as a view made one: ``to``, ``reshape`` and others may copy."""
    return not isinstance(result, torch.Tensor) or result.untyped_storage()._cdata == source.untyped_storage()._cdata


class HostReads(TorchFunctionMode):
    """Adds ``tolist``, ``numpy`` and ``cpu`` to the waits of ``operators``."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self._operators = operators

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._operators.waits += func in _TENSOR_READS
        return func(*args, **(kwargs or {}))
