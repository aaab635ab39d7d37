"""Continuous batching: requests wait, are admitted, run step by step with others, and retire."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace

from foredraft.core.choices import Choices
from foredraft.core.drafter import Drafter, Plan, View
from foredraft.core.errors import ModelError, PromptError
from foredraft.core.rng import request_seed
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.processors import RequestProcessors
from foredraft.core.sampling.stop import StopRules
from foredraft.core.sampling.warp import Warp
from foredraft.core.verify import rule_of
from foredraft.engine import row_work
from foredraft.engine.admission import Admission
from foredraft.engine.ahead import Ahead
from foredraft.engine.fitting import round_up
from foredraft.engine.policy import Policy
from foredraft.engine.prefix_cache import PrefixCache
from foredraft.engine.prompt_reader import PromptReader, prefill_failure
from foredraft.engine.request import Decode, Request, Sequence, fail_all
from foredraft.engine.row_work import Prepared, RowFaults
from foredraft.engine.shared_cores import SharedCores
from foredraft.engine.state import Batch
from foredraft.engine.step import StepInputs, Stepper
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.recording.recorder import Recorder
from foredraft.model.text.grammar import GrammarCompiler
from foredraft.model.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_CPU_PREFILL, _PREFILL = 64, 512
"""Prompt tokens that a step reads while rows run, on a CPU and elsewhere: they take about as long as a step."""


class Engine:
    """Runs sequences in one batch. One thread at a time steps it; any thread may submit and cancel.

    Args:
        drafter, policy: what proposes drafts, and what decides their size.
        wrap: makes the drafter that steps run, such as ``PredictedOutputs``; by default they run ``drafter`` itself.
        rule: the verification rule; None is the default.
        max_rows: the most sequences that run at once; the others wait in order.
        exact_nodes: see ``Stepper``.
        cache: the target's KV cache, if the drafter shares it; by default a new one.
        max_slots: the most slots for which the cache takes memory; None for no limit. Requests that would exceed it
            together wait for each other. If running ones need more as their outputs grow, the last ones wait again;
            what they had is read again, and their outputs continue.
        max_prefill_tokens: the most prompt tokens that a step reads while rows run; by default what takes about as
            long as a step. The exact mode reads prompts whole.
        recorder: records and replays parts of steps; None: they run as they are.
        tokenizer: for grammars; without one, requests with a grammar are refused.
        models: whose changed weights make what was computed from them unusable; by default the target.
        prefix_cache: rows keep their contents when their requests have ended, and prompts that begin alike take them
            over. Off in the exact mode, since what was read in other chunks may differ by rounding.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        policy: Policy,
        *,
        wrap: Callable[[Drafter], Drafter] | None = None,
        rule: str | None = None,
        max_rows: int = 32,
        exact_nodes: int = 0,
        cache: SlotCache | None = None,
        max_slots: int | None = None,
        max_prefill_tokens: int | None = None,
        recorder: Recorder | None = None,
        tokenizer: Tokenizer | None = None,
        models: Seq[TargetModel] = (),
        prefix_cache: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        cache = cache or target.new_cache()
        looped = drafter if wrap is None else wrap(drafter)
        self._stepper = Stepper(target, cache, looped, rule, exact_nodes, recorder, free_rows=self._free_rows)
        draft_nodes = max(round_up(1 + drafter.needs.max_nodes), exact_nodes) - 1
        self.prefixes = PrefixCache(enabled=prefix_cache and not exact_nodes)
        self._models = tuple(models) or (target,)
        self._weights = self._weights_version
        self._admission = Admission(cache, max_rows, max_slots, draft_nodes, self.prefixes, grows=not exact_nodes)
        self.preemptions = 0
        """How often a running request had to wait again for memory."""
        chunk = max_prefill_tokens or (_CPU_PREFILL if target.device.type == "cpu" else _PREFILL)
        self._reader = PromptReader(target, cache, looped, self.prefixes, None if exact_nodes else chunk)
        self.draws = rule is not None and rule_of(rule).draws
        self._batch = Batch(target.vocab_size, target.device, draws=self.draws, times=target.ops.times)
        self._abandoned: deque[Sequence] = deque()  # to cancel in the next step; appended without the lock
        self._request_numbers = itertools.count()
        self.compile_grammar = GrammarCompiler(tokenizer, target.vocab_size)
        self._drafter_rows: set[int] = set()  # rows that may have been admitted to the drafter
        self._drafted = True  # the last plan drafts something
        self.ahead = Ahead(target.device.type == "cuda" and target.ranks == 1)
        self._cores = SharedCores(watch=target.device.type == "cpu")
        self._in_step = False  # a step has begun and has neither ended nor been cleaned up
        self._lock = threading.RLock()
        self.closed = False

    def __repr__(self) -> str:
        return f"Engine({self.target.name}, running={self.running}, waiting={self.waiting}, max_rows={self.max_rows})"

    @property
    def max_rows(self) -> int:
        """The most requests that run at once."""
        return self._admission.max_rows

    @property
    def cache(self) -> SlotCache:
        """The target's KV cache."""
        return self._stepper.cache

    @property
    def prefilling(self) -> int:
        """The number of requests whose prompts are being read."""
        return len(self._reader.requests)

    @property
    def running(self) -> int:
        """The number of requests that have a row; the prompts of some may still be read."""
        return len(self._batch) + self.prefilling

    @property
    def cache_use(self) -> float:
        """The share of the KV cache that committed tokens take; 0 if its size is not limited."""
        limit = self._admission.max_slots
        return sum(sequence.length for sequence in self._batch.sequences) / limit if limit else 0.0

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row or for memory."""
        return len(self._admission)

    def request(self, prompt: Seq[int], params: SamplingParams, eos: Seq[int]) -> Request:
        """Check a prompt and its parameters once and make a request of them.

        Raises:
            PromptError: the prompt is empty, has ids outside the vocabulary, is longer than the context, or needs more
                than ``max_slots``.
            OptionError: a parameter names a token that the model does not have, or the grammar is not valid.
            ModelError: the engine or its target was closed, or the target was changed.
        """
        self.check_tokens(prompt)
        remaining = self.target.max_length - len(prompt)
        if remaining < 1:
            raise PromptError(
                f"The prompt has {len(prompt)} tokens; the model's context of {self.target.max_length} leaves no room "
                "for a new one."
            )
        eos_ids = params.eos_token_id if params.eos_token_id is not None else tuple(eos)
        Warp.of(
            [params],
            vocab_size=self.target.vocab_size,
            eos_token_ids=[tuple(eos_ids)],
            prompt_lengths=[len(prompt)],
            device="cpu",
        )  # what its rules may raise, they raise here
        if params.logits_processor:
            params = replace(params, logits_processor=RequestProcessors(params.logits_processor))
        rules = StopRules(min(params.max_new_tokens, remaining), frozenset(eos_ids))
        request = Request(tuple(prompt), params, rules, self.compile_grammar(params.grammar))
        self._admission.check(request)
        return request

    def check_tokens(self, prompt: Seq[int]) -> None:
        """Check that the target can read a prompt; see ``request``."""
        if self.closed:
            raise ModelError("This generator is closed: make a new one with foredraft.load.")
        self.target.check_ready()
        if not prompt:
            raise PromptError("The prompt is empty: there is nothing to continue.")
        if not all(0 <= token < self.target.vocab_size for token in prompt):
            raise PromptError(f"The prompt has token ids outside the model's vocabulary of {self.target.vocab_size}.")

    def submit(
        self,
        requests: Seq[Request],
        decode: Decode,
        seeds: Seq[int],
        *,
        priority: int = 0,
        tenant: str = "",
        choices: Choices | None = None,
    ) -> list[Sequence]:
        """Queue requests, one seed and one output each; for ``priority`` and ``tenant`` see ``Sequence``.

        Does not wait for a step in progress, so an event loop may call it.

        Args:
            choices: choose the tokens of all of them together. The engine must have no others until they have ended.

        Raises:
            OptionError: not all requests that need it fit into one batch.
        """
        if choices is not None:
            self._admission.check_together(requests)
        sequences = []
        for member, (request, seed) in enumerate(zip(requests, seeds, strict=True)):
            # a ratio rule is lossless if drafts do not depend on the numbers that it will use, also in other requests
            stream = request_seed(seed, next(self._request_numbers)) if self.draws else seed
            sequences.append(Sequence(request, decode, seed, stream, priority, tenant, choices, member))
        self._admission.submit(sequences)
        return sequences

    def exclusive(self) -> AbstractContextManager[object]:
        """A lock that keeps the engine from stepping, for callers that run the target themselves."""
        return self._lock

    def close(self) -> None:
        """Cancel all requests and accept no more."""
        self.closed = True
        with self._lock:
            self.process_queue()
            self.prefixes.clear()
            self.cancel([*self._admission.waiting, *self._running().values()])
            if self._stepper.recorder is not None:
                self._stepper.recorder.close()

    def run(self, sequences: Seq[Sequence]) -> None:
        """Step until all of these have ended; an interruption cancels them and is raised."""
        try:
            while not all(sequence.finished for sequence in sequences):
                self.contained_step(sequences)
            with self._lock:  # another thread may still be in the step that ended them
                pass
        except BaseException:
            self.cancel(sequences)
            raise

    def cancel(self, sequences: Seq[Sequence]) -> None:
        """End these and keep their output so far. Called from inside a step, they leave the batch at its end."""
        with self._lock:
            for sequence in sequences:
                if not sequence.finished:
                    sequence.finish("cancelled")
            self._admission.drop()
            if not self._in_step:  # else this thread is inside a step, or the next step starts with a cleanup
                self._retire_finished()

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """Cancel these at the start of the next step.

        Takes no lock: it is called by finalizers, which may run in any thread even during a step, and by event loops,
        which must not wait for a step.
        """
        self._abandoned.extend(sequences)

    def process_queue(self) -> None:
        """Between steps: queue submitted requests and cancel abandoned ones."""
        with self._lock:
            self._admission.receive()
            if count := len(self._abandoned):
                self.cancel([self._abandoned[index] for index in range(count)])
                for _ in range(count):  # only now, so that an interruption above does not lose them
                    self._abandoned.popleft()

    def contained_step(self, own: Seq[Sequence] = ()) -> None:
        """``step``, but an error is raised only if no request ended with it, or one of the caller's ``own``.

        Otherwise the requests that it ended hold it in their ``error``, and the others continue.
        """
        with self._lock:
            self.process_queue()
            before = self._open()
            try:
                self._step()
            except Exception:
                if self._open() >= before or any(each.error is not None for each in own):
                    raise
                _log.warning("An error in a step ended some of its requests.", exc_info=True)

    def step(self) -> None:
        """Admit waiting requests, read a chunk of their prompts, then advance every row by at least one token.

        An error while prompts are read ends the requests with these prompts, and one in the work for single rows ends
        these; it is raised at the end of the step. Any other exception, KeyboardInterrupt included, ends all rows in
        flight and is raised. The engine stays usable: if the cleanup was interrupted too, the next call repeats it.
        """
        with self._lock:
            self.process_queue()
            self._step()

    def _step(self) -> None:
        self._clean() if self._in_step else self._retire_finished()  # an earlier interruption may have left rows behind
        faults = RowFaults()
        try:
            self._in_step = True
            with self._cores.step(), self.target.stepping():
                self._preempt()
                self._admit(faults)
                self._read_prompts(faults)
                if len(self._batch):
                    self._advance(faults)
            self._in_step = False
        except BaseException as error:  # the state of every row in flight is unknown
            if isinstance(error, Exception):
                fail_all(self._running().values(), f"A step of this request's batch failed: {error}")
            self._clean()
            raise
        self._retire_finished()
        if faults.first is not None:
            raise faults.first

    def _retire_finished(self) -> None:
        """Retire ended rows. If this is interrupted, it is repeated."""
        rows = self._batch.rows
        held = zip(rows, self._batch.sequences, strict=True)
        ended = {row: sequence for row, sequence in held if sequence.finished}
        if rows and not ended and not self._reader.requests and self._drafter_rows.issubset(rows):
            return
        for row, sequence in ended.items():
            self.prefixes.end(row, sequence)
        self._admission.ended(ended.values())
        self._batch.retire()
        self._reader.drop()
        running = self._running()
        self._release(self._drafter_rows.difference(running))
        if not running:
            self.ahead.drop()
            self._admission.rest()

    def _clean(self) -> None:
        """After an interrupted step: end all rows in flight and release them everywhere."""
        for sequence in self._running().values():
            if not sequence.finished:
                sequence.finish("cancelled")
        self._admission.drop()
        self._batch.retire()
        self._reader.clear()
        self.prefixes.clear()
        self.target.reset_hooks()
        self._release(self._drafter_rows)
        self._stepper.cache.free()
        self._in_step = False

    def _release(self, rows: Iterable[int]) -> None:
        """Release rows whose requests have ended. An error in it harms no request, so it is only logged."""
        for row in sorted(rows):
            drafter = self._stepper.drafter
            for name, holder in ((self.policy.__class__.__name__, self.policy), (drafter.name, drafter)):
                try:
                    holder.release(row)
                except Exception:  # unlike an interruption, it would recur
                    _log.warning("%s could not release a row.", name, exc_info=True)
            self._drafter_rows.discard(row)

    def _preempt(self) -> None:
        """While there is too little memory for the next step of all rows, let the last requests wait again."""
        running = self._running()
        while len(running) > 1 and self._admission.lacks(running):
            rows = self._reader.dependent(self._admission.last(running))
            gone = {row: running.pop(row) for row in rows}
            open_requests = [sequence for sequence in gone.values() if not sequence.finished]
            self._admission.requeue(open_requests)  # first: if this is interrupted, they end with the rows in flight
            self._batch.retire(gone)
            self._reader.withdraw(gone)
            self.prefixes.drop(gone)
            self.cache.zero(rows)  # prompts that were read in part may have left NaN
            self._release(self._drafter_rows.intersection(gone))
            self.ahead.drop()
            self.preemptions += len(open_requests)

    @property
    def _weights_version(self) -> int:
        return sum(model.weights_version for model in self._models)

    def _renew(self) -> None:
        """Use nothing that was computed from other weights than the present ones, but for what requests in flight need.

        Prompts that were read in part are read again; a request with the same prompt may join them.
        """
        if self._weights == self._weights_version:
            return
        self.prefixes.clear()
        self._release(self._drafter_rows.intersection(self._reader.restart()))
        self.ahead.drop()
        self._weights = self._weights_version

    def clear_cache(self) -> None:
        """See ``Generator.clear_cache``."""
        with self._lock:
            for model in self._models:
                model.invalidate()
            self._renew()

    def _admit(self, faults: RowFaults) -> None:
        """Give waiting requests rows. Their prompts are read next."""
        running = self._running()
        if not self._admission.waiting or len(running) >= self.max_rows:
            return
        try:
            for model in self._models:
                model.notice_changes()
        except ModelError as error:
            fail_all(self._admission.waiting, prefill_failure(error))
            self._admission.drop()
            faults.first = faults.first or error
            return
        self._renew()
        admitted = self._admission.next(running)
        if not admitted:
            return
        sequences = list(admitted.values())
        try:
            self._admission.allocate(running, admitted)
            row_work.together_or_apart(self._reader.add, admitted, faults)
            self._admission.drop(sequences)
            for sequence in sequences:
                sequence.counters.admitted_at = sequence.counters.admitted_at or time.perf_counter()
        except Exception as error:
            fail_all(sequences, prefill_failure(error))
            raise

    def _read_prompts(self, faults: RowFaults) -> None:
        """Read some of the prompts; those that are complete join the batch."""
        busy, drafts = len(self._batch) > 0, self._drafted or not len(self._batch)
        together = any(sequence.choices is not None for sequence in self._reader.requests.values())
        ready, error = self._reader.read(busy=busy, drafts=drafts, whole=together, begin=self._drafter_rows.add)
        if ready:
            row_work.together_or_apart(self._batch.admit, ready, faults)
            self._reader.drop(ready)
        if error is not None:
            faults.first = faults.first or error
            kept = [row for row, sequence in self._running().items() if not sequence.finished]
            self._release(self._drafter_rows.difference(kept))

    def _open(self) -> int:
        """The number of requests in flight or queued, but for those that are submitted meanwhile."""
        return len(self._admission.waiting) + self.running

    def _running(self) -> dict[int, Sequence]:
        """The sequences in flight by row number, with those whose prompts are being read."""
        return {**self._reader.requests, **dict(zip(self._batch.rows, self._batch.sequences, strict=True))}

    def _plan(self, view: View, limits: Seq[int]) -> Plan:
        return self.policy.plan(view, limits)

    def _inputs(self, prepared: Prepared) -> StepInputs:
        """The next step of the batch, with its plan or the draft that was made ahead."""
        drafted = self.ahead.take(self._batch.sequences)
        plan = drafted.plan if drafted else self._plan(prepared.view, prepared.allowed)
        return prepared.inputs(self._batch, plan, drafted)

    def _free_rows(self) -> Seq[int]:
        return self._admission.free_rows(self._running())

    def _advance(self, faults: RowFaults) -> None:
        """Run one step of all rows and extend each sequence."""
        started = time.perf_counter()
        inputs, sequences = self._inputs(Prepared.of(self._batch, self._stepper)), self._batch.sequences
        self._drafted = inputs.plan.drafts
        launched = self._stepper.launch(inputs)
        if inputs.choices is None:
            self.ahead.draft(self._stepper, self._batch, self.policy, launched)
        step = self._stepper.read(launched)
        kept = row_work.extend(sequences, step, faults)
        row_work.zero_unhealthy(self._stepper.cache, inputs.view.rows, step)
        step.host_seconds = time.perf_counter() - started - step.draft_seconds - step.verify_seconds
        self.policy.observe(inputs.view, inputs.plan, step)
        row_work.count(sequences, step, kept, time.perf_counter() - started, faults)
