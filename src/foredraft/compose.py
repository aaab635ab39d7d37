"""The only place where names become objects: a target, a drafter, a policy, put together."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch

from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.params import check_known
from foredraft.core.verify import RULES, check_legal
from foredraft.drafters import METHODS, builder, find
from foredraft.drafters.spec import Spec
from foredraft.drafters.supplies import Foreign, Place, Supplies
from foredraft.engine.engine import Engine
from foredraft.engine.generate import Generator, Kind
from foredraft.engine.policy import NEUTRAL, Constant, Policy, policy_for
from foredraft.formats import load_head
from foredraft.formats.tuned import SUFFIX, read_tuned
from foredraft.model.cache import SlotCache
from foredraft.model.causal import CausalLM
from foredraft.model.linear import PackedWeights, draft_dtype
from foredraft.model.load import Loaded, as_loaded, load_model, resolve
from foredraft.model.provenance import stored_acceptance_length
from foredraft.model.tokenizer import Tokenizer, check_same_tokenizer
from foredraft.nets.blocks import fuse

BUNDLED_DRAFTS = {
    "sample": {
        "draft_model": "sample-draft",
        "sequoia": "sample-draft",
        "opt_tree": "sample-draft",
        "eagle1": "sample-eagle",
        "eagle2": "sample-eagle",
        "eagle3": "sample-eagle3",
        "medusa": "sample-medusa",
        "triforce": "sample-draft",
    }
}
"""What ships for the bundled targets, by method."""


def load(
    target: Any = "sample",
    drafter: str | Drafter | None = "auto",
    *,
    tokenizer: Any = None,
    dtype: str | None = None,
    device: str | None = None,
    verifier: str | None = None,
    policy: Policy | None = None,
    max_batch_size: int = 32,
    exact: bool = False,
    fast: bool = True,
    model_options: Mapping[str, Any] | None = None,
) -> Generator:
    """Put a target and a drafter together.

    Args:
        target: a folder, a hub name, "sample" for the bundled model, a loaded transformers model, or the
            ``generator.engine.target`` of another generator, to share it.
        drafter: "none" or None for plain decoding, a spec such as "prompt_lookup" or
            "draft_model:PATH,num_assistant_tokens=5", a file that ``foredraft tune`` wrote, a ``Drafter``, or "auto":
            the bundled EAGLE-3 head for the bundled model, prompt lookup for any other.
        tokenizer: for a loaded model; otherwise its own is used.
        dtype: such as "bfloat16"; by default float32 on a CPU, elsewhere what the weights have.
        device: such as "cuda"; by default a GPU if there is one.
        verifier: the verification rule; by default the best one for each draft's law.
        policy: decides how much to draft; by default what the drafter's options say.
        max_batch_size: so many texts are generated at once; others wait.
        exact: run every forward with the same number of nodes, so that speculation cannot flip near-ties.
        fast: on a CPU, pack the weights of linear layers.
        model_options: passed on to ``from_pretrained`` for target and draft (quantization_config, revision, ...).

    Raises:
        UsageError: something that cannot be; the sentence says why and what can.
    """
    workshop = _Workshop(
        target, tokenizer, dtype, device, verifier, max_batch_size, exact=exact, fast=fast, options=model_options
    )
    return workshop.make([drafter], policy)[0]


def load_many(
    target: Any,
    drafters: Sequence[str | Drafter | None],
    *,
    tokenizer: Any = None,
    dtype: str | None = None,
    device: str | None = None,
    verifier: str | None = None,
    max_batch_size: int = 32,
    exact: bool = False,
    fast: bool = True,
    model_options: Mapping[str, Any] | None = None,
) -> list[Generator]:
    """``load`` for several drafters on one target, which is in memory once; arguments and errors are those of
    ``load``.

    Returns:
        a generator each, in order. The first of them owns the target: closing it ends all.
    """
    workshop = _Workshop(
        target, tokenizer, dtype, device, verifier, max_batch_size, exact=exact, fast=fast, options=model_options
    )
    return workshop.make(drafters, None)


@dataclass(frozen=True, slots=True)
class _Workshop:
    """What ``load`` was given, and the work that it does."""

    target: Any
    tokenizer: Any
    dtype: str | None
    device: str | None
    verifier: str | None
    max_batch_size: int
    exact: bool
    fast: bool
    options: Mapping[str, Any] | None

    def make(self, drafters: Sequence[str | Drafter | None], policy: Policy | None) -> list[Generator]:
        """A generator for each drafter; where one of them cannot be, there is none."""
        if self.max_batch_size < 1:
            raise OptionError("max_batch_size must be 1 or more.")
        if not drafters:
            raise OptionError("Name at least one drafter; none is plain decoding.")
        specs = [_spec(self.target, drafter) for drafter in drafters]
        kinds = [_kind(spec, _check_verifier(self.verifier, spec)) for spec in specs]
        loaded = _load(self.target, self.tokenizer, self.dtype, self.device, self.options)
        shared = self.target if isinstance(self.target, CausalLM) else CausalLM(loaded.model, fast=self.fast)
        opened: list[list[CausalLM]] = []  # by drafter: the target, and the models that only it has
        made: list[Generator] = []
        try:
            for spec, kind in zip(specs, kinds, strict=True):
                opened.append(own := [shared])
                cache = shared.new_cache()
                drafter = self._drafter(spec, loaded, own, cache)
                engine = self._engine(own[0], cache, drafter, policy or _policy(spec, drafter, kind.lossless))
                mine = own[1:] if made or shared is self.target else own  # who made a model closes it
                made.append(Generator(engine, loaded.tokenizer, loaded.eos_token_ids, kind, mine))
        except BaseException:  # a model that is the caller's must not keep what was installed on it
            for model in {shared, *(model for own in opened for model in own)} - {self.target}:
                model.close()
            raise
        return made

    def _drafter(self, spec: Spec | Drafter, loaded: Loaded, models: list[CausalLM], cache: SlotCache) -> Drafter:
        """What a spec stands for. Models that are opened on the way are listed."""
        stock = _Stock(self.target, loaded.tokenizer, models, self.fast, self.options)
        drafter = stock.drafter_of(spec, models[0], cache) if isinstance(spec, Spec) else spec
        if self.verifier is not None and drafter.needs.law is not None:  # its options did not know it
            check_legal(self.verifier, drafter.needs.law)
        return drafter

    def _engine(self, target: CausalLM, cache: SlotCache, drafter: Drafter, policy: Policy) -> Engine:
        if drafter.needs.hidden_layers:
            target.tap(drafter.needs.hidden_layers)
        return Engine(
            target,
            drafter,
            policy,
            rule=self.verifier,
            max_rows=self.max_batch_size,
            exact_nodes=1 + drafter.needs.max_nodes if self.exact else 0,
            cache=cache,
        )


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


def _spec(target: Any, drafter: str | Drafter | None) -> Spec | Drafter:
    if isinstance(drafter, Drafter):
        return drafter
    if drafter == "auto":
        drafter = "eagle3" if isinstance(target, str) and target in BUNDLED_DRAFTS else "prompt_lookup"
    is_file = drafter is not None and drafter.endswith(SUFFIX) and drafter.partition(":")[0] not in METHODS
    tuned = read_tuned(drafter) if drafter is not None and is_file else None
    spec = Spec.parse(tuned.drafter if tuned is not None else drafter or "none")
    if tuned is not None:
        spec = replace(spec, off_from=tuned.off_from)
    bundled = BUNDLED_DRAFTS.get(target, {}) if isinstance(target, str) else {}
    if spec.path is None and spec.name in bundled:
        return replace(spec, path=bundled[spec.name])
    return spec


def _load(
    target: Any, tokenizer: Any, dtype: str | None, device: str | None, options: Mapping[str, Any] | None
) -> Loaded:
    if isinstance(target, str):
        loaded = load_model(target, dtype=dtype, device=device, options=options)
        return loaded if tokenizer is None else as_loaded(loaded.model, tokenizer)
    return as_loaded(target.model if isinstance(target, CausalLM) else target, tokenizer)


@dataclass(frozen=True, slots=True)
class _Stock:
    """Where the parts of drafters come from. Models that are opened on the way are listed, the target being first."""

    named: Any  # the target, as the caller named it
    tokenizer: Tokenizer | None
    models: list[CausalLM]
    fast: bool
    options: Mapping[str, Any] | None

    def drafter_of(self, spec: Spec, target: CausalLM, cache: SlotCache) -> Drafter:
        """What a spec stands for, drafting for ``target``."""
        needs = METHODS[spec.name].needs
        place = Place(spec.name, needs, spec.path, target, cache, self.tokenizer, self.models[0].vocab_size)
        return builder(spec.name)(spec.options, _Supplies(place, self))

    def open(self, path: str) -> Foreign:
        """A draft model, listed."""
        target = self.models[0]
        dtype = str(target.dtype).removeprefix("torch.")
        draft = load_model(path, dtype=dtype, device=str(target.device), options=self.options)
        model = CausalLM(draft.model, fast=self.fast)
        self.models.append(model)
        return Foreign(model, draft.tokenizer)


class _Supplies(Supplies):
    """The parts of one drafter."""

    def __init__(self, place: Place, stock: _Stock) -> None:
        super().__init__(place)
        self._stock = stock

    def model(self, path: str) -> CausalLM:
        model, tokenizer = self._stock.open(path)
        check_same_tokenizer(self.place.tokenizer, tokenizer, path)
        return model

    def foreign(self, path: str) -> Foreign:
        return self._stock.open(path)

    def head(self, options: Any) -> Any:
        return _head(self.place.name, self.path, options, self.place.target, self._stock.fast)

    def drafter(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> Drafter:
        found = _spec(self._stock.named, spec)
        if not isinstance(found, Spec) or found.off_from:
            raise DrafterError(f"{self.place.name} is made of drafters by name, not of {spec!r}.")
        return self._stock.drafter_of(found, target or self.place.target, cache or self.place.cache)


def _head(name: str, path: str, options: Any, target: CausalLM, fast: bool) -> Any:
    """The net of a trained head, of a kind that the method drafts with."""
    head = load_head(
        resolve(path),
        target,
        rope_theta=getattr(options, "rope_theta", None),
        taps=getattr(options, "taps", None),
    )
    if head.info.method not in METHODS[name].heads:
        right = ", ".join(other for other, method in METHODS.items() if head.info.method in method.heads)
        raise DrafterError(f"{path!r} holds {head.info.format} weights: it drafts as {right}, not as {name}.")
    fuse(head.net)
    if fast and target.device.type == "cpu":
        picked = options.law is Law.FIXED  # else q must not depend on how many rows share a product
        PackedWeights(head.net, draft_dtype() if picked else torch.float32)
    return head.net


def _policy(spec: Spec | Drafter, drafter: Drafter, lossless: bool) -> Policy:
    """As the method's options say; for a ``Drafter`` object, all that it can."""
    if isinstance(spec, Spec):
        length = None if spec.path is None else stored_acceptance_length(resolve(spec.path))
        prior = NEUTRAL if length is None else 1 - 1 / length  # where each token is accepted as often as the first
        return policy_for(spec.drafting, drafter.needs, lossless=lossless, off_from=spec.off_from, prior=prior)
    if spec.needs.max_nodes < 1:
        raise DrafterError(f"{spec.__class__.__name__}.needs.max_nodes is 0, so it would never be asked for a draft.")
    return Constant(drafter.needs.longest)


def describe_options(name: str) -> dict[str, Any]:
    """Options of a method with their defaults."""
    return {field.name: None if field.default is MISSING else field.default for field in fields(find(name)[1])}
