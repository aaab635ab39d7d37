"""Export runs in Spec-Bench's answer format, for its scripts ``evaluation/speed.py`` and ``equal.py``."""

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from foredraft.bench.measure.records import Run
from foredraft.core.errors import DataError, OptionError
from foredraft.files.outputs import files_in_folder, written_by


def write_answers(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write one file per model, arm and temperature, from successful runs at batch size 1.

    ``accept_lengths`` has the right values, but not in time order.

    Raises:
        OptionError: the runs have no outputs, which the format needs, or a file of the same name is another's.
        DataError: the folder cannot be written.
    """
    found: dict[tuple[str, str, float], dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        if run.batch == 1 and not run.error and run.repeat == 0:
            if run.tokens and not run.outputs[0].output:
                raise OptionError("The runs have no outputs, which Spec-Bench's format needs: run without --no-texts.")
            questions = found.setdefault((run.model, run.arm, run.temperature), {})
            questions.setdefault((run.task, run.prompts[0]), []).append(run)
    paths = []
    try:
        with files_in_folder(folder, "bench") as partial:
            for settings, questions in found.items():
                name = _name(*settings)
                answers = [_answer(name, turns) for turns in map(_from_first, questions.values()) if turns]
                text = "".join(json.dumps(answer) + "\n" for answer in answers)
                (partial / f"{name}.jsonl").write_text(text, encoding="utf-8")
                paths.append(folder / f"{name}.jsonl")
    except OSError as error:
        raise DataError(f"Cannot write answers to {folder}: {error.strerror}.") from None
    return paths


def _name(model: str, arm: str, temperature: float) -> str:
    return "".join(c if c.isalnum() or c in "-_.+" else "-" for c in f"{model}-{arm}-temperature-{temperature}")


def _from_first(runs: Sequence[Run]) -> list[Run]:
    """The turns of a prompt, up to the first that failed."""
    turns = {run.turn: run for run in runs}
    return [turns[turn] for turn in takewhile(turns.__contains__, range(len(turns)))]


def _answer(name: str, turns: Sequence[Run]) -> dict[str, Any]:
    first = turns[0]
    number = first.prompts[0]
    choice = {
        "index": 0,
        "turns": [run.outputs[0].text for run in turns],
        "decoding_steps": [run.forwards for run in turns],
        "new_tokens": [run.tokens for run in turns],
        "wall_time": [run.seconds for run in turns],
        "accept_lengths": [length for run in turns for length in run.lengths],
    }
    return {
        "question_id": int(number) if number.isdigit() else number,
        "category": first.category or first.task,
        "answer_id": f"{name}-{number}",
        "model_id": name,
        "choices": [choice],
        "tstamp": 0.0,
        **written_by("bench"),
    }
