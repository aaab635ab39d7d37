"""The throughput policy beside every fixed size: tokens a second on the same prompts, step by step.

A cell is a target, a method, a temperature and a file of prompts. Its arms are plain decoding, every size that the
policy can choose, and the policy, each with an engine of its own on one target. The arm that has generated the fewest
tokens runs the next step, so all arms are at the same place of the same prompt, and a machine that becomes slow for a
moment is slow for all of them. Each arm continues every prompt by as many tokens; a size that is 12 % behind the best
one after 512 tokens ends there. One request before them is not counted: in it the policy tries its sizes, and methods
such as sequoia measure.

    python -m benchmarks policy --target ../shared/models/target-65m -d draft_model:../shared/models/draft-6m \\
        -d "hydra++=hydra:HEAD" --prompts ../shared/data/prompts/eagle/gsm8k/question.jsonl
"""

import functools
import hashlib
import json
import statistics
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import foredraft
from benchmarks.kit.experiment import (
    PROMPTS,
    RESULTS,
    ROOT,
    Cell,
    Experiment,
    Inputs,
    Line,
    measured,
    option,
    repeated,
)
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table
from foredraft.bench.measure.arms import ArmSpec
from foredraft.bench.measure.summary import grouped, temperature_label
from foredraft.bench.prompts import read_prompts
from foredraft.compose.arguments import AnyDrafter
from foredraft.core.drafter import Background
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator, Prompt
from foredraft.engine.policy import Constant, Policy, Throughput
from foredraft.engine.request import Sequence as Request
from foredraft.files.provenance import short_commit

FILE = RESULTS / "policy.jsonl"
POLICY, PLAIN = "policy", "0"
TITLES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt_bench": "MT-bench"}
IN_SHORT = ("eagle3", "eagle1", "draft_model", "medusa", "prompt_lookup")
"""The methods of the verdict's first line."""
PAGES = {"hydra++": "hydra", "pruned": "pruned_drafts"}
"""Pages of methods that share one with another, or have another name."""

SHARED_NOISE = "2026-11-24"
"""The first day on which drafts were ranked with the noise of the target's draw."""
NO_EVIDENCE = ("partial", "triforce")
"""Their prompts here fit into the budget, so drafts read the whole cache."""


class BenchArm(NamedTuple):
    """All runs of an arm: tokens a second, tokens per forward of the target, and tokens.

    ``halves``: tokens a second on the prompts with even numbers, and on the others.
    """

    rate: float
    length: float
    tokens: int
    halves: tuple[float, float]


class Found(NamedTuple):
    """One target, method, temperature and task.

    ``arms`` by size, with plain decoding and the policy, without those that ended early because they were far behind:
    they had fewer prompts. ``origin``: the provenance. ``agreeing``: prompts on which all arms gave the same greedy
    output, and prompts compared.
    """

    target: str
    method: str
    temperature: float
    task: str
    arms: dict[str, BenchArm]
    origin: dict[str, Any]
    agreeing: tuple[int, int]

    @property
    def best(self) -> str:
        """The fastest fixed size in hindsight, plain decoding included."""
        return max((arm for arm in self.arms if arm != POLICY), key=lambda arm: self.arms[arm].rate)

    @property
    def best_draft(self) -> str | None:
        """The fastest fixed size that drafts; None if the drafter chooses its sizes itself."""
        sizes = [arm for arm in self.arms if arm not in (POLICY, PLAIN)]
        return max(sizes, key=lambda arm: self.arms[arm].rate, default=None)

    @property
    def ahead(self) -> float:
        """Speed of the policy over the fixed size that was the best on the other half of the prompts.

        The best size in hindsight is the luckiest of many that are about as good; this one could be known before.
        """
        arms = {arm: found for arm, found in self.arms.items() if arm != POLICY}
        chosen = [max(arms.values(), key=lambda arm, other=1 - half: arm.halves[other]).halves[half] for half in (0, 1)]
        return sum(mine / best for mine, best in zip(self.arms[POLICY].halves, chosen, strict=True)) / 2

    @property
    def ratio(self) -> float:
        """Speed of the policy over the best fixed size, plain decoding included."""
        return self.arms[POLICY].rate / self.arms[self.best].rate

    def speed_up(self, arm: str) -> float:
        return self.arms[arm].rate / self.arms[PLAIN].rate

    @classmethod
    def of(cls, line: dict[str, Any], origin: dict[str, Any]) -> "Found":
        """A cell from its line of the file and the provenance before it."""
        runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for run in line["runs"]:
            runs[run["arm"]].append(run)
        arms = {arm: _summed(own) for arm, own in runs.items() if len(own) == len(runs[POLICY])}
        outputs: dict[int, set[str]] = defaultdict(set)
        for run in line["runs"]:
            if "digest" in run:
                outputs[run["prompt"]].add(run["digest"])
        agreeing = sum(len(some) == 1 for some in outputs.values()), len(outputs)
        names = (line[key] for key in ("target", "method", "temperature", "prompts"))
        return cls(*names, arms, origin, agreeing)


