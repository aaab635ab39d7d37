"""What a model or a GGUF file is, and which engine runs it, without reading its weights."""

from dataclasses import dataclass
from math import prod

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foredraft.core.errors import ModelError
from foredraft.model.gguf.blocks import reading
from foredraft.model.gguf.config import config_of
from foredraft.model.gguf.file import GgufError, GgufFile
from foredraft.model.gguf.tokenizer import chat_template_of, tokenizer_kind, tokenizer_of
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf.hub import quiet
from foredraft.model.loading.load import model_config
from foredraft.model.loading.quantised import engine_for, native_reading
from foredraft.model.native.outline import Outline


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


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """Tensors of one type, their weights, and how they are read: as floats, and by the native engine its matrices."""

    type: str
    tensors: int
    parameters: int
    read: str
    native: str | None


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """A model in a GGUF file.

    ``bytes``: of its weights. ``tokenizer``: its kind, or why there is none. ``types``: most weights first.
    ``engine``: with quantised weights, "native" or "transformers"; ``why``: as a sentence.
    """

    name: str | None
    architecture: str
    model_type: str
    parameters: int
    bytes: int
    layers: int
    hidden_size: int
    vocab_size: int
    context: int
    tokenizer: str
    chat_template: bool
    engine: str
    why: str
    types: tuple[TypeInfo, ...]


def inspect_model(name: str) -> ModelInfo:
    """Describe a model in a folder or on the hub, without reading its weights.

    Raises:
        ModelError: there is no model, or it is not a causal LM of transformers.
    """
    config = model_config(name)
    if config.__class__ not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name!r} is not a causal LM that transformers knows.")
    with quiet():
        outline = Outline.of_config(config)
    text, engine = config.get_text_config(), engine_for(config, "int8")
    return ModelInfo(
        model_type=text.model_type,
        parameters=sum(prod(shape) for shape in outline.shapes.values()),
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        context=getattr(text, "max_position_embeddings", None),
        engine=engine.name,
        why=engine.why,
    )


def inspect_gguf(file: GgufFile) -> GgufInfo:
    """Describe a file, after the checks of loading it.

    Raises:
        GgufError: it cannot be loaded.
    """
    config = config_of(file)
    GgufWeights(file, Outline.of_config(config))
    engine = engine_for(config, "int8")
    tensors = file.tensors.values()
    kinds = {info.kind for info in tensors}
    matrices = {info.kind for info in tensors if len(info.shape) > 1}
    types = [
        TypeInfo(
            kind.name,
            sum(info.kind == kind for info in tensors),
            sum(prod(info.shape) for info in tensors if info.kind == kind),
            reading(kind),
            native_reading(kind.name) if engine.name == "native" and kind in matrices else None,
        )
        for kind in kinds
    ]
    return GgufInfo(
        name=file.text("general.name"),
        architecture=str(file.text("general.architecture")),
        model_type=config.model_type,
        parameters=sum(each.parameters for each in types),
        bytes=sum(info.rows * info.row_bytes for info in tensors),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
        tokenizer=_tokenizer(file),
        chat_template=chat_template_of(file) is not None,
        engine=engine.name,
        why=engine.why,
        types=tuple(sorted(types, key=lambda each: (-each.parameters, each.type))),
    )


def _tokenizer(file: GgufFile) -> str:
    try:
        return f"{tokenizer_kind(file)}, {len(tokenizer_of(file)):,} tokens"
    except GgufError as error:
        return f"none: {error}"
