"""Tables of method pages with their own benchmark, from JSON Lines files."""

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import acceptance_tables
import drafts_tables
import early_exit
import heads_summary
import identity
import layer_search
import lossy_tables
import online as online_stream
import pairs as model_pairs
import real_model
import retrieval
import retrieval_tables
import shared_noise
from origin import origin_line
from reading import markdown_table, quartiles, read, with_interval

from foredraft.bench.measure.records import read_runs
from foredraft.bench.measure.summary import RunPair, grouped, ratios, temperature_label

RESULTS = Path(__file__).resolve().parent / "results"
SPEEDS = tuple(RESULTS / f"{name}_speed.jsonl" for name in ("glide", "early_exit", "layer_skip"))
MIB = 2**20


def made(origin: dict) -> str:
    """Provenance in one sentence."""
    return f"Made by `{origin['command']}`: {origin_line(origin)}."


def triforce() -> str:
    """Acceptance on a real model; then time per token and memory at two context lengths, one line per arm."""
    kinds = read(RESULTS / "triforce.jsonl")
    origin, parts = kinds["provenance"][0], []
    for part, title in (("4k", "trained models, greedy"), ("32k", "random weights, acceptance forced by a table")):
        runs = [run for run in kinds["run"] if run["part"] == part]
        names = list(dict.fromkeys(run["arm"] for run in sorted(runs, key=lambda run: run["arm"] != "none")))
        plain = [_seconds(run) for run in _of(runs, "none")]
        lines = []
        for name in names:
            own = _of(runs, name)
            seconds = [_seconds(run) for run in own]
            ratios = [slow / fast for slow, fast in zip(plain, seconds, strict=True)]
            length = statistics.mean(_length(run) for run in own)
            memory = [max(run[key] for run in own) / MIB for key in ("cache_bytes", "partial_bytes")]
            speed = quartiles(ratios) if len(ratios) > 1 else f"{ratios[0]:.2f}"
            lines.append(
                [name, f"{1e3 * statistics.median(seconds):.1f}", speed, f"{length:.2f}"]
                + [f"{mebibytes:.0f}" for mebibytes in memory]
            )
        samples = f"{len(plain)} prompts" if len(plain) > 1 else "one prompt"
        parts += [f"{runs[0]['prompt_tokens']:,} tokens of context, {title} ({samples}):", ""]
        head = ["arm", "ms per token", "speed-up", "acceptance length", "KV cache, MiB", "partial copy, MiB"]
        parts += [*markdown_table(head, lines), ""]
    rates = origin["rates"]
    accepted = [retrieval_tables.table(), ""] if retrieval.RESULTS.exists() else []
    return "\n".join(
        [
            *accepted,
            f"Times: {origin['target']} with {origin['draft']}, **older than [shared noise](shared_noise.md) and the "
            "present loop**, and not measured again.",
            "",
            *parts,
            f"Forced acceptance rates: {rates['inner']} per token of the small model, {rates['outer']} per token "
            f"of a draft. {made(origin)}",
        ]
    )


def depth() -> str:
    """Time per drafted token by the draft model's depth and width, then the pruned drafts."""
    kinds = read(RESULTS / "depth.jsonl")
    origin, parts = kinds["provenance"][0], []
    for title, series in (("equal parameters", "equal"), ("one width", "by depth"), ("one depth", "by width")):
        runs = [run for run in kinds["run"] if run.get("series", "equal") == series]
        lines = [
            [
                f"{run['layers']} x {run['width']}",
                f"{run['parameters_of_layers'] / 1e6:.1f}",
                f"{run['milliseconds']:.2f} ({run['quartiles'][0]:.2f} to {run['quartiles'][1]:.2f})",
                f"{run['milliseconds'] / runs[0]['milliseconds']:.2f}",
            ]
            for run in runs
        ]
        head = [f"{title}: layers x width", "parameters in layers, millions", "ms per token", "relative to the first"]
        parts += [*markdown_table(head, lines), ""] if lines else []
    return "\n".join([*parts, made(origin), *drafts_tables.shapes()])


