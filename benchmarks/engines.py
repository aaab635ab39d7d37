"""CPU engines against each other on one real model: foredraft, transformers, llama.cpp and OpenVINO GenAI.

Every arm is a process of its own (`peers/`), so that each peer has its own interpreter, and all run in one turn: every
prompt runs on every arm before the next prompt, in rotating order, so that machine drift affects all arms alike. All
get the same token ids and generate exactly ``--tokens`` tokens greedily, beyond any end of sequence. Processes are
pinned to as many processors as they have threads. An arm is named "ENGINE WEIGHTS MODE", where "default" is what
``foredraft.load`` gives without a drafter's name; ``--only`` and ``--skip`` take patterns of "NAME @THREADS", and arms
of ``--few`` run on the first chat of each task alone. What is not installed or not there is skipped with one line. What
is in the results file is not run again. ``--wait`` reads a line of standard input before it starts a process or a
prompt, so that other programs can be stopped for so long.

With ``--choose N``, each peer first runs all its modes on the last N chats of each task, which are not measured, and is
then measured plain and, on each task, in the mode that was fastest there. An arm with drafts copies a list first: a
peer's arm that drafts nothing there, where its engine tells, is refused. Both are lines of the results, too.

Tokens per second exclude the first token; prefill is the prompt's tokens over the time to the first token. Memory is
the peak of resident memory, mapped files included. Perplexity and KL are those of each prompt's first ``--scored``
tokens without the beginning that all prompts share, KL against transformers in float32; OpenVINO GenAI and llama.cpp's
server return no logits. A run of an arm with drafts says how many drafted tokens it accepted, where the engine tells;
the tables leave out an arm of a peer that accepted none on all prompts. KV caches are the peers' defaults: float16 in
llama.cpp, 8 bits in OpenVINO, which also rounds activations unless it runs with ACCURACY.

``--shape 1b 3b`` compares the engines that read GGUF files on Llama models of these sizes with random weights in Q4_0,
which it writes itself, with the vocabulary of ``--model``.

    python benchmarks/peers/llama_cpp.py
    python -m venv PEERS/ov && PEERS/ov/bin/pip install openvino-genai
    python benchmarks/engines.py --model FOLDER --gguf A.Q4_0.gguf A.Q4_1.gguf A.Q8_0.gguf \\
        --openvino PEERS/ov/bin/python --assistant DRAFT
    scripts/models coder coder-draft
    python benchmarks/engines.py --model coder --assistant coder-draft --choose 2 --prompts 8 --scored 0 \\
        --openvino PEERS/ov/bin/python --out benchmarks/results/engines_coder.jsonl
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
import transformers
from edits import EDITS
from engine_arms import Arm, arms_of, missing
from engine_tables import PLAIN, by_kind, chosen, drafted, engine_of, idle, ours, place, tables, users
from jaxtyping import Float
from kit.origin import provenance
from kit.reading import read
from peers import llama_cpp
from torch import Tensor
from write_gguf import SHAPES, write_random

import foredraft
from foredraft.bench.prompts import read_prompts
from foredraft.core.divergence import kl
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.tokenizers import as_tokenizer

REFERENCE = f"transformers float32 {PLAIN}"
RESULTS = Path("benchmarks/results/engines.jsonl")
SHAPE_RESULTS = Path("benchmarks/results/engines_shapes.jsonl")
WARM_UP = list(range(1000, 1064))
COPY = "Write this list twice, word for word.\n\n" + "\n".join(
    f"{number}. The train from platform {number} leaves {5 * number} minutes after nine." for number in range(1, 11)
)
"""A chat on which every method drafts."""
COPIED = 96
"""New tokens of this chat."""
FILES = ("sum", "mt_bench", "humaneval", "gsm8k", "qa")
BUILT_IN = {
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples.",
    "maths": "Tom has 12 apples. He eats 3 and buys 5 more, then gives half of them away. How many are left, and why?",
    "write": "Write a short letter to a neighbour who looks after your cat while you are away.",
    "explain": "Explain to a child why the sky is blue.",
    "list": "What are the three most important things to know about batteries?",
}


def random_files(args: argparse.Namespace, folder: Path) -> list[Path]:
    """Files of the shapes that were asked for; their types are named 1b-Q4_0 and the like."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    files = [folder / f"random.{name}-Q4_0.gguf" for name in args.shape]
    for name, file in zip(args.shape, files, strict=True):
        write_random(file, SHAPES[name], tokenizer)
    return files


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
        ready = self._read()
        self.load_seconds: float = ready["load_seconds"]
        self._pid: int = ready["pid"]
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
        status = Path(f"/proc/{self._pid}/status")
        if not status.exists():
            return None
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) / 1024

    def close(self) -> None:
        """End the worker, which ends what it has started."""
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


