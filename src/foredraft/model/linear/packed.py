"""Packed linear layers for the CPU, whose cost hardly grows between one and sixteen rows.

``F.linear`` does not reach the memory bandwidth on few rows, least of all between 3 and 64 rows, which is the size of
a verification step. oneDNN with packed weights does; these are the operators that torch.compile with freezing emits.

Packing changes a module's class; its name, hooks and parameters stay. A user's model keeps its plain weights next to
the packed ones. A model that foredraft owns drops them, so packing costs no memory.

A draft head may have its large layers in int8 if the processor has instructions for it (a third of the time from eight
rows on), or run in bfloat16. A target may not, since its output would change. In int8 each output channel of a weight
and each row of the input have a scale of their own, and sums are exact, so a row's product is the same in any batch.
"""

import copy
import copyreg
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foredraft.model.linear.repackable import Repackable
from foredraft.model.memory import available_bytes

_LEAST_ROWS = (2, 4)
"""Fewer rows are repeated, up to one of these numbers: oneDNN takes longer for one row than for two, and on some
processors for two than for four. A row's result is the same for all of them."""
_TIMED, _PASSES = 2**25, 4  # weights that are timed to choose one, about as many as caches hold or more; how often
_LEAST_INT8 = 2**17
"""Weights of a layer from which on int8 is faster; a smaller layer stays in float32."""
_TINY = 1e-20
"""Least scale, for rows and channels of zeros."""

_log = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)


@dataclass(slots=True)
class _Pack:
    """A weight [out, in] in oneDNN's blocked layout, in ``dtype``, and the bias as its product takes it.

    ``source``: the plain weight, if the layer keeps it. ``version``: the plain weight's version when it was packed;
    in-place changes (by an optimizer or ``load_state_dict``) raise it. ``own_bias``: the layer's bias when packed.
    ``scale`` and ``zero``: of each output channel [out], if the weight is int8. ``rows``: fewer are repeated.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    source: Tensor | None
    version: int
    own_bias: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    rows: int

    def stale(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the layer's weight or bias, which are these now, has changed since it was packed."""
        if self.source is None:
            return False
        if weight._version != self.version or weight.data_ptr() != self.source.data_ptr():
            return True
        if bias is None or self.own_bias is None:
            return bias is not self.own_bias
        return bias.data_ptr() != self.own_bias.data_ptr()


class _Packed(nn.Module, Repackable):
    """Base of packed layers, mixed into the plain layer's class."""

    plain_class: type[nn.Module]
    _pack: _Pack

    @property
    def weight(self) -> Tensor:
        """The parameter; if it was dropped, a freshly unpacked copy."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter if self._pack.source is not None else self._unpacked_weight()

    def forward(self, x: Tensor) -> Tensor:
        pack = self._pack
        weight = self._parameters["weight"]
        bias = self._parameters["bias"]
        assert weight is not None
        needs_grad = x.requires_grad or (
            pack.source is not None and (weight.requires_grad or (bias is not None and bias.requires_grad))
        )
        if needs_grad and torch.is_grad_enabled():  # the packed product has no backward
            return F.linear(x, self._outputs_first(self.weight).to(x.dtype), bias)
        if pack.stale(weight, bias):
            pack = self._pack = _packed(self, pack.dtype, keep=True, rows=pack.rows)
        if pack.scale is not None:
            return _int8_product(x, pack)
        rows, count = x if x.dtype == pack.dtype else x.to(pack.dtype), x.numel() // x.shape[-1]
        if few := 0 < count < pack.rows:
            rows = rows.reshape(1, count, -1).expand(-(-pack.rows // count), -1, -1)
        y = torch.ops.mkldnn._linear_pointwise(rows, pack.weight, pack.bias, "none", [], "")
        y = y[0].view(*x.shape[:-1], -1) if few else y
        return y if x.dtype == pack.dtype else y.to(x.dtype)

    def plain_state(self) -> dict[str, Any]:
        """The attributes of the plain layer."""
        state = {name: value for name, value in vars(self).items() if name != "_pack"}
        if self._pack.source is None:
            old = self._parameters["weight"]
            assert old is not None
            weight = nn.Parameter(self._unpacked_weight(), old.requires_grad)
            state["_parameters"] = {**self._parameters, "weight": weight}
        return state

    def unpack(self) -> None:
        """Become the plain layer again. The layer works between any two lines, so an interruption does not break it."""
        vars(self).update(self.plain_state())
        self.__class__ = self.plain_class  # type: ignore[assignment]
        vars(self).pop("_pack")

    def repack(self, plain: Any) -> None:
        bias = self._parameters["bias"]
        if bias is not None:
            bias.copy_(plain.bias)
        if self._pack.source is not None:
            self.weight.copy_(plain.weight)
        pack = self._pack
        self._pack = _packed(self, pack.dtype, pack.source is not None, plain.weight, pack.rows)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are plain layers."""
        return copyreg._reconstructor, (self.plain_class, object, None), self.plain_state()  # type: ignore[attr-defined]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._pack.source is None:
            destination[f"{prefix}weight"] = self._unpacked_weight()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self._pack.source is None:
            self.unpack()
            self._load_from_state_dict(*args, **kwargs)
        else:
            super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``to``, ``half``, ``share_memory`` and the like unpack the layer first."""
        self.unpack()
        return self._apply(fn, recurse)

    def _unpacked_weight(self) -> Tensor:
        weight, scale = self._pack.weight.to_dense().float(), self._pack.scale
        return self._outputs_first(weight if scale is None else weight.T * scale[:, None])

    @staticmethod
    def _outputs_first(weight: Tensor) -> Tensor:
        """Convert the layer's layout to [out, in], or back."""
        raise NotImplementedError