def online() -> str:
    """Acceptance length by stage of the stream, frozen and online, and the number of updates."""
    kinds = read(RESULTS / "online.jsonl")
    return "\n".join([*online_stream.summary(kinds), "", made(kinds["provenance"][0])])


def speeds(page: str, paths: Iterable[Path] = SPEEDS) -> str:
    """Speed-up and acceptance of a method at fixed sizes on real models, where no other table has them; its arms have
    names that begin with that of the page, or the file has. Empty without such arms."""
    return "\n\n".join(part for path in paths if path.exists() for part in _speeds(page, path))


def _speeds(page: str, path: Path) -> Iterator[str]:
    file = read_runs(path)
    every = real_model.beside_plain(file)
    if path.stem != page:
        every = [pair for pair in every if pair.run.arm.split()[0] == page]
    for model, found in grouped(every, lambda pair: pair.run.model).items():
        rows, heats = [], sorted({pair.run.temperature for pair in found})
        for arm, own in grouped(found, lambda pair: pair.run.arm).items():
            row = [arm.removeprefix(f"{page} ")]
            for heat in heats:
                here = [pair for pair in own if pair.run.temperature == heat]
                row.append(with_interval(ratios(here), statistics.median, 1000))
                row.append(with_interval([run for run, _ in here], real_model.length, 1000))
            rows.append(row)
        name = "the trained model" if Path(model).name == "model" else Path(model).name  # train writes RUN/model
        origin = [each for each in file.provenance if each["settings"]["model"] == model][-1]
        settings, count = origin["settings"], len(found) // len(rows) // len(heats)
        same = sum(run.outputs[0].digest == plain.outputs[0].digest for run, plain in found)
        titles = ["speed-up over plain decoding", "tokens per forward"]
        head = [f"{title}{', T = 1' * (heat == 1)}" for heat in heats for title in titles]
        lines = [
            *markdown_table([f"{page} on {name}", *head], rows),
            "",
            f"Medians over {count} prompts and turns, {'greedy' if heats == [0] else 'greedy and at temperature 1'}, "
            f"{settings['max_new_tokens']} new tokens, one request "
            f"at a time, with 95 % intervals. Texts equal to plain decoding's: {same} of {len(found)}. "
            f"{origin_line(origin, settings['weights'] or settings['dtype'] or 'float32')}. Made by `foredraft bench`; "
            f"every run is in [{path.name}](../../benchmarks/results/{path.name}).",
        ]
        yield "\n".join(lines)


REAL = {
    **{name: (name,) for name in ("eagle1", "medusa", "hydra", "blockwise", "draft_model", "sequoia")},
    **{name: (name,) for name in ("prompt_lookup", "max_gram")},
    "eagle3": ("eagle3", "eagle3-chain"),
    "eagle2": ("eagle2", "eagle2-expanded", "eagle2-no-value", "eagle2-no-rerank", "eagle2-neither"),
    "bandit": ("look-ups+head",),
}
"""Names of a page's arms in the tables of the real model."""


def on_smollm2(page: str) -> str:
    """A method on the real model: acceptance by nodes, and speed at the best fixed size and under the policy."""
    if page not in REAL:
        return ""
    return "\n\n".join(part for part in (_real_acceptance(page), _real_speeds(page)) if part)


@functools.cache
def _acceptance() -> acceptance_tables.Results:
    return acceptance_tables.Results.of(acceptance_tables.RESULTS)


def _real_acceptance(page: str) -> str:
    results = _acceptance()
    arms = [arm for arm in results.arms() if arm[0] in REAL[page]]
    lines = []
    for arm in arms:
        cells = [results.runs((*arm, acceptance_tables.SHARED, heat)) for heat in results.temperatures]
        if any(cells):
            lengths = [acceptance_tables.length_with_interval(own) if own else "" for own in cells]
            lines.append([acceptance_tables.TITLES[arm[0]], str(results.nodes[arm]), *lengths])
    if not lines:
        return ""
    head = ["on SmolLM2-135M-Instruct", "nodes", *map(temperature_label, results.temperatures)]
    title = "Tokens per forward of the target, 40 prompts of each of six tasks, shared noise ([by task, other rules]"
    return "\n".join([f"{title}(../results.md#a-real-model)):", "", *markdown_table(head, lines)])