class Prompt(NamedTuple):
    """A chat as token ids, and its place among those of its task."""

    task: str
    ids: list[int]
    number: int


def encoder(model: Path) -> Callable[[Any], list[int]]:
    """What turns a chat into the ids that all engines get."""
    tokenizer = as_tokenizer(model)
    assert tokenizer is not None
    return tokenizer.encode_chat


def prompts_of(args: argparse.Namespace) -> tuple[list[Prompt], list[Prompt]]:
    """Chats that are measured, and those on which modes are chosen: the first and the last of each task, in turn.

    Edits and the chats of each file; without the files, short ones.
    """
    texts = {"edit": EDITS} | ({} if args.prompt_files.is_dir() else {task: [text] for task, text in BUILT_IN.items()})
    chats: dict[str, list[Any]] = {
        task: [[{"role": "user", "content": text}] for text in some] for task, some in texts.items()
    }
    for task in args.tasks if args.prompt_files.is_dir() else ():
        chats[task] = [each.prompt for each in read_prompts(args.prompt_files / task / "question.jsonl", chat=True)]
    encode = encoder(args.model)
    measured, others = [], []
    for task, some in chats.items():
        if args.choose and len(some) < args.prompts + args.choose:
            raise SystemExit(f"{task} has {len(some)} chats: too few for {args.prompts} and {args.choose} others.")
        numbers = range(len(some))
        measured += [Prompt(task, encode(some[number]), number) for number in numbers[: args.prompts]]
        others += [Prompt(task, encode(some[number]), number) for number in numbers[len(some) - args.choose :]]
    return sorted(measured, key=lambda prompt: prompt.number), sorted(others, key=lambda prompt: prompt.number)