def rate(runs: Sequence[dict[str, Any]]) -> float:
    """All tokens over all seconds."""
    return sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)


def _summed(runs: Sequence[dict[str, Any]]) -> BenchArm:
    """All tokens over all seconds and forwards."""
    tokens, forwards = (sum(run[name] for run in runs) for name in ("tokens", "forwards"))
    even, odd = ([run for run in runs if run["prompt"] % 2 == half] for half in (0, 1))
    return BenchArm(rate(runs), tokens / forwards, tokens, (rate(even), rate(odd)))


@functools.cache
def read(path: Path = FILE) -> list[Found]:
    """The finished cells of a file."""
    cells: list[Found] = []
    origin: dict[str, Any] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] == "cell":
            cells.append(Found.of(line, origin))
        else:
            origin = line
    return cells


def origin_of(cells: Sequence[Found]) -> dict[str, Any]:
    """The provenance of these cells: the latest one's, with all machines; ``commits`` says that others may differ."""
    latest = max((cell.origin for cell in cells), key=lambda origin: origin["date"])
    devices = sorted({cell.origin["device"] for cell in cells})
    several = {"commits": "commits in docs/results.md"} if len({cell.origin["commit"] for cell in cells}) > 1 else {}
    return {**latest, "device": " and ".join(devices), **several}


def by_cell(cells: Sequence[Found]) -> str:
    """A row per cell: the best fixed size that drafts, the policy, and the policy against the best size of all."""
    head = ["target", "method", "T", "task", "best fixed size", "at that size", "under the policy", "policy / best"]
    head += ["chosen ahead", "commit"]
    lines = []
    for cell in cells:
        task, size = TITLES.get(cell.task, cell.task), cell.best_draft
        best = f"{cell.ratio:.2f}" + (" (plain)" if cell.best == PLAIN else "")
        fixed, against = ["", ""], ["", ""]
        if size is not None:
            fixed, against = [size, _shown(cell, size)], [best, f"{cell.ahead:.2f}"]
        setting = [cell.target, cell.method, f"{cell.temperature:g}", task]
        lines.append([*setting, *fixed, _shown(cell, POLICY), *against, short_commit(cell.origin["commit"])])
    return "\n".join(markdown_table(head, lines, words=(0, 1, 3, 9)))


