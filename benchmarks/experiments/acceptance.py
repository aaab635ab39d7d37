"""Acceptance of every method at equal draft sizes, on many prompts of a real model; no times, so any machine will do.

    python -m benchmarks acceptance --model MODEL --eagle3 HEAD --eagle1 HEAD --prompts ../shared/data/prompts
    python -m benchmarks acceptance ... --device cuda --processes 8 --seconds 300

A cell is an arm of real_model.py at a fixed size, a rule and a temperature. The first turns of all prompts run in
batches, everything is drafted in every step. Above temperature 0 there are several rules: shared noise; the ratio rules
of the papers, whose drafts are drawn; and ``picked``, where drafts are the likeliest tokens and do not depend on the
target's noise, as in EAGLE's published code. One JSON line for each task of a cell: of each text its tokens, forwards
of the target, how many accepted paths reached depth 1, 2, ..., and, unless the rule draws, a digest, since texts do not
depend on the drafter then. Cells that matter most come first. The results file holds no texts.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import statistics
import time
import zlib
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final
from unittest.mock import patch

import numpy as np
import torch

import foredraft
from benchmarks.experiments.real_model import ARMS_OF_PAGE, DEPTH, FIXED, HEADS, NETWORKS, SAMPLES, TASKS, arms
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Inputs, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import interval_of_sums, markdown_table, read
from benchmarks.kit.runs import by_position, length, repeats
from benchmarks.kit.seeded_texts import run_texts, tokenized
from foredraft.bench.measure.records import Run, digest
from foredraft.bench.measure.summary import temperature_label
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, StepOut, View
from foredraft.core.errors import DrafterError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.verify import RULES
from foredraft.drafters.common.wrapper import DrafterWrapper
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.engine.request import Sequence as Request
from foredraft.model.base import TargetModel
from foredraft.model.kv.cache import SlotCache
from foredraft.model.kv.masks import StepIn

FILE = RESULTS / "acceptance.jsonl"
PLAIN, SHARED, PICKED = "none", "shared noise", "picked"
"""The method that drafts nothing; rules beside the ratio rules."""
_TREE = ("traversal",)
RATIO = {
    **dict.fromkeys(("eagle3", "eagle2", "eagle1", "hydra", "medusa"), _TREE),
    "eagle1-chain": ("traversal", "recursive"),
    "eagle3-chain": (),
    "blockwise": ("block", "token"),
    "draft_model": ("block", "token"),
}
"""The ratio rules for a method's drawn drafts, the best first. EAGLE-3 draws no chains."""
TITLES = {
    "eagle3": "EAGLE-3",
    "eagle2": "EAGLE-2",
    "eagle2-expanded": "EAGLE-2, four expanded a level",
    "eagle2-no-value": "the same without value",
    "eagle2-no-rerank": "the same without re-rank",
    "eagle2-neither": "the same without both",
    "eagle1": "EAGLE-1",
    "hydra": "Hydra++",
    "medusa": "Medusa",
    "eagle3-chain": "EAGLE-3, chain",
    "eagle1-chain": "EAGLE-1, chain",
    "blockwise": "blockwise",
    "draft_model": "draft model",
    "sequoia": "Sequoia",
    "prompt_lookup": "prompt lookup",
    "max_gram": "Max-Gram",
}
ORDER = ("eagle3", "eagle2", "eagle1", "hydra", "medusa")
"""The papers', best first."""
Sized = tuple[str, str]
"""Method and size."""
Key = tuple[str, str, str, float]
"""Method, size, rule, temperature."""


