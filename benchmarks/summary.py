"""Generated tables from JSON Lines files, in README.md and pages of docs.

python benchmarks/summary.py            # print the summary of benchmarks/results/speed.jsonl
python benchmarks/summary.py --write    # write all tables between the markers of the pages
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import engine_tables
import engines
import heads_summary
import policy_tables
import prediction
import real_model
import serving
import step
from method_tables import TABLES
from origin import origin_line
from policy_tables import TITLES
from reading import quartiles, read

from foredraft.bench.tune.candidates import short_spec
from foredraft.heads.formats.tuned import read_tuned

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.jsonl"
TASKS = tuple(TITLES)
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
        f"{origin['draft']}, greedy, {origin['new_tokens']} new tokens, prefill included, {origin_line(origin)}. Made "
        f"by `{origin['command']}`; every run is in `benchmarks/results/speed.jsonl`."
    )
    return "\n".join(lines)


def _of(runs: list[dict], arm: str, task: str) -> list[dict]:
    return [run for run in runs if run["arm"] == arm and run["task"] == task]


def _ratios(runs: list[dict], top: str, bottom: str) -> list[str]:
    """Median and quartiles of each task."""
    return [quartiles(_paired([run for run in runs if run["task"] == task], top, bottom)) for task in TASKS]


def _paired(runs: list[dict], top: str, bottom: str) -> list[float]:
    """Ratios of paired prompts, so that a slow minute of the machine cancels out."""
    slow = {(run["task"], run["prompt"]): run["seconds"] for run in runs if run["arm"] == bottom}
    return [slow[run["task"], run["prompt"]] / run["seconds"] for run in runs if run["arm"] == top]


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


def method_pages(cells: Sequence[policy_tables.Cell]) -> dict[Path, str]:
    """The pages of all methods, with their measurements."""
    found = {}
    for path in sorted((ROOT / "docs" / "methods").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition(f"<!-- measured {path.stem} -->\n")
        _, end, after = rest.partition("<!-- /measured -->")
        if begin and end:
            own = TABLES[path.stem]() if path.stem in TABLES else ""
            block = "\n\n".join(part for part in (policy_tables.of_page(cells, path.stem), own) if part)
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


def against_transformers() -> str:
    """Medians over all prompts of the comparison with transformers."""
    kinds = read(RESULTS)
    ratios = [f"{title} {statistics.median(_paired(kinds['run'], *arms)):.2f}" for title, *arms in PAIRS[:2]]
    page = "docs/results.md#comparison-with-transformers-at-equal-length"
    return (
        f"Against [transformers]({page}), {kinds['provenance'][0]['target']}, tokens per second: {', '.join(ratios)}."
    )


def engines_made(lines: dict[str, list[dict]], results: Path = engines.RESULTS, model: str | None = None) -> str:
    """Where, by what and on which model the engines were compared."""
    origin = lines["provenance"][0]
    chats = len({(run["task"], run["prompt_tokens"]) for run in lines["run"]})
    return (
        f"{model or origin['model']}, {origin['new_tokens']} new tokens of {chats} chats, greedy, medians. "
        f"{origin['device']}, torch {origin['torch']}, commit {origin['commit'][:9]}, {origin['date']}. "
        f"Every run is in `{results}`."
    )


def policy(cells: Sequence[policy_tables.Cell], facts: str) -> str:
    """Every cell of the policy's benchmark."""
    parts = [policy_tables.by_method(cells), policy_tables.verdict(cells), policy_tables.by_cell(cells)]
    return "\n\n".join([*parts, f"{facts} Every run is in `benchmarks/results/policy.jsonl`."])


def _made(cells: Sequence[policy_tables.Cell]) -> str:
    """Where and by what these cells were made."""
    origin = policy_tables.origin_of(cells)
    return f"{origin_line(origin)}. Made by `{origin['command']}`."


def pages() -> dict[Path, str]:
    """The up-to-date text of every page with generated tables."""
    cells = policy_tables.read()
    few = [cell for cell in cells if cell.target == "sample" and cell.method in policy_tables.IN_SHORT]
    lines = read(ROOT / engines.RESULTS)
    compared = {"engines": f"{engine_tables.in_short(lines)}\n\n{engines_made(lines)}"}
    every = {"engines": f"{engine_tables.tables(lines)}\n\n{engines_made(lines)}"}
    if (ROOT / engines.SHAPE_RESULTS).exists():
        shapes = read(ROOT / engines.SHAPE_RESULTS)
        every["shapes"] = (
            f"{engine_tables.shapes(shapes)}\n\n{engines_made(shapes, engines.SHAPE_RESULTS, 'Random weights')}"
        )
    served = {"serving": serving.table()} if serving.RESULTS.exists() else {}
    blocks = {
        "README.md": {"results": f"{policy_tables.in_short(few)} {_made(few)} {against_transformers()}"} | compared,
        "docs/native.md": every,
        "docs/methods/README.md": {"methods": methods()},
        "docs/results.md": {
            "real": real_model.methods(),
            "policy": policy(cells, _made(cells)),
            "tune": predictions(),
            "speed": markdown(read(RESULTS)),
        },
        "docs/performance.md": {"step": step.table()},
        "docs/serving.md": {"prediction": prediction.table()} | served,
        "docs/heads.md": {"heads": heads_summary.markdown(read(heads_summary.RESULTS))},
    }
    pages = {ROOT / page: filled((ROOT / page).read_text(encoding="utf-8"), some) for page, some in blocks.items()}
    return pages | method_pages(cells)


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
