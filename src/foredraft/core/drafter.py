"""The drafter interface: what a drafter receives, returns and keeps of rows, and its optional protocols."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.errors import DrafterError, ForedraftError, first_line
from foredraft.core.rng import Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.core.transfer import on_host, to_device
from foredraft.core.tree import ROOT, TokenTree
from foredraft.core.worth import Worth


@dataclass(frozen=True, slots=True)
class StepOut:
    """Output of a target forward.

    ``logits``: of the requested nodes. ``hidden``: hidden states of the requested layers. Layer 0 is the embedding,
    layer i the output of the i-th decoder layer.
    """

    logits: Float[Tensor, "B N V"]
    hidden: Mapping[int, Float[Tensor, "B T H"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter needs from the target and the decoding loop.

    ``hidden_layers``: target layers whose hidden states it reads. ``max_nodes``: size of its largest tree, root
    excluded. ``max_depth``: its longest path; 0 means ``max_nodes``, as for a chain. ``scored``: it picks tokens and
    knows each path's probability, so it follows ``Plan.nodes`` and, if each level costs a forward,
    ``Plan.level_price``. ``law``: the law of drawn drafts (``View.draws``), if the options do not determine it; None:
    the options' law. ``learns``: drafts depend on other requests. ``shares_text``: drafts may hold text of other
    requests. ``target_cache``: it drafts in the target's KV cache, which then holds committed tokens only. ``ahead``:
    it can draft for rows whose lengths only the device knows (see ``View.slack``), and so before the last step was read
    back. ``whole``: its drafts are made and verified whole, so their size is chosen before: it cannot stop where more
    does not pay, or some nodes are no guesses but are read for the drafter.
    """

    hidden_layers: tuple[int, ...] = ()
    max_nodes: int = 0
    max_depth: int = 0
    scored: bool = False
    law: Law | None = None
    learns: bool = False
    shares_text: bool = False
    target_cache: bool = False
    ahead: bool = False
    whole: bool = False

    def states(self, hidden: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The hidden states that it reads, of those of several layers: others may be tapped for other users."""
        return {layer: hidden[layer] for layer in self.hidden_layers}

    def plus(self, *states: "RowState") -> "Needs":
        """These needs of a drafter and those of its states, each of which must be able to do with drafts ahead."""
        every = [self, *(state.needs for state in states)]
        return replace(
            self,
            hidden_layers=tuple(dict.fromkeys(layer for each in every for layer in each.hidden_layers)),
            learns=any(each.learns for each in every),
            shares_text=any(each.shares_text for each in every),
            target_cache=any(each.target_cache for each in every),
            whole=any(each.whole for each in every),
            ahead=all(each.ahead for each in every),
        )

    @property
    def longest(self) -> int:
        """Length of the longest path, in tokens."""
        return self.max_depth or self.max_nodes


class LevelPrice(NamedTuple):
    """What drafting another level costs, and verifying a child of each of its parents: in accepted parents.

    A level is drafted if the parents' probabilities, each less ``node`` where it exceeds that, sum to ``level`` at
    least, over all rows. Parents below ``node`` in all rows need no children: none would be worth its price.
    """

    level: float = 0.0
    node: float = 0.0


FREE = LevelPrice()


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to draft in this step.

    ``lengths``: the longest path to draft for each row, in tokens; 0 drafts nothing.
    ``confidence``: a path ends after its first token with a lower draft probability than this. That token is kept:
    dropping a drawn token (``View.draws``) for its value is lossy.
    ``nodes``: for scored drafters, the most drafted nodes per row; the likeliest are kept (0: no limit).
    ``level_price``: for scored drafters, what the nodes of a level must promise to be expanded.
    ``worth``: verify only the nodes that pay, where reading the draft is free; see ``Worth``.
    ``chain``: no branches, since another drafter continues the draft.
    ``copies``: the length of each row's copy (``Drafter.copies``), for which ``lengths`` is 0; empty if no row has one.
    """

    lengths: tuple[int, ...]
    confidence: float = 0.0
    nodes: int = 0
    level_price: LevelPrice = FREE
    worth: Worth | None = None
    chain: bool = False
    copies: tuple[int, ...] = ()
    _on: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def on(self, device: torch.device) -> Int[Tensor, "B"]:
        """``lengths`` on a device, copied once."""
        if device not in self._on:
            self._on[device] = to_device(self.lengths, device)
        return self._on[device]

    @property
    def length(self) -> int:
        """Largest entry of ``lengths``: the depth of the tree."""
        return max(self.lengths, default=0)

    @property
    def drafts(self) -> bool:
        """Whether a drafter has anything to do: a draft or a copy."""
        return any(self.lengths) or any(self.copies)


class KVSize(NamedTuple):
    """Rows and slots per row that a KV cache is allocated for.

    ``most``: of all rows together, those for which it may take memory on a CPU; None for no limit.
    """

    rows: int = 0
    slots: int = 0
    most: int | None = None


EMPTY_KV = KVSize()


@dataclass(frozen=True, slots=True)
class View:
    """The rows in flight, as drafters see them. Tensors are on the target's device.

    ``rows``: the row numbers used at admission; B follows their order. ``history``: the committed tokens of each
    row, prompt included, with the root at ``lengths[b] - 1``; later columns are undefined. ``host_lengths``: the same
    lengths on the host. ``draws``: the verification rule needs drafts of sampled rows that are drawn from their q with
    random numbers of their own; otherwise drafts are picked, and may use the noise with which the target draws.
    ``kv_size``: what the requests in flight need of a KV cache until they end, drafts included. ``slack``: by so much
    may ``host_lengths`` exceed the lengths; 0 unless the drafter can do with that (``Needs.ahead``). ``tips``: the last
    tokens, where they are kept apart; see ``roots``. ``params``: the sampling parameters of each row's request.
    ``outputs``: the tokens of its output, as far as the host knows them. ``recorder``: see ``static``.
    """

    rows: tuple[int, ...]
    history: Int[Tensor, "B L"]
    lengths: Int[Tensor, "B"]
    host_lengths: tuple[int, ...]
    warp: Warp
    noise: Noise
    draws: bool = False
    kv_size: KVSize = EMPTY_KV
    slack: int = 0
    tips: Int[Tensor, "B"] | None = None
    params: tuple[SamplingParams, ...] = ()
    outputs: tuple[Sequence[int], ...] = ()
    recorder: object = None

    @property
    def static(self) -> bool:
        """Whether shapes should be few and follow from the plan alone, since a recorder (``model.recording``) records
        functions of the view."""
        return self.recorder is not None

    @property
    def readable(self) -> bool:
        """Whether values may be read, where that is free: not by a function while it is recorded."""
        return len(self.host_lengths) > 0 and self.lengths.device.type == "cpu"

    @property
    def roots(self) -> Int[Tensor, "B"]:
        """The last committed token of each row."""
        if self.history.shape[1] == 1:  # no other tokens are read, or the rows have one
            return self.history[:, 0]
        if self.tips is not None:
            return self.tips.clone()  # the view's change with the next step
        return self.history.gather(1, self.lengths[:, None] - 1).squeeze(1)

    @property
    def root_slots(self) -> Int[Tensor, "B"]:
        """The slots of the roots in a cache of committed tokens."""
        if self.lengths.device.type == "cpu":
            return on_host([length - 1 for length in self.host_lengths])
        return self.lengths - 1

    @property
    def host_roots(self) -> list[int]:
        """``roots`` on the host; reading them from a device waits for it."""
        return (self.roots if self.tips is None else self.tips).tolist()

    @property
    def root_tree(self) -> TokenTree:
        """The tree of plain decoding: the roots alone."""
        if self.lengths.device.type != "cpu":
            return TokenTree.root(self.roots)
        tokens = [[token] for token in self.host_roots]
        return TokenTree.on_host(tokens, [[ROOT]] * len(tokens), depth=0, linear=True)

    def as_greedy(self) -> "View":
        """The same rows, all greedy: so drafts of sampled rows are the likeliest tokens, whatever the noise says."""
        temperatures = (0.0,) * len(self.warp.host_temperatures)
        return replace(self, warp=replace(self.warp, greedy=True, greedy_rows=None, host_temperatures=temperatures))

    def followed_by(self, tokens: Int[Tensor, "B K"], counts: Sequence[int]) -> "View":
        """The same rows with the first ``counts[b]`` of ``tokens[b]`` appended; these tokens are drafted only."""
        missing = max(self.host_lengths) + tokens.shape[1] - self.history.shape[1]
        history = torch.nn.functional.pad(self.history, (0, max(missing, 0)))
        index = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        lengths = self.lengths + to_device(counts, tokens.device)
        return replace(
            self,
            history=history.scatter(1, index, tokens.clamp(min=0)),
            lengths=lengths,
            host_lengths=tuple(length + count for length, count in zip(self.host_lengths, counts, strict=True)),
            noise=self.noise.at(lengths),
            tips=None,
        )


_METHODS = {"admit", "read_ahead", "fork", "fuse", "copies", "propose", "commit", "release", "rewind"}
_P = ParamSpec("_P")
_R = TypeVar("_R")
_V = TypeVar("_V")


def _named(drafter: str, method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method, with its unexpected errors as ``DrafterError``."""

    @functools.wraps(method)
    def call(*args: _P.args, **given: _P.kwargs) -> _R:
        try:
            return method(*args, **given)
        except ForedraftError:
            raise
        except Exception as error:
            raise drafter_fault(f"{drafter}.{method.__name__}", error) from error

    return call


def drafter_fault(place: str, error: Exception) -> DrafterError:
    """The error of a drafter's code, in a function of this name."""
    return DrafterError(f"{place} failed with {error.__class__.__name__}: {first_line(error)}; see its package.")


Fused = Mapping[int, Float[Tensor, "1 F G"]]
"""What ``RowState.fuse`` returned of the tokens of a prompt."""


class RowState:
    """What is kept of each row between steps: nothing, unless it has ``states``. Then it is these together, and what is
    called for a row is called for each of them, in order.

    ``needs``: what it needs of the target; the loop reads that of the drafter, which includes its states' (see
    ``Needs.plus``).
    """

    states: tuple["RowState", ...] = ()
    needs: Needs = Needs()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__module__.startswith("foredraft."):
            for name in _METHODS & vars(cls).keys():
                setattr(cls, name, _named(cls.__name__, vars(cls)[name]))

    def fuse(self, hidden: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Reduce the hidden states [1, T, H] of a part of a prompt to what ``admit`` reads of them, [1, F, G].

        Without states, to all. A prompt is read in parts. What this returns for each is concatenated along dimension 1,
        by key, so the target's states of a long prompt are never held together. It has an entry for each token, or one
        for the last token: ``admit`` of a prompt that begins like an earlier one gets as many of the earlier entries as
        tokens are shared, and those of at least one token of its own.
        """
        if not self.states:
            return hidden
        fused = (state.fuse(state.needs.states(hidden)) for state in self.states)
        return {len(self.states) * key + index: own for index, each in enumerate(fused) for key, own in each.items()}

    def _by_state(self, fused: Mapping[int, Tensor]) -> Iterator[tuple["RowState", dict[int, Tensor]]]:
        """Each state with what its own ``fuse`` returned."""
        count = len(self.states)
        for index, state in enumerate(self.states):
            yield state, {key // count: own for key, own in fused.items() if key % count == index}

    def read_ahead(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused, kv_size: KVSize) -> None:
        """Read some of a prompt before ``admit``: called between steps while the target reads a long one.

        So the row's first proposal needs not read all of it and hold up the other rows. A call should read no more than
        ``model.prefill.CHUNK`` tokens. Optional: what was not read here is read later.

        Args:
            prompt: the tokens that the target has read so far.
            hidden: what ``fuse`` returned for those of them that are new since the last call.
            kv_size: as in ``View``.
        """
        for state, own in self._by_state(hidden):
            state.read_ahead(row, prompt, own, kv_size)

    def fork(self, row: int, source: int, length: int) -> None:
        """Start a row whose prompt begins with the first ``length`` tokens of ``source``; called before ``read_ahead``
        and ``admit``.

        ``source`` is a row in flight, or a released one whose number was not used since; the row itself, too. Optional:
        what is not taken over here is read later.
        """
        for state in self.states:
            state.fork(row, source, length)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        """Start a row. ``prompt`` excludes the prompt's last token, which is the first root.

        ``hidden`` are the target's hidden states of ``prompt`` as ``fuse`` returned them, for the layers in ``needs``.
        T is 0 for a prompt of one token.
        """
        for state, own in self._by_state(hidden):
            state.admit(row, prompt, own)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        """Take in the verification of ``draft``; ``out`` is the target's forward.

        Called after every step, including steps that drafted nothing (``draft`` is then the root alone). Rows in
        ``draft.copied`` hold a copy in place of what was proposed.
        """
        for state in self.states:
            if state.commits:
                state.commit(view, draft, verdict, replace(out, hidden=state.needs.states(out.hidden)))

    @property
    def commits(self) -> bool:
        """Whether it, or one of its states, has a ``commit`` of its own."""
        own = getattr(self.commit, "__func__", None) is not RowState.commit
        return own or any(state.commits for state in self.states)

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first ``length`` tokens of the row; other tokens may follow them in the next view."""
        for state in self.states:
            state.rewind(row, length)

    def release(self, row: int) -> None:
        """Drop what is kept of a finished row. Its number will be reused.

        After an interruption (Ctrl-C) the row's ``admit`` or ``release`` may have run partly or not at all, so
        releasing an unknown row must not fail.
        """
        for state in self.states:
            state.release(row)


class ByRow(dict[int, _V], RowState):
    """A value for each row, dropped when the row is released."""

    needs = Needs(ahead=True)

    def release(self, row: int) -> None:
        self.pop(row, None)


class Drafter(RowState, ABC):
    """Proposes draft trees. Subclasses are final; a stateless drafter defines ``propose`` only.

    A drafter's mistakes (weights, vocabulary, cache) cost speed and never correctness, provided that each draft carries
    the law that it was actually drawn from. A draft that cannot be verified raises a ``DrafterError``, and so does an
    error in a method of another package's drafter: users see its name and the method's.

    Args:
        needs: apart from what ``states`` need; by default those of its class.
        states: what it keeps of each row. Other drafters inside are among them.
    """

    def __init__(self, needs: Needs | None = None, *states: RowState) -> None:
        self.needs = (self.needs if needs is None else needs).plus(*states)
        self.states = states

    @property
    def name(self) -> str:
        """In error messages."""
        return self.__class__.__name__

    def copies(self, view: View, limits: Sequence[int]) -> tuple[int, ...]:
        """The length of each row's copy in the next step, 0 for rows without one; none by default.

        A copy is a chain that ``propose`` takes from elsewhere, such as a text that came with the request, and marks in
        ``Draft.copied``. Called before the plan, which drafts nothing for these rows.

        Args:
            limits: the most draft tokens that each row can use.
        """
        return ()

    @abstractmethod
    def propose(self, view: View, plan: Plan) -> Draft:
        """Draft a tree for every row of ``view``; node 0 of each tree is ``view.roots``."""


class Rewindable(Drafter):
    """A drafter for nested loops: its "committed" tokens may be drafts themselves, which ``rewind`` rolls back.

    The next view holds the tokens that replace them. ``commit`` also covers tokens that are rolled back later.
    """


class Trainable(Drafter):
    """A drafter whose network can be trained online, while it drafts; see ``drafters.online``."""

    @property
    @abstractmethod
    def network(self) -> object:
        """The draft network: a ``torch.nn.Module`` or a ``TargetModel``."""


class Background(Drafter):
    """A drafter with a background thread."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for background work; called between benchmark runs."""
