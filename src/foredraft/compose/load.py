"""``load``: builds a generator from a target, a drafter and a policy. Names become objects only here."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Unpack

from foredraft.compose.arguments import (
    AnyDrafter,
    as_spec,
    as_target,
    drafting_spec,
    from_keywords,
    names_draft,
    settled,
)
from foredraft.compose.calibration import CALIBRATION, stored_acceptance_length, stored_calibration
from foredraft.compose.drafters import DrafterBuilder
from foredraft.compose.options import LoadKeywords, LoadOptions as LoadOptions
from foredraft.compose.spec import Spec
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError, ModelError, OptionError, shown
from foredraft.core.verify import check_legal, rule_of
from foredraft.drafters.predicted import PredictedOutputs
from foredraft.engine.engine import Engine
from foredraft.engine.generator import DrafterInfo, Generator
from foredraft.engine.parallel import ParallelEngine, Ranks, initialised
from foredraft.engine.policy import NEUTRAL, Constant, Policy, policy_for
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM, acquire
from foredraft.model.hf.generation import default_options
from foredraft.model.hf.hub import ACCESS
from foredraft.model.kv.cache import BUCKET, SlotCache
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.load import Loaded, as_loaded, load_model
from foredraft.model.loading.tokenizers import as_tokenizer, eos_token_ids
from foredraft.model.memory import available_bytes, format_bytes, trim_heap
from foredraft.model.native.model import NativeLM
from foredraft.model.recording.recorder import recorder_on
from foredraft.model.threads import release_threads

_log = logging.getLogger(__name__)

_KV_SHARE = 0.8
"""Share of the free memory after loading that KV caches may take; activations and masks need some, too."""


def load(
    target: Any = "sample",
    drafter: AnyDrafter = "auto",
    *,
    policy: Policy | None = None,
    **options: Unpack[LoadKeywords],
) -> Generator:
    """Load a target and a drafter.

    Args:
        target: a folder, a hub name, "sample" for the bundled model, a loaded transformers model (compiled and PEFT
            models too), or another generator, to share its target. What is loaded keeps its dtype and device.
        drafter: "none" or None for plain decoding, a spec such as "prompt_lookup" or
            "draft_model:PATH,num_assistant_tokens=5", the path of a head, a draft model or a file written by
            ``foredraft tune``, a ``Drafter``, a loaded draft model, also with options as in
            ("sequoia,acceptance=0.6/0.2", model), or "auto": look-ups beside the bundled EAGLE-3 head (``hybrid``) for
            targets that have one, prompt lookup for any other.
        policy: decides how much to draft; by default set by the drafter's options.
        options: the fields of ``foredraft.LoadOptions``, which has their defaults and meanings.

    With ``tensor_parallel``, rank 0 runs the program; on the other ranks this call never returns: it follows rank 0 and
    exits when that has closed its generators.

    Raises:
        UsageError: an argument is invalid; the message says why and what to do.
    """
    given = from_keywords(LoadOptions, "load", ("target", "drafter", "policy"), options)
    if not isinstance(policy, (Policy, type(None))):
        raise OptionError(
            f"policy must be an object of a class derived from Policy, not {shown(policy)}: to set a schedule, "
            "give the drafter num_assistant_tokens_schedule."
        )
    return build_generators(target, [drafter], given, policy)[0]


def load_many(target: Any, drafters: Sequence[AnyDrafter], **options: Unpack[LoadKeywords]) -> list[Generator]:
    """``load`` for several drafters that share one target in memory.

    Args:
        target, drafters, options: as in ``load``.

    Returns:
        one generator for each drafter, in order. The target is held until the last of them is closed.

    Raises:
        UsageError: as in ``load``.
    """
    given = from_keywords(LoadOptions, "load", ("target", "drafters"), options)
    return build_generators(target, drafters, given)


def build_generators(
    target: Any, drafters: Sequence[AnyDrafter], options: LoadOptions, policy: Policy | None = None
) -> list[Generator]:
    """``load_many`` with a ``LoadOptions``.

    The caller keeps ``target`` bound: if it is the only reference to a generator, it holds the models until the new
    generators do.
    """
    return _Loader(*as_target(target, options)).build(drafters, policy)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads a target, as ``as_target`` has normalised it, with drafters."""

    source: Any
    options: LoadOptions

    @property
    def _packed(self) -> bool:
        return self.options.fast and not self.options.compile

    def build(self, drafters: Sequence[AnyDrafter], policy: Policy | None) -> list[Generator]:
        """Build a generator for each drafter, or none if one of them fails."""
        if not drafters:
            raise OptionError("Name at least one drafter; the drafter none is plain decoding.")
        specs = [as_spec(self.source, drafter) for drafter in drafters]
        if self.options.draft_options and not any(names_draft(spec) for spec in specs):
            raise OptionError("draft_options apply only to a draft model loaded by its name: leave them out.")
        for spec in specs:
            _kind(spec, self.options.verifier)  # which refuses some
        before = initialised()
        loaded = _load(self.source, self.options)
        models = [self._target(loaded)]
        if loaded.file is not None:  # it was read
            loaded = replace(loaded, file=None)
            trim_heap()
        try:
            specs = [settled(self.source, models[0], *pair) for pair in zip(drafters, specs, strict=True)]
            kinds = [_kind(spec, self.options.verifier) for spec in specs]
            ranks = self._ranks(models[0], before)
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
        if isinstance(self.source, TargetModel):
            raise ModelError("A tensor-parallel target is loaded once, with all of its drafters: use load_many.")
        return Ranks(initialised_before=initialised_before)

    def _target(self, loaded: Loaded) -> TargetModel:
        """The target, with one more holder."""
        source, kept = self.source, self.options.kv_cache_dtype
        if isinstance(source, TargetModel):
            source.check_ready()
            if kept not in (None, source.kv_cache_dtype):
                raise OptionError("The model is loaded already, and so is its KV cache: leave kv_cache_dtype out.")
            source.retain()
            return source
        wanted, owned = self.options.weights, isinstance(source, str)
        if loaded.weights is not None and wanted not in (None, "auto", loaded.weights):
            raise OptionError(f"The folder holds weights in {loaded.weights}: leave weights out.")
        if (weights := loaded.quantised_to(wanted)) is not None:
            target = loaded.with_weights(weights, owned=owned, kv_cache_dtype=kept)
        else:
            target = acquire(loaded.model, fast=self._packed, owned=owned)
        self._limit(target)
        if kept not in (None, target.kv_cache_dtype):
            target.release()
            raise ModelError(
                "kv_cache_dtype is for the native engine, and this model runs on transformers: leave it out, or choose "
                "weights int4 or int8."
            )
        return target

    def _limit(self, target: TargetModel) -> None:
        """Keep the target's context to ``max_model_len``."""
        most, length = self.options.max_model_len, target.max_length
        if most is not None and most > length:
            target.release()
            raise OptionError(f"max_model_len is {most}; the model's context is {length} tokens.")
        target.max_length = most or length

    def _generator(
        self,
        spec: Spec | Drafter,
        kind: DrafterInfo,
        loaded: Loaded,
        models: list[TargetModel],
        policy: Policy | None,
        shared_by: tuple[Ranks, int] | None,
    ) -> Generator:
        """Build one generator; newly loaded models are appended to ``models``, whose first entry is the target."""
        shared = models[0]
        own, cache = [shared], shared.new_cache()
        try:
            recorder = recorder_on(shared.device, compile=self.options.compile, cuda_graphs=self.options.cuda_graphs)
            drafter = self._drafter(spec, loaded, own, cache)
        finally:
            models += own[1:]
        if drafter.needs.hidden_layers:
            shared.tap(drafter.needs.hidden_layers)
        policy = policy or _policy(spec, drafter, shared)
        options: dict[str, Any] = {
            "wrap": PredictedOutputs,
            "rule": self.options.verifier,
            "max_rows": self.options.max_batch_size,
            "exact_nodes": 1 + drafter.needs.max_nodes if self.options.exact else 0,
            "cache": cache,
            "max_slots": self._max_slots(own, shared_by and shared_by[0]),
            "max_prefill_tokens": self.options.max_prefill_tokens,
            "models": own,
            "prefix_cache": self.options.prefix_cache,
            "tokenizer": loaded.tokenizer,
            "recorder": recorder,
        }
        if shared_by is None:
            engine = Engine(shared, drafter, policy, **options)
        else:
            engine = ParallelEngine(shared, drafter, policy, ranks=shared_by[0], place=shared_by[1], **options)
        generator = Generator(engine, loaded.tokenizer, loaded.eos_token_ids, kind, own, self._defaults(loaded))
        # as text: a handler that keeps its records must not keep the generator
        _log.info("Loaded %s, %d rows at most.", repr(generator), self.options.max_batch_size)
        release_threads()  # steps may run in another thread
        return generator

    def _defaults(self, loaded: Loaded) -> dict[str, Any]:
        """Options that requests have unless they say otherwise."""
        if self.options.generation_config == "none":
            return {}
        outline = loaded.outline
        name = outline.config.name_or_path or outline.name
        found = default_options(outline.generation_config, name)
        if found:
            _log.info("Defaults of requests, by the generation config of %s: %s.", name, found)
        return found

    def _drafter(self, spec: Spec | Drafter, loaded: Loaded, models: list[TargetModel], cache: SlotCache) -> Drafter:
        """Build the drafter of a spec; newly loaded models are appended to ``models``."""
        shared = {key: value for key, value in (self.options.model_options or {}).items() if key in ACCESS}
        options = {**shared, **(self.options.draft_options or {})}
        given = spec.model if isinstance(spec, Spec) else None
        verifier = self.options.verifier
        draws = verifier is not None and rule_of(verifier).draws
        tokenizer = loaded.tokenizer
        builder = DrafterBuilder(tokenizer, models, self._packed, options, draws, given)
        drafter = builder.build(spec, models[0], cache).drafter if isinstance(spec, Spec) else spec
        if verifier is not None and drafter.needs.law is not None:  # a law that its options do not determine
            check_legal(verifier, drafter.needs.law)
        return drafter

    def _max_slots(self, models: Sequence[TargetModel], ranks: Ranks | None) -> int | None:
        """How many tokens fit into the caches of these models; None if unknown."""
        size = self.options.kv_cache_memory_bytes
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


