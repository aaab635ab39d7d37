"""An accelerator without hardware: tensors that say that they are on another device, and the waits that it would have.

Data stays in CPU memory, but the tensors' device is ``DEVICE``, so code takes the branch of accelerators. Within
``FakeDevice`` each operator is checked and recorded:

- mixed devices raise, as on a GPU; tensors without dimensions may be on the CPU
- a wait is any operator that makes the host wait for the device: reading values (``.item()``, ``.tolist()``, ``bool``),
  operators whose output shape depends on values (``nonzero``, indexing by a mask), and copies between host and device.
  A copy to the device with ``non_blocking`` is not one; ``core.transfer`` makes it from pinned memory

What is recorded says nothing about time; it says what a step would wait for, and whether it could be captured as a
graph, which needs the same operators with the same shapes in every step.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from leaves import mapped, tensors, waits


class _Backend(backend_registration._DummyBackendModule):
    """Not available, so that nothing else takes the device for this machine's accelerator."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


if not hasattr(torch, "fake"):  # once a process
    backend_registration._setup_privateuseone_for_python_backend("fake", backend_module=_Backend())
DEVICE = torch.device("fake:0")

_COPIES = ("to", "_to_copy", "copy_", "cpu")
_SOURCES = Path(__file__).parents[1] / "src" / "foredraft"


class FakeTensor(Tensor):
    """A tensor on ``DEVICE`` with its data in ``raw``, on the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "FakeTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} was called outside of FakeDevice.")

    def __repr__(self, **kwargs: Any) -> str:
        return f"FakeTensor({tuple(self.shape)}, {self.dtype})"


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait: the operator, and the line of the package that caused it."""

    operator: str
    file: str
    function: str
    line: int


@dataclass(slots=True)
class Trace:
    """What a part of a run did: each operator with the shapes of its inputs, and the waits."""

    operators: list[tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


class _Conversions(TorchFunctionMode):
    """Conversions from and to lists run below all other modes, so they copy from and to the CPU here."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and _device_in((), kwargs) == DEVICE:
            del kwargs["device"]
            return function(*args, **kwargs).to(DEVICE)
        if function is Tensor.tolist and isinstance(args[0], FakeTensor):
            return args[0].to("cpu").tolist()
        if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], FakeTensor):
            index = tuple(map(_index, args[1])) if isinstance(args[1], tuple) else _index(args[1])
            return function(args[0], index, *args[2:])
        return function(*args, **kwargs)


def _enter_no_grad(context: torch.inference_mode) -> None:
    """Tensors of a subclass do not work in inference mode, which only changes bookkeeping."""
    context.__dict__["no_grad"] = no_grad = torch.no_grad()
    no_grad.__enter__()


def _exit_no_grad(context: torch.inference_mode, *error: Any) -> None:
    context.__dict__.pop("no_grad").__exit__(*error)


def _index(index: Any) -> Any:
    """torch copies an index that is a list to the device."""
    return torch.tensor(index).to(DEVICE) if isinstance(index, list) else index


class FakeDevice(TorchDispatchMode):
    """Runs operators on ``DEVICE``; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._trace: Trace | None = None
        self._conversions = _Conversions()
        self._patches = ExitStack()

    def __enter__(self) -> "FakeDevice":
        self._conversions.__enter__()
        super().__enter__()
        for name, replacement in (("__enter__", _enter_no_grad), ("__exit__", _exit_no_grad)):
            self._patches.enter_context(patch.object(torch.inference_mode, name, replacement))
        return self

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)
        self._conversions.__exit__(*error)

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record what runs in this context."""
        before, trace = self._trace, Trace()
        self._trace = trace
        try:
            yield trace
        finally:
            self._trace = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.name().removeprefix("aten::")
        given = list(tensors((args, kwargs)))
        fake = [each for each in given if isinstance(each, FakeTensor)]
        asked = _device_in(args, kwargs)
        to_device = asked == DEVICE if asked is not None else bool(fake)
        if fake or to_device:
            self._note(name, args, given, to_device, bool(kwargs.get("non_blocking")))
        args, kwargs = mapped(_raw, (args, kwargs))
        result = function(*args, **kwargs)
        return mapped(_wrapped, result) if to_device else result

    def _note(self, name: str, args: Any, given: list[Tensor], to_device: bool, non_blocking: bool) -> None:
        fake = [each for each in given if isinstance(each, FakeTensor)]
        base = name.partition(".")[0]
        copies = base in _COPIES and (len(fake) != len(given) or not to_device)
        on_host = [each for each in given if not isinstance(each, FakeTensor) and each.ndim]
        if on_host and fake and not copies:
            shapes = [tuple(each.shape) for each in given]
            raise RuntimeError(f"{name}: tensors on {DEVICE} and on the CPU, of shapes {shapes}.")
        if self._trace is None:
            return
        self._trace.operators.append((name, tuple(tuple(each.shape) for each in given)))
        if waits(base, args) or (copies and not (to_device and non_blocking)):
            self._trace.waits.append(Wait(name, *_origin()))


def _device_in(args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call names."""
    named = kwargs.get("device")
    if named is None:
        named = next((each for each in args if isinstance(each, torch.device)), None)
    return None if named is None else torch.device(named)


def _wrapped(value: Any) -> Any:
    return FakeTensor(value) if isinstance(value, Tensor) else value


def _raw(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.raw
    return torch.device("cpu") if value == DEVICE and isinstance(value, torch.device) else value


def _origin() -> tuple[str, str, int]:
    """File, function and line of the innermost frame in the package."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_SOURCES):
            return path.relative_to(_SOURCES).as_posix(), frame.f_code.co_qualname, frame.f_lineno
        frame = frame.f_back
    return "", "", 0


def moved(module: nn.Module) -> nn.Module:
    """The module with its parameters and buffers on ``DEVICE``."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                each._parameters[name] = nn.Parameter(FakeTensor(parameter.detach()), requires_grad=False)
        for name, buffer in each._buffers.items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                each._buffers[name] = FakeTensor(buffer)
    return module
