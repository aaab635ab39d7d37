"""Whether the policy's acceptance probabilities are right: what was expected of drafted tokens, and what was accepted.

    python -m benchmarks calibration --prompts ../shared/data/prompts/eagle/*/question.jsonl
    python -m benchmarks calibration --target MODEL --weights int4 --drafters eagle3:HEAD medusa:HEAD --prompts ...

The policy turns a draft's scores into the probability that a child of an accepted node is accepted, and learns from
each one. Here every draft is verified whole, so that nothing is missing that the policy would have dropped, and each
child is counted before it is learned: in a tenth by its expected probability, and by the draft's own. One JSON line
for each drafter and temperature. Times do not matter.
"""

import itertools
import math
import shlex
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import foredraft
from benchmarks.kit.claims import Claim
from benchmarks.kit.experiment import PROMPTS, RESULTS, Cell, Experiment, Inputs, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, read
from benchmarks.kit.seeded_texts import in_turns, run_texts
from foredraft.bench.report import plots
from foredraft.compose.spec import Spec
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.worth import Features
from foredraft.engine.policy.estimates import AcceptanceModel, Pace
from foredraft.engine.policy.throughput import Throughput

FILE = RESULTS / "calibration.jsonl"
BINS = 10
FEWEST = 30
"""Children of a tenth that is drawn."""
ACROSS = 5
FOREVER = 10**9
LEARNED = 200
"""Children that the policy learns from before any is counted."""
DRAFTERS = (
    *("eagle3", "eagle2", "eagle1", "medusa", "blockwise:sample-medusa", "draft_model:sample-draft"),
    *("sequoia:sample-draft", "opt_tree:sample-draft", "cascade:sample-draft+max_gram", "universal:sample-draft"),
    *("early_exit,assistant_early_exit=5", "prompt_lookup", "max_gram", "lookahead"),
)
Bins = list[list[float]]
"""For each tenth of expected probability: their sum, the accepted ones, and their number."""


def chance(features: Features, weights: Features) -> float:
    """The acceptance probability that these weights give."""
    return 1 / (1 + math.exp(-sum(x * w for x, w in zip(features, weights, strict=True))))


class Counted(AcceptanceModel):
    """Counts what it is asked to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.found: dict[str, Bins] = {name: [[0.0, 0, 0] for _ in range(BINS)] for name in ("learned", "draft")}

    def learn(self, features: Features, *, accepted: bool) -> None:
        self.seen += 1
        if self.seen > LEARNED:
            for name, weights in (("learned", self.weights), ("draft", self.PRIOR)):
                expected = chance(features, weights)
                own = self.found[name][min(int(BINS * expected), BINS - 1)]
                own[0], own[1], own[2] = own[0] + expected, own[1] + accepted, own[2] + 1
        super().learn(features, accepted=accepted)


def counting(engine: Any) -> Throughput:
    """A policy that counts; with ``LEARN`` and ``KNOWN`` large it drafts in every step and verifies all of it."""
    policy = Throughput(engine.drafter.needs, any_width=engine.target.any_width)
    policy._models.update((heat, Counted()) for heat in range(3))
    return policy


class Row(NamedTuple):
    """A drafter at one temperature: counts by the policy's and by the draft's own probabilities."""

    drafter: str
    temperature: float
    learned: Bins
    draft: Bins


def error(bins: Bins) -> float:
    """The expected calibration error: the mean distance of expected and accepted shares (Naeini et al. 2015)."""
    return sum(abs(expected - accepted) for expected, accepted, _ in bins) / sum(count for *_, count in bins)


def cells(args: Namespace) -> list[Cell]:
    return [
        {"kind": "row", "target": Path(args.target).name, "drafter": shown(spec), "temperature": heat}
        for spec in args.drafters
        for heat in args.temperatures
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    """Everything is drafted and verified, whatever it costs."""
    options: dict[str, Any] = {"weights": args.weights} if args.weights else {"dtype": "float32"}
    plain = foredraft.load(args.target, "none", device="cpu", max_batch_size=args.batch, **options)
    prompts, specs = in_turns(args.prompts, plain)[: args.count], {shown(spec): spec for spec in args.drafters}
    with patch.multiple(Throughput, LEARN=FOREVER, SHOWN=12), patch.multiple(Pace, KNOWN=FOREVER, CLEAR=FOREVER):
        for cell in cells:
            with foredraft.load(plain, specs[cell["drafter"]], max_batch_size=args.batch) as generator:
                generator.engine.policy = policy = counting(generator.engine)
                heat = cell["temperature"]
                params = SamplingParams(max_new_tokens=args.new_tokens, eos_token_id=(), temperature=heat)
                run_texts(generator, prompts, params, range(len(prompts)))
            for model in policy._models.values():
                if isinstance(model, Counted) and model.seen > LEARNED:
                    yield {**cell, **model.found}


def shown(spec: str) -> str:
    """The method, without paths and options."""
    return Spec.parse(spec).name


def targets(path: Path = FILE) -> dict[str, list[Row]]:
    """The rows of each target."""
    found: dict[str, list[Row]] = {}
    for row in read(path)["row"]:
        found.setdefault(row["target"], []).append(
            Row(row["drafter"], row["temperature"], row["learned"], row["draft"])
        )
    return found


def table(path: Path = FILE) -> str:
    """Calibration errors, for docs/schedules.md."""
    lines: list[list[str]] = []
    for target, own in targets(path).items():
        for row in own:
            count = sum(int(each[2]) for each in row.learned)
            accepted = sum(each[1] for each in row.learned) / count
            errors = [f"{error(row.draft):.3f}", f"{error(row.learned):.3f}"]
            lines.append([target, row.drafter, f"{row.temperature:g}", f"{count:,}", f"{accepted:.2f}", *errors])
    head = ["target", "drafter", "T", "tokens", "accepted", "error of the draft's own", "error of the policy's"]
    made = f"Made by `python -m benchmarks calibration`: {origins(path)}."
    return "\n".join([*markdown_table(head, lines, words=(0, 1)), "", made])


def origins(path: Path = FILE) -> str:
    """Machine, weights and commit of each target's run."""
    found = []
    for origin in read(path)["provenance"]:
        words = shlex.split(origin["command"])
        given = dict(pair for pair in itertools.pairwise(words) if pair[0] in ("--target", "--weights"))
        target = Path(given.get("--target", "sample")).name
        found.append(f"{target}: {origin_line(origin, given.get('--weights', 'float32'))}")
    return "; ".join(found)


