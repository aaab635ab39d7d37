"""EAGLE's findings on a model of your own: heads for each question, trained by `foredraft train` and tried in the loop.

    python -m benchmarks ablation --model MODEL --data build/answers --prompts mt_bench.jsonl gsm8k.jsonl

Questions: how acceptance grows with the data, for EAGLE-1, EAGLE-3 and GLIDE (each amount has its own run and
learning-rate schedule; GLIDE's heads also draft CaPE's chains with siblings); EAGLE-1's loss on features and EAGLE-3's
training-time test, with and without each; three layers of the target or the top one. Each head drafts chains of five,
whose acceptance by position is EAGLE-3's n-alpha (arXiv:2503.01840, section 4), and greedy trees of 24 nodes. DATA is
the folder of `foredraft answers`; with `--texts FILE ...` heads learn from texts instead, and sizes are millions of
training tokens. Unfinished trainings resume.
"""

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import foredraft
from benchmarks.experiments import fixed_sizes
from benchmarks.experiments.policy import TITLES
from benchmarks.kit.experiment import PROMPTS, RESULTS, Cell, Experiment, Inputs, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import acceptance_interval, markdown_table, per_forward, quotient, read, with_interval
from benchmarks.kit.seeded_texts import run_texts, tokenized
from foredraft.bench.report import plots
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.policy import Constant
from foredraft.files.provenance import short_commit

FILE = RESULTS / "ablation.jsonl"
SEEDS = (0, 1)
CHAIN, TREE, CAPE = "nodes=5,depth=5,top_k=1", "nodes=24,depth=6,top_k=6", "num_assistant_tokens=5"
SHAPES = ("chain", "tree", "CaPE")
DRAFTERS = {"eagle": "eagle2", "eagle3": "eagle3", "glide": "glide"}


@dataclass(frozen=True, slots=True)
class Head:
    """A head to train. size: millions of answer tokens to learn from; options: of ``foredraft train``."""

    question: str
    method: str
    size: float
    seed: int
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.question}-{self.method}-{self.size:g}M-seed{self.seed}"


def heads(sizes: Sequence[float], middle: float) -> list[Head]:
    """All heads, those of the first seed before the others. ``middle``: the size of all questions but that of size."""
    parts = {
        "ttt": (),
        "no-ttt": ("--recipe", "steps=1"),
        "ttt-features": ("--recipe", "regression=1"),
        "no-ttt-features": ("--recipe", "steps=1", "--recipe", "regression=1"),
        "top-layer": ("--taps", "TOP"),
    }
    found = []
    for seed in SEEDS:
        found += [Head(name, "eagle3", middle, seed, options) for name, options in parts.items()]
        found += [Head("size", method, size, seed) for size in sizes for method in DRAFTERS]
    found = [head for head in found if (head.question, head.method, head.size) != ("size", "eagle3", middle)]
    return sorted(found, key=lambda head: (head.seed, head.size))


def command_of(head: Head, args: Namespace, layers: int) -> list[str]:
    """The training command. A head learns from ``args.passes`` passes over its data."""
    files, tokens, cache = [str(file) for file in args.texts], round(1e6 * head.size), args.work / "cache"
    if not files:
        data = args.work / f"data-{head.size:g}M"
        about = json.loads((data / "about.json").read_text(encoding="utf-8"))
        files, tokens, cache = [str(data / "answers.jsonl")], round(args.passes * about["tokens"]), data / "cache"
    own = {"eagle": [] if args.warm else ["--cold"], "eagle3": ["--vocabulary", "8192"], "glide": []}[head.method]
    options = [str(layers) if word == "TOP" else word for word in head.options]
    settings = {"length": args.length, "batch": args.batch, "lr": args.lr, "seed": head.seed, "validate": 10**9}
    given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words = [
        "foredraft",
        "train",
        head.method,
        "-m",
        args.model,
        *(word for file in files for word in ("--data", file)),
    ]
    words += ["--store", str(args.store), "--cache", str(cache), "--out", str(args.work / head.name)]
    return [*words, "--tokens", str(tokens), *own, *given, *options]


