"""Which of the target's hidden layers an EAGLE-3 head reads.

A tap is a number of decoder layers (0 is the embedding). SpecForge, SGLang and AngelSlim list layers whose outputs are
read, so tap = id + 1; speculators and vLLM list layers whose inputs are read, so tap = id.
"""

from typing import NamedTuple

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.files import Checkpoint, Fields
from foredraft.heads.formats.info import Overrides
from foredraft.model.base import TargetModel

KEY = "eagle_aux_hidden_state_layer_ids"
_KEYS = (KEY, "aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids")


class _Listed(NamedTuple):
    """Layer ids of a head. ``outputs``: they count outputs."""

    ids: tuple[int, ...]
    outputs: bool


def default_taps(layers: int) -> tuple[int, ...]:
    """SafeAILab's default taps for a target of this depth; fewer than three if it has too few layers."""
    return tuple(sorted({2, layers // 2, layers - 3} & set(range(layers))))


def chosen_taps(
    checkpoint: Checkpoint, kind: str, overrides: Overrides, count: int, target: TargetModel | None, notes: list[str]
) -> tuple[tuple[int, ...], int | None]:
    """The taps, and the least depth of a target that has them, or None if they follow from its depth. Without a target,
    the default is the placeholder 0, 1, 2.

    Raises:
        DrafterError: the list is invalid or does not match the weights, or the target has too few layers.
    """
    name = checkpoint.name
    given = _Listed(overrides.taps, False) if overrides.taps is not None else _listed(checkpoint.fields(), kind)
    listed = None if given is None else _taps_of(given, target, notes)
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
        either = given is not None and given.outputs and given.ids[0] != 1  # then they may be ids of inputs
        return tuple(sorted(listed)), max(listed) - either  # all engines read them in the order of the layers
    if count != 3:
        raise DrafterError(
            f"The head {name!r} reads {count} hidden layers and does not list them: give them, as in taps=2x16x29."
        )
    notes.append("It lists no hidden layers; the default is used: 2, N//2 and N - 3 of N layers.")
    if target is None:
        return (0, 1, 2), None
    taps = default_taps(target.layers)
    if len(taps) < 3:
        raise DrafterError(
            f"The head {name!r} lists no hidden layers, and the default (2, N//2, N - 3) has no three different layers "
            f"in a target of {target.layers} layers: give them, as in taps=1x2x3."
        )
    return taps, None


def _listed(fields: Fields, kind: str) -> _Listed | None:
    """The layer ids that the config lists; an empty list is none."""
    nested = fields.part("eagle_config")
    if not (nested if "use_aux_hidden_state" in nested else fields).flag("use_aux_hidden_state", True):
        raise DrafterError(
            f"The head {fields.name!r} reads the last hidden layer only (use_aux_hidden_state is false), which is not "
            "supported."
        )
    inputs = kind.startswith("vLLM")
    for place, key in [(fields, KEY)] * inputs + [(part, key) for part in (nested, fields) for key in _KEYS]:
        if ids := place.integers(key):
            return _Listed(ids, not inputs and (place is nested or key != KEY))
    return None


def _taps_of(listed: _Listed, target: TargetModel | None, notes: list[str]) -> tuple[int, ...]:
    """The taps of listed layers. SGLang reads lists that begin with another layer than 1 as ids of inputs, where they
    can be nothing else: the default ones, or the target's last state among them."""
    ids, depth = listed.ids, 0 if target is None else target.layers
    if not listed.outputs:
        return ids
    if ids[0] != 1 and (max(ids) == depth or set(ids) == set(default_taps(depth)) != set()):
        notes.append(f"Its layer ids {list(ids)} are of inputs, which are the hidden layers.")
        return ids
    notes.append(f"Its layer ids {list(ids)} are of outputs, so the hidden layers are one higher.")
    return tuple(each + 1 for each in ids)
