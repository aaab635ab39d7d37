"""The options of ``load``: declared, documented and checked here, for every interface. Importable without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from foredraft.core.errors import OptionError, shown
from foredraft.core.options import option
from foredraft.core.sampling.params import as_number, check_count

if TYPE_CHECKING:
    import torch

    Dtype = str | torch.dtype
    Device = str | torch.device
else:  # names, as on the command line, which starts without torch
    Dtype = Device = str

_COUNTS = ("max_batch_size", "kv_cache_memory_bytes", "max_model_len", "max_prefill_tokens", "tensor_parallel")
_MAPPINGS = ("model_options", "draft_options")
_KNOWN = {
    "weights": ("int4", "int8", "auto"),
    "kv_cache_dtype": ("float16", "int8"),
    "generation_config": ("auto", "none"),
}
_PYTHON: Mapping[str, Any] = {"flag": False}
"""Metadata of options for Python only: neither flags nor keys of files."""


class SharedKeywords(TypedDict, total=False):
    """The fields of ``SharedOptions`` but ``fast``, as keywords; for type checkers."""

    tokenizer: Any
    verifier: str | None
    max_batch_size: int
    kv_cache_memory_bytes: int | None
    draft_options: Mapping[str, Any] | None


class LoadKeywords(SharedKeywords, total=False):
    """The fields of ``LoadOptions`` as keywords; for type checkers."""

    fast: bool
    dtype: Dtype | None
    device: Device | None
    weights: str | None
    kv_cache_dtype: str | None
    max_model_len: int | None
    tensor_parallel: int
    exact: bool
    compile: bool
    cuda_graphs: bool
    max_prefill_tokens: int | None
    prefix_cache: bool
    generation_config: str
    model_options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """Options for any target, also one that the caller has loaded.

    Raises:
        OptionError: a value is out of range or unknown.
    """

    tokenizer: Any = option(
        None, "a tokenizer or its folder, for a loaded model; by default the model's own.", **_PYTHON
    )
    verifier: str | None = option(
        None,
        "the verification rule, a lossy one with options (typical,epsilon=0.2); by default a draft must equal the "
        "token that the target draws.",
    )
    max_batch_size: int = option(32, "the most requests that run at once; the others wait.")
    fast: bool = option(True, "on a CPU, pack the weights of linear layers, unless compile.", **_PYTHON)
    kv_cache_memory_bytes: int | None = option(
        None,
        "the most memory for the KV caches of target and draft models together; by default 0.8 of what is free after "
        "loading.",
    )
    draft_options: Mapping[str, Any] | None = option(
        None,
        "model_options of draft models. By default they take the target's dtype and device, and the token, cache_dir "
        "and local_files_only of model_options.",
        **_PYTHON,
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if value is None and each.default is None:
                continue
            if name in _COUNTS:
                check_count(name, value)
                object.__setattr__(self, name, as_number(value))
            if name in _KNOWN and value not in _KNOWN[name]:
                raise OptionError(f"Unknown {name} {value!r}. Known: {', '.join(_KNOWN[name])}.")
            if name == "verifier" and not isinstance(value, str):
                raise OptionError(f"verifier must be a rule such as 'block', not {shown(value)}.")
            if isinstance(each.default, bool) and not isinstance(value, bool):
                raise OptionError(f"{name} must be True or False, not {shown(value)}.")
            if name in _MAPPINGS and not isinstance(value, Mapping):
                raise OptionError(f"{name} must be a mapping such as {{'revision': 'v2'}}, not {shown(value)}.")

    def for_loading(self) -> "LoadOptions":
        """These options; what they do not have keeps its default."""
        return LoadOptions(**{each.name: getattr(self, each.name) for each in fields(SharedOptions)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(SharedOptions):
    """How a target and its drafters are loaded and run."""

    dtype: Dtype | None = option(None, "such as bfloat16; by default float32 on a CPU, elsewhere the checkpoint's.")
    device: Device | None = option(None, "such as cuda:1 or cpu; by default a GPU if there is one.")
    weights: str | None = option(
        None,
        "of target and draft models on the native CPU engine: int4, int8, or auto, which is int8 where it runs. By "
        "default, weights stay as they are, those of a quantised GGUF file on the engine. See docs/native.md.",
    )
    kv_cache_dtype: str | None = option(
        None,
        "of keys and values on the native CPU engine: float16 or int8; by default int8 with int4 weights, else "
        "float16.",
    )
    max_model_len: int | None = option(
        None,
        "the most tokens of a prompt and its output together; by default the model's context.",
        names=("--max-model-len", "--ctx-size", "-c"),
    )
    tensor_parallel: int = option(
        1, "processes that share the target's weights; start them with torchrun --nproc-per-node N."
    )
    exact: bool = option(
        False, "run every forward with the same number of nodes, so that drafts cannot flip near-ties."
    )
    compile: bool = option(
        False,
        "run forwards, also of drafts, and on GPUs verification by torch.compile; a new shape takes seconds to "
        "minutes.",
    )
    cuda_graphs: bool = option(
        False, "capture the same as CUDA graphs, one for each shape. The model's weights must stay where they are."
    )
    max_prefill_tokens: int | None = option(
        None, "the most prompt tokens read between two steps of other requests. Ignored with exact."
    )
    prefix_cache: bool = option(
        False,
        "keep prompts in the KV cache, so that what begins alike is not read twice. Ignored with exact.",
        **_PYTHON,
    )
    generation_config: str = option(
        "auto",
        "auto: requests have the temperature, penalties, bans and lengths of the model's generation_config.json "
        "unless they say otherwise; none: only its ends count.",
    )
    model_options: Mapping[str, Any] | None = option(
        None, "for the target's from_pretrained (quantization_config, revision), if it is loaded here.", **_PYTHON
    )
