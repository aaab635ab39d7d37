"""Several drafters extend one draft in turn: horizontal cascades (CS Drafting, arXiv:2312.11462).

Later tokens of a draft are rarely accepted, so they should be cheap: the first come from a model, the next from a
smaller one, the last from a look-up. Each drafter continues the draft of those before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, Rewindable, View
from foredraft.core.errors import DrafterError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.transfer import to_device
from foredraft.core.tree import TokenTree
from foredraft.drafters.context import BuildContext, NestedDrafter


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """Length of the whole draft; each drafter's own options limit its segment."""

    num_assistant_tokens: int | None = option(
        None, "most tokens in total; by default the sum over the drafters.", unset="no limit"
    )

    law = Law.CHAIN
    """The law of drafts for sampled rows if any of the drafters draws."""

    def __post_init__(self) -> None:
        check_bounds(self, least={"num_assistant_tokens": 1})


class DraftSegment(NamedTuple):
    """The tokens of one drafter: those of row b are nodes ``starts[b]`` to ``starts[b] + counts[b] - 1``."""

    draft: Draft
    starts: list[int]
    counts: list[int]

    def places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Row, node in this segment's draft and node in the whole draft, for each token."""
        found = [
            (b, 1 + i, start + i)
            for b, (start, count) in enumerate(zip(self.starts, self.counts, strict=True))
            for i in range(count)
        ]
        return to_device(found, device).view(-1, 3).unbind(1)


@final
class Relay(Rewindable):
    """Extends one draft with several drafters in turn.

    If any of them draws, a draft for sampled rows is a ``CHAIN`` even if all its tokens were picked this time: the
    verification rule of a row must not depend on the drafts of other rows.

    Args:
        parts: the drafters in order; each drafts chains.
        vocab_size: V, width of the laws.

    Raises:
        DrafterError: a drafter drafts trees or needs hidden states; or one after the first uses the target's cache; or
            one draws and another learns from other requests.
    """

    def __init__(self, options: Options, parts: Sequence[NestedDrafter], vocab_size: int) -> None:
        if len(parts) < 2:
            raise DrafterError("relay needs two drafters or more: write relay:[draft_model:PATH]+[max_gram].")
        for number, part in enumerate(parts):
            _check(part, first=number == 0)
        together = sum(part.drafter.needs.longest for part in parts)
        self._parts = tuple(parts)
        self._draws = any(part.draws for part in parts)
        most = min(together, options.num_assistant_tokens or together)
        needs = Needs(max_nodes=most, law=Law.CHAIN if self._draws else Law.FIXED)
        super().__init__(needs, *(part.drafter for part in parts))
        self._vocab_size = vocab_size
        if self._draws and self.needs.learns:
            raise DrafterError(
                "A relay with a drafter that draws cannot have one that learns from other requests: use max_gram "
                "without bigrams, and lookahead with pool=request."
            )

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        left = [min(length, self.needs.max_nodes) for length in plan.lengths]
        starts = [1] * len(left)
        segments: list[DraftSegment] = []
        ahead = view
        for number, part in enumerate(self._parts):
            if not any(left):
                break
            longest = part.drafter.needs.longest
            if view.draws:  # later steps revisit these positions, possibly with another drafter: each has its own seeds
                ahead = replace(ahead, noise=replace(ahead.noise, seeds=view.noise.nested(number).seeds))
            own = Plan(tuple(min(most, longest) for most in left), part.confidence, chain=True)
            segment = _segment(part, ahead, own, starts)
            segments.append(segment)
            left = [most - count for most, count in zip(left, segment.counts, strict=True)]
            starts = [start + count for start, count in zip(starts, segment.counts, strict=True)]
            ahead = ahead.followed_by(segment.draft.tree.tokens[:, 1:], segment.counts)
        for part in self._parts[1:]:
            for row, length in zip(view.rows, view.host_lengths, strict=True):
                part.drafter.rewind(row, length)
        tree = _joined(view, segments, starts)
        if view.warp.greedy or not (view.draws and self._draws):
            return Draft(tree, Law.FIXED)
        return Draft(tree, Law.CHAIN, self._laws(tree, segments))

    def _laws(self, tree: TokenTree, segments: Sequence[DraftSegment]) -> Float[Tensor, "B N V"]:
        """The law of each token; a one-hot for picked tokens."""
        drawn = [(segment, segment.draft.q) for segment in segments if segment.draft.q is not None]
        dtype = drawn[0][1].dtype if drawn else torch.float32
        q = torch.nn.functional.one_hot(tree.tokens, self._vocab_size).to(dtype)
        for segment, laws in drawn:
            row, source, target = segment.places(tree.tokens.device)
            q[row, target] = laws[row, source]
        return q


def _check(part: NestedDrafter, first: bool) -> None:
    needs = part.drafter.needs
    name = part.drafter.__class__.__name__
    if needs.longest != needs.max_nodes or needs.longest < 1:
        raise DrafterError(f"{name} drafts trees, or nothing; relay needs drafters of chains.")
    if needs.hidden_layers:
        raise DrafterError(f"{name} cannot be used inside relay: it reads the target's hidden states.")
    if needs.target_cache and not first:
        raise DrafterError(
            f"{name} drafts in the target's cache, which does not hold the tokens of the drafters before it: put it "
            "first."
        )


def _segment(part: NestedDrafter, view: View, plan: Plan, starts: list[int]) -> DraftSegment:
    draft = part.drafter.propose(view, plan)
    counts = (draft.tree.valid.sum(1) - 1).tolist()  # the next drafter needs its lengths on the host
    return DraftSegment(draft, starts, [min(count, most) for count, most in zip(counts, plan.lengths, strict=True)])


def _joined(view: View, segments: Sequence[DraftSegment], ends: Sequence[int]) -> TokenTree:
    """One chain of all segments."""
    tokens = torch.nn.functional.pad(view.roots[:, None], (0, max(ends) - 1))
    for segment in segments:
        row, source, target = segment.places(tokens.device)
        tokens[row, target] = segment.draft.tree.tokens[row, source]
    return TokenTree.chain(tokens, to_device(ends, tokens.device))


def build(options: Options, context: BuildContext) -> Relay:
    """relay:[DRAFTER]+[DRAFTER]"""
    specs = context.paths if context.argument is not None else []
    return Relay(options, [context.nested(spec) for spec in specs], context.vocab_size)
