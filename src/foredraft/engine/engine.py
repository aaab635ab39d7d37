"""Continuous batching: requests wait, are admitted, run step by step beside others, and retire."""

import threading
import time
from collections import deque
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from foredraft.core.drafter import Drafter
from foredraft.core.errors import ForedraftError, NumericsError, PromptError
from foredraft.core.noise import derive_seeds
from foredraft.core.params import SamplingParams
from foredraft.core.stats import StepStats
from foredraft.core.stop import StopRules
from foredraft.core.warp import check_token_ids
from foredraft.engine.batch import Batch
from foredraft.engine.policy import Policy
from foredraft.engine.sequence import Decode, Request, Sequence, TokenLogprobs
from foredraft.engine.step import StepDone, Stepper
from foredraft.model.cache import SlotCache
from foredraft.model.causal import CausalLM
from foredraft.model.prefill import prefill


class Engine:
    """Runs sequences together. One thread at a time steps it; any thread may submit and cancel.

    Args:
        drafter, policy: what proposes, and what decides how much.
        rule: the verification rule; None takes the best one for each draft's law.
        max_rows: so many sequences run at once; the others wait in order.
        exact_nodes: see ``Stepper``.
        cache: of the target, where the drafter shares it; by default a new one.
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter,
        policy: Policy,
        *,
        rule: str | None = None,
        max_rows: int = 32,
        exact_nodes: int = 0,
        cache: SlotCache | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self._stepper = Stepper(target, cache or target.new_cache(), drafter, rule, exact_nodes)
        self._batch = Batch(target.vocab_size, target.device)
        self._waiting: deque[Sequence] = deque()
        self._max_rows = max_rows
        self._drafted: set[int] = set()  # rows that the drafter knows of
        self._lock = threading.RLock()

    def request(self, prompt: Seq[int], params: SamplingParams, eos: Seq[int]) -> Request:
        """Check what was asked for, once.

        Raises:
            PromptError: an empty prompt, one with ids that the model does not have, or one longer than its context.
            OptionError: a parameter names a token that the model does not have.
        """
        if not prompt:
            raise PromptError("The prompt is empty: there is nothing to continue.")
        if not all(0 <= token < self.target.vocab_size for token in prompt):
            raise PromptError(f"The prompt has token ids outside the model's vocabulary of {self.target.vocab_size}.")
        room = self.target.max_length - len(prompt)
        if room < 1:
            raise PromptError(
                f"The prompt has {len(prompt)} tokens; the model's context of {self.target.max_length} leaves no room "
                "for a new one."
            )
        check_token_ids(params, self.target.vocab_size)
        ends = params.eos_token_id if params.eos_token_id is not None else tuple(eos)
        return Request(tuple(prompt), params, StopRules(min(params.max_new_tokens, room), frozenset(ends)))

    def submit(self, request: Request, decode: Decode, count: int = 1) -> list[Sequence]:
        """Queue a request for ``count`` texts, each with a random stream of its own; the first has the seed given."""
        sequences = [Sequence(request, decode, seed) for seed in derive_seeds(request.params.seed, count)]
        with self._lock:
            self._waiting.extend(sequences)
        return sequences

    def exclusive(self) -> AbstractContextManager[object]:
        """While this is held nobody steps: for whoever runs the target outside the loop."""
        return self._lock

    def close(self) -> None:
        """Cancel everything."""
        with self._lock:
            self.cancel([*self._waiting, *self._batch.sequences])

    def run(self, sequences: Seq[Sequence]) -> None:
        """Step until all of these have ended; on an interruption they are cancelled first."""
        try:
            while not all(sequence.finished for sequence in sequences):
                self.step()
        except BaseException:
            self.cancel(sequences)
            raise

    def cancel(self, sequences: Seq[Sequence]) -> None:
        """End these between two steps; what they have said so far stays."""
        with self._lock:
            for sequence in sequences:
                if not sequence.finished:
                    sequence.finish("cancelled")
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.finished)
            self._sweep()

    def step(self) -> None:
        """Admit whoever is waiting, then advance every row by at least one token."""
        with self._lock:
            try:
                self._admit()
                if len(self._batch):
                    self._advance()
            except BaseException as error:  # in the middle of a step: no row in flight can be trusted
                if isinstance(error, Exception):
                    for sequence in self._batch.sequences:
                        sequence.fail(ForedraftError(f"A step of this text's batch failed: {error}"))
                self.cancel(self._batch.sequences)
                raise
            self._sweep()

    def _sweep(self) -> None:
        """Retire what has ended, and give memory back when nothing runs."""
        for row in self._batch.retire():
            self.policy.release(row)
            if row in self._drafted:
                self._drafted.remove(row)
                self.drafter.release(row)
        if not len(self._batch):
            self._stepper.cache.clear()

    def _admit(self) -> None:
        count = min(self._max_rows - len(self._batch), len(self._waiting))
        if count:
            taken = set(self._batch.rows)
            rows = list(islice((row for row in range(self._max_rows) if row not in taken), count))
            sequences = [self._waiting.popleft() for _ in rows]
            try:
                self._batch.admit(rows, sequences)
                self._prefill(rows, sequences)
            except BaseException as error:  # they wait no longer, and perhaps they do not run either
                if isinstance(error, Exception):
                    for sequence in sequences:
                        sequence.fail(ForedraftError(f"Reading this text's prompt failed: {error}"))
                self.cancel(sequences)
                raise

    @torch.inference_mode()
    def _prefill(self, rows: list[int], sequences: list[Sequence]) -> None:
        """Read the prompts but for their last tokens, which are the first roots; a shared prompt is read once."""
        started = time.perf_counter()
        first: dict[tuple[int, ...], int] = {}
        owners = [first.setdefault(sequence.prompt, index) for index, sequence in enumerate(sequences)]
        unique = sorted(set(owners))
        lines = {owner: line for line, owner in enumerate(unique)}
        counts = [len(sequences[i].prompt) - 1 for i in unique]
        tokens = torch.zeros(len(unique), max(counts), dtype=torch.long)
        for line, i in enumerate(unique):
            tokens[line, : counts[line]] = torch.tensor(sequences[i].prompt[:-1])
        tokens = tokens.to(self.target.device)
        cache = self._stepper.cache
        cache.reserve(max(rows) + 1, max(counts) + 1)
        hidden = prefill(self.target, cache, [rows[i] for i in unique], tokens, [0] * len(unique))
        copies = [index for index, owner in enumerate(owners) if owner != index]
        if copies:
            cache.fork([rows[owners[i]] for i in copies], [rows[i] for i in copies], max(counts))
        seconds = time.perf_counter() - started
        for row, owner, sequence in zip(rows, owners, sequences, strict=True):
            line = lines[owner]
            own = {layer: states[line : line + 1, : counts[line]] for layer, states in hidden.items()}
            self.drafter.admit(row, tokens[line, : counts[line]], own)
            self._drafted.add(row)
            sequence.tally.prefill_seconds = seconds

    def _advance(self) -> None:
        """One step of all rows, and what it brings to each sequence."""
        started = time.perf_counter()
        batch = self._batch
        sequences = batch.sequences
        view = batch.view()
        plan = self.policy.plan(view, [self._limit(sequence) for sequence in sequences])
        wants = any(sequence.params.logprobs is not None for sequence in sequences)
        done = self._stepper(view, plan, logprobs=wants)
        batch.append(done.emitted, done.counts)
        kept = []
        for index, (sequence, result) in enumerate(zip(sequences, done.rows, strict=True)):
            if not result.healthy:
                sequence.fail(
                    NumericsError(
                        "There is nothing to say next: the model returned logits that are not numbers, or bans and "
                        f"processors left no token ({len(sequence.tokens)} tokens were generated before)."
                    )
                )
                self._stepper.cache.wipe([view.rows[index]])  # NaN would outlive the row
                kept.append(0)
                continue
            kept.append(sequence.extend(result.emitted, result.accepted))
            if done.logprobs is not None and sequence.params.logprobs is not None:
                sequence.logprobs += _logprobs(
                    done.logprobs[index], result.emitted[: kept[-1]], sequence.params.logprobs
                )
        host_seconds = time.perf_counter() - started - done.draft_seconds - done.verify_seconds
        self.policy.observe(view, plan, replace(done, host_seconds=host_seconds))
        self._count(view.rows, done, kept, time.perf_counter() - started)

    def _limit(self, sequence: Sequence) -> int:
        """The most tokens that a draft for this row can use: one is always the bonus."""
        if not sequence.params.speculate:
            return 0
        return max(0, min(sequence.remaining - 1, self.target.max_length - sequence.length))

    def _count(self, rows: tuple[int, ...], done: StepDone, kept: list[int], seconds: float) -> None:
        stats = StepStats(
            rows=rows,
            depths=tuple(result.depth for result in done.rows),
            drafted=tuple(result.drafted for result in done.rows),
            accepted=tuple(result.accepted for result in done.rows),
            emitted=tuple(kept),
            draft_seconds=done.draft_seconds,
            verify_seconds=done.verify_seconds,
            other_seconds=seconds - done.draft_seconds - done.verify_seconds,
        )
        for index, sequence in enumerate(self._batch.sequences):
            sequence.tally.add(stats, index)


def _logprobs(laws: Float[Tensor, "D V"], tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of the new tokens of one row, and of the ``count`` likeliest tokens at each."""
    chosen = laws[: len(tokens)].gather(1, torch.tensor(tokens, dtype=torch.long, device=laws.device)[:, None])
    top = laws[: len(tokens)].topk(count, dim=-1)
    table = zip(tokens, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [TokenLogprobs(token, own[0], dict(zip(ids, values, strict=True))) for token, own, ids, values in table]