class PackedLinear(_Packed, nn.Linear):  # type: ignore[misc]
    """``x @ weight.T + bias``."""

    plain_class = nn.Linear

    @staticmethod
    def _outputs_first(weight: Tensor) -> Tensor:
        return weight


class PackedConv1D(_Packed, Conv1D):
    """``x @ weight + bias``, as in GPT-2."""

    plain_class = Conv1D

    @staticmethod
    def _outputs_first(weight: Tensor) -> Tensor:
        return weight.t().contiguous()


_CLASSES: dict[type, type[_Packed]] = {each.plain_class: each for each in (PackedLinear, PackedConv1D)}
PLAIN_CLASSES: dict[type, type[nn.Module]] = {packed: plain for plain, packed in _CLASSES.items()}
"""Of packed layers, by their own classes."""


class PackedWeights:
    """Packs the linear layers of a model; ``undo`` unpacks them, with weights rounded to ``dtype``.

    Args:
        keep: keep the plain weights, for a model that others also hold. Then nothing is packed if the packed weights
            would take more than half of the free memory. Weights shared by several modules are always kept.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32, *, keep: bool = False) -> None:
        self._layers: list[_Packed] = []
        if not packing_works():
            _log.info("This build of torch cannot pack weights: linear layers stay plain, which is slower.")
            return
        shared, adapted = _shared_weights(model), _adapted(model)
        layers: list[Any] = [layer for layer in model.modules() if _packable(layer) and layer not in adapted]
        keeps = {layer: keep or id(layer.weight) in shared for layer in layers}
        # inference-mode weights have no version counter, so changes could not be detected
        layers = [layer for layer in layers if not (keeps[layer] and layer.weight.is_inference())]
        if keep and not _fits_memory(sum(layer.weight.nbytes for layer in layers)):
            return
        try:
            for layer in layers:
                self._layers.append(layer)
                pack(layer, dtype, keep=keeps[layer])
            rows = _choose_rows([layer._pack for layer in layers])
            _log.debug("Packed %d linear layers of %s, %d rows or more.", len(self), model.__class__.__name__, rows)
        except BaseException:
            self.undo()
            raise

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def whole(self) -> bool:
        """Whether all layers are still packed; converting or moving a layer unpacks it."""
        return all(isinstance(layer, _Packed) for layer in self._layers)

    def undo(self) -> None:
        """Unpack all layers; may be repeated after an interruption."""
        for layer in self._layers:
            if isinstance(layer, _Packed):
                layer.unpack()
            vars(layer).pop("_pack", None)  # left over from an interruption
        self._layers.clear()


def pack(layer: nn.Module, dtype: torch.dtype = torch.float32, *, keep: bool) -> None:
    """Pack one layer; without ``keep`` its parameter moves to the meta device."""
    old: Any = layer.weight
    layer._pack = _packed(layer, dtype, keep)  # type: ignore[assignment]
    layer.__class__ = _CLASSES[type(layer)]  # valid between any two lines, in case of an interruption
    if not keep:
        layer._parameters["weight"] = nn.Parameter(old.detach().to("meta"), old.requires_grad)


def _packed(
    layer: Any, dtype: torch.dtype, keep: bool, weight: Tensor | None = None, rows: int = _LEAST_ROWS[0]
) -> _Pack:
    """Pack the weights of ``layer``, or ``weight`` if given."""
    own = layer._parameters["weight"]
    plain = (own if weight is None else weight).detach()
    kind = _CLASSES.get(type(layer), type(layer))
    weight, scale, zero = kind._outputs_first(plain), None, None
    if dtype is torch.int8 and weight.numel() < _LEAST_INT8:
        dtype = torch.float32
    if dtype is torch.int8:
        scale = weight.abs().amax(1).clamp_min(_TINY) / 127
        zero = torch.zeros_like(scale, dtype=torch.int64)
        packed = torch.ops.onednn.qlinear_prepack((weight / scale[:, None]).round().to(torch.int8), None)
    else:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), None)
    own_bias = None if layer.bias is None else layer.bias.detach()
    bias = own_bias if own_bias is None or scale is not None else own_bias.to(dtype)
    source, version = (own.detach(), own._version) if keep else (None, 0)
    return _Pack(packed, bias, dtype, source, version, own_bias, scale, zero, rows)


def _choose_rows(packs: Sequence[_Pack]) -> int:
    """Set ``rows`` of these weights to the one of ``_LEAST_ROWS`` with which their products take least time."""
    (few, more), seconds = _LEAST_ROWS, dict.fromkeys(_LEAST_ROWS, math.inf)
    sizes = accumulate(pack.weight.numel() for pack in packs)
    timed = [p for p, size in zip(packs, sizes, strict=True) if p.scale is None and size - p.weight.numel() < _TIMED]
    for rows in _LEAST_ROWS * _PASSES:
        inputs = [torch.zeros(rows, pack.weight.shape[1], dtype=pack.dtype) for pack in timed]
        started = time.perf_counter()
        for x, pack in zip(inputs, timed, strict=True):
            torch.ops.mkldnn._linear_pointwise(x, pack.weight, pack.bias, "none", [], "")
        seconds[rows] = min(seconds[rows], time.perf_counter() - started)
    best = more if seconds[more] < 0.95 * seconds[few] else few
    for each in packs:
        each.rows = best
    return best


def _int8_product(x: Tensor, pack: _Pack) -> Tensor:
    """``x @ weight.T + bias`` with each row of ``x`` rounded to 8 bits."""
    x, dtype = x.float(), x.dtype
    row = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).clamp_min_(_TINY).div_(127)
    rounded = (x / row).add_(128.5).to(torch.uint8)
    y = torch.ops.onednn.qlinear_pointwise(
        rounded, 1.0, 128, pack.weight, pack.scale, pack.zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    y = y.view(*x.shape[:-1], pack.weight.shape[1]).mul_(row)
    return (y if pack.bias is None else y.add_(pack.bias)).to(dtype)


def int8_copy(weight: Float[Tensor, "V H"]) -> nn.Module | None:
    """An int8 layer with this weight, for drafts that use the target's output layer; None without memory for it."""
    if not _fits_memory(weight.numel()):
        return None
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float32)
    layer.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    pack(layer, torch.int8, keep=False)
    return layer


