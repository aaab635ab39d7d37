"""A small model drafts: speculative sampling (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

As a chain it draws k tokens from its own law q. As a tree it draws a few children a node without replacement
(RSD-C, arXiv:2402.14160), level by level. Greedy rows get its likeliest tokens, which are picked, not drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Drafter, Needs, Plan, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.noise import Stream, inverse_cdf
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.warp import Paths
from foredraft.drafters.grow import Levels, draw_siblings, likeliest, proper
from foredraft.model.causal import CausalLM
from foredraft.model.prefill import prefill

_CATCH_UP = 16
"""A row that is further behind than this is brought up on its own; the others need not read along."""


@dataclass(frozen=True, slots=True)
class Options:
    """``num_assistant_tokens``, its schedule and the threshold mean what they mean in transformers.

    num_assistant_tokens: the longest path.
    num_assistant_tokens_schedule: constant; heuristic, transformers' up and down; cost, what the measured costs and
        the acceptance so far make best; or auto, cost where texts cannot depend on it and constant elsewhere.
    assistant_confidence_threshold: a chain ends after its first token that the draft gives less probability; that
        token is kept. 0 never ends one.
    branching: children of a node by level, for instance 4x2x1; None drafts a chain.
    """

    num_assistant_tokens: int = 8
    num_assistant_tokens_schedule: str = "auto"
    assistant_confidence_threshold: float = 0.4
    branching: tuple[int, ...] | None = None

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.CHAIN if self.branching is None else Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        if self.num_assistant_tokens < 1:
            raise OptionError("num_assistant_tokens must be 1 or more.")
        if self.branching is not None and (not self.branching or min(self.branching) < 1):
            raise OptionError("branching must be whole numbers, 1 or more, one a level, such as 4x2x1.")


class Drawn(NamedTuple):
    """One token a row, the law [B, 1, V] that it was drawn from, and whether the draft was sure of it."""

    token: Int[Tensor, "B"]
    law: Float[Tensor, "B 1 V"]
    sure: Bool[Tensor, "B"]


@final
class DraftModel(Drafter):
    """Keeps a slot cache of its own beside the target's, row for row.

    Each proposal first reads what was committed since the last one, be it an accepted draft or not. So nothing
    has to be rolled back, and a row that was not drafted for a while catches up.

    Args:
        model: the draft.
        vocab_size: of the target. The draft's may be narrower or wider, as padded vocabularies are.
    """

    def __init__(self, options: Options, model: CausalLM, vocab_size: int) -> None:
        self._options = options
        self._model = model
        self._vocab_size = vocab_size
        self._cache = model.new_cache()
        self._known: dict[int, int] = {}  # committed tokens of each row that the cache holds
        self.needs = Needs(max_nodes=_most_nodes(options), max_depth=_longest(options))

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._known[row] = 0

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None: ...

    def release(self, row: int) -> None:
        del self._known[row]
        if not self._known:
            self._cache.clear()

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        branching = self._options.branching
        depth = min(plan.length, _longest(self._options))
        if max(view.extents) + depth > self._model.max_length:
            plan = self._within_context(view, plan)
            depth = min(depth, plan.length)
        if depth == 0:
            return Draft(TokenTree.root(view.roots), Law.FIXED)
        self._cache.reserve(max(view.rows) + 1, max(view.extents) + self.needs.max_nodes + _CATCH_UP)
        fresh = [row for row in view.rows if self._known[row] == 0]
        if fresh:  # whoever had the row before may have left NaN behind
            self._cache.wipe(fresh)
        logits = self._read(view)
        if branching is None:
            return self._chain(view, plan, depth, logits)
        return self._tree(view, plan, branching[:depth], logits)

    def _within_context(self, view: View, plan: Plan) -> Plan:
        """Rows whose text has outgrown the draft's context go on without it."""
        rooms = (self._model.max_length - extent for extent in view.extents)
        return replace(plan, lengths=tuple(max(0, min(p, r)) for p, r in zip(plan.lengths, rooms, strict=True)))

    def _read(self, view: View) -> Float[Tensor, "B 1 V"]:
        """Read what is new in each row, up to its root; return the logits after the root."""
        limit = self._model.max_length
        extents = [min(extent, limit) for extent in view.extents]
        far = [b for b, row in enumerate(view.rows) if extents[b] - self._known[row] > _CATCH_UP]
        if far:
            self._catch_up(view, far, extents)
        width = max(max(extents[b] - self._known[row], 1) for b, row in enumerate(view.rows))
        starts = [max(extent - width, 0) for extent in extents]
        offsets = [extent - 1 - start for extent, start in zip(extents, starts, strict=True)]
        bases = torch.tensor(starts, device=view.lengths.device)
        index = bases[:, None] + torch.arange(width, device=bases.device)
        tokens = self._mine(view.history.gather(1, index.clamp(max=view.history.shape[1] - 1)))
        wanted = sorted(set(offsets))
        step = self._model.address(TokenTree.chain(tokens), bases, view.rows, max(starts) + width)
        out = self._model.forward(step, self._cache, keep=torch.tensor(wanted, device=bases.device))
        for row, extent in zip(view.rows, extents, strict=True):
            self._known[row] = extent
        places = torch.tensor([wanted.index(offset) for offset in offsets], device=bases.device)
        return self._widened(out.logits.gather(1, places[:, None, None].expand(-1, 1, out.logits.shape[-1])))

    def _catch_up(self, view: View, far: list[int], extents: list[int]) -> None:
        """Read all but the last token of the rows that are far behind, without the others."""
        rows = [view.rows[b] for b in far]
        starts = [self._known[row] for row in rows]
        counts = [extents[b] - 1 - start for b, start in zip(far, starts, strict=True)]
        tokens = torch.zeros(len(far), max(counts), dtype=torch.long, device=view.history.device)
        for line, (b, start, count) in enumerate(zip(far, starts, counts, strict=True)):
            tokens[line, :count] = view.history[b, start : start + count]
        prefill(self._model, self._cache, rows, self._mine(tokens), starts)
        self._known.update({row: extents[b] - 1 for row, b in zip(rows, far, strict=True)})

    def _chain(self, view: View, plan: Plan, depth: int, logits: Float[Tensor, "B 1 V"]) -> Draft:
        """Draw token after token from q; a path ends after its first unsure token, which is kept."""
        tokens = [view.roots]
        laws = [logits.new_zeros(logits.shape, dtype=torch.float32)]  # the root's, never read
        lengths = torch.zeros_like(view.lengths)
        allowed = torch.tensor(plan.lengths, device=view.lengths.device)
        going = allowed > 0
        for i in range(1, depth + 1):
            paths = Paths(view.history, view.lengths, TokenTree.chain(torch.stack(tokens, 1)), start=i - 1)
            token, law, sure = self._draw(view, plan, logits, paths, i)
            tokens.append(token)
            laws.append(law)
            lengths = lengths + going
            going = going & sure & (i < allowed)
            last = i == depth or (going.device.type == "cpu" and not bool(going.any()))
            if last:
                break
            bases = view.lengths - 1 + i
            chain = TokenTree.chain(self._mine(token[:, None]))
            step = self._model.address(chain, bases, view.rows, max(view.extents) + i)
            logits = self._widened(self._model.forward(step, self._cache).logits)
        tree = TokenTree.chain(torch.stack(tokens, 1), lengths + 1)
        if view.warp.greedy:
            return Draft(tree, Law.FIXED)
        return Draft(tree, Law.CHAIN, torch.cat(laws, 1))

    def _draw(self, view: View, plan: Plan, logits: Float[Tensor, "B 1 V"], paths: Paths, index: int) -> Drawn:
        """Draw the node with this index in every row."""
        if view.warp.greedy:
            token = view.warp(logits, paths).best[:, 0]
            law = logits.float().softmax(-1) if plan.confidence else logits
        else:
            law = proper(view.warp.law(logits, paths))
            u = view.noise.uniform(Stream.DRAFT, torch.full_like(view.lengths, index))
            token = inverse_cdf(law[:, 0], u)
        if plan.confidence:
            sure = law[:, 0].gather(-1, token[:, None])[:, 0] >= plan.confidence
        else:
            sure = torch.ones_like(token, dtype=torch.bool)
        return Drawn(token, law, sure)

    def _tree(self, view: View, plan: Plan, branching: tuple[int, ...], logits: Float[Tensor, "B 1 V"]) -> Draft:
        """Grow level by level. A sampled row draws siblings without replacement, a greedy one takes the likeliest."""
        levels = Levels(branching)
        rows, device = len(view.rows), view.lengths.device
        allowed = torch.tensor(plan.lengths, device=device)[:, None, None]
        tree = TokenTree.root(view.roots)
        laws = [logits.new_zeros(logits.shape, dtype=torch.float32)]
        for level, width in enumerate(branching, start=1):
            begin, end, after = levels.starts[level - 1], levels.starts[level], levels.starts[level + 1]
            paths = Paths(view.history, view.lengths, tree, start=begin)
            if view.warp.greedy:
                tokens, exist = likeliest(view.warp.scores(logits, paths), width)
            else:
                index = torch.arange(end, after, device=device).view(1, end - begin, width).expand(rows, -1, -1)
                drawn = draw_siblings(proper(view.warp.law(logits, paths)), view.noise.uniform(Stream.DRAFT, index))
                tokens, exist = drawn.tokens, drawn.exist
                laws.append(drawn.laws.flatten(1, 2))
            exist = exist & (allowed >= level) & tree.valid[:, begin:, None]
            above = torch.tensor(levels.parents(level), device=device).expand(rows, -1)
            parents = torch.where(exist.flatten(1), above, PAD)
            tree = TokenTree(
                torch.cat([tree.tokens, tokens.flatten(1)], 1), torch.cat([tree.parents, parents], 1), depth=level
            )
            if level < len(branching):
                logits = self._read_level(view, tree, end)
        if view.warp.greedy:
            return Draft(tree, Law.FIXED)
        return Draft(tree, Law.WITHOUT_REPLACEMENT, torch.cat(laws, 1))

    def _read_level(self, view: View, tree: TokenTree, start: int) -> Float[Tensor, "B F V"]:
        """Logits after the newest level of the tree; the levels above it are in the cache."""
        mine = replace(tree, tokens=self._mine(tree.tokens))
        reach = max(view.extents) - 1 + tree.tokens.shape[1]
        step = self._model.address(mine, view.lengths - 1, view.rows, reach, start=start)
        return self._widened(self._model.forward(step, self._cache).logits)

    def _mine(self, tokens: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
        """Token ids that the draft can look up; only padding of a vocabulary is ever beyond."""
        return tokens.clamp(max=self._model.vocab_size - 1)

    def _widened(self, logits: Float[Tensor, "B N v"]) -> Float[Tensor, "B N V"]:
        """The draft's logits over the target's vocabulary, and numbers whatever the draft computed."""
        least = torch.finfo(logits.dtype).min
        missing = self._vocab_size - logits.shape[-1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing), value=least)  # a negative number cuts off
        return logits.nan_to_num(nan=least, posinf=0.0, neginf=least)


def _most_nodes(options: Options) -> int:
    return options.num_assistant_tokens if options.branching is None else Levels(options.branching).nodes


def _longest(options: Options) -> int:
    return options.num_assistant_tokens if options.branching is None else len(options.branching)
