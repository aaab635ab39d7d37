"""Provenance of a results file: its first line."""

import platform
import subprocess
import time
from collections.abc import Sequence

import torch
import transformers

import foredraft
from foredraft.files.provenance import processor, short_commit


def provenance(command: str, **facts: object) -> dict:
    """Commit, versions, machine and command; ``facts`` are the benchmark's own."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    dirty = bool(subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True).stdout.strip())
    return {
        "kind": "provenance",
        "commit": commit + ("+changes" if dirty else ""),
        "foredraft": foredraft.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": processor(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        **facts,
    }


def origin_line(origin: dict, stored: str = "float32", among: Sequence[dict] = ()) -> str:
    """Machine (a GPU, if it has one as ``gpu``), how the weights are ``stored``, versions and commit, as part of a
    sentence; of a run ``among`` several, the commits of all."""
    commits = list(dict.fromkeys(short_commit(each["commit"]) for each in among or [origin]))
    shown = origin.get("commits") or f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    date = origin.get("time", origin.get("date", ""))[:10]
    threads = f"{origin['threads']} thread{'s' if origin['threads'] > 1 else ''}"
    return (
        f"{origin.get('gpu') or f'{threads} on ' + origin['device']}, {stored}, torch {origin['torch']}, transformers "
        f"{origin['transformers']}, {shown}, {date}"
    )
