"""A decoder's weights in the kernels' layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.errors import ModelError
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.native import library as c
from foredraft.model.native.checks import checked
from foredraft.model.native.families import ALL_HEADS, EACH_HEAD, FAMILIES, ModelFamily, Shape, shape_of, why_not_native
from foredraft.model.native.outline import Outline
from foredraft.model.native.weights import Arena, Blocks, Codes, PackedMatrix, Precision, inputs_of, outputs_of

Source = Callable[[str], "Tensor | Codes | Blocks | None"]
"""The weight of a name in the state dict, as floats, as codes or in a file's blocks; None if there is none."""


class Skips(NamedTuple):
    """The layers whose attention, and those whose MLP, a forward leaves out."""

    attention: frozenset[int]
    mlp: frozenset[int]


NO_SKIPS = Skips(frozenset(), frozenset())


@dataclass(frozen=True, eq=False, slots=True)
class PackedLayer:
    """A decoder layer: gates come before the rest of ``up``, if there are any."""

    qkv: PackedMatrix
    out: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    norms: dict[str, Float[Tensor, "H"]]

    def struct(self, kind: int, rotary: int) -> c.Layer:
        matrices = [each.struct() for each in (*self.attention, *self.mlp)]
        return c.Layer(
            *matrices, kind=kind, rotary=rotary, **{name: each.data_ptr() for name, each in self.norms.items()}
        )

    @property
    def attention(self) -> tuple[PackedMatrix, PackedMatrix]:
        return self.qkv, self.out

    @property
    def mlp(self) -> tuple[PackedMatrix, PackedMatrix]:
        return self.up, self.down


