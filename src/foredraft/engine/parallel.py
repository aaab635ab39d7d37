"""Tensor parallelism: several processes run one engine each, step by step, on a target of which each has a part.

Rank 0 runs the program. Before each step it sends the others what is new and what has ended, and during the step the
plan. All else is equal by construction: the model's collectives give every rank the same logits, and random numbers
are hashes of seeds. So drafters are replicated, and clocks may differ. The ranks compare their outputs instead of
taking over rank 0's verdict: if a rank drafted other tokens, the logits of that step would be wrong on all of them, and
a verdict that is only taken over would hide it.
"""

import atexit
import logging
from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch import distributed

from foredraft.core.choices import Choices
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import DrafterError, ModelError
from foredraft.engine.engine import Engine
from foredraft.engine.generator import Generator
from foredraft.engine.request import Request, Sequence

_log = logging.getLogger(__name__)
_FOREVER = timedelta(days=3650)  # a server may be idle for long; a rank that dies is noticed at once
_LOST = "Another process of this tensor-parallel target has ended or has failed: start all of them again."
T = TypeVar("T")


def initialised() -> bool:
    """Whether ``torch.distributed`` is."""
    return distributed.is_available() and distributed.is_initialized()


class Ranks:
    """The processes of one tensor-parallel target, which talk over a group of their own.

    ``torch.distributed`` has been initialised, as transformers does when it loads a target in parts.

    Args:
        initialised_before: the program had done so itself, so its groups are not ours to destroy.
    """

    def __init__(self, *, initialised_before: bool) -> None:
        self._initialised_before = initialised_before
        self._group: Any = distributed.new_group(backend="gloo", timeout=_FOREVER)
        self.leads = distributed.get_rank() == 0
        self._open = 0  # engines that are not closed, on rank 0
        self._ended = False

    def share(self, value: T | None) -> T:
        """Rank 0's value, on all ranks.

        Raises:
            ModelError: another process has ended.
        """
        if self._group is None:
            raise ModelError(_LOST)
        box = [value]
        try:
            distributed.broadcast_object_list(box, src=0, group=self._group)
        except (RuntimeError, ValueError) as error:  # the latter if the group is gone
            raise ModelError(_LOST) from error
        return box[0]  # type: ignore[return-value]

    def least(self, value: int | None) -> int | None:
        """The least of all ranks' values; None if one of them is None."""
        found: list[int | None] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(found, value, group=self._group)
        known = [each for each in found if each is not None]
        return min(known) if len(known) == len(found) else None

    def run(self, generators: Seq[Generator]) -> None:
        """Return on rank 0; elsewhere repeat rank 0's steps until it closes these generators or ends, then exit."""
        if not self.leads:
            self._repeat_steps(generators)
        for generator in generators:
            generator.engine.target.collective = False  # a forward outside of a step would wait for the others
        self._open = len(generators)
        atexit.register(self.end)

    def closed(self) -> None:
        """On rank 0: an engine was closed. The others end with the last one."""
        self._open -= 1
        if not self._open:
            self.end()

    def end(self) -> None:
        """On rank 0: let the others end."""
        if not self._ended:
            self._ended = True
            with suppress(Exception):  # they may have ended before
                self.share(None)

    def fail(self) -> None:
        """On rank 0: a step has failed, so the ranks' states may differ. The others notice that the group is gone.

        A rank that waits in a collective of the program's own group waits until that times out.
        """
        self._ended = True
        group, self._group = self._group, None
        with suppress(Exception):
            distributed.destroy_process_group(group if self._initialised_before else None)
        del group  # the last reference: now its connections close

    def _repeat_steps(self, generators: Seq[Generator]) -> NoReturn:
        engines = [generator.engine for generator in generators]
        try:
            while (message := self.share(None)) is not None:
                place, *rest = message
                engine = engines[place]
                assert isinstance(engine, ParallelEngine)
                engine.repeat_step(generators[place], *rest)
        except Exception as error:
            _log.debug("Rank %d stops.", distributed.get_rank(), exc_info=True)
            raise SystemExit(f"foredraft: rank {distributed.get_rank()}: {error}") from error
        for generator in generators:
            generator.close()
        raise SystemExit(0)


