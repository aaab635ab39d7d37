"""CPU engines against each other on one real model: foredraft, transformers, llama.cpp and OpenVINO GenAI.

Every arm is a process of its own (`peers/`), so that each peer has its own interpreter, and all run in one turn: every
prompt runs on every arm before the next prompt, in rotating order, so that machine drift affects all arms alike. All
get the same token ids and generate exactly ``--tokens`` tokens greedily, beyond any end of sequence. Processes are
pinned to as many processors as they have threads. An arm is named "ENGINE WEIGHTS MODE", where "default" is what
``foredraft.load`` gives without a drafter's name; ``--only`` and ``--skip`` take patterns of "NAME @THREADS", and arms
of ``--few`` run on the first chat of each task alone. What is not installed or not there is skipped with one line. What
is in the results file is not run again. ``--wait`` reads a line of standard input before it starts a process or a
prompt, so that other programs can be stopped for so long.

Tokens per second exclude the first token; prefill is the prompt's tokens over the time to the first token. Memory is
the peak of resident memory, mapped files included. Perplexity and KL are those of each prompt's first ``--scored``
tokens without the beginning that all prompts share, KL against transformers in float32; OpenVINO GenAI returns no
logits. KV caches are the peers' defaults: float16 in llama.cpp, 8 bits in OpenVINO, which also rounds activations
unless it runs with ACCURACY.

``--shape 1b 3b`` compares the engines that read GGUF files on Llama models of these sizes with random weights in Q4_0,
which it writes itself, with the vocabulary of ``--model``.

    npm install --prefix PEERS node-llama-cpp
    python -m venv PEERS/ov && PEERS/ov/bin/pip install openvino-genai
    python benchmarks/engines.py --model FOLDER --gguf A.Q4_0.gguf A.Q4_1.gguf A.Q8_0.gguf --node PEERS/node_modules \\
        --openvino PEERS/ov/bin/python --assistant DRAFT
"""

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
import transformers
from edits import EDITS
from engine_tables import PLAIN, place, tables, users
from jaxtyping import Float
from origin import provenance
from reading import read
from torch import Tensor
from write_gguf import SHAPES, write_random

import foredraft
from foredraft.bench.prompts import read_prompts
from foredraft.core.divergence import kl

PEERS = Path(__file__).parent / "peers"
REFERENCE = f"transformers float32 {PLAIN}"
RESULTS = Path("benchmarks/results/engines.jsonl")
SHAPE_RESULTS = Path("benchmarks/results/engines_shapes.jsonl")
WARM_UP = list(range(1000, 1064))
FILES = ("sum", "mt_bench", "humaneval", "gsm8k", "qa")
BUILT_IN = {
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples.",
    "maths": "Tom has 12 apples. He eats 3 and buys 5 more, then gives half of them away. How many are left, and why?",
    "write": "Write a short letter to a neighbour who looks after your cat while you are away.",
    "explain": "Explain to a child why the sky is blue.",
    "list": "What are the three most important things to know about batteries?",
}


@dataclass(frozen=True)
class Arm:
    """A worker's name, its command and the options that it gets as JSON."""

    name: str
    command: list[str]
    options: dict[str, Any]


def arms_of(args: argparse.Namespace, threads: int) -> list[Arm]:
    """All arms that are installed and that the patterns leave."""
    found = [*_torch_arms(args), *_llama_arms(args), *_openvino_arms(args)]
    kept = []
    for arm in found:
        name = f"{arm.name} @{threads}"
        skipped = any(fnmatch.fnmatch(name, pattern) for pattern in args.skip)
        if any(fnmatch.fnmatch(name, pattern) for pattern in args.only) and not skipped:
            kept.append(Arm(arm.name, arm.command, {**arm.options, "threads": threads}))
    return kept


