"""Options of a training run, in a module without torch for the command line."""

import math
from dataclasses import dataclass

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds
from foredraft.core.sampling.params import check_known

PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Shape and initialization of a new head.

    vocabulary: EAGLE-3: size of the draft vocabulary, the most frequent tokens; 0: the target's.
    taps: EAGLE-3: hidden layer of the target to read; repeatable. Default: 2, N/2, N-3.
    heads: Medusa, Hydra, blockwise: number of heads.
    layers: layers per head.
    own_heads: give each Medusa or Hydra head its own output layer instead of the target's.
    cold: do not initialize from the target's weights.
    start: trained head to start from, a folder or hub name; its shape overrides these options.
    """

    vocabulary: int = 32_000
    taps: tuple[int, ...] = ()
    heads: int = 4
    layers: int = 1
    own_heads: bool = False
    cold: bool = False
    start: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self, least={"heads": 1, "layers": 1, "vocabulary": 0})
        if list(self.taps) != sorted(set(self.taps)):
            raise OptionError("taps must be different layers, from low to high.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of the training loop.

    tokens: total training tokens; the data is repeated if it has fewer.
    length: tokens per sample.
    batch: samples per batch.
    accumulate: batches per optimizer step.
    lr: peak learning rate; by default 1e-3, of early_exit 3e-4.
    floor: final learning rate, as a fraction of the peak.
    warmup: fraction of steps that warm up.
    weight_decay: AdamW's weight decay.
    beta1, beta2: AdamW's betas.
    clip: gradient norm limit.
    precision: data type: auto (bf16 on hardware that is fast at it), bf16 or fp32.
    seed: seed of data order and noise.
    validate: steps between validations.
    checkpoint: steps between checkpoints.
    checkpoint_seconds: most seconds between checkpoints, whatever the steps.
    report: steps between log lines.
    """

    tokens: int = 4_000_000
    length: int = 512
    batch: int = 8
    accumulate: int = 1
    lr: float | None = None
    floor: float = 0.05
    warmup: float = 0.03
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 0.5
    precision: str = "auto"
    seed: int = 0
    validate: int = 250
    checkpoint: int = 100
    checkpoint_seconds: float = 120.0
    report: int = 10

    def __post_init__(self) -> None:
        check_known("precision", {self.precision: None}, PRECISIONS)
        counts = ("tokens", "length", "batch", "accumulate", "validate", "checkpoint", "report")
        shares = ("floor", "warmup", "weight_decay", "beta1", "beta2")
        least: dict[str, float] = {**dict.fromkeys(counts, 1), **dict.fromkeys(shares, 0)}
        check_bounds(self, least=least, most={"floor": 1, "warmup": 1})
        check_bounds(self, above={"lr": 0, "clip": 0, "checkpoint_seconds": 0}, below={"beta1": 1, "beta2": 1})

    @property
    def intervals(self) -> tuple[int, int, int]:
        """Steps between log lines, validations and checkpoints."""
        return self.report, self.validate, self.checkpoint

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step as a fraction of the peak: linear warm-up, then cosine decay."""
        rise = max(1, round(self.warmup * steps))
        if step < rise:
            return (step + 1) / rise
        progress = (step - rise) / max(1, steps - rise)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
