"""Acceptance against training tokens, from the logs of training runs: writes benchmarks/results/scaling.jsonl.

The runs are those of ``scripts/sample-heads``. Their logs record, at each validation, the greedy acceptance length of a
chain of five in the real loop, on held-out samples that are the same for all runs. All points of a run share one
learning-rate schedule, so the rate is still high at the early ones, for all recipes alike.

    python benchmarks/scaling.py eagle=OUT/eagle/log.jsonl eagle3=OUT/eagle3/log.jsonl
"""

import argparse
import json
from pathlib import Path

from origin import provenance

RESULTS = Path(__file__).resolve().parent / "results" / "scaling.jsonl"
POINTS = (1, 2, 4, 8)
"""Training tokens, in millions."""


def points(recipe: str, log: Path) -> list[dict]:
    """The validation nearest to each of the points."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    seen = [line for line in lines if "acceptance_length" in line.get("validation", {})]
    nearest = [min(seen, key=lambda line: abs(line["tokens"] - 1e6 * point)) for point in POINTS]
    return [
        {"kind": "run", "recipe": recipe, "step": line["step"], "tokens": line["tokens"], **line["validation"]}
        for line in nearest
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", help="RECIPE=LOG")
    args = parser.parse_args()
    found = [line for text in args.logs for line in points(text.partition("=")[0], Path(text.partition("=")[2]))]
    origin = provenance("scripts/sample-heads CORPUS OUT eagle eagle3; python benchmarks/scaling.py", target="sample")
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in (origin, *found)), encoding="utf-8")


if __name__ == "__main__":
    main()