def write_data(source: Path, size: float, folder: Path) -> None:
    """The first answers of each temperature, in turns, up to ``size`` million answer tokens."""
    if (folder / "about.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    files = [path.open(encoding="utf-8") for path in sorted(source.glob("T*.jsonl"))]
    answers = tokens = 0
    with (folder / "answers.jsonl").open("w", encoding="utf-8") as out:
        for lines in zip(*files, strict=False):
            for line in lines:
                if answers < 1e6 * size:
                    sample = json.loads(line)
                    answers += len(sample["ids"]) - sample["prompt_length"]
                    tokens += len(sample["ids"])
                    out.write(line)
    (folder / "about.json").write_text(json.dumps({"answer_tokens": answers, "tokens": tokens}), encoding="utf-8")


class Trainings:
    """Trains heads in processes, several at once; an iteration gives each head when it is ready."""

    def __init__(self, todo: Sequence[Head], args: Namespace, layers: int) -> None:
        self._args, self._layers = args, layers
        self._waiting: queue.SimpleQueue[Head] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Head | None] = queue.SimpleQueue()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        for head in todo:
            self._waiting.put(head)
        for _ in range(args.parallel):
            threading.Thread(target=self._work, daemon=True).start()

    def __iter__(self) -> Iterator[Head]:
        for _ in range(self._args.parallel):
            yield from iter(self._ready.get, None)

    def stop(self) -> None:
        """End the running trainings; each keeps its last whole step."""
        self._stopped = True
        for process in list(self._running):
            process.send_signal(signal.SIGINT)

    def _work(self) -> None:
        while not self._stopped:
            try:
                head = self._waiting.get_nowait()
            except queue.Empty:
                break
            if (self._args.work / head.name / "head").exists():  # tried again, with other prompts or shapes
                self._ready.put(head)
                continue
            words = command_of(head, self._args, self._layers)
            with (self._args.work / f"{head.name}.log").open("ab") as log:
                process = subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=subprocess.STDOUT)
                self._running.add(process)
                failed = process.wait()
                self._running.discard(process)
            if not failed:
                self._ready.put(head)
            elif not self._stopped:
                print(f"{head.name} failed, see {log.name}", file=sys.stderr)
        self._ready.put(None)


def trial(
    target: Any, head: Head, path: Path, prompts: dict[str, list[Any]], tokens: int, tried: Container[str]
) -> dict[str, Any]:
    """Chains, greedy and at temperature 1, and greedy trees, for all prompts at once."""
    rows, found = [(task, prompt) for task, own in prompts.items() for prompt in own], {}
    drafter = f"{DRAFTERS[head.method]}:{path}"
    shapes = [("chain", f"{drafter},{CHAIN}", (0.0, 1.0)), ("tree", f"{drafter},{TREE}", (0.0,))]
    shapes += [("CaPE", f"cape:{path},{CAPE}", (0.0,))] if head.method == "glide" else []
    for shape, spec, temperatures in (each for each in shapes if each[0] in tried):
        with foredraft.load(target, spec, max_batch_size=len(rows)) as generator:
            generator.engine.policy = Constant(generator.engine.drafter.needs.longest)
            for temperature in temperatures:
                params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
                seeds = derive_seeds(1, len(rows))
                sequences = run_texts(generator, [prompt for _, prompt in rows], params, seeds)
                for task in prompts:
                    own = [each for each, (of, _) in zip(sequences, rows, strict=True) if of == task]
                    stats = [each.counters.stats(len(each.prompt), "", True) for each in own]
                    total = sum(stats, foredraft.DecodeStats())
                    found[f"{shape}, T={temperature:g}, {task}"] = {
                        "accepted_by_depth": total.accepted_by_depth,
                        "drafted_by_depth": total.drafted_by_depth,
                        "tokens": [each.tokens for each in stats],
                        "forwards": [each.target_forwards for each in stats],
                    }
    return found


# ---- tables


GLIDE, REAL_GLIDE = RESULTS / "glide.jsonl", RESULTS / "glide_smollm2.jsonl"
METHODS = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "glide": "GLIDE"}
_FEW = 30
"""Judged tokens below which counts are shown, not a share."""


