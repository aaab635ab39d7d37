"""Tries the wheel in an empty environment, by a Python and by versions of torch and transformers.

    scripts/wheel    # makes dist/foredraft-*.whl
    python -m benchmarks.tools.support python3.10 --torch 2.11.0 --transformers 5.17.0
    python -m benchmarks.tools.support python3.13    # the newest torch and transformers that pip finds

Installs the wheel with these versions outside the repository, then runs ``foredraft demo`` (which fails if drafts
change a token), the bundled model in int8 on the native engine, and the tests of TESTS. Appends a line to
benchmarks/results/support.jsonl, which docs/support.md shows. A step that fails ends the run, and is in the line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kit.experiment import ROOT
from benchmarks.kit.reading import markdown_table
from foredraft.files.provenance import short_commit

RESULTS = Path("benchmarks/results/support.jsonl")
TESTS = ("tests/core", "tests/test_hf_generate.py")
TOOLS = ("pytest>=8.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "beartype>=0.20", "scipy>=1.11")
INT8 = """
import foredraft
with foredraft.load("sample", weights="int8") as g:
    assert g.generate("Once upon a time", max_new_tokens=16).tokens, "no tokens"
    print(g.engine.target.isa)
"""
VERSIONS = """
import json, platform, torch, transformers
print(json.dumps([platform.python_version(), torch.__version__, transformers.__version__]))
"""


def pinned(name: str, version: str | None) -> str:
    return f"{name}=={version}" if version else name


def steps(python: Path, folder: Path, packages: list[str]) -> dict[str, tuple[list[str], Path]]:
    """Commands of a run by name, and the folder in which each runs."""
    own = str(python)
    workers = ["-n", str(os.cpu_count() or 1), "--dist", "loadfile"]
    return {
        "install": ([own, "-m", "pip", "install", "-q", "--no-compile", *packages], folder),
        "demo": ([str(python.parent / "foredraft"), "demo"], folder),
        "native engine": ([own, "-c", INT8], folder),
        "tests": ([own, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *workers, *TESTS], ROOT),
    }


def tried(command: list[str], folder: Path) -> dict[str, Any]:
    """Run a command: its exit status, seconds and last line."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other on a busy machine take minutes
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    return {
        "status": done.returncode,
        "seconds": round(time.monotonic() - began),
        "last_line": lines[-1].strip("= ") if lines else "",
    }


def table() -> str:
    """A row for each run, the latest of a combination alone."""
    head = ["Python", "torch", "transformers", "demo", "native engine", "tests", "when, commit"]
    runs, lines = {}, []
    for line in (ROOT / RESULTS).read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        runs[run.get("python", ""), run.get("torch", ""), run.get("transformers", "")] = run
    for versions, run in sorted(runs.items()):
        shown = [_shown(run.get(step), step == "tests") for step in ("demo", "native engine", "tests")]
        lines.append([*versions, *shown, f"{run['date']}, {short_commit(run['commit'])}"])
    return "\n".join(markdown_table(head, lines, words=range(len(head))))


def _shown(step: dict[str, Any] | None, counted: bool) -> str:
    if step is None:
        return "not run"
    return ("works" if not counted else step["last_line"].partition(" in ")[0]) if step["status"] == 0 else "**fails**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="command or path of a Python")
    parser.add_argument("--torch", help="its version; the newest by default")
    parser.add_argument("--transformers", help="its version; the newest by default")
    options = parser.parse_args()
    wheels = sorted(ROOT.glob("dist/foredraft-*.whl"))
    if not wheels:
        raise SystemExit("There is no wheel in dist/: run scripts/wheel first.")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([options.python, "-m", "venv", str(folder / "env")], check=True)
        python = folder / "env" / "bin" / "python"
        packages = [pinned("torch", options.torch), pinned("transformers", options.transformers)]
        record: dict[str, Any] = {"kind": "run", "date": time.strftime("%Y-%m-%d"), "commit": commit, "asked": packages}
        for step, (command, place) in steps(python, folder, [str(wheels[-1]), *packages, *TOOLS]).items():
            record[step] = tried(command, place)
            print(step, record[step], flush=True)
            if record[step]["status"]:
                break
            if step == "install":
                found = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True, check=True)
                record["python"], record["torch"], record["transformers"] = json.loads(found.stdout)
    with (ROOT / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    raise SystemExit(int(any(each["status"] for each in record.values() if isinstance(each, dict))))


if __name__ == "__main__":
    main()