def _real_speeds(page: str) -> str:
    file = read_runs(RESULTS / "hybrid.jsonl" if page == "bandit" else real_model.RESULTS)
    every = [pair for pair in real_model.beside_plain(file) if pair.run.arm.split()[0] in REAL[page]]
    arms = grouped(every, lambda pair: (pair.run.temperature, pair.run.arm))
    lines = []
    for heat in sorted({pair.run.temperature for pair in every}):
        found = {arm: own for (own_heat, arm), own in arms.items() if own_heat == heat}
        fixed = {arm: own for arm, own in found.items() if not arm.endswith(" auto")}
        best = max(fixed, key=lambda arm: statistics.median(ratios(fixed[arm])), default="")
        policy = [own for arm, own in found.items() if arm.endswith(" auto")]
        shown = f"{_speed(fixed[best])} ({best})" if best else ""
        lines.append([temperature_label(heat), shown, *map(_speed, policy)])
    if not lines:
        return ""
    head = ["on SmolLM2-135M-Instruct in 4 bits", "best fixed size", "policy"]
    where = "hybrid.md" if page == "bandit" else "../results.md#a-real-model"
    title = f"Speed-up over plain decoding / tokens per forward, medians over prompts ([all sizes by task]({where})):"
    origin = file.provenance[-1]
    return "\n".join([title, "", *markdown_table(head, lines), "", f"{origin_line(origin, 'int4')}."])


def _speed(own: Sequence[RunPair]) -> str:
    return f"{statistics.median(ratios(own)):.2f} / {real_model.length([pair.run for pair in own]):.2f}"


def _with_speeds(page: str, table: Callable[[], str]) -> Callable[[], str]:
    return lambda: "\n\n".join(part for part in (table(), speeds(page)) if part)


def hybrid() -> str:
    """Two precisions on one processor, and the lower one on another, where plain decoding is faster."""
    files = {"4 bits": "hybrid", "8 bits": "hybrid_int8", "4 bits, on another processor": "hybrid_xeon"}
    tables = {title: real_model.methods(RESULTS / f"{name}.jsonl") for title, name in files.items()}
    return "\n\n".join(f"In {title}.\n\n{table}" for title, table in tables.items())


TABLES: dict[str, Callable[[], str]] = {
    "early_exit": _with_speeds("early_exit", early_exit.table),
    "layer_skip": _with_speeds("layer_skip", layer_search.table),
    "triforce": triforce,
    "pruned_drafts": depth,
    "online": online,
    "specinfer": drafts_tables.specinfer,
    "glide": _with_speeds("glide", heads_summary.glide),
    "cape": functools.partial(speeds, "cape"),
    "lookahead": functools.partial(speeds, "lookahead", (RESULTS / "lookahead.jsonl",)),
    "sequoia": functools.partial(speeds, "sequoia", (RESULTS / "sequoia.jsonl",)),
    "cascade": drafts_tables.cascades,
    "hybrid": hybrid,
    "universal": model_pairs.table,
    "shared_noise": lambda: f"{shared_noise.table()}\n\n{identity.sentence()}",
    **{name: functools.partial(lossy_tables.table, name) for name in lossy_tables.RULES},
}
"""By name of the page."""

SENTENCES: dict[str, Callable[[], str]] = {
    "triforce": retrieval_tables.sentence,
    "shared_noise": shared_noise.sentence,
}
"""What a page says of its measurements in words, by name of the page."""


def _of(runs: list[dict], arm: str) -> list[dict]:
    return [run for run in runs if run["arm"] == arm]


def _seconds(run: dict) -> float:
    return run["seconds_a_token"] if "seconds_a_token" in run else 1 / run["stats"]["tokens_per_second"]


def _length(run: dict) -> float:
    return run["acceptance_length"] if "acceptance_length" in run else run["stats"]["acceptance_length"]
