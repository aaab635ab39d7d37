"""Linear layers and embeddings of draft heads on the kernels."""

from typing import Any, final

from jaxtyping import Float, Int
from torch import Tensor, nn

from foredraft.model.linear.repackable import Repackable
from foredraft.model.native.runner import KernelRuntime
from foredraft.model.native.weights import Arena, PackedMatrix

HEAD_BITS = 8
"""Most bits of a head's weights. Beside a target of 4 bits a head has 4, too: it accepts as much, and leaves the target
more of the caches."""


@final
class NativeLinear(nn.Module, Repackable):
    """A quantised ``nn.Linear`` without gradients; copies are plain layers."""

    def __init__(self, engine: KernelRuntime, layer: nn.Linear, bits: int, arena: Arena) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.matrix = PackedMatrix.of_floats(engine.library, layer.weight, layer.bias, bits, arena)
        own = self.matrix.bias  # the same memory
        self.bias = None if own is None else nn.Parameter(own[: self.out_features], False)
        self._engine = engine

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        return self._engine.product(self.matrix, x)

    def repack(self, plain: Any) -> None:
        if self.bias is not None:
            self.bias.data.copy_(plain.bias)
        with self._engine.lock:
            self.matrix.repack(plain.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta")
        layer.weight = nn.Parameter(self.matrix.dequantised(), False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone(), False)
        return layer


@final
class NativeEmbedding(nn.Module, Repackable):
    """A quantised ``nn.Embedding`` without gradients; copies are plain layers."""

    def __init__(self, engine: KernelRuntime, layer: nn.Embedding, bits: int, arena: Arena) -> None:
        super().__init__()
        self.matrix = PackedMatrix.of_floats(engine.library, layer.weight, None, bits, arena)
        self._engine = engine

    def forward(self, tokens: Int[Tensor, "..."]) -> Float[Tensor, "... H"]:
        return self.matrix.rows(tokens.flatten()).unflatten(0, tokens.shape)

    def repack(self, plain: Any) -> None:
        with self._engine.lock:
            self.matrix.repack(plain.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Embedding:
        layer = nn.Embedding(self.matrix.outputs, self.matrix.inputs, device="meta")
        layer.weight = nn.Parameter(self.matrix.dequantised(), False)
        return layer


def quantise_linears(net: nn.Module, engine: KernelRuntime, bits: int) -> None:
    """Replace the linear layers and embeddings of a head by quantised ones."""
    arena = Arena(engine.library)
    for module in list(net.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, NativeLinear(engine, layer, bits, arena))
            elif isinstance(layer, nn.Embedding):
                setattr(module, name, NativeEmbedding(engine, layer, bits, arena))