QUESTIONS = {
    "ttt": "training-time test",
    "ttt-features": "training-time test, loss on features",
    "no-ttt": "no training-time test",
    "no-ttt-features": "no training-time test, loss on features",
    "top-layer": "training-time test, top layer alone",
    "size": "",
}
"""Of ablation.py, in words."""
_GREEDY, _SAMPLED = "chain, T=0, ", "chain, T=1, "
_BY_PROMPT = ("tokens", "forwards")


def ablation(path: Path = FILE) -> str:
    """EAGLE's findings: each head's chains by position, and its trees."""
    kinds = read(path)
    origin = kinds["provenance"][0]
    lines = _trials(kinds["head"])
    lines += [
        "",
        f"{origin['target']}, one seed, three passes over the data, draft vocabulary of EAGLE-3 8,192. Tokens per "
        f"forward, {origin['count']} prompts of a task, {origin['new_tokens']} new tokens, with 95 % intervals "
        "over prompts; chains of five, greedy trees of 24 nodes; n-alpha of greedy chains, a fraction where "
        f"fewer than {_FEW} tokens were judged; float32 on an "
        f"{origin['device']}, commit {short_commit(origin['commit'])}, {origin['date']}. "
        "Made by `python -m benchmarks ablation`.",
    ]
    return "\n".join(lines)


def glide(path: Path = GLIDE) -> str:
    """GLIDE's heads beside EAGLE's of as much training, of the real model and of the bundled one."""
    if not path.exists():
        return ""
    kinds = read(path)
    origin = kinds["provenance"][0]
    caption = (
        f"{origin['target']}, one seed, trained on {', '.join(origin['texts'])}. Tokens per forward: greedy chains of "
        f"five on eight held-out texts of these files, 48 new tokens each; no interval. {origin_line(origin)}. Made by "
        "`python -m benchmarks ablation`."
    )
    own = [*_validated(kinds["head"]), "", caption]
    return "\n".join([*([real_glide(), ""] if REAL_GLIDE.exists() else []), *own])


def real_glide(path: Path = REAL_GLIDE, eagle: Path = FILE) -> str:
    """GLIDE's heads beside EAGLE's that learned from the same answers: in training's validation, and on the same
    prompts."""
    kinds, others = read(path), read(eagle)
    origin, other = kinds["provenance"][0], others["provenance"][0]
    sizes = {head["size"] for head in kinds["head"]}
    same = [head for head in others["head"] if head["question"] == "size" and head["size"] in sizes]
    parts = [*_validated([*same, *kinds["head"]]), ""]
    trial = ""
    if all(head["trial"] for head in kinds["head"]):
        count = origin["count"]
        heads = [*kinds["head"], *(_first(head, count) for head in same)]
        parts += [*_trials(heads), "", *_by_others(heads), ""]
        first = "the first " if count < other["count"] else ""
        trial = (
            f" Other tokens per forward: {first}{count} prompts of a task, {origin['new_tokens']} new tokens, with 95 "
            "% intervals over prompts; chains of five"
            f"{', greedy trees of 24 nodes' if 'tree' in _shapes(heads) else ''}; n-alpha of EAGLE over "
            f"{other['count']} prompts of a task.{_cape(kinds['head'][-1])}"
        )
    caption = (
        f"SmolLM2-135M-Instruct, one seed, {origin['passes']:g} passes over the same answers for every head; EAGLE-1 "
        "began from random weights. Held-out texts: greedy chains of five on eight of these answers, 48 new tokens "
        f"each; no interval.{trial} GLIDE: {origin_line(origin)}. EAGLE: "
        f"[EAGLE's findings](../heads.md#eagles-findings-on-a-real-model), on an {other['device']}, commit "
        f"{short_commit(other['commit'])}. Made by `python -m benchmarks ablation`."
    )
    return "\n".join([*parts, caption])


def _data(head: Line) -> str:
    """The answer tokens that a head learned from."""
    return f"{head['size']:g}M"


def _validated(heads: Iterable[Line]) -> list[str]:
    """What training's validation found."""
    rows = []
    for head in heads:
        found = head["validation"]
        hits = " ".join(f"{value:.2f}" for name, value in found.items() if name.startswith("hit_"))
        length = f"{found['acceptance_length']:.2f}"
        rows.append([METHODS[head["method"]], f"{head['tokens'] / 1e6:.2f}M", hits, length])
    titles = ["head", "training tokens", "right guesses, by step", "held-out texts: tokens per forward"]
    return markdown_table(titles, rows, words=[0])


