"""Methods at fixed sizes beside plain decoding on real models, by ``foredraft bench``: look-ahead's windows, sizes of
Sequoia's trees, and the speeds of methods that no other table has."""

import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.kit.experiment import ALL_TASKS, RESULTS, Command, Experiment, Inputs, command, repeated
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, with_interval
from benchmarks.kit.runs import beside_plain, length
from foredraft.bench.measure.records import read_runs
from foredraft.bench.measure.summary import grouped, ratios

SPEEDS = tuple(RESULTS / f"{name}_speed.jsonl" for name in ("glide", "early_exit", "layer_skip"))
FIXED = "num_assistant_tokens_schedule=constant"


def command_of(part: str, model: str | Path, inputs: Inputs, arms: dict[str, str], *words: str, count: int) -> Command:
    """The command that makes the speeds of these arms, ``count`` prompts of each task."""
    named = [f"{name}={spec},{FIXED}" for name, spec in arms.items()]
    files = [*repeated("-d", ["none", *named]), *repeated("--prompts", inputs.questions(*ALL_TASKS))]
    limits = ["--chat", "--count", str(count), "--max-new-tokens", "64", "--no-texts"]
    return command("foredraft", "bench", "-m", model, *words, *files, *limits, "--out", RESULTS / f"{part}_speed.jsonl")


def speeds(page: str, paths: Iterable[Path] = SPEEDS) -> str:
    """Speed-up and acceptance of a method at fixed sizes on real models, where no other table has them; its arms have
    names that begin with that of the page, or the file has. Empty without such arms."""
    return "\n\n".join(part for path in paths if path.exists() for part in _speeds(page, path))


def _speeds(page: str, path: Path) -> Iterator[str]:
    file = read_runs(path)
    every = beside_plain(file)
    if path.stem != page:
        every = [pair for pair in every if pair.run.arm.split()[0] == page]
    for model, found in grouped(every, lambda pair: pair.run.model).items():
        rows, heats = [], sorted({pair.run.temperature for pair in found})
        for arm, own in grouped(found, lambda pair: pair.run.arm).items():
            row = [arm.removeprefix(f"{page} ")]
            for heat in heats:
                here = [pair for pair in own if pair.run.temperature == heat]
                row.append(with_interval(ratios(here), statistics.median, 1000))
                row.append(with_interval([run for run, _ in here], length, 1000))
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


def lookahead(inputs: Inputs) -> list[Command]:
    """Windows and n-grams of several sizes, W as large as G; the prompt's n-grams; the policy."""
    arms = ["none", "lookahead auto=lookahead"]
    arms += [f"lookahead W5 N4 with the prompt's=lookahead,prompt_ngrams=yes,{FIXED}"]
    for n, w in itertools.product((3, 4, 5), (5, 10, 15)):
        arms.append(f"lookahead W{w} N{n}=lookahead,window_size={w},ngram_size={n},guess_set_size={w},{FIXED}")
    words = ["bench", "-m", inputs.smollm2, "--weights", "int4", "--chat", "--count", "8", "--max-new-tokens", "64"]
    words += [*repeated("-d", arms), *repeated("--prompts", inputs.questions("humaneval", "mt_bench", "sum"))]
    return [command("foredraft", *words, "--no-texts", "--out", RESULTS / "lookahead.jsonl")]


def sequoia(inputs: Inputs) -> list[Command]:
    """Acceptance by the size of the tree, beside other shapes of as many nodes."""
    draft, arms = "sample-draft", ["none"]
    for nodes in (4, 8, 16, 32, 63):
        arms.append(f"Sequoia {nodes}=sequoia:{draft},nodes={nodes},depth=10,{FIXED}")
        arms.append(f"OPT-Tree {nodes}=opt_tree:{draft},nodes={nodes},depth=10,{FIXED}")
        if nodes < 32:
            limits = f"num_assistant_tokens={nodes},assistant_confidence_threshold=0"
            arms.append(f"1 chain {nodes}=draft_model:{draft},{limits},{FIXED}")
        if nodes > 4:
            chains = max(nodes // 4, 2)
            arms.append(f"{chains} chains {4 * chains}=draft_model:{draft},branching={chains}x1x1x1,{FIXED}")
    words = ["bench", "-m", "sample", *repeated("-d", arms), *repeated("--prompts", inputs.questions("humaneval"))]
    words += ["--temperature", "0", "--temperature", "1", "--count", "8", "--max-new-tokens", "96"]
    return [command("foredraft", *words, "--no-texts", "--out", RESULTS / "sequoia.jsonl")]


def _page(name: str, *paths: Path) -> dict[str, dict[str, functools.partial[str]]]:
    return {f"docs/methods/{name}.md": {"measured": functools.partial(speeds, name, *([paths] if paths else []))}}


LOOKAHEAD = Experiment(
    name="lookahead",
    question="lookahead by the size of its window: methods/lookahead.md",
    tables=_page("lookahead", RESULTS / "lookahead.jsonl"),
    rank=6,
    hours=0.2,
    needs=lambda inputs: (Path(inputs.smollm2), inputs.prompts),
    commands=lookahead,
)
SEQUOIA = Experiment(
    name="sequoia",
    question="acceptance by the size of a tree: methods/sequoia.md",
    tables=_page("sequoia", RESULTS / "sequoia.jsonl"),
    rank=6,
    hours=0.2,
    needs=lambda inputs: (inputs.prompts,),
    commands=sequoia,
)
SPEED_TABLES = Experiment(
    name="fixed_sizes",
    question="speeds that `glide` and `early_exit` measure",
    tables=_page("early_exit") | _page("layer_skip") | _page("glide") | _page("cape"),
    rank=6,
    results=(),
)
