"""What a head that reads the target's features remembers of each row: the features, and keys and values of its own.

A feature stands in the slot of its position, and so do the head's keys and values for the row that read it. Each
proposal reads what was committed since the last one, always from the target's true features; what a draft tree left
behind is overwritten or never looked at (heads.md 6.4: keeping it costs acceptance and nothing shows it).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from foredraft.core.draft import Verdict
from foredraft.core.drafter import StepOut, View
from foredraft.core.tree import TokenTree
from foredraft.drafters.common.tree_builder import TreeBuilder
from foredraft.drafters.common.tree_ops import ranked
from foredraft.heads.nets.eagle import EagleNet
from foredraft.model.attention import masked_attention
from foredraft.model.cache import SlotCache, SlotView, bucket, persistent_zeros
from foredraft.model.cpu_linear import any_weight
from foredraft.model.masks import Layout, StepIn, address, extent_of

_FAR = 16
"""A row that has more than this to read is brought up on its own; the others need not read along."""
_CHUNK = 512
_WAITING = 32
"""The features of so many steps without a draft are made together: while drafting rests, the head costs nothing."""
_NO_END = 1 << 30  # rotary positions are computed, not looked up, so there is no last one

Read = Callable[[Tensor, Tensor, Tensor, Callable[[int, Tensor, Tensor, Tensor], Tensor]], Tensor]
"""``read(tokens [B, N], features [B, N, F], positions [B, N], attend) -> states [B, N, H]``."""


class DraftState(NamedTuple):
    """The state after each row's last committed token [B, 1, H], and which rows have one."""

    states: Float[Tensor, "B 1 H"]
    known: Bool[Tensor, "B"]


class _Waiting(NamedTuple):
    """States of the target that no features were made of yet: of these rows, from these positions on."""

    rows: tuple[int, ...]
    starts: Int[Tensor, "B"]
    extent: int  # of the longest text
    hidden: Mapping[int, Float[Tensor, "B D H"]]


