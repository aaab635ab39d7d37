"""Arms of ``engines.py``: how each engine is started in each mode."""

import argparse
import fnmatch
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_tables import PLAIN
from gguf import LlamaFileType
from peers import llama_cpp

from foredraft.model.gguf.file import GgufFile

PEERS = Path(__file__).parent / "peers"
SHORT = {"size-n": 4, "size-m": 8}
SHORT_MOD = {"n-match": 8, "n-min": 4, "n-max": 16}
"""Shorter than llama.cpp's defaults (12 and 48; 24, 48 and 64), since a wide forward is dear on a CPU."""
NGRAMS = {name: [] for name in ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")} | {
    f"{name}-short": [word for key, value in short.items() for word in (f"--spec-{name}-{key}", str(value))]
    for names, short in ((("ngram-simple", "ngram-map-k", "ngram-map-k4v"), SHORT), (("ngram-mod",), SHORT_MOD))
    for name in names
}
"""Modes of llama.cpp's look-ups, and their options."""
LENGTHS = (1, 2, 3, 5)
"""Tokens that a draft model drafts for llama.cpp."""
HEAD_LENGTHS = (2, 4)
"""The same of an EAGLE-3 head."""


@dataclass(frozen=True)
class Arm:
    """A worker's name, its command and the options that it gets as JSON."""

    name: str
    command: list[str]
    options: dict[str, Any]

    @property
    def told(self) -> str:
        """What a results file says about it: its options without folders."""
        words = [str(each) for each in self.options.get("arguments", ())]
        return " ".join(Path(word).name if "/" in word else word for word in words)


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


def missing(args: argparse.Namespace) -> Iterator[str]:
    """One line for each peer that is not there."""
    if llama_cpp.programs() is None:
        yield "Skipped llama.cpp: build it (python benchmarks/peers/llama_cpp.py)."
    if not _openvino(args):
        yield "Skipped OpenVINO: `pip install openvino-genai` in a virtual environment, and pass its --openvino PYTHON."
    if not args.gguf:
        yield "Skipped llama.cpp and OpenVINO: pass GGUF files (--gguf); benchmarks/write_gguf.py writes them."


def _torch_arms(args: argparse.Namespace) -> Iterator[Arm]:
    command = [sys.executable, str(PEERS / "transformers_worker.py")]
    modes = {PLAIN: {}, "lookup": {"lookup": 10}} | ({"assisted": {"draft": args.assistant}} if args.assistant else {})
    for dtype in () if args.shape else ("float32", "bfloat16"):
        for mode, more in modes.items():
            yield Arm(f"transformers {dtype} {mode}", command, {"model": str(args.model), "dtype": dtype, **more})
    command = [sys.executable, str(PEERS / "foredraft_worker.py")]
    drafters = {PLAIN: None} | {"default" if each == "auto" else each: each for each in args.drafters}
    floats = {} if args.shape or args.model.is_file() else {"int4": "int4", "int8": "int8", "float32": None}
    targets = {weights: (args.model, kind) for weights, kind in floats.items()}
    targets |= {type_of(file): (file.resolve(), "auto") for file in args.gguf}  # the very weights of the peers
    for kind, (model, weights) in targets.items():
        for mode, drafter in drafters.items():
            options = {"model": str(model), "weights": weights, "drafter": drafter}
            yield Arm(f"foredraft {kind} {mode}", command, options)


def _llama_arms(args: argparse.Namespace) -> Iterator[Arm]:
    folder = llama_cpp.programs()
    if folder is None:
        return
    command = [sys.executable, str(PEERS / "llama_server_worker.py")]
    for file in args.gguf:
        for mode, words in llama_modes(args.assistant, args.eagle3_gguf).items():
            options = {"server": str(folder / "llama-server"), "model": str(file.resolve()), "arguments": words}
            yield Arm(f"llama.cpp {type_of(file)} {mode}", command, {**options, "drafts": mode != PLAIN})


def llama_modes(draft: str | None = None, head: Path | None = None) -> dict[str, list[str]]:
    """llama.cpp's modes and their options: plain, look-ups, a draft model in GGUF if there is one, and a head."""
    modes = {PLAIN: []}
    for mode, words in NGRAMS.items():
        modes[mode] = ["--spec-type", mode.removesuffix("-short"), *words]
    if draft is not None and draft.endswith(".gguf"):
        own = ["-md", draft, "--spec-type", "draft-simple"]
        modes |= {f"draft-{length}": [*own, "--spec-draft-n-max", str(length)] for length in LENGTHS}
        modes["draft-sure"] = [*own, "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.75"]
    if head is not None:
        own = ["-md", str(head.resolve()), "--spec-type", "draft-eagle3"]
        modes |= {f"eagle3-{length}": [*own, "--spec-draft-n-max", str(length)] for length in HEAD_LENGTHS}
    return modes


def _openvino_arms(args: argparse.Namespace) -> Iterator[Arm]:
    if not _openvino(args):
        return
    modes: dict[str, dict[str, Any]] = {PLAIN: {}, "lookup": {"lookup": True}}
    if args.openvino_draft is not None:
        modes |= {f"draft-{length}": {"draft": str(args.openvino_draft), "length": length} for length in (3, 5)}
    for file in args.gguf:
        if type_of(file) not in args.openvino_types:
            continue
        for accuracy in (False, True):
            for mode, more in modes.items():
                options = {"model": str(file.resolve()), "accuracy": accuracy, **more}
                name = f"openvino {type_of(file)}{'-ACCURACY' if accuracy else ''} {mode}"
                yield Arm(name, [str(args.openvino), str(PEERS / "openvino_worker.py")], options)


def _openvino(args: argparse.Namespace) -> bool:
    return args.openvino is not None and shutil.which(args.openvino) is not None


def type_of(file: Path) -> str:
    """The type of weights in a name such as MODEL.Q4_0.gguf, else what the file says."""
    name = file.stem.rpartition(".")[2]
    if "Q" in name.upper():
        return name
    return LlamaFileType(GgufFile(file).metadata["general.file_type"]).name.removeprefix("MOSTLY_")