@dataclass(slots=True)
class Results:
    """A results file. ``texts``: by cell and task, of each prompt. ``nodes``: of each arm."""

    texts: dict[Key, dict[str, list[Run]]] = field(default_factory=dict)
    nodes: dict[Sized, int] = field(default_factory=dict)
    repeated: dict[str, float] = field(default_factory=dict)
    origins: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> "Results":
        """Of what ran several times, the last."""
        kinds, found = read(path), cls()
        found.origins = kinds["provenance"]
        for line in kinds.get("cell", []):
            cell = line["method"], line["size"], line["rule"], line["temperature"]
            found.texts.setdefault(cell, {})[line["task"]] = [_run(line, *text) for text in line["texts"]]
            found.nodes[cell[:2]] = line["nodes"]
            if line["temperature"] == 0 and "repeated" in line:
                found.repeated[line["task"]] = line["repeated"]
        return found

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell[3] for cell in self.texts})

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for own in self.texts.values() for task in own))

    def size(self, arm: Sized) -> int:
        """Drafted tokens of an arm, as its name has them."""
        return self.nodes[arm] if arm[1] == HEADS else int(arm[1])

    def arms(self) -> list[Sized]:
        """All that draft, the papers' order first."""
        methods = list(TITLES)
        found = [arm for arm in self.nodes if arm[0] != PLAIN]
        return sorted(found, key=lambda arm: (methods.index(arm[0]), self.size(arm)))

    def runs(self, cell: Key) -> list[Run]:
        return [run for own in self.texts.get(cell, {}).values() for run in own]

    def pairs(self, cell: Key, other: Key) -> list[tuple[Run, Run]]:
        """The texts of two cells that have the same prompt."""
        ours, theirs = self.texts.get(cell, {}), self.texts.get(other, {})
        return [pair for task in ours for pair in zip(ours[task], theirs.get(task, []), strict=False)]

    def beside_plain(self, cell: Key) -> list[tuple[Run, Run]]:
        """The texts of a cell that should be plain decoding's, with those."""
        if cell[0] == PLAIN or cell[2] not in (SHARED, PICKED):
            return []
        return self.pairs(cell, (PLAIN, "", SHARED, cell[3]))


def _run(line: dict[str, Any], tokens: int, forwards: int, reached: Sequence[int], digest: str = "") -> Run:
    return Run(digest, line["task"], (), tokens=tokens, forwards=forwards, accepted_by_depth=tuple(reached))


def _rate(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1]


def length_with_interval(runs: Sequence[Run]) -> str:
    """The acceptance length with its interval."""
    low, high = interval_of_sums([(run.tokens, run.forwards) for run in runs], _rate, SAMPLES)
    return f"{length(runs):.2f} ({low:.2f} to {high:.2f})"


def difference(pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float, float]:
    """How much longer the first ones' acceptance length is, with the interval of the bootstrap over pairs."""
    rows = [(ours.tokens, ours.forwards, theirs.tokens, theirs.forwards) for ours, theirs in pairs]
    ours, theirs = zip(*pairs, strict=True)
    return length(ours) - length(theirs), *interval_of_sums(rows, lambda s: _rate(s[:2]) - _rate(s[2:]), SAMPLES)


Comparison = tuple[str, tuple[str, str], tuple[str, str]]
"""A title, and two methods, each with its rule."""


def orders() -> list[Comparison]:
    """The orderings of the papers, at every temperature."""
    found = []
    for better, worse in itertools.pairwise(ORDER):
        title = f"{TITLES[better]} over {TITLES[worse]}"
        title += ": a dynamic tree over a static one, same weights" * (better == "eagle2")
        found.append((title, (better, SHARED), (worse, SHARED)))
    found.append(("EAGLE-3: tree over chain", ("eagle3", SHARED), ("eagle3-chain", SHARED)))
    for title, without in (("value", "no-value"), ("re-rank", "no-rerank"), ("both", "neither")):
        found.append((f"EAGLE-2: {title} over none", ("eagle2-expanded", SHARED), (f"eagle2-{without}", SHARED)))
    found.append(("draft model: Sequoia over chain", ("sequoia", SHARED), ("draft_model", SHARED)))
    return found


def rules() -> list[Comparison]:
    """Comparisons of rules, above temperature 0."""
    found = []
    for method in ORDER:
        title, (best,) = TITLES[method], RATIO[method]
        found.append((f"{title}: shared noise over {best}", (method, SHARED), (method, best)))
        found.append((f"{title}: drawn, {best}, over picked", (method, best), (method, PICKED)))
        found.append((f"{title}: shared noise over picked", (method, SHARED), (method, PICKED)))
    for method in ("eagle1-chain", "blockwise", "draft_model"):
        block, token = RATIO[method]
        found.append((f"{TITLES[method]}: block over token verification", (method, block), (method, token)))
    return found


