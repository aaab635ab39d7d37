"""What pages and ``scripts/reproduce`` have of the comparison of CPU engines, which benchmarks/engines.py measures."""

import functools
import statistics
from pathlib import Path

import engine_tables
import engines

from benchmarks.experiments import real_model
from benchmarks.kit.claims import Claim, Row, rows_figure
from benchmarks.kit.experiment import ROOT, Command, Experiment, Inputs, command
from benchmarks.kit.reading import read
from foredraft.files.provenance import short_commit

PEERS = {  # engines, and what a reader calls them
    "foredraft Q4_0": "foredraft, Q4_0",
    "llama.cpp Q4_0": "llama.cpp, Q4_0",
    "foredraft int4": "foredraft, int4",
    "foredraft Q4_1": "foredraft, Q4_1",
    "llama.cpp Q4_1": "llama.cpp, Q4_1",
    "openvino Q4_1": "OpenVINO GenAI, Q4_1",
    "openvino Q4_1-ACCURACY": "OpenVINO GenAI, Q4_1, ACCURACY",
    "foredraft Q8_0": "foredraft, Q8_0",
    "llama.cpp Q8_0": "llama.cpp, Q8_0",
    "foredraft float32": "foredraft, float32",
    "transformers bfloat16": "transformers, bfloat16",
}


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


@functools.cache
def beside_others() -> dict[str, str]:
    """What docs/comparison.md says in numbers, by the names of its markers."""
    from foredraft.drafters import METHODS

    lines = read(ROOT / engines.RESULTS)
    xeon, gained = read(ROOT / engines.RESULTS.with_name("engines_xeon.jsonl")), real_model.gain
    start, memory = engine_tables.beside_llama(lines)
    shapes = engine_tables.shape_ratios(read(ROOT / engines.SHAPE_RESULTS))
    float32 = "foredraft float32 plain", "transformers float32 plain"
    plain = [engine_tables.compared(engine_tables.by_arm(each), 1, *float32).ratio for each in (lines, xeon)]
    hybrid = real_model.FILE.with_name("hybrid.jsonl")
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


def cpu_engines() -> Claim:
    """What a user of each engine gets on one thread: plain decoding, and its drafts."""
    lines = read(ROOT / engines.RESULTS)
    found: dict[str, dict[str, float]] = {}
    for (threads, arm), runs in engine_tables.by_arm(lines).items():
        engine, mode = arm.rsplit(" ", 1)
        if threads == 1:
            found.setdefault(engine, {})[mode] = statistics.median(map(engine_tables.rate, runs))
    rows = []
    for engine, name in PEERS.items():
        modes = dict(found.get(engine, {}))
        if (plain := modes.pop(engine_tables.PLAIN, None)) is not None:
            drafts = modes[engine_tables.DEFAULT] if engine.startswith("foredraft") else max(modes.values(), default=0)
            rows.append(Row(name, plain, [drafts] * bool(drafts), engine.startswith("foredraft")))
    origin = lines["provenance"][0]
    where = "" if all(row.spread for row in rows) else ", if measured"
    title = f"Tokens/s, one thread: plain decoding, dots with drafts{where}"
    chats, _ = engine_tables.chats(lines)
    facts = ", ".join(
        f"{row.name} {row.value:.1f}" + "".join(f" / {drafts:.1f}" for drafts in row.spread) for row in rows
    )
    return Claim(
        engine_tables.sentence(lines),
        f"Plain / with drafts: {facts}",
        f"{origin['model']}, medians of {chats} chats, {origin['new_tokens']} new tokens, greedy; {origin['device']}, "
        f"commit {short_commit(origin['commit'])}, {origin['date']}",
        lambda: rows_figure(title, rows, "{:.0f}".format),
    )


def native() -> str:
    lines = read(ROOT / engines.RESULTS)
    found, reads = engine_tables.sentence(lines), engine_tables.long_prompts(lines)
    return "\n\n".join([found, reads, engine_tables.users(lines), engine_tables.tables(lines), engines_made(lines)])


def on_xeon() -> str:
    other = engines.RESULTS.with_name("engines_xeon.jsonl")
    before = read(ROOT / other)
    parts = [engine_tables.sentence, engine_tables.long_prompts, engine_tables.users]
    return "\n\n".join([*(part(before) for part in parts), engines_made(before, other)])


CODER_RESULTS = engines.RESULTS.with_name("engines_coder.jsonl")


