"""Options of a training run, in a module without torch for the command line."""

import math
from dataclasses import dataclass

from foredraft.core.errors import OptionError

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
        if self.heads < 1 or self.layers < 1 or self.vocabulary < 0:
            raise OptionError("heads and layers must be 1 or more, and vocabulary 0 or more.")
        if list(self.taps) != sorted(set(self.taps)):
            raise OptionError("taps must be different layers, from low to high.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of the training loop.

    tokens: total training tokens; the data is repeated if it has fewer.
    length: tokens per sample.
    batch: samples per batch.
    accumulate: batches per optimizer step.
    lr: peak learning rate.
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
    lr: float = 1e-3
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
        for name in ("tokens", "length", "batch", "accumulate", "validate", "checkpoint", "report"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be 1 or more.")
        if self.precision not in PRECISIONS:
            raise OptionError(f"Unknown precision {self.precision!r}. Known: {', '.join(PRECISIONS)}.")
        if not (self.lr > 0 and self.clip > 0):
            raise OptionError("lr and clip must be above 0.")
        if not self.checkpoint_seconds > 0:
            raise OptionError("checkpoint_seconds must be above 0.")
        if not (0 <= self.floor <= 1 and 0 <= self.warmup <= 1 and self.weight_decay >= 0):
            raise OptionError("floor and warmup must be from 0 to 1, and weight_decay 0 or more.")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise OptionError("beta1 and beta2 must be 0 or more and below 1.")

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
