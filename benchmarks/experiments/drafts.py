"""Draft models as three papers use them: several for one tree, of one size and several shapes, one behind another.

    python -m benchmarks.tools.train_drafts --data FILE.jsonl.xz --tokens 4000000 --device cuda
    python -m benchmarks drafts --parts hits trees --prompts FILE

hits: SpecInfer, is the target's token among the first K? trees: SpecInfer's merged trees of one to three drafts.
shapes: deep and wide drafts of as many parameters. cascades: calls of every model by drafter, and time. Cells come in
rounds of --texts prompts.
"""

import itertools
import json
import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import foredraft
from benchmarks.experiments.depth import Draft
from benchmarks.kit.claims import Claim
from benchmarks.kit.experiment import (
    PROMPTS,
    RESULTS,
    Cell,
    Experiment,
    Inputs,
    Line,
    command,
    measured,
    option,
)
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, quotient, read, with_interval
from benchmarks.kit.seeded_texts import in_turns, run_texts
from foredraft.bench.check import draft_always
from foredraft.bench.measure.summary import grouped
from foredraft.bench.report import plots
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence as Request
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.load import load_model

FILE = RESULTS / "drafts.jsonl"
TARGET = "sample"
"""Of the pictures."""
CHOICES = 6
SAMPLES = 1000
"""Of the bootstrap."""
MODELS = {"alone": "distilled each by itself", "boosted": "boosted"}
GROUPS = (("alone", 1), *itertools.product(MODELS, (2, 3)))
"""Families and numbers of drafts; one draft is the first of both families."""
RULES = {None: "shared noise", "recursive": "multi-step sampling"}


def runs(kinds: dict[str, list[dict]], part: str) -> list[dict]:
    """The provenance of a part's runs."""
    return [each for each in kinds["provenance"] if f" {part} " in each["command"] + " "]


def _lessons(kinds: dict[str, list[dict]], part: str) -> str:
    """What the drafts of a part were distilled on."""
    pruned = part in ("shapes", "cascades")
    every = {name: own for run in runs(kinds, part) for name, own in run.get("lessons", {}).items()}
    found = {name: own for name, own in every.items() if name.startswith("shape/") == pruned}
    tokens = sorted({own["tokens"] for own in found.values()})
    shares = [f"{own['learns']:.0%}" for _, own in sorted(found.items()) if own.get("learns", 1) < 1]
    rest = f", of which {' and '.join(shares)} count for the boosted ones after the first" if shares else ""
    return f"{' to '.join(f'{count:,}' for count in tokens)} tokens{rest}"


def _origin(kinds: dict[str, list[dict]], part: str) -> str:
    """Where a part was made: the machine and commits of its runs."""
    if not (found := runs(kinds, part)):
        return ""
    return f"{origin_line(found[0], among=found)}. Made by `python -m benchmarks drafts --parts {part}`."


def _heat(temperature: float) -> str:
    return f"T={temperature:g}" if temperature else "greedy"


def _drafts(family: str, count: int) -> str:
    return f"{count} drafts, {MODELS[family]}" if count > 1 else "1 draft"


def _length(texts: Sequence[Sequence[float]]) -> float:
    """Tokens per forward of the target."""
    return sum(text[0] for text in texts) / sum(text[1] for text in texts)


def _speed(texts: Sequence[Sequence[float]]) -> float:
    """Tokens per second after the prompt."""
    return sum(text[0] for text in texts) / sum(text[3] for text in texts)


def _with_interval(texts: Sequence[Sequence[float]]) -> str:
    return with_interval(texts, _length, SAMPLES)


def _texts(cells: Iterable[dict], keys: Sequence[str]) -> dict[tuple, list]:
    """The texts of all rounds by these keys, in the order of rounds."""
    found: dict[tuple, list] = {}
    for cell in sorted(cells, key=lambda cell: cell["round"]):
        found.setdefault(tuple(cell[key] for key in keys), []).extend(cell["texts"])
    return found


def _settings(cells: Sequence[dict]) -> list[tuple[str, str]]:
    """Pairs of target and start, in order."""
    return list(dict.fromkeys((cell["target"], cell["start"]) for cell in cells))


def specinfer() -> str:
    """Hit rates of the first K choices, and acceptance of merged trees."""
    if not FILE.exists():
        return ""
    kinds = read(FILE)
    parts: list[str] = []
    for setting in _settings(kinds.get("hits", [])):
        cells = [cell for cell in kinds["hits"] if (cell["target"], cell["start"]) == setting]
        parts += [*_hit_rates(cells, "of {}, drafts from {}".format(*setting)), ""]
    for setting in _settings(kinds.get("trees", [])):
        cells = [cell for cell in kinds["trees"] if (cell["target"], cell["start"]) == setting]
        parts += [*_merged(cells, "{}, drafts from {}".format(*setting)), "", *_gains(cells), ""]
    notes = (
        "K choices come from the drafts in turn: with two drafts and K = 4, two of each. Chosen: the share of "
        "the target's tokens among them. Sampled: the probability that multi-step sampling accepts one of K tokens "
        "drawn at T=1. Nodes are those before merging; of the expansions measured, the best one is shown. "
        f"The drafts were distilled on {_lessons(kinds, 'hits')}."
    )
    return "\n".join([*parts, notes, *filter(None, (_origin(kinds, part) for part in ("hits", "trees")))])


