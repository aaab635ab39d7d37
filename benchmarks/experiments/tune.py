"""What ``foredraft tune`` predicts of other sizes than the one it ran, beside what was then measured."""

import functools
from typing import Any

from benchmarks.kit.claims import Claim, points_figure
from benchmarks.kit.experiment import RESULTS, Command, Experiment, Inputs, command, repeated
from benchmarks.kit.reading import markdown_table
from foredraft.bench.tune.candidates import short_spec
from foredraft.heads.formats.tuned import read_tuned

FILE = RESULTS / "tuned.json"


@functools.cache
def facts() -> dict[str, Any]:
    return read_tuned(FILE).facts or {}


def table() -> str:
    """Speed-ups that tune predicted and measured for the bundled model."""
    rows = []
    for each in sorted(facts()["tried"], key=lambda each: -each["measured"]):
        off = each["predicted"] / each["measured"] - 1
        drafter = short_spec(each["drafter"], mark="`")
        rows.append([drafter, f"{each['predicted']:.2f}", f"{each['measured']:.2f}", f"{100 * off:+.0f}%"])
    points = ", ".join(f"{point['speed_up']:.2f} at {point['batch']}" for point in facts()["batches"])
    origin = facts()["provenance"]
    made = f"Commit `{origin['commit']}`, {origin['device']}, {origin['time'][:10]}."
    head = ["drafter", "predicted", "measured", "off by"]
    return "\n".join([*markdown_table(head, rows), "", f"Speed-up by batch size: {points}. {made}"])


def claim() -> Claim:
    """What tune predicted and what was measured."""
    tried = [(short_spec(each["drafter"]), each["measured"], each["predicted"]) for each in facts()["tried"]]
    worst = max(abs(predicted / measured - 1) for _, measured, predicted in tried)
    origin = facts()["provenance"]
    return Claim(
        f"From one run of a method, tune predicts the speed-up of its other sizes: {len(tried)} configurations were "
        f"within {100 * worst:.0f} % of what was then measured.",
        ", ".join(f"{name} {measured:.2f}/{predicted:.2f}" for name, measured, predicted in tried),
        f"bundled model; {origin['device']}, commit {origin['commit']}, {origin['time'][:10]}",
        lambda: points_figure("Speed-up", [each[1:] for each in tried], "measured", "predicted"),
    )


def _commands(inputs: Inputs) -> list[Command]:
    methods = ["prompt_lookup", "draft_model", "eagle1", "eagle2", "eagle3", "medusa"]
    words = ["tune", "--chat", "--count", "3", "--verify", "10", *repeated("--batch-size", ["1", "4", "8"])]
    words += [*repeated("--prompts", inputs.questions("humaneval", "gsm8k")), *repeated("-d", methods)]
    return [command("foredraft", *words, "--out", FILE)]


EXPERIMENT = Experiment(
    name="tune",
    question="what tune predicted: results.md",
    tables={"docs/results.md": {"tune": table}},
    claims={"tune": claim},
    hours=0.3,
    needs=lambda inputs: (inputs.prompts,),
    commands=_commands,
    results=("tuned.json",),
)
