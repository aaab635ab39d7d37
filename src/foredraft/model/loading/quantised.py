"""Chooses the engine of a model with quantised weights, and builds it."""

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foredraft.core.errors import ModelError
from foredraft.model.base import TargetModel
from foredraft.model.gguf.blocks import KEPT
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.hf.contents import contents_from
from foredraft.model.hf.support import first_token_of, is_quantised
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.memory import trim_heap
from foredraft.model.native.decoder import Source, floats_of, pack_decoder, source_of
from foredraft.model.native.families import why_not_native
from foredraft.model.native.files import folder_source
from foredraft.model.native.library import library
from foredraft.model.native.model import NativeLM
from foredraft.model.native.outline import Outline
from foredraft.model.native.probe import dequantised, deviation
from foredraft.model.native.probe_cache import remember, was_compared
from foredraft.model.native.weights import PRECISIONS, Blocks, Codes
from foredraft.model.threads import operators_in_one_thread

_log = logging.getLogger(__name__)

_MOST_ERROR = 0.3
"""Of hidden states, as a share of their deviation, above which a model computes something else than the engine."""


class EngineChoice(NamedTuple):
    """The engine that a model gets, "native" or "transformers", and why, as a sentence."""

    name: str
    why: str


def engine_for(config: PreTrainedConfig, weights: str | None) -> EngineChoice:
    """The engine of a model of this config with this choice of weights."""
    if weights is None:
        return EngineChoice("transformers", "The weights stay as they are in the checkpoint.")
    reason = why_not_native(config)
    if reason is None and is_quantised(config):
        reason = "its weights are quantised already"
    if reason is None:
        try:
            return EngineChoice("native", f"Its forward is one call of kernels for {library().isa().decode()}.")
        except ModelError as error:
            reason = str(error).rstrip(".")
    return EngineChoice("transformers", f"The native engine cannot run it: {reason}.")


def with_weights(
    model: PreTrainedModel, weights: str, *, owned: bool = False, kv_cache_dtype: str | None = None
) -> TargetModel:
    """A model with quantised weights: on the native engine, or else with 8-bit products of its linear layers.

    Args:
        model: on the CPU; it is not kept by the native engine.
        weights: int4 or int8, or auto, which is int8 on the native engine or the checkpoint as it is.
        kv_cache_dtype: of keys and values on the native engine, by default int8 with int4, else float16.

    Raises:
        ModelError: the model gives other states on the native engine than by itself.
    """
    choice = engine_for(model.config, weights)
    if choice.name == "native":
        native = native_model(Outline.of(model), source_of(model), weights, kv_cache_dtype, of_file=False)
        if not owned:
            native.watch(model)
        return native
    if weights == "auto":
        _log.info("%s", choice.why)
        return CausalLM(model, owned=owned)
    _log.warning("%s Its linear layers run in int8 by torch's own products, which is slower.", choice.why)
    return CausalLM(model, owned=owned, packed_dtype=torch.int8)


def rounded_model(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    """The transformers model whose weights are those that the native engine has with ``weights``, as floats.

    The same model if it does not run there.
    """
    if engine_for(model.config, weights).name != "native":
        return model
    outline = Outline.of(model)
    return dequantised(outline, native_model(outline, source_of(model), weights, of_file=False).decoder)


def rounded_file(outline: Outline, file: GgufWeights | Source, weights: str) -> PreTrainedModel:
    """``rounded_model`` of the weights in a file."""
    return dequantised(outline, native_model(outline, file, weights).decoder)


def source_for(file: GgufWeights | Source, weights: str) -> Source:
    """The weights in a file for the native engine, as floats or as codes that stay."""
    return _source_of_file(file, PRECISIONS[weights].bits) if isinstance(file, GgufWeights) else file


def native_model(
    outline: Outline,
    file: GgufWeights | Source,
    weights: str,
    kv_cache_dtype: str | None = None,
    *,
    of_file: bool = True,
) -> NativeLM:
    """Quantise a model for the native engine, one weight at a time, and compare some of its hidden states.

    Args:
        weights: int4, int8, or auto, which is int8. What a GGUF file has in codes of as many bits or fewer stays as it
            is.
        kv_cache_dtype: of keys and values, by default int8 with int4, else float16.
        of_file: hidden states are compared once for all processes (``probe_cache``); those of a loaded model, whose
            code may have been changed, are each time.
    """
    trim_heap()  # of what config and tokenizer took to read
    precision = PRECISIONS["int8" if weights == "auto" else weights]
    source = source_for(file, precision.name)
    first_token = first_token_of(outline.config.get_text_config())
    with operators_in_one_thread():  # they are small, and wait for each other where other programs use the cores
        decoder = pack_decoder(outline, source, precision, progress=lambda layer: trim_heap())
        kept = kv_cache_dtype or ("int8" if precision.bits == 4 else "float16")  # adds nothing to the loss of int4
        contents = contents_from(outline.shapes, floats_of(source))
        native = NativeLM(decoder, outline, first_token=first_token, kv_cache_dtype=kept, contents=contents)
        if not (of_file and was_compared(native)):
            _compare(native)
            if of_file:
                remember(native)
    trim_heap()
    return native


def _compare(native: NativeLM) -> None:
    """Raise a ``ModelError`` if the engine computes something else than the model's own code."""
    error = deviation(native)
    if not error <= _MOST_ERROR:  # NaN counts as different
        raise ModelError(
            f"{native.name} gives other states on the native engine than by itself (they differ by {error:.0%} of "
            "their standard deviation): load it without weights."
        )


class OpenedFolder(NamedTuple):
    """A model and its weights."""

    outline: Outline
    source: Source


def open_folder(path: str, config: PreTrainedConfig, weights: str) -> OpenedFolder | None:
    """A local folder whose weights the native engine can read one by one; None if it cannot.

    Raises:
        ModelError: a file is damaged.
    """
    if not Path(path).is_dir() or config.__class__ not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    source = folder_source(path) if engine_for(config, weights).name == "native" else None
    return None if source is None else OpenedFolder(outline_of_folder(path, config), source)


def outline_of_folder(path: str, config: PreTrainedConfig) -> Outline:
    """The model of a folder, with its generation config."""
    outline = Outline.of_config(config)
    with suppress(OSError):  # a folder need not have one
        return replace(outline, generation_config=GenerationConfig.from_pretrained(path))
    return outline


def native_reading(kind: str) -> str:
    """How matrices of a type in a GGUF file are stored with weights int8 and int4, for people."""
    if kind not in KEPT:
        return "int8: to 8 bits; int4: to 4 bits"
    return "as it is" if KEPT[kind] == 4 else "int8: as it is; int4: layers to 4 bits"


def _source_of_file(file: GgufWeights, bits: int) -> Source:
    """Blocks of at most ``bits`` bits as they are, of any for embedding and output layer; the rest as floats."""

    def source(name: str) -> Tensor | Codes | Blocks | None:
        if name not in names:
            return None
        kept = ".layers." not in name or all(KEPT.get(kind.name, 8) <= bits for kind in file.kinds(name))
        blocks = file.blocks(name) if kept else None
        return file.tensor(name) if blocks is None else blocks

    names = set(file.names)
    return source