class Curve(NamedTuple):
    """Hit rates of K = 1 to 6 choices, ``chosen`` as the likeliest or ``sampled``, of so many drafts of a family."""

    temperature: float
    kind: str
    family: str
    count: int
    rates: list[float]

    @property
    def drafts(self) -> str:
        return _drafts(self.family, self.count)


def curves(cells: Sequence[dict]) -> Iterator[Curve]:
    """All hit rates of these cells. One draft is the first of both families."""
    for temperature in sorted({cell["temperature"] for cell in cells}):
        own = [cell for cell in cells if cell["temperature"] == temperature]
        texts = [text for cell in own for text in cell["ranks"]]
        tokens = sum(cell["tokens"] for cell in own)
        for family, count in GROUPS:
            drafts = ["boosted/1", *(f"{family}/{number}" for number in range(2, count + 1))]
            shares = [_share(texts, drafts, k) / tokens for k in range(1, CHOICES + 1)]
            yield Curve(temperature, "chosen", family, count, shares)
            if temperature:
                sums = zip(*(cell["accepted"][f"{family} {count}"] for cell in own), strict=True)
                yield Curve(temperature, "sampled", family, count, [sum(each) / tokens for each in sums])


def _hit_rates(cells: Sequence[dict], title: str) -> list[str]:
    rows = [
        [f"{_heat(each.temperature)}, {each.kind}: {each.drafts}", *(f"{rate:.3f}" for rate in each.rates)]
        for each in curves(cells)
    ]
    return markdown_table([f"hit rate on tokens {title}", *(f"K = {k}" for k in range(1, CHOICES + 1))], rows)


