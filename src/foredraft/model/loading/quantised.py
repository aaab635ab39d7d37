"""Chooses the engine of a model with quantised weights, and builds it."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel

from foredraft.core.errors import ModelError
from foredraft.model.base import TargetModel
from foredraft.model.gguf.load import empty_model
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.support import first_token_of, is_quantised
from foredraft.model.memory import trim_heap
from foredraft.model.native.decoder import Source, pack_decoder, source_of
from foredraft.model.native.families import why_not_native
from foredraft.model.native.files import folder_source
from foredraft.model.native.library import library
from foredraft.model.native.model import NativeLM
from foredraft.model.native.probe import dequantised, deviation
from foredraft.model.native.weights import PRECISIONS, Codes
from foredraft.model.threads import operators_in_one_thread

_log = logging.getLogger(__name__)

_FOUR_BITS = ("Q4_0", "Q4_1")
"""Types of GGUF files whose codes have four bits."""
_MOST_ERROR = 0.3
"""Of hidden states, as a share of their deviation, above which a model computes something else than the engine."""


class EngineChoice(NamedTuple):
    """The engine that a model gets, "native" or "transformers", and why, as a sentence."""

    name: str
    why: str


def engine_for(model: PreTrainedModel, weights: str | None) -> EngineChoice:
    """The engine of a model with this choice of weights; the model may be on the meta device."""
    if weights is None:
        return EngineChoice("transformers", "The weights stay as they are in the checkpoint.")
    reason = why_not_native(model)
    if reason is None and is_quantised(model):
        reason = "its weights are quantised already"
    if reason is None:
        try:
            return EngineChoice("native", f"Its forward is one call of kernels for {library().isa().decode()}.")
        except ModelError as error:
            reason = str(error).rstrip(".")
    return EngineChoice("transformers", f"The native engine cannot run it: {reason}.")


def with_weights(
    model: PreTrainedModel,
    weights: str,
    *,
    owned: bool = False,
    file: GgufWeights | Source | None = None,
    kv_cache_dtype: str | None = None,
) -> TargetModel:
    """A model with quantised weights: on the native engine, or else with 8-bit products of its linear layers.

    Args:
        model: on the CPU; it is not kept by the native engine. On the meta device if there is a file.
        weights: int4 or int8, or auto, which is int8 on the native engine or the checkpoint as it is.
        file: the model's weights where they are read from; then the native engine can run it.
        kv_cache_dtype: of keys and values on the native engine, by default int8 with int4, else float16.

    Raises:
        ModelError: the model gives other states on the native engine than by itself.
    """
    if file is not None:
        return native_model(model, file, weights, kv_cache_dtype)
    choice = engine_for(model, weights)
    if choice.name == "native":
        empty = empty_model(model.config)
        empty.generation_config = model.generation_config
        return native_model(empty, source_of(model), weights, kv_cache_dtype)
    if weights == "auto":
        _log.info("%s", choice.why)
        return CausalLM(model, owned=owned)
    _log.warning("%s Its linear layers run in int8 by torch's own products, which is slower.", choice.why)
    return CausalLM(model, owned=owned, packed_dtype=torch.int8)


def rounded_model(model: PreTrainedModel, weights: str, file: GgufWeights | Source | None = None) -> PreTrainedModel:
    """The transformers model whose weights are those that the native engine has with ``weights``, as floats.

    The same model if it does not run there. Arguments as in ``with_weights``.
    """
    if file is None and engine_for(model, weights).name != "native":
        return model
    empty = model if file is not None else empty_model(model.config)
    empty.generation_config = model.generation_config
    return dequantised(empty, native_model(empty, source_of(model) if file is None else file, weights).decoder)


def source_for(model: PreTrainedModel, weights: str, file: GgufWeights | Source | None) -> Source:
    """The weights of a model for the native engine, as floats or as codes that stay.

    Args:
        file: its weights if the model is on the meta device.

    Raises:
        ModelError: the engine cannot run the model.
    """
    if file is None:
        choice = engine_for(model, weights)
        if choice.name != "native":
            raise ModelError(choice.why)
        return source_of(model)
    return _source_of_file(file, PRECISIONS[weights].bits) if isinstance(file, GgufWeights) else file


def native_model(
    model: PreTrainedModel, weights_of: GgufWeights | Source, weights: str, kv_cache_dtype: str | None = None
) -> NativeLM:
    """Quantise a model for the native engine, one weight at a time, and compare some of its hidden states.

    Args:
        model: on the meta device, for config and names.
        weights: int4, int8, or auto, which is int8. What a GGUF file has in codes of as many bits or fewer stays as it
            is.
        kv_cache_dtype: of keys and values, by default int8 with int4, else float16.
    """
    trim_heap()  # of what config and tokenizer took to read
    precision = PRECISIONS["int8" if weights == "auto" else weights]
    source = source_for(model, precision.name, weights_of)
    first_token = first_token_of(model.config.get_text_config())
    with operators_in_one_thread():  # they are small, and wait for each other where other programs use the cores
        decoder = pack_decoder(model, source, precision, progress=lambda layer: trim_heap())
        kept = kv_cache_dtype or ("int8" if precision.bits == 4 else "float16")  # adds nothing to the loss of int4
        native = NativeLM(decoder, model.eval(), first_token=first_token, kv_cache_dtype=kept)
        error = deviation(model, native)
    trim_heap()
    if not error <= _MOST_ERROR:  # NaN counts as different
        raise ModelError(
            f"{native.name} gives other states on the native engine than by itself (they differ by {error:.0%} of "
            "their standard deviation): load it without weights."
        )
    return native


class OpenedFolder(NamedTuple):
    """A model on the meta device, and its weights."""

    model: PreTrainedModel
    source: Source


def open_folder(path: str, config: PreTrainedConfig, weights: str) -> OpenedFolder | None:
    """A local folder whose weights the native engine can read one by one; None if it cannot.

    Raises:
        ModelError: a file is damaged.
    """
    if not Path(path).is_dir() or config.__class__ not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model = empty_model_of(path, config)
    source = folder_source(path) if engine_for(model, weights).name == "native" else None
    return None if source is None else OpenedFolder(model, source)


def empty_model_of(path: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a folder on the meta device, with its generation config."""
    model = empty_model(config)
    with suppress(OSError):  # a folder need not have one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def native_reading(kind: str, *, kept: bool) -> str:
    """How matrices of a type in a GGUF file are stored with weights int8 and int4, for people; ``kept``: as codes."""
    if not kept:
        return "int8: to 8 bits; int4: to 4 bits"
    return "as it is" if kind in _FOUR_BITS else "int8: as it is; int4: layers to 4 bits"


def _source_of_file(file: GgufWeights, bits: int) -> Source:
    """Codes of at most ``bits`` bits as they are, of any for embedding and output layer; the rest as floats."""

    def source(name: str) -> Tensor | Codes | None:
        if name not in names:
            return None
        outer = ".layers." not in name
        kept = outer or bits == 8 or all(kind.name in _FOUR_BITS for kind in file.kinds(name))
        codes = file.codes(name) if kept else None
        return file.tensor(name) if codes is None else codes

    names = set(file.names)
    return source
