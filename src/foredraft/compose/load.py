"""The only place where names become objects: a target, a drafter, a policy, put together."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.compose.arguments import (
    BUNDLED_DRAFTS as BUNDLED_DRAFTS,
    AnyDrafter,
    as_spec,
    as_target,
    check_device,
    names_draft,
)
from foredraft.compose.spec import Spec, builder, find
from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter, Rewindable
from foredraft.core.errors import DrafterError, ModelError, OptionError
from foredraft.core.io import stored_acceptance_length
from foredraft.core.sampling.params import check_count, check_known
from foredraft.core.verify import RULES, check_legal
from foredraft.drafters import METHODS
from foredraft.drafters.common.build_context import BuildContext, BuiltDrafter, DraftModelFiles, NestedDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator, Kind
from foredraft.engine.policy import NEUTRAL, Constant, Policy, policy_for
from foredraft.heads.formats import load_head
from foredraft.heads.nets.blocks import fuse
from foredraft.model.cache import BUCKET, SlotCache
from foredraft.model.cpu_linear import PackedWeights, draft_dtype
from foredraft.model.hf import CausalLM, acquire
from foredraft.model.load import Loaded, as_loaded, load_model, resolve
from foredraft.model.memory import available_bytes, format_bytes
from foredraft.model.tokenizer import Tokenizer, check_same_tokenizer

_log = logging.getLogger(__name__)

_KV_SHARE = 0.8
"""Of the memory that is free once all is loaded; activations, masks and heads take some, too."""

_SHARED_OPTIONS = ("token", "cache_dir", "local_files_only")
"""What of a target's ``from_pretrained`` options holds for drafts: who asks, and where files are, not which ones."""


def load(
    target: Any = "sample",
    drafter: AnyDrafter = "auto",
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    verifier: str | None = None,
    policy: Policy | None = None,
    max_batch_size: int = 32,
    exact: bool = False,
    fast: bool = True,
    kv_cache_memory_bytes: int | None = None,
    model_options: Mapping[str, Any] | None = None,
    draft_options: Mapping[str, Any] | None = None,
) -> Generator:
    """Put a target and a drafter together.

    Args:
        target: a folder, a hub name, "sample" for the bundled model, a loaded transformers model (compiled and PEFT
            models too), or another generator, to share its target.
        drafter: "none" or None for plain decoding, a spec such as "prompt_lookup" or
            "draft_model:PATH,num_assistant_tokens=5", the path of a head, a draft model or a file that ``foredraft
            tune`` wrote, a ``Drafter``, a loaded draft model, also with options as in
            ("sequoia,acceptance=0.6/0.2", model), or "auto": the bundled EAGLE-3 head for the bundled model, prompt
            lookup for any other.
        tokenizer: for a loaded model: a tokenizer or where it is; otherwise its own is used.
        dtype: such as "bfloat16" or ``torch.bfloat16``; by default float32 on a CPU, elsewhere what the weights have.
        device: such as "cuda"; by default a GPU if there is one. A loaded model stays on its own.
        verifier: the verification rule; by default the best one for each draft's law.
        policy: decides how much to draft; by default what the drafter's options say.
        max_batch_size: so many texts are generated at once; others wait.
        exact: run every forward with the same number of nodes, so that speculation cannot flip near-ties.
        fast: on a CPU, pack the weights of linear layers.
        kv_cache_memory_bytes: the most that the keys and values of target and draft models may take together; by
            default 0.8 of what is free once all is loaded. A request that does not fit alone is refused.
        model_options: passed on to ``from_pretrained`` for the target (quantization_config, revision, ...), if it is
            loaded here.
        draft_options: the same for draft models. They have the target's dtype and device unless these say otherwise,
            and its ``token``, ``cache_dir`` and ``local_files_only``, but nothing else of ``model_options``.

    Raises:
        UsageError: something that cannot be; the sentence says why and what can.
    """
    # ``target`` stays bound: a generator that nobody else has holds the models until ``make`` does.
    shared = as_target(target, tokenizer, dtype, device, model_options)
    workshop = _Workshop(
        shared.source,
        shared.tokenizer,
        dtype,
        device,
        verifier,
        max_batch_size,
        exact=exact,
        fast=fast,
        kv_bytes=kv_cache_memory_bytes,
        options=model_options,
        draft_options=draft_options,
    )
    return workshop.make([drafter], policy)[0]


def load_many(
    target: Any,
    drafters: Sequence[AnyDrafter],
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    verifier: str | None = None,
    max_batch_size: int = 32,
    exact: bool = False,
    fast: bool = True,
    kv_cache_memory_bytes: int | None = None,
    model_options: Mapping[str, Any] | None = None,
    draft_options: Mapping[str, Any] | None = None,
) -> list[Generator]:
    """``load`` for several drafters on one target, which is in memory once; arguments and errors are those of
    ``load``.

    Returns:
        a generator each, in order. The target is held until the last of them is closed.
    """
    # ``target`` stays bound: a generator that nobody else has holds the models until ``make`` does.
    shared = as_target(target, tokenizer, dtype, device, model_options)
    workshop = _Workshop(
        shared.source,
        shared.tokenizer,
        dtype,
        device,
        verifier,
        max_batch_size,
        exact=exact,
        fast=fast,
        kv_bytes=kv_cache_memory_bytes,
        options=model_options,
        draft_options=draft_options,
    )
    return workshop.make(drafters, None)