def verdict(cells: Sequence[Found]) -> str:
    """How often the policy is close to the best fixed size, and to plain decoding."""
    few = [cell for cell in cells if cell.method in IN_SHORT]
    same, of = (sum(cell.agreeing[part] for cell in cells) for part in (0, 1))
    return "\n".join(
        [
            f"- {_near(few)}, for {', '.join(IN_SHORT)}. By target: {_by_target(few)}.",
            f"- {_near([cell for cell in cells if cell.best_draft is not None])}, for all methods with fixed sizes.",
            f"- Cells of all methods below 0.95 of plain decoding under the policy: {_below_plain(cells) or 'none'}.",
            "- The best size in hindsight is also the luckiest of about ten. Chosen ahead is the size that was the "
            f"best on the other half of the prompts. {_luck(cells)}",
            f"- Greedy: all arms of a cell gave the same tokens on {same} of the {of} prompts that were compared.",
            f"- The policy and the best size have at least {_tokens(few)} tokens each in the first line and "
            f"{_tokens(cells)} in the second.",
        ]
    )


def _near(cells: Sequence[Found]) -> str:
    """How many of the cells are near the best fixed size, the one chosen ahead, and plain decoding; and the means."""
    ratios, ahead = [cell.ratio for cell in cells], [cell.ahead for cell in cells]
    near, fair, safe = (
        sum(ratio >= 0.95 for ratio in some) for some in (ratios, ahead, [cell.speed_up(POLICY) for cell in cells])
    )
    return (
        f"The policy reaches 0.95 of the best fixed size (plain decoding included) in {near} of {len(cells)} cells, "
        f"0.95 of the size chosen ahead in {fair}, and 0.95 of plain decoding in {safe}; its mean is "
        f"{statistics.mean(ratios):.2f} of the first and {statistics.mean(ahead):.2f} of the second"
    )


def _by_target(cells: Sequence[Found]) -> str:
    """How many of each target's cells are near the best fixed size."""
    targets = {target: [cell.ratio for cell in cells if cell.target == target] for target in {c.target for c in cells}}
    near = (f"{name} {sum(ratio >= 0.95 for ratio in own)} of {len(own)}" for name, own in sorted(targets.items()))
    return ", ".join(near)


def _below_plain(cells: Sequence[Found]) -> str:
    """The names of the cells where the policy is slower than plain decoding by more than five in a hundred."""
    low = sorted((cell.speed_up(POLICY), cell) for cell in cells if cell.speed_up(POLICY) < 0.95)
    return ", ".join(
        f"{cell.method} on {cell.target}, {TITLES.get(cell.task, cell.task)}, T={cell.temperature:g} ({speed:.2f})"
        for speed, cell in low
    )


def _luck(cells: Sequence[Found]) -> str:
    """How much chance there is in cells whose arms sample texts of their own."""
    spreads = []
    for cell in cells:
        if cell.method == "draft_model" and cell.temperature:
            lengths = [arm.length for name, arm in cell.arms.items() if name not in (POLICY, "0", "1", "2")]
            if len(lengths) > 1:
                spreads.append(100 * statistics.stdev(lengths) / statistics.mean(lengths))
    return (
        f"At T=1 the arms of draft_model sample texts of their own, and with these the tokens per forward of its sizes "
        f"from 3 on, which hardly differ otherwise, have a standard deviation of {min(spreads):.0f} to "
        f"{max(spreads):.0f} %. "
        if spreads
        else ""
    )


def _tokens(cells: Sequence[Found]) -> str:
    """The fewest tokens of the policy, or of the best size."""
    least = min(cell.arms[arm].tokens for cell in cells for arm in (POLICY, cell.best))
    return f"{least // 100 * 100:,}"


def by_method(cells: Sequence[Found]) -> str:
    """A row per method: means over tasks at the best fixed size of each task, and under the policy."""
    settings = list(dict.fromkeys((cell.target, cell.temperature) for cell in cells))
    names = [f"{target}, {temperature_label(heat)}" for target, heat in settings]
    head = [column for name in names for column in (f"{name}: best size", "policy")]
    lines = []
    for method in dict.fromkeys(cell.method for cell in cells):
        columns = []
        for target, heat in settings:
            own = [c for c in cells if (c.target, c.method, c.temperature) == (target, method, heat)]
            columns += _both(own)
        lines.append([method, *columns])
    return "\n".join(markdown_table(["method", *head], lines))


