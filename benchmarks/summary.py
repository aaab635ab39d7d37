"""Generated tables from JSON Lines files, in README.md and pages of docs.

python benchmarks/summary.py            # print the summary of benchmarks/results/speed.jsonl
python benchmarks/summary.py --write    # write all tables between the markers of the pages
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import acceptance_tables
import batches
import calibration
import chains
import engine_tables
import engines
import gpu_tables
import heads_summary
import policy_tables
import prediction
import real_model
import result_figures
import serving
import speed_tables
import step
import stopping
import support
from method_tables import SENTENCES, TABLES, on_smollm2
from origin import origin_line
from reading import markdown_table, read

from foredraft.bench.tune.candidates import short_spec
from foredraft.files.provenance import short_commit
from foredraft.heads.formats.tuned import read_tuned

ROOT = Path(__file__).resolve().parent.parent
TUNED = ROOT / "benchmarks" / "results" / "tuned.json"


def methods() -> str:
    """The table of methods of docs/methods/README.md."""
    from foredraft.drafters import METHODS

    head, lines = ["drafter", "what it does", "children", "lossless", "needs"], []
    for name, method in METHODS.items():
        laws = ", ".join(law.value for law in method.laws) or "-"
        page, sound = f"[`{name}`]({name}.md)", "yes" if method.lossless else "no"
        lines.append([page, method.what, laws, sound, method.needs])
    return "\n".join(markdown_table(head, lines, words=range(len(head))))


def filled(text: str, blocks: dict[str, str]) -> str:
    """Insert each block between its markers, ``<!-- name -->`` and ``<!-- /name -->``, also within a line."""
    for name, block in blocks.items():
        before, begin, rest = text.partition(f"<!-- {name} -->")
        lines = "\n" if rest.startswith("\n") else ""
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise SystemExit(f"The page has no markers for {name}.")
        text = f"{before}{begin}{lines}{block}{lines}{end}{after}"
    return text


def method_pages(cells: Sequence[policy_tables.Cell]) -> dict[Path, str]:
    """The pages of all methods, with their measurements."""
    found = {}
    for path in sorted((ROOT / "docs" / "methods").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path.stem in SENTENCES:
            text = filled(text, {"found": SENTENCES[path.stem]()})
        before, begin, rest = text.partition(f"<!-- measured {path.stem} -->\n")
        _, end, after = rest.partition("<!-- /measured -->")
        if begin and end:
            own = TABLES[path.stem]() if path.stem in TABLES else ""
            parts = (on_smollm2(path.stem), policy_tables.of_page(cells, path.stem), own)
            block = "\n\n".join(part for part in parts if part)
            found[path] = f"{before}{begin}{block}{chr(10) if block else ''}{end}{after}"
    return found


def predictions() -> str:
    """Speed-ups that tune predicted and measured for the bundled model."""
    tuned = read_tuned(TUNED)
    facts = tuned.facts or {}
    rows = []
    for each in sorted(facts["tried"], key=lambda each: -each["measured"]):
        off = each["predicted"] / each["measured"] - 1
        drafter = short_spec(each["drafter"], mark="`")
        rows.append([drafter, f"{each['predicted']:.2f}", f"{each['measured']:.2f}", f"{100 * off:+.0f}%"])
    points = ", ".join(f"{point['speed_up']:.2f} at {point['batch']}" for point in facts["batches"])
    origin = facts["provenance"]
    lines = [
        *markdown_table(["drafter", "predicted", "measured", "off by"], rows),
        "",
        f"Speed-up by batch size: {points}. Commit `{origin['commit']}`, {origin['device']}, {origin['time'][:10]}.",
    ]
    return "\n".join(lines)


def engines_made(lines: dict[str, list[dict]], results: Path = engines.RESULTS, model: str | None = None) -> str:
    """Where, by what and on which model the engines were compared."""
    origin = lines["provenance"][0]
    chats, short = engine_tables.chats(lines)
    few = f" (of {', '.join(short)}: {min(short.values())})" if short else ""
    return (
        f"{model or origin['model']}, {origin['new_tokens']} new tokens of {chats} chats{few}, greedy, medians. "
        f"{origin['device']}, torch {origin['torch']}, commit {short_commit(origin['commit'])}, {origin['date']}. "
        f"Every run is in `{results}`."
    )


def llama_heads() -> str:
    """What an exported head drafts in llama.cpp and here."""
    results = engines.RESULTS.with_name("engines_heads.jsonl")
    lines = read(ROOT / results)
    return f"{engine_tables.heads(lines)}\n\n{engines_made(lines, results)}"


def beside_others() -> dict[str, str]:
    """What docs/comparison.md says in numbers, by the names of its markers."""
    from foredraft.drafters import METHODS

    lines = read(ROOT / engines.RESULTS)
    xeon, gained = read(ROOT / engines.RESULTS.with_name("engines_xeon.jsonl")), real_model.gain
    start, memory = engine_tables.beside_llama(lines)
    shapes = engine_tables.shape_ratios(read(ROOT / engines.SHAPE_RESULTS))
    float32 = "foredraft float32 plain", "transformers float32 plain"
    plain = [engine_tables.compared(engine_tables.by_arm(each), 1, *float32).ratio for each in (lines, xeon)]
    hybrid = real_model.RESULTS.with_name("hybrid.jsonl")
    fast = hybrid.with_name("hybrid_xeon.jsonl")
    shown = "foredraft Q4_0", "transformers float32", "llama.cpp Q4_0", "openvino Q4_1"
    return {
        "drafters": str(len(METHODS) - 1),
        "start": start,
        "memory": memory,
        "measured": lines["provenance"][0]["date"],
        "shapes": f"{min(shapes):.2f} to {max(shapes):.2f}",
        "float32": f"{plain[0]:.2f} times transformers' speed on an AMD EPYC and {plain[1]:.2f} on an Intel Xeon",
        "gains": f"{gained(hybrid, 0):.2f} greedy and {gained(hybrid, 1):.2f} at temperature 1",
        "gains xeon": f"{gained(fast, 0):.2f} and {gained(fast, 1):.2f}",
        **{f"rates {engine}": engine_tables.rates_by_task(lines, engine) for engine in shown},
    }


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
    lines = read(ROOT / engines.RESULTS)
    found, made = engine_tables.sentence(lines), engines_made(lines)
    compared = {"engines": f"{engine_tables.in_short(lines)}\n\n{found} {made}"}
    reads = engine_tables.long_prompts(lines)
    every = {"engines": "\n\n".join([found, reads, engine_tables.users(lines), engine_tables.tables(lines), made])}
    other = engines.RESULTS.with_name("engines_xeon.jsonl")
    before = read(ROOT / other)
    parts = [engine_tables.sentence, engine_tables.long_prompts, engine_tables.users]
    every["engines xeon"] = "\n\n".join([*(part(before) for part in parts), engines_made(before, other)])
    larger = engines.RESULTS.with_name("engines_coder.jsonl")
    if (ROOT / larger).exists():
        pair = read(ROOT / larger)
        parts = [engine_tables.by_kind, engine_tables.users, engine_tables.tables]
        of_pair = engines_made(pair, larger, "Qwen2.5-Coder-1.5B-Instruct (drafts: the 0.5B)")
        every["engines coder"] = "\n\n".join([*(part(pair) for part in parts), of_pair])
        compared["engines coder"] = f"{engine_tables.by_kind(pair, intervals=False)}\n\n{of_pair}"
    if (ROOT / engines.SHAPE_RESULTS).exists():
        shapes = read(ROOT / engines.SHAPE_RESULTS)
        every["shapes"] = (
            f"{engine_tables.shapes(shapes)}\n\n{engines_made(shapes, engines.SHAPE_RESULTS, 'Random weights')}"
        )
    by_default = real_model.in_short()
    served = {"serving": serving.table()} if serving.RESULTS.exists() else {}
    blocks = {
        "README.md": {"results": by_default} | compared,
        "docs/native.md": every,
        "docs/methods/README.md": {"methods": methods()},
        "docs/results.md": {
            "default": by_default,
            "real": real_model.methods(),
            "acceptance": acceptance_tables.tables(),
            "batches": batches.tables(),
            "policy": policy(cells, _made(cells)),
            "calibration": calibration.table(),
            "tune": predictions(),
            **{f"picture {name}": result_figures.block(name) for name in result_figures.CLAIMS},
            "speed": speed_tables.markdown(read(speed_tables.RESULTS)),
        },
        "docs/theory.md": {"chains": chains.table()},
        "docs/comparison.md": beside_others(),
        "docs/guides/export.md": {"llama heads": llama_heads()},
        "docs/models.md": {"kernel": gpu_tables.kernel_in_short()},
        "docs/support.md": {"support": support.table()},
        "docs/performance.md": {"step": step.table(), "gpu": gpu_tables.table()},
        "docs/schedules.md": {"stopping": stopping.table()},
        "docs/serving.md": {"prediction": prediction.table()} | served,
        "docs/heads.md": {
            "real heads": heads_summary.real(),
            "ablation": heads_summary.ablation(),
        },
    }
    pages = {ROOT / page: filled((ROOT / page).read_text(encoding="utf-8"), some) for page, some in blocks.items()}
    return pages | method_pages(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=speed_tables.RESULTS)
    parser.add_argument("--write", action="store_true", help="write the pages")
    args = parser.parse_args()
    if args.write:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
    else:
        print(speed_tables.markdown(read(args.results)))


if __name__ == "__main__":
    main()
