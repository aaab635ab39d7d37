"""Chooses the engine of a model with quantised weights, and builds it."""

import copy
import functools
import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.errors import ModelError, OptionError, first_line
from foredraft.model.base import TargetModel
from foredraft.model.gguf.weights import GgufWeights
from foredraft.model.hf import MODEL_ERRORS, CausalLM, first_token_of
from foredraft.model.native.decoder import Source, pack_decoder, source_of
from foredraft.model.native.families import why_not_native
from foredraft.model.native.library import library
from foredraft.model.native.model import NativeLM
from foredraft.model.native.weights import PRECISIONS, Codes

_log = logging.getLogger(__name__)

WEIGHTS = ("int4", "int8", "auto")
_MOST_ERROR = 0.5
"""Of logits, as a share of their deviation, above which a model computes something else than the engine."""


def check_weights(weights: str | None, device: object) -> None:
    """Check a choice of weights.

    Raises:
        OptionError: it is unknown, or quantised weights were asked for on another device than a CPU.
    """
    if weights is not None and weights not in WEIGHTS:
        raise OptionError(f"Unknown weights {weights!r}. Known: {', '.join(WEIGHTS)}.")
    if weights in ("int4", "int8") and device is not None and torch.device(str(device)).type != "cpu":
        raise OptionError(f"Weights in {weights} run on CPUs: leave device out, or set it to cpu.")


def engine_for(model: PreTrainedModel, weights: str | None) -> tuple[str, str]:
    """The engine that a model with this choice of weights gets, "native" or "transformers", and why, as a sentence."""
    if weights is None:
        return "transformers", "The weights stay as they are in the checkpoint."
    reason = _why_not(model)
    if reason is None:
        return "native", f"Its layers are fused kernels for {library().isa().decode()}."
    return "transformers", f"The native engine cannot run it: {reason}."


def with_weights(
    model: PreTrainedModel, weights: str, *, owned: bool = False, file: GgufWeights | None = None
) -> TargetModel:
    """A model with quantised weights: on the native engine, or else with 8-bit products of its linear layers.

    Args:
        model: on the CPU; it is not kept by the native engine. On the meta device if there is a file.
        weights: int4 or int8, or auto, which is int8 on the native engine or the checkpoint as it is.
        file: the model's weights in a GGUF file; then the native engine can run it.

    Raises:
        ModelError: the model gives other logits on the native engine than by itself.
    """
    if file is not None:
        return native_file(model, file, weights)
    engine, why = engine_for(model, weights)
    if engine == "native":
        return native_model(model, "int8" if weights == "auto" else weights)
    if weights == "auto":
        _log.info("%s", why)
        return CausalLM(model, owned=owned)
    _log.warning("%s Its linear layers run in int8 by torch's own products, which is slower.", why)
    return CausalLM(model, owned=owned, packed_dtype=torch.int8)


def native_model(model: PreTrainedModel, weights: str, kv_dtype: torch.dtype = torch.float16) -> NativeLM:
    """Quantise a loaded model for the native engine, and compare a few of its logits."""
    decoder = pack_decoder(model, source_of(model), PRECISIONS[weights])
    config = model.config.get_text_config()
    made = NativeLM(decoder, _without_data(model), first_token=first_token_of(config), kv_dtype=kv_dtype)
    error = _difference(model, made)
    if not error <= _MOST_ERROR:  # NaN counts as different
        raise ModelError(
            f"{made.name} gives other logits on the native engine than by itself (they differ by {error:.0%} of their "
            "standard deviation): load it without weights."
        )
    return made


def native_file(model: PreTrainedModel, file: GgufWeights, weights: str) -> NativeLM:
    """A model of a GGUF file on the native engine, without floats in between.

    Args:
        model: on the meta device.
        weights: int4, int8, or auto, which is int8 for what the file has in floats or K-quants. What the file has in
            codes of so many bits or fewer stays as it is.
    """
    precision = PRECISIONS["int8" if weights == "auto" else weights]
    decoder = pack_decoder(model, _source_of_file(file, precision.bits), precision)
    return NativeLM(decoder, model.eval(), first_token=first_token_of(model.config.get_text_config()))


def _source_of_file(file: GgufWeights, bits: int) -> Source:
    """Codes of at most so many bits as they are, of any for embedding and output layer; the rest as floats."""

    @functools.lru_cache(4)  # the packer asks for names before it reads them
    def source(name: str) -> Tensor | Codes | None:
        if name not in names:
            return None
        outer = ".layers." not in name
        kept = outer or bits == 8 or all(kind.name in ("Q4_0", "Q4_1") for kind in file.kinds(name))
        codes = file.codes(name) if kept else None
        return file.tensor(name) if codes is None else codes

    names = set(file.names)
    return source


@torch.inference_mode()
def _difference(model: PreTrainedModel, engine: NativeLM) -> float:
    """The median over some tokens of the error of the engine's logits, relative to their standard deviation.

    The median, since a model may be at a loss after some tokens, and then any rounding changes much.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(1, 25) * 997 % vocabulary)[None]
    try:
        expected = model(input_ids=ids, use_cache=False).logits[0].float()
    except MODEL_ERRORS as error:
        raise ModelError(f"{engine.name} cannot run a plain forward: {first_line(error).rstrip('.')}.") from error
    found = engine.stock_logits(ids)[0]
    off = (found - expected).std(1) / expected.std(1).clamp(min=1e-6)
    return float(off.median())


def _why_not(model: PreTrainedModel) -> str | None:
    reason = why_not_native(model)
    if reason is None:
        try:
            library()
        except ModelError as error:
            return str(error).rstrip(".")
    return reason


def _without_data(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the meta device: its configs and names, without weights."""
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.eval()