class FeatureCache:
    """Row j of a text is what reads feature f_j and token t_{j+1}: in slot j, at position j.

    Args:
        net: whose weights read; its device is where everything lies.
        read: one forward of the net.
        features: what rows read, from the target's hidden states.
        layers: how many attention layers ``read`` has.
        window: how many positions a row sees, itself included; None for all.
        prepare: told beforehand how far positions go.
    """

    def __init__(
        self,
        net: nn.Module,
        read: Read,
        features: Callable[[Mapping[int, Tensor]], Tensor],
        *,
        layers: int = 1,
        window: int | None = None,
        prepare: Callable[[int], None] = lambda length: None,
    ) -> None:
        weight = any_weight(net)
        self._read = read
        self._prepare = prepare
        self._to_features = features
        self._cache = SlotCache(layers)
        self._features = torch.zeros(0, 0, 0, device=weight.device, dtype=weight.dtype)
        self._layout = Layout({"rows": window}, by_type=False)
        self.window = window
        self._known: dict[int, int] = {}  # rows of each text whose keys and values are of true features
        self._waiting: list[_Waiting] = []

    def admit(self, row: int, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        """A text begins with these states of the target; a chunk of them at a time is fused."""
        self._settle()
        length = next(iter(hidden.values())).shape[1]
        for begin in range(0, max(length, 1), _CHUNK):
            features = self._to_features({tap: states[:, begin : begin + _CHUNK] for tap, states in hidden.items()})
            self._reserve(row + 1, length, features.shape[2])
            self._features[row, begin : begin + features.shape[1]] = features[0]
        self._known[row] = 0

    def commit(self, view: View, verdict: Verdict, out: StepOut) -> None:
        """Keep the features of the accepted path; what lies beyond it is overwritten by the next step's."""
        alone = verdict.path.shape[1] == 1
        path = verdict.path.clamp(min=0)[..., None]
        hidden = {tap: states.gather(1, path.expand(-1, -1, states.shape[2])) for tap, states in out.hidden.items()}
        if not alone:
            self._settle()
        self._waiting.append(_Waiting(view.rows, view.lengths - 1, max(view.extents), hidden))
        if not alone or len(self._waiting) >= _WAITING:
            self._settle()

    def _settle(self) -> None:
        """Make features of what waits, and put them into their slots."""
        if not self._waiting:
            return
        steps = self._waiting
        features = self._to_features({tap: torch.cat([step.hidden[tap] for step in steps]) for tap in steps[0].hidden})
        width = features.shape[1]
        rows = [row for step in steps for row in step.rows]
        self._reserve(max(rows) + 1, max(step.extent for step in steps) - 1 + width, features.shape[2])
        starts = torch.cat([step.starts for step in steps])[:, None]
        slots = starts + torch.arange(width, device=features.device)
        self._features[torch.tensor(rows, device=features.device)[:, None], slots] = features
        self._waiting = []  # last: who was interrupted does it again

    def release(self, row: int) -> None:
        """Forget a text; the last one takes the memory with it."""
        self._known.pop(row, None)
        if self._known:
            self._settle()
        else:
            self._waiting.clear()
            self._cache.clear()
            self._features = persistent_zeros(self._features, 0, 0, 0)

    def extend(self, view: View, room: int) -> DraftState:
        """Read what is new in each text, up to the row whose token is the root.

        Args:
            room: slots that will be wanted behind it, for a tree.
        """
        self._settle()
        ends = [extent - 1 for extent in view.extents]  # features there are, hence rows
        self._prepare(max(ends) + room)
        self._cache.reserve(max(view.rows) + 1, max(ends) + room + _FAR)
        fresh = [row for row in view.rows if self._known[row] == 0]
        if fresh:  # whoever had the row before may have left NaN behind
            self._cache.zero(fresh)
        far = [b for b, row in enumerate(view.rows) if ends[b] - self._known[row] > _FAR]
        if far:
            self._catch_up(view, far, ends)
        width = max(max(end - self._known[row], 1) for end, row in zip(ends, view.rows, strict=True))
        starts = [max(end - width, 0) for end in ends]
        states = self._committed(view, starts, width)
        self._known.update(zip(view.rows, ends, strict=True))
        device = view.lengths.device
        last = torch.tensor([max(end - 1 - start, 0) for end, start in zip(ends, starts, strict=True)], device=device)
        states = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))
        return DraftState(states, view.lengths > 1)

    def growth(self, view: View, nodes: int) -> "Growth":
        """A tree of at most so many nodes that grows behind the rows just read; its node 0 is the root's row."""
        return Growth(self, view, nodes)

    def _catch_up(self, view: View, far: list[int], ends: list[int]) -> None:
        """Read all but the last row of the texts that are far behind, without the others."""
        for b in far:
            row = view.rows[b]
            one = torch.tensor([b], device=view.lengths.device)
            alone = View((row,), view.history[one], view.lengths[one], (view.extents[b],), view.warp, view.noise)
            for begin in range(self._known[row], ends[b] - 1, _CHUNK):
                self._committed(alone, [begin], min(_CHUNK, ends[b] - 1 - begin))
            self._known[row] = ends[b] - 1

    def _committed(self, view: View, starts: Sequence[int], width: int) -> Float[Tensor, "B N H"]:
        """Read ``width`` rows of each text from ``starts`` on, with the target's features."""
        device = view.lengths.device
        self._reserve(max(view.rows) + 1, max(starts) + width, self._features.shape[2])
        bases = torch.tensor(starts, device=device)
        slots = bases[:, None] + torch.arange(width, device=device)
        tokens = view.history.gather(1, (slots + 1).clamp(max=view.history.shape[1] - 1))
        features = self._features[torch.tensor(view.rows, device=device)[:, None], slots]
        step = address(
            TokenTree.chain(tokens),
            bases,
            view.rows,
            max(starts) + width,
            self._layout,
            dtype=features.dtype,
            max_position=_NO_END,
        )
        return self.forward(step, features)

    def forward(self, step: StepIn, features: Float[Tensor, "B N F"]) -> Float[Tensor, "B N H"]:
        """The states of some rows, whose keys and values go to their slots."""
        window = SlotView(self._cache, step.rows, step.prefix, step.slots, step.extent)
        mask = step.masks["rows"]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._cache.write(layer, key, value, window)
            return masked_attention(query, keys, values, mask)

        return self._read(step.tokens, features, step.positions, attend)

    def _reserve(self, rows: int, slots: int, width: int) -> None:
        have = self._features.shape
        if rows <= have[0] and slots <= have[1] and width <= have[2]:
            return
        if rows > have[0]:  # texts come one by one: doubled, so that what is stored is not copied for each
            rows = max(rows, 2 * have[0])
        shape = max(rows, have[0]), max(bucket(slots), have[1]), max(width, have[2])
        wider = persistent_zeros(self._features, *shape)
        wider[: have[0], : have[1], : have[2]] = self._features
        self._features = wider


