"""Per-row cache of heads that read the target's features: the features, and the head's own keys and values.

Features, keys and values are stored in the slot of their position. Each proposal first reads the tokens committed since
the last one, from the target's true features; leftovers of a draft tree are overwritten or never read (keeping
them lowers acceptance, and changes no output).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import EMPTY_KV, Fused, KVSize, Needs, RowState, StepOut, View
from foredraft.core.transfer import to_device
from foredraft.core.tree import TokenTree
from foredraft.drafters.states.read_rows import ReadRows
from foredraft.model.kv.cache import SlotCache, bucket, persistent_zeros
from foredraft.model.kv.masks import Layout, StepIn, address, kv_extent_of
from foredraft.model.linear.packed import any_weight
from foredraft.model.ops import HeadLayers, TreeSize, UnreadStates
from foredraft.model.prefill import CHUNK
from foredraft.model.recording.segment import Segment, SegmentRows

_FUSED = 0
"""The key of features in what ``fuse`` returns, where hidden states have their layer."""
_MAX_PENDING = 32
"""Features of up to this many steps without a draft are computed together, to save time while nothing is drafted."""
_MAX_POSITION = 1 << 30  # rotary positions are computed, not looked up, so they have no limit


class DraftState(NamedTuple):
    """The head's state after each row's last committed token [B, 1, H], and which rows have one."""

    states: Float[Tensor, "B 1 H"]
    known: Bool[Tensor, "B"]


class _PendingStates(NamedTuple):
    """Target states whose features are not computed yet: some ``nodes`` of a step, those of all rows numbered together.

    ``places``: the row and slot of each. ``on_device``: the slots, where those on the host are upper bounds; None on a
    CPU.
    """

    places: list[tuple[int, int]]
    nodes: Sequence[int]
    hidden: Mapping[int, Float[Tensor, "B N H"]]
    on_device: Int[Tensor, "M"] | None = None

    def states(self) -> dict[int, Float[Tensor, "1 M H"]]:
        """The states, by layer."""
        first, end = self.nodes[0], self.nodes[-1] + 1
        hidden = {tap: states.flatten(0, 1)[None] for tap, states in self.hidden.items()}
        if len(self.nodes) == end - first:  # they rise
            return {tap: states[:, first:end] for tap, states in hidden.items()}
        index = to_device(self.nodes, next(iter(hidden.values())).device)
        return {tap: states.index_select(1, index) for tap, states in hidden.items()}

    def addresses(self, taps: Sequence[int]) -> list[tuple[int, int, list[int]]]:
        """Row and slot of each state, and where it is in the memory of the host, for each of these layers."""
        read = [
            (states.data_ptr(), states.stride(1) * states.itemsize) for states in map(self.hidden.__getitem__, taps)
        ]
        states = zip(self.places, self.nodes, strict=True)
        return [(row, slot, [start + node * size for start, size in read]) for (row, slot), node in states]


class TreeSlots(NamedTuple):
    """The most nodes of a tree, the root's entry included, and the slots that its forwards are addressed for."""

    nodes: int
    kv_extent: int


