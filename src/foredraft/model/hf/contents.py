"""What a model is, whatever its file, its precision and its name."""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor | None]
"""Gives a weight by its name in transformers; None if there is none."""


def contents_of(model: nn.Module) -> str | None:
    """``contents_from`` the weights of a model."""
    weights = dict(model.named_parameters())
    return contents_from({name: tuple(each.shape) for name, each in weights.items()}, weights.get)


def contents_from(shapes: Mapping[str, tuple[int, ...]], read: Read) -> str | None:
    """A hash of a model's norms: the weights that files of all kinds keep as floats, also quantised ones.

    They are rounded to bfloat16. Other models have others, also most tuned ones; an adapter that is merged into
    matrices alone changes nothing.

    Args:
        shapes: of its weights, by name.

    Returns:
        16 hexadecimal digits; None if the model has no norms, or they cannot be read.
    """
    digest, count = hashlib.sha256(), 0
    for name, shape in sorted(shapes.items()):
        if len(shape) != 1 or not name.endswith(".weight"):
            continue
        weight = read(name)
        if weight is None or weight.is_meta or weight.shape != shape:
            return None
        digest.update(name.encode())
        digest.update(weight.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        count += 1
    return digest.hexdigest()[:16] if count else None
