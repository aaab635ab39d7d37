"""Several drafters write one draft, one after another: horizontal cascades (CS Drafting, arXiv:2312.11462).

Late tokens of a draft rarely survive, so they may be cheap: the first come from a model, those after them from a
smaller one, the last from a look-up. Each drafter goes on from what those before it have drafted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Needs, Plan, Rewindable, StepOut, View
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.build_context import BuildContext, NestedDrafter


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """How far the relay goes; each drafter goes as far as its own options say.

    num_assistant_tokens: most tokens together; by default all that the drafters draft.
    """

    num_assistant_tokens: int | None = field(default=None, metadata={"unset": "no limit"})

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows, where any of the drafters draws."""
        return Law.CHAIN

    def __post_init__(self) -> None:
        if self.num_assistant_tokens is not None and self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")


class DraftSegment(NamedTuple):
    """What one drafter adds: row b's tokens stand at nodes ``starts[b]`` to ``starts[b] + counts[b] - 1``."""

    draft: Draft
    starts: list[int]
    counts: list[int]

    def places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Row, node in this leg's draft, and node in the whole draft, of each token."""
        found = [
            (b, 1 + i, start + i)
            for b, (start, count) in enumerate(zip(self.starts, self.counts, strict=True))
            for i in range(count)
        ]
        return torch.tensor(found, dtype=torch.long, device=device).view(-1, 3).unbind(1)


@final
class Relay(Rewindable):
    """Hands the draft on from drafter to drafter.

    Where any of them draws, a draft for sampled rows is a ``CHAIN``, even if all its tokens were picked this time:
    what others of the batch have drafted must not decide by which rule a row is judged.

    Args:
        parts: in this order. Each drafts chains.
        vocab_size: V, how wide laws are.

    Raises:
        DrafterError: a drafter drafts trees, or wants hidden states; or another than the first reads the target's
            cache; or one draws, and another learns from other texts.
    """

    def __init__(self, options: Options, parts: Sequence[NestedDrafter], vocab_size: int) -> None:
        if len(parts) < 2:
            raise DrafterError("relay is made of two drafters or more: write relay:[draft_model:PATH]+[max_gram].")
        for number, part in enumerate(parts):
            _check(part, first=number == 0)
        together = sum(part.drafter.needs.longest for part in parts)
        self._parts = tuple(parts)
        self._draws = any(part.draws for part in parts)
        most = min(together, options.num_assistant_tokens or together)
        self.needs = Needs(
            max_nodes=most,
            law=Law.CHAIN if self._draws else Law.FIXED,
            learns=any(part.drafter.needs.learns for part in parts),
            target_cache=parts[0].drafter.needs.target_cache,
        )
        self._vocab_size = vocab_size
        if self._draws and self.needs.learns:
            raise DrafterError(
                "What is drawn in a relay decides what is said, so no drafter in it may learn from other texts: "
                "write max_gram without bigrams, and lookahead with pool=request."
            )

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        for part in self._parts:
            part.drafter.admit(row, prompt, {})

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        left = [min(length, self.needs.max_nodes) for length in plan.lengths]
        starts = [1] * len(left)
        legs: list[DraftSegment] = []
        ahead = view
        for number, part in enumerate(self._parts):
            if not any(left):
                break
            longest = part.drafter.needs.longest
            # a drafter may come by the same place again in a later step, and another may have drafted there before
            ahead = replace(ahead, noise=replace(ahead.noise, seeds=view.noise.nested(number).seeds))
            mine = Plan(tuple(min(most, longest) for most in left), part.confidence)
            leg = _leg(part, ahead, mine, starts)
            legs.append(leg)
            left = [most - count for most, count in zip(left, leg.counts, strict=True)]
            starts = [start + count for start, count in zip(starts, leg.counts, strict=True)]
            ahead = ahead.followed_by(leg.draft.tree.tokens[:, 1:], leg.counts)
        for part in self._parts[1:]:
            for row, extent in zip(view.rows, view.extents, strict=True):
                part.drafter.rewind(row, extent)
        tree = _joined(view, legs, starts)
        if view.warp.greedy or not self._draws:
            return Draft(tree, Law.FIXED)
        return Draft(tree, Law.CHAIN, self._laws(tree, legs))

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        for part in self._parts:
            part.drafter.commit(view, draft, verdict, out)

    def rewind(self, row: int, length: int) -> None:
        for part in self._parts:
            part.drafter.rewind(row, length)

    def release(self, row: int) -> None:
        for part in self._parts:
            part.drafter.release(row)

    def _laws(self, tree: TokenTree, legs: Sequence[DraftSegment]) -> Float[Tensor, "B N V"]:
        """What each token was drawn from; of a picked one, the law that says just it."""
        drawn = [(leg, leg.draft.q) for leg in legs if leg.draft.q is not None]
        dtype = drawn[0][1].dtype if drawn else torch.float32
        q = torch.nn.functional.one_hot(tree.tokens, self._vocab_size).to(dtype)
        for leg, laws in drawn:
            row, source, target = leg.places(tree.tokens.device)
            q[row, target] = laws[row, source]
        return q


def _check(part: NestedDrafter, first: bool) -> None:
    needs = part.drafter.needs
    name = part.drafter.__class__.__name__
    if needs.longest != needs.max_nodes or needs.longest < 1:
        raise DrafterError(f"{name} drafts trees, or nothing; relay is made of drafters that draft chains.")
    if needs.hidden_layers:
        raise DrafterError(f"{name} cannot stand inside relay: it reads the target's hidden states.")
    if part.drafter.needs.target_cache and not first:
        raise DrafterError(
            f"{name} drafts in the target's cache, which does not hold what the drafters before it have drafted: put "
            "it first."
        )


def _leg(part: NestedDrafter, view: View, plan: Plan, starts: list[int]) -> DraftSegment:
    draft = part.drafter.propose(view, plan)
    counts = (draft.tree.valid.sum(1) - 1).tolist()  # the next drafter's text has to be known on the host
    return DraftSegment(draft, starts, [min(count, most) for count, most in zip(counts, plan.lengths, strict=True)])


def _joined(view: View, legs: Sequence[DraftSegment], ends: Sequence[int]) -> TokenTree:
    """One chain of all legs."""
    tokens = torch.nn.functional.pad(view.roots[:, None], (0, max(ends) - 1))
    for leg in legs:
        row, source, target = leg.places(tokens.device)
        tokens[row, target] = leg.draft.tree.tokens[row, source]
    return TokenTree.chain(tokens, torch.tensor(list(ends), device=tokens.device))


def build(options: Options, context: BuildContext) -> Relay:
    """relay:[DRAFTER]+[DRAFTER]"""
    specs = context.paths if context.argument is not None else []
    return Relay(options, [context.nested(spec) for spec in specs], context.vocab_size)
