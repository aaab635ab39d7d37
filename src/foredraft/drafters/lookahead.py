"""Lookahead decoding (Fu et al., arXiv:2402.02057): the target drafts for itself by Jacobi iteration.

A window of guesses covers the positions after the root. Each target step extends every guess by the target's token
after it; after a few steps a guess is an n-gram of the target and is stored by its first token. The n-grams that begin
with the root are drafted. There is no training and no second model.

The published method adds the window as extra rows to the forward and verifies only the n-grams. Here both form one
token tree: column i of the window is below the columns before it, which equals the published mask. So the window is
drafted as well. With n-grams of two and no pool this is plain Jacobi decoding (Santilli et al., arXiv:2305.10427).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Fused, Needs, Plan, Rewindable, RowState, StepOut, View
from foredraft.core.errors import OptionError
from foredraft.core.options import SizedOptions, check_bounds, option
from foredraft.core.rng import Noise, RandomStream
from foredraft.core.sampling.params import check_known
from foredraft.core.transfer import to_device
from foredraft.core.tree import merge_paths
from foredraft.drafters.context import BuildContext

_FREE = -1
"""The first token of a free place in a pool."""


@dataclass(frozen=True, slots=True)
class Options(SizedOptions):
    """W, N and G of the paper, with the names of its code (where N is LEVEL)."""

    window_size: int = option(5, "W, columns of the window; each step makes this many n-grams.")
    ngram_size: int = option(4, "N, tokens of an n-gram; a drafted one has N - 1.")
    guess_set_size: int = option(5, "G, n-grams stored per first token and drafted at once; 0 stores none.")
    num_assistant_tokens_schedule: str = option(
        "auto",
        "auto, constant or heuristic. Columns deeper than the plan are not drafted, so heuristic, which shortens "
        "drafts after each rejection, soon uses little of the window.",
        kw_only=True,
    )
    pool: str = option(
        "request",
        "request, one pool of n-grams per request; or shared, one pool for all requests that persists. The output is "
        "the same.",
    )
    pool_size: int = option(1024, "most n-grams in a pool.")
    prompt_ngrams: bool = option(
        False, "the pool starts with the n-grams of the prompt, its last ones if there are more than it holds."
    )

    def __post_init__(self) -> None:
        check_bounds(self, least={"window_size": 1, "guess_set_size": 0, "ngram_size": 2})
        if not self.nodes:
            raise OptionError(
                "A window of one column with n-grams of two and no pool drafts nothing: increase window_size, "
                "ngram_size or guess_set_size."
            )
        if self.prompt_ngrams and not self.guess_set_size:
            raise OptionError("prompt_ngrams needs a pool: guess_set_size must be 1 or more.")
        check_known("pool", {self.pool: None}, ("request", "shared"))
        check_bounds(self, least={"pool_size": max(1, self.guess_set_size)})

    @property
    def nodes(self) -> int:
        """Drafted nodes of the tree: those of the window and those of the n-grams."""
        return (self.window_size + self.guess_set_size) * (self.ngram_size - 1) - 1

    @property
    def depth(self) -> int:
        """Depth of the last column's last token, or of an n-gram."""
        return max(self.window_size + self.ngram_size - 3, self.ngram_size - 1 if self.guess_set_size else 0)


class Found(NamedTuple):
    """G n-grams per row without their first token (M = N - 1 tokens each), and which of them exist."""

    tokens: Int[Tensor, "B G M"]
    exist: Bool[Tensor, "B G"]


