"""Builds the net of a ``Reading`` and loads its tensors, with strict checks of names and shapes."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.core.errors import DrafterError, ModelError
from foredraft.core.target_parts import TargetParts
from foredraft.heads.formats.block import rotary_of
from foredraft.heads.formats.files import Checkpoint
from foredraft.heads.formats.info import HeadInfo, NetConfig, Reading, TargetNeeds
from foredraft.heads.nets.blocks import BlockConfig, Rotary
from foredraft.heads.nets.eagle import Eagle, Eagle3, Eagle3Config, EagleConfig
from foredraft.heads.nets.glide import Glide, GlideConfig
from foredraft.heads.nets.hydra import Hydra, HydraConfig
from foredraft.heads.nets.medusa import Blockwise, Medusa, MedusaConfig
from foredraft.model.base import TargetModel

_HARMLESS = re.compile(r"(^|\.)(rotary_emb\.)?inv_freq$")
"""Rotary frequencies that old code stored as weights; they follow from the config."""
_ALIKE = 0.75
"""Vocabularies whose sizes have a smaller ratio are of different tokenizers."""
_ROWS = 8192
"""Rows of an embedding that are compared at a time."""
_NO_TARGET = TargetParts(embed=lambda tokens: tokens, head=lambda states: states, vocab_size=1, hidden_size=1)
"""Stands in for a target where only names and shapes of the head matter."""


def describe(checkpoint: Checkpoint, reading: Reading) -> HeadInfo:
    """Describe a head, after checking its tensors' names and shapes.

    Raises:
        DrafterError: tensors are missing, unexpected, quantised, or have a wrong shape.
    """
    net = _empty_net(reading.config, _rotary(checkpoint, reading.config), _NO_TARGET)
    _check_names(checkpoint, reading, net)
    parameters = [(name, value) for name, value in net.named_parameters() if name not in reading.given]
    dtypes = [checkpoint.weights.dtypes[reading.names[name][0]] for name, _ in parameters]
    integers = [dtype for dtype in dtypes if not dtype.is_floating_point]
    if integers:
        raise DrafterError(
            f"The weights of the head {checkpoint.name!r} are {integers[0]}: quantised heads are not supported."
        )
    config = reading.config
    if isinstance(config, Eagle3Config) and reading.open_taps:
        config = replace(config, taps=())
    return HeadInfo(
        method=reading.method,
        format=reading.format,
        config=config,
        parameters=sum(value.numel() for _, value in parameters),
        dtype=max(set(dtypes), key=dtypes.count),
        target=reading.target,
        notes=reading.notes,
    )


def assemble(checkpoint: Checkpoint, reading: Reading, target: TargetModel) -> nn.Module:
    """The net with its weights, on the target's device and in its dtype, without gradients.

    Raises:
        DrafterError: a tensor overflows the target's dtype, or copies of one module differ.
    """
    net = _empty_net(reading.config, _rotary(checkpoint, reading.config), target.parts())
    options: dict[str, Any] = {"device": target.device, "dtype": target.dtype, "copy": True}
    state: dict[str, Tensor] = {}
    for name in dict(net.named_parameters()):
        tensor = reading.given[name] if name in reading.given else _tied(checkpoint, reading.names[name])
        state[name] = tensor.to(**options)
        if not torch.isfinite(state[name]).all():
            raise DrafterError(f"The tensor {name} of {checkpoint.name!r} does not fit into {target.dtype}.")
    net.load_state_dict(state, strict=True, assign=True)
    if isinstance(net, Eagle3):
        net.vocabulary = reading.vocabulary
    # no dtype: rotary frequencies stay in float32
    return net.to(device=target.device).eval().requires_grad_(False)


def check_target(checkpoint: Checkpoint, reading: Reading, target: TargetModel) -> None:
    """Raise a ``DrafterError`` for a head that was made for another target, as far as its files show."""
    needs, config = reading.target, target.config
    if needs.hidden_size != config.hidden_size:
        raise DrafterError(
            f"The head {checkpoint.name!r} is for a target with hidden states of width {needs.hidden_size}; "
            f"this target's have {config.hidden_size}."
        )
    sizes = (config.vocab_size, target.vocab_size)
    if needs.vocab_size is not None and needs.vocab_size not in sizes and not _resizes(needs, max(sizes)):
        raise DrafterError(
            f"The head {checkpoint.name!r} is for a target with a vocabulary of {needs.vocab_size}; "
            f"this target has {config.vocab_size}."
        )
    if needs.layers is not None and needs.layers > target.layers:
        raise DrafterError(
            f"The head {checkpoint.name!r} reads hidden layer {needs.layers} of a target with {target.layers} layers."
        )


def _resizes(needs: TargetNeeds, size: int) -> bool:
    """Whether the head's vocabulary and the target's can be the same but for added or padded tokens."""
    assert needs.vocab_size is not None
    fewer, more = sorted((needs.vocab_size, size))
    return needs.resizable and fewer >= _ALIKE * more


def same_embedding(ours: Tensor, target: TargetModel) -> bool:
    """Whether an embedding is the target's, up to rounding and padding rows."""
    theirs = target.embedding()
    if not isinstance(theirs, Tensor) or not theirs.is_floating_point() or theirs.is_meta:
        return True  # quantised or offloaded, so it cannot be compared
    if ours.shape[1:] != theirs.shape[1:]:
        return False
    rows, error, norm = min(len(ours), len(theirs)), 0.0, 0.0
    for start in range(0, rows, _ROWS):
        a, b = (x[start : min(start + _ROWS, rows)].detach().float().cpu() for x in (ours, theirs))
        error += float((a - b).square().sum())
        norm += float(b.square().sum())
    most = 0.02 if target.weights is None else 0.2  # quantised to 4 bits, a tenth; of two models, more than 1
    return error <= most**2 * norm


