"""Where a result comes from: versions, hardware, commit and command, without the machine's folders."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.core.version import __version__

if TYPE_CHECKING:
    from torch import nn


def provenance(command: str | None = None) -> dict[str, Any]:
    """Versions, hardware, commit and command of this process. Absolute paths are cut to their last two parts."""
    import torch  # takes seconds; tables of results need none

    words = sys.argv if command is None else command.split()
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": " ".join(["foredraft", *map(shortened, words[1:])]),
        "foredraft": __version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
    }


def short_commit(commit: str) -> str:
    """Nine digits of a commit, and all that says that the source tree had changes: "0123456789ab+changes"."""
    digits, plus, changes = commit.partition("+")
    return digits[:9] + plus + changes


def fingerprint(net: "nn.Module") -> str:
    """A hash of the names, shapes and some values of all weights, rounded to bfloat16, so that it does not depend on
    the precision in which the network is loaded."""
    digest = hashlib.sha256()
    for name, weight in net.named_parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // 1024)].bfloat16().float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:16]


def short(word: str) -> str:
    """The file name of an absolute path; other strings unchanged."""
    return Path(word).name if word.startswith("/") else word


def two_parts(name: str) -> str:
    """The last two parts of a file's or folder's path, however it is given; other names unchanged."""
    path = Path(name).expanduser()
    return "/".join(path.resolve().parts[1:][-2:]) if path.exists() else name


def relative_name(name: str, folder: Path) -> str:
    """A model's folder as a path from another folder, so that both can be moved together; other names unchanged."""
    return os.path.relpath(Path(name).expanduser(), folder) if Path(name).expanduser().is_dir() else name


def shortened(word: str) -> str:
    """A word of a command or a spec (NAME=METHOD:PATH+PATH,...) with each absolute path cut to its last two parts."""
    parts = re.split(r"([:=,+\[\]])", word)
    return "".join("/".join(Path(each).parts[1:][-2:]) if each.startswith("/") else each for each in parts)


def processor() -> str:
    """The processor's model name, from /proc/cpuinfo on Linux."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the source tree, with "+changes" if it has any; None for an installed package."""
    here = Path(__file__).parents[1]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        state = subprocess.run(["git", "status", "--porcelain", "."], cwd=here, capture_output=True, text=True)
    except OSError:
        return None
    return None if head.returncode else head.stdout.strip() + ("+changes" if state.stdout.strip() else "")
