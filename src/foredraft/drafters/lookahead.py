"""Lookahead decoding (Fu et al., arXiv:2402.02057): the target drafts for itself, by Jacobi iteration.

A window of guesses runs ahead of the text. Each step of the target makes every guess one token longer, by what it says
after it; what a guess has become in a few steps is an n-gram of the target's own, and is kept by its first token. The
n-grams that begin with the last token are drafted. So nothing is trained and no second model is run.

The published method adds the window's rows to the forward and verifies the n-grams only. Here both are one token tree,
and no row is run beside it: column i of the window hangs below the columns before it, which is the published mask.
Hence what the window says is drafted as well. With n-grams of two and no pool this is plain Jacobi decoding
(Santilli et al., arXiv:2305.10427).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Needs, Plan, Rewindable, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions
from foredraft.core.rng import Noise, Stream
from foredraft.core.tree import merge_paths
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.ngram_pool import NgramPool, with_rows


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """W, N and G of the paper, by the names of its code (there N is LEVEL).

    window_size: W, columns of the window; each step makes this many n-grams.
    ngram_size: N, tokens of an n-gram; a drafted one is N - 1 long.
    guess_set_size: G, n-grams kept per first token and drafted at once; 0 keeps none.
    pool: request: each request has its own n-grams; shared: all requests share one pool, which stays. Neither changes
        the output.
    pool_size: most n-grams in a pool.
    num_assistant_tokens_schedule: auto, constant or heuristic. A column that is deeper than
        the plan waits, so that heuristic, which shortens paths after each refusal, soon leaves little of the window.
    """

    window_size: int = 5
    ngram_size: int = 4
    guess_set_size: int = 5
    pool: str = "request"
    pool_size: int = 1024

    def __post_init__(self) -> None:
        if self.window_size < 1 or self.guess_set_size < 0:
            raise OptionError("window_size must be 1 or more, and guess_set_size 0 or more.")
        if self.ngram_size < 2:
            raise OptionError("ngram_size must be 2 or more: a token, and what follows it.")
        if not self.nodes:
            raise OptionError(
                "A window of one column with n-grams of two and no pool drafts nothing; make one of window_size, "
                "ngram_size and guess_set_size larger."
            )
        if self.pool not in ("request", "shared"):
            raise OptionError(f"pool is request or shared, not {self.pool!r}.")
        if self.pool_size < max(1, self.guess_set_size):
            raise OptionError("pool_size must be at least guess_set_size, and 1.")

    @property
    def nodes(self) -> int:
        """Of the tree, without the root: those of the window, and those of the n-grams."""
        return (self.window_size + self.guess_set_size) * (self.ngram_size - 1) - 1

    @property
    def depth(self) -> int:
        """Of the last column's last token, or of an n-gram."""
        return max(self.window_size + self.ngram_size - 3, self.ngram_size - 1 if self.guess_set_size else 0)


class _Asked(NamedTuple):
    """In which nodes the target will say how each column goes on, and which columns are in the tree at all."""

    rows: tuple[int, ...]
    nodes: Int[Tensor, "B W"]
    columns: Bool[Tensor, "B W"]