def check_embedding(checkpoint: Checkpoint, table: str, target: TargetModel | None) -> None:
    """Raise a ``DrafterError`` if the embedding in the files, if any, is another target's."""
    if (
        target is not None
        and table in checkpoint.weights
        and not same_embedding(checkpoint.weights.read(table), target)
    ):
        raise DrafterError(
            f"The embedding in the head {checkpoint.name!r} is not this target's, so the head is for another model."
        )


def first_names(names: Collection[str]) -> str:
    """The first four names, and how many more there are."""
    first = sorted(names)[:4]
    return ", ".join(first) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def parameter_names(config: NetConfig) -> list[str]:
    """The parameter names of a config's net."""
    net = _empty_net(config, Rotary(torch.ones(1)), _NO_TARGET)
    return [name for name, _ in net.named_parameters()]


def own_names(config: NetConfig) -> dict[str, tuple[str, ...]]:
    """``Reading.names`` for a file with the net's own names."""
    return {name: (name,) for name in parameter_names(config)}


def block_of(config: NetConfig) -> BlockConfig | None:
    if isinstance(config, (EagleConfig, Eagle3Config, GlideConfig)):
        return config.block
    return config.prefix if isinstance(config, HydraConfig) else None


def _empty_net(config: NetConfig, rotary: Rotary | None, parts: TargetParts) -> nn.Module:
    """The net of a config, on the meta device."""
    with torch.device("meta"):
        if isinstance(config, (EagleConfig, Eagle3Config, GlideConfig)):
            assert rotary is not None
            if isinstance(config, GlideConfig):
                return Glide(config, rotary, parts)
            return Eagle(config, rotary, parts) if isinstance(config, EagleConfig) else Eagle3(config, rotary, parts)
        if isinstance(config, HydraConfig):
            return Hydra(config, rotary, parts)
        return Medusa(config, parts) if isinstance(config, MedusaConfig) else Blockwise(config, parts)


def _rotary(checkpoint: Checkpoint, config: NetConfig) -> Rotary | None:
    block = block_of(config)
    try:
        return None if block is None else rotary_of(block)
    except ModelError as error:
        raise DrafterError(f"The head {checkpoint.name!r} cannot be used: {error}") from error


def _check_names(checkpoint: Checkpoint, reading: Reading, net: nn.Module) -> None:
    shapes, wanted = checkpoint.weights.shapes, reading.names
    expected = {name for parameter in wanted if parameter not in reading.given for name in wanted[parameter]}
    missing = expected - shapes.keys()
    extra = {name for name in shapes.keys() - expected - reading.ignored if not _HARMLESS.search(name)}
    if missing or extra:
        parts = [f"{first_names(missing)} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
        parts += [f"{first_names(extra)} {'is' if len(extra) == 1 else 'are'} not expected"] if extra else []
        raise DrafterError(
            f"The tensors of the head {checkpoint.name!r} are not those of {reading.format} as its config.json "
            f"describes it: {'; '.join(parts)}."
        )
    for parameter, value in net.named_parameters():
        for name in wanted.get(parameter, ()) if parameter not in reading.given else ():
            checkpoint.check_shape(name, tuple(value.shape))


def _tied(checkpoint: Checkpoint, names: tuple[str, ...]) -> Tensor:
    """Read a tensor that may be stored several times."""
    first = checkpoint.weights.read(names[0])
    for name in names[1:]:
        if not torch.equal(first, checkpoint.weights.read(name)):
            raise DrafterError(
                f"The tensors {names[0]} and {name} of the head {checkpoint.name!r} differ; they must be equal."
            )
    return first
