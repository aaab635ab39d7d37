"""Reads and writes draft heads in all published formats; formats are recognised by content.

``inspect_head`` describes the head in a folder, ``load_head`` loads it, ``save_head`` writes one.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foredraft.core.errors import DrafterError
from foredraft.heads.formats import eagle1, eagle3, hydra, medusa, native
from foredraft.heads.formats.assemble import assemble, check_target, describe
from foredraft.heads.formats.files import Checkpoint, open_checkpoint
from foredraft.heads.formats.info import Head, HeadInfo, Overrides, Reading, TargetNeeds
from foredraft.heads.formats.save import FORMATS, default_format, save_head
from foredraft.model.base import TargetModel

__all__ = [
    "FORMATS",
    "Head",
    "HeadInfo",
    "TargetNeeds",
    "default_format",
    "inspect_head",
    "load_head",
    "recorded_contents",
    "recorded_target",
    "save_head",
]

Matcher = Callable[[Checkpoint], bool]
FormatReader = Callable[[Checkpoint, TargetModel | None, Overrides], Reading]

READERS: tuple[tuple[Matcher, FormatReader], ...] = (
    (native.matches, native.read),
    (hydra.matches, hydra.read),
    (eagle3.matches, eagle3.read),
    (eagle1.matches, eagle1.read),
    (medusa.matches, medusa.read),
)
"""The first format that matches the contents reads the files; folder names do not matter."""


_OF_MODEL = re.compile(r"(model|transformer|gpt_neox)\.(decoder\.)?(layers|h|blocks)\.\d+\.")
"""Names of tensors in the layers of whole models."""


class WholeModelError(DrafterError):
    """What should be a head is a model."""


def inspect_head(path: str) -> HeadInfo:
    """Describe the head in a folder or hub repository, without its target and without reading most weights.

    Raises:
        ModelError: the folder or repository does not exist.
        WholeModelError: it is a model.
        DrafterError: it is not a draft head, or its config and tensors do not match.
    """
    checkpoint = open_checkpoint(path)
    return describe(checkpoint, _reader(checkpoint)(checkpoint, None, Overrides()))


def load_head(
    path: str,
    target: TargetModel,
    *,
    rope_theta: float | None = None,
    taps: tuple[int, ...] | None = None,
    norm_output: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Head:
    """Load a head for this target, on its device and in its dtype, without gradients.

    Args:
        path: a folder or hub repository.
        rope_theta: the head's RoPE base, if its config is wrong.
        taps: hidden layers of the target (numbers of decoder layers), if the files omit them or are wrong.
        norm_output: whether drafted positions read an EAGLE-3 head's normed state, if its config is wrong.
        options: about access to the hub; see ``fetch``.

    Raises:
        ModelError: the folder or repository does not exist.
        DrafterError: it is not a draft head, it is broken, or it is for another target.
    """
    checkpoint, overrides = open_checkpoint(path, options), Overrides(rope_theta, taps, norm_output)
    read = _reader(checkpoint)
    check_target(checkpoint, read(checkpoint, None, overrides), target)
    reading = read(checkpoint, target, overrides)
    info = describe(checkpoint, reading)
    return Head(assemble(checkpoint, reading, target), info)


def recorded_target(path: str) -> str | None:
    """The target that training has recorded beside a head: a hub name, or a folder, which is stored relative to it."""
    found = _recorded(path, "target_model")
    if found is None:
        return None
    return os.path.normpath(Path(path) / found) if (Path(path) / found).is_dir() else found


def recorded_contents(path: str) -> str | None:
    """The contents of the target (``TargetModel.contents``) that training has recorded beside a head."""
    return _recorded(path, "target_contents")


def _recorded(path: str, key: str) -> str | None:
    """A string in the provenance of a head; None if it has none."""
    try:
        found = json.loads((Path(path) / "provenance.json").read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _reader(checkpoint: Checkpoint) -> FormatReader:
    for matches, read in READERS:
        if matches(checkpoint):
            return read
    names = sorted(checkpoint.weights.shapes)
    if any(_OF_MODEL.match(name) for name in names):
        raise WholeModelError(f"{checkpoint.name!r} is a whole model, not a draft head; use it as draft_model:PATH.")
    shown = ", ".join(names[:3]) or "none"
    raise DrafterError(f"The tensors in {checkpoint.name!r} match no known draft head: {shown}, ...")
