"""Converts transformers' generation options to ``SamplingParams``, or refuses them with the reason; its outputs."""

import logging
from collections.abc import Container, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils.generic import ModelOutput

from foredraft.core.errors import OptionError, PromptError, kind_of
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.hf_types import PreTrainedModel

_log = logging.getLogger(__name__)

_BEAMS = "use load(model).beam_search for beam search"
_ASSISTED = "drafting options belong to the drafter, as in prompt_lookup,prompt_lookup_num_tokens=8"
_CACHE = "foredraft uses its own KV cache"
_OUTPUTS = "only the sequences are returned"
_METHOD = "foredraft decodes greedily or by sampling"

_CHANGES_OUTPUT: dict[str, tuple[object, str]] = {
    "num_beams": (1, _BEAMS),
    "num_beam_groups": (1, _BEAMS),
    "diversity_penalty": (0, _BEAMS),
    "constraints": (None, _BEAMS),
    "force_words_ids": (None, _BEAMS),
    "penalty_alpha": (0, _METHOD),
    "dola_layers": (None, _METHOD),
    "guidance_scale": (1, "classifier-free guidance runs the model between two steps"),
    "token_healing": (False, "foredraft does not change the prompt"),
    "use_cache": (True, _CACHE),
    "is_assistant": (False, _ASSISTED),
    "use_mtp": (False, _ASSISTED),
    "assistant_early_exit": (None, _ASSISTED),
    "assistant_ensemble_weight": (None, _ASSISTED),
    "prompt_lookup_num_tokens": (None, _ASSISTED),
    "speculation_type": (None, _ASSISTED),
    "output_scores": (False, _OUTPUTS),
    "output_logits": (False, _OUTPUTS),
    "output_attentions": (False, _OUTPUTS),
    "output_hidden_states": (False, _OUTPUTS),
}
"""By name: the neutral value, and why other values are refused."""

_CHANGES_COST: dict[str, tuple[object, str]] = {
    "cache_implementation": ("dynamic", _CACHE),
    "cache_config": (None, _CACHE),
    "max_cache_len": (None, _CACHE),
    "prefill_chunk_size": (None, "foredraft chooses its own prefill chunks"),
    "compile_config": (None, "foredraft does not compile the model"),
    "num_assistant_tokens": (20, _ASSISTED),
    "num_assistant_tokens_schedule": ("constant", _ASSISTED),
    "assistant_confidence_threshold": (0.4, _ASSISTED),
    "max_matching_ngram_size": (None, _ASSISTED),
    "assistant_lookbehind": (10, _ASSISTED),
    "target_lookbehind": (10, _ASSISTED),
}
"""Likewise, for options that do not change the output. The values in the model's own generation config are allowed."""

_ONLY_PARAMS: dict[str, tuple[object, str]] = {
    "max_length": (None, "it counts the prompt; pass max_new_tokens instead"),
    "min_length": (0, "it counts the prompt; pass min_new_tokens instead"),
    "max_time": (None, "close the stream when the time is over"),
    "num_return_sequences": (1, "pass it to generate as a separate argument"),
    "encoder_repetition_penalty": (1, "there is no encoder"),
    "encoder_no_repeat_ngram_size": (0, "there is no encoder"),
}
_SAME = (
    *("max_new_tokens", "min_new_tokens", "stop_strings", "eos_token_id", "bad_words_ids"),
    *("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "no_repeat_ngram_size"),
)
_OFF = {"top_k": 0, "epsilon_cutoff": 0, "eta_cutoff": 0}  # transformers' equivalents of None
_IGNORED = {
    *("do_sample", "temperature", "suppress_tokens"),  # read separately
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "return_dict_in_generate"),
    *("early_stopping", "length_penalty", "low_memory", "disable_compile", "renormalize_logits"),
}
_CACHES = ("cache", "past_key_values")
"""Names of the cache: from transformers 5.24 on, and before."""
_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *_CACHES}
_DROPPED = {
    "streamer": "pass it to spec.generate(model, streamer=...) or to speculative(streamer=...)",
    "assistant_model": "pass it to speculative as the drafter",
    "assistant_tokenizer": "name the assistant in the drafter, as in universal:PATH",
    "synced_gpus": "processes that share a model would have to accept the same tokens",
    "custom_generate": "spec.generate is one already",
    **dict.fromkeys(_CACHES, _CACHE),
}
"""Arguments that ``generate`` does not pass to a ``custom_generate``: what to do instead, or why they are refused."""