def _torch_arms(args: argparse.Namespace) -> Iterator[Arm]:
    command = [sys.executable, str(PEERS / "transformers_worker.py")]
    modes = {PLAIN: {}, "lookup": {"lookup": 10}} | ({"assisted": {"draft": args.assistant}} if args.assistant else {})
    for dtype in () if args.shape else ("float32", "bfloat16"):
        for mode, more in modes.items():
            yield Arm(f"transformers {dtype} {mode}", command, {"model": str(args.model), "dtype": dtype, **more})
    command = [sys.executable, str(PEERS / "foredraft_worker.py")]
    drafters = {PLAIN: None} | {"default" if each == "auto" else each: each for each in args.drafters}
    targets = {} if args.shape else {weights or "float32": (args.model, weights) for weights in ("int4", "int8", None)}
    targets |= {_type(file): (file.resolve(), "auto") for file in args.gguf}  # the very weights of the peers
    for kind, (model, weights) in targets.items():
        for mode, drafter in drafters.items():
            yield Arm(
                f"foredraft {kind} {mode}", command, {"model": str(model), "weights": weights, "drafter": drafter}
            )


def _llama_arms(args: argparse.Namespace) -> Iterator[Arm]:
    node = shutil.which("node")
    if args.node is None or node is None or not (args.node / "node-llama-cpp").is_dir():
        return
    for file in args.gguf:
        for mode in (PLAIN, "lookup"):
            options = {"modules": str(args.node), "model": str(file.resolve()), "lookup": mode == "lookup"}
            yield Arm(f"llama.cpp {_type(file)} {mode}", [node, str(PEERS / "llama_worker.mjs")], options)


def _openvino_arms(args: argparse.Namespace) -> Iterator[Arm]:
    if args.openvino is None or not args.openvino.is_file():
        return
    for file in args.gguf:
        if _type(file) not in args.openvino_types:
            continue
        for accuracy in (False, True):
            for mode in (PLAIN, "lookup"):
                options = {"model": str(file.resolve()), "accuracy": accuracy, "lookup": mode == "lookup"}
                name = f"openvino {_type(file)}{'-ACCURACY' if accuracy else ''} {mode}"
                yield Arm(name, [str(args.openvino), str(PEERS / "openvino_worker.py")], options)


def _type(file: Path) -> str:
    """The type of weights in a name such as MODEL.Q4_0.gguf."""
    return file.stem.rsplit(".", 1)[-1]


