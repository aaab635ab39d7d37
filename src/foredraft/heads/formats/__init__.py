"""Draft heads in every published format, read by content and written as their readers want them.

``inspect_head`` says what is in a folder, ``load_head`` makes a net of it, ``save_head`` writes one.
"""

from collections.abc import Callable

from foredraft.core.errors import DrafterError
from foredraft.heads.formats import eagle1, eagle3, hydra, medusa, native
from foredraft.heads.formats.assemble import assemble, check_target, describe
from foredraft.heads.formats.files import Checkpoint, open_checkpoint
from foredraft.heads.formats.info import Head, HeadInfo, Overrides, Reading, TargetNeeds
from foredraft.heads.formats.save import FORMATS, default_format, save_head
from foredraft.model.hf import CausalLM

__all__ = [
    "FORMATS",
    "Head",
    "HeadInfo",
    "TargetNeeds",
    "default_format",
    "inspect_head",
    "load_head",
    "save_head",
]

Matcher = Callable[[Checkpoint], bool]
DraftRunner = Callable[[Checkpoint, CausalLM | None, Overrides], Reading]

READERS: tuple[tuple[Matcher, DraftRunner], ...] = (
    (native.matches, native.read),
    (hydra.matches, hydra.read),
    (eagle3.matches, eagle3.read),
    (eagle1.matches, eagle1.read),
    (medusa.matches, medusa.read),
)
"""The first whose signs are there reads the files; names of folders are no signs."""


def inspect_head(path: str) -> HeadInfo:
    """What a folder or a repository of the hub holds, without its target; most weights are not read.

    Raises:
        ModelError: it is not there.
        DrafterError: it is no draft head, or its config and tensors do not go together.
    """
    checkpoint = open_checkpoint(path)
    return describe(checkpoint, _reader(checkpoint)(checkpoint, None, Overrides()))


def load_head(
    path: str,
    target: CausalLM,
    *,
    rope_theta: float | None = None,
    taps: tuple[int, ...] | None = None,
) -> Head:
    """A head for this target, on its device and in its dtype, not to be trained.

    Args:
        path: a folder or a repository of the hub.
        rope_theta: base of the head's rotary positions, where its config is wrong about it.
        taps: hidden layers of the target (numbers of decoder layers passed), where the files are wrong or silent.

    Raises:
        ModelError: it is not there.
        DrafterError: it is no draft head, it is broken, or it is for another target.
    """
    checkpoint, wish = open_checkpoint(path), Overrides(rope_theta, taps)
    read = _reader(checkpoint)
    check_target(checkpoint, read(checkpoint, None, wish), target)
    reading = read(checkpoint, target, wish)
    info = describe(checkpoint, reading)
    return Head(assemble(checkpoint, reading, target), info)


def _reader(checkpoint: Checkpoint) -> DraftRunner:
    for matches, read in READERS:
        if matches(checkpoint):
            return read
    names = sorted(checkpoint.weights.shapes)
    if any(name.startswith("model.layers.") for name in names):
        raise DrafterError(f"{checkpoint.name!r} is a whole model, not a draft head; it can draft as draft_model:PATH.")
    shown = ", ".join(names[:3]) or "none"
    raise DrafterError(f"The tensors in {checkpoint.name!r} are those of no known draft head: {shown}, ...")
