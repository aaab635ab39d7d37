"""Generated tables from JSON Lines files: README.md, docs/results.md, docs/heads.md, docs/performance.md, docs/methods.

python benchmarks/summary.py            # print the summary of benchmarks/results/speed.jsonl
python benchmarks/summary.py --write    # write all tables between the markers of the pages
"""

import argparse
import re
import statistics
from pathlib import Path

import heads_summary
import policy_tables
import prediction
import serving
import step
from method_tables import TABLES
from origin import origin_line
from reading import quartiles, read

from foredraft.bench.measure.records import read_runs
from foredraft.bench.measure.summary import PLAIN, THEIRS, Key, Summary, summarise, temperature_label
from foredraft.bench.report import tables
from foredraft.bench.tune.candidates import short_spec
from foredraft.heads.formats.tuned import read_tuned

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.jsonl"
RUNS = [ROOT / "benchmarks" / "results" / name for name in ("sample-16m.jsonl", "sequoia.jsonl", "target-65m.jsonl")]
TASKS = ("humaneval", "gsm8k", "mt_bench")
TITLES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt_bench": "MT-bench"}
TUNED = ROOT / "benchmarks" / "results" / "tuned.json"
PAIRS = (  # title, faster arm, slower arm
    ("plain decoding / transformers' `generate`", "plain", "hf_plain"),
    ("draft model / transformers' assisted generation", "draft_model", "hf_assisted"),
    ("draft model / transformers' `generate`", "draft_model", "hf_plain"),
    ("draft model / our plain decoding", "draft_model", "plain"),
    ("prompt lookup / our plain decoding", "prompt_lookup", "plain"),
    ("transformers' assisted generation / its `generate`", "hf_assisted", "hf_plain"),
    ("transformers' prompt lookup / its `generate`", "hf_lookup", "hf_plain"),
)


