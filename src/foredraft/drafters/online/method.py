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

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Background, Drafter, Fused, Plan, Trainable, View
from foredraft.core.errors import DataError, DrafterError, OptionError
from foredraft.drafters.context import BuildContext
from foredraft.drafters.online.recorded import RecordedRows
from foredraft.drafters.online.samples import LawSample
from foredraft.drafters.online.train_adapters import adapter_for
from foredraft.drafters.online.trainer import OnlineTrainer, Options, Report
from foredraft.files.provenance import fingerprint
from foredraft.files.write import atomic_save

T = TypeVar("T")

_REPORTS = 1000
"""Number of latest reports kept."""


@final
class Online(Background):
    """Wraps a drafter, records the target's laws for its drafts, and trains it on them.

    Weights change only before a proposal or after a request has ended, on the loop's thread, and never between drafting
    and verification, so q stays the law of the draft. The inner drafter's caches of rows in flight come from older
    weights; that costs very little acceptance (docs/log/heads.md), and only until these rows end: later ones take
    nothing over from rows that were admitted before the change.

    Raises:
        DrafterError: the inner drafter cannot be trained.
    """

    def __init__(self, options: Options, inner: Drafter, law: Law | None = None) -> None:
        if not isinstance(inner, Trainable):
            raise DrafterError(
                f"{inner.__class__.__name__} has no weights to train: online needs a draft model or a trained head "
                "inside, such as online:[draft_model:PATH]."
            )
        self._recorded = RecordedRows(inner.needs, options)
        super().__init__(replace(inner.needs, law=inner.needs.law or law), inner, self._recorded)
        self._options = options
        self._inner = inner
        self._adapter = adapter_for(inner.network)
        self._trainer = OnlineTrainer(self._adapter, options)
        self._checkpoint = (
            None if options.folder is None else OnlineCheckpoint(Path(options.folder), self._adapter.shadow)
        )
        self._task: BackgroundTask[Report] = BackgroundTask(options.threads if options.background else 0)
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

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Fused) -> None:
        super().admit(row, prompt, hidden)
        self._current.add(row)

    def propose(self, view: View, plan: Plan) -> Draft:
        self._recorded.read_back()
        self._update()
        return self._inner.propose(view, plan)

    def release(self, row: int) -> None:
        super().release(row)
        self._update()

    def wait(self) -> None:
        self._task.wait()
        self._publish()

    def _update(self) -> None:
        """Between steps: publish a finished update, and begin another if it is due."""
        self._publish()
        recorded = self._recorded
        if recorded.requests >= self._options.interval and len(recorded.buffer) and self._task.idle:
            samples, recorded.requests = recorded.buffer.take(), 0
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