NO_TOKENIZER = (
    "stop_strings need the model's tokenizer, which transformers does not pass to a custom_generate: pass it to "
    "speculative(tokenizer=...) or to spec.generate(tokenizer=...)."
)


_NO_DEFAULTS = {
    *_CHANGES_COST,
    *("use_cache", "is_assistant", "use_mtp", "assistant_early_exit", "prompt_lookup_num_tokens", "speculation_type"),
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "num_return_sequences"),
    *("max_length", "remove_invalid_values", "eos_token_id"),
}
"""What a model's own configuration may say without any effect on a request's text; its ends are read elsewhere."""


def default_options(config: GenerationConfig | None, name: str) -> dict[str, Any]:
    """Options of ``SamplingParams`` that a model's own ``GenerationConfig`` sets: the defaults of requests.

    As in transformers, ``temperature`` counts if ``do_sample`` is set; ``max_length``, which counts the prompt, does
    not. What changes texts and is not supported is left out, with a warning.

    Args:
        name: of the model, for messages.

    Raises:
        OptionError: a value is not valid.
    """
    given = {} if config is None else _given(config, _NO_DEFAULTS)
    known = vars(GenerationConfig())
    if refused := [each for each in _refused(given) if each in known]:
        _log.warning(
            "The generation config of %s has %s, which foredraft does not support: left out.", name, ", ".join(refused)
        )
    found = _options(given)
    if not given.get("do_sample"):
        del found["temperature"]
    try:
        SamplingParams.from_options(found)
    except OptionError as error:
        raise OptionError(
            f"The generation config of {name!r}: {error} generation_config='none' leaves it out."
        ) from None
    return found


def sampling_params(config: GenerationConfig, overridden: Container[str] = ()) -> SamplingParams:
    """Convert a ``GenerationConfig``. Unset options have the defaults of ``SamplingParams``, ``top_k`` included.

    Args:
        overridden: names of options that the caller passes separately; they are not read.

    Raises:
        OptionError: an option is set that ``SamplingParams`` does not support.
    """
    given = _given(config, overridden)
    for name, reason in _refused(given).items():
        raise OptionError(f"The GenerationConfig has {name}={given[name]!r}: {reason}.")
    return SamplingParams.from_options(_options(given))


def _given(config: GenerationConfig, left_out: Container[str]) -> dict[str, Any]:
    """The options that a configuration sets, but for these."""
    given = {name: value for name, value in config.to_dict().items() if value is not None and name not in left_out}
    given = {name: value for name, value in given.items() if not name.startswith("_")}  # internal to transformers
    for newer, older in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        if newer in given or newer in left_out:
            given.pop(older, None)  # as in transformers
    return given


