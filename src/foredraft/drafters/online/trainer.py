"""Trains a network on the samples of one interval after another, and returns to the best version if it gets worse.

Before a version is trained on new samples, it and the best version so far are evaluated on them: both at the same
positions, which neither was trained on. So harder samples are not mistaken for a worse version, nor easier ones for a
better one.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.core.divergence import Distance, jensen_shannon, kl, overlap, reverse_kl
from foredraft.core.draft import Law
from foredraft.core.options import DrafterOptions, check_bounds, option
from foredraft.core.sampling.params import check_known
from foredraft.drafters.online.samples import LawSample, SampleBatch
from foredraft.drafters.online.train_adapters import TrainAdapter

Weights = dict[str, Tensor]

LOSSES: dict[str, Distance] = {"forward_kl": kl, "reverse_kl": reverse_kl, "jsd": jensen_shannon}
MIN_SAMPLES = 8
"""Samples needed before a version is compared."""
SURE = 3.0
"""A version is worse than the best one if its mean acceptance is lower by this many standard errors of the paired
differences: with 8 samples, by Student's t, a false alarm in about one of a hundred comparisons."""
_WINDOW = 64  # latest samples used in a comparison
_DECAY = 0.8  # the weight of level k of a draft is this to the power of k, as in EAGLE-3's recipe
_CLIP = 1.0  # largest gradient norm


@dataclass(frozen=True, slots=True)
class Options(DrafterOptions):
    """When and how the inner drafter is trained; its own options set how it drafts."""

    interval: int = option(8, "requests between updates.")
    loss: str = option(
        "forward_kl", "forward_kl, reverse_kl or jsd, between the target's and the draft's distributions."
    )
    lr: float = option(1e-4, "learning rate of AdamW, constant.")
    passes: int = option(1, "passes over the positions of an interval.")
    batch: int = option(4, "samples per optimizer step.")
    context: int = option(512, "tokens of a sample; longer ones are split.")
    top_laws: int = option(64, "tokens kept of each target distribution; the others count as one outcome.")
    rejected: bool = option(
        False, "keep the distributions alone at which a drafted token was rejected, as the paper does."
    )
    megabytes: int = option(
        256, "most megabytes of samples that wait for the next update; the oldest are dropped first."
    )
    background: bool = option(True, "yes, train in a thread while serving; no, train between requests.")
    threads: int = option(1, "CPU threads for training in the background.")
    folder: str | None = option(
        None, "folder where the last version is saved, from which another process continues.", unset="not saved"
    )

    law = Law.CHAIN
    """The law of a draft model; for a spec, the law of the inner drafter counts."""

    def __post_init__(self) -> None:
        check_known("loss", {self.loss: None}, list(LOSSES))
        ones = ("interval", "passes", "batch", "top_laws", "megabytes", "threads")
        check_bounds(self, least={"context": 16, **dict.fromkeys(ones, 1)}, above={"lr": 0})


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one interval.

    ``outcome``: "learned", a new version; "returned", the weights of the best version restored; "refused", a loss or
    gradient was not finite, so nothing changed. ``samples``: number of samples. ``acceptance``: of the served version
    on these samples, as the mean overlap of its law with the target's; ``best``: the same for the best version.
    """

    version: int
    outcome: str
    samples: int
    laws: int
    acceptance: float
    best: float
    loss: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON types; a loss that is not finite is None."""
        return {**asdict(self), "loss": self.loss if math.isfinite(self.loss) else None}


