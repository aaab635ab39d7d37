"""Splits files of ``foredraft answers``: one to train on, and of each file the answers to prompts that are held out.

python -m benchmarks.tools.held_out T0.jsonl T1.jsonl --out FOLDER
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def split(files: Sequence[Path], folder: Path, count: int) -> None:
    """Write the answers without those to ``count`` prompts that all files have, and of each file those alone."""
    rows = {file: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files}
    prompts = {file: {_prompt(row): None for row in some} for file, some in rows.items()}
    common = [each for each in prompts[files[-1]] if all(each in own for own in prompts.values())]
    held = set(common[-count:])
    folder.mkdir(parents=True, exist_ok=True)
    kept = [row for some in rows.values() for row in some if _prompt(row) not in held]
    for name, some in {"train": kept, **{f"held_{file.stem}": own for file, own in rows.items()}}.items():
        chosen = some if name == "train" else [row for row in some if _prompt(row) in held]
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _prompt(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row["ids"][: row["prompt_length"]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--count", type=int, default=200, help="answers of each file that are held out")
    args = parser.parse_args()
    split(args.files, args.out, args.count)
