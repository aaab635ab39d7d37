"""Reading the run files of ``foredraft bench``."""

from collections.abc import Iterable, Sequence

from foredraft.bench.measure.records import Run, RunFile
from foredraft.bench.measure.summary import RunPair, acceptance_length, pairs


def repeats(tokens: Sequence[int]) -> float:
    """Share of an output's 4-grams that it has had before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def length(runs: Iterable[Run]) -> float:
    """Tokens per forward of the target; 1 without forwards."""
    return acceptance_length(runs) or 1.0


def by_position(runs: Sequence[Run]) -> str:
    """The share of drafted tokens of each depth that is accepted, given that those above are."""
    depths = max((len(run.accepted_by_depth) for run in runs), default=0)
    reached = [sum(run.accepted_by_depth[d] for run in runs if len(run.accepted_by_depth) > d) for d in range(depths)]
    before = [sum(run.forwards for run in runs), *reached]
    shares = [f".{round(100 * n / m):02d}" if n < m else "1" for n, m in zip(reached, before, strict=False) if m]
    return " ".join(shares[:5])


def beside_plain(file: RunFile) -> list[RunPair]:
    """The runs of all arms that draft, each with plain decoding's of the same prompt, seed and temperature."""
    return [pair for own in pairs(file, "none").values() for pair in own if pair.run.arm != "none"]