class NgramPool(RowState):
    """Pools of n-grams, one per row or one of all rows, with eviction of the least recently added.

    A pool is a table of fixed size ordered by age, the latest first, with the latest few of each key. An n-gram that is
    added again moves to the front. Nothing is read back from the device, and no loop runs over n-grams.

    Args:
        length: N, the tokens of an n-gram; the first is its key.
        per_key: the most n-grams with the same key.
        size: the most n-grams in a pool, at least ``per_key``.
        shared: one pool for all rows, which persists; otherwise a row's is emptied with it, and all with the last row.
    """

    def __init__(self, length: int, per_key: int, size: int, device: torch.device, *, shared: bool = False) -> None:
        self.needs = Needs(learns=shared, shares_text=shared)
        self._per_key = per_key
        self._shared = shared
        self._rows: set[int] = set()
        self._tokens = torch.zeros(0, size, length, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        self._rows.add(row)
        self._tokens = with_rows(self._tokens, 1 if self._shared else row + 1, _FREE)

    def release(self, row: int) -> None:
        self._rows.discard(row)
        if not self._shared:
            self._tokens[row : row + 1] = _FREE
            if not self._rows:
                self._tokens = self._tokens[:0].clone()

    def find(self, rows: Int[Tensor, "B"], keys: Int[Tensor, "B"]) -> Found:
        """The n-grams of each key, the latest first."""
        owners = torch.zeros_like(rows) if self._shared else rows
        size = self._tokens.shape[1]
        recency = torch.arange(size, 0, -1, device=keys.device)
        latest = torch.where(self._tokens[owners, :, 0] == keys[:, None], recency, 0).topk(self._per_key, dim=1)
        return Found(self._tokens[owners[:, None], latest.indices, 1:], latest.values > 0)

    def add(self, rows: Int[Tensor, "B"], ngrams: Int[Tensor, "B K N"], valid: Bool[Tensor, "B K"]) -> None:
        """Add the ``valid`` ones of K n-grams for each of B different rows, the latest last."""
        owners = rows
        if self._shared:
            owners, ngrams, valid = rows.new_zeros(1), ngrams.flatten(0, 1)[None], valid.flatten()[None]
        size = self._tokens.shape[1]
        for part, some in zip(ngrams.split(size, 1), valid.split(size, 1), strict=True):
            self._add(owners, part, some)

    def _add(self, owners: Int[Tensor, "B"], ngrams: Int[Tensor, "B K N"], valid: Bool[Tensor, "B K"]) -> None:
        stored, fresh, count = self._tokens[owners], ngrams.flip(1), ngrams.shape[1]
        every = torch.cat([fresh, stored], 1)
        alive = torch.cat([valid.flip(1), stored[..., 0] != _FREE], 1)
        same = (fresh[:, :, None] == every[:, None]).all(-1) & alive[:, :count, None]
        alive = alive & ~same.triu(1).any(1)  # keep the latest of equal ones
        same_key = (fresh[:, :, None, 0] == every[:, None, :, 0]) & alive[:, None]
        alive = alive & ~(same_key & (same_key.cumsum(2) > self._per_key)).any(1)
        every[..., 0] = torch.where(alive, every[..., 0], _FREE)
        order = alive.int().sort(dim=1, descending=True, stable=True).indices[:, : stored.shape[1]]
        self._tokens[owners] = every.gather(1, order[..., None].expand(-1, -1, every.shape[2]))


def with_rows(table: Shaped[Tensor, "R *k"], count: int, value: int = 0) -> Shaped[Tensor, "S *k"]:
    """The table with at least ``count`` rows, new ones filled with ``value``; it doubles, so that it rarely grows."""
    if count <= len(table):
        return table
    return torch.cat([table, table.new_full((max(count, 2 * len(table)) - len(table), *table.shape[1:]), value)])


class _PendingColumns(NamedTuple):
    """The nodes whose target tokens extend the columns, and which columns are in the tree."""

    rows: tuple[int, ...]
    nodes: Int[Tensor, "B W"]
    columns: Bool[Tensor, "B W"]


@final
class Lookahead(Rewindable):
    """Keeps for each row a window of W columns of N - 1 tokens, and a pool of n-grams.

    Level l of column i is a guess for position i + l after the root, given the levels before it in its column and
    level 0 of the columns to the left. ``anchors`` is the position of level 0 of column 0.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options = options
        width, levels = options.window_size, options.ngram_size - 1
        self._pool: NgramPool | None = None
        if options.guess_set_size:
            sizes, shared = (options.guess_set_size, options.pool_size), options.pool == "shared"
            self._pool = NgramPool(options.ngram_size, *sizes, device, shared=shared)
        needs = Needs(max_nodes=options.nodes, max_depth=options.depth, whole=True)
        super().__init__(needs, *([] if self._pool is None else [self._pool]))
        self._window = torch.zeros(0, width, levels, dtype=torch.long, device=device)
        self._own = torch.zeros(0, width, dtype=torch.long, device=device)  # how many last tokens are the target's
        self._anchors = torch.zeros(0, dtype=torch.long, device=device)
        self._rows: set[int] = set()
        self._unfilled: set[int] = set()  # rows whose window is empty
        self._pending: _PendingColumns | None = None
        self._columns = torch.arange(width, device=device)
        self._paths, self._depths = _column_paths(options, device)

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        self._window, self._own = with_rows(self._window, row + 1), with_rows(self._own, row + 1)
        self._anchors = with_rows(self._anchors, row + 1)
        super().admit(row, prompt, hidden)
        self._rows.add(row)
        self._unfilled.add(row)

    @torch.inference_mode()
    def release(self, row: int) -> None:
        self._rows.discard(row)
        self._unfilled.discard(row)
        super().release(row)
        if self._rows:
            return
        self._pending = None
        self._window, self._own, self._anchors = (t[:0].clone() for t in (self._window, self._own, self._anchors))

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        rows = to_device(view.rows, view.lengths.device)
        window = self._aligned(view, rows)
        levels = self._options.ngram_size - 1
        depth = min(plan.length, self._options.depth)
        allowed = plan.on(rows.device)[:, None]
        columns = (self._depths <= allowed) & (allowed > 0)  # a column is in the tree entirely or not at all
        paths = window.flatten(1)[:, self._paths[:, :depth]]
        lengths = torch.where(columns, self._depths, 0)
        if self._pool is not None:
            guesses, found = self._pool.find(rows, view.roots)
            guesses = torch.nn.functional.pad(guesses, (0, max(depth - levels, 0)))[..., :depth]
            paths = torch.cat([paths, guesses], 1)
            lengths = torch.cat([lengths, torch.where(found, allowed.clamp(max=levels), 0)], 1)
        tree, nodes = merge_paths(view.roots, paths, lengths, budget=self.needs.max_nodes)
        last = (self._depths - 1).clamp(0, depth - 1)[:, None].expand(len(rows), -1, 1)
        nodes = torch.where(self._depths > 0, nodes[:, : len(self._depths)].gather(2, last)[..., 0], 0)
        self._pending = _PendingColumns(view.rows, nodes, columns)
        return Draft(replace(tree, linear=self._pool is None and levels == 1), Law.FIXED)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        pending, self._pending = self._pending, None
        if pending is None or pending.rows != view.rows:  # nothing was drafted, or for other rows
            return
        rows = to_device(view.rows, view.lengths.device)
        window, known = self._window[rows], self._own[rows]
        # a wrapping drafter may have cut or replaced the tree
        tree = draft.tree
        nodes = pending.nodes.clamp(max=tree.tokens.shape[1] - 1)
        exist = (nodes == pending.nodes) & tree.valid.gather(1, nodes)
        columns = pending.columns & exist & (tree.tokens.gather(1, nodes) == window[..., -1])
        batch = torch.arange(len(rows), device=rows.device)[:, None]
        tokens = out.logits[batch, nodes].argmax(-1)
        ngrams = torch.cat([window, tokens[..., None]], 2)
        if self._pool is not None:  # all tokens after the first must be the target's
            self._pool.add(rows, ngrams, columns & (known >= self._options.ngram_size - 2))
        moved = columns.any(1)
        idle = moved[:, None] & ~columns  # these take the contents of the next column
        waiting = torch.where(idle[..., None], window.roll(-1, 1), window)
        self._window[rows] = torch.where(columns[..., None], ngrams[..., 1:], waiting)
        self._own[rows] = torch.where(idle, known.roll(-1, 1), known) + columns.long()
        self._anchors[rows] += moved

    def _aligned(self, view: View, rows: Int[Tensor, "B"]) -> Int[Tensor, "B W L"]:
        """The windows with column 0 at the roots.

        Rows have grown by one token or more, and guesses keep their positions. (The public code moves them by one
        position, whatever was accepted.) Columns that were passed are reused at the far end: their tokens are the
        target's, and may fit another position.
        """
        fresh = [b for b, row in enumerate(view.rows) if row in self._unfilled]
        if fresh:
            self._fill(view, fresh)
            if self._pool is not None and self._options.prompt_ngrams:
                for b in fresh:
                    self._read_prompt(self._pool, view, b)
        places = view.lengths - 1
        columns = (self._columns + (places - self._anchors[rows])[:, None]) % len(self._columns)
        window = self._window[rows].gather(1, columns[..., None].expand(-1, -1, self._window.shape[2]))
        window[:, 0, 0] = view.roots
        self._window[rows], self._own[rows], self._anchors[rows] = window, self._own[rows].gather(1, columns), places
        return window

    def _fill(self, view: View, fresh: list[int]) -> None:
        """Fill new windows with tokens of their rows, picked by a hash of the position.

        All columns have the same guess for a position. So the first trees are chains, and the first N - 2 steps match
        the published ones, which fill the levels one after another.
        """
        which = to_device(fresh, view.lengths.device)
        rows = to_device([view.rows[b] for b in fresh], which.device)
        lengths, (_, width, levels) = view.lengths[which], self._window.shape
        places = lengths[:, None] - 1 + torch.arange(width + levels - 1, device=which.device)
        noise = Noise(torch.zeros_like(lengths), lengths)
        picked = noise.uniform_at(places, RandomStream.DRAFT, torch.zeros_like(places)) * lengths[:, None]
        self._window[rows] = view.history[which].gather(1, picked.long()).unfold(1, levels, 1)
        self._own[rows], self._anchors[rows] = 0, lengths - 1
        self._unfilled.difference_update(view.rows[b] for b in fresh)

    def _read_prompt(self, pool: NgramPool, view: View, b: int) -> None:
        """Add the n-grams of row b's tokens."""
        device, length = view.history.device, self._options.ngram_size
        start = max(view.host_lengths[b] - self._options.pool_size - length + 1, 0)
        tokens = view.history[b, start : view.host_lengths[b]]
        if len(tokens) >= length:
            ngrams = tokens.unfold(0, length, 1)[None]
            pool.add(to_device([view.rows[b]], device), ngrams, torch.ones_like(ngrams[..., 0], dtype=torch.bool))


def _column_paths(options: Options, device: torch.device) -> tuple[Int[Tensor, "W D"], Int[Tensor, "W"]]:
    """The path from the root to the last token of each column, as indices into the flat window, and its length."""
    levels = options.ngram_size - 1
    column = torch.arange(options.window_size, device=device)[:, None]
    step = torch.arange(options.depth, device=device)
    along = (step + 1).clamp(max=options.window_size - 1) * levels
    down = column * levels + (step + 1 - column).clamp(0, levels - 1)
    return torch.where(step < column, along, down), column[:, 0] + levels - 1


def build(options: Options, context: BuildContext) -> Lookahead:
    """lookahead"""
    return Lookahead(options, context.target.device)