def differences(results: Results, comparisons: Sequence[Comparison]) -> str:
    """Comparisons by temperature and number of nodes, as far as both sides were run; empty if none was."""
    sizes, lines = sorted({results.size(arm) for arm in results.arms()}), []
    names = {(arm[0], results.size(arm)): arm[1] for arm in results.arms()}
    for title, ours, theirs in comparisons:
        for temperature in results.temperatures:
            row = []
            for size in sizes:
                cells = [(method, names.get((method, size), ""), rule, temperature) for method, rule in (ours, theirs)]
                pairs = results.pairs(*cells)
                middle, low, high = difference(pairs) if pairs else (0.0, 0.0, 0.0)
                row.append(f"{middle:+.2f} ({low:+.2f} to {high:+.2f})" if pairs else "")
            if any(row):
                lines.append([title, f"{temperature:g}", *row])
    head = ["difference in acceptance length", "T", *(f"{size} nodes" for size in sizes)]
    return "\n".join(markdown_table(head, lines)) if lines else ""


def by_arm(results: Results, temperature: float) -> tuple[str, str]:
    """A title, and every arm at a temperature with the rules that were run there; an empty table if no arm was."""
    run = {cell[2] for cell in results.texts if cell[3] == temperature}
    picked, drawn = PICKED in run, bool(run - {SHARED, PICKED})
    tasks, lines = results.tasks, []
    for arm in results.arms():
        runs = results.runs((*arm, SHARED, temperature))
        if not runs:
            continue
        row = [TITLES[arm[0]], str(results.nodes[arm]), length_with_interval(runs)]
        ratio = [(*arm, rule, temperature) for rule in RATIO.get(arm[0], ())]
        if drawn:
            row.append(
                "; ".join(f"{cell[2]} {length_with_interval(own)}" for cell in ratio if (own := results.runs(cell)))
            )
        if picked:
            own = results.runs((*arm, PICKED, temperature))
            row.append(length_with_interval(own) if own else "")
        row.append(by_position(runs))
        for task in tasks:
            shown = [
                f"{length(own):.2f}"
                for cell in ((*arm, SHARED, temperature), *ratio)
                if (own := results.texts.get(cell, {}).get(task))
            ]
            row.append(" / ".join(shown))
        lines.append(row)
    first = "shared noise" if drawn or picked else "acceptance length"
    head = ["method", "nodes", first, *["drawn, ratio rule"] * drawn, *["picked"] * picked, "by position", *tasks]
    beside = " (by task: shared noise / ratio rule)" if drawn else ", shared noise"
    title = "Greedy:" if temperature == 0 else f"Temperature {temperature:g}{beside}:"
    return title, "\n".join(markdown_table(head, lines)) if lines else ""


def notes(results: Results) -> str:
    """What the tables rest on."""
    shown = ", ".join(f"{task} {share:.2f}" for task, share in results.repeated.items())
    origin = results.origins[-1]
    if origin.get("replayed"):
        texts = "With shared noise and picked, drafters are replayed on plain decoding's texts, from recorded states."
    else:
        same = [ours.arm == plain.arm for cell in results.texts for ours, plain in results.beside_plain(cell)]
        texts = "Texts equal to plain decoding's of the same seed, with shared noise and picked: "
        texts += f"{sum(same)} of {len(same)}."
    return (
        f"{texts} "
        f"Share of repeated 4-grams in greedy answers: {shown}. "
        f"{origin_line(origin, origin['dtype'], results.origins)}. Made by "
        "`python -m benchmarks acceptance`, with the options in "
        "[acceptance.jsonl](../benchmarks/results/acceptance.jsonl)."
    )