def sentence(found: dict[str, list[Row]]) -> str:
    """What the picture shows."""
    every = [row for own in found.values() for row in own]
    learned, draft = (statistics.median(map(error, column)) for column in zip(*[row[2:] for row in every], strict=True))
    return (
        f"The policy knows how sure a draft may be: expected and accepted shares differ by {learned:.3f} (median of "
        f"{len(every)} drafters and temperatures), those of the drafts' own probabilities by {draft:.3f}."
    )


def figure(found: dict[str, list[Row]]) -> Any:
    """Reliability diagrams: the share that was accepted by what was expected, for each drafter."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for target, own in found.items():
        for row in own:
            panels.setdefault((target, row.drafter), []).append(row)
    down = -(-len(panels) // ACROSS)
    drawn, grid = plots.canvas(7.2, 0.5 + 1.75 * down, ACROSS, down, sharex=True, sharey=True, squeeze=False)
    cells = list(grid.flat)
    for axes, ((target, drafter), own) in zip(cells, panels.items(), strict=False):
        axes.plot((0, 1), (0, 1), **plots.DASHED)
        for row in own:
            kind = "T = 1" if row.temperature else "greedy"
            for bins, style, color, name in (
                (row.draft, ":", plots.FAINT, "the draft's own"),
                (row.learned, "-", plots.color(int(row.temperature > 0)), kind),
            ):
                points = [(each[0] / each[2], each[1] / each[2]) for each in bins if each[2] >= FEWEST]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=2.5, label=name)
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        axes.set_title(f"{drafter}\n{target.split('-')[0]}", fontsize=8, loc="left")
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    handles, labels = cells[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    drawn.legend(unique.values(), unique, loc="outside lower center", ncols=3, frameon=False)
    last = cells[len(panels) - 1]
    last.set_xlabel("expected", fontsize=8)
    drawn.supylabel("accepted", fontsize=8)
    return drawn


def reliability() -> Claim:
    """What the policy expects of drafted tokens, and what is accepted."""
    found = targets()
    facts = "; ".join(
        f"{row.drafter} on {target}, T={row.temperature:g}: {error(row.learned):.3f}"
        for target, own in found.items()
        for row in own
    )
    return Claim(sentence(found), facts, origins(), lambda: figure(found))


def _commands(inputs: Inputs) -> list[list[str]]:
    words = ["--prompts", *inputs.questions()]
    drafters = [f"eagle3:{inputs.head}", "prompt_lookup"]
    real = ["--target", inputs.smollm2, "--weights", "int4", "--drafters", *drafters]
    return [measured("calibration", *words), measured("calibration", *words, *real)]


EXPERIMENT = Experiment(
    name="calibration",
    question="what the policy expects and what is accepted: results.md",
    options={
        "target": option("sample"),
        "weights": option(str, "of the native engine, such as int4; without, torch in float32"),
        "drafters": option(DRAFTERS),
        "prompts": PROMPTS,
        "count": option(48, "prompts"),
        "batch": option(8),
        "new_tokens": option(96),
        "temperatures": option([0.0, 1.0]),
    },
    cells=cells,
    measure=measure,
    shown=table,
    tables={"docs/results.md": {"calibration": table}},
    claims={"calibration": reliability},
    hours=0.5,
    needs=lambda inputs: (inputs.prompts, inputs.head),
    commands=_commands,
)
