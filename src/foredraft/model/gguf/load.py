"""A transformers model of the weights, the config and the tokenizer in a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from foredraft.core.errors import OptionError
from foredraft.model.gguf.blocks import is_float
from foredraft.model.gguf.file import MAGIC, GgufFile
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf.empty import model_class
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.native.checks import check_weight
from foredraft.model.native.outline import Outline

SUFFIX = ".gguf"
"""The ending of GGUF files' names."""

_REFUSED = ("quantization_config", "gguf_file", "subfolder", "state_dict", "config")
"""Options of ``from_pretrained`` that mean nothing for a GGUF file."""


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file: by its ending, or by its first bytes."""
    path = Path(name).expanduser()
    if name.lower().endswith(SUFFIX) and not path.is_dir():
        return True
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def own_dtype(file: GgufFile) -> torch.dtype:
    """The smallest dtype for a file's floats: float32 or float16 if no weight is wider, else bfloat16."""
    kinds = {info.kind.name for info in file.tensors.values() if len(info.shape) > 1}
    return {"F32": torch.float32, "F16": torch.float16}.get("".join(kinds), torch.bfloat16)


def is_quantised_file(file: GgufFile) -> bool:
    """Whether a file holds matrices in other types than floats."""
    return any(len(info.shape) > 1 and not is_float(info.kind) for info in file.tensors.values())


def load_float(file: GgufFile, config: PreTrainedConfig, options: Mapping[str, Any]) -> PreTrainedModel:
    """A transformers model with the file's weights in floats.

    Args:
        options: of ``from_pretrained``: the dtype, and others such as device_map.

    Raises:
        GgufError: the file's weights are not those of the config's model.
        ModelError: a weight is damaged.
        OptionError: an option means nothing for a GGUF file.
    """
    if wrong := [name for name in _REFUSED if name in options]:
        raise OptionError(f"{wrong[0]} does not apply to a GGUF file, whose weights are quantised: leave it out.")
    weights = GgufWeights(file, Outline.of_config(config))
    state = {}
    for name in weights.names:
        state[name] = weights.tensor(name, options["dtype"])
        check_weight(name, state[name])
    return model_class(config).from_pretrained(None, config=config, state_dict=state, **options)
