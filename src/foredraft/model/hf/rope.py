"""Rotary frequencies of all schemes that transformers supports."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.core.errors import ModelError


def rope_frequencies(
    shape: Mapping[str, Any], base: float, scaling: Mapping[str, Any] | None
) -> tuple[Float[Tensor, "F"], float]:
    """The frequencies of a rotary embedding (default, linear, dynamic, yarn, llama3 or longrope), and its scale.

    Args:
        shape: the fields of a config that schemes read, with transformers' names.
        scaling: ``rope_scaling`` of a config.

    Raises:
        ModelError: the scheme is unknown, or its parameters are missing.
    """
    given = dict(scaling or {})
    kind = given.pop("type", None) or given.get("rope_type", "default")
    if kind in ("default", "mrope"):  # mrope on text alone is plain
        steps = torch.arange(0, shape["head_dim"], 2, dtype=torch.float32) / shape["head_dim"]
        return 1.0 / base**steps, 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"Unknown rope type {kind!r}. Known: {', '.join(ROPE_INIT_FUNCTIONS)}.")
    config = PreTrainedConfig(**shape)
    config.rope_parameters = {**given, "rope_type": kind, "rope_theta": base}
    try:
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"rope_scaling {scaling} cannot be used: {error}.") from error
