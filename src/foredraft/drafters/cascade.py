"""A drafter that is itself a speculative loop: vertical cascades (CS Drafting, Chen et al., arXiv:2312.11462).

A model between target and draft (the middle) writes the draft, and a drafter of its own writes drafts for it, which may
be a cascade again; so no model but the smallest ever drafts token by token. Verification inside is exact, hence the law
of what is drafted is the middle's own (see ``engine/inner.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import DrafterError, OptionError
from foredraft.drafters.supplies import Part, Supplies
from foredraft.engine.inner import Inner, InnerLoop
from foredraft.model.cache import SlotCache
from foredraft.model.slot_lm import SlotLM


@dataclass(frozen=True, slots=True)
class Options:
    """How far each level goes.

    num_assistant_tokens: tokens that the middle model drafts for the target.
    num_assistant_tokens_schedule: auto, the length with the most tokens a second; constant; or heuristic,
        transformers' up and down. See docs/schedules.md.
    inner_tokens: most tokens drafted for the middle model per inner step; by default as its drafter's options say. The
        schedule of the inner drafter is ignored.
    """

    num_assistant_tokens: int = 8
    num_assistant_tokens_schedule: str = "auto"
    inner_tokens: int | None = field(default=None, metadata={"unset": "by its drafter"})

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.CHAIN

    def __post_init__(self) -> None:
        if self.num_assistant_tokens < 1 or (self.inner_tokens is not None and self.inner_tokens < 1):
            raise OptionError("num_assistant_tokens and inner_tokens must be 1 or more.")


@final
class Cascade(Rewindable):
    """Drafts what its middle model says, which is drafted in turn.

    Args:
        middle, cache: the model that writes the draft, and where it does so.
        part: what drafts for it.
        vocab_size: of the target. The middle's may be narrower or wider, as padded vocabularies are.
    """

    def __init__(self, options: Options, middle: SlotLM, part: Part, cache: SlotCache, vocab_size: int) -> None:
        self._options = options
        # a partial cache inside is filled by how far all rows are, so its drafts depend on the others of the batch
        self.learns = part.drafter.learns or part.drafter.reads_target
        length = options.inner_tokens or part.drafter.needs.longest
        self._loop = InnerLoop(Inner(middle, part.drafter, cache, length, part.confidence), vocab_size)
        self.needs = Needs(max_nodes=options.num_assistant_tokens)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._loop.admit(row, prompt)

    def propose(self, view: View, plan: Plan) -> Draft:
        most = self._options.num_assistant_tokens
        return self._loop.extend(view, [min(length, most) for length in plan.lengths])

    def rewind(self, row: int, length: int) -> None:
        self._loop.rewind(row, length)

    def release(self, row: int) -> None:
        self._loop.release(row)


def build(options: Options, supplies: Supplies) -> Cascade:
    """cascade:MIDDLE+[INNER]"""
    if supplies.place.path is None or len(supplies.paths) != 2:
        raise DrafterError(
            "cascade is made of a middle model and what drafts for it: write cascade:MIDDLE+prompt_lookup, or "
            "cascade:MIDDLE+[draft_model:PATH,num_assistant_tokens=3]."
        )
    path, spec = supplies.paths
    middle = supplies.model(path)
    cache = middle.new_cache()
    part = supplies.part(spec, target=middle, cache=cache)
    return Cascade(options, middle, part, cache, supplies.place.vocab_size)
