"""What a model is, and which engine runs it, from its config alone."""

from dataclasses import dataclass

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from foredraft.core.errors import ModelError
from foredraft.model.gguf.load import empty_model
from foredraft.model.hf.hub import quiet
from foredraft.model.loading.load import model_config
from foredraft.model.loading.quantised import engine_for


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A causal LM. ``engine``: with quantised weights, "native" or "transformers"; ``why``: as a sentence."""

    model_type: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    context: int | None
    engine: str
    why: str


def inspect_model(name: str) -> ModelInfo:
    """Describe a model in a folder or on the hub, without reading its weights.

    Raises:
        ModelError: there is no model, or it is not a causal LM of transformers.
    """
    config = model_config(name)
    if config.__class__ not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name!r} is not a causal LM that transformers knows.")
    with quiet():
        model = empty_model(config)
    text, engine = config.get_text_config(), engine_for(model, "int8")
    tied = {id(each): each for each in model.parameters()}
    return ModelInfo(
        model_type=text.model_type,
        parameters=sum(each.numel() for each in tied.values()),
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        engine=engine.name,
        why=engine.why,
    )