def _fits_memory(size: int) -> bool:
    """Whether packed copies of ``size`` bytes take at most half of the free memory."""
    free = available_bytes(torch.device("cpu"))
    fits = free is None or size <= free // 2
    if not fits:
        _log.info("Linear layers are not packed: packed copies would take %d of %s free bytes.", size, free)
    return fits


def any_weight(net: nn.Module) -> Tensor:
    """One of a net's weights, to read its device and dtype; not one that a packed layer has dropped."""
    candidates = (each for each in net.parameters() if each.is_floating_point() and not each.is_meta)
    found = next(candidates, None)
    return next(net.parameters()) if found is None else found


def plain_copy(model: M, shared: Iterable[object] = ()) -> M:
    """A trainable float32 copy of a model, with plain layers in place of packed ones.

    Args:
        shared: objects that are not copied, such as the parts that a head borrows from its target.
    """
    return copy.deepcopy(model, {id(each): each for each in shared}).float()


def copy_weights(model: nn.Module, plain: nn.Module) -> None:
    """Copy the weights of a ``plain_copy`` into its model, packed or not."""
    with torch.inference_mode(False), torch.no_grad():
        for name, module in plain.named_modules():
            mine = model.get_submodule(name)
            if isinstance(mine, Repackable):
                mine.repack(module)
                continue
            for own, weight in module.named_parameters(recurse=False):
                mine.get_parameter(own).data.copy_(weight)


def packing_works() -> bool:
    """Whether this build of torch has the operators, and they compute correct results."""
    try:
        weight, x = torch.linspace(-1, 1, 24 * 16).view(24, 16).sin(), torch.linspace(-2, 2, 5 * 16).view(5, 16).cos()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return torch.allclose(y, F.linear(x, weight), atol=1e-4) and torch.equal(packed.to_dense(), weight)
    except (AttributeError, RuntimeError):
        return False


def draft_dtype() -> torch.dtype:
    """Dtype of packed draft heads on this CPU: int8 or bfloat16 if it has fast instructions for them."""
    if torch.cpu._is_vnni_supported() and _int8_works():
        return torch.int8
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _int8_works() -> bool:
    """Whether this build of torch multiplies in int8, and computes correct results."""
    layer = nn.Linear(512, _LEAST_INT8 // 512)
    x = torch.linspace(-2, 2, 3 * 512).view(3, 512).cos()
    try:
        pack = _packed(layer, torch.int8, keep=False)
        with torch.no_grad():
            return torch.allclose(_int8_product(x, pack), layer(x), atol=0.05)
    except (AttributeError, RuntimeError):
        return False


def _packable(layer: nn.Module) -> bool:
    """Whether this is a plain float32 linear layer on the CPU without hooks; subclasses of layers (bitsandbytes) and of
    weights (torchao) are quantised."""
    if type(layer) not in _CLASSES or "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight: Any = layer.weight
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32


def _adapted(model: nn.Module) -> set[nn.Module]:
    """PEFT's layers and their submodules, whose weights PEFT reads and merges adapters into."""
    layers = [module for module in model.modules() if module.__class__.__module__.partition(".")[0] == "peft"]
    return {module for layer in layers for module in layer.modules()}


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of parameters shared by several modules, such as an embedding tied to the output layer."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