def _kind(spec: Spec | Drafter, verifier: str | None) -> DrafterInfo:
    """The method's name, and whether the rule keeps the target's law, after a check that it exists and is legal."""
    lossless = verifier is None or rule_of(verifier).lossless
    if verifier is not None and isinstance(spec, Spec):
        check_legal(verifier, spec.drafting.options.law)
    return DrafterInfo(spec.name if isinstance(spec, Spec) else spec.__class__.__name__, lossless)


def _load(source: Any, options: LoadOptions) -> Loaded:
    if isinstance(source, str):
        return load_model(
            source,
            dtype=options.dtype,
            device=options.device,
            options=options.model_options,
            weights=options.weights,
            tokenizer=options.tokenizer,
            native=True,
        )
    if isinstance(source, NativeLM):
        own = as_tokenizer(options.tokenizer)
        return Loaded(source.outline, own, eos_token_ids(source.outline, own))
    return as_loaded(source.model if isinstance(source, CausalLM) else source, options.tokenizer)


def _policy(spec: Spec | Drafter, drafter: Drafter, target: TargetModel) -> Policy:
    """The policy of the method's options; for a ``Drafter`` object, always its longest draft."""
    if isinstance(spec, Spec):
        inner = drafting_spec(target, spec)
        folder = None if inner.path is None else resolve(inner.path)
        length = None if folder is None else stored_acceptance_length(folder)
        prior = NEUTRAL if length is None else 1 - 1 / length  # assuming a constant acceptance rate
        policy = policy_for(
            inner.options, drafter.needs, off_from=spec.off_from, prior=prior, any_width=target.any_width
        )
        if folder is not None:
            learned = stored_calibration(folder, spec.name) or stored_calibration(folder, inner.name)
            _restore(policy, learned, f"{folder}/{CALIBRATION}", "delete it")
        _restore(policy, spec.learned or {}, "The tuned file", "run foredraft tune again")
        return policy
    if spec.needs.max_nodes < 1:
        raise DrafterError(f"{spec.__class__.__name__}.needs.max_nodes is 0: set it to the size of its largest draft.")
    return Constant(drafter.needs.longest)


def _restore(policy: Policy, learned: Mapping[str, Any], file: str, advice: str) -> None:
    """Start a policy from what a file holds."""
    try:
        policy.restore(learned)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DrafterError(f"{file} holds no valid state of a policy; {advice}.") from None
