"""Lossy rules of verification: their names, and tables of acceptance, quality and speed for their drafters' pages."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from origin import origin_line
from policy_tables import rate
from reading import markdown_table, quotient, read, with_interval

from foredraft.files.provenance import short_commit

RESULTS = Path(__file__).resolve().parent / "results" / "lossy.jsonl"
SPEEDS = "lossy_speed.jsonl"
"""Name of the file of speeds, beside the other one."""
EXACT, NONE, FIXED_ARM = "exact", "none", ", fixed size"
SAMPLES = 2000
"""Of the bootstrap."""
TYPICAL = (
    *(f"typical,epsilon={epsilon:g}" for epsilon in (0.01, 0.03, 0.09, 0.2, 0.3)),
    "typical,epsilon=0.09,delta=0.1",
    "typical,epsilon=0.3,delta=0.3",
)
"""Delta is the paper's sqrt(epsilon), and two others."""
APPROXIMATE = (
    *(f"approximate,top_k={k}" for k in (2, 3, 5)),
    *(f"approximate,min_block={size}" for size in (2, 3)),
    "approximate,top_k=2,min_block=2",
    *(f"approximate,distance=2,ordered={ids}" for ids in ("32x41", "0x49151")),
)
"""Of SmolLM2, ids 32 to 41 are the digits in their order; those of the whole vocabulary have none."""
SIZES = {"medusa": "three nodes of the tree", "blockwise": "the whole chain"}
"""Of the drafts of a fixed size, by the drafter."""
RULES = {"medusa": TYPICAL, "blockwise": APPROXIMATE}
"""Lossy rules by the drafter of their paper."""
FLOAT = "float32"
PLAIN, JOINT = "original", "medusa2"
"""Names of the targets."""


class Cell(NamedTuple):
    """What is decoded, and how; ``count``: prompts of each file, ``weights``: of target and head."""

    target: str
    drafter: str
    rule: str
    temperature: float
    count: int
    tokens: int
    weights: str = FLOAT

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Cell":
        """The cell of a line, or what a line has for one."""
        return cls(**{name: line[name] for name in cls._fields if name in line})


def rules_of(drafter: str, temperature: float) -> list[str]:
    """Those that differ at this temperature: under typical acceptance greedy rows are exact."""
    return [EXACT, *(rule for rule in RULES[drafter] if temperature or not rule.startswith("typical"))]


def _shown(texts: Sequence[dict], above: str, below: str, form: str = "") -> str:
    """A sum over another with its bootstrap interval; ``form`` exp: of -log-likelihood, so a perplexity."""

    def of(some: Sequence[dict]) -> float:
        ratio = sum(text[above] for text in some) / max(1, sum(text[below] for text in some))
        return math.exp(-ratio) if form == "exp" else ratio

    return with_interval(texts, of, SAMPLES)


def row_of(texts: Sequence[dict]) -> list[str]:
    """Acceptance and quality of a cell."""
    answered = [{**text, "asked": 1} for text in texts if text["right"] is not None]
    sampled = all(text["logp"] is not None for text in texts)
    return [
        _shown(texts, "tokens", "forwards"),
        _shown(texts, "logp", "tokens", "exp") if sampled else "-",
        _shown(texts, "logp_1", "tokens", "exp"),
        f"{sum(text['best'] for text in texts) / sum(text['tokens'] for text in texts):.2f}",
        f"{sum(text['repeated'] for text in texts) / max(1, sum(text['grams'] for text in texts)):.2f}",
        _shown(answered, "right", "asked") if answered else "-",
    ]


COLUMNS = ["acceptance length", "perplexity at T", "perplexity at T = 1", "best tokens", "repeated 4-grams", "GSM8K"]


class Speeds:
    """Speed-ups over plain decoding on the same prompts, from a results file; none where it does not exist."""

    def __init__(self, path: Path, drafter: str, weights: str) -> None:
        kinds = read(path) if path.exists() else {}
        self._lines = [
            line for line in kinds.get("speed", []) if (line["drafter"], line["weights"]) == (drafter, weights)
        ]
        self._origins = [each for each in kinds.get("provenance", []) if each["weights"] == weights]

    def __bool__(self) -> bool:
        return bool(self._lines)

    def of(self, rule: str, temperature: float) -> str:
        """All tokens in all seconds, by those of plain decoding, with the interval over prompts; "-" if not run."""
        found = []
        for line in self._lines:
            plain = {run["prompt"]: run for run in line["runs"] if run["arm"] == NONE}
            own = [run for run in line["runs"] if (run["arm"], line["temperature"]) == (rule, temperature)]
            found += [(run, plain[run["prompt"]]) for run in own]
        return with_interval(found, quotient(rate), SAMPLES) if found else "-"

    def about(self) -> str:
        """How they were measured."""
        heat = self._lines[0]["temperature"]
        some = [line for line in self._lines if line["temperature"] == heat]
        tasks = Counter(line["task"] for line in some for run in line["runs"] if run["arm"] == NONE)
        number = ", ".join(f"{count} of {task}" for task, count in tasks.items())
        first = self._lines[0]
        return (
            f"Speed-up over plain decoding: {number}, {first['tokens']} tokens each, one request at a time, as much "
            f"drafted as the policy says, and a fixed size ({SIZES[first['drafter']]}). "
            f"{_origin(self._origins, first['weights'])}."
        )