@dataclass(frozen=True, slots=True)
class _Workshop:
    """What ``load`` was given, and the work that it does."""

    target: Any
    tokenizer: Any
    dtype: str | torch.dtype | None
    device: str | torch.device | None
    verifier: str | None
    max_batch_size: int
    exact: bool
    fast: bool
    kv_bytes: int | None
    options: Mapping[str, Any] | None
    draft_options: Mapping[str, Any] | None

    def make(self, drafters: Sequence[AnyDrafter], policy: Policy | None) -> list[Generator]:
        """A generator for each drafter; where one of them cannot be, there is none."""
        check_count("max_batch_size", self.max_batch_size)
        if self.kv_bytes is not None:
            check_count("kv_cache_memory_bytes", self.kv_bytes)
        if not drafters:
            raise OptionError("Name at least one drafter; none is plain decoding.")
        specs = [as_spec(self.target, drafter) for drafter in drafters]
        if self.draft_options and not any(names_draft(spec) for spec in specs):
            raise OptionError("draft_options are for a draft model that is loaded by its name: leave them out.")
        kinds = [_kind(spec, _check_verifier(self.verifier, spec)) for spec in specs]
        loaded = _load(self.target, self.tokenizer, self.dtype, self.device, self.options)
        opened = [self._target(loaded)]
        try:
            return [
                self._generator(spec, kind, loaded, opened, policy) for spec, kind in zip(specs, kinds, strict=True)
            ]
        finally:  # the generators hold what they need; where one of them cannot be, nobody does
            for model in opened:
                model.release()

    def _target(self, loaded: Loaded) -> CausalLM:
        """The target, held once more."""
        if isinstance(self.target, CausalLM):
            self.target.check_ready()
            self.target.retain()
            return self.target
        return acquire(loaded.model, fast=self.fast, owned=isinstance(self.target, str))

    def _generator(
        self,
        spec: Spec | Drafter,
        kind: Kind,
        loaded: Loaded,
        opened: list[CausalLM],
        policy: Policy | None,
    ) -> Generator:
        """One of them. Models that are opened on the way are listed."""
        shared = opened[0]
        own, cache = [shared], shared.new_cache()
        try:
            drafter = self._drafter(spec, loaded, own, cache)
        finally:
            opened += own[1:]
        law = drafter.needs.law or (spec.drafting.law if isinstance(spec, Spec) else None)
        if drafter.needs.hidden_layers:
            shared.tap(drafter.needs.hidden_layers)
        engine = Engine(
            shared,
            drafter,
            policy or _policy(spec, drafter, kind.lossless),
            rule=self.verifier,
            max_rows=self.max_batch_size,
            exact_nodes=1 + drafter.needs.max_nodes if self.exact else 0,
            cache=cache,
            picked=law is Law.FIXED and kind.lossless,
            max_slots=self._max_slots(own),
        )
        made = Generator(engine, loaded.tokenizer, loaded.eos_token_ids, kind, own)
        _log.info("Loaded %r, %d rows at most.", made, self.max_batch_size)
        return made

    def _drafter(self, spec: Spec | Drafter, loaded: Loaded, models: list[CausalLM], cache: SlotCache) -> Drafter:
        """What a spec stands for. Models that are opened on the way are listed."""
        shared = {key: value for key, value in (self.options or {}).items() if key in _SHARED_OPTIONS}
        options = {**shared, **(self.draft_options or {})}
        given = spec.model if isinstance(spec, Spec) else None
        parts = _Parts(self.target, loaded.tokenizer, models, self.fast, options, given)
        drafter = parts.build(spec, models[0], cache).drafter if isinstance(spec, Spec) else spec
        if self.verifier is not None and drafter.needs.law is not None:  # its options did not know it
            check_legal(self.verifier, drafter.needs.law)
        return drafter

    def _max_slots(self, models: Sequence[CausalLM]) -> int | None:
        """How many tokens there is room for in the caches of these models; None where nobody knows."""
        size = self.kv_bytes
        if size is None:
            free = available_bytes(models[0].device)
            if free is None:
                return None
            size = int(_KV_SHARE * free)
        each = sum(model.token_bytes for model in models)
        if size // each < BUCKET:
            raise ModelError(
                f"There are {format_bytes(size)} for keys and values, and a token takes {format_bytes(each)}: not "
                f"enough for {BUCKET} tokens. Raise kv_cache_memory_bytes, or take smaller models or another device."
            )
        return size // each


def _check_verifier(verifier: str | None, spec: Spec | Drafter) -> bool:
    """Refuse an unknown rule, and one that is not for what the drafter draws; say whether it keeps the target's law."""
    if verifier is None:
        return True
    check_known("verifier", {verifier: None}, list(RULES))
    if isinstance(spec, Spec):
        check_legal(verifier, spec.drafting.law)
    return RULES[verifier].lossless


