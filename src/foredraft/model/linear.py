"""Linear layers for the CPU whose cost hardly grows from one row to sixteen.

``F.linear`` on a few rows does not use the memory bandwidth that it has, least of all between 3 and 64 rows,
exactly where verification lives. oneDNN with weights packed once does; these are the operators that
torch.compile with freezing emits. A packed weight takes the place of the plain one, so it costs no memory.

A draft head may as well run in bfloat16 where the processor has instructions for it: a half to a quarter of the time.
A target may not: it would say something else.
"""

import copy
import logging
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_log = logging.getLogger(__name__)

_LEAST_ROWS = 2
"""One row alone takes oneDNN's matrix-vector kernel, which is slower than two rows; a row of zeros is added."""


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with the weight in oneDNN's blocked layout.

    With ``dtype`` the product is made in that type; what goes in and comes out keeps its own. Gradients pass through
    to ``x`` (by the plain product), for whoever learns below a layer that is not trained.
    """

    def __init__(self, dense: nn.Linear | Conv1D, keep_dense: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.out_features, self.in_features = _outputs_first(dense).shape
        self.dtype = dtype
        self._pack(dense)
        self.kept = keep_dense
        self._dense = [dense]  # in a list, so that it is no submodule
        if not keep_dense:
            dense.weight.data = dense.weight.data.new_empty(0)

    def _pack(self, dense: nn.Linear | Conv1D) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(_outputs_first(dense).to(self.dtype), None)
        self.bias = None if dense.bias is None else dense.bias.detach().to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in], unpacked anew for whoever looks at it; the forward never does."""
        return self.packed.to_dense().float()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if rows < _LEAST_ROWS:
            flat = F.pad(flat, (0, 0, 0, _LEAST_ROWS - rows))
        y = torch.ops.mkldnn._linear_pointwise(flat.to(self.dtype), self.packed, self.bias, "none", [], "").to(x.dtype)
        return y[:rows].view(*x.shape[:-1], self.out_features)

    def unpacked(self) -> nn.Linear | Conv1D:
        """The layer that this one was made of, with its weight given back."""
        dense = self._dense[0]
        if not self.kept:
            dense.weight.data = self._plain_weight()
        return dense

    def plain_copy(self, memo: dict) -> nn.Linear | Conv1D:
        """A copy of the layer that this one was made of; ``memo`` is ``deepcopy``'s."""
        dense = copy.deepcopy(self._dense[0], memo)
        if not self.kept:
            dense.weight.data = self._plain_weight()
        return dense

    def repack(self, plain: nn.Linear | Conv1D) -> None:
        """Compute from now on what a layer of the same shape computes."""
        self._pack(plain)
        dense = self._dense[0]
        if self.kept:
            dense.weight.copy_(plain.weight)
        if dense.bias is not None:
            dense.bias.copy_(plain.bias)

    def _plain_weight(self) -> Tensor:
        return self.weight if isinstance(self._dense[0], nn.Linear) else self.weight.t().contiguous()


class PackedWeights:
    """The packed layers of one model; ``undo`` puts the plain ones back, rounded if ``dtype`` has rounded them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        if not packing_works():
            _log.info("This build of torch cannot pack weights: linear layers run as they are, which is slower.")
            return
        shared = _shared_weights(model)
        made: dict[int, PackedLinear] = {}  # a layer may stand in several places
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if id(child) not in made and isinstance(child, (nn.Linear, Conv1D)) and _packable(child):
                    made[id(child)] = PackedLinear(child, id(child.weight) in shared, dtype)
                if id(child) in made:
                    setattr(parent, name, made[id(child)])
                    self._places.append((parent, name))
        _log.debug("Packed %d linear layers of %s.", len(self), model.__class__.__name__)

    def __len__(self) -> int:
        return len(self._places)

    def undo(self) -> None:
        for parent, name in self._places:
            setattr(parent, name, getattr(parent, name).unpacked())
        self._places.clear()


def plain_copy(model: nn.Module, shared: Iterable[object] = ()) -> nn.Module:
    """A copy of a model with plain layers in place of packed ones, in float32: what can be trained.

    Args:
        shared: what is not copied, such as the parts that a head borrows from its target.
    """
    memo = {id(each): each for each in shared}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            memo[id(module)] = module.plain_copy(memo)
    return copy.deepcopy(model, memo).float()


def take_weights(model: nn.Module, plain: nn.Module) -> None:
    """Let a model, packed or not, have the weights of its ``plain_copy``, which stays as it is."""
    with torch.inference_mode(False), torch.no_grad():
        for name, module in plain.named_modules():
            mine = model.get_submodule(name)
            if isinstance(mine, PackedLinear):
                assert isinstance(module, (nn.Linear, Conv1D))
                mine.repack(module)
                continue
            for own, weight in module.named_parameters(recurse=False):
                mine.get_parameter(own).data.copy_(weight)


def packing_works() -> bool:
    """Whether this build of torch has the operators, and they compute what they should."""
    try:
        weight, x = torch.linspace(-1, 1, 24 * 16).view(24, 16).sin(), torch.linspace(-2, 2, 5 * 16).view(5, 16).cos()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return torch.allclose(y, F.linear(x, weight), atol=1e-4) and torch.equal(packed.to_dense(), weight)
    except (AttributeError, RuntimeError):
        return False


def draft_dtype() -> torch.dtype:
    """What a draft head is packed in on this CPU: bfloat16 if it multiplies that fast."""
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def _outputs_first(dense: nn.Linear | Conv1D) -> Tensor:
    """The weight [out, in]; GPT-2's layers have it the other way round."""
    weight = dense.weight.detach()
    return weight if isinstance(dense, nn.Linear) else weight.t().contiguous()


def _packable(layer: nn.Linear | Conv1D) -> bool:
    """A layer that computes just what its class does (no quantised kind), in float32, on the CPU, without hooks."""
    usual = layer.__class__.forward in (nn.Linear.forward, Conv1D.forward)
    hooked = bool(layer._forward_hooks or layer._forward_pre_hooks)
    weight: Tensor = layer.weight
    return usual and not hooked and weight.device.type == "cpu" and weight.dtype == torch.float32


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module holds, such as an embedding tied to the output layer."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
