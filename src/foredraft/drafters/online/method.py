"""Online speculative decoding (Liu et al., arXiv:2310.07177): a drafter that learns while it serves.

The target computes its law at every place that it verifies, whether a draft was right there or not. These laws are
written down, and every few requests the draft is distilled on them beside the loop; between two steps its new weights
take the place of the old. So it follows the texts that it is asked for.
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
from foredraft.drafters.online.replay_buffer import Notes, ReplayBuffer, Seen
from foredraft.drafters.online.train_adapters import trainee_of
from foredraft.drafters.online.trainable import Sample, Trainee
from foredraft.drafters.online.trainer import LOSSES, OnlineTrainer, Report, TrainConfig
from foredraft.drafters.online.worker import BackgroundTask

LEARN = ("rejected", "all")


@dataclass(frozen=True, slots=True)
class Options(DrafterOptions):
    """When and how the drafter inside learns; how it drafts is said by its own options.

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
    background: train in a thread while serving; no: between requests.
    threads: CPU threads for training in the background.
    folder: where versions are saved, so that another process continues from the last one.
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
        """That of a draft model; in a spec, what counts is the law of the drafter inside."""
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

    def study(self) -> TrainConfig:
        """What the learner is to know of them."""
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
    """Passes everything on to the drafter inside, and writes down what the target says of its drafts.

    Weights change only where a proposal begins or a text has ended, on the loop's thread: between drafting and
    verifying never, so q stays the law that was drawn from. What the inner drafter remembers of texts in flight is of
    the weights before; that costs acceptance, hardly any (docs/log.md), and only until these texts end.
    """

    def __init__(self, options: Options, inner: Drafter) -> None:
        self._options = options
        self._inner = inner
        self.needs = replace(inner.needs, learns=True)
        self._trainee: Trainee = trainee_of(_trainable(inner).network)
        self._learner = OnlineTrainer(self._trainee, options.study())
        self._keeping = None if options.folder is None else Checkpoints(Path(options.folder), self._trainee.shadow)
        self._work: BackgroundTask[Report] = BackgroundTask(options.threads if options.background else 0)
        self._shelf = ReplayBuffer(options.positions, options.megabytes * 2**20)
        self._notes: dict[int, Notes] = {}
        self._seen: list[Seen] = []  # of the last steps, still where the target computed it
        self._requests = 0  # that have ended since the last update began
        self.reports: tuple[Report, ...] = ()
        if self._keeping is not None and self._keeping.resume(self._learner):
            self.reports = self._keeping.reports
            self._trainee.publish()

    @property
    def version(self) -> int:
        """How often the weights in service have changed."""
        return self.reports[-1].version if self.reports else self._learner.version

    def admit(self, row: int, prompt: Int[Tensor, "T"], hidden: Mapping[int, Float[Tensor, "1 T H"]]) -> None:
        self._inner.admit(row, prompt, hidden)
        own = {tap: hidden[tap] for tap in self.needs.hidden_layers}
        self._notes[row] = Notes.begun(prompt, own, self._options.context // 2)

    def propose(self, view: View, plan: Plan) -> Draft:
        self._write_down()
        self._turn()
        return self._inner.propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self._inner.commit(view, draft, verdict, out)
        if len(self._seen) >= _UNREAD:
            self._write_down()
        own = StepOut(out.logits, {tap: out.hidden[tap] for tap in self.needs.hidden_layers})
        self._seen.append(Seen.of(view, draft, verdict, own, self._options.top_laws))

    def release(self, row: int) -> None:
        self._inner.release(row)
        self._write_down()
        notes = self._notes.pop(row, None)
        if notes is not None:
            self._put_away(notes)
            self._requests += notes.rooted
        self._turn()

    def wait(self) -> None:
        """Wait for a running update and draft with it."""
        self._work.wait()
        self._serve()

    def _write_down(self) -> None:
        """Note what the last steps have shown. Between two steps that waits for nothing: they have been read back."""
        unread, self._seen = self._seen, []
        for seen in (each.read_back() for each in unread):
            for b, row in enumerate(seen.rows):
                notes = self._notes[row]
                notes.add(seen, b)
                if len(notes.tokens) >= self._options.context:
                    self._put_away(notes)
                    self._notes[row] = notes.rest(self._options.context // 2)

    def _put_away(self, notes: Notes) -> None:
        """Keep a passage that is over, if there is anything in it."""
        passage = notes.passage()
        if passage is not None:
            self._shelf.add(passage)

    def _turn(self) -> None:
        """Between two steps: serve what was learned, and begin to learn anew if it is time."""
        self._serve()
        enough = self._options.interval_positions
        due = self._requests >= self._options.interval or (enough and self._shelf.laws >= enough)
        if due and len(self._shelf) and self._work.idle:
            passages, self._requests = self._shelf.take(), 0
            self._work.begin(lambda: self._learned(passages))
            self._serve()

    def _serve(self) -> None:
        report = self._work.take()
        if report is not None:
            if report.outcome != "refused":
                self._trainee.publish()
            self.reports = (*self.reports[1 - _REPORTS :], report)

    def _learned(self, passages: list[Sample]) -> Report:
        report = self._learner.learn(passages)
        if self._keeping is not None:
            self._keeping.save(self._learner, report)
        return report


_UNREAD = 32
"""So many steps without a draft may wait to be noted; then they are in the middle of the next, which then waits."""
_REPORTS = 1000
"""So many of the last ones are at hand."""


def _trainable(inner: Drafter) -> Trainable:
    if not isinstance(inner, Trainable):
        raise DrafterError(
            f"{inner.__class__.__name__} has nothing that could learn; online wants a draft model or a trained head "
            "inside, such as online:[draft_model:PATH]."
        )
    return inner


def build(options: Options, context: BuildContext) -> Online:
    """online:[SPEC]"""
    specs = context.paths
    if len(specs) != 1:
        raise DrafterError(f"online has one drafter inside, not {len(specs)}: write online:[SPEC].")
    return Online(options, context.drafter(specs[0]).drafter)
