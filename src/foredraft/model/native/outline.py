"""A model without its weights: all that the native engine, and a file's reader, need to know of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foredraft.model.hf.empty import empty_model
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.native.families import FAMILIES, weight_shapes


@dataclass(frozen=True, eq=False, slots=True)
class Outline:
    """A causal LM of transformers without its weights.

    ``name``: of its class. ``shapes``: of its weights by name, without an output layer that is tied to the embedding.
    """

    name: str
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Outline":
        """Of a transformers model."""
        tied = {"lm_head.weight"} if model.config.get_text_config().tie_word_embeddings else set()
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if name not in tied}
        return cls(model.__class__.__name__, model.config, model.generation_config, shapes)

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> "Outline":
        """Of the model of a config; without modelling code, which takes seconds to import, if the engine knows it."""
        kind = config.model_type
        if kind not in FAMILIES or config.__class__.__module__.partition(".")[0] != "transformers":
            return cls.of(empty_model(config))
        generation = GenerationConfig.from_model_config(config)
        return cls(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], config, generation, weight_shapes(config))