@final
class Lookahead(Rewindable):
    """Keeps for each row a window of W columns of N - 1 tokens, and a pool.

    Level l of column i is a guess for place i + l after the root, whatever was guessed before it in its column and in
    level 0 of the columns to the left. ``anchors`` is the place of level 0 of column 0.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options = options
        width, levels = options.window_size, options.ngram_size - 1
        learns = self._shared and options.guess_set_size > 0
        self.needs = Needs(max_nodes=options.nodes, max_depth=options.depth, learns=learns)
        self._pool: NgramPool | None = None
        if options.guess_set_size:
            self._pool = NgramPool(options.ngram_size, options.guess_set_size, options.pool_size, device)
        self._window = torch.zeros(0, width, levels, dtype=torch.long, device=device)
        self._said = torch.zeros(0, width, dtype=torch.long, device=device)  # last tokens that the target said
        self._anchors = torch.zeros(0, dtype=torch.long, device=device)
        self._rows: set[int] = set()
        self._unfilled: set[int] = set()  # rows whose window has nothing in it yet
        self._asked: _Asked | None = None
        self._columns = torch.arange(width, device=device)
        self._paths, self._depths = _ways(options, device)

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._window, self._said = with_rows(self._window, row + 1), with_rows(self._said, row + 1)
        self._anchors = with_rows(self._anchors, row + 1)
        if self._pool is not None:
            self._pool.reserve(1 if self._shared else row + 1)
        self._rows.add(row)
        self._unfilled.add(row)

    def rewind(self, row: int, length: int) -> None: ...  # the window finds its place when it is next asked for

    @torch.inference_mode()
    def release(self, row: int) -> None:
        self._rows.discard(row)
        self._unfilled.discard(row)
        if self._pool is not None and not self._shared:
            self._pool.empty(row)
        if self._rows:
            return
        self._asked = None
        self._window, self._said, self._anchors = (t[:0].clone() for t in (self._window, self._said, self._anchors))
        if self._pool is not None and not self._shared:
            self._pool.clear()

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        rows = torch.tensor(view.rows, device=view.lengths.device)
        window = self._aligned(view, rows)
        levels = self._options.ngram_size - 1
        depth = min(plan.length, self._options.depth)
        allowed = torch.tensor(plan.lengths, device=rows.device)[:, None]
        columns = (self._depths <= allowed) & (allowed > 0)  # a column is in the tree as a whole or not at all
        paths = window.flatten(1)[:, self._paths[:, :depth]]
        lengths = torch.where(columns, self._depths, 0)
        if self._pool is not None:
            guesses, found = self._pool.find(torch.zeros_like(rows) if self._shared else rows, view.roots)
            guesses = torch.nn.functional.pad(guesses, (0, max(depth - levels, 0)))[..., :depth]
            paths = torch.cat([paths, guesses], 1)
            lengths = torch.cat([lengths, torch.where(found, allowed.clamp(max=levels), 0)], 1)
        tree, nodes = merge_paths(view.roots, paths, lengths, budget=self.needs.max_nodes)
        last = (self._depths - 1).clamp(0, depth - 1)[:, None].expand(len(rows), -1, 1)
        nodes = torch.where(self._depths > 0, nodes[:, : len(self._depths)].gather(2, last)[..., 0], 0)
        self._asked = _Asked(view.rows, nodes, columns)
        return Draft(replace(tree, linear=self._pool is None and levels == 1), Law.FIXED)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        asked, self._asked = self._asked, None
        if asked is None or asked.rows != view.rows:  # nothing was drafted, or for others: the windows wait
            return
        rows = torch.tensor(view.rows, device=view.lengths.device)
        window, known = self._window[rows], self._said[rows]
        # whoever stands between may have cut the tree, or put another in its place
        tree = draft.tree
        nodes = asked.nodes.clamp(max=tree.tokens.shape[1] - 1)
        same = (nodes == asked.nodes) & tree.valid.gather(1, nodes) & (tree.tokens.gather(1, nodes) == window[..., -1])
        columns = asked.columns & same
        batch = torch.arange(len(rows), device=rows.device)[:, None]
        said = out.logits[batch, nodes].argmax(-1)
        ngrams = torch.cat([window, said[..., None]], 2)
        if self._pool is not None:  # what follows the first token must be the target's own
            own = columns & (known >= self._options.ngram_size - 2)
            if self._shared:
                self._pool.add(rows.new_zeros(1), ngrams.flatten(0, 1)[None], own.flatten()[None])
            else:
                self._pool.add(rows, ngrams, own)
        moved = columns.any(1)
        idle = moved[:, None] & ~columns  # what stands at their places now is what the next column held
        waiting = torch.where(idle[..., None], window.roll(-1, 1), window)
        self._window[rows] = torch.where(columns[..., None], ngrams[..., 1:], waiting)
        self._said[rows] = torch.where(idle, known.roll(-1, 1), known) + columns.long()
        self._anchors[rows] += moved

    @property
    def _shared(self) -> bool:
        return self._options.pool == "shared"

    def _aligned(self, view: View, rows: Int[Tensor, "B"]) -> Int[Tensor, "B W L"]:
        """The windows with column 0 at the roots.

        The text has gone on by a token or more, and guesses stay at their places. (The public code moves them on by
        one place, whatever was accepted.) Columns that the text has passed stand at the far end again: what they hold
        is the target's own, and what is said at one place may be said at another.
        """
        fresh = [b for b, row in enumerate(view.rows) if row in self._unfilled]
        if fresh:
            self._fill(view, fresh)
        places = view.lengths - 1
        columns = (self._columns + (places - self._anchors[rows])[:, None]) % len(self._columns)
        window = self._window[rows].gather(1, columns[..., None].expand(-1, -1, self._window.shape[2]))
        window[:, 0, 0] = view.roots
        self._window[rows], self._said[rows], self._anchors[rows] = window, self._said[rows].gather(1, columns), places
        return window

    def _fill(self, view: View, fresh: list[int]) -> None:
        """Begin the windows of some rows with tokens of their texts, picked by a hash of the place alone.

        All columns have the same guess for a place. So the first trees are chains, and the first N - 2 steps are the
        published ones in which the levels are filled one after another.
        """
        which = torch.tensor(fresh, device=view.lengths.device)
        rows = torch.tensor([view.rows[b] for b in fresh], device=which.device)
        lengths, (_, width, levels) = view.lengths[which], self._window.shape
        places = lengths[:, None] - 1 + torch.arange(width + levels - 1, device=which.device)
        noise = Noise(torch.zeros_like(lengths), lengths)
        picked = noise.uniform_at(places, Stream.DRAFT, torch.zeros_like(places)) * lengths[:, None]
        self._window[rows] = view.history[which].gather(1, picked.long()).unfold(1, levels, 1)
        self._said[rows], self._anchors[rows] = 0, lengths - 1
        self._unfilled.difference_update(view.rows[b] for b in fresh)


def _ways(options: Options, device: torch.device) -> tuple[Int[Tensor, "W D"], Int[Tensor, "W"]]:
    """From the root to the last token of each column: W x (N - 1) places of the window in a row, and how many count."""
    levels = options.ngram_size - 1
    column = torch.arange(options.window_size, device=device)[:, None]
    step = torch.arange(options.depth, device=device)
    along = (step + 1).clamp(max=options.window_size - 1) * levels
    down = column * levels + (step + 1 - column).clamp(0, levels - 1)
    return torch.where(step < column, along, down), column[:, 0] + levels - 1


def build(options: Options, context: BuildContext) -> Lookahead:
    """lookahead"""
    return Lookahead(options, context.target.device)
