"""The draft vocabulary of EAGLE-3: ``d2t`` holds offsets, ``t2d`` is a mask (Li et al., arXiv:2503.01840)."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.files import Checkpoint


def read_vocabulary(checkpoint: Checkpoint, draft: int, full: int, notes: list[str]) -> Tensor | None:
    """The draft vocabulary as target ids [Vd], ascending; None for the full vocabulary.

    Raises:
        DrafterError: the maps are missing, of a wrong size, out of range, not ascending, or inconsistent.
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
    checkpoint.check_shape("d2t", (draft,))
    offsets = weights.read("d2t")
    if offsets.dtype not in (torch.int64, torch.int32):
        raise DrafterError(f"The tensor d2t of the head {name!r} holds {offsets.dtype}, not integers.")
    ids = vocabulary_of(offsets.long())
    if ids.min() < 0 or ids.max() >= full:
        raise DrafterError(f"The tensor d2t of the head {name!r} has ids outside the target's vocabulary of {full}.")
    if not (ids[1:] > ids[:-1]).all():
        raise DrafterError(
            f"The tensor d2t of the head {name!r} gives target ids that are not ascending; it must hold the offsets "
            "between target and draft ids."
        )
    if "t2d" in weights:
        checkpoint.check_shape("t2d", (full,))
        if not torch.equal(weights.read("t2d").bool(), member_mask(ids, full)):
            raise DrafterError(f"The tensors d2t and t2d of the head {name!r} are inconsistent.")
    if draft == full:
        return None
    if not offsets.any():
        notes.append(f"d2t is all zeros: the draft vocabulary is the first {draft} tokens.")
    return ids


def vocabulary_of(d2t: Int[Tensor, "v"]) -> Int[Tensor, "v"]:
    """Target ids of the draft's ids. ``d2t`` holds offsets: target id = draft id + d2t[draft id]."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t


def offsets_of(ids: Int[Tensor, "v"]) -> Int[Tensor, "v"]:
    """``d2t`` of target ids; the inverse of ``vocabulary_of``."""
    return ids - torch.arange(ids.shape[0], device=ids.device)


def member_mask(ids: Int[Tensor, "v"], vocab_size: int) -> Bool[Tensor, "V"]:
    """``t2d``: which target ids are in the draft vocabulary."""
    return torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).scatter(0, ids, True)