class _Digests:
    """Hashes of outputs that grow, by request number. Each call hashes the new tokens only."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # tokens hashed, and their hash

    def of(self, outputs: Mapping[int, Seq[int]]) -> dict[int, int]:
        """The hash of each output; other outputs are forgotten."""
        last, self._last = self._last, {}
        for number, tokens in outputs.items():
            count, digest = last.get(number, (0, 0))
            self._last[number] = len(tokens), hash((digest, *tokens[count:]))
        return {number: digest for number, (_, digest) in self._last.items()}


class ParallelEngine(Engine):
    """An engine whose target is shared by several processes; each of them has the same one.

    A step that fails closes it, since the states of the ranks may then differ.

    Args:
        ranks: the processes.
        place: of this engine among those that share the target, equal on all ranks.

    Raises:
        DrafterError: the ranks may draft unlike each other.
    """

    def __init__(self, *args: Any, ranks: Ranks, place: int, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.drafter.needs.learns:
            raise DrafterError(
                f"The {self.target.ranks} processes of a tensor-parallel target must draft alike, and "
                f"{self.drafter.__class__.__name__} depends on what each of them measures: use another drafter."
            )
        self._ranks = ranks
        self._place = place
        self._digests = _Digests()
        self._numbers: dict[Sequence, int] = {}  # on rank 0, of the requests that the others know
        self._known: dict[int, Sequence] = {}  # on the others
        self._next = 0

    def request(self, *args: Any, **options: Any) -> Request:
        request = super().request(*args, **options)
        if request.params.logits_processor:
            raise ModelError("A logits processor cannot be sent to the processes of a tensor-parallel target.")
        return request

    def submit(self, *args: Any, choices: Choices | None = None, **options: Any) -> list[Sequence]:
        if choices is not None:
            raise ModelError("Processors and criteria of your own cannot be asked on a tensor-parallel target.")
        return super().submit(*args, **options)

    def clear_cache(self) -> None:
        raise ModelError("The weights of a tensor-parallel target are on several processes: load it again.")

    def close(self) -> None:
        opened = not self.closed
        super().close()
        if opened and self._ranks.leads:
            self._ranks.closed()

    def repeat_step(
        self, generator: Generator, new: list[tuple[Any, ...]], gone: list[int], outputs: dict[int, int]
    ) -> None:
        """Run the step that rank 0 has announced.

        Args:
            new: of each new request its number and the first fields of its ``Sequence``, without ``decode``.
            gone: numbers of requests that have ended.
            outputs: see ``_Digests``; of each known request that has not ended.

        Raises:
            ModelError: this rank has other outputs than rank 0.
        """
        if self._digests.of({number: self._known[number].tokens for number in outputs}) != outputs:
            raise ModelError("The processes disagree about the outputs: do they run on the same kind of hardware?")
        arrived = []
        for number, request, *others in new:
            compiled = self.compile_grammar(request.params.grammar)
            decode = partial(generator.decode, shown=request.shown)
            sequence = Sequence(replace(request, grammar=compiled), decode, *others)
            self._known[number] = sequence
            arrived.append(sequence)
        self._admission.submit(arrived)
        self.process_queue()
        self.cancel([self._known.pop(number) for number in gone])
        self._step()

    def _step(self) -> None:
        if self._ranks.leads and not self._announce():
            return
        try:
            self.target.collective = True
            super()._step()
        except BaseException as error:
            self.closed = True
            if self._ranks.leads:
                self._ranks.fail()
            if isinstance(error, ModelError) or not isinstance(error, Exception):
                raise
            raise ModelError(f"{_LOST} The reason: {error}") from error
        finally:
            self.target.collective = not self._ranks.leads

    def _announce(self) -> bool:
        """Send the others what is new and what has ended; false if there is nothing to do for anyone."""
        flight = [each for each in (*self._admission.waiting, *self._running().values()) if not each.finished]
        outputs = self._digests.of({number: each.tokens for each, number in self._numbers.items() if not each.finished})
        gone = [number for sequence, number in self._numbers.items() if sequence.finished]
        if not flight and not gone:
            return False
        self._numbers = {sequence: number for sequence, number in self._numbers.items() if not sequence.finished}
        new = []
        for sequence in flight:
            if sequence not in self._numbers:
                self._numbers[sequence] = self._next
                request = replace(sequence.request, grammar=None)  # compiled grammars stay in their process
                others = sequence.seed, sequence.stream, sequence.priority, sequence.tenant
                new.append((self._next, request, *others))
                self._next += 1
        self._ranks.share((self._place, new, gone, outputs))
        return True

    def _plan(self, view: View, limits: Seq[int]) -> Plan:
        return self._ranks.share(super()._plan(view, limits) if self._ranks.leads else None)