@dataclass
class Run:
    """A run with one number of threads: it writes lines to ``out`` and tells its progress."""

    args: argparse.Namespace
    threads: int
    out: TextIO
    done: Container[tuple[str, int, str, str, int]]
    kind: str = "run"
    modes: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The arm of a peer on each task, beside the plain one, by engine and task; all arms of an engine without."""
    refused: set[str] = field(default_factory=set)
    running: dict[str, Process] = field(default_factory=dict)

    def write(self, kind: str, arm: str, **values: object) -> None:
        self.out.write(json.dumps({"kind": kind, "arm": arm, "threads": self.threads, **values}) + "\n")
        self.out.flush()

    def start(self, arms: list[Arm], copy: list[int]) -> None:
        """Start and warm up one arm after the other; an arm that fails is reported and left out."""
        for arm in arms:
            self.wait()
            try:
                process = self.running[arm.name] = Process(arm)
                process.ask(ids=WARM_UP, tokens=min(16, self.args.tokens))
                self._check(arm, copy)
            except (OSError, RuntimeError) as error:
                print(f"Skipped {arm.name}: {error}", flush=True)
                if arm.name in self.running:
                    self.running.pop(arm.name).close()
                continue
            if self.threads == self.args.threads[0] and self.kind == "run":
                self.write("load", arm.name, load_seconds=process.load_seconds, start_seconds=process.start_seconds)
            print(f"{arm.name} @{self.threads}: loaded in {process.load_seconds:.1f} s", flush=True)

    def _check(self, arm: Arm, copy: list[int]) -> None:
        """Whether an arm drafts where the text repeats: a line of the results, once.

        Raises:
            RuntimeError: a peer's arm drafts nothing.
        """
        if arm.name.endswith(f" {PLAIN}") or ("check", self.threads, arm.name, "copy", 0) in self.done:
            return
        answer = self.running[arm.name].ask(ids=copy, tokens=COPIED)
        told = {name: answer[name] for name in ("drafted", "accepted") if name in answer}
        self.write("check", arm.name, task="copy", prompt=0, arguments=arm.told, tokens=len(answer["output"]), **told)
        if idle(arm.name, answer):
            self.refused.add(arm.name)
            raise RuntimeError("it drafts nothing, not even where a text repeats")

    def wait(self) -> None:
        """Wait for a line, if that was asked for."""
        if self.args.wait and not sys.stdin.readline():
            raise SystemExit("Standard input has ended.")

    def decode(self, prompts: list[Prompt]) -> None:
        """Run every prompt on every arm, in rotating order."""
        every, own = list(self.running), dict[str, list[dict]]()
        for turn, (task, ids, number) in enumerate(prompts):
            at = turn * len(every) // len(prompts)
            names = [name for name in every[at:] + every[:at] if self.runs(name, task, number)]
            if not names:
                continue
            self.wait()
            started = time.perf_counter()
            for name in names:
                answer = self.running[name].ask(ids=ids, tokens=self.args.tokens)
                if len(answer["output"]) != self.args.tokens:
                    raise RuntimeError(f"{name} wrote {len(answer['output'])} tokens instead of {self.args.tokens}.")
                self.write(self.kind, name, task=task, prompt=number, prompt_tokens=len(ids), **answer)
                own.setdefault(name, []).append(answer)
            took = time.perf_counter() - started
            print(
                f"{self.kind}: {task} ({len(ids)} tokens) @{self.threads}: {len(names)} arms in {took:.0f} s",
                flush=True,
            )
        for name, process in self.running.items():
            if self.kind == "run":
                self.write("memory", name, mebibytes=process.peak_mebibytes())
            if name in own and not drafted(name, own[name]):
                print(f"{name} @{self.threads} accepted no drafted token: the tables leave it out.", flush=True)

    def runs(self, name: str, task: str, number: int) -> bool:
        """Whether an arm runs on this prompt, and has not yet."""
        full = f"{name} @{self.threads}"
        few = number and self.kind == "run" and any(fnmatch.fnmatch(full, pattern) for pattern in self.args.few)
        left = self.modes.get((engine_of(name), task), name) != name and not name.endswith(f" {PLAIN}")
        return not few and not left and (self.kind, self.threads, name, task, number) not in self.done

    def missing(self, arms: list[Arm], prompts: list[Prompt]) -> list[Arm]:
        """Arms that have something to do."""
        return [
            arm
            for arm in arms
            if arm.name not in self.refused and any(self.runs(arm.name, each.task, each.number) for each in prompts)
        ]

    def close(self) -> None:
        for process in self.running.values():
            process.close()
        self.running = {}

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
    parser.add_argument("--model", required=True, help="folder of the model in float32, or a GGUF file or its name")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files of the same model, for the peers")
    parser.add_argument("--shape", nargs="*", default=[], choices=SHAPES, help="random weights of these sizes instead")
    parser.add_argument("--openvino", help="the Python interpreter of an environment with openvino-genai")
    parser.add_argument("--openvino-types", nargs="*", default=["Q4_1"], help="types of files that OpenVINO runs")
    parser.add_argument("--openvino-draft", type=Path, help="a draft model that OpenVINO can read")
    parser.add_argument("--drafters", nargs="*", default=["auto"], help="foredraft's; auto: its default")
    parser.add_argument("--assistant", help="a draft model for the peers: a folder, or a GGUF file or its name")
    parser.add_argument(
        "--eagle3-gguf", type=Path, help="a head that llama.cpp's converter made (docs/guides/export.md)"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, default=2, help="chats of each task")
    parser.add_argument("--choose", type=int, default=0, help="other chats of each task, to choose the peers' modes")
    parser.add_argument("--tasks", nargs="*", default=FILES, help="folders of --prompt-files; edits are always there")
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
    args.model, args.assistant = Path(resolve(args.model)), args.assistant and resolve(args.assistant)
    if args.model.is_file() and args.model not in args.gguf:
        args.gguf.insert(0, args.model)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            args.gguf, args.scored = random_files(args, Path(folder)), 0
        for line in missing(args):
            print(line)
        compare(args, *prompts_of(args))
    lines = read(args.out)
    print(f"\n{users(lines)}\n\n{by_kind(lines)}\n\n{tables(lines)}")


def compare(args: argparse.Namespace, prompts: list[Prompt], others: list[Prompt]) -> None:
    """Run all arms with each number of threads, and add what they said to the file."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    processors = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    copy = encoder(args.model)([{"role": "user", "content": COPY}])
    with args.out.open("a") as out:
        out.write(json.dumps(origin(args)) + "\n")
        out.flush()
        for number, threads in enumerate(args.threads):
            if sys.platform == "linux":  # workers inherit it
                os.sched_setaffinity(0, processors[:threads])
            arms, scored = arms_of(args, threads), args.scored and not number
            try:
                for some in engines_of(arms) if others else []:
                    turn(Run(args, threads, out, done(args.out), "choice"), some, others, copy)
                found = read(args.out)
                run = Run(
                    args, threads, out, done(args.out), modes=chosen(found, threads), refused=refused(found, threads)
                )
                turn(run, arms, prompts, copy, run.score if scored else None)
            finally:
                if sys.platform == "linux":
                    os.sched_setaffinity(0, processors)