def _refused(given: Mapping[str, Any]) -> dict[str, str]:
    """Those of the options that ``SamplingParams`` does not have, and why."""
    known, found = {**_CHANGES_OUTPUT, **_CHANGES_COST, **_ONLY_PARAMS}, {}
    for name, value in given.items():
        neutral, reason = known.get(name, (False, "foredraft has no such option"))
        if name not in _SAME and name not in _IGNORED and value is not False and value != neutral:
            found[name] = reason
    return found


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``SamplingParams``."""
    options = {name: given[name] for name in _SAME if name in given and given[name] != _OFF.get(name)}
    if "suppress_tokens" in given:
        options["logit_bias"] = dict.fromkeys(given["suppress_tokens"], float("-inf"))
    options["temperature"] = given.get("temperature", 1.0) if given.get("do_sample") else 0.0
    return options


def check_config(config: GenerationConfig, own: GenerationConfig) -> None:
    """Check the config of a ``generate`` call.

    Args:
        config: as ``generate`` has prepared it.
        own: the model's generation config.

    Raises:
        OptionError: an option is set that speculative decoding would ignore.
    """
    for name, (neutral, reason) in _CHANGES_OUTPUT.items():
        _check(name, getattr(config, name, None), (None, neutral), reason)
    for name, (neutral, reason) in _CHANGES_COST.items():
        _check(name, getattr(config, name, None), (None, neutral, getattr(own, name, None)), reason)


def check_inputs(model: PreTrainedModel, input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    """Check the model inputs of a ``generate`` call.

    Args:
        model: its ``prepare_inputs_for_generation`` is not called.
        input_ids: [B, T].
        inputs: the other arguments that ``generate`` has prepared for the forward.

    Raises:
        OptionError: an input that the decoding loop would not pass to the model.
    """
    if "prepare_inputs_for_generation" in vars(model):
        raise OptionError(
            "The prepare_inputs_for_generation of this model was replaced (as PEFT does for learned prompts), "
            "which is not available while drafting."
        )
    for name, value in inputs.items():
        if name not in _INPUTS and value is not None and value is not False:
            raise OptionError(f"{name} is not available while drafting: foredraft runs the model on token ids only.")
    for name in _CACHES:
        cache = inputs.get(name)
        if cache is not None and (cache.get_seq_length() > 0 or vars(cache).get("_is_user_defined", False)):
            raise OptionError(f"{name} is not available while drafting: {_CACHE}.")
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and not bool((mask[:, -1] != 0).all()):
        row = int((mask[:, -1] == 0).int().argmax())
        raise OptionError(
            f"The attention mask leaves out the last token of row {row}: pad on the left, and give each row a token."
        )
    if positions is None or positions.ndim != 2:
        return
    seen = input_ids.new_ones(1, input_ids.shape[1]) if mask is None else mask
    if not bool(((positions == seen.cumsum(-1) - 1) | (seen == 0)).all()):
        raise OptionError("position_ids are not available while drafting: positions are counted from the first token.")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a ``generate`` call.

    Raises:
        PromptError: the inputs are not a tensor.
        OptionError: an argument that ``generate`` does not pass to a ``custom_generate``.
    """
    for name in ("inputs", "input_ids"):
        if not isinstance(given := arguments.get(name), (Tensor, type(None))):
            raise PromptError(
                f"inputs must be a tensor of token ids [B, T], not {kind_of(given)}; "
                "foredraft.load(model, tokenizer=...).generate takes text."
            )
    for name, reason in _DROPPED.items():
        if arguments.get(name) not in (None, False):
            raise OptionError(f"transformers' generate does not pass {name} to a custom_generate: {reason}.")


def dropped_arguments(caller: FrameType | None) -> Mapping[str, Any]:
    """Arguments of the ``generate`` call in this frame that it does not pass on, read from the frame's locals."""
    if caller is None or caller.f_globals.get("__name__") != "transformers.generation.utils":
        return {}
    return {name: caller.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}


def configured_stop_strings(arguments: Mapping[str, Any], model: PreTrainedModel) -> list[str] | str | None:
    """Stop strings of the ``GenerationConfig`` in these arguments, else of the model's."""
    for config in (arguments.get("generation_config"), model.generation_config):
        if isinstance(config, GenerationConfig) and config.stop_strings:
            return config.stop_strings
    return None


def pad_of(config: GenerationConfig) -> int:
    """What follows the end of a row, as ``generate`` has prepared it: without a padding token an end-of-sequence id."""
    prepared: Any = getattr(config, "_pad_token_tensor", None)
    return 0 if prepared is None else int(prepared)


def as_generate_output(
    prompts: Tensor, outputs: Sequence[Sequence[int]], pad: int, as_dict: bool
) -> Tensor | ModelOutput:
    """The prompts [B, T] followed by their outputs, padded on the right, as ``generate`` returns them."""
    width = max(len(output) for output in outputs)
    tail = torch.full((len(outputs), width), pad, dtype=prompts.dtype, device=prompts.device)
    for row, output in enumerate(outputs):
        tail[row, : len(output)] = torch.tensor(list(output), dtype=prompts.dtype)
    sequences: Any = torch.cat([prompts, tail], dim=1)
    if not as_dict:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput  # modelling code, see ``hf_types``

    return GenerateDecoderOnlyOutput(sequences=sequences)


def _check(name: str, value: object, neutral: tuple[object, ...], reason: str) -> None:
    if not any(value is each or value == each for each in neutral):
        shown = f"{name}={value!r}" if isinstance(value, (str, int, float)) else name
        raise OptionError(f"{shown} is not available while drafting: {reason}.")
