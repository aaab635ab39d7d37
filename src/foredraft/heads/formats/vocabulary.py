"""The draft vocabulary of EAGLE-3: ``d2t`` holds offsets, ``t2d`` says who is a member (heads.md 1.2)."""

import torch
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.files import Checkpoint
from foredraft.heads.nets.target_parts import member_mask, vocabulary_of


def read_vocabulary(checkpoint: Checkpoint, draft: int, full: int, notes: list[str]) -> Tensor | None:
    """Target ids [Vd] that the draft can say, rising; None where it can say all of them.

    Raises:
        DrafterError: maps that are missing, of another size, out of range, not rising, or at odds with each other.
    """
    weights, name = checkpoint.weights, checkpoint.name
    if draft > full:
        raise DrafterError(f"The head {name!r} has a draft vocabulary of {draft}, more than the target's {full}.")
    if "d2t" not in weights:
        if draft == full:
            return None
        raise DrafterError(
            f"The head {name!r} has a draft vocabulary of {draft} out of {full} and no tensor d2t that maps it."
        )
    _check(checkpoint, "d2t", draft)
    offsets = weights.read("d2t")
    if offsets.dtype not in (torch.int64, torch.int32):
        raise DrafterError(f"The tensor d2t of the head {name!r} holds {offsets.dtype}, not whole numbers.")
    ids = vocabulary_of(offsets.long())
    if ids.min() < 0 or ids.max() >= full:
        raise DrafterError(f"The tensor d2t of the head {name!r} leads out of the target's vocabulary of {full}.")
    if not (ids[1:] > ids[:-1]).all():
        raise DrafterError(
            f"The tensor d2t of the head {name!r} gives target ids that do not rise; it should hold the offsets "
            "between target and draft ids."
        )
    if "t2d" in weights:
        _check(checkpoint, "t2d", full)
        if not torch.equal(weights.read("t2d").bool(), member_mask(ids, full)):
            raise DrafterError(f"The tensors d2t and t2d of the head {name!r} do not agree.")
    if draft == full:
        return None
    if not offsets.any():
        notes.append(f"d2t is all zeros: it drafts the first {draft} tokens of the vocabulary.")
    return ids


def _check(checkpoint: Checkpoint, tensor: str, size: int) -> None:
    shape = checkpoint.weights.shapes[tensor]
    if shape != (size,):
        raise DrafterError(
            f"The tensor {tensor} of the head {checkpoint.name!r} has the shape {list(shape)}, not {[size]}."
        )
