"""EAGLE's findings on a model of your own: heads for each question, trained by `foredraft train` and tried in the loop.

    python benchmarks/ablation.py --model MODEL --data build/answers --prompts mt_bench.jsonl gsm8k.jsonl

Questions: how acceptance grows with the data, for EAGLE-1, EAGLE-3 and GLIDE (each amount has its own run and
learning-rate schedule; GLIDE's heads also draft CaPE's chains with siblings); EAGLE-1's loss on features and EAGLE-3's
training-time test, with and without each; three layers of the target or the top one. Each head drafts chains of five,
whose acceptance by position is EAGLE-3's n-alpha (arXiv:2503.01840, section 4), and greedy trees of 24 nodes. DATA is
the folder of `foredraft answers`; with `--texts FILE ...` heads learn from texts instead, and sizes are millions of
training tokens. A repeated command continues where it was: finished heads are kept in the results, unfinished trainings
resume.
"""

import argparse
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from origin import provenance
from seeded_texts import run_texts, tokenized

import foredraft
from foredraft.core.rng import derive_seeds
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.policy import Constant

RESULTS = Path(__file__).resolve().parent / "results" / "ablation.jsonl"
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


def command(head: Head, args: argparse.Namespace, layers: int) -> list[str]:
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

    def __init__(self, todo: Sequence[Head], args: argparse.Namespace, layers: int) -> None:
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
            words = command(head, self._args, self._layers)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--data", type=Path, help="folder of foredraft answers")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="in its place: data of foredraft train")
    parser.add_argument("--questions", nargs="+", help="ask these alone: size, ttt, ...")
    parser.add_argument("--methods", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), help="train these alone")
    parser.add_argument("--warm", action="store_true", help="EAGLE-1 starts from the target's last layer")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=80, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=64, help="0: no trial, only what training has validated")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES, help="of drafts, in the trial")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4], help="millions of answer tokens"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--middle", type=float, default=1, help="of these, the one of the other questions")
    parser.add_argument("--passes", type=float, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--store", type=float, default=0, help="gigabytes, for each size")
    parser.add_argument("--parallel", type=int, default=1, help="trainings at once")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="of the target that tries the heads")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then stop, as after Ctrl-C")
    parser.add_argument("--work", type=Path, default=Path("build/ablation"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    begin = time.monotonic()
    if bool(args.texts) == bool(args.data):
        parser.error("give --data or --texts")
    for size in args.sizes if args.data else ():
        write_data(args.data, size, args.work / f"data-{size:g}M")
    done = set()
    if args.out.exists():
        done = {json.loads(line).get("name") for line in args.out.read_text(encoding="utf-8").splitlines()}
    chosen = [
        head
        for head in heads(args.sizes, args.middle)
        if head.method in args.methods and head.question in (args.questions or [head.question])
    ]
    todo = [head for head in chosen if head.name not in done and head.seed in args.seeds]
    rows = {"max_batch_size": len(args.prompts) * args.count, "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    with foredraft.load(args.model, "none", dtype="float32", **rows) as target:
        prompts = tokenized(target, args.prompts, args.count)
        layers = target.engine.target.layers
        trainings = Trainings(todo, args, layers)
        timer = threading.Timer(max(0.0, args.seconds - (time.monotonic() - begin)), trainings.stop)
        if args.seconds < float("inf"):
            timer.start()
        try:
            for head in trainings:
                folder = args.work / head.name
                *_, last, validation = map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
                row = {
                    "kind": "head",
                    **{name: getattr(head, name) for name in ("name", "question", "method", "size", "seed")},
                    "command": " ".join(command(head, args, layers)),
                    "tokens": validation["tokens"],
                    "seconds": last.get("seconds"),
                    "validation": validation["validation"],
                    "trial": trial(target, head, folder / "head", prompts, args.new_tokens, args.shapes)
                    if args.new_tokens
                    else {},
                }
                header = ""
                if not args.out.exists():  # before it is opened: a new file is a change of the tree
                    facts = {"target": Path(args.model).name, "count": args.count, "new_tokens": args.new_tokens}
                    facts |= {"target_device": str(target.engine.target.device), "parallel": args.parallel}
                    facts |= {"passes": args.passes, "texts": [file.name for file in args.texts]}
                    header = json.dumps(provenance("python " + " ".join(sys.argv), **facts)) + "\n"
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(header)
                    out.write(json.dumps(row) + "\n")
                print(head.name, flush=True)
        finally:
            timer.cancel()
            trainings.stop()


if __name__ == "__main__":
    main()
