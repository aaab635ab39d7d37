"""Which of the target's hidden layers an EAGLE-3 head reads.

A tap is a number of decoder layers (0 is the embedding). SpecForge and SGLang list layers whose outputs are read, so
tap = id + 1; speculators and vLLM list layers whose inputs are read, so tap = id (heads.md 1.2).
"""

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.files import Checkpoint, Fields
from foredraft.heads.formats.info import Overrides
from foredraft.model.base import TargetModel

KEY = "eagle_aux_hidden_state_layer_ids"


def default_taps(layers: int) -> tuple[int, ...]:
    """SafeAILab's default taps for a target of this depth; fewer than three if it has too few layers."""
    return tuple(sorted({2, layers // 2, layers - 3} & set(range(layers))))


def chosen_taps(
    checkpoint: Checkpoint, kind: str, overrides: Overrides, count: int, target: TargetModel | None, notes: list[str]
) -> tuple[tuple[int, ...], bool]:
    """The taps, and whether they are listed explicitly. Without a target, the default is the placeholder 0, 1, 2.

    Raises:
        DrafterError: the list is invalid or does not match the weights, or the target has too few layers.
    """
    name = checkpoint.name
    listed = overrides.taps if overrides.taps is not None else _listed(checkpoint.fields(), kind, notes)
    if listed is not None:
        if len(set(listed)) != len(listed) or not listed or min(listed) < 0:
            raise DrafterError(
                f"The hidden layers {list(listed)} of the head {name!r} must be distinct and not negative."
            )
        if len(listed) != count:
            raise DrafterError(
                f"The head {name!r} reads {count} hidden layers (from the width of fc.weight), but {len(listed)} are "
                f"listed: {list(listed)}."
            )
        if target is not None and max(listed) > target.layers:
            raise DrafterError(
                f"The head {name!r} reads hidden layer {max(listed)}, but this target has {target.layers} layers."
            )
        return tuple(sorted(listed)), True  # all engines read them in the order of the layers
    if count != 3:
        raise DrafterError(
            f"The head {name!r} reads {count} hidden layers and does not list them: give them, as in taps=2x16x29."
        )
    notes.append("It lists no hidden layers; the default is used: 2, N//2 and N - 3 of N layers.")
    if target is None:
        return (0, 1, 2), False
    taps = default_taps(target.layers)
    if len(taps) < 3:
        raise DrafterError(
            f"The head {name!r} lists no hidden layers, and the default (2, N//2, N - 3) has no three different layers "
            f"in a target of {target.layers} layers: give them, as in taps=1x2x3."
        )
    return taps, False


def _listed(fields: Fields, kind: str, notes: list[str]) -> tuple[int, ...] | None:
    nested = fields.part("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise DrafterError(
            f"The head {fields.name!r} reads the last hidden layer only (use_aux_hidden_state is false), which is not "
            "supported."
        )
    inputs, outputs = fields.integers(KEY), nested.integers(KEY)
    if outputs is not None and not kind.startswith("vLLM"):
        notes.append(f"Its layer ids {list(outputs)} are of outputs, so the hidden layers are one higher.")
        return tuple(each + 1 for each in outputs)
    return inputs
