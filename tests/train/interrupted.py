"""Runs of ``foredraft train`` and ``answers`` in processes that are interrupted at random moments, and compared with
undisturbed ones.

A server process imports everything once and forks a process for each command, so that a command takes a second.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from trainees import save_target, save_texts

from processes import environment

SERVER = """
import json, os, signal, sys
from foredraft.cli import main
from foredraft.train.drafts import run as drafts
from foredraft.train.heads import run as heads, validate
from foredraft.train.data import prompts
from foredraft.compose.load import load
import accelerate, transformers
validate._PROMPT, validate._NEW, validate._PROMPTS = 8, 6, 3
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(asked["said"], "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        status = main(asked["command"])
        sys.stderr.flush()
        os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
LOOP = (
    "--tokens",
    str(24 * 64),
    "--length",
    "32",
    "--batch",
    "2",
    "--validate",
    "9",
    "--checkpoint",
    "10",
    "--report",
    "5",
)
"""24 steps."""
COMMON = (*LOOP, "--checkpoint-seconds", "0.2", "--precision", "fp32", "--device", "cpu")
ANSWERS = "T1.jsonl"
RECIPES: dict[str, tuple[str, ...]] = {
    "eagle": ("--store", "0.01"),
    "eagle3": ("--vocabulary", "40", "--recipe", "steps=3"),
    "medusa": ("--heads", "2"),
    "medusa2": ("--heads", "2"),
    "hydra": ("--heads", "2"),
    "hydra++": ("--heads", "2"),
    "blockwise": ("--heads", "2"),
    "glide": ("--recipe", "block=3"),
    "draft": ("--draft", "DRAFT"),
    "prune": ("--shape", "layers=1,heads=2", "--recipe", "samples=12"),
    "prune by masks": ("--shape", "layers=1,heads=2", "--recipe", "by=masks", "--recipe", "mask_tokens=1024"),
    "boost": ("--draft", "DRAFT", "--draft", "DRAFT", "--recipe", "easy=0.5"),
    "early_exit": ("--recipe", "dropout=0.5"),
    "answers": (
        *("--count", "40", "--prompt-tokens", "12", "--max-new-tokens", "40", "--temperature", "1"),
        *("--max-batch-size", "64", "--drafter", "prompt_lookup", "--device", "cpu", "--dtype", "float32"),
    ),
}
"""Options of each recipe, and of answers."""
ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
"""Exit statuses by signal."""


@dataclass(slots=True)
class Ended:
    """A command that has ended: its status, what it said, and seconds."""

    status: int
    said: str
    seconds: float


class Server:
    """Runs commands of ``foredraft`` in forked processes."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self._said = process, folder / "said.txt"

    def run(self, command: list[str], number: int = 0, after: float = 0.0) -> Ended:
        """Run a command; send it a signal after so many seconds, unless it has ended by then."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps({"command": command, "said": str(self._said)}), file=process.stdin, flush=True)
        child, begun = int(process.stdout.readline()), time.monotonic()
        if number:
            time.sleep(after)
            if not self._gone(child):
                os.kill(child, number)
        status = int(process.stdout.readline())
        return Ended(status, self._said.read_text(), time.monotonic() - begun)

    @staticmethod
    def _gone(child: int) -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True) as process:
        yield Server(process, folder)
        assert process.stdin is not None
        process.stdin.close()


class Place:
    """A tiny target, a draft and texts, and the commands on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        save_target(folder / "target")
        save_target(folder / "draft", hidden_size=16)
        save_texts(folder / "texts.jsonl", 120)

    def command(self, recipe: str, out: Path) -> list[str]:
        more = [str(self._folder / "draft") if word == "DRAFT" else word for word in RECIPES[recipe]]
        data = ("--model", str(self._folder / "target"), "--data", str(self._folder / "texts.jsonl"))
        if recipe == "answers":
            return ["answers", str(out), *data, *more]
        return ["train", recipe.split()[0], *data, "--out", str(out), *COMMON, *more]


def interrupt(
    server: Server, command: Callable[[Path], list[str]], folder: Path, signals: Iterable[int], chance: random.Random
) -> list[Ended]:
    """Run a command to its end, interrupted by each of these signals at a random moment; then compare the results.

    Where a run ends before its signal comes, another one begins in another folder and takes the signal.

    Returns:
        how each interrupted process has ended.
    """
    whole = server.run(command(folder / "whole"))
    assert whole.status == 0, whole.said
    cut, hits, number = folder / "cut", [], 0
    for sent in signals:
        while True:
            ended = server.run(command(cut), sent, chance.uniform(0, whole.seconds))
            begun = sent == signal.SIGKILL or ended.said  # it handles signals as soon as it is imported
            if ended.status == ENDS[sent] and begun:
                break
            over = ended.status == 0 or (begun and ended.status == -signal.SIGTERM)  # handled while there is work
            assert over or not begun, (ended.status, ended.said)
            if over:
                assert_equal(cut, folder / "whole")
                number += 1
                cut = folder / f"cut-{number}"
        assert sent == signal.SIGKILL or keeps_what_it_says(ended.said, cut), ended.said
        hits.append(ended)
    ended = server.run(command(cut))
    assert ended.status == 0, ended.said
    assert_equal(cut, folder / "whole")
    return hits


def keeps_what_it_says(said: str, out: Path) -> bool:
    """Whether the last sentence of an interrupted run tells what is in its folder."""
    sentence = said.splitlines()[-1]
    answers = out / ANSWERS
    written = len(answers.read_text().splitlines()) if answers.exists() else 0
    if found := re.fullmatch(
        r"foredraft: Interrupted after step (\d+) of \d+(?: of (.*))?; the same .* from there.", sentence
    ):
        kept = torch.load(out / (found[2] or "") / "checkpoint.pt", weights_only=True)["step"]
        return kept == int(found[1]) > 0
    if found := re.match(r"foredraft: Interrupted after (\d+) of 40 answers; .* from there.", sentence):
        return int(found[1]) == written
    if "before an answer was begun" in sentence:
        return not written and not list(out.glob("*.unfinished"))
    if "continues from what" in sentence:
        return any(file.stat().st_size for file in out.iterdir())
    if sentence in ("foredraft: Interrupted.", "foredraft: Interrupted before the run began."):
        return True  # nothing has been read or written yet, so the folder is as it was before
    if "before anything was saved" in sentence:
        return not list(out.rglob("*.pt"))
    return "from the last checkpoint" in sentence and bool(list(out.rglob("*.pt")))


def assert_equal(mine: Path, theirs: Path) -> None:
    """Bit-equal weights in all checkpoints and results, and equal answers."""
    files = [path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file() and "cache" not in path.parts]
    for file in files:
        if file.name == "checkpoint.pt":
            nets = [torch.load(folder / file, weights_only=True)["net"] for folder in (mine, theirs)]
            assert nets[0].keys() == nets[1].keys()
            assert all(torch.equal(weight, nets[1][name]) for name, weight in nets[0].items()), file
        elif file.suffix in (".safetensors", ".npy") or file.name in (ANSWERS, "config.json"):
            assert (mine / file).read_bytes() == (theirs / file).read_bytes(), file
    results = {file.name if file.name in (ANSWERS, "checkpoint.pt") else file.suffix for file in files}
    assert ANSWERS in results or results >= {"checkpoint.pt", ".safetensors"}
    rest = {path.relative_to(mine) for path in mine.rglob("*.pt")} - set(files)
    assert not rest and not list(mine.rglob("*.unfinished")), "nothing unfinished is left"
