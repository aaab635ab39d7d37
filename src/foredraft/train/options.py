"""Options of a training run, in a module without torch for the command line."""

import math
from dataclasses import dataclass

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds, option
from foredraft.core.sampling.params import check_known

PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Shape and initialization of a new head."""

    vocabulary: int = option(
        32_000, "EAGLE-3: size of the draft vocabulary, the most frequent tokens; 0: the target's."
    )
    taps: tuple[int, ...] = option((), "EAGLE-3: hidden layer of the target to read; repeatable. Default: 2, N/2, N-3.")
    heads: int = option(4, "Medusa, Hydra, blockwise: number of heads.")
    layers: int = option(1, "layers per head.")
    own_heads: bool = option(False, "give each Medusa or Hydra head its own output layer instead of the target's.")
    cold: bool = option(False, "do not initialize from the target's weights.")
    start: str | None = option(
        None, "trained head to start from, a folder or hub name; its shape overrides these options."
    )

    def __post_init__(self) -> None:
        check_bounds(self, least={"heads": 1, "layers": 1, "vocabulary": 0})
        if list(self.taps) != sorted(set(self.taps)):
            raise OptionError("taps must be different layers, from low to high.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of the training loop."""

    tokens: int = option(4_000_000, "total training tokens; the data is repeated if it has fewer.")
    length: int = option(512, "tokens per sample.")
    batch: int = option(8, "samples per batch.")
    accumulate: int = option(1, "batches per optimizer step.")
    lr: float | None = option(None, "peak learning rate; by default 1e-3, of early_exit 3e-4.")
    floor: float = option(0.05, "final learning rate, as a fraction of the peak.")
    warmup: float = option(0.03, "fraction of steps that warm up.")
    weight_decay: float = option(0.0, "AdamW's weight decay.")
    beta1: float = option(0.9, "AdamW's betas.")
    beta2: float = option(0.95, "AdamW's betas.")
    clip: float = option(0.5, "gradient norm limit.")
    precision: str = option("auto", "data type: auto (bf16 on hardware that is fast at it), bf16 or fp32.")
    seed: int = option(0, "seed of data order and noise.")
    validate: int = option(250, "steps between validations.")
    checkpoint: int = option(100, "steps between checkpoints.")
    checkpoint_seconds: float = option(120.0, "most seconds between checkpoints, whatever the steps.")
    report: int = option(10, "steps between log lines.")

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