def markdown(kinds: dict[str, list[dict]]) -> str:
    """All results of a run, as Markdown."""
    runs, origin = kinds["run"], kinds["provenance"][0]
    prompts = {(run["task"], run["prompt"]) for run in runs}
    head = "".join(f" {TITLES[task]} |" for task in TASKS)
    rule = "| --- |" + " ---: |" * len(TASKS)
    lines = [f"| speed-up, median (quartiles) |{head}", rule]
    lines += [f"| {title} | {' | '.join(_ratios(runs, top, bottom))} |" for title, top, bottom in PAIRS]
    lines += ["", f"| tokens per second, median (quartiles) |{head}", rule]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        cells = [quartiles([r["tokens"] / r["seconds"] for r in _of(runs, arm, task)]) for task in TASKS]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", f"| acceptance length |{head}", rule]
    for arm in ("draft_model", "prompt_lookup"):
        cells = [statistics.mean(r["stats"]["acceptance_length"] for r in _of(runs, arm, task)) for task in TASKS]
        lines.append(f"| {arm} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    lines += ["", *_costs(kinds), *_memory(kinds), ""]
    lines.append(
        f"All arms produced the same tokens on {_agreeing(runs)} of {len(prompts)} prompts. {origin['target']} with "
        f"{origin['draft']}, {origin['dtype']}, greedy, {origin['new_tokens']} new tokens, prefill included, "
        f"{origin['threads']} threads on {origin['device']}, torch {origin['torch']}, transformers "
        f"{origin['transformers']}, commit `{origin['commit'][:9]}`, {origin['date']}. Made by "
        f"`{origin['command']}`; every run is in `benchmarks/results/speed.jsonl`."
    )
    return "\n".join(lines)


def _of(runs: list[dict], arm: str, task: str) -> list[dict]:
    return [run for run in runs if run["arm"] == arm and run["task"] == task]


def _ratios(runs: list[dict], top: str, bottom: str) -> list[str]:
    """Ratios of paired prompts, so that a slow minute of the machine cancels out."""
    cells = []
    for task in TASKS:
        slow = {run["prompt"]: run["seconds"] for run in _of(runs, bottom, task)}
        cells.append(quartiles([slow[run["prompt"]] / run["seconds"] for run in _of(runs, top, task)]))
    return cells


def _agreeing(runs: list[dict]) -> int:
    outputs: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for run in runs:
        outputs.setdefault((run["task"], run["prompt"]), set()).add(tuple(run["output"]))
    return sum(len(texts) == 1 for texts in outputs.values())


def _costs(kinds: dict[str, list[dict]]) -> list[str]:
    lines = []
    for cost in kinds.get("cost", []):
        ratios = [seconds / cost["seconds"][0] for seconds in cost["seconds"]]
        lines += [
            f"| rows in a forward |{''.join(f' {rows} |' for rows in cost['rows'])}",
            "| --- |" + " ---: |" * len(ratios),
            f"| milliseconds |{''.join(f' {1e3 * seconds:.1f} |' for seconds in cost['seconds'])}",
            f"| relative to one row |{''.join(f' {ratio:.2f} |' for ratio in ratios)}",
            "",
        ]
    return lines


def _memory(kinds: dict[str, list[dict]]) -> list[str]:
    lines = []
    for memory in kinds.get("memory", []):
        peak = memory["mebibytes"]
        for ours, theirs in (("plain", "hf_plain"), ("draft_model", "hf_assisted")):
            ratio = peak[ours] / peak[theirs]
            lines.append(
                f"Peak memory of {ours}: {peak[ours]:.0f} MiB, {ratio:.2f} of {theirs}'s {peak[theirs]:.0f} MiB."
            )
    return lines


def methods() -> str:
    """The table of methods of docs/methods/README.md."""
    from foredraft.drafters import METHODS

    lines = ["| drafter | what it does | children | lossless | needs |", "| --- | --- | --- | --- | --- |"]
    for name, method in METHODS.items():
        laws = ", ".join(law.value for law in method.laws) or "-"
        page, sound = f"[`{name}`]({name}.md)", "yes" if method.lossless else "no"
        lines.append(f"| {page} | {method.what} | {laws} | {sound} | {method.needs} |")
    return "\n".join(lines)


def filled(text: str, blocks: dict[str, str]) -> str:
    """Insert each block between its markers, ``<!-- name -->`` and ``<!-- /name -->``."""
    for name, block in blocks.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise SystemExit(f"The page has no markers for {name}.")
        text = f"{before}{begin}{block}\n{end}{after}"
    return text


def short_table(summary: Summary) -> str:
    """Means over tasks of all methods; one column per model and temperature."""
    settings = summary.settings
    names = [f"{setting.model}, {temperature_label(setting.temperature)}" for setting in settings]
    arms = list(dict.fromkeys(arm for setting in settings for arm in summary.arms(setting)))
    best = [summary.best(setting) for setting in settings]
    lines = [f"| method | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for arm in arms:
        cells = []
        for setting, fastest in zip(settings, best, strict=True):
            speed, length = summary.mean(setting, arm)
            number = "" if speed is None else f"{speed:.2f}"
            number = f"**{number}**" if arm == fastest else number
            cells.append(" / ".join([number] + ([] if length is None else [f"{length:.2f}"])) if number else "")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def floor(summary: Summary, least: float = 0.95) -> str:
    """Our drafters' cells with a speed-up below ``least``, by setting."""
    lines = []
    for setting in summary.settings:
        cells = [
            cell
            for arm in summary.arms(setting)
            for task in summary.tasks(setting)
            if arm != PLAIN and not arm.startswith(THEIRS)
            if (cell := summary.cell(setting, task, arm)) and cell.speed_up and cell.total_speed_up
        ]
        title = f"{setting.model}, {temperature_label(setting.temperature)}, {len(cells)} cells"
        totals = [(cell.total_speed_up or 0.0, cell.key) for cell in cells]
        medians = [(cell.speed_up.median if cell.speed_up else 0.0, cell.key) for cell in cells]
        lines.append(
            f"- {title}: {_below(totals, least)} by all tokens over all seconds, {_below(medians, least)} by medians"
        )
    return "\n".join([f"Cells with a speed-up below {least:g}:", "", *lines])


def _below(cells: list[tuple[float, Key]], least: float) -> str:
    """The number of cells below ``least``, and their names."""
    low = sorted(cell for cell in cells if cell[0] < least)
    names = ", ".join(f"{key.arm} on {key.task} {speed:.2f}" for speed, key in low)
    return f"{len(low)}{f' ({names})' if names else ''}"


def provenance_line(summary: Summary) -> str:
    """Provenance in one line."""
    origin = summary.file.provenance[0]
    runs = len(summary.file.runs)
    agreed = sum(share.part for share in summary.agreement.values())
    of = sum(share.of for share in summary.agreement.values())
    return (
        f"{runs:,} calls on six tasks; all lossless arms produced the same tokens on {agreed} of {of} greedy turns. "
        f"{origin_line(origin)}. Made by `scripts/results`."
    )


def measured(both: Summary, name: str) -> str:
    """Mean results of a method's arms; empty if it was not run."""
    lines = []
    for setting in both.settings:
        for arm in both.arms(setting):
            speed, length = both.mean(setting, arm)
            if speed is not None and length is not None and _method(both, arm) == name:
                title = "" if arm == name else f"`{arm}`, "
                place = f"{setting.model}, {temperature_label(setting.temperature)}"
                lines.append(f"{title}{place}: {speed:.2f}x, {length:.2f} tokens per forward")
    title = "Mean of six tasks, speed-up and acceptance length ([all results](../results.md))"
    return f"{title}: {'; '.join(lines)}." if lines else ""


def _method(both: Summary, arm: str) -> str:
    """The page of an arm's method; the arm may be renamed."""
    if arm == "pruned":  # an ordinary draft model with a page of its own
        return "pruned_drafts"
    for origin in both.file.provenance:
        renamed = re.search(rf"-d {re.escape(arm)}=(\w+)", origin["command"])
        if renamed:
            return renamed[1]
    return re.split("[:,]", arm)[0]


def method_pages(both: Summary) -> dict[Path, str]:
    """The pages of all methods, with their measurements."""
    found = {}
    for path in sorted((ROOT / "docs" / "methods").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition(f"<!-- measured {path.stem} -->\n")
        _, end, after = rest.partition("<!-- /measured -->")
        if begin and end:
            own = TABLES[path.stem]() if path.stem in TABLES else ""
            block = "\n\n".join(part for part in (measured(both, path.stem), own) if part)
            found[path] = f"{before}{begin}{block}{chr(10) if block else ''}{end}{after}"
    return found


def predictions() -> str:
    """Speed-ups that tune predicted and measured for the bundled model."""
    tuned = read_tuned(TUNED)
    facts = tuned.facts or {}
    lines = ["| drafter | predicted | measured | off by |", "| --- | ---: | ---: | ---: |"]
    for each in sorted(facts["tried"], key=lambda each: -each["measured"]):
        off = each["predicted"] / each["measured"] - 1
        drafter = short_spec(each["drafter"], mark="`")
        lines.append(f"| {drafter} | {each['predicted']:.2f} | {each['measured']:.2f} | {100 * off:+.0f}% |")
    points = ", ".join(f"{point['speed_up']:.2f} at {point['batch']}" for point in facts["batches"])
    origin = facts["provenance"]
    lines += [
        "",
        f"Speed-up by batch size: {points}. Commit `{origin['commit']}`, {origin['device']}, {origin['time'][:10]}.",
    ]
    return "\n".join(lines)


def policy() -> str:
    """Every cell of the policy's benchmark."""
    cells, origin = policy_tables.read()
    facts = f"{origin_line(origin)}. Made by `{origin['command']}`; every run is in `benchmarks/results/policy.jsonl`."
    parts = [policy_tables.by_method(cells), policy_tables.verdict(cells), policy_tables.by_cell(cells), facts]
    return "\n\n".join(parts)


def in_short(both: Summary) -> str:
    """The table of README.md."""
    cells, origin = policy_tables.read()
    setting = next(each for each in both.settings if each.model == "sample" and each.temperature == 0)
    theirs = {arm: both.mean(setting, arm).speed_up for arm in ("transformers", "transformers_assisted")}
    return (
        f"{policy_tables.in_short(cells, 'sample')} {origin_line(origin)}. Made by `python benchmarks/policy.py`. In "
        f"the [run of all methods on six tasks](docs/results.md#all-methods), greedy, transformers' own `generate` is "
        f"at {theirs['transformers']:.2f} of our plain decoding and its assisted generation at "
        f"{theirs['transformers_assisted']:.2f}; all lossless arms produced the same tokens on "
        f"{sum(share.part for share in both.agreement.values())} of "
        f"{sum(share.of for share in both.agreement.values())} greedy turns."
    )


def pages() -> dict[Path, str]:
    """The up-to-date text of every page with generated tables."""
    both = summarise([read_runs(path) for path in RUNS])
    served = {"serving": serving.table()} if serving.RESULTS.exists() else {}
    blocks = {
        "README.md": {"results": in_short(both)},
        "docs/methods/README.md": {"methods": methods()},
        "docs/results.md": {
            "means": f"{short_table(both)}\n\n{provenance_line(both)}",
            "floor": floor(both),
            "policy": policy(),
            "runs": tables.markdown(both, complete=True),
            "tune": predictions(),
            "speed": markdown(read(RESULTS)),
        },
        "docs/performance.md": {"step": step.table()},
        "docs/serving.md": {"prediction": prediction.table()} | served,
        "docs/heads.md": {"heads": heads_summary.markdown(read(heads_summary.RESULTS))},
    }
    pages = {ROOT / page: filled((ROOT / page).read_text(encoding="utf-8"), some) for page, some in blocks.items()}
    return pages | method_pages(both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="write the pages")
    args = parser.parse_args()
    if args.write:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
    else:
        print(markdown(read(args.results)))


if __name__ == "__main__":
    main()