@dataclass(frozen=True, eq=False, slots=True)
class Decoder:
    """All weights of a model. ``precision``: of those that were floats. ``embedding_factor``: of the embedding."""

    library: c.Library
    shape: Shape
    precision: Precision
    layers: tuple[PackedLayer, ...]
    embedding: PackedMatrix
    head: PackedMatrix
    final_norm: Float[Tensor, "H"]
    head_norm: int
    embedding_factor: float

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a forward of one token reads."""
        matrices = (each for layer in self.layers for each in (*layer.attention, *layer.mlp))
        return sum(each.nbytes for each in matrices) + self.head.nbytes

    def skipped_bytes(self, skips: Skips) -> int:
        """Bytes of weights that a forward does not read then."""
        parts = [self.layers[number].attention for number in skips.attention]
        parts += [self.layers[number].mlp for number in skips.mlp]
        return sum(each.nbytes for part in parts for each in part)

    def struct(self, kinds: int, kv: int, skips: Skips = NO_SKIPS) -> tuple[c.Model, object]:
        """The C struct, and what must live as long.

        Args:
            kinds: types of layers.
            kv: of keys and values.
            skips: parts that a forward leaves out.
        """
        shape = self.shape
        each = [layer.struct(shape.kinds[i], shape.rotary[i]) for i, layer in enumerate(self.layers)]
        for number in skips.attention:
            each[number].qkv.data = each[number].out.data = None
        for number in skips.mlp:
            each[number].up.data = each[number].down.data = None
        layers = (c.Layer * len(each))(*each)
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocabulary", "activation")
        factors = (
            "eps",
            "embedding_scale",
            "residual_scale",
            "attention_scale",
            "attention_cap",
            "logit_scale",
            "logit_cap",
        )
        model = c.Model(
            **{name: getattr(shape, name) for name in (*sizes, *factors)},
            outputs=self.head.outputs,
            rotary_dim=2 * len(shape.frequencies[0].inverse),
            rotary_tables=len(shape.frequencies),
            kinds=kinds,
            gated=self.layers[0].up.outputs != shape.inner,
            head_norm=self.head_norm,
            kv=kv,
            layer=layers,
            embedding=self.embedding.struct(),
            head=self.head.struct(),
            final_norm=self.final_norm.data_ptr(),
        )
        return model, layers


def source_of(model: PreTrainedModel) -> Source:
    """The weights of a loaded model."""
    return model.state_dict().get


def floats_of(source: Source) -> Callable[[str], Tensor | None]:
    """The weights of a source that are floats, by name."""

    def read(name: str) -> Tensor | None:
        found = source(name)
        return found if isinstance(found, Tensor) else None

    return read


def pack_decoder(
    outline: Outline,
    source: Source,
    precision: Precision,
    progress: Callable[[int], None] = lambda layer: None,
) -> Decoder:
    """Pack a model's weights, layer by layer.

    Args:
        progress: called with the number of each layer before it is packed.

    Raises:
        ModelError: the engine cannot run this model, or weights are missing, damaged or have other shapes.
    """
    reason, config = why_not_native(outline.config), outline.config.get_text_config()
    if reason is not None:
        raise ModelError(f"The native engine cannot run {outline.name}: {reason}.")
    shape, family = shape_of(config), FAMILIES[config.model_type]
    library = c.library()
    packer = _Packer(library, checked(source), precision, family, set(outline.shapes))
    outer = (shape.vocabulary, shape.hidden)  # the largest matrices go first, while little else is in memory
    embedding = packer.matrix(["model.embed_tokens.weight"], precision.outer, outer)
    head = embedding if config.tie_word_embeddings else packer.matrix(["lm_head.weight"], precision.outer, outer)
    layers = []
    for number in range(shape.layers):
        progress(number)
        layers.append(packer.layer(f"model.layers.{number}.", shape))
    final_norm = packer.norm("model.norm.weight", shape.hidden)
    packer.check_all_read(outline.name)
    factor = shape.embedding_scale if family.scaled_embedding else 1.0
    return Decoder(library, shape, precision, tuple(layers), embedding, head, final_norm, family.head_norm, factor)


class _Packer:
    """Reads weights by name, and remembers which."""

    def __init__(
        self, library: c.Library, source: Source, precision: Precision, family: ModelFamily, names: set[str]
    ) -> None:
        self._source = source
        self._known = names
        self._precision = precision
        self._family = family
        self._library = library
        self._arena = Arena(library)
        self._read: set[str] = set()

    def layer(self, prefix: str, shape: Shape) -> PackedLayer:
        width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        matrix = partial(self.matrix, bits=self._precision.bits)
        qkv = self._names(attention, ["q_proj", "k_proj", "v_proj"], ["qkv_proj"])
        up = self._names(mlp, ["gate_proj", "up_proj"], ["gate_up_proj"], ["up_proj"])
        inner = shape.inner if up == [f"{mlp}up_proj.weight"] else 2 * shape.inner
        norms = {}
        for place in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            name = getattr(self._family.norms, place)
            if name is not None:
                norms[place] = self.norm(f"{prefix}{name}.weight", shape.hidden)
        if self._family.head_norm in (EACH_HEAD, ALL_HEADS):
            sizes = (width, keys) if self._family.head_norm == ALL_HEADS else (shape.head_dim, shape.head_dim)
            for name, size in zip(("query", "key"), sizes, strict=True):
                norms[f"{name}_norm"] = self.norm(f"{attention}{name[0]}_norm.weight", size)
        return PackedLayer(
            qkv=matrix(qkv, shape=(width + 2 * keys, shape.hidden)),
            out=matrix([f"{attention}o_proj.weight"], shape=(shape.hidden, width)),
            up=matrix(up, shape=(inner, shape.hidden)),
            down=matrix([f"{mlp}down_proj.weight"], shape=(shape.hidden, shape.inner)),
            norms=norms,
        )

    def matrix(self, names: Sequence[str], bits: int, shape: tuple[int, int]) -> PackedMatrix:
        """The matrices of these names, one after the other, with their biases."""
        parts = [self._required(name) for name in names]
        biases = [self._optional(f"{name.removesuffix('weight')}bias") for name in names]
        sizes = [(outputs_of(part), inputs_of(part)) for part in parts]
        found = (sum(size[0] for size in sizes), sizes[0][1])
        if found != shape or any(size[1] != shape[1] for size in sizes):
            raise ModelError(f"The weight {names[0]} has the shape {found}; the config says {shape}.")
        bias = None
        if any(each is not None for each in biases):
            pairs = zip(biases, sizes, strict=True)
            bias = torch.cat([torch.zeros(size[0]) if each is None else each.detach().float() for each, size in pairs])
        return PackedMatrix.of_parts(self._library, parts, bias, bits, self._arena)

    def norm(self, name: str, size: int) -> Float[Tensor, "H"]:
        weight = self._floats(name, self._required(name))
        if weight.shape != (size,):
            raise ModelError(f"The weight {name} has the shape {tuple(weight.shape)}; the config says ({size},).")
        return weight.detach().float().cpu().add(self._family.norm_offset).contiguous()

    def check_all_read(self, model: str) -> None:
        """Raise a ``ModelError`` if the model has weights in its layers that nothing has read."""
        left = sorted(name for name in self._known if name not in self._read and ".layers." in name)
        if left:
            raise ModelError(f"The native engine cannot run {model}: it has no use for the weight {left[0]}.")

    def _names(self, prefix: str, *choices: list[str]) -> list[str]:
        """The first choice of which the model has all weights, else the first."""
        full = [[f"{prefix}{name}.weight" for name in choice] for choice in choices]
        return next((names for names in full if self._known.issuperset(names)), full[0])

    def _required(self, name: str) -> Tensor | Codes | Blocks:
        found = self._source(name)
        self._read.add(name)
        if found is None:
            raise ModelError(f"The weight {name} is missing.")
        if isinstance(found, Tensor) and found.is_meta:
            raise ModelError(f"The weight {name} has no data: it is offloaded or was not loaded.")
        return found

    def _optional(self, name: str) -> Tensor | None:
        found = self._source(name)
        self._read.add(name)
        return None if found is None else self._floats(name, found)

    @staticmethod
    def _floats(name: str, found: Tensor | Codes | Blocks) -> Tensor:
        if not isinstance(found, Tensor):
            raise ModelError(f"The weight {name} is a vector and cannot be quantised.")
        return found