def _by_others(heads: Sequence[Line]) -> list[str]:
    """GLIDE's acceptance length by each other head's of as much data, over the same prompts of all tasks."""
    shapes, rows = _shapes(heads), []
    own = {head["size"]: head for head in heads if head["method"] == "glide"}
    for head in (head for head in heads if head["method"] != "glide"):
        cells = []
        for prefix in shapes.values():
            both = [list(_prompts(each, prefix)) for each in (own[head["size"]], head)]
            pairs = list(zip(*both, strict=True))
            cells.append(with_interval(pairs, quotient(per_forward), 1000))
        rows.append([METHODS[head["method"]], _data(head), *cells])
    return markdown_table(["GLIDE's acceptance length by that of", "data", *shapes], rows)


def _cape(head: Line) -> str:
    """A sentence: the acceptance length of CaPE's chains by those of the same head's other shapes."""
    own, found = list(_prompts(head, "CaPE, T=0, ")), []
    for shape, prefix in (("chains", _GREEDY), ("trees", "tree, T=0, ")):
        if others := list(_prompts(head, prefix)):
            by = with_interval(list(zip(own, others, strict=True)), quotient(per_forward), 1000) if own else ""
            found.append(f"{shape} {by}")
    return f" CaPE's acceptance length by that of the same head's {', '.join(found)}." if own else ""


def _shapes(heads: Iterable[Line]) -> dict[str, str]:
    """The shapes of drafts that were tried with all of these heads, and how the names of their arms begin."""
    tried = [" ".join(head["trial"]) for head in heads]
    shapes = {"chain": _GREEDY, "tree": "tree, T=0, ", "chain at T=1": _SAMPLED}
    return {shape: arm for shape, arm in shapes.items() if all(arm in names for names in tried)}


def _prompts(head: Line, prefix: str) -> Iterator[tuple[int, int]]:
    """Tokens and forwards of each prompt of all tasks."""
    for name, arm in head["trial"].items():
        if name.startswith(prefix):
            yield from zip(arm["tokens"], arm["forwards"], strict=True)


def _first(head: Line, count: int) -> Line:
    """The head's trial on the first prompts of each task; depths stay those of all."""
    cut = {name: {**arm, **{key: arm[key][:count] for key in _BY_PROMPT}} for name, arm in head["trial"].items()}
    return {**head, "trial": cut}


def _trials(heads: Iterable[Line]) -> list[str]:
    """The acceptance lengths of each head's chains and trees by task, and its greedy chains' acceptance by position:
    as a fraction where few tokens were judged."""
    heads = sorted(heads, key=lambda each: (each["question"] != "size", each["method"], each["size"]))
    tasks = [name.removeprefix(_GREEDY) for name in heads[0]["trial"] if name.startswith(_GREEDY)]
    shown = _shapes(heads)
    words = ", ".join(shown)
    titles = ["head", "data", *(f"{TITLES.get(task, task)}: {words}" for task in tasks), "0-alpha to 4-alpha"]
    rows = []
    for head in heads:
        method = METHODS[head["method"]]
        question = QUESTIONS[head["question"]]
        found = {name: acceptance_interval(arm) for name, arm in head["trial"].items()}
        cells = [", ".join(found[f"{arm}{task}"] for arm in shown.values()) for task in tasks]
        alphas = " ".join(
            f"{own / judged:.2f}" if judged >= _FEW else f"{own}/{judged}" for own, judged in _judged(head)
        )
        rows.append([f"{method}{question and ', '}{question}", _data(head), *cells, alphas])
        if f"CaPE, T=0, {tasks[0]}" in found:
            rows.append([f"{method} with CaPE", _data(head), *(found[f"CaPE, T=0, {task}"] for task in tasks), ""])
    return markdown_table(titles, rows, words=[0])


def _chain(head: Line) -> float:
    """Acceptance length of greedy chains over all tasks."""
    return per_forward(_prompts(head, _GREEDY))


