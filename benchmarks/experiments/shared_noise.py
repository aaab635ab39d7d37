"""Acceptance with shared noise beside the ratio rules of the papers, by drafter, size and temperature.

    python -m benchmarks shared_noise --prompts ../shared/data/prompts/eagle/gsm8k/question.jsonl
    python -m benchmarks shared_noise --target ../shared/models/target-65m --draft ../shared/models/draft-6m

A pair is a drafter with shared noise and one of the same size whose drafts are drawn for a ratio rule. Both continue
the same prompts, with everything drafted in every step. One JSON line a cell: of each text its tokens and forwards of
the target, and how many texts differ from plain decoding's of the seed. Times do not matter, so other work may run.
Cells come in rounds of ``--texts`` prompts, so a longer run adds rounds. ``--methods`` runs some pairs alone.
"""

import functools
import itertools
import statistics
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import foredraft
from benchmarks.kit.experiment import PROMPTS, RESULTS, Cell, Experiment, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import interval, markdown_table, read
from benchmarks.kit.seeded_texts import SeededTexts, in_turns
from foredraft.bench.check import draft_always
from foredraft.bench.measure.summary import grouped

SHARED = "shared noise"
SAMPLES = 4000
"""Of the bootstrap."""
Pairs = list[list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A drafter, and the ratio rule beside which it is shown; ``drawn``: the drafter of that rule, if it is another."""

    name: str
    spec: str
    rule: str
    drawn: str = ""

    def arms(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Spec and rule of both."""
        return (self.spec, SHARED), (self.drawn or self.spec, self.rule)


SEQUOIA = "sequoia:{draft},nodes=%d,depth=6,acceptance=0.5/0.15/0.1/0.06/0.04/0.03"
PAIRS = (
    *(Pair("EAGLE-3", f"eagle3,nodes={n},depth=5,top_k=8", "traversal") for n in (8, 24, 59)),
    Pair("EAGLE-2", "eagle2,nodes=24,depth=5,top_k=8", "traversal"),
    Pair("EAGLE-1", "eagle1,tree=eagle", "traversal"),
    Pair("Medusa", "medusa,nodes=24", "traversal"),
    *(Pair("Hydra++", f"hydra:{{hydra}},nodes={n}", "traversal") for n in (8, 24)),
    Pair("blockwise", "blockwise:sample-medusa", "block"),
    Pair("early exit", "early_exit,assistant_early_exit=5", "block"),
    *(Pair("draft model, chain", f"draft_model:{{draft}},num_assistant_tokens={n}", "block") for n in (4, 8)),
    Pair("draft model, 4x2x1", "draft_model:{draft},branching=4x2x1", "traversal"),
    *(Pair("Sequoia", SEQUOIA % n, "traversal") for n in (8, 16)),
    Pair("OPT-Tree", "opt_tree:{draft},nodes=16,depth=6,top_k=8", "traversal", SEQUOIA % 16),
    Pair("SpecInfer, 2x2x1", "specinfer:{draft},expansion=2x2x1", "traversal"),
    Pair("cascade", "cascade:{draft}+[max_gram,num_assistant_tokens=3]", "block"),
    Pair("universal", "universal:{draft},method=tli,num_assistant_tokens=4", "block"),
    Pair("partial, window", "partial,cache=window,num_assistant_tokens=4,budget=64,chunk=8", "block"),
    Pair("triforce", "triforce:{draft},gamma=4,budget=64", "block"),
)
"""Trees drawn for a ratio rule are static; beside OPT-Tree's, Sequoia's is drawn. There is no bundled head of Hydra:
--hydra names one, and --target its target."""


def cells(args: Namespace) -> list[Cell]:
    bundled = args.target == "sample"
    pairs = [pair for pair in PAIRS if pair.name in (args.methods or [pair.name]) and (bundled or "{" in pair.spec)]
    pairs = [pair for pair in pairs if args.hydra or "{hydra}" not in pair.spec]
    specs = sorted(dict.fromkeys(arm for pair in pairs for arm in pair.arms()), key=lambda arm: arm[1] == SHARED)
    name = Path(args.target).name
    return [
        {"kind": "cell", "target": name, "spec": spec, "rule": rule, "temperature": heat, "round": number}
        for number, (spec, rule), heat in itertools.product(range(args.rounds), specs, args.temperatures)
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    rows = {"max_batch_size": args.texts}
    plain = foredraft.load(args.target, "none", dtype="float32", device="cpu", **rows)
    texts = SeededTexts(plain, in_turns(args.prompts, plain), args.new_tokens, args.texts)
    for (spec, rule, number), own in grouped(cells, lambda cell: (cell["spec"], cell["rule"], cell["round"])).items():
        verifier, named = None if rule == SHARED else rule, spec.format(draft=args.draft, hydra=args.hydra)
        with foredraft.load(plain, named, verifier=verifier, **rows) as generator:
            draft_always(generator)
            for cell in own:
                found = texts.run(generator, cell["temperature"], number, args.texts)
                wanted = texts.plain(cell["temperature"], number, args.texts)
                yield {
                    **cell,
                    "nodes": generator.engine.drafter.needs.max_nodes,
                    "texts": [[len(each.tokens), each.stats.target_forwards] for each in found],
                    "differ": sum(each.tokens != plain.tokens for each, plain in zip(found, wanted, strict=True)),
                }


def ratio(shared: Pairs, drawn: Pairs) -> tuple[float, float, float]:
    """Tokens per forward over those of the ratio rule, with the 95 % bootstrap interval over prompts."""
    return _ratio(tuple(zip(map(tuple, shared), map(tuple, drawn), strict=True)))


@functools.cache  # the sentence and the table need the same ones
def _ratio(both: tuple[Any, ...]) -> tuple[float, float, float]:
    def of(some: Sequence[Any]) -> float:
        left, right = ([sum(column) for column in zip(*side, strict=True)] for side in zip(*some, strict=True))
        return left[0] / left[1] / (right[0] / right[1])

    return of(both), *interval(both, of, SAMPLES)


def length(texts: Pairs) -> float:
    """Tokens per forward."""
    return sum(tokens for tokens, _ in texts) / sum(forwards for _, forwards in texts)


class Compared(NamedTuple):
    """Texts of the same prompts with shared noise and with the ratio rule."""

    target: str
    pair: Pair
    nodes: int
    temperature: float
    shared: Pairs
    drawn: Pairs


def pairs_of(lines: Sequence[dict[str, Any]]) -> list[Compared]:
    """All cells that have both."""
    texts: dict[tuple[str, str, str, float], Pairs] = {}
    nodes: dict[str, int] = {}
    for line in lines:
        texts.setdefault((line["target"], line["spec"], line["rule"], line["temperature"]), []).extend(line["texts"])
        nodes[line["spec"]] = line["nodes"]
    found, heats = [], sorted({key[3] for key in texts if key[2] == SHARED})
    for target, pair, heat in itertools.product(dict.fromkeys(key[0] for key in texts), PAIRS, heats):
        ours, theirs = (texts.get((target, *arm, heat), []) for arm in pair.arms())
        if both := min(len(ours), len(theirs)):  # a run that goes on has more of one
            found.append(Compared(target, pair, nodes[pair.spec], heat, ours[:both], theirs[:both]))
    return found


def table(path: Path = RESULTS / "shared_noise.jsonl") -> str:
    """All pairs with their ratios by temperature, for docs/methods/shared_noise.md."""
    kinds = read(path)
    cells = pairs_of(kinds["cell"])
    lines, heats = [], sorted({cell.temperature for cell in cells})
    for target, own in grouped(cells, lambda cell: cell.target).items():
        rows: dict[str, dict[float, str]] = {}
        for cell in own:
            name = f"{cell.pair.name}, {cell.nodes}, {cell.pair.rule}"
            rows.setdefault(name, {})[cell.temperature] = _shown(cell.shared, cell.drawn)
        head = [f"{target}: drafter, nodes, ratio rule", *(f"T = {heat:g}" for heat in heats)]
        lines += [*markdown_table(head, [[name, *map(row.get, heats, repeat(""))] for name, row in rows.items()]), ""]
    shared = [cell for cell in kinds["cell"] if cell["rule"] == SHARED]
    compared, differ = sum(len(cell["texts"]) for cell in shared), sum(cell["differ"] for cell in shared)
    most = max(len(cell.shared) for cell in cells)
    origins = kinds["provenance"]
    return "\n".join(
        [
            *lines,
            f"Tokens per forward of the target with shared noise / with the ratio rule, and their ratio with its 95 % "
            f"bootstrap interval over the same prompts; up to {most} texts a cell. {differ} of the {compared} texts "
            f"with shared noise differ from plain decoding's. {origin_line(origins[0], among=origins)}. Made by "
            "`python -m benchmarks shared_noise`, with the options in "
            "[shared_noise.jsonl](../../benchmarks/results/shared_noise.jsonl).",
        ]
    )


def sentence(path: Path = RESULTS / "shared_noise.jsonl") -> str:
    """What the table says of all methods together."""
    parts = []
    for heat, cells in sorted(grouped(pairs_of(read(path)["cell"]), lambda cell: cell.temperature).items()):
        found = [ratio(cell.shared, cell.drawn) for cell in cells]
        below, above = sum(high < 1 for _, _, high in found), sum(low > 1 for _, low, _ in found)
        mean = statistics.mean(middle for middle, _, _ in found)
        parts.append(f"{mean:.2f} at T = {heat:g} ({len(found)} cells; interval above 1: {above}, below: {below})")
    return f"Acceptance length with shared noise over that of drawn drafts, means of the cells: {', '.join(parts)}."


def _shown(ours: Pairs, theirs: Pairs) -> str:
    middle, low, high = ratio(ours, theirs)
    return f"{length(ours):.2f} / {length(theirs):.2f}: {middle:.2f} ({low:.2f} to {high:.2f})"


EXPERIMENT = Experiment(
    name="shared_noise",
    question="shared noise beside ratio rules: methods/shared_noise.md",
    options={
        "target": option("sample"),
        "draft": option("sample-draft", "draft model of the target"),
        "hydra": option(str, "Hydra++ head of the target"),
        "prompts": PROMPTS,
        "methods": option([], "pairs by name, such as EAGLE-3; by default all"),
        "texts": option(9, "of a round"),
        "rounds": option(8),
        "new_tokens": option(96),
        "temperatures": option([0.6, 0.8, 1.0, 1.3]),
    },
    cells=cells,
    measure=measure,
    shown=table,
    tables={"docs/methods/shared_noise.md": {"found": sentence, "measured": table}},
    hours=3.0,
    needs=lambda inputs: (inputs.prompts,),
    commands=lambda inputs: [measured("shared_noise", "--prompts", *inputs.questions())],
)