def of_page(page: str) -> str:
    """What was measured for the methods of a page, a row each, and how old it is; empty without a cell."""
    lines = []
    cells = [cell for cell in read() if cell.method not in NO_EVIDENCE and PAGES.get(cell.method, cell.method) == page]
    for method, target, heat in dict.fromkeys((cell.method, cell.target, cell.temperature) for cell in cells):
        own = [c for c in cells if (c.method, c.target, c.temperature) == (method, target, heat)]
        lines.append([method, target, temperature_label(heat), *_both(own)])
    if not lines:
        return ""
    head = ["drafter", "target", "temperature", "best fixed size", "policy"]
    title = "Speed-up over plain decoding / tokens per forward of the target, means over [tasks](../results.md):"
    return "\n".join([title, "", *markdown_table(head, lines, words=(0, 1, 2)), "", _age(cells)])


def _age(cells: Sequence[Found]) -> str:
    """Where these cells are from, and which of them are older than shared noise."""
    rows: dict[str, bool] = {}  # whether a row has a cell that old
    for cell in cells:
        name = f"{cell.method} on {cell.target}, {temperature_label(cell.temperature)}"
        rows[name] = rows.get(name, False) or cell.origin["date"] < SHARED_NOISE
    commits = ", ".join(dict.fromkeys(short_commit(cell.origin["commit"]) for cell in cells))
    origin = {**origin_of(cells), "commits": f"commit{'s' if ',' in commits else ''} {commits}"}
    newer = "; ".join(name for name, old in rows.items() if not old)
    return (
        "**Older than [shared noise](shared_noise.md) and the present [policy](../schedules.md)**, and not measured "
        f"again{f' (with shared noise: {newer})' if newer else ''}. {origin_line(origin)}."
    )


def _shown(cell: Found, arm: str) -> str:
    return f"{cell.speed_up(arm):.2f} / {cell.arms[arm].length:.2f}"


def _both(cells: Sequence[Found]) -> list[str]:
    """Means at the best fixed size of each cell, and under the policy."""
    fixed = [(cell, cell.best_draft) for cell in cells if cell.best_draft is not None]
    return [_mean(fixed), _mean([(cell, POLICY) for cell in cells])]


def _mean(chosen: Sequence[tuple[Found, str]]) -> str:
    if not chosen:
        return ""
    speeds = [cell.speed_up(arm) for cell, arm in chosen]
    lengths = [cell.arms[arm].length for cell, arm in chosen]
    return f"{sum(speeds) / len(speeds):.2f} / {sum(lengths) / len(lengths):.2f}"


# ---- measurement

