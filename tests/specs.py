"""Drafters by their specs, whose paths name models and heads that a test has in memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dialects import strangers
from foredraft.compose.spec import Spec, build_function
from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter, Rewindable
from foredraft.drafters.context import BuildContext, BuiltDrafter, DraftModelFiles, NestedDrafter
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache

Heads = Mapping[str, Callable[[CausalLM], Any]]


def build(
    spec: str,
    target: CausalLM,
    models: Mapping[str, CausalLM] | None = None,
    heads: Heads | None = None,
    *,
    cache: SlotCache | None = None,
    draws: bool = False,
) -> Drafter:
    """The drafter of a spec such as ``cascade:draft+[eagle3:head,nodes=4]``.

    Args:
        models: draft models by name; the target itself is "target".
        heads: what makes a head for the target, by name.
        cache: the target's, for a drafter that shares it; a new one unless it is given.
        draws: the verification rule needs drawn drafts.
    """
    own, models = strangers(target.vocab_size)[0], {"target": target, **(models or {})}
    cache = cache or target.new_cache()
    context = InMemory("", "", None, target, cache, own, target.vocab_size, models, heads or {}, draws)
    return context.drafter(spec).drafter


@dataclass(frozen=True, eq=False)
class InMemory(BuildContext):
    """Draft models have a tokenizer of their own where that matters; inner drafters have no confidence threshold."""

    models: Mapping[str, CausalLM]
    heads: Heads
    draws: bool

    def model(self, path: str) -> CausalLM:
        return self.models[path]

    def model_of_any_tokenizer(self, path: str) -> DraftModelFiles:
        return DraftModelFiles(self.models[path], strangers(self.vocab_size)[1])

    @property
    def names_head(self) -> bool:
        return self.path in self.heads

    def head(
        self, rope_theta: float | None = None, taps: tuple[int, ...] | None = None, norm_output: bool | None = None
    ) -> Any:
        return self.heads[self.path](self.target)

    def drafter(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> BuiltDrafter:
        parsed = Spec.parse(spec)
        target, cache = target or self.target, cache or self.cache
        inner = replace(self, name=parsed.name, argument=parsed.path, target=target, cache=cache)
        drafter = build_function(parsed.name)(parsed.options, inner)
        return BuiltDrafter(drafter, drafter.needs.law or parsed.drafting.options.law, 0.0)

    def nested(self, spec: str, target: CausalLM | None = None, cache: SlotCache | None = None) -> NestedDrafter:
        built = self.drafter(spec, target, cache)
        assert isinstance(built.drafter, Rewindable)
        return NestedDrafter(built.drafter, self.draws and built.law is not Law.FIXED)