def tables(path: Path = FILE) -> str:
    """The orderings, and one table for each temperature."""
    results = Results.of(path)
    counts = {len(own) for by_task in results.texts.values() for own in by_task.values()}
    most, tokens = max(counts), results.origins[-1]["new_tokens"]
    size = f"{most} prompt{'s' * (most > 1)} a task"
    titles = {"Orderings, with intervals over the same prompts:": orders(), "Rules at temperatures above 0:": rules()}
    parts = [(title, differences(results, comparisons)) for title, comparisons in titles.items()]
    parts += [by_arm(results, temperature) for temperature in results.temperatures]
    about = f"Acceptance on {size}, {tokens} new tokens."
    return "\n\n".join([about, *(f"{title}\n\n{part}" for title, part in parts if part), notes(results)])


# ---- measurement

CHAINS = (4, 8)
"""Lengths of chains of EAGLE-1, on which traversal is block verification and recursive rejection token verification."""
SWITCHES = {
    "eagle2-expanded": "",
    "eagle2-no-value": ",value=no",
    "eagle2-no-rerank": ",rerank=no",
    "eagle2-neither": ",value=no,rerank=no",
}
"""EAGLE-2's ablation, on a tree that has as many nodes as are expanded."""
NONE = 0
"""A token after a text's end."""
LARGE = 60
"""Nodes of trees that take most of the time, and so come later."""
GREEDY, SAMPLED, DRAWN = 3, 6, 12
"""Laws for each node that a step holds at most: in greedy rows, in sampled ones, and if drafts are drawn."""
BESIDE = 12
"""Other nodes with laws: a level of a draft, and what static trees have beyond the size of their name."""
Prompt = tuple[str, int, list[int]]
"""Task, number in it, tokens."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm with its rule at a temperature. ``size``: of the arm's name."""

    method: str
    size: str
    spec: str
    rule: str
    temperature: float

    @property
    def draws(self) -> bool:
        return self.rule in RULES

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, int]:
        """Those of low rank come first: plain decoding; what can be replayed; temperatures 0 and 1; small trees."""
        rules = (SHARED, *RATIO.get(self.method, ()), PICKED)
        large = self.size == str(LARGE)
        return self.method != PLAIN, self.draws, self.temperature not in (0, 1), large, rules.index(self.rule)

    def cell(self, task: str) -> Cell:
        named = {name: getattr(self, name) for name in ("method", "size", "rule", "temperature")}
        return {"kind": "cell", **named, "task": task}


def arms_of(heads: dict[str, str], temperatures: Sequence[float], nodes: Sequence[int]) -> list[Arm]:
    """All cells, those first that matter most."""
    specs = {name: spec for name, spec in arms(heads).items() if not name.endswith(" auto")}
    if "eagle1" in heads:
        shapes = {n: "x".join("1" * n) for n in CHAINS}
        specs |= {f"eagle1-chain {n}": f"eagle1:{heads['eagle1']},tree={shape},{FIXED}" for n, shape in shapes.items()}
        expanded = f"eagle2:{heads['eagle1']},nodes=24,depth=6,top_k=4,{FIXED}"  # as many as a tree without re-rank has
        specs |= {f"{name} 24": f"{expanded}{switches}" for name, switches in SWITCHES.items()}
    if "draft_model" in heads:
        specs |= {f"sequoia {n}": f"sequoia:{heads['draft_model']},nodes={n},depth={DEPTH[n]},{FIXED}" for n in nodes}
    found = []
    for name, spec in specs.items():
        method, _, size = name.partition(" ")
        if method != PLAIN and size != HEADS and int(size) not in nodes:
            continue
        for temperature in temperatures:
            ratio = RATIO.get(method)  # look-ups are picked anyway
            rules = [SHARED, *(() if ratio is None or not temperature else (*ratio, PICKED))]
            found += [Arm(method, size, spec, rule, temperature) for rule in rules]
    return sorted(found, key=lambda cell: cell.rank)


@final
class Picked(DrafterWrapper):
    """Has the inner drafter draft as for greedy rows, so that drafts do not depend on the target's noise."""

    def propose(self, view: View, plan: Plan) -> Draft:
        return super().propose(view.as_greedy(), plan)