def turn(
    run: Run,
    arms: list[Arm],
    prompts: list[Prompt],
    copy: list[int],
    then: Callable[[list[Prompt]], None] | None = None,
) -> None:
    """Run what is missing of some prompts, and then something else with all of the arms."""
    try:
        run.start(arms if then else run.missing(arms, prompts), copy)
        run.decode(prompts)
        if then is not None:
            then(prompts)
    finally:
        run.close()


def engines_of(arms: list[Arm]) -> Iterator[list[Arm]]:
    """The arms of each peer with one type of weights, if it has several: of these one is chosen."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        if not ours(arm.name):
            found.setdefault(engine_of(arm.name), []).append(arm)
    yield from (some for some in found.values() if len(some) > 1)


def refused(lines: dict[str, list[dict]], threads: int) -> set[str]:
    """Arms that drafted nothing in their check."""
    return {line["arm"] for line in lines.get("check", []) if line["threads"] == threads and idle(line["arm"], line)}


def done(path: Path) -> set[tuple[str, int, str, str, int]]:
    """Kind, threads, arm and prompt of what is in a file."""
    found = read(path) if path.exists() else {}
    return {
        (kind, line["threads"], line["arm"], *place(line))
        for kind in ("run", "choice", "check")
        for line in found.get(kind, [])
    }


def origin(args: argparse.Namespace) -> dict[str, Any]:
    """The line that says where and how a run is made."""
    facts = {"model": args.model.name, "gguf": [file.name for file in args.gguf], "new_tokens": args.tokens}
    if (folder := llama_cpp.programs()) is not None and not args.shape:
        facts["llama.cpp"] = llama_cpp.facts(folder.parent)
    return provenance("python benchmarks/engines.py", **facts, load=os.getloadavg())


if __name__ == "__main__":
    main()
