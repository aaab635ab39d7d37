"""``load``: builds a generator from a target, a drafter and a policy. Names become objects only here."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.compose.arguments import (
    BUNDLED_DRAFTS as BUNDLED_DRAFTS,
    AnyDrafter,
    Target,
    as_spec,
    as_target,
    checked,
    in_parts,
    names_draft,
)
from foredraft.compose.drafters import DrafterBuilder
from foredraft.compose.spec import Spec
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError, ModelError, OptionError
from foredraft.core.io import CALIBRATION, stored_acceptance_length, stored_calibration
from foredraft.core.openmp import release_threads
from foredraft.core.sampling.params import check_count, check_known
from foredraft.core.verify import RULES, check_legal
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator, Kind
from foredraft.engine.parallel import ParallelEngine, Ranks, initialised
from foredraft.engine.policy import NEUTRAL, Constant, Policy, policy_for
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM, acquire
from foredraft.model.hf.hub import ACCESS
from foredraft.model.kv.cache import BUCKET, SlotCache
from foredraft.model.loading.load import Loaded, as_loaded, load_model, resolve
from foredraft.model.loading.quantised import check_kv_cache_dtype, with_weights
from foredraft.model.memory import available_bytes, format_bytes, trim_heap
from foredraft.model.native.model import NativeLM
from foredraft.model.recording.replay import Replay, replay_on

_log = logging.getLogger(__name__)

_KV_SHARE = 0.8
"""Share of the free memory after loading that KV caches may take; activations and masks need some, too."""


@checked
def load(
    target: Any = "sample",
    drafter: AnyDrafter = "auto",
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    weights: str | None = None,
    kv_cache_dtype: str | None = None,
    verifier: str | None = None,
    policy: Policy | None = None,
    max_batch_size: int = 32,
    exact: bool = False,
    fast: bool = True,
    compile: bool = False,
    cuda_graphs: bool = False,
    kv_cache_memory_bytes: int | None = None,
    max_prefill_tokens: int | None = None,
    prefix_cache: bool = False,
    tensor_parallel: int = 1,
    model_options: Mapping[str, Any] | None = None,
    draft_options: Mapping[str, Any] | None = None,
) -> Generator:
    """Load a target and a drafter.

    Args:
        target: a folder, a hub name, "sample" for the bundled model, a loaded transformers model (compiled and PEFT
            models too), or another generator, to share its target.
        drafter: "none" or None for plain decoding, a spec such as "prompt_lookup" or
            "draft_model:PATH,num_assistant_tokens=5", the path of a head, a draft model or a file written by
            ``foredraft tune``, a ``Drafter``, a loaded draft model, also with options as in
            ("sequoia,acceptance=0.6/0.2", model), or "auto": the bundled EAGLE-3 head for the bundled model, prompt
            lookup for any other.
        tokenizer: a tokenizer or its folder, for a loaded model; by default the model's own.
        dtype: such as "bfloat16" or ``torch.bfloat16``; by default float32 on a CPU, elsewhere the weights' own.
        device: such as "cuda"; by default a GPU if there is one. A loaded model stays where it is.
        weights: "int4" or "int8" quantises target and draft models for the native CPU engine, "auto" is "int8" for
            models that it can run; by default, weights stay as they are. See docs/native.md.
        kv_cache_dtype: of keys and values on the native engine: "float16" (the default) or "int8".
        verifier: the verification rule; by default a draft must equal the token that the target draws.
        policy: decides how much to draft; by default set by the drafter's options.
        max_batch_size: the most requests that run at once; the others wait.
        exact: run every forward with the same number of nodes, so that speculation cannot flip near-ties.
        fast: on a CPU, pack the weights of linear layers, unless ``compile``.
        compile: run forwards, also of drafts, and on GPUs verification by ``torch.compile``; a new shape takes seconds.
        cuda_graphs: capture the same as CUDA graphs, one for each shape. The model's weights must stay where they are.
        kv_cache_memory_bytes: the most memory for the KV caches of target and draft models together; by default 0.8 of
            the memory that is free after loading. A request that does not fit alone is refused.
        max_prefill_tokens: the most prompt tokens read between two steps of other requests. Ignored if ``exact``.
        prefix_cache: keep prompts in the KV cache, so that what begins alike is not read twice. Ignored if ``exact``.
        tensor_parallel: processes, started by ``torchrun``, that share the target's weights. Rank 0 runs the program;
            on the others this call never returns: it follows rank 0 and exits when that has closed its generators.
        model_options: for the target's ``from_pretrained`` (quantization_config, revision), if it is loaded here.
        draft_options: the same for draft models. By default they take the target's dtype and device, and the
            ``token``, ``cache_dir`` and ``local_files_only`` of ``model_options``.

    Raises:
        UsageError: an argument is invalid; the message says why and what to do.
    """
    return _loader(locals()).build([drafter], policy)[0]


@checked
def load_many(
    target: Any,
    drafters: Sequence[AnyDrafter],
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    weights: str | None = None,
    kv_cache_dtype: str | None = None,
    verifier: str | None = None,
    max_batch_size: int = 32,
    exact: bool = False,
    fast: bool = True,
    compile: bool = False,
    cuda_graphs: bool = False,
    kv_cache_memory_bytes: int | None = None,
    max_prefill_tokens: int | None = None,
    prefix_cache: bool = False,
    tensor_parallel: int = 1,
    model_options: Mapping[str, Any] | None = None,
    draft_options: Mapping[str, Any] | None = None,
) -> list[Generator]:
    """``load`` for several drafters that share one target in memory; arguments and errors as in ``load``.

    Returns:
        one generator for each drafter, in order. The target is held until the last of them is closed.
    """
    return _loader(locals()).build(drafters, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loader:
    """The arguments of ``load``, the target's normalised, and the loading itself."""

    target: Target
    weights: str | None
    kv_cache_dtype: str | None
    verifier: str | None
    max_batch_size: int
    exact: bool
    fast: bool
    compile: bool
    cuda_graphs: bool
    kv_cache_memory_bytes: int | None
    max_prefill_tokens: int | None
    prefix_cache: bool
    draft_options: Mapping[str, Any] | None

    @property
    def _packed(self) -> bool:
        return self.fast and not self.compile

    def build(self, drafters: Sequence[AnyDrafter], policy: Policy | None) -> list[Generator]:
        """Build a generator for each drafter, or none if one of them fails."""
        for name in ("max_batch_size", "kv_cache_memory_bytes", "max_prefill_tokens"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        check_kv_cache_dtype(self.kv_cache_dtype)
        if not drafters:
            raise OptionError("Name at least one drafter; the drafter none is plain decoding.")
        specs = [as_spec(self.target.source, drafter) for drafter in drafters]
        if self.draft_options and not any(names_draft(spec) for spec in specs):
            raise OptionError("draft_options apply only to a draft model loaded by its name: leave them out.")
        kinds = [_kind(spec, self.verifier) for spec in specs]
        before = initialised()
        loaded = _load(self.target, self.weights)
        models = [self._target(loaded)]
        if loaded.file is not None:  # it was read
            loaded = replace(loaded, file=None)
            trim_heap()
        ranks = self._ranks(models[0], before)
        try:
            built = [
                self._generator(spec, kind, loaded, models, policy, ranks and (ranks, place))
                for place, (spec, kind) in enumerate(zip(specs, kinds, strict=True))
            ]
            if ranks is not None:
                ranks.run(built)
            return built
        finally:  # the generators hold what they need; on an error all models are released
            for model in models:
                model.release()

    def _ranks(self, target: TargetModel, initialised_before: bool) -> Ranks | None:
        """The processes of a tensor-parallel target; None if there is one."""
        if target.ranks == 1:
            return None
        if isinstance(self.target.source, TargetModel):
            raise ModelError("A tensor-parallel target is loaded once, with all of its drafters: use load_many.")
        return Ranks(initialised_before=initialised_before)

    def _target(self, loaded: Loaded) -> TargetModel:
        """The target, with one more holder."""
        source, kept = self.target.source, self.kv_cache_dtype
        if isinstance(source, TargetModel):
            source.check_ready()
            if kept not in (None, source.kv_cache_dtype):
                raise OptionError("The model is loaded already, and so is its KV cache: leave kv_cache_dtype out.")
            source.retain()
            return source
        weights = loaded.weights or self.weights
        if self.weights not in (None, "auto", weights):
            raise OptionError(f"The folder holds weights in {loaded.weights}: leave weights out.")
        owned = isinstance(source, str)
        if weights is not None and (loaded.file is not None or loaded.model.device.type == "cpu"):
            made = with_weights(loaded.model, weights, owned=owned, file=loaded.file, kv_cache_dtype=kept)
        else:
            made = acquire(loaded.model, fast=self._packed, owned=owned)
        if kept not in (None, made.kv_cache_dtype):
            made.release()
            raise ModelError(
                "kv_cache_dtype is for the native engine, and this model runs on transformers: leave it out, or choose "
                "weights int4 or int8."
            )
        return made

    def _generator(
        self,
        spec: Spec | Drafter,
        kind: Kind,
        loaded: Loaded,
        models: list[TargetModel],
        policy: Policy | None,
        shared_by: tuple[Ranks, int] | None,
    ) -> Generator:
        """Build one generator; newly loaded models are appended to ``models``, whose first entry is the target."""
        shared = models[0]
        own, cache = [shared], shared.new_cache()
        try:
            replay = replay_on(shared.device, compile=self.compile, cuda_graphs=self.cuda_graphs)
            drafter = self._drafter(spec, loaded, own, cache, replay)
        finally:
            models += own[1:]
        if drafter.needs.hidden_layers:
            shared.tap(drafter.needs.hidden_layers)
        policy = policy or _policy(spec, drafter)
        options: dict[str, Any] = {
            "rule": self.verifier,
            "max_rows": self.max_batch_size,
            "exact_nodes": 1 + drafter.needs.max_nodes if self.exact else 0,
            "cache": cache,
            "max_slots": self._max_slots(own, shared_by and shared_by[0]),
            "max_prefill_tokens": self.max_prefill_tokens,
            "prefix_cache": self.prefix_cache,
            "tokenizer": loaded.tokenizer,
            "replay": replay,
        }
        if shared_by is None:
            engine = Engine(shared, drafter, policy, **options)
        else:
            engine = ParallelEngine(shared, drafter, policy, ranks=shared_by[0], place=shared_by[1], **options)
        generator = Generator(engine, loaded.tokenizer, loaded.eos_token_ids, kind, own)
        # as text: a handler that keeps its records must not keep the generator
        _log.info("Loaded %s, %d rows at most.", repr(generator), self.max_batch_size)
        release_threads()  # steps may run in another thread
        return generator

    def _drafter(
        self, spec: Spec | Drafter, loaded: Loaded, models: list[TargetModel], cache: SlotCache, replay: Replay
    ) -> Drafter:
        """Build the drafter of a spec; newly loaded models are appended to ``models``."""
        shared = {key: value for key, value in (self.target.options or {}).items() if key in ACCESS}
        options = {**shared, **(self.draft_options or {})}
        given = spec.model if isinstance(spec, Spec) else None
        draws = self.verifier is not None and RULES[self.verifier].draws
        source, tokenizer = self.target.source, loaded.tokenizer
        builder = DrafterBuilder(source, tokenizer, models, self._packed, options, replay, draws, given)
        drafter = builder.build(spec, models[0], cache).drafter if isinstance(spec, Spec) else spec
        if self.verifier is not None and drafter.needs.law is not None:  # a law that its options do not determine
            check_legal(self.verifier, drafter.needs.law)
        return drafter

    def _max_slots(self, models: Sequence[TargetModel], ranks: Ranks | None) -> int | None:
        """How many tokens fit into the caches of these models; None if unknown."""
        size = self.kv_cache_memory_bytes
        if size is None:
            free = available_bytes(models[0].device)
            if ranks is not None:  # it differs between processes, and on a CPU all of them share it
                free = ranks.least(free)
                free = free and free // (models[0].ranks if models[0].device.type == "cpu" else 1)
            if free is None:
                return None
            size = int(_KV_SHARE * free)
        token_bytes = sum(model.token_bytes for model in models)
        if size // token_bytes < BUCKET:
            raise ModelError(
                f"The KV cache has {format_bytes(size)}, and a token takes {format_bytes(token_bytes)}: not enough for "
                f"{BUCKET} tokens. Raise kv_cache_memory_bytes, or use smaller models or another device."
            )
        return size // token_bytes


def _loader(given: Mapping[str, Any]) -> _Loader:
    """The loader for the arguments of ``load`` or ``load_many``, by name.

    The caller keeps ``target`` bound: if it is the only reference to a generator, it holds the models until ``build``
    does.
    """
    options = in_parts(given["model_options"], given["tensor_parallel"])
    target = as_target(given["target"], given["tokenizer"], given["dtype"], given["device"], options, given["weights"])
    others = {each.name: given[each.name] for each in fields(_Loader) if each.name != "target"}
    return _Loader(target=target, **others)


def _kind(spec: Spec | Drafter, verifier: str | None) -> Kind:
    """The method's name, and whether the rule keeps the target's law, after a check that it exists and is legal."""
    if verifier is not None:
        check_known("verifier", {verifier: None}, list(RULES))
        if isinstance(spec, Spec):
            check_legal(verifier, spec.drafting.law)
    lossless = verifier is None or RULES[verifier].lossless
    return Kind(spec.name if isinstance(spec, Spec) else spec.__class__.__name__, lossless)


def _load(target: Target, weights: str | None) -> Loaded:
    source, tokenizer, dtype, device, options = target
    if isinstance(source, str):
        given = {"dtype": dtype, "device": device, "options": options, "weights": weights, "tokenizer": tokenizer}
        return load_model(source, native=True, **given)
    return as_loaded(source.model if isinstance(source, (CausalLM, NativeLM)) else source, tokenizer)


def _policy(spec: Spec | Drafter, drafter: Drafter) -> Policy:
    """The policy of the method's options; for a ``Drafter`` object, always its longest draft."""
    if isinstance(spec, Spec):
        folder = None if spec.path is None else resolve(spec.path)
        length = None if folder is None else stored_acceptance_length(folder)
        prior = NEUTRAL if length is None else 1 - 1 / length  # assuming a constant acceptance rate
        made = policy_for(spec.drafting, drafter.needs, off_from=spec.off_from, prior=prior)
        if folder is not None:
            _restore(made, stored_calibration(folder, spec.name), f"{folder}/{CALIBRATION}", "delete it")
        _restore(made, spec.learned or {}, "The tuned file", "run foredraft tune again")
        return made
    if spec.needs.max_nodes < 1:
        raise DrafterError(f"{spec.__class__.__name__}.needs.max_nodes is 0: set it to the size of its largest draft.")
    return Constant(drafter.needs.longest)


def _restore(policy: Policy, learned: Mapping[str, Any], file: str, advice: str) -> None:
    """Start a policy from what a file holds."""
    try:
        policy.restore(learned)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DrafterError(f"{file} holds no valid state of a policy; {advice}.") from None


def calibrated_folder(target: Any, drafter: str) -> str | None:
    """The folder of a spec's head or draft model, where its calibration is kept; None if it has no folder.

    Raises:
        OptionError: the spec is not valid.
    """
    spec = as_spec(target, drafter)
    folder = resolve(spec.path) if isinstance(spec, Spec) and spec.path is not None else None
    return folder if folder is not None and Path(folder).is_dir() else None