class RecordedText:
    """A text's tokens, prompt included, and the target's states at each; stands in for the forwards of the target.

    ``replayed`` is for one row, on a target whose tokens the host chooses.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = torch.tensor([tokens])
        self._next = torch.cat([self._tokens[0, 1:], torch.tensor([NONE])]).float()  # exact below 2**24
        self._states: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def replayed(self, target: TargetModel) -> Iterator[None]:
        """A context in which the target's forwards are those of this text, as far as nodes are on its path."""
        if missing := target.empty_hidden().keys() - self._states.keys():
            self._states |= target.read(self._tokens, sorted(missing))

        def compute(step: StepIn, cache: SlotCache, keep: torch.Tensor | None = None) -> StepOut:
            places = step.positions[0].clamp(max=len(self._next) - 1)
            hidden = {layer: self._states[layer][:, places] for layer in target.empty_hidden()}
            return StepOut(self._next[places if keep is None else places[keep]][None, :, None], hidden)

        def choose(tokens: torch.Tensor, row: int, node: int, *noise: float) -> int:
            return int(tokens[row, node, 0])

        with patch.object(target, "compute", compute), patch.object(target.ops, "choose", choose):
            yield


class Bench:
    """The target and the prompts of one process; each is made when it is first needed."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._cache, self._laws = (int(share * args.gigabytes * 2**30) for share in (0.25, 0.75))
        self._recorded: dict[float, dict[tuple[str, int], RecordedText]] = {}  # by temperature, task and number

    @cached_property
    def plain(self) -> Generator:
        args = self._args
        kind = {"weights": args.weights} if args.weights else {"dtype": args.dtype}
        return foredraft.load(args.model, "none", device=args.device, **kind)

    @cached_property
    def prompts(self) -> dict[str, list[list[int]]]:
        return tokenized(self.plain, files(self._args), self._args.count)

    def lines(self, cell: Arm, tasks: Collection[str]) -> list[dict[str, Any]]:
        """Run these tasks of a cell, with fewer rows where a GPU's memory is too small."""
        rows = self._most(cell)
        while True:
            try:
                return self._lines(cell, tasks, rows)
            except (torch.OutOfMemoryError, DrafterError) as error:  # Picked's errors are those of a foreign drafter
                if rows == 1 or not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                    raise
            torch.cuda.empty_cache()  # the error, which holds tensors, is gone
            rows //= 2

    def _most(self, cell: Arm) -> int:
        """The most rows whose laws fit."""
        laws = DRAWN if cell.draws else SAMPLED if cell.temperature else GREEDY
        nodes = BESIDE + (int(cell.size) if cell.size.isdigit() else 0)
        law = 4 * self.plain.engine.target.vocab_size  # float32
        return max(1, min(self._args.batch, self._laws // (laws * nodes * law)))

    def _lines(self, cell: Arm, tasks: Collection[str], rows: int) -> list[dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            generator = stack.enter_context(self._generator(cell, rows, stack))
            texts = self._texts(generator, cell, tasks)
            nodes = generator.engine.drafter.needs.max_nodes
        found = []
        for task, own in texts.items():
            line = {**cell.cell(task), "nodes": nodes}
            line |= {"new_tokens": self._args.output_tokens, "count": self._args.count}
            if cell.method == PLAIN:
                line["repeated"] = round(statistics.mean(repeats(each.tokens) for each in own), 4)
            found.append(line | {"texts": [shown(each, cell.draws) for each in own]})
        return found

    def _generator(self, cell: Arm, rows: int, stack: contextlib.ExitStack) -> Generator:
        """The generator of a cell; ``stack`` holds what it needs."""
        limits: dict[str, Any] = {"max_batch_size": rows, "kv_cache_memory_bytes": self._cache}
        limits["max_prefill_tokens"] = 2**20  # nobody waits
        verifier = cell.rule if cell.draws else None
        generator = foredraft.load(self.plain, cell.spec, verifier=verifier, **limits)
        if cell.rule != PICKED:
            return generator
        drafter = stack.enter_context(generator).engine.drafter
        return foredraft.load(self.plain, Picked(drafter), policy=Constant(drafter.needs.longest), **limits)

    def _texts(self, generator: Generator, cell: Arm, tasks: Collection[str]) -> dict[str, list[Request]]:
        """The texts of all prompts by task. Long prompts come last: all rows of a cache are as long as the longest."""
        prompts = [(task, number, ids) for task in tasks for number, ids in enumerate(self.prompts[task])]
        prompts.sort(key=lambda each: len(each[2]))
        if self._args.weights and not cell.draws:
            if cell.method == "sequoia":  # the first text measures its tree, for which it needs the target
                self._decoded(generator, prompts[:1], cell.temperature)
            texts = self._replayed(generator, prompts, cell.temperature)
        else:
            texts = self._decoded(generator, prompts, cell.temperature)
        found = {(task, number): text for (task, number, _), text in zip(prompts, texts, strict=True)}
        return {task: [found[task, number] for number in range(len(self.prompts[task]))] for task in tasks}

    def _decoded(
        self, generator: Generator, prompts: Sequence[Prompt], temperature: float, **options: Any
    ) -> list[Request]:
        params = SamplingParams(max_new_tokens=self._args.output_tokens, temperature=temperature, **options)
        seeds = [zlib.crc32(f"{task} {number}".encode()) for task, number, _ in prompts]
        return run_texts(generator, [ids for *_, ids in prompts], params, seeds)

    def _replayed(self, generator: Generator, prompts: Sequence[Prompt], temperature: float) -> list[Request]:
        """What this generator would decode, without forwards of the target."""
        recorded = self._recorded.setdefault(temperature, {})
        missing = [prompt for prompt in prompts if prompt[:2] not in recorded]
        plain = self._decoded(self.plain, missing, temperature, eos_token_id=())  # a step may go beyond the end
        for (task, number, ids), text in zip(missing, plain, strict=True):
            recorded[task, number] = RecordedText([*ids, *text.tokens])
        texts = []
        for prompt in prompts:
            with recorded[prompt[:2]].replayed(generator.engine.target):
                texts += self._decoded(generator, [prompt], temperature)
        return texts


def shown(text: Request, draws: bool) -> list[Any]:
    """What a line has of a text."""
    stats = text.stats
    numbers = [len(text.tokens), stats.target_forwards, list(stats.accepted_by_depth)]
    return numbers if draws else [*numbers, digest(text.tokens)]


def files(args: Namespace) -> list[Path]:
    return [args.prompts / TASKS[task] for task in args.tasks]


# ---- processes


class Outcome(NamedTuple):
    """A cell's lines, and the time it took, or why there are none."""

    cell: Arm
    lines: list[dict[str, Any]]
    about: str
    failed: bool = False


_bench: list[Bench] = []
"""The one of this process."""


def start(args: Namespace) -> None:
    """Begin a process that runs cells."""
    if args.processes > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    _bench[:] = [Bench(args)]


def run(cell: Arm, tasks: Collection[str], until: float) -> Outcome:
    """Run a cell, if it is not too late."""
    begun = time.time()
    if begun > until:
        return Outcome(cell, [], "too late")
    try:
        lines = _bench[0].lines(cell, tasks)
    except Exception as error:  # the other cells do not depend on this one
        return Outcome(cell, [], f"{error.__class__.__name__}: {error}", failed=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Outcome(cell, lines, f"{time.time() - begun:.1f} s")


def outcomes(args: Namespace, todo: dict[Arm, list[str]]) -> Iterator[Outcome]:
    """Run these tasks of cells in order; each outcome as soon as there is one."""
    until = time.time() + args.seconds
    if args.processes == 1:
        start(args)
        yield from (run(cell, tasks, until) for cell, tasks in todo.items())
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context, start, (args,)) as pool:
        futures = [pool.submit(run, cell, tasks, until) for cell, tasks in todo.items()]
        yield from (future.result() for future in as_completed(futures))


def chosen(args: Namespace) -> list[Arm]:
    heads = {name: path for name in NETWORKS if (path := getattr(args, name))}
    every = arms_of(heads, args.temperatures, args.nodes)
    return [arm for arm in every if not args.only or arm.method in (PLAIN, *args.only)]


def cells(args: Namespace) -> list[Cell]:
    size = {"new_tokens": args.output_tokens, "count": args.count}
    return [{**arm.cell(task), **size} for arm in chosen(args) for task in args.tasks]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    facts: dict[str, Any] = {"dtype": args.weights or args.dtype, "new_tokens": args.output_tokens}
    if args.device != "cpu":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # shapes vary
        facts["gpu"] = torch.cuda.get_device_name()
    yield {"kind": "provenance", **facts, "replayed": args.weights is not None}
    size = {"new_tokens": args.output_tokens, "count": args.count}
    todo = {arm: [task for task in args.tasks if {**arm.cell(task), **size} in cells] for arm in chosen(args)}
    todo, failed = {arm: tasks for arm, tasks in todo.items() if tasks}, 0
    for number, (arm, lines, about, bad) in enumerate(outcomes(args, todo), start=1):
        yield from lines
        failed += bad
        name = f"{arm.method} {arm.size}, {arm.rule}, T={arm.temperature:g}"
        print(f"{number} of {len(todo)}: {name}: {about}", flush=True)
    if failed:
        raise SystemExit(f"{failed} cells failed.")


def of_page(page: str) -> str:
    """A page's methods on the real model: acceptance by nodes."""
    results, lines = _recorded(), []
    for arm in (arm for arm in results.arms() if arm[0] in ARMS_OF_PAGE[page]):
        found = [results.runs((*arm, SHARED, heat)) for heat in results.temperatures]
        if any(found):
            lengths = [length_with_interval(own) if own else "" for own in found]
            lines.append([TITLES[arm[0]], str(results.nodes[arm]), *lengths])
    if not lines:
        return ""
    head = ["on SmolLM2-135M-Instruct", "nodes", *map(temperature_label, results.temperatures)]
    title = "Tokens per forward of the target, 40 prompts of each of six tasks, shared noise ([by task, other rules]"
    return "\n".join([f"{title}(../results.md#a-real-model)):", "", *markdown_table(head, lines)])


@functools.cache
def _recorded() -> Results:
    return Results.of(FILE)


def _commands(inputs: Inputs) -> list[list[str]]:
    """Of the heads for the real model, those that are there."""
    words = ["--model", inputs.smollm2, "--eagle3", inputs.head, "--prompts", inputs.prompts]
    for name, folder in (("eagle1", "eagle1"), ("medusa", "medusa"), ("hydra", "hydra++"), ("blockwise", "blockwise")):
        if (head := inputs.heads / "smollm2" / folder / "head").exists():
            words += [f"--{name}", head]
    return [measured("acceptance", *words, "--weights", "int4")]


EXPERIMENT = Experiment(
    name="acceptance",
    question="acceptance of every method at equal sizes on a real model: results.md",
    options={
        "model": option(str, "folder or hub name", required=True),
        **{name: option(str, "folder or hub name") for name in NETWORKS},
        "prompts": option(Path, "folder of the prompt files", required=True),
        "tasks": option(list(TASKS), choices=list(TASKS)),
        "count": option(40, "prompts of each task"),
        "output_tokens": option(128),
        "temperatures": option([0.0, 0.6, 1.0]),
        "nodes": option(list(DEPTH), "sizes of trees and chains", choices=list(DEPTH)),
        "only": option([], "methods, such as eagle3; others are left out"),
        "device": option("cuda" if torch.cuda.is_available() else "cpu"),
        "dtype": option("float32"),
        "weights": option(str, "of the native engine, such as int4, instead of a dtype"),
        "batch": option(256, "most rows"),
        "gigabytes": option(8.0, "memory of a process, but for weights"),
        "processes": option(1),
    },
    cells=cells,
    measure=measure,
    shown=tables,
    threads=None,
    tables={"docs/results.md": {"acceptance": tables}}
    | {f"docs/methods/{page}.md": {"measured": functools.partial(of_page, page)} for page in ARMS_OF_PAGE},
    rank=0,
    hours=10.0,
    needs=lambda inputs: (inputs.prompts, inputs.head),
    commands=_commands,
)