def _origin(origins: Sequence[dict], weights: str) -> str:
    """The ``origin_line`` of runs of one machine, perhaps at several commits."""
    commits = list(dict.fromkeys(short_commit(each["commit"]) for each in origins))
    several = {"commits": f"commits {', '.join(commits)}"} if len(commits) > 1 else {}
    return origin_line({**origins[-1], **several}, weights)


def table(drafter: str, path: Path = RESULTS) -> str:
    """Acceptance and quality of a drafter's rules by temperature, for its page; nothing where nothing was measured."""
    if not path.exists():
        return ""
    kinds = read(path)
    found = {Cell.of(line): line["texts"] for line in kinds["cell"]}
    rules = [EXACT, *RULES[drafter]]
    parts = []
    for weights in sorted({cell.weights for cell in found}, key=lambda each: each != FLOAT):
        own = [cell for cell in found if cell.weights == weights]
        most = max((cell.count, cell.tokens) for cell in own)
        own = [cell for cell in own if cell.drafter == drafter and (cell.count, cell.tokens) == most]
        if not own:
            continue
        own.sort(key=lambda cell: (cell.temperature, cell.target != PLAIN, rules.index(cell.rule)))
        some = {cell: found[cell] for cell in own}
        origins = [each for each in kinds["provenance"] if each.get("weights", FLOAT) == weights]
        parts += _part(some, origins, Speeds(path.with_name(SPEEDS), drafter, weights))
    if drafter == "medusa" and "answers" in kinds:
        parts.append("\n".join(answers_table(kinds["answers"])))
    if drafter == "medusa" and "training" in kinds:
        (line,) = kinds["training"]
        parts.append(
            f"Medusa-2's target after {line['tokens']:,} training tokens: the KL divergence of its law from the "
            f"original's is {line['validation']['own_loss']:.3f} nats a token on held-out samples of the answers "
            "(the last validation of `foredraft train medusa2`)."
        )
    return "\n\n".join(parts)


def _part(found: dict[Cell, list[dict]], origins: Sequence[dict], speeds: Speeds) -> list[str]:
    """The table of cells with the same weights, and how they were made."""
    lines = []
    for cell in found:
        name = cell.rule if cell.target == PLAIN else "exact, Medusa-2's target"
        shown = name if name.startswith(EXACT) else f"`{name}`"
        speed = [speeds.of(cell.rule + arm, cell.temperature) for arm in ("", FIXED_ARM)] if speeds else []
        lines.append([f"{cell.temperature:g}", shown, *speed, *row_of(found[cell])])
    first = next(iter(found))
    tasks = Counter(text["task"] for text in found[first])
    changed = ", also where Medusa-2 has changed it" if any(cell.target == JOINT for cell in found) else ""
    about = (
        f"{', '.join(f'{number} prompts of {task}' for task, number in tasks.items())}, {first.tokens} tokens at most, "
        f"{origins[0]['model']}. Perplexities of the texts are by the original target's law in float32{changed}; best "
        "tokens: the share that is its most likely token; in brackets the 95 % bootstrap interval over "
        f"prompts. {_origin(origins, first.weights)}. Made by `benchmarks/lossy.py`."
    )
    head = ["T", "rule", *(["speed-up, policy", f"speed-up{FIXED_ARM}"] if speeds else []), *COLUMNS]
    return ["\n".join(markdown_table(head, lines, words=(0, 1))), *([speeds.about()] if speeds else []), about]


def answers_table(lines: Sequence[dict]) -> list[str]:
    """Both targets' perplexity of held-out answers."""
    files = list(dict.fromkeys(line["file"] for line in lines))
    texts = {(line["target"], line["file"]): line["texts"] for line in lines}
    shown = {PLAIN: "original", JOINT: "Medusa-2's"}
    rows = [
        [name, *(_shown(texts[target, file], "logp_1", "tokens", "exp") for file in files)]
        for target, name in shown.items()
    ]
    return markdown_table(["target: perplexity of held-out answers", *files], rows)