def _share(texts: Sequence[dict[str, str]], drafts: Sequence[str], choices: int) -> int:
    """Tokens that are among the choices, which the drafts give in turn."""
    of_each = [choices // len(drafts) + (number < choices % len(drafts)) for number in range(len(drafts))]
    return sum(
        any(int(rank) < most for rank, most in zip(ranks, of_each, strict=True))
        for text in texts
        for ranks in zip(*(text[draft] for draft in drafts), strict=True)
    )


def _merged(cells: Sequence[dict], title: str) -> list[str]:
    found = _texts(cells, ("nodes", "temperature", "rule", "family", "models", "expansion"))
    columns = list(dict.fromkeys((key[1], key[2]) for key in found))
    rows = []
    for nodes, (family, count) in itertools.product(sorted({key[0] for key in found}), GROUPS):
        shown = []
        for heat, rule in columns:
            some = {key[5]: texts for key, texts in found.items() if key[:5] == (nodes, heat, rule, family, count)}
            best = max(some, key=lambda expansion: _length(some[expansion]), default=None)
            shown.append(f"{_with_interval(some[best])}, {best}" if best else "")
        if any(shown):
            rows.append([f"{nodes} nodes: {_drafts(family, count)}", *shown])
    names = [_heat(heat) + (f", {RULES[rule]}" if heat else "") for heat, rule in columns]
    return markdown_table([f"acceptance length, {title}", *names], rows)


def _gains(cells: Sequence[dict]) -> list[str]:
    """Acceptance lengths by each other on the same prompts, each with its best expansion: of several drafts by one's,
    and of boosted ones by those that are distilled each by itself."""
    keys = ("temperature", "rule", "nodes", "models", "family", "expansion")
    found: dict[tuple, dict[str, dict[tuple, Sequence[float]]]] = {}
    for cell in cells:
        *where, expansion = (cell[key] for key in keys)
        texts = found.setdefault(tuple(where), {}).setdefault(expansion, {})
        texts |= {(cell["round"], number): text for number, text in enumerate(cell["texts"])}
    best = {where: max(some.values(), key=lambda texts: _length([*texts.values()])) for where, some in found.items()}
    columns = list(dict.fromkeys(where[:2] for where in best))
    rows = []
    for nodes, count in itertools.product(sorted({where[2] for where in best}), (2, 3)):
        alone, boosted, one = (count, "alone"), (count, "boosted"), (1, "alone")
        for (first, second), title in (
            ((alone, one), f"{_drafts('alone', count)} / 1 draft"),
            ((boosted, alone), f"{count} drafts, boosted / each by itself"),
        ):
            pairs = [[best.get((*column, nodes, *each), {}) for each in (first, second)] for column in columns]
            shown = [_ratio(*pair) if pair[0] and pair[0].keys() == pair[1].keys() else "" for pair in pairs]
            if any(shown):
                rows.append([f"{nodes} nodes: {title}", *shown])
    names = [_heat(heat) + (f", {RULES[rule]}" if heat else "") for heat, rule in columns]
    return markdown_table(["ratio of acceptance lengths, same prompts", *names], rows) if rows else []


def _ratio(first: dict[tuple, Sequence[float]], second: dict[tuple, Sequence[float]]) -> str:
    """The first's acceptance length by the second's, with its interval over prompts."""
    return with_interval([(first[key], second[key]) for key in second], quotient(_length), SAMPLES)


class Shape(NamedTuple):
    """A pruned draft with so many drafted tokens: the line of its latency, its texts, and tokens per second by the
    formula of Yan et al., acceptance length / (time of the target's forward + drafted tokens x time of one)."""

    temperature: float
    name: str
    length: int
    latency: dict
    texts: list
    formula: float

    @property
    def measured(self) -> float:
        return _speed(self.texts)


def shaped(cells: Sequence[dict]) -> list[Shape]:
    """The pruned drafts of a target, by temperature and drafted tokens."""
    latency = {(line["latency"], line["forward_nodes"]): line for line in cells if "latency" in line}
    texts = _texts([cell for cell in cells if "texts" in cell], ("temperature", "shape", "length"))
    found = []
    for (heat, name, length), own in sorted(texts.items(), key=lambda item: (item[0][0], item[0][2])):
        if length and (name, 1) in latency:
            line, whole = latency[name, 1], latency["target", 1 + length]["milliseconds"]
            formula = 1e3 * _length(own) / (whole + length * line["milliseconds"])
            found.append(Shape(heat, name, length, line, own, formula))
    return found


def shape_tables() -> list[str]:
    """Deep and wide drafts: size, latency, quality, acceptance, and throughput by formula, as measured, and by plain
    decoding's of the same texts; lines that begin with an empty one."""
    if not FILE.exists() or not (cells := (kinds := read(FILE)).get("shapes", [])):
        return []
    parts = []
    for target in dict.fromkeys(cell["target"] for cell in cells):
        own = [cell for cell in cells if cell["target"] == target]
        texts = _texts([cell for cell in own if "texts" in cell], ("temperature", "shape", "length"))
        rows = [
            [
                f"{_heat(each.temperature)}, {each.length}: {each.name}, "
                f"{each.latency['layers']} x {each.latency['hidden']}",
                f"{each.latency['parameters'] / 1e6:.1f}",
                f"{each.latency['validation']['agreement']:.3f}",
                f"{each.latency['milliseconds']:.2f}",
                _with_interval(each.texts),
                f"{each.formula:.0f}",
                f"{each.measured:.0f}",
                with_interval(
                    list(zip(each.texts, texts[each.temperature, "plain", 0], strict=True)), quotient(_speed), SAMPLES
                ),
            ]
            for each in shaped(own)
        ]
        head = ["drafted tokens, shape", "parameters, millions", "agreement", "ms per token"]
        head += ["acceptance length", "tokens/s by formula", "tokens/s measured", "by plain decoding's"]
        plain = [text for (_, shape, _), some in texts.items() if shape == "plain" for text in some]
        parts += ["", *markdown_table(head, rows), ""]
        parts += [
            f"Drafts pruned from {target} and distilled on {_lessons(kinds, 'shapes')}. By formula: acceptance "
            "length / (time of the target's forward + drafted tokens x ms per token), from latencies measured apart; "
            "it does not hold at T=1, where a chain's drafted tokens are partly siblings, which take no forward. "
            f"Plain decoding: {_speed(plain):.0f} tokens/s. {_origin(kinds, 'shapes')}"
        ]
    return parts


def cascade_table() -> str:
    """Acceptance and forwards of every model for a hundred tokens, and the speed-up if time is parameters."""
    if not FILE.exists():
        return ""
    kinds = read(FILE)
    parts: list[str] = []
    for target in dict.fromkeys(cell["target"] for cell in kinds.get("cascades", [])):
        cells = [cell for cell in kinds["cascades"] if cell["target"] == target]
        texts = _texts(cells, ("temperature", "arm"))
        calls: dict[tuple, dict[int, int]] = {}
        for cell in cells:
            own = calls.setdefault((cell["temperature"], cell["arm"]), {})
            for size, count in cell["calls"].items():
                own[int(size)] = own.get(int(size), 0) + count
        sizes = sorted({size for own in calls.values() for size, count in own.items() if count}, reverse=True)
        rows = []
        plain = _texts((cell for cell in cells if cell["arm"] == "plain"), ("temperature", "round"))
        for (heat, arm), some in sorted(texts.items(), key=lambda item: item[0][0]):
            own, tokens = calls[heat, arm], sum(text[0] for text in some)
            cost = sum(text[1] for text in some) + sum(own.get(size, 0) * size / sizes[0] for size in sizes[1:])
            numbers = [f"{100 * own.get(size, 0) / tokens:.0f}" for size in sizes[1:]]
            rounds = [cell["round"] for cell in cells if (cell["temperature"], cell["arm"]) == (heat, arm)]
            speed = _speed(some) / _speed([text for each in rounds for text in plain[heat, each]])
            found = [_with_interval(some), *numbers, f"{tokens / cost:.2f}", f"{speed:.2f}", str(len(some))]
            rows.append([f"{_heat(heat)}: {arm}", *found])
        heads = [f"forwards of {size / 1e6:.1f}M per 100 tokens" for size in sizes[1:]]
        head = ["drafter", "acceptance length", *heads, "speed-up by parameters", "measured", "texts"]
        parts += [*markdown_table(head, rows), ""]
        parts += [
            f"Target: {target}, {sizes[0] / 1e6:.1f}M parameters. Speed-up by parameters: a forward costs its model's "
            "parameters, and Max-Gram nothing, as in the paper; so it does not depend on the machine. "
            "Measured: against plain decoding of the same texts. "
            "The middle model is the wide one of [pruned drafts](pruned_drafts.md), distilled on "
            f"{_lessons(kinds, 'cascades')}.",
            "",
        ]
    return "\n".join([*parts, _origin(kinds, "cascades")])


# ---- pictures


def curves_of_sample() -> list[Curve]:
    cells = read(FILE)["hits"]
    return list(curves([cell for cell in cells if cell["target"] == TARGET]))


def hits_claim() -> Claim:
    """What boosted drafts hit beside others."""
    greedy = {(each.family, each.count): each.rates for each in curves_of_sample() if not each.temperature}
    gain = {family: greedy[family, 3][2] for family in ("alone", "boosted")}
    complements = "complement each other" if gain["boosted"] > gain["alone"] else "do not complement each other here"
    sentence = (
        f"Boosted drafts {complements}: with one choice each, three of them hit {gain['boosted']:.3f} of the greedy "
        f"tokens and three that were distilled each by itself {gain['alone']:.3f}; three choices of one draft hit "
        f"{greedy['alone', 1][2]:.3f}."
    )
    facts = "; ".join(
        f"T={each.temperature:g}, {each.kind}, {each.drafts}: {', '.join(f'{rate:.3f}' for rate in each.rates)}"
        for each in curves_of_sample()
    )
    run = runs(read(FILE), "hits")[0]
    return Claim(sentence, facts, f"bundled model, prompts of three tasks; {origin_line(run)}", hits_figure)


def hits_figure() -> Any:
    """Hit rate by K, greedy and sampled, one line a group of drafts."""
    figure, both = plots.canvas(7.2, 3.0, 2, sharex=True)
    for axes, (heat, kind, title) in zip(
        both,
        ((0.0, "chosen", "greedy: among the first K"), (1.0, "sampled", "T=1: one of K samples accepted")),
        strict=True,
    ):
        for each in curves_of_sample():
            if (each.temperature, each.kind) != (heat, kind):
                continue
            color = plots.INK if each.count == 1 else plots.color(0 if each.family == "boosted" else 1)
            style, fill = ("--", "none") if each.count == 2 else ("-", color)
            name = each.drafts.replace("distilled each by itself", "each by itself")
            axes.plot(range(1, CHOICES + 1), each.rates, style, color=color, marker="o", mfc=fill, label=name)
        axes.set_title(title)
        axes.set_xlabel("K")
        axes.set_xticks(range(1, CHOICES + 1))
    both[0].set_ylabel("hit rate")
    both[1].legend(loc="lower right", fontsize=8)
    return figure


def latency_series() -> dict[str, list[tuple[int, int, float]]]:
    """Layers, width and milliseconds of models with random weights, by series."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for run in read(RESULTS / "depth.jsonl")["run"]:
        found.setdefault(run["series"], []).append((run["layers"], run["width"], run["milliseconds"]))
    return found


def greedy_shapes() -> list[Shape]:
    """The pruned drafts of greedy rows: sampled rows' chains have siblings, which the formula does not know."""
    cells = [cell for cell in read(FILE).get("shapes", []) if cell["target"] == TARGET]
    return [each for each in shaped(cells) if not each.temperature]


def _layers(shape: Shape) -> int:
    return shape.latency["layers"]


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def shapes_claim() -> Claim:
    """Latency by shape, and what the formula says."""
    series, pairs = latency_series(), greedy_shapes()
    equal, deep, wide = (series[name] for name in ("equal", "by depth", "by width"))
    ratios = [each.measured / each.formula for each in pairs]
    best = sorted({each.name: each for each in sorted(pairs, key=lambda each: each.measured)}.values(), key=_layers)
    layers, rates = [str(_layers(each)) for each in best], [f"{each.measured:.0f}" for each in best]
    compared = (
        f" Pruned from the bundled model to equal parameters and distilled equally, drafts of "
        f"{_listed(layers)} layers decode {_listed(rates)} greedy tokens a second at their best length, "
        f"{min(ratios):.2f} to {max(ratios):.2f} of what the formula says (median {statistics.median(ratios):.2f})."
        if ratios
        else ""
    )
    sentence = (
        f"Of equal parameters a draft of {equal[-1][0]} layers takes {equal[-1][2] / equal[0][2]:.1f} times as long as "
        f"one of {equal[0][0]}; {deep[-1][0] // deep[0][0]} times the layers take {deep[-1][2] / deep[0][2]:.0f} times "
        f"as long, and {wide[-1][1] // wide[0][1]} times the width, with sixteen times the parameters, "
        f"{wide[-1][2] / wide[0][2]:.1f} times.{compared}"
    )
    facts = "; ".join(
        f"greedy, {each.length} tokens, {each.name}: {each.formula:.0f} by formula, {each.measured:.0f}"
        for each in pairs
    )
    made = f"random weights: {origin_line(read(RESULTS / 'depth.jsonl')['provenance'][0])}"
    for run in runs(read(FILE), "shapes")[:1]:
        made += f"; drafts pruned from the bundled model: {origin_line(run)}"
    return Claim(sentence, facts, made, shapes_figure)


def shapes_figure() -> Any:
    """Milliseconds by layers and by width; throughput as measured by the formula's."""
    series, pairs = latency_series(), greedy_shapes()
    figure, (left, middle, *right) = plots.canvas(7.2, 2.8, 3 if pairs else 2)
    for number, (name, title) in enumerate(
        (("equal", "equal parameters"), ("by depth", f"width {series['by depth'][0][1]}"))
    ):
        points = [(layers, milliseconds) for layers, _, milliseconds in series[name]]
        left.plot(*zip(*points, strict=True), "o-", color=plots.color(number), label=title)
    left.set_title("ms per token by layers")
    left.set_xticks([layers for layers, _, _ in series["equal"]])
    left.set_xlabel("layers")
    left.legend(fontsize=8)
    points = [(width, milliseconds) for _, width, milliseconds in series["by width"]]
    middle.plot(*zip(*points, strict=True), "o-", color=plots.color(2))
    middle.set_title(f"ms per token by width, {series['by width'][0][0]} layers")
    middle.set_xlabel("width")
    for axes in (left, middle):
        axes.set_ylim(bottom=0)
    for axes in right:
        for number, name in enumerate(dict.fromkeys(each.name for each in pairs)):
            own = [(each.formula, each.measured) for each in pairs if each.name == name]
            axes.plot(*zip(*own, strict=True), "o", color=plots.color(number), markersize=4, alpha=0.8, label=name)
        most = 1.05 * max(max(each.formula, each.measured) for each in pairs)
        axes.plot((0, most), (0, most), **plots.DASHED)
        axes.set(xlim=(0, most), ylim=(0, most), xlabel="by formula", ylabel="measured", title="tokens per second")
        axes.legend(fontsize=8, loc="lower right")
    return figure


# ---- measurement

FAMILIES = {"alone": ("boosted/1", "alone/2", "alone/3"), "boosted": ("boosted/1", "boosted/2", "boosted/3")}
"""Folders of the drafts. The first boosted draft learns all tokens, so it is the first one alone, too."""
SHAPES = {
    "sample": {
        "wide": "layers=2",
        "middle": "layers=4,hidden=324,intermediate=594",
        "deep": "layers=8,hidden=252,intermediate=528,kv_heads=1",
    },
    "target-65m": {
        "wide": "layers=2,hidden=440,intermediate=1300",
        "middle": "layers=4,hidden=384,intermediate=800,kv_heads=4",
        "deep": "layers=12,hidden=256,intermediate=624,kv_heads=2",
    },
}
"""By target: shapes with equal numbers of parameters, embeddings included."""
EXPANSIONS = {
    12: {1: ("3x1x1x1", "2x1x2x1"), 2: ("1x1x2x1", "2x1x1"), 3: ("1x1x1x1", "1x1x2")},
    24: {1: ("6x1x1x1", "4x1x2x1", "3x1x3x1"), 2: ("3x1x1x1", "2x1x2x1"), 3: ("2x1x1x1", "1x1x3x1")},
}
"""By nodes before merging and number of drafts: the expansion of each draft."""
RANKS = "0123456789"  # the last stands for all that follow
DECODING = 16
"""Most tokens of a forward that is not a prompt's."""


def named(args: Namespace) -> str:
    return Path(args.target).name


def lessons(folder: Path) -> dict[str, dict[str, Any]]:
    """Tokens that each finished model learned from, and how it agrees with the target on held-out ones."""
    found = {}
    for path in sorted(folder.glob("*/*/draft/provenance.json")):
        run, origin = path.parent.parent, json.loads(path.read_text("utf-8"))
        lines = map(json.loads, (run / "log.jsonl").read_text("utf-8").splitlines())
        tokens = max(line["tokens"] for line in lines if "tokens" in line)
        own = {"tokens": tokens, "agreement": origin["validation"]["agreement"]}
        learns = {"learns": origin["learns"]} if "learns" in origin else {}
        found[run.relative_to(folder).as_posix()] = own | learns
    return found


def made(args: Namespace, name: str) -> str:
    """The folder of a finished model."""
    folder = args.folder / name / "draft"
    if not folder.exists():
        raise SystemExit(f"{folder} is missing: run python -m benchmarks.tools.train_drafts first.")
    return str(folder)


class Texts:
    """Prompts in rounds, continued to their ends."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        options = {"dtype": "float32", "device": args.device, "max_batch_size": max(args.texts, 1)}
        self.plain = foredraft.load(args.target, "none", **options)
        self._prompts = in_turns(args.prompts, self.plain)

    def drafting(self, spec: str, rule: str | None = None) -> Generator:
        """A generator that drafts all that it can in every step."""
        generator = foredraft.load(self.plain, spec, verifier=rule, max_batch_size=max(self.args.texts, 1))
        draft_always(generator)
        return generator

    def run(self, generator: Generator, temperature: float, number: int, together: bool = True) -> list[Request]:
        """The texts of a round, all at once or one after another."""
        seeds = range(number * self.args.texts, (number + 1) * self.args.texts)
        params = SamplingParams(max_new_tokens=self.args.new_tokens, temperature=temperature)
        found: list[Request] = []
        for group in (seeds,) if together else [(seed,) for seed in seeds]:
            prompts = [self._prompts[seed % len(self._prompts)] for seed in group]
            found += run_texts(generator, prompts, params, group)
        return found


def hits(texts: Texts, cells: Sequence[Cell]) -> Iterator[Line]:
    """The rank of each token of the target's texts among the choices of every draft and, at T > 0, the probability that
    SpecInfer's multi-step sampling accepts one of K tokens drawn from one, two or three drafts in turn."""
    args = texts.args
    paths = {name: made(args, name) for names in FAMILIES.values() for name in names}
    target = load_model(args.target, dtype="float32", device=args.device).model
    drafts = {name: load_model(path, dtype="float32", device=args.device).model for name, path in paths.items()}
    for cell in cells:
        number, temperature = cell["round"], cell["temperature"]
        ranks: list[dict[str, str]] = []
        accepted = {f"{family} {count}": [0.0] * CHOICES for family in FAMILIES for count in (1, 2, 3)}
        for text in texts.run(texts.plain, temperature, number):
            ids = torch.tensor([[*text.prompt, *text.tokens]], device=target.device)
            places, new = slice(len(text.prompt) - 1, -1), ids[0, len(text.prompt) :]
            with torch.inference_mode():
                p = target(ids).logits[0, places]
                q = {name: draft(ids).logits[0, places, : p.shape[1]] for name, draft in drafts.items()}
            ranks.append({name: ranked(each, new) for name, each in q.items()})
            if temperature:
                laws = {name: (each / temperature).softmax(-1) for name, each in q.items()}
                for family, count in itertools.product(FAMILIES, (1, 2, 3)):
                    some = [laws[name] for name in FAMILIES[family][:count]]
                    sums = multi_step((p / temperature).softmax(-1), some)
                    total = accepted[f"{family} {count}"]
                    accepted[f"{family} {count}"] = [a + b for a, b in zip(total, sums, strict=True)]
        tokens = sum(len(each["boosted/1"]) for each in ranks)
        sampled = {key: [round(x, 3) for x in sums] for key, sums in accepted.items()} if temperature else {}
        yield {**cell, "tokens": tokens, "ranks": ranks, "accepted": sampled}


def ranked(logits: torch.Tensor, tokens: torch.Tensor) -> str:
    """A digit for each token: how many tokens the draft prefers to it, 9 for more."""
    own = logits.gather(1, tokens[:, None])
    return "".join(RANKS[min(rank, 9)] for rank in (logits > own).sum(1).tolist())


def multi_step(p: torch.Tensor, q: Sequence[torch.Tensor]) -> list[float]:
    """Sums over positions: the probability that one of the first K tokens is accepted, K = 1 to 6 (algorithm 2)."""
    sums, missed = [], torch.ones(len(p), device=p.device)
    for choice in range(CHOICES):
        law = q[choice % len(q)]
        missed = missed * (1 - torch.minimum(p, law).sum(1))
        sums.append(float((1 - missed).sum()))
        rest = (p - law).clamp(min=0)
        total = rest.sum(1, keepdim=True)
        p = torch.where(total > 0, rest / total.clamp(min=1e-20), p)
    return sums


def trees(texts: Texts, cells: Sequence[Cell]) -> Iterator[Line]:
    """Acceptance of one, two and three drafts whose trees have as many nodes together before they are merged."""
    keys = ("family", "models", "expansion", "rule", "round")
    for (family, count, expansion, rule, number), own in _together(cells, keys):
        paths = "+".join(made(texts.args, folder) for folder in FAMILIES[family][:count])
        with texts.drafting(f"specinfer:{paths},expansion={expansion}", rule) as generator:
            for cell in own:
                yield {**cell, "texts": counted(texts.run(generator, cell["temperature"], number))}


def _together(cells: Sequence[Cell], keys: Sequence[str]) -> Any:
    """Cells that share the generator of these keys."""
    return grouped(cells, lambda cell: tuple(cell[key] for key in keys)).items()


def counted(found: Sequence[Request]) -> list[list[int]]:
    """Tokens, forwards of the target and drafted tokens of each text."""
    return [[len(each.tokens), each.stats.target_forwards, each.stats.drafted] for each in found]


def timed(found: Sequence[Request]) -> list[list[float]]:
    """The same, and seconds after the prompt."""
    times = [each.stats.seconds - each.stats.prefill_seconds for each in found]
    return [[*line, round(each, 4)] for line, each in zip(counted(found), times, strict=True)]


def shapes(texts: Texts, cells: Sequence[Cell]) -> Iterator[Line]:
    """Deep and wide drafts of as many parameters: acceptance, time, and latencies by themselves, one text at a time."""
    args, generators = texts.args, dict[tuple[str, int], Generator]()
    for name, length in ((name, length) for name in ("plain", *SHAPES[named(args)]) for length in (0, *args.lengths)):
        if bool(length) == (name != "plain"):
            path = f"draft_model:{made(args, f'shape/{name}')},num_assistant_tokens={length}" if length else "none"
            generators[name, length] = texts.drafting(path)
    for cell in cells:
        generator = generators[cell["shape"], cell["length"]]
        yield {**cell, "texts": timed(texts.run(generator, cell["temperature"], cell["round"], together=False))}
    if any(not cell["round"] for cell in cells):
        about = {name: cells[0][name] for name in ("kind", "target", "start")}
        yield from ({**about, **line} for line in latencies(generators, args))


def latencies(generators: dict[tuple[str, int], Generator], args: Namespace) -> Iterator[dict[str, Any]]:
    """Milliseconds of a forward: one token of each draft, and as many of the target as are verified."""
    target = generators["plain", 0].engine.target
    assert isinstance(target, CausalLM)
    timed = {("target", nodes): Draft(target, 256, nodes) for nodes in (1, *(1 + length for length in args.lengths))}
    for name in SHAPES[named(args)]:
        loaded = load_model(made(args, f"shape/{name}"), dtype="float32", device=args.device)
        timed[name, 1] = Draft(CausalLM(loaded.model, verify=False), 256, 1)
    for _ in range(15):
        for each in timed.values():
            each.run(5)
    for (name, nodes), each in timed.items():
        config = each.model.config
        shape = {"layers": config.num_hidden_layers, "hidden": config.hidden_size, "parameters": each.total}
        if name != "target":
            training = json.loads((Path(made(args, f"shape/{name}")) / "provenance.json").read_text("utf-8"))
            shape |= {"validation": training["validation"]}
        milliseconds = round(statistics.median(each.milliseconds[5:]), 4)
        yield {"latency": name, "forward_nodes": nodes, **shape, "milliseconds": milliseconds}


def cascaded(draft: str, middle: str) -> dict[str, str]:
    """Drafters by name. Vertical: the inner drafter drafts for a model. Horizontal: one continues the other's draft."""
    small, gram = f"draft_model:{draft},num_assistant_tokens", "max_gram,num_assistant_tokens"
    down = f"cascade:{draft}+[{gram}=3],num_assistant_tokens"
    return {
        "plain": "none",
        "Max-Gram": f"{gram}=8",
        "draft, 4": f"{small}=4",
        "draft, 8": f"{small}=8",
        "vertical: draft over Max-Gram, 4": f"{down}=4",
        "vertical: draft over Max-Gram, 8": f"{down}=8",
        "vertical: draft over Max-Gram with bigrams, 8": (
            f"cascade:{draft}+[{gram}=3,bigrams=yes],num_assistant_tokens=8"
        ),
        "horizontal: 4 of draft, 4 of Max-Gram": f"relay:[{small}=4]+[{gram}=4]",
        "combined: 4 of draft over Max-Gram, 4 of Max-Gram": f"relay:[{down}=4]+[{gram}=4]",
        "middle, 4": f"draft_model:{middle},num_assistant_tokens=4",
        "middle, 8": f"draft_model:{middle},num_assistant_tokens=8",
        "vertical: middle over draft, 8": f"cascade:{middle}+[{small}=3],num_assistant_tokens=8",
        "vertical: middle over draft over Max-Gram, 8": f"cascade:{middle}+[{down}=3],num_assistant_tokens=8",
        "horizontal: 3 of middle, 3 of draft, 2 of Max-Gram": (
            f"relay:[draft_model:{middle},num_assistant_tokens=3]+[{small}=3]+[{gram}=2]"
        ),
        "interleaved: middle over (2 of draft, 2 of Max-Gram), 8": (
            f"cascade:{middle}+[relay:[{small}=2]+[{gram}=2]],num_assistant_tokens=8"
        ),
        "combined: 4 of middle over draft over Max-Gram, 2 of draft over Max-Gram, 2 of Max-Gram": (
            f"relay:[cascade:{middle}+[{down}=3],num_assistant_tokens=4]+[{down}=2]+[{gram}=2]"
        ),
    }


def cascades(texts: Texts, cells: Sequence[Cell]) -> Iterator[Line]:
    """Acceptance, time, and forwards of every model after the prompt, one text at a time."""
    arms, calls, call = _arms(texts.args), Counter[int](), CausalLM._call

    def counting(self: CausalLM, step: Any, *given: Any) -> Any:
        calls[sum(each.numel() for each in self.model.parameters())] += step.tokens.shape[1] <= DECODING
        return call(self, step, *given)

    with patch.object(CausalLM, "_call", counting):
        for (name, number), own in _together(cells, ("arm", "round")):
            with texts.drafting(arms[name]) as generator:
                for cell in own:
                    calls.clear()
                    found = texts.run(generator, cell["temperature"], number, together=False)
                    levels = {str(parameters): count for parameters, count in sorted(calls.items(), reverse=True)}
                    yield {**cell, "texts": timed(found), "calls": levels}


def _arms(args: Namespace) -> dict[str, str]:
    return cascaded(args.draft, args.middle or str(args.folder / "shape" / "wide" / "draft"))


PARTS = {"hits": hits, "trees": trees, "shapes": shapes, "cascades": cascades}


def cells(args: Namespace) -> list[Cell]:
    found: dict[str, list[Cell]] = {
        "hits": [{}],
        "trees": [
            {"family": family, "models": count, "nodes": nodes, "expansion": expansion, "rule": rule}
            for family in FAMILIES
            for nodes, by_count in EXPANSIONS.items()
            for count, expansions in by_count.items()
            if count > 1 or family == "alone"
            for expansion in expansions
            for rule in (None, "recursive")
        ],
        "shapes": [
            {"shape": "plain", "length": 0},
            *({"shape": name, "length": length} for name in SHAPES.get(named(args), ()) for length in args.lengths),
        ],
        "cascades": [{"arm": name} for name in _arms(args)],
    }
    base = {"target": named(args), "start": Path(args.start or args.draft).name}
    return [
        {"kind": part, **base, **cell, "temperature": heat, "round": number}
        for part in args.parts
        for number in range(args.rounds)
        for cell in found[part]
        for heat in args.temperatures
        if heat or not cell.get("rule")
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    texts = Texts(args)
    for part, own in _together(cells, ("kind",)):
        yield from PARTS[part[0]](texts, own)


def _commands(inputs: Inputs) -> list[list[str]]:
    """With training."""
    names = ("gsm8k_train", "self_dialogue", "the_algorithms_python")
    words, files = ["--folder", inputs.state / "drafts"], ["--prompts", *inputs.questions()]
    learned = ["--share", "0.5", "--store", "4", "--data", *(inputs.corpus / f"{name}.jsonl.xz" for name in names)]
    several, pruned = ("boosted", "alone/2", "alone/3"), ("shape/wide", "shape/middle", "shape/deep")
    tool, few = "benchmarks.tools.train_drafts", ["--texts", "2", "--rounds", "4"]
    return [
        command(tool, *words, "--only", *several, "--tokens", "500000", *learned),
        command(tool, *words, "--only", *pruned, "--tokens", "200000", "--samples", "8", *learned),
        measured("drafts", "--parts", "hits", *words, *files, "--rounds", "3"),
        measured("drafts", "--parts", "trees", *words, *files),
        measured("drafts", "--parts", "shapes", *words, *files, *few),
        measured("drafts", "--parts", "cascades", *words, *files, *few),
    ]


EXPERIMENT = Experiment(
    name="drafts",
    question="merged trees, deep and wide drafts, cascades: methods/specinfer.md, pruned_drafts.md, cascade.md",
    options={
        "parts": option(list(PARTS), choices=list(PARTS)),
        "folder": option(Path("build/drafts"), "of the trained models"),
        "target": option("sample", "sample, or a folder named target-65m"),
        "draft": option("sample-draft", "the target's draft model"),
        "start": option(str, "what training started from, if another"),
        "middle": option(str, "the larger draft model of cascades; by default the wide one"),
        "prompts": PROMPTS,
        "texts": option(8, "of a round"),
        "rounds": option(1),
        "new_tokens": option(96),
        "temperatures": option([0.0, 1.0]),
        "lengths": option([2, 4, 8], "shapes: drafted tokens"),
        "device": option("cpu"),
    },
    cells=cells,
    measure=measure,
    facts=lambda args: {"target": named(args), "lessons": lessons(args.folder)},
    tables={
        "docs/methods/specinfer.md": {"measured": specinfer},
        "docs/methods/pruned_drafts.md": {"measured": lambda: "\n".join(shape_tables()).lstrip()},
        "docs/methods/cascade.md": {"measured": cascade_table},
    },
    claims={"several": hits_claim, "shapes": shapes_claim},
    hours=2.0,
    needs=lambda inputs: (inputs.corpus, inputs.prompts),
    commands=_commands,
)
