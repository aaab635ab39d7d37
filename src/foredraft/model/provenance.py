"""What made a file: versions, commit, command, machine; written into it or beside it."""

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from foredraft.core.version import __version__


def provenance(command: str | None = None) -> dict[str, Any]:
    """Facts about this very process. Paths in the command are cut to their last two parts: machines differ."""
    words = sys.argv if command is None else command.split()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(["foredraft", *map(_without_folders, words[1:])]),
        "foredraft": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
    }


def stored_acceptance_length(folder: str) -> float | None:
    """Tokens a target forward that a head or draft had when it was trained, greedy; None where no file says so."""
    try:
        validation = json.loads((Path(folder) / "provenance.json").read_text(encoding="utf-8"))["validation"]
        return max(float(validation["acceptance_length"]), 1.0)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def short(word: str) -> str:
    """A path without what depends on the machine."""
    return Path(word).name if word.startswith("/") else word


def _without_folders(word: str) -> str:
    """A word of a command, each absolute path in it (NAME=METHOD:PATH,...) cut to its last two parts."""
    parts = re.split(r"([:=,])", word)
    return "".join("/".join(Path(each).parts[1:][-2:]) if each.startswith("/") else each for each in parts)


def processor() -> str:
    """The processor's own name where Linux tells it, such as AMD EPYC."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the source tree, with a plus where there are changes; None for an installed package."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        state = subprocess.run(["git", "status", "--porcelain", "."], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return None if head.returncode else head.stdout.strip() + ("+" if state.stdout.strip() else "")
