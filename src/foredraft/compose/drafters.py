"""Builds drafters from their specs: the drafts, heads and inner drafters that they name."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.compose.arguments import as_spec
from foredraft.compose.spec import Spec, build_function, find
from foredraft.core.draft import Law
from foredraft.core.drafter import Rewindable, drafter_fault
from foredraft.core.errors import DrafterError, ForedraftError, ModelError
from foredraft.drafters import METHODS
from foredraft.drafters.context import BuildContext, BuiltDrafter, DraftModelFiles, NestedDrafter
from foredraft.heads.formats import inspect_head, load_head, recorded_contents
from foredraft.heads.nets.blocks import fuse
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM, acquire
from foredraft.model.hf.head_parts import with_int8_output
from foredraft.model.kv.cache import SlotCache
from foredraft.model.linear.packed import PackedWeights, draft_dtype
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.load import as_loaded, load_model
from foredraft.model.native.linear import HEAD_BITS, quantise_linears
from foredraft.model.native.model import NativeLM
from foredraft.model.text.tokenizer import Tokenizer, check_same_tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DrafterBuilder:
    """Builds drafters from specs. Newly loaded models are appended to ``models``, whose first entry is the target."""

    tokenizer: Tokenizer | None
    models: list[TargetModel]
    fast: bool
    options: Mapping[str, Any]
    draws: bool  # the verification rule needs drawn drafts
    draft: Any = None  # a loaded draft model, used in place of a path

    def build(self, spec: Spec, target: TargetModel, cache: SlotCache) -> BuiltDrafter:
        """Build the drafter of a spec for ``target``."""
        needs, width = METHODS[spec.name].needs, self.models[0].vocab_size
        context = _BuildContext(spec.name, needs, spec.path, target, cache, self.tokenizer, width, self)
        try:
            drafter = build_function(spec.name)(spec.options, context)
        except ForedraftError:
            raise
        except Exception as error:
            if METHODS[spec.name].drafter.startswith("foredraft."):
                raise
            raise drafter_fault(f"build of {spec.name}", error) from error
        return BuiltDrafter(drafter, drafter.needs.law or spec.drafting.options.law, spec.options.confidence)

    def open(self, path: str) -> DraftModelFiles:
        """Load a draft model and append it to ``models``."""
        target, given = self.models[0], self.draft is not None
        if given:
            draft = as_loaded(self.draft)
        else:
            draft = load_model(
                path,
                dtype=target.dtype,
                device=target.device,
                options=self.options,
                weights=target.weights,
                native=True,
            )
        weights = draft.quantised_to(target.weights)
        if draft.file is None and (found := next(draft.model.parameters()).device) != target.device:
            raise DrafterError(
                f"The draft model {path!r} is on {found} and the target on {target.device}: put both on one device."
            )
        if weights is not None:
            model = draft.with_weights(weights, owned=not given, kv_cache_dtype=target.kv_cache_dtype)
        else:
            model = acquire(draft.model, fast=self.fast, owned=not given)
        self.models.append(model)
        return DraftModelFiles(model, draft.tokenizer)


@dataclass(frozen=True, eq=False)
class _BuildContext(BuildContext):
    """The context of one drafter."""

    builder: DrafterBuilder

    def model(self, path: str) -> TargetModel:
        model, tokenizer = self.builder.open(path)
        check_same_tokenizer(self.tokenizer, tokenizer, path)
        return model

    def model_of_any_tokenizer(self, path: str) -> DraftModelFiles:
        return self.builder.open(path)

    def head(
        self, rope_theta: float | None = None, taps: tuple[int, ...] | None = None, norm_output: bool | None = None
    ) -> Any:
        path, options = resolve(self.path), self.builder.options
        head = load_head(path, self.target, rope_theta=rope_theta, taps=taps, norm_output=norm_output, options=options)
        recorded, contents = recorded_contents(path), self.target.contents()
        if None not in (recorded, contents) and recorded != contents:
            _log.warning("The head %s was trained for another model: few of its drafts may be accepted.", self.path)
        if head.info.method not in METHODS[self.name].heads:
            able = ", ".join(other for other, method in METHODS.usable().items() if head.info.method in method.heads)
            raise DrafterError(
                f"{self.path!r} holds {head.info.format} weights: use it with {able}, not with {self.name}."
            )
        fuse(head.net)
        if self.builder.fast and self.target.device.type == "cpu":
            self._pack(head.net)
        return head.net

    @property
    def names_head(self) -> bool:
        if self.builder.draft is not None:
            return False
        try:
            return bool(inspect_head(resolve(self.path)).method)
        except (DrafterError, ModelError):  # a model, or what loading it refuses
            return False

    def _pack(self, net: Any) -> None:
        """Pack a head's layers for the CPU, and with int8 the output layer that it borrows from the target.

        For a target on the native engine, the head runs there too.
        """
        if isinstance(self.target, NativeLM):
            bits = 4 if self.target.decoder.layers[0].up.bits == 4 else HEAD_BITS
            quantise_linears(net, self.target.engine, bits)
            return
        dtype = draft_dtype()
        if dtype is torch.bfloat16 and self.builder.draws:
            dtype = torch.float32  # the q of drawn drafts must not depend on the number of rows in a product
        PackedWeights(net, dtype)
        if dtype is torch.int8 and not net.own_output and isinstance(self.target, CausalLM):
            target = self.target
            net.target = with_int8_output(net.target, target.model, lambda: target.weights_version)

    def drafter(self, spec: str, target: TargetModel | None = None, cache: SlotCache | None = None) -> BuiltDrafter:
        found = as_spec(self.builder.models[0], spec)
        if not isinstance(found, Spec) or found.off_from:
            raise DrafterError(f"{self.name} takes its inner drafters by name, not as {spec!r}.")
        return self.builder.build(found, target or self.target, cache or self.cache)

    def nested(self, spec: str, target: TargetModel | None = None, cache: SlotCache | None = None) -> NestedDrafter:
        name = Spec.parse(spec).name
        if not _rewindable(name):
            able = ", ".join(each for each in METHODS.usable() if _rewindable(each))
            raise DrafterError(
                f"{name} cannot be used inside {self.name}: its state for tokens that are only drafted cannot be "
                f"rewound. Use one of {able}."
            )
        built = self.drafter(spec, target, cache)
        assert isinstance(built.drafter, Rewindable)
        return NestedDrafter(built.drafter, self.builder.draws and built.law is not Law.FIXED, built.confidence)


def _rewindable(name: str) -> bool:
    return issubclass(find(name)[0], Rewindable)
