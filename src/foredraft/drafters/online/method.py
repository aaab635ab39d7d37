"""Online speculative decoding (Liu et al., arXiv:2310.07177): a drafter that is trained while serving.

The target computes its law at every verified position. These laws are recorded, and every few requests the draft is
distilled on them in the background; its weights are replaced between two steps. So it adapts to the requests it serves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import Background, Drafter, Plan, StepOut, Trainable, View
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.options import DrafterOptions
from foredraft.core.sampling.params import check_known
from foredraft.drafters.common.build_context import BuildContext
from foredraft.drafters.online.checkpoints import Checkpoints
from foredraft.drafters.online.replay_buffer import ReplayBuffer, RowRecord, StepRecord
from foredraft.drafters.online.train_adapters import adapter_for
from foredraft.drafters.online.trainable import Sample, TrainAdapter
from foredraft.drafters.online.trainer import LOSSES, OnlineTrainer, Report, TrainConfig
from foredraft.drafters.online.worker import BackgroundTask

LEARN = ("rejected", "all")


@dataclass(frozen=True, slots=True)
class Options(DrafterOptions):
    """When and how the inner drafter is trained; its own options set how it drafts.

    interval: requests between updates.
    interval_positions: also update after this many verified positions; 0: never.
    learn: all (verified positions) or rejected (only those where a draft was rejected).
    loss: forward_kl, reverse_kl or jsd, between the target's and the draft's distributions.
    jsd_weight: weight of the target's distribution in the Jensen-Shannon divergence.
    lr: learning rate of AdamW, constant.
    passes: passes over the positions of an interval.
    batch: samples per optimizer step.
    context: tokens of a sample; longer ones are split.
    top_laws: tokens kept of each target distribution; the others count as one outcome.
    positions: most positions in the replay buffer; the oldest are dropped first.
    megabytes: most megabytes in the replay buffer.
    background: yes, train in a thread while serving; no, train between requests.
    threads: CPU threads for training in the background.
    folder: folder for saved versions, from which another process continues.
    """

    interval: int = 8
    interval_positions: int = 0
    learn: str = "all"
    loss: str = "forward_kl"
    jsd_weight: float = 0.5
    lr: float = 1e-4
    passes: int = 1
    batch: int = 4
    context: int = 512
    top_laws: int = 64
    positions: int = 32768
    megabytes: int = 256
    background: bool = True
    threads: int = 1
    folder: str | None = field(default=None, metadata={"unset": "not saved"})

    @property
    def law(self) -> Law:
        """The law of a draft model; for a spec, the law of the inner drafter counts."""
        return Law.CHAIN

    def __post_init__(self) -> None:
        check_known("loss", {self.loss: None}, LOSSES)
        check_known("learn", {self.learn: None}, LEARN)
        for name in ("interval", "passes", "batch", "top_laws", "positions", "megabytes", "threads"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be 1 or more.")
        if self.interval_positions < 0:
            raise OptionError("interval_positions must be 0 or more.")
        if self.context < 16:
            raise OptionError("context must be 16 or more.")
        if not self.lr > 0 or not 0 < self.jsd_weight < 1:
            raise OptionError("lr must be above 0, and jsd_weight above 0 and below 1.")

    def train_config(self) -> TrainConfig:
        """The options of the trainer."""
        return TrainConfig(
            lr=self.lr,
            loss=self.loss,
            jsd_weight=self.jsd_weight,
            every_law=self.learn == "all",
            passes=self.passes,
            batch=self.batch,
        )


@final
class Online(Background):
    """Wraps a drafter, records the target's laws for its drafts, and trains it on them.

    Weights change only before a proposal or after a request has ended, on the loop's thread, and never between drafting
    and verification, so q stays the law of the draft. The inner drafter's caches of rows in flight come from older
    weights; that costs very little acceptance (docs/log.md), and only until these rows end.
    """

    def __init__(self, options: Options, inner: Drafter) -> None:
        self._options = options
        self._inner = inner
        self.needs = replace(inner.needs, learns=True)
        self._adapter: TrainAdapter = adapter_for(_trainable(inner).network)
        self._trainer = OnlineTrainer(self._adapter, options.train_config())
        self._checkpoints = None if options.folder is None else Checkpoints(Path(options.folder), self._adapter.shadow)
        self._task: BackgroundTask[Report] = BackgroundTask(options.threads if options.background else 0)
        self._buffer = ReplayBuffer(options.positions, options.megabytes * 2**20)
        self._records: dict[int, RowRecord] = {}
        self._steps: list[StepRecord] = []  # of the last steps, still on the target's device
        self._requests = 0  # requests that have ended since the last update began
        self.reports: tuple[Report, ...] = ()
        if self._checkpoints is not None and self._checkpoints.resume(self._trainer):
            self.reports = self._checkpoints.reports
            self._adapter.publish()

    @property
    def version(self) -> int:
        """The number of changes of the served weights."""
        return self.reports[-1].version if self.reports else self._trainer.version

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._inner.admit(row, prompt, hidden)
        own = {tap: hidden[tap] for tap in self.needs.hidden_layers}
        self._records[row] = RowRecord.started(prompt, own, self._options.context // 2)

    def propose(self, view: View, plan: Plan) -> Draft:
        self._record_steps()
        self._update()
        return self._inner.propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._inner.commit(view, draft, verdict, out)
        if len(self._steps) >= _UNREAD:
            self._record_steps()
        own = StepOut(out.logits, {tap: out.hidden[tap] for tap in self.needs.hidden_layers})
        self._steps.append(StepRecord.of(view, draft, verdict, own, self._options.top_laws))

    def release(self, row: int) -> None:
        self._inner.release(row)
        self._record_steps()
        record = self._records.pop(row, None)
        if record is not None:
            self._store(record)
            self._requests += record.rooted
        self._update()

    def wait(self) -> None:
        """Wait for a running update and start to use it."""
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
        enough = self._options.interval_positions
        due = self._requests >= self._options.interval or (enough and self._buffer.laws >= enough)
        if due and len(self._buffer) and self._task.idle:
            samples, self._requests = self._buffer.take(), 0
            self._task.begin(lambda: self._learn(samples))
            self._publish()

    def _publish(self) -> None:
        report = self._task.take()
        if report is not None:
            if report.outcome != "refused":
                self._adapter.publish()
            self.reports = (*self.reports[1 - _REPORTS :], report)

    def _learn(self, samples: list[Sample]) -> Report:
        report = self._trainer.learn(samples)
        if self._checkpoints is not None:
            self._checkpoints.save(self._trainer, report)
        return report


_UNREAD = 32
"""Most steps without a draft that are recorded later; beyond, a step reads them back and waits for the device."""
_REPORTS = 1000
"""Number of latest reports kept."""


def _trainable(inner: Drafter) -> Trainable:
    if not isinstance(inner, Trainable):
        raise DrafterError(
            f"{inner.__class__.__name__} has no weights to train: online needs a draft model or a trained head inside, "
            "such as online:[draft_model:PATH]."
        )
    return inner


def build(options: Options, context: BuildContext) -> Online:
    """online:[SPEC]"""
    specs = context.paths
    if len(specs) != 1:
        raise DrafterError(f"online takes one inner drafter, not {len(specs)}: write online:[SPEC].")
    return Online(options, context.drafter(specs[0]).drafter)
