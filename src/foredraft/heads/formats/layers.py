"""Which of the target's hidden layers an EAGLE-3 head reads: two conventions, one apart, and a default.

Here a tap is a number of decoder layers passed (0 is the embedding). SpecForge and SGLang list layers whose outputs
are read, so tap = id + 1; speculators and vLLM list layers whose inputs are read, so tap = id (heads.md 1.2).
"""

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.files import Checkpoint, Fields
from foredraft.heads.formats.info import Overrides
from foredraft.model.hf import CausalLM

KEY = "eagle_aux_hidden_state_layer_ids"


def default_taps(layers: int) -> tuple[int, ...]:
    """SafeAILab's choice for a target of that depth; fewer than three where the depth is too small."""
    return tuple(sorted({2, layers // 2, layers - 3} & set(range(layers))))


def chosen_taps(
    checkpoint: Checkpoint, kind: str, wish: Overrides, count: int, target: CausalLM | None, notes: list[str]
) -> tuple[tuple[int, ...], bool]:
    """The taps, and whether anybody has listed them. Without a target, the default is 0, 1, 2 for want of better.

    Raises:
        DrafterError: a list that is none, another number of taps than the weights have, or a target too shallow.
    """
    name = checkpoint.name
    listed = wish.taps if wish.taps is not None else _listed(checkpoint.fields(), kind, notes)
    if listed is not None:
        if len(set(listed)) != len(listed) or not listed or min(listed) < 0:
            raise DrafterError(
                f"The hidden layers {list(listed)} of the head {name!r} must be distinct and not negative."
            )
        if len(listed) != count:
            raise DrafterError(
                f"The head {name!r} reads {count} hidden layers (by the width of fc.weight), and {len(listed)} are "
                f"listed: {list(listed)}."
            )
        if target is not None and max(listed) > target.layers:
            raise DrafterError(f"The head {name!r} reads hidden layer {max(listed)} of a target with {target.layers}.")
        return tuple(sorted(listed)), True  # whoever runs such heads takes them in the order of the layers
    if count != 3:
        raise DrafterError(
            f"The head {name!r} reads {count} hidden layers and does not list them; say which with taps=(...)."
        )
    notes.append("It lists no hidden layers: those of the default are read, 2, N//2 and N - 3 of N.")
    if target is None:
        return (0, 1, 2), False
    taps = default_taps(target.layers)
    if len(taps) < 3:
        raise DrafterError(
            f"The head {name!r} lists no hidden layers, and the default (2, N//2, N - 3) has no three different ones "
            f"in a target of {target.layers} layers; say which with taps=(...)."
        )
    return taps, False


def _listed(fields: Fields, kind: str, notes: list[str]) -> tuple[int, ...] | None:
    nested = fields.part("eagle_config")
    if not nested.flag("use_aux_hidden_state", True):
        raise DrafterError(
            f"The head {fields.name!r} reads no hidden layers but the last (use_aux_hidden_state is false), "
            "which is not supported."
        )
    inputs, outputs = fields.integers(KEY), nested.integers(KEY)
    if outputs is not None and not kind.startswith("vLLM"):
        notes.append(f"Its layer ids {list(outputs)} count outputs, so hidden layers are one higher.")
        return tuple(each + 1 for each in outputs)
    return inputs