def _judged(head: Line) -> list[tuple[int, int]]:
    """By position of a chain: accepted tokens, and those that were judged since all before them were accepted."""
    arms = [arm for name, arm in head["trial"].items() if name.startswith(_GREEDY)]
    reached = [sum(sum(arm["accepted_by_depth"][d : d + 1]) for arm in arms) for d in range(5)]
    drafted = [sum(sum(arm["drafted_by_depth"][d : d + 1]) for arm in arms) for d in range(5)]
    before = [drafted[0], *reached[:4]]
    return [(own, above) for own, above in zip(reached, before, strict=True) if above]


def _alphas(head: Line) -> list[float]:
    """n-alpha: the share of tokens at position n of a chain that is accepted, given that those before are."""
    return [own / above for own, above in _judged(head)]


@plots.styled()
def picture() -> str:
    """EAGLE-3's findings."""
    heads = read(FILE)["head"]
    figure, (alphas, sizes) = plots.canvas(8, 3.4, 2)
    for question, style in (("ttt", "-"), ("ttt-features", "--"), ("no-ttt", "-"), ("no-ttt-features", "--")):
        head = next(each for each in heads if each["question"] == question and each["seed"] == 0)
        color = plots.color(0 if question.startswith("ttt") else 1)
        alphas.plot(_alphas(head), style, color=color, marker="o", markersize=4, label=QUESTIONS[question])
    alphas.set(xlabel="position in the chain, n", ylabel="n-alpha, greedy", ylim=(0, 0.8), xticks=range(5))
    alphas.set_title("Later positions need the training-time test", loc="left")
    for method, label in (("eagle", "EAGLE-1"), ("eagle3", "EAGLE-3")):
        own = [each for each in heads if each["method"] == method and each["question"] in ("size", "ttt")]
        points = sorted((each["size"], _chain(each)) for each in own if each["seed"] == 0)
        sizes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    ticks = sorted({each["size"] for each in heads})
    sizes.set_xscale("log", base=2)
    sizes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    sizes.set(xlabel="answer tokens, millions", ylabel="acceptance length, chain of 5, greedy")
    sizes.set_title("Acceptance against data", loc="left")
    for axes in (alphas, sizes):
        axes.legend(frameon=False, fontsize=8)
    return plots.themed_svg(figure, "Acceptance by position and by data")


# ---- measurement


