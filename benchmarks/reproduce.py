"""Makes the figures and tables of README and site again: all of them, or some by name.

    scripts/reproduce --list                                     # what there is, and how long it takes
    scripts/reproduce real engines                               # two of them, then the pages
    scripts/reproduce real --model MODEL --prompts mine.jsonl    # the same tables for your model and prompts

An experiment is one command or several. Its old results are moved to build/reproduce/before, its new ones are written
to benchmarks/results, and then its pictures and all pages are made again. A finished command is not run again (--again
does), and most continue where they were interrupted. With --model or --prompts nothing in the repository is changed:
results, tables and picture go to build/reproduce/own.*. Stop other programs: most numbers are times.
"""

import argparse
import hashlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kit import catalog, claims
from benchmarks.kit.experiment import ROOT, Command, Experiment, Inputs, command

STATE = ROOT / "build" / "reproduce"


def every() -> dict[str, Experiment]:
    """The experiments that can be reproduced."""
    return {name: each for name, each in catalog.every().items() if each.hours}


def mark(name: str, command: Command) -> Path:
    """The file that says that a command of a part is finished."""
    return STATE / "finished" / f"{name}-{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]}"


def absent(part: Experiment, inputs: Inputs) -> list[str]:
    return [str(path) for path in part.needs(inputs) if not path.exists()]


def listed(inputs: Inputs) -> str:
    """A line for each part."""
    lines = []
    for name, part in every().items():
        done = all(mark(name, each).exists() for each in part.reproduction(inputs))
        state = "finished" if done else f"needs {', '.join(missing)}" if (missing := absent(part, inputs)) else ""
        lines.append(f"{name:13} {part.hours:5.1f} h  {part.question}{f'  [{state}]' if state else ''}")
    total = sum(part.hours for part in every().values())
    return "\n".join([*lines, f"{'all':13} {total:5.1f} h"])


def run(name: str, inputs: Inputs, dry: bool) -> bool:
    """Run the commands of a part that are not finished; whether all are."""
    part = every()[name]
    commands = [each for each in part.reproduction(inputs) if not mark(name, each).exists()]
    started = STATE / "finished" / f"{name}-started"
    if commands and not dry and not started.exists():
        set_aside(part, inputs)
        started.parent.mkdir(parents=True, exist_ok=True)
        started.touch()
    for each in commands:
        print(f"{name}: {shlex.join(each)}", flush=True)
        if dry:
            continue
        began = time.monotonic()
        status = subprocess.run(each, cwd=ROOT).returncode
        if status:
            print(f"{name}: exit status {status}. The same command continues.", file=sys.stderr)
            return False
        mark(name, each).write_text(f"{(time.monotonic() - began) / 3600:.2f} h\n", encoding="utf-8")
    return True


def set_aside(part: Experiment, inputs: Inputs) -> None:
    """Move old results away: benchmarks that can continue would take them for their own."""
    if inputs.own:
        return
    before = STATE / "before"
    before.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "benchmarks" / "results" / name for name in part.files):
        if path.exists():
            path.replace(before / path.name)


def filled_in(name: str, inputs: Inputs) -> None:
    """Draw the pictures of an experiment, and write all tables into the pages; of a reader's own run, print them."""
    part, out = every()[name], inputs.state / "own.jsonl"
    if not inputs.own:
        names = [*part.figures, *(f"results_{name}" for name in part.claims)]
        draw = ["--draw", *names] if names else []
        subprocess.run(command("benchmarks.pages.summary", *draw, "--write"), cwd=ROOT, check=True)
    elif out.exists() and part.shown:
        picture = out.with_suffix(".svg")
        picture.write_text(claims.drawn(part.claims[name](out)), encoding="utf-8")
        print(f"{part.shown(out)}\n\nWrote {out.relative_to(ROOT)} and its picture, .svg.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments; default: all")
    parser.add_argument("--list", action="store_true", help="name the experiments, their hours, and what is missing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--again", action="store_true", help="run finished commands again")
    parser.add_argument("--model", help="yours, in place of SmolLM2-135M: a folder, a hub name or a GGUF file")
    parser.add_argument("--prompts", nargs="+", default=[], help="yours: prompt files, in place of EAGLE's")
    parser.add_argument("--models", type=Path, default=Path("../shared/models"), help="folder of target-65m, draft-6m")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of prompts/ and corpus/")
    parser.add_argument("--heads", type=Path, default=Path("build/heads"), help="heads that scripts/sample-heads makes")
    parser.add_argument(
        "--smollm2", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="or a folder; engines need one"
    )
    parser.add_argument(
        "--head", type=Path, default=Path("src/foredraft/models/smollm2-eagle3"), help="of the real model"
    )
    parser.add_argument(
        "--openvino", type=Path, default=Path("build/peers/openvino/bin/python"), help="a Python with it"
    )
    args = parser.parse_args()
    inputs = Inputs(
        args.models, args.data / "prompts", args.data / "corpus", args.heads, args.smollm2, args.head,
        args.openvino, args.model, args.prompts, STATE,
    )  # fmt: skip
    if args.list:
        print(listed(inputs))
        return
    own = [name for name, each in every().items() if each.own]
    names = args.names or (own if inputs.own else list(every()))
    if unknown := [name for name in names if name not in every()]:
        parser.error(f"There is no experiment {', '.join(unknown)}. Known: {', '.join(every())}.")
    if inputs.own and (other := [name for name in names if name not in own]):
        parser.error(f"--model and --prompts are for {', '.join(own)}, not for {', '.join(other)}.")
    raise SystemExit(0 if make(names, inputs, again=args.again, dry=args.dry_run) else 1)


def make(names: Sequence[str], inputs: Inputs, *, again: bool, dry: bool) -> bool:
    """Run parts in order, each as far as it comes; whether all could be finished."""
    hours = sum(every()[name].hours for name in names)
    print(f"{len(names)} experiment{'s' * (len(names) > 1)}, about {hours:.1f} hours.", flush=True)
    good = True
    for name in names:
        if missing := absent(every()[name], inputs):
            print(f"{name}: skipped, since there is no {', '.join(missing)}; --help has the options.", file=sys.stderr)
            good = False
            continue
        if again:
            for path in (STATE / "finished").glob(f"{name}-*"):
                path.unlink()
        good = run(name, inputs, dry) and good
        if not dry:
            filled_in(name, inputs)
    return good


if __name__ == "__main__":
    main()