DRAFTERS = ("eagle3", "eagle1", "draft_model", "medusa", "prompt_lookup")
LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)
NODES = (1, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Fixed sizes, up to the drafter's maximum: lengths of chains, node counts of scored trees. With the root added, most
equal a node count of CPU forwards."""
TRIED, BEHIND = 512, 0.12
"""After so many tokens a size ends that is behind the best size by this share; so one size that drafts is left."""


class Arm:
    """Plain decoding, a fixed size or the policy, with the engine that runs it.

    ``tokens``: of the cell. ``results``: of its finished prompts.
    """

    def __init__(self, name: str, generator: Generator) -> None:
        self.name = name
        self.generator = generator
        self.fixed = name not in (PLAIN, POLICY)
        self.tokens = 0
        self.results: list[dict[str, Any]] = []
        self._sequence: Request | None = None

    def start(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Begin a cell, after a request that is not counted."""
        self.tokens, self.results = 0, []
        self.generator.engine.run(self.generator.submit(prompts[:1], params))

    def step(self, prompts: Sequence[Prompt], params: SamplingParams) -> bool:
        """Run a step; True if a prompt ended with it."""
        engine, number = self.generator.engine, len(self.results)
        if self._sequence is None:
            prompt, own = prompts[number % len(prompts)], replace(params, seed=number)
            (self._sequence,) = self.generator.submit([prompt], own)
        sequence, before = self._sequence, len(self._sequence.tokens)
        engine.step()
        if isinstance(engine.drafter, Background):
            engine.drafter.wait()  # or its thread slows the next arm
        self.tokens += len(sequence.tokens) - before
        if sequence.finished:
            self._sequence, stats = None, sequence.stats
            result = {
                "arm": self.name,
                "prompt": number,
                "tokens": stats.tokens,
                "forwards": stats.target_forwards,
                "seconds": stats.seconds - stats.prefill_seconds,
            }
            self.results.append(result if params.temperature else {**result, "digest": _digest(sequence.tokens)})
        return sequence.finished


def arms_of(plain: Generator, spec: AnyDrafter) -> list[Arm]:
    """Plain decoding, the policy that the drafter's options ask for, and every size of it that is not 0. A drafter that
    chooses its sizes itself, such as bandit, has one arm beside plain decoding."""
    chosen = foredraft.load(plain, spec)
    arms = [Arm(PLAIN, plain), Arm(POLICY, chosen)]
    policy, needs = chosen.engine.policy, chosen.engine.drafter.needs
    if not isinstance(policy, Throughput):
        return arms
    fixed: dict[str, Policy] = {}
    most = needs.max_nodes if needs.scored else needs.longest
    for size in sorted({most, *(size for size in (NODES if needs.scored else LENGTHS) if size < most)}):
        length = needs.longest if needs.scored else size
        fixed[str(size)] = Constant(length, nodes=size if needs.scored else 0)
    return arms + [Arm(name, foredraft.load(plain, spec, policy=each)) for name, each in fixed.items()]


def run_cell(
    arms: Sequence[Arm], prompts: Sequence[Prompt], temperature: float, tokens: int, new_tokens: int
) -> Iterator[dict[str, Any]]:
    """The results of a cell, in the order in which they were measured."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, eos_token_id=(), top_p=None)
    for arm in arms:
        arm.start(prompts, params)
    whole = -(-tokens // new_tokens) * new_tokens  # with eos_token_id=() all outputs are this long
    racing = list(arms)
    while (arm := min(racing, key=lambda arm: arm.tokens)).tokens < whole:
        if not arm.step(prompts, params):
            continue
        yield arm.results[-1]
        rates = {each: rate(each.results) for each in racing if each.fixed and each.tokens >= TRIED}
        if arm in rates and rates[arm] < (1 - BEHIND) * max(rates.values()):
            racing.remove(arm)


def summary(cell: Found) -> str:
    """All tokens over all seconds: the policy against the best fixed size in hindsight, 0 included, and against 0."""
    sizes = " ".join(f"{arm}:{cell.speed_up(arm):.2f}" for arm in cell.arms if arm != POLICY)
    return (
        f"policy/best {cell.ratio:.3f} (size {cell.best}), policy/plain {cell.speed_up(POLICY):.3f}, "
        f"{cell.arms[POLICY].length:.2f} tokens a forward; {sizes}"
    )


def _digest(tokens: Sequence[int]) -> str:
    """A short name of an output, by which the arms' greedy outputs are compared."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def cells(args: Namespace) -> list[Cell]:
    if not args.prompts or args.tokens <= args.new_tokens:
        raise SystemExit(
            "Give files: --prompts; and --tokens more than --new-tokens, since halves of them are compared."
        )
    return [
        {"kind": "cell", "target": Path(args.target).name, "method": drafter.name, "temperature": heat, "prompts": task}
        for drafter in args.drafter or map(ArmSpec.parse, DRAFTERS)
        for heat in args.temperatures
        for task in (file.parent.name for file in args.prompts)
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    drafters = {each.name: each for each in args.drafter or map(ArmSpec.parse, DRAFTERS)}
    files = {file.parent.name: file for file in args.prompts}
    plain = foredraft.load(args.target, "none")
    for (method, heat), own in grouped(cells, lambda cell: (cell["method"], cell["temperature"])).items():
        arms = arms_of(plain, drafters[method].spec)  # of all files: the policy keeps what it has learned
        for cell in own:
            prompts = [ask.prompt for ask in read_prompts(files[cell["prompts"]])][: args.count]
            line = {**cell, "runs": list(run_cell(arms, prompts, heat, args.tokens, args.new_tokens))}
            print(summary(Found.of(line, {})), flush=True)
            yield line
        for arm in arms[1:]:
            arm.generator.close()


def tables() -> str:
    """Every cell."""
    found = read()
    origin = origin_of(found)
    parts = [by_method(found), verdict(found), by_cell(found)]
    made = f"{origin_line(origin)}. Made by `{origin['command']}`. Every run is in `benchmarks/results/policy.jsonl`."
    return "\n\n".join([*parts, made])


def _commands(inputs: Inputs) -> list[list[str]]:
    """Every method at every fixed size and under the policy, for both targets."""
    files = ["--threads", "1", "--prompts", *inputs.questions()]
    heads, small, own = inputs.heads, "sample-draft", inputs.heads / "target-65m"
    named = [f"draft_model:{inputs.models / 'draft-6m'}", "prompt_lookup", f"eagle3:{own / 'eagle3' / 'head'}"]
    named += [f"eagle1:{own / 'eagle' / 'head'}", f"medusa:{own / 'medusa' / 'head'}"]
    others = ["eagle2", f"hydra:{heads / 'hydra' / 'head'}", f"hydra++=hydra:{heads / 'hydra++' / 'head'}"]
    others += ["blockwise:sample-medusa", "max_gram", "lookahead", f"cape:{small}", f"opt_tree:{small}"]
    others += [f"sequoia:{small}", f"specinfer:{small}", f"pruned=draft_model:{heads / 'pruned' / 'draft'}"]
    others += [f"universal:{inputs.models / 'draft-6m'}", f"online=online:[draft_model:{small}]"]
    others += [f"relay=relay:[draft_model:{small},num_assistant_tokens=3]+max_gram"]
    others += [f"cascade=cascade:{small}+max_gram", "early_exit=early_exit,assistant_early_exit=6"]
    others += [f"layer_skip=layer_skip:{heads / 'skips.json'}", "partial", f"triforce:{small}"]
    others += [f"bandit=bandit:prompt_lookup+[draft_model:{small}]"]
    target = ["--target", inputs.models / "target-65m", "--tokens", "1500"]
    return [
        measured("policy", *files, "--tokens", "1500"),
        measured("policy", *files, *target, *repeated("-d", named)),
        measured("policy", *files, "--tokens", "500", *repeated("-d", others)),
    ]


_PAGES = [
    path.stem
    for path in sorted((ROOT / "docs" / "methods").glob("*.md"))
    if f"<!-- measured {path.stem} -->" in path.read_text(encoding="utf-8")
]
EXPERIMENT = Experiment(
    name="policy",
    question="every method at its best size and under the policy: README, results.md, methods",
    options={
        "target": option("sample"),
        "prompts": PROMPTS,
        "drafter": option(
            None,
            "SPEC, or NAME=SPEC as in foredraft bench; repeatable",
            type=ArmSpec.parse,
            action="append",
            flags=("-d",),
        ),
        "temperatures": option([0.0, 1.0]),
        "count": option(40, "prompts of each file"),
        "tokens": option(2000, "of each arm and cell, at least"),
        "new_tokens": option(128),
    },
    cells=cells,
    measure=measure,
    facts=lambda args: {"target": Path(args.target).name, "tokens": args.tokens, "new_tokens": args.new_tokens},
    threads=None,
    tables={"docs/results.md": {"policy": tables}}
    | {f"docs/methods/{page}.md": {"measured": functools.partial(of_page, page)} for page in _PAGES},
    rank=2,
    hours=8.0,
    needs=lambda inputs: (inputs.models, inputs.prompts, inputs.heads),
    commands=_commands,
)