def cells(args: Namespace) -> list[Cell]:
    if bool(args.texts) == bool(args.data):
        raise SystemExit("Give --data or --texts.")
    return [
        {"kind": "head", "name": head.name}
        for head in heads(args.sizes, args.middle)
        if head.method in args.methods and head.seed in args.seeds and head.question in args.questions
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    for size in args.sizes if args.data else ():
        write_data(args.data, size, args.work / f"data-{size:g}M")
    names = {cell["name"] for cell in cells}
    todo = [head for head in heads(args.sizes, args.middle) if head.name in names]
    rows = {"max_batch_size": len(args.prompts) * args.count, "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    with foredraft.load(args.model, "none", dtype="float32", **rows) as target:
        yield {"kind": "provenance", "target_device": str(target.engine.target.device)}
        prompts = tokenized(target, args.prompts, args.count)
        layers = target.engine.target.layers
        trainings = Trainings(todo, args, layers)
        timer = threading.Timer(min(max(0.0, args.until - time.monotonic()), threading.TIMEOUT_MAX), trainings.stop)
        timer.start()
        try:
            for head in trainings:
                folder = args.work / head.name
                *_, last, validation = map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
                given = (target, head, folder / "head", prompts, args.new_tokens, args.shapes)
                yield {
                    "kind": "head",
                    **{name: getattr(head, name) for name in ("name", "question", "method", "size", "seed")},
                    "command": " ".join(command_of(head, args, layers)),
                    "tokens": validation["tokens"],
                    "seconds": last.get("seconds"),
                    "validation": validation["validation"],
                    "trial": trial(*given) if args.new_tokens else {},
                }
        finally:
            timer.cancel()
            trainings.stop()


def _ablation(inputs: Inputs) -> list[list[str]]:
    words = ["--model", inputs.smollm2, "--data", inputs.state / "answers"]
    return [inputs.answers(), measured("ablation", *words, "--prompts", *inputs.questions("mt_bench", "gsm8k"))]


def _glide(inputs: Inputs) -> list[list[str]]:
    """Heads of the bundled model, each on as many tokens of the same texts; and a head of the real one, on the answers
    that the smallest heads of ``ablation`` learned from."""
    texts = [inputs.corpus / f"{name}.jsonl.xz" for name in ("gsm8k_train", "mbpp_train", "the_algorithms_python")]
    size = ["--questions", "size", "--seeds", "0", "--work", inputs.state / "glide"]
    bundled = ["--sizes", "0.3", "--warm", "--batch", "4", "--new-tokens", "0", "--methods", "eagle", "glide"]
    bundled += ["--prompts", *inputs.questions("humaneval", "gsm8k"), "--out", GLIDE]
    real = ["--sizes", "0.25", "--count", "16", "--store", "2", "--methods", "glide"]
    real += ["--prompts", *inputs.questions("mt_bench", "gsm8k"), "--out", REAL_GLIDE]
    head = inputs.state / "glide" / "size-glide-0.25M-seed0" / "head"
    arms = {f"glide chain of {n}": f"glide:{head},nodes={n},depth={n},top_k=1" for n in (2, 4)}
    arms |= {"glide tree of 8": f"glide:{head},nodes=8,depth=4,top_k=4"}
    arms |= {"cape 4 tokens": f"cape:{head},num_assistant_tokens=4"}
    return [
        measured("ablation", "--model", "sample", "--texts", *texts, *size, *bundled),
        inputs.answers(),
        measured("ablation", "--model", inputs.smollm2, "--data", inputs.state / "answers", *size, *real),
        fixed_sizes.command_of("glide", inputs.smollm2, inputs, arms, "--dtype", "float32", count=1),
    ]


EXPERIMENT = Experiment(
    name="ablation",
    question="EAGLE's findings on a real model, with training (minutes on a GPU): heads.md",
    options={
        "model": option(str, "folder or hub name", required=True),
        "data": option(Path, "folder of foredraft answers"),
        "texts": option([], "in its place: data of foredraft train", type=Path),
        "questions": option(list(QUESTIONS), "ask these alone", choices=list(QUESTIONS)),
        "methods": option(list(DRAFTERS), "train these alone", choices=list(DRAFTERS)),
        "warm": option(False, "EAGLE-1 starts from the target's last layer"),
        "prompts": PROMPTS,
        "count": option(80, "prompts of each file"),
        "new_tokens": option(64, "0: no trial, only what training has validated"),
        "shapes": option(SHAPES, "of drafts, in the trial", choices=SHAPES),
        "sizes": option([0.25, 0.5, 1.0, 2.0, 4.0], "millions of answer tokens"),
        "seeds": option(SEEDS),
        "middle": option(1.0, "of these, the one of the other questions"),
        "passes": option(3.0),
        "length": option(512),
        "batch": option(16),
        "lr": option(1e-3),
        "store": option(0.0, "gigabytes, for each size"),
        "parallel": option(1, "trainings at once"),
        "kv_cache_memory_bytes": option(int, "of the target that tries the heads"),
        "work": option(Path("build/ablation")),
    },
    cells=cells,
    measure=measure,
    facts=lambda args: {
        "target": Path(args.model).name,
        "texts": [file.name for file in args.texts],
        **{name: getattr(args, name) for name in ("count", "new_tokens", "parallel", "passes")},
    },
    threads=None,
    tables={"docs/heads.md": {"ablation": ablation}},
    figures={"ablation": picture},
    hours=60.0,
    needs=lambda i: (Path(i.smollm2), i.prompts),
    commands=_ablation,
)
GLIDE_HEADS = Experiment(
    name="glide",
    question="GLIDE after as much training as EAGLE's heads: methods/glide.md",
    tables={"docs/methods/glide.md": {"measured": glide}},
    hours=15.0,
    needs=lambda i: (Path(i.smollm2), i.corpus, i.prompts),
    commands=_glide,
    results=("glide.jsonl", "glide_smollm2.jsonl", "glide_speed.jsonl"),
)