class OnlineTrainer:
    """Trains the adapter's copy, never the served network. Called from one thread at a time."""

    def __init__(self, adapter: TrainAdapter, options: Options) -> None:
        self._adapter = adapter
        self._options = options
        self._distance = LOSSES[options.loss]
        self._weights = dict(adapter.shadow.named_parameters())
        self._best = self._copy()
        self._differences: deque[float] = deque(maxlen=_WINDOW)  # acceptance minus that of the best version, by sample
        self._optimizer = self._fresh_optimizer()
        self.version = 0

    def learn(self, samples: Sequence[LawSample]) -> Report:
        """Evaluate, then restore the best version or train."""
        with torch.inference_mode(False), torch.enable_grad():
            before = self._copy()
            served = best = self._acceptance(samples)
            if self.version:
                self._load(self._best)
                best = self._acceptance(samples)
                self._load(before)
                self._differences += [a - b for a, b in zip(served, best, strict=True)]
            verdict = compare_to_best(self._differences)
            if verdict != "unsure":
                self._differences.clear()
            if verdict == "worse":
                outcome, loss = "returned", math.nan
                self._restart(self._best)
            else:
                if verdict == "as good":
                    self._best = before
                loss = self._train(samples)
                outcome = "learned" if math.isfinite(loss) else "refused"
                if outcome == "refused":
                    self._restart(before)
            self.version += outcome != "refused"
            laws = sum(sample.places.shape[0] for sample in samples)
            means = statistics.fmean(served), statistics.fmean(best)
            return Report(self.version, outcome, len(samples), laws, *means, loss)

    def state(self) -> dict[str, Any]:
        """Everything that another process needs to continue."""
        return {
            "version": self.version,
            "weights": self._copy(),
            "best": self._best,
            "differences": list(self._differences),
            "optimizer": self._optimizer.state_dict(),
            "options": asdict(self._options),
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a ``state``; if the options differ, the optimizer starts again.

        Raises:
            KeyError, RuntimeError, ValueError: not a state, or the state of another network.
        """
        for weights in (state["weights"], state["best"]):
            if {name: w.shape for name, w in weights.items()} != {n: w.shape for n, w in self._weights.items()}:
                raise ValueError("other weights")
        if state["options"] == asdict(self._options):
            self._optimizer.load_state_dict(state["optimizer"])
        self._load(state["weights"])
        self._best = {name: weight.to(self._weights[name].device) for name, weight in state["best"].items()}
        self._differences.extend(state["differences"])
        self.version = state["version"]

    @torch.no_grad()
    def _acceptance(self, samples: Sequence[LawSample]) -> list[float]:
        """Acceptance on each sample with the current weights."""
        found: list[float] = []
        for batch in self._batches(samples):
            p, log_q, laws = next(self._adapter.predict(batch))
            rows = batch.rows[laws]
            total = torch.zeros(batch.tokens.shape[0], device=rows.device)
            count = total.index_add(0, rows, torch.ones_like(rows, dtype=total.dtype))
            total.index_add_(0, rows, overlap(p, log_q))
            found += (total / count.clamp(min=1)).nan_to_num(nan=0.0).tolist()
        return found

    def _train(self, samples: Sequence[LawSample]) -> float:
        """Run the optimizer steps of one interval; return the mean loss, or NaN if a loss or gradient is not finite."""
        generator = torch.Generator().manual_seed(self.version)
        losses: list[float] = []
        for _ in range(self._options.passes):
            order = torch.randperm(len(samples), generator=generator).tolist()
            for batch in self._batches([samples[i] for i in order]):
                loss = self._loss(batch)
                if loss is None:
                    continue
                self._optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), _CLIP)
                losses.append(float(loss.detach()))
                if not (math.isfinite(losses[-1]) and math.isfinite(float(norm))):
                    return math.nan
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return statistics.fmean(losses) if losses else 0.0

    def _loss(self, batch: SampleBatch) -> Tensor | None:
        """The mean over the laws, weighted by level; None if there are none."""
        total: Tensor | None = None
        for level, (p, log_q, laws) in enumerate(self._adapter.predict(batch)):
            if len(laws):
                loss = _DECAY**level * self._distance(p, log_q).mean()
                total = loss if total is None else total + loss
        return total

    def _batches(self, samples: Sequence[LawSample]) -> Iterator[SampleBatch]:
        device = next(iter(self._weights.values())).device
        for begin in range(0, len(samples), self._options.batch):
            yield SampleBatch.of(samples[begin : begin + self._options.batch], device)

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._weights.values(), lr=self._options.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def _copy(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self._weights.items()}

    def _restart(self, weights: Weights) -> None:
        self._load(weights)
        self._optimizer = self._fresh_optimizer()

    @torch.no_grad()
    def _load(self, weights: Weights) -> None:
        for name, weight in weights.items():
            self._weights[name].copy_(weight)


def compare_to_best(differences: Sequence[float]) -> str:
    """Compare a version with the best one by their differences in acceptance: "worse", "as good" or "unsure".

    Worse: the mean is below zero by ``SURE`` standard errors. As good: it is not below zero.
    """
    count = len(differences)
    if count < MIN_SAMPLES:
        return "unsure"
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(count)
    return "as good" if mean >= 0 else "worse" if mean < -SURE * error else "unsure"