def _kind(spec: Spec | Drafter, lossless: bool) -> Kind:
    return Kind(spec.name if isinstance(spec, Spec) else spec.__class__.__name__, lossless)


def _load(
    target: Any,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    options: Mapping[str, Any] | None,
) -> Loaded:
    if isinstance(target, str):
        loaded = load_model(target, dtype=dtype, device=device, options=options)
        return loaded if tokenizer is None else as_loaded(loaded.model, tokenizer)
    return as_loaded(target.model if isinstance(target, CausalLM) else target, tokenizer)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where the parts of drafters come from. Models that are opened on the way are listed, the target being first."""

    named: Any  # the target, as the caller named it
    tokenizer: Tokenizer | None
    models: list[CausalLM]
    fast: bool
    options: Mapping[str, Any]
    given: Any = None  # a draft model that stands in the place of a path

    def build(self, spec: Spec, target: CausalLM, cache: SlotCache) -> BuiltDrafter:
        """Build the drafter that a spec names, for ``target``."""
        needs, width = METHODS[spec.name].needs, self.models[0].vocab_size
        context = _BuildContext(spec.name, needs, spec.path, target, cache, self.tokenizer, width, self)
        drafter = builder(spec.name)(spec.options, context)
        return BuiltDrafter(drafter, drafter.needs.law or spec.drafting.law, spec.options.confidence)

    def open(self, path: str) -> DraftModelFiles:
        """A draft model, listed."""
        target = self.models[0]
        if self.given is not None:
            draft = as_loaded(self.given)
            check_device(draft.model, target)
            model = acquire(draft.model, fast=self.fast)
        else:
            draft = load_model(path, dtype=target.dtype, device=target.device, options=self.options)
            model = CausalLM(draft.model, fast=self.fast, owned=True)
        self.models.append(model)
        if model.device != target.device:
            raise ModelError(
                f"The draft {path!r} is on {model.device} and the target on {target.device}: put both on one."
            )
        return DraftModelFiles(model, draft.tokenizer)


@dataclass(frozen=True, eq=False)
class _BuildContext(BuildContext):
    """For one drafter."""

    parts: _Parts

    def model(self, path: str) -> CausalLM:
        model, tokenizer = self.parts.open(path)
        check_same_tokenizer(self.tokenizer, tokenizer, path)
        return model

    def model_of_any_tokenizer(self, path: str) -> DraftModelFiles:
        return self.parts.open(path)

    def head(self, law: Law, rope_theta: float | None = None, taps: tuple[int, ...] | None = None) -> Any:
        head = load_head(resolve(self.path), self.target, rope_theta=rope_theta, taps=taps)
        if head.info.method not in METHODS[self.name].heads:
            right = ", ".join(other for other, method in METHODS.usable().items() if head.info.method in method.heads)
            raise DrafterError(
                f"{self.path!r} holds {head.info.format} weights: it drafts as {right}, not as {self.name}."
            )
        fuse(head.net)
        if self.parts.fast and self.target.device.type == "cpu":
            # drawn drafts need a q that does not depend on how many rows share a product
            dtype = draft_dtype() if law is Law.FIXED else torch.float32
            PackedWeights(head.net, dtype)  # nobody else holds the head
        return head.net

    def drafter(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> BuiltDrafter:
        found = as_spec(self.parts.named, spec)
        if not isinstance(found, Spec) or found.off_from:
            raise DrafterError(f"{self.name} is made of drafters by name, not of {spec!r}.")
        return self.parts.build(found, target or self.target, cache or self.cache)

    def nested(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> NestedDrafter:
        name = Spec.parse(spec).name
        if not _rewindable(name):
            able = ", ".join(each for each in METHODS.usable() if _rewindable(each))
            raise DrafterError(
                f"{name} cannot stand inside {self.name}: what it remembers of a text that is only drafted cannot be "
                f"taken back; {able} can."
            )
        built = self.drafter(spec, target, cache)
        assert isinstance(built.drafter, Rewindable)
        return NestedDrafter(built.drafter, built.law is not Law.FIXED, built.confidence)


def _rewindable(name: str) -> bool:
    return issubclass(find(name)[0], Rewindable)


def _policy(spec: Spec | Drafter, drafter: Drafter, lossless: bool) -> Policy:
    """As the method's options say; for a ``Drafter`` object, all that it can."""
    if isinstance(spec, Spec):
        length = None if spec.path is None else stored_acceptance_length(resolve(spec.path))
        prior = NEUTRAL if length is None else 1 - 1 / length  # where each token is accepted as often as the first
        made = policy_for(spec.drafting, drafter.needs, lossless=lossless, off_from=spec.off_from, prior=prior)
        try:
            made.restore(spec.learned or {})
        except (AttributeError, KeyError, TypeError, ValueError):
            raise DrafterError("The tuned file holds no valid state of a policy; run foredraft tune again.") from None
        return made
    if spec.needs.max_nodes < 1:
        raise DrafterError(f"{spec.__class__.__name__}.needs.max_nodes is 0, so it would never be asked for a draft.")
    return Constant(drafter.needs.longest)