def random_files(args: argparse.Namespace, folder: Path) -> list[Path]:
    """Files of the shapes that were asked for; their types are named 1b-Q4_0 and the like."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    files = [folder / f"random.{name}-Q4_0.gguf" for name in args.shape]
    for name, file in zip(args.shape, files, strict=True):
        write_random(file, SHAPES[name], tokenizer)
    return files


def report_missing(args: argparse.Namespace) -> None:
    """One line for each peer that is not there."""
    if args.node is None or shutil.which("node") is None or not (args.node / "node-llama-cpp").is_dir():
        print("Skipped llama.cpp: install Node.js and `npm install node-llama-cpp`, and pass its --node FOLDER.")
    if args.openvino is None or not args.openvino.is_file():
        print(
            "Skipped OpenVINO: `pip install openvino-genai` in a virtual environment, and pass its --openvino PYTHON."
        )
    if not args.gguf:
        print("Skipped llama.cpp and OpenVINO: pass GGUF files (--gguf); benchmarks/write_gguf.py writes them.")


class Process:
    """A worker that runs; see ``peers/protocol.py``."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self._errors = tempfile.TemporaryFile("w+")
        threads = str(arm.options["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(Path(foredraft.__path__[0]).parent)}
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [*arm.command, json.dumps(arm.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            text=True,
        )
        self.load_seconds: float = self._read()["load_seconds"]
        self.start_seconds = time.perf_counter() - started

    def ask(self, **request: object) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            RuntimeError: the worker ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._errors.seek(0)
        raise RuntimeError(f"{self.arm.name} ended: {self._errors.read()[-800:].strip()}")

    def peak_mebibytes(self) -> float | None:
        """Peak resident memory; None where the system does not tell."""
        status = Path(f"/proc/{self._process.pid}/status")
        if not status.exists():
            return None
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) / 1024

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Prompt(NamedTuple):
    """A chat as token ids, and its place among those of its task."""

    task: str
    ids: list[int]
    number: int


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """Chats that edit, and the first of each file, one of each task in turn; without the files, short ones."""
    chats: list[tuple[str, Any]] = [("edit", [{"role": "user", "content": text}]) for text in EDITS[: args.prompts]]
    if args.prompt_files.is_dir():
        for task in FILES:
            read = read_prompts(args.prompt_files / task / "question.jsonl", chat=True)[: args.prompts]
            chats += [(task, each.prompt) for each in read]
    else:
        chats += [(task, [{"role": "user", "content": text}]) for task, text in BUILT_IN.items()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    found, counts = [], Counter[str]()
    for task, chat in chats:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        found.append(Prompt(task, tokenizer(text, add_special_tokens=False)["input_ids"], counts[task]))
        counts[task] += 1
    return sorted(found, key=lambda prompt: prompt.number)


@dataclass
class Run:
    """A run with one number of threads: it writes lines to ``out`` and tells its progress."""

    args: argparse.Namespace
    threads: int
    out: TextIO
    done: Container[tuple[int, str, str, int]]
    running: dict[str, Process] = field(default_factory=dict)

    def write(self, kind: str, arm: str, **values: object) -> None:
        self.out.write(json.dumps({"kind": kind, "arm": arm, "threads": self.threads, **values}) + "\n")
        self.out.flush()

    def start(self, arms: list[Arm]) -> None:
        """Start and warm up one arm after the other; an arm that fails is reported and left out."""
        for arm in arms:
            self.wait()
            try:
                process = self.running[arm.name] = Process(arm)
                process.ask(ids=WARM_UP, tokens=min(16, self.args.tokens))
            except (OSError, RuntimeError) as error:
                print(f"Skipped {arm.name}: {error}", flush=True)
                if arm.name in self.running:
                    self.running.pop(arm.name).close()
                continue
            if self.threads == self.args.threads[0]:
                self.write("load", arm.name, load_seconds=process.load_seconds, start_seconds=process.start_seconds)
            print(f"{arm.name} @{self.threads}: loaded in {process.load_seconds:.1f} s", flush=True)

    def wait(self) -> None:
        """Wait for a line, if that was asked for."""
        if self.args.wait and not sys.stdin.readline():
            raise SystemExit("Standard input has ended.")

    def decode(self, prompts: list[Prompt]) -> None:
        """Run every prompt on every arm, in rotating order."""
        every = list(self.running)
        for turn, (task, ids, number) in enumerate(prompts):
            at = turn * len(every) // len(prompts)
            names = [name for name in every[at:] + every[:at] if self._runs(name, task, number)]
            if not names:
                continue
            self.wait()
            started = time.perf_counter()
            for name in names:
                answer = self.running[name].ask(ids=ids, tokens=self.args.tokens)
                if len(answer["output"]) != self.args.tokens:
                    raise RuntimeError(f"{name} wrote {len(answer['output'])} tokens instead of {self.args.tokens}.")
                self.write("run", name, task=task, prompt=number, prompt_tokens=len(ids), **answer)
            took = time.perf_counter() - started
            print(f"{task} ({len(ids)} tokens) @{self.threads}: {len(names)} arms in {took:.0f} s", flush=True)
        for name, process in self.running.items():
            self.write("memory", name, mebibytes=process.peak_mebibytes())

    def _runs(self, name: str, task: str, number: int) -> bool:
        """Whether an arm runs on this prompt, and has not yet."""
        full = f"{name} @{self.threads}"
        few = number and any(fnmatch.fnmatch(full, pattern) for pattern in self.args.few)
        return not few and (self.threads, name, task, number) not in self.done

    def score(self, prompts: list[Prompt]) -> None:
        """Perplexity and KL of every plain arm that returns logits."""
        names = [name for name in self.running if name.endswith(f" {PLAIN}") and not name.startswith("openvino")]
        texts = [prompt.ids[: self.args.scored] for prompt in prompts]
        shared = next((i for i, column in enumerate(zip(*texts, strict=False)) if len(set(column)) > 1), 0)
        reference: Tensor | None = None
        following = torch.tensor([token for ids in texts for token in ids[shared + 1 :]])
        for name in sorted(names, key=lambda name: name != REFERENCE):
            law = torch.cat([self._log_law(name, ids)[shared:-1] for ids in texts])
            loss = -law.gather(1, following[:, None]).mean()
            values = {"perplexity": float(loss.exp()), "positions": len(law)}
            if name == REFERENCE:
                reference = law
            if reference is not None:
                values["kl"] = float(kl(reference.exp(), law).mean())
                values["same_argmax"] = float((reference.argmax(-1) == law.argmax(-1)).double().mean())
            self.write("quality", name, **values)
            print(f"{name}: {json.dumps(values)}", flush=True)

    def _log_law(self, name: str, ids: list[int]) -> Float[Tensor, "T V"]:
        """Log-probabilities after each token."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "logits"
            self.running[name].ask(ids=ids, logits=str(file))
            logits = np.fromfile(file, dtype=np.float32).reshape(len(ids), -1)
        return torch.from_numpy(logits).double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model in float32")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files of the same model, for the peers")
    parser.add_argument("--shape", nargs="*", default=[], choices=SHAPES, help="random weights of these sizes instead")
    parser.add_argument("--node", type=Path, help="a node_modules folder with node-llama-cpp")
    parser.add_argument("--openvino", type=Path, help="the Python interpreter of an environment with openvino-genai")
    parser.add_argument("--openvino-types", nargs="*", default=["Q4_1"], help="types of files that OpenVINO runs")
    parser.add_argument("--drafters", nargs="*", default=["auto"], help="foredraft's; auto: its default")
    parser.add_argument("--assistant", help="folder of a draft model for transformers")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, default=2, help="chats of each task")
    parser.add_argument("--prompt-files", type=Path, default=Path("../shared/data/prompts/eagle"))
    parser.add_argument("--tokens", type=int, default=96, help="new tokens")
    parser.add_argument("--scored", type=int, default=96, help="tokens of each prompt for perplexity and KL; 0: none")
    parser.add_argument("--only", nargs="*", default=["*"], help='patterns of "NAME @THREADS"')
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--few", nargs="*", default=[], help="patterns of arms for the first chat of each task alone")
    parser.add_argument("--wait", action="store_true", help="for a line before each process and each prompt")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS}, or {SHAPE_RESULTS.name} with --shape")
    args = parser.parse_args()
    args.out = args.out or (SHAPE_RESULTS if args.shape else RESULTS)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            args.gguf, args.scored = random_files(args, Path(folder)), 0
        report_missing(args)
        compare(args, prompts_of(args))
    lines = read(args.out)
    print(f"\n{users(lines)}\n\n{tables(lines)}")


def compare(args: argparse.Namespace, prompts: list[Prompt]) -> None:
    """Run all arms with each number of threads, and add what they said to the file."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = read(args.out).get("run", []) if args.out.exists() else []
    done = {(run["threads"], run["arm"], *place(run)) for run in found}
    processors = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    with args.out.open("a") as out:
        facts = {"model": args.model.name, "gguf": [file.name for file in args.gguf], "new_tokens": args.tokens}
        out.write(json.dumps(provenance("python benchmarks/engines.py", **facts, load=os.getloadavg())) + "\n")
        for number, threads in enumerate(args.threads):
            if sys.platform == "linux":  # workers inherit it
                os.sched_setaffinity(0, processors[:threads])
            run = Run(args, threads, out, done)
            try:
                run.start(arms_of(args, threads))
                run.decode(prompts)
                if args.scored and not number:
                    run.score(prompts)
            finally:
                for process in run.running.values():
                    process.close()
                if sys.platform == "linux":
                    os.sched_setaffinity(0, processors)


if __name__ == "__main__":
    main()