def on_coder(*, short: bool = False) -> str:
    pair = read(ROOT / CODER_RESULTS)
    made = engines_made(pair, CODER_RESULTS, "Qwen2.5-Coder-1.5B-Instruct (drafts: the 0.5B)")
    if short:
        return f"{engine_tables.by_kind(pair, intervals=False)}\n\n{made}"
    parts = [engine_tables.by_kind, engine_tables.users, engine_tables.tables]
    return "\n\n".join([*(part(pair) for part in parts), made])


def shapes() -> str:
    found = read(ROOT / engines.SHAPE_RESULTS)
    return f"{engine_tables.shapes(found)}\n\n{engines_made(found, engines.SHAPE_RESULTS, 'Random weights')}"


def _commands(inputs: Inputs, *more: str) -> list[Command]:
    """Files of three types, and all engines on them; with ``more``, on other shapes alone."""
    llama = command("benchmarks.peers.llama_cpp")
    words = ["--prompt-files", inputs.prompts / "eagle", "--openvino", inputs.openvino, "--model", inputs.smollm2]
    if more:
        return [llama, command("benchmarks.engines", *words, *more)]
    files = {kind: inputs.state / f"SmolLM2-135M-Instruct.{kind}.gguf" for kind in ("Q4_0", "Q4_1", "Q8_0")}
    written = [
        command("benchmarks.write_gguf", inputs.smollm2, path, "--type", kind, "--split", "smollm")
        for kind, path in files.items()
    ]
    few = ["--few", "transformers *", "* float32 *", "*-ACCURACY *", "--threads", "1", "2"]
    # the head alone beside int4, where it is not the default
    heads = ["--drafters", "auto", "eagle3", "--skip", "foredraft [!i]* eagle3*", "foredraft int8 eagle3*"]
    measured = command("benchmarks.engines", *words, "--gguf", *files.values(), *few, *heads, "--choose", "2")
    return [llama, *written, measured]


def _coder(inputs: Inputs) -> list[Command]:
    """A model of the size and in the format that people run, with a draft model of its family."""
    words = ["--model", "coder", "--assistant", "coder-draft", "--drafters", "auto", "draft_model:coder-draft"]
    words += ["--openvino", inputs.openvino, "--openvino-types", "Q4_K_M", "--skip", "transformers float32 *"]
    words += ["--tasks", "humaneval", "mt_bench", "gsm8k", "sum", "--prompts", "8", "--choose", "2", "--scored", "0"]
    few = ["--prompt-files", inputs.prompts / "eagle", "--few", "transformers *", "openvino *", "--threads", "1", "2"]
    return [
        ["scripts/models", "coder", "coder-draft"],
        command("benchmarks.peers.llama_cpp"),
        command("benchmarks.engines", *words, *few, "--out", "benchmarks/results/engines_coder.jsonl"),
    ]


_NAMES = ("drafters", "start", "memory", "measured", "shapes", "float32", "gains", "gains xeon")
_SHOWN = ("foredraft Q4_0", "transformers float32", "llama.cpp Q4_0", "openvino Q4_1")
EXPERIMENT = Experiment(
    name="engines",
    question="CPU engines on one model: native.md, results.md",
    tables={
        "docs/native.md": {"engines": native, "engines xeon": on_xeon},
        "docs/guides/export.md": {"llama heads": llama_heads},
        "docs/comparison.md": {
            name: lambda name=name: beside_others()[name] for name in (*_NAMES, *(f"rates {each}" for each in _SHOWN))
        },
    },
    claims={"engines": cpu_engines},
    hours=0.5,
    needs=lambda i: (Path(i.smollm2), i.prompts, i.openvino),
    commands=_commands,
)
SHAPES = Experiment(
    name="shapes",
    question="CPU engines on larger shapes: native.md",
    tables={"docs/native.md": {"shapes": shapes}},
    hours=0.3,
    needs=lambda i: (Path(i.smollm2), i.prompts, i.openvino),
    commands=lambda i: _commands(i, "--shape", "1b", "3b", "--only", "* plain @*", "--threads", "1", "2"),
    results=("engines_shapes.jsonl",),
)
CODER = Experiment(
    name="coder",
    question="CPU engines on a model of 1.5 billion parameters: README, native.md, results.md",
    tables={
        "docs/native.md": {"engines coder": on_coder},
        "README.md": {"engines coder": functools.partial(on_coder, short=True)},
    },
    hours=3.0,
    needs=lambda inputs: (inputs.prompts,),
    commands=_coder,
    results=("engines_coder.jsonl",),
)