@final
class FeatureCache(RowState):
    """Entry j of a row has feature f_j and token t_{j+1} as inputs, in slot j at position j.

    Args:
        net: the head's network; tensors are kept on its device.
        layers: its forward.
        features: computes the head's input features from the target's hidden states of the layers ``taps``.
        depth: the number of attention layers.
        window: attention window in positions, the own one included; None for all.

    ``reads_masks``: see ``HeadLayers``. ``rows``: for functions that draft for the rows that were just read.
    """

    def __init__(
        self,
        net: nn.Module,
        layers: HeadLayers,
        features: Callable[[Mapping[int, Tensor]], Tensor],
        taps: tuple[int, ...],
        *,
        depth: int = 1,
        window: int | None = None,
    ) -> None:
        weight = any_weight(net)
        self.needs = Needs(taps, ahead=True)
        self._layers = layers
        self._versions = [0, 0]  # of the features, and of what was prepared
        self._to_features = features
        self._cache = SlotCache(depth)
        self._features = torch.zeros(0, 0, 0, device=weight.device, dtype=weight.dtype)
        self.reads_masks = layers.reads_masks
        self._used: dict[int, int] = {}  # by row: later slots have no features
        self._layout = Layout({"rows": window}, by_type=False)
        self.window = window
        self._rows = ReadRows(self._cache)  # with true features
        self.rows = SegmentRows(self._cache, lambda: tuple(self._versions), self._rows.give_up)
        self._catch_up = Segment("catch-up", self._read_new, self.rows)
        self._pending: list[_PendingStates] = []

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> dict[int, Float[Tensor, "1 T F"]]:
        """The features of a part of a prompt, as ``admit`` takes them."""
        return {_FUSED: self._to_features(hidden)}

    @torch.inference_mode()
    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused, kv_size: KVSize) -> None:
        features = hidden[_FUSED]
        self._store(row, len(prompt) - features.shape[1], features, kv_size)
        begin, end = self._rows.ahead(row, len(prompt) - 1, kv_size)
        if begin < end:
            self._layers.reserve(end)
            bases = torch.full((1,), begin, dtype=torch.long, device=prompt.device)
            self._committed((row,), prompt[None], bases, end, end - begin)
            self._rows.count[row] = end

    def fork(self, row: int, source: int, length: int) -> None:
        """Entry j needs token j + 1."""
        self._rows.fork(row, source, length - 1)

    @torch.inference_mode()
    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        """What was read of the prompt before is kept."""
        features = hidden[_FUSED]
        self._store(row, 0, features)
        self._features[row, features.shape[1] : self._used[row]] = 0  # an earlier request in the row may have left NaN
        self._rows.admit(row, prompt, hidden)

    def _store(self, row: int, begin: int, features: Float[Tensor, "1 T F"], kv_size: KVSize = EMPTY_KV) -> None:
        """Store the features of a part of a prompt; ``kv_size`` as in ``_reserve``."""
        self._flush()
        end = begin + features.shape[1]
        self._reserve(row + 1, end, features.shape[2], kv_size)
        self._features[row, begin:end] = features[0]
        self._fill(row, end)

    def _fill(self, row: int, slots: int) -> None:
        self._used[row] = max(self._used.get(row, 0), slots)

    @torch.inference_mode()
    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        """Keep the target's states of the accepted path, of which the next proposal makes features. On a device these
        are made now, and later slots are overwritten by the next step."""
        width, device, slots = 1, view.lengths.device, None
        if device.type == "cpu":
            paths, hidden = verdict.paths, out.hidden
            if view.static:  # a recorded forward writes to the same tensors each time
                hidden = {tap: states.clone() for tap, states in hidden.items()}
        else:
            width = verdict.path.shape[1]
            paths = [range(width)] * len(view.rows)
            slots = view.lengths[:, None] + torch.arange(-1, width - 1, device=device)
            alone = width == 1 and not view.static
            hidden = {tap: states if alone else verdict.on_path(states) for tap, states in out.hidden.items()}
        count = next(iter(hidden.values())).shape[1]
        firsts = zip(view.rows, view.host_lengths, paths, strict=True)
        places = [(row, length - 1 + i) for row, length, path in firsts for i in range(len(path))]
        nodes = [index * count + node for index, path in enumerate(paths) for node in path]
        several = slots is not None and width > 1  # the next step has some of these slots, too
        if several:
            self._flush()
        self._pending.append(_PendingStates(places, nodes, hidden, None if slots is None else slots.flatten()))
        if several or len(self._pending) >= _MAX_PENDING:
            self._flush()

    def _flush(self) -> None:
        """Compute the pending features and store them in their slots."""
        if not self._pending:
            return
        steps = [step.states() for step in self._pending]
        together = steps[0] if len(steps) == 1 else {tap: torch.cat([own[tap] for own in steps], 1) for tap in steps[0]}
        features = self._to_features(together)[0]
        places = [place for step in self._pending for place in step.places]
        rows, slots = [row for row, _ in places], [slot for _, slot in places]
        self._reserve(max(rows) + 1, max(slots) + 1, features.shape[1])
        on_device = [step.on_device for step in self._pending if step.on_device is not None]
        if on_device:
            self._features[to_device(rows, features.device), torch.cat(on_device)] = features
        elif places == [(rows[0], slot) for slot in range(slots[0], slots[0] + len(places))]:
            self._features[rows[0], slots[0] : slots[-1] + 1] = features
        else:
            self._features[to_device(rows, features.device), to_device(slots, features.device)] = features
        self._stored()

    def _stored(self) -> None:
        """All pending features are in their slots. Last, so that what was interrupted is repeated."""
        for row, slot in [place for step in self._pending for place in step.places]:
            self._fill(row, slot + 1)
        self._pending = []

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """The memory stays."""
        self._rows.release(row)
        if self._rows.count:
            self._flush()
        else:
            self._pending.clear()

    def extend(self, view: View, tree_slots: int) -> DraftState:
        """Read the new entries of each row, up to the one whose token is the root.

        Args:
            tree_slots: to reserve after it.
        """
        self._flush()
        width, used_slots = self._prepare(view, tree_slots)
        places = to_device(view.rows, view.lengths.device)
        tokens = _tokens(view.history, _new(view, width), width)
        states = self._catch_up(view, places, tokens, self.kv_extent_of(used_slots))
        self._rows.read_to(view, _ends(view))
        return DraftState(states, view.lengths > 1)

    def draft(self, view: View, size: TreeSize, by_level: Callable[[], Draft]) -> Draft:
        """Dynamic trees after the new entries of each row; see ``HeadLayers.draft``."""
        return self._layers.draft(view, size, lambda taps: self._unread(view, size, taps), by_level)

    @contextmanager
    def _unread(self, view: View, size: TreeSize, taps: tuple[int, ...]) -> Iterator[UnreadStates]:
        """The new entries of each row, which are read within this context, and among them those without features if
        these are made of the layers ``taps``."""
        if not taps or not self._features.shape[2]:  # the first feature of all is wider than the buffer
            self._flush()
        width, _ = self._prepare(view, 1 + size.top_k * (size.depth - 1))
        fresh = [state for step in self._pending for state in step.addresses(taps)]
        yield UnreadStates(self._cache, width, self._features, fresh)
        self._stored()
        self._rows.read_to(view, _ends(view))

    def _prepare(self, view: View, tree_slots: int) -> tuple[int, int]:
        """Make room for the new entries of each row and for a tree; read all but the last ones of rows far behind.

        Returns:
            the number of entries to read, and the slots that they fill.
        """
        ends = _ends(view)
        self._versions[1] = self._layers.reserve(max(ends) + tree_slots)
        slots, read = max(ends) + tree_slots, lambda far: self._read_alone(view, far, ends)
        self._reserve(0, 0, self._features.shape[2], view.kv_size)
        width = self._rows.catch_up(view, ends, slots, read)
        used_slots = max(max(ends), width)
        self._reserve(max(view.rows) + 1, used_slots, self._features.shape[2])
        return width, used_slots

    def kv_extent_of(self, used_slots: int) -> int:
        """How many slots a forward of few nodes is addressed for, to cover ``used_slots`` of them."""
        slots = self._cache.slots
        return min(kv_extent_of(used_slots, self._features.device), slots) if self.reads_masks else slots

    def slots_of(self, view: View, nodes: int) -> TreeSlots:
        """The slots of a tree of at most ``nodes`` nodes after the entries just read."""
        return TreeSlots(nodes, self.kv_extent_of(max(max(view.host_lengths) - 2, 0) + nodes))

    def _read_alone(self, view: View, far: list[int], ends: list[int]) -> None:
        """Read all but the last entry of the rows that are far behind."""
        self._flush()
        for b in far:
            row = view.rows[b]
            own = slice(b, b + 1)
            for begin in range(self._rows.count[row], ends[b] - 1, CHUNK):
                width = min(CHUNK, ends[b] - 1 - begin)
                base = torch.full_like(view.lengths[own], begin)
                self._committed((row,), view.history[own], base, begin + width, width)

    def _read_new(
        self, view: View, places: Int[Tensor, "B"], tokens: Int[Tensor, "B N"], kv_extent: int
    ) -> Float[Tensor, "B 1 H"]:
        """Read the last entries of each row; return the state after the last one. Can be recorded.

        Args:
            places: the rows' numbers.
            tokens: of the entries.
        """
        width = tokens.shape[1]
        states = self._entries(view.rows, places, tokens, _new(view, width), kv_extent)
        last = ((view.lengths - 1).clamp(max=width) - 1).clamp(min=0)
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))

    def _committed(
        self, rows: Sequence[int], history: Int[Tensor, "B L"], bases: Int[Tensor, "B"], used_slots: int, width: int
    ) -> None:
        """Read ``width`` entries of each row from ``bases``, all below ``used_slots``, with the target's features."""
        self._reserve(max(rows) + 1, used_slots, self._features.shape[2])
        self._entries(rows, to_device(rows, bases.device), _tokens(history, bases, width), bases, used_slots)

    def _entries(
        self,
        rows: Sequence[int],
        places: Int[Tensor, "B"],
        tokens: Int[Tensor, "B N"],
        bases: Int[Tensor, "B"],
        used_slots: int,
    ) -> Float[Tensor, "B N H"]:
        """The states of these entries; there must be room for their features."""
        slots = bases[:, None] + torch.arange(tokens.shape[1], device=bases.device)
        step = address(TokenTree.chain(tokens), bases, rows, used_slots, self._layout, max_position=_MAX_POSITION)
        return self.forward(step, self._features[places[:, None], slots])

    def forward(
        self, step: StepIn, features: Float[Tensor, "B N F"], mask: Float[Tensor, "B 1 N S"] | None = None
    ) -> Float[Tensor, "B N H"]:
        """The head's states for a step; its keys and values are written to their slots.

        Args:
            mask: what the nodes attend to, instead of ``step.visible``.
        """
        return self._layers(step.within(self._cache.slots), self._cache, features, mask)

    def _reserve(self, rows: int, slots: int, width: int, kv_size: KVSize = EMPTY_KV) -> None:
        """Make room for features.

        Args:
            kv_size: what will be needed (see ``SlotCache.reserve``); longer rows, of earlier requests, are cut to it.
        """
        old = self._features.shape
        rows, slots = max(rows, kv_size.rows), bucket(max(slots, kv_size.slots))
        if rows <= old[0] and width <= old[2] and (slots == old[1] if kv_size.slots else slots <= old[1]):
            return
        if rows > old[0]:  # double, so that rows that arrive one by one do not copy everything each time
            rows = max(rows, 2 * old[0])
        if not kv_size.slots:
            slots = max(slots, old[1])
        resized = persistent_zeros(self._features, max(rows, old[0]), slots, max(width, old[2]))
        for row, used in self._used.items():
            held = min(used, slots, old[1])
            resized[row, :held, : old[2]] = self._features[row, :held]
        self._features = resized
        self._versions[0] += 1


def _ends(view: View) -> list[int]:
    """The number of features of each row, and so of its entries."""
    return [length - 1 for length in view.host_lengths]


def _new(view: View, width: int) -> Int[Tensor, "B"]:
    """The first one of the last ``width`` entries of each row."""
    return (view.lengths - 1 - width).clamp(min=0)


def _tokens(history: Int[Tensor, "B L"], bases: Int[Tensor, "B"], width: int) -> Int[Tensor, "B N"]:
    """The tokens of ``width`` entries from ``bases`` on."""
    after = bases[:, None] + torch.arange(1, 1 + width, device=bases.device)
    return history.gather(1, after.clamp(max=history.shape[1] - 1))
