"""Online speculative decoding (Liu et al., arXiv:2310.07177): a drafter that is trained while serving.

The target computes its law at every verified position. These laws are recorded, and every few requests the draft is
distilled on them in the background; its weights are replaced between two steps. So it adapts to the requests it serves.
"""

import concurrent.futures
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Generic, TypeVar, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Background, Drafter, Plan, StepOut, Trainable, View
from foredraft.core.errors import DataError, DrafterError, OptionError
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.common.composite import CompositeDrafter, Hidden
from foredraft.drafters.online.samples import LawSample, ReplayBuffer, RowRecord, StepRecord
from foredraft.drafters.online.train_adapters import adapter_for
from foredraft.drafters.online.trainer import OnlineTrainer, Options, Report
from foredraft.files.provenance import fingerprint
from foredraft.files.write import atomic_save

T = TypeVar("T")

_UNREAD = 32
"""Most steps without a draft that are recorded later; beyond, a step reads them back and waits for the device."""
_REPORTS = 1000
"""Number of latest reports kept."""


@final
class Online(CompositeDrafter, Background):
    """Wraps a drafter, records the target's laws for its drafts, and trains it on them.

    Weights change only before a proposal or after a request has ended, on the loop's thread, and never between drafting
    and verification, so q stays the law of the draft. The inner drafter's caches of rows in flight come from older
    weights; that costs very little acceptance (docs/log.md), and only until these rows end: later ones take nothing
    over from rows that were admitted before the change.

    Raises:
        DrafterError: the inner drafter cannot be trained.
    """

    def __init__(self, options: Options, inner: Drafter, law: Law | None = None) -> None:
        if not isinstance(inner, Trainable):
            raise DrafterError(
                f"{inner.__class__.__name__} has no weights to train: online needs a draft model or a trained head "
                "inside, such as online:[draft_model:PATH]."
            )
        super().__init__([inner])
        self._options = options
        self._inner = inner
        self.needs = replace(inner.needs, law=inner.needs.law or law, learns=True, shares_text=True, ahead=False)
        self._adapter = adapter_for(inner.network)
        self._trainer = OnlineTrainer(self._adapter, options)
        self._checkpoint = (
            None if options.folder is None else OnlineCheckpoint(Path(options.folder), self._adapter.shadow)
        )
        self._task: BackgroundTask[Report] = BackgroundTask(options.threads if options.background else 0)
        self._buffer = ReplayBuffer(options.megabytes * 2**20)
        self._records: dict[int, RowRecord] = {}
        self._steps: list[StepRecord] = []  # of the last steps, still on the target's device
        self._requests = 0  # requests that have ended since the last update began
        self._current: set[int] = set()  # rows, released ones too, that were admitted since the weights last changed
        self.reports = () if self._checkpoint is None else self._checkpoint.resume(self._trainer)
        if self.reports:
            self._adapter.publish()

    @property
    def version(self) -> int:
        """The number of changes of the served weights."""
        return self.reports[-1].version if self.reports else 0

    def fork(self, row: int, source: int, length: int) -> None:
        if source in self._current:
            super().fork(row, source, length)

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Hidden) -> None:
        super().admit(row, prompt, hidden)
        self._current.add(row)
        own = self.needs.states(hidden)
        self._records[row] = RowRecord.started(prompt, own, self._options.context // 2, self._options.rejected)

    def propose(self, view: View, plan: Plan) -> Draft:
        self._record_steps()
        self._update()
        return self._inner.propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        super().commit(view, draft, verdict, out)
        if len(self._steps) >= _UNREAD:
            self._record_steps()
        own = StepOut(out.logits, self.needs.states(out.hidden))
        self._steps.append(StepRecord.of(view, draft, verdict, own, self._options.top_laws))

    def release(self, row: int) -> None:
        super().release(row)
        self._record_steps()
        record = self._records.pop(row, None)
        if record is not None:
            self._store(record)
            self._requests += record.rooted
        self._update()

    def wait(self) -> None:
        self._task.wait()
        self._publish()

    def _record_steps(self) -> None:
        """Add the last steps to the rows' records. Between steps this does not wait: the device has finished them."""
        unread, self._steps = self._steps, []
        for step in (each.read_back() for each in unread):
            for b, row in enumerate(step.rows):
                record = self._records[row]
                record.add(step, b)
                if len(record.tokens) >= self._options.context:
                    self._store(record)
                    self._records[row] = record.rest(self._options.context // 2)

    def _store(self, record: RowRecord) -> None:
        """Add a completed sample to the buffer, unless it is empty."""
        sample = record.sample()
        if sample is not None:
            self._buffer.add(sample)

    def _update(self) -> None:
        """Between steps: publish a finished update, and begin another if it is due."""
        self._publish()
        if self._requests >= self._options.interval and len(self._buffer) and self._task.idle:
            samples, self._requests = self._buffer.take(), 0
            self._task.begin(lambda: self._learn(samples))
            self._publish()

    def _publish(self) -> None:
        report = self._task.take()
        if report is not None:
            if report.outcome != "refused":
                self._adapter.publish()
                self._current.clear()
            self.reports = self._reports_with(report)

    def _learn(self, samples: list[LawSample]) -> Report:
        report = self._trainer.learn(samples)
        if self._checkpoint is not None:
            self._checkpoint.save(self._trainer, self._reports_with(report))
        return report

    def _reports_with(self, report: Report) -> tuple[Report, ...]:
        return (*self.reports[1 - _REPORTS :], report)


class OnlineCheckpoint:
    """The last version on disk: the file ``online.pt`` in a folder, written atomically.

    Args:
        folder: created if missing; must not be a model's folder.
        base: the network before any online training.
    """

    def __init__(self, folder: Path, base: nn.Module) -> None:
        folder = folder.expanduser()
        self._path = folder / "online.pt"
        self._base = fingerprint(base)
        if (folder / "config.json").exists():
            raise OptionError(f"{folder} is a model's folder, which is never changed: give online another folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"online cannot write to the folder {folder}: {error.strerror}.") from error

    def resume(self, trainer: OnlineTrainer) -> tuple[Report, ...]:
        """Load the saved version into the trainer; return its reports, or none if nothing is saved.

        Raises:
            OptionError: the file holds a version of another draft.
            DataError: it cannot be read.
        """
        if not self._path.exists():
            return ()
        try:
            state = torch.load(self._path, map_location="cpu", weights_only=True)
            base, learner, reports = state["base"], state["learner"], state["reports"]
        except (OSError, EOFError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise DataError(f"Cannot read {self._path}: delete it to start from the original draft.") from error
        if base != self._base:
            raise OptionError(
                f"{self._path} holds a version of another draft than this one: give online another folder."
            )
        trainer.resume(learner)
        return tuple(Report(**report) for report in reports)

    def save(self, trainer: OnlineTrainer, reports: Sequence[Report]) -> None:
        """Replace the file by the current version and the latest reports.

        Raises:
            DataError: it cannot be written; the earlier version is kept.
        """
        state = {"base": self._base, "reports": [asdict(report) for report in reports], "learner": trainer.state()}
        try:
            atomic_save(self._path, state)
        except (OSError, RuntimeError) as error:
            raise DataError(f"A version cannot be written to {self._path.parent}: {error}.") from error


class BackgroundTask(Generic[T]):
    """Runs one function at a time in its own thread; the caller takes the result later.

    After an error no more tasks are run, and a warning is issued: requests in flight must not fail because of it.

    Args:
        threads: torch threads for the task; 0 runs it immediately in the caller's thread.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._future: Future[T] | None = None
        self._broken = False

    @property
    def idle(self) -> bool:
        """True if another task may begin."""
        return self._future is None and not self._broken

    def begin(self, task: Callable[[], T]) -> None:
        if self._threads:
            threads = self._threads, torch.get_num_threads()
            pool = ThreadPoolExecutor(1, "foredraft-online", _set_threads_here, threads)
            self._future = pool.submit(task)
            pool.shutdown(wait=False)
            return
        future: Future[T] = Future()
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        self._future = future

    def wait(self) -> None:
        """Wait for the running task."""
        if self._future is not None:
            concurrent.futures.wait([self._future])

    def take(self) -> T | None:
        """The result of a completed task, once; None if there is none."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        error = future.exception()
        if error is None:
            return future.result()
        self._broken = True
        warnings.warn(f"The drafter has stopped learning: {error}", RuntimeWarning, stacklevel=2)
        return None


def _set_threads_here(threads: int, default: int) -> None:
    """Set torch's thread count for the calling thread only. A thread takes the last count set anywhere at its first
    query: so this thread queries first, and a short-lived thread restores the default."""
    torch.get_num_threads()
    torch.set_num_threads(threads)
    last = threading.Thread(target=torch.set_num_threads, args=(default,))
    last.start()
    last.join()


def build(options: Options, context: BuildContext) -> Online:
    """online:[SPEC]"""
    specs = context.paths
    if len(specs) != 1:
        raise DrafterError(f"online takes one inner drafter, not {len(specs)}: write online:[SPEC].")
    built = context.drafter(specs[0])
    return Online(options, built.drafter, built.law)