def eagle_memory(net: EagleNet) -> FeatureCache:
    """The memory of an EAGLE head."""
    return FeatureCache(
        net, net, net.features, layers=net.depth, window=net.window, prepare=lambda length: net.rotary.reserve(length)
    )


class Growth:
    """The draft tree of one proposal in the head's cache, level by level: each node sees its ancestors and the text.

    The node numbers of this tree are those in which nodes were grown, the root being 0.
    """

    def __init__(self, memory: FeatureCache, view: View, nodes: int) -> None:
        device = view.lengths.device
        rows = list(view.rows)
        self._memory = memory
        self._bases = (view.lengths - 2).clamp(min=0)[:, None]
        self._rows = torch.tensor(rows, device=device)
        self._prefix = len(rows) if rows == list(range(len(rows))) else None
        self._extent = extent_of(max(max(view.extents) - 2, 0) + nodes)
        self._slots = torch.arange(self._extent, device=device)
        self._text = (self._slots < self._bases)[:, None]  # [B, 1, S]
        self._family = torch.ones(len(rows), 1, 1, dtype=torch.bool, device=device)  # who sees whom in the tree
        self._depths = [0]

    def grow(
        self, tokens: Int[Tensor, "B F"], parents: Int[Tensor, "B F"], features: Float[Tensor, "B F K"]
    ) -> Float[Tensor, "B F H"]:
        """States of another level of nodes. ``features`` are what stands in for the target's."""
        (rows, count), before = tokens.shape, len(self._depths)
        depth = self._depths[-1] + 1
        self._depths += [depth] * count
        above = self._family.gather(1, parents[..., None].expand(-1, -1, before))
        itself = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        sees = torch.cat([above, itself], dim=2)
        self._family = torch.cat([torch.nn.functional.pad(self._family, (0, count)), sees], dim=1)
        text, window = self._text, self._memory.window
        if window is not None:
            text = text & (self._bases + depth - self._slots < window)[:, None]
            sees = sees & torch.tensor([depth - other < window for other in self._depths], device=sees.device)
        places = self._bases + torch.arange(before + count, device=tokens.device)
        visible = text.expand(-1, count, -1).scatter(2, places[:, None].expand(-1, count, -1), sees)
        mask = torch.zeros(visible.shape, dtype=features.dtype, device=tokens.device)
        mask.masked_fill_(~visible, torch.finfo(features.dtype).min)
        step = StepIn(
            tokens=tokens,
            positions=(self._bases + depth).expand(-1, count),
            slots=places[:, before:],
            masks={"rows": mask[:, None]},
            rows=self._rows,
            prefix=self._prefix,
            extent=self._extent,
        )
        return self._memory.forward(step, features)


@final
class HeadTreeBuilder(TreeBuilder):
    """A tree that grows on an EAGLE head, each node reading its parent's state. ``FeatureCache.extend`` has given the
    ``states`` after the root; there will be at most so many ``nodes``."""

    def __init__(
        self, net: EagleNet, memory: FeatureCache, view: View, states: Float[Tensor, "B 1 H"], nodes: int
    ) -> None:
        super().__init__(view, net.logits(states))
        self._net = net
        self._growth = memory.growth(view, nodes)
        self._states = states

    def wide(self) -> Float[Tensor, "B F V"]:
        least, size = torch.finfo(self.logits.dtype).min, self._net.target.vocab_size
        logits = self.logits.nan_to_num(nan=least, posinf=0.0, neginf=least)
        if self._net.vocabulary is None:
            return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=least)
        wide = logits.new_full((*logits.shape[:-1], size), least)
        return wide.index_copy(-1, self._net.vocabulary, logits)

    def ranked(self, count: int) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        ids, scores = ranked(self.logits, count, self.view.warp)
        return ids if self._net.vocabulary is None else self._net.vocabulary[ids], scores

    def _after_newest(self) -> Float[Tensor, "B F v"]:
        parents = self.read.parents[:, self.begin :]
        above = parents - (self.begin - self._states.shape[1])  # places among the states of the level before
        carried = self._net.carry(self._states)
        carried = carried.gather(1, above[..., None].expand(-1, -1, carried.shape[2]))
        self._states = self._growth.grow(self.read.tokens[:, self.begin :], parents, carried)
        return self._net.logits(self._states)
