"""Several drafters write one draft, one after another: horizontal cascades (CS Drafting, arXiv:2312.11462).

Late tokens of a draft rarely survive, so they may be cheap: the first come from a model, those after them from a
smaller one, the last from a look-up. Each drafter goes on from what those before it have drafted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Needs, Plan, Rewindable, StepOut, View
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.tree import TokenTree
from foredraft.drafters.supplies import Part, Supplies


@dataclass(frozen=True, slots=True)
class Options:
    """How far the relay goes; each drafter goes as far as its own options say.

    num_assistant_tokens: at most so many tokens together; None: all that the drafters draft.
    num_assistant_tokens_schedule: constant; heuristic, transformers' up and down; cost, what the measured costs and
        the acceptance so far make best; or auto, cost where texts cannot depend on it and constant elsewhere.
    """

    num_assistant_tokens: int | None = None
    num_assistant_tokens_schedule: str = "auto"

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows, where any of the drafters draws."""
        return Law.CHAIN

    def __post_init__(self) -> None:
        if self.num_assistant_tokens is not None and self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")


class Leg(NamedTuple):
    """What one drafter adds: row b's tokens stand at nodes ``starts[b]`` to ``starts[b] + counts[b] - 1``."""

    draft: Draft
    starts: list[int]
    counts: list[int]


@final
class Relay(Rewindable):
    """Hands the draft on from drafter to drafter.

    Args:
        parts: in this order. Each drafts chains.

    Raises:
        DrafterError: a drafter drafts trees, wants hidden states, or cannot take a text back.
    """

    def __init__(self, options: Options, parts: Sequence[Part]) -> None:
        if len(parts) < 2:
            raise DrafterError("relay is made of two drafters or more: write relay:[draft_model:PATH]+[max_gram].")
        for part in parts:
            _check(part)
        together = sum(part.drafter.needs.longest for part in parts)
        self._parts = tuple(parts)
        self.needs = Needs(max_nodes=min(together, options.num_assistant_tokens or together))
        self.learns = any(part.drafter.learns for part in parts)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        for part in self._parts:
            part.drafter.admit(row, prompt, {})

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        left = [min(length, self.needs.max_nodes) for length in plan.lengths]
        starts = [1] * len(left)
        legs: list[Leg] = []
        ahead = view
        for number, part in enumerate(self._parts):
            if not any(left):
                break
            longest = part.drafter.needs.longest
            # a drafter may come by the same place again in a later step, and another may have drafted there before
            ahead = replace(ahead, noise=replace(ahead.noise, seeds=view.noise.nested(number).seeds))
            mine = Plan(tuple(min(most, longest) for most in left), part.confidence)
            leg = self._leg(part, ahead, mine, starts)
            legs.append(leg)
            left = [most - count for most, count in zip(left, leg.counts, strict=True)]
            starts = [start + count for start, count in zip(starts, leg.counts, strict=True)]
            ahead = ahead.followed_by(leg.draft.tree.tokens[:, 1:], leg.counts)
        for part in self._parts[1:]:
            for row, extent in zip(view.rows, view.extents, strict=True):
                part.drafter.rewind(row, extent)
        return _joined(view, legs, starts)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        for part in self._parts:
            part.drafter.commit(view, draft, verdict, out)

    def rewind(self, row: int, length: int) -> None:
        for part in self._parts:
            part.drafter.rewind(row, length)

    def release(self, row: int) -> None:
        for part in self._parts:
            part.drafter.release(row)

    def _leg(self, part: Part, view: View, plan: Plan, starts: list[int]) -> Leg:
        draft = part.drafter.propose(view, plan)
        if draft.law is not Law.FIXED and self.learns:
            raise DrafterError(
                "What is drawn in a relay decides what is said, so no drafter in it may learn from other texts: "
                "write max_gram without bigrams."
            )
        counts = (draft.tree.valid.sum(1) - 1).tolist()  # the next drafter's text has to be known on the host
        return Leg(draft, starts, [min(count, most) for count, most in zip(counts, plan.lengths, strict=True)])


def _check(part: Part) -> None:
    needs = part.drafter.needs
    name = part.drafter.__class__.__name__
    if needs.longest != needs.max_nodes or needs.longest < 1:
        raise DrafterError(f"{name} drafts trees, or nothing; relay is made of drafters that draft chains.")
    if needs.hidden_layers:
        raise DrafterError(f"{name} cannot stand inside relay: it reads the target's hidden states.")


def _joined(view: View, legs: Sequence[Leg], ends: Sequence[int]) -> Draft:
    """One chain of all legs. A picked token among drawn ones has the law that says just it."""
    width = max(ends)
    device = view.lengths.device
    tokens = torch.nn.functional.pad(view.roots[:, None], (0, width - 1))
    laws = [leg.draft.q for leg in legs if leg.draft.q is not None]
    q = laws[0].new_zeros(len(ends), width, laws[0].shape[-1]) if laws else None
    for leg in legs:
        places = [
            (b, 1 + i, start + i)
            for b, (start, count) in enumerate(zip(leg.starts, leg.counts, strict=True))
            for i in range(count)
        ]
        if not places:
            continue
        row, source, target = torch.tensor(places, device=device).unbind(1)
        said = leg.draft.tree.tokens[row, source]
        tokens[row, target] = said
        if q is not None and leg.draft.q is not None:
            q[row, target] = leg.draft.q[row, source]
        elif q is not None:
            q[row, target, said] = 1.0
    tree = TokenTree.chain(tokens, torch.tensor(list(ends), device=device))
    return Draft(tree, Law.FIXED if q is None else Law.CHAIN, q)


def build(options: Options, supplies: Supplies) -> Relay:
    """relay:[DRAFTER]+[DRAFTER]"""
    specs = supplies.paths if supplies.place.path is not None else []
    return Relay(options, [supplies.part(spec) for spec in specs])
