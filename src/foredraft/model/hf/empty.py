"""Models without data, from their configs."""

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foredraft.model.hf_types import PreTrainedModel


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of the causal LM of a config."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config.__class__]
    return found


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device."""
    with torch.device("meta"):
        return model_class(config)(copy.deepcopy(config))
