"""What a part of the KV cache accepts on a real model at long contexts: retrieved chunks, a window, heavy hitters, and
an oracle.

Three tasks, each with eight rows a text (``--count`` texts):

planted: a novel in whose first half facts stand, each of which is begun again at the end;
copy: a novel in whose first half Python functions stand, each of which is begun again at the end;
continue: a novel, at eight places.

The target's greedy texts are written once. Then every arm is replayed against them: from each root its draft is what
the model over the partial cache ranks first, for as long as that is the target's token, so the drafts of one step are
one forward; selection and its renewal are those of the ``partial`` drafter. Acceptance equals that of decoding; no
times. The oracle keeps, for each query, layer and group of heads, the committed tokens with the most attention.

For each arm also the loss of the target's text in one forward after one selection (``loss``), and by layer the share
of attention that the selected tokens hold and the relative error of the attention's output (``reconstruction``).

    python -m benchmarks retrieval --model FOLDER --corpus ../shared/data/corpus
"""

import hashlib
import json
import lzma
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.pictures import described, grounded
from benchmarks.kit.reading import interval, markdown_table, read
from foredraft.bench.measure.summary import grouped
from foredraft.bench.report import plots
from foredraft.core.draft import Draft, Law, Verdict
from foredraft.core.drafter import StepOut, View
from foredraft.core.rng import Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.core.tree import TokenTree
from foredraft.drafters.partial import Options, Partial
from foredraft.model.attention.slot_attention import AttentionObserver, attention_weights
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import PassthroughView, SlotCache
from foredraft.model.kv.masks import StepIn, address_segments
from foredraft.model.partial.kv_selection import Retrieval, Selection, Window
from foredraft.model.prefill import prefill

TASKS = ("planted", "copy", "continue")
BUDGETS = (128, 256, 512, 1024)
CHUNKS = (4, 8, 16, 32)
ROWS = 8
"""Rows of a text."""
BEGUN, COPIED = 32, 48
"""Tokens of a function that the end of a text repeats, and those that follow."""


class Arm(NamedTuple):
    """What is kept of the cache: ``oracle``, or the options of the ``partial`` drafter."""

    cache: str
    budget: int
    chunk: int = 8
    whole_layers: int = 0
    room: int = 64
    score: str = "mean"

    def options(self, gamma: int, room: int | None = None) -> Options:
        own = self._replace(room=room or self.room)._asdict()
        return Options(**own, num_assistant_tokens=gamma, assistant_confidence_threshold=0.0)


FILE = RESULTS / "retrieval.jsonl"
SAMPLES = 2000
"""Of the bootstrap."""
NAMES = {
    Arm("retrieval", 0): "retrieval",
    Arm("retrieval", 0, score="best"): "retrieval, `score=best`",
    Arm("retrieval", 0, whole_layers=2): "retrieval, first two layers whole",
    Arm("retrieval", 0, room=8): "retrieval, renewed every 8 tokens",
    Arm("window", 0): "window",
    Arm("window", 0, whole_layers=2): "window, first two layers whole",
    Arm("h2o", 0): "h2o",
    Arm("oracle", 0): "oracle",
}
DRAWN = {"oracle": 3, "retrieval": 0, "h2o": 1, "window": 2}
"""Caches of the picture, and the numbers of their colours."""
LAYERS = ((0, 1), (1, 2), (2, 3), (3, 10), (10, 20), (20, 30))
Runs = dict[tuple[str, int, Arm], dict[str, Any]]


def runs_of(kinds: dict[str, list[dict]]) -> Runs:
    runs = {(run["task"], run["context"], Arm(*run["arm"])): run for run in kinds["run"]}
    return dict(sorted(runs.items(), key=lambda item: (TASKS.index(item[0][0]), item[0][1])))


def length(counts: Sequence[Sequence[int]]) -> float:
    """Tokens per forward of the target."""
    return sum(count[0] for count in counts) / sum(count[1] for count in counts)


def counted(runs: Runs, task: str, arm: Arm) -> list[list[int]]:
    """The rows of an arm in all contexts of a task."""
    return [count for (name, _, each), run in runs.items() if (name, each) == (task, arm) for count in run["counts"]]


def shown(counts: Sequence[Sequence[int]]) -> str:
    if not counts:
        return ""
    low, high = interval(counts, length, SAMPLES)
    return f"{length(counts):.2f} ({low:.2f} to {high:.2f})"


def acceptance(runs: Runs) -> list[str]:
    """Acceptance length by task, context, cache and budget."""
    rows = []
    for task, context in dict.fromkeys((task, context) for task, context, _ in runs):
        for arm, name in NAMES.items():
            cells = [runs.get((task, context, arm._replace(budget=budget))) for budget in BUDGETS]
            if any(cells):
                rows.append([f"{task}, {context:,}", name, *(shown(cell["counts"]) if cell else "" for cell in cells)])
    return markdown_table(["task, tokens", "cache", *map(str, BUDGETS)], rows, words=(0, 1))


def chunks(runs: Runs) -> list[str]:
    """Acceptance length of retrieval by chunk size and budget, over all contexts of a task."""
    rows = []
    for task in TASKS:
        for chunk in CHUNKS:
            cells = [counted(runs, task, Arm("retrieval", budget, chunk)) for budget in BUDGETS]
            if any(cells):
                rows.append([task, str(chunk), *(f"{length(cell):.2f}" if cell else "" for cell in cells)])
    return markdown_table(["task", "chunk", *map(str, BUDGETS)], rows)


def loss_rows(kinds: dict[str, list[dict]], runs: Runs, budget: int) -> list[str]:
    """Loss of the target's text over the whole cache and over parts of it."""
    arms = {name: Arm(name, budget) for name in ("window", "h2o", "retrieval", "oracle")}
    rows = []
    for text in sorted(kinds.get("text", ()), key=lambda text: (TASKS.index(text["task"]), text["context"])):
        task, context = text["task"], text["context"]
        found = [runs.get((task, context, arm)) for arm in arms.values()]
        repeated = f"{sum(text['repeated']) / sum(text['tokens']):.2f}" if text["repeated"] else ""
        cells = [f"{statistics.mean(run['loss']):.2f}" if run else "" for run in found]
        rows.append([f"{task}, {context:,}", repeated, f"{statistics.mean(text['loss']):.2f}", *cells])
    return markdown_table(["task, tokens", "repeated", "whole cache", *arms], rows)


def layers(kinds: dict[str, list[dict]], budget: int) -> list[str]:
    """Share of attention on the selected tokens and relative error of attention's output, by layer, over all texts."""
    kinds_of = ("window", "retrieval", "best", "oracle")
    names = [f"{name} {budget}" for name in kinds_of]
    every = [line["layers"] for line in kinds.get("reconstruction", ()) if names[0] in line["layers"]]
    rows = []
    for first, end in LAYERS:
        cells = []
        for kind in ("held", "error"):
            for name in names:
                values = [value for each in every for value in each[name][kind][first:end]]
                cells.append(f"{statistics.mean(values):.2f}" if values else "")
        if any(cells):
            rows.append([str(end) if end == first + 1 else f"{first + 1} to {end}", *cells])
    head = ["window", "retrieval", "`score=best`", "oracle"]
    return markdown_table(["layer", *(f"held, {name}" for name in head), *(f"error, {name}" for name in head)], rows)


def paired(runs: Runs, task: str, first: Arm, second: Arm) -> list[tuple[list[int], list[int]]]:
    """The rows of two arms, in the contexts of a task that both have."""
    pairs = []
    for context in dict.fromkeys(context for name, context, _ in runs if name == task):
        own = [runs.get((task, context, arm)) for arm in (first, second)]
        if all(own):
            pairs += zip(*(run["counts"] for run in own if run), strict=True)
    return pairs


def ratio(pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Acceptance length of the first arm over that of the second, on the same texts."""
    first, second = zip(*pairs, strict=True)
    return length(first) / length(second)


def ratios(runs: Runs, first: Arm, second: Arm) -> dict[str, str]:
    """By task, the range of ``ratio`` over budgets, and with how many the 95 % interval is above 1."""
    found = {}
    for task in TASKS:
        both = [paired(runs, task, *(arm._replace(budget=budget) for arm in (first, second))) for budget in BUDGETS]
        if pairs := [own for own in both if own]:
            values = [ratio(own) for own in pairs]
            better = sum(interval(own, ratio, SAMPLES)[0] > 1 for own in pairs)
            found[task] = f"{min(values):.2f} to {max(values):.2f} ({better} of {len(pairs)} above 1)"
    return found


def comparisons(runs: Runs) -> list[str]:
    """Arms against each other at equal budgets."""
    retrieval = Arm("retrieval", 0)
    pairs = {
        "retrieval / window": (retrieval, Arm("window", 0)),
        "retrieval / h2o": (retrieval, Arm("h2o", 0)),
        "oracle / retrieval": (Arm("oracle", 0), retrieval),
        "`score=best` / mean": (retrieval._replace(score="best"), retrieval),
        "first two layers whole / not": (retrieval._replace(whole_layers=2), retrieval),
        "renewed every 8 tokens / 64": (retrieval._replace(room=8), retrieval),
    }
    rows = []
    for name, arms in pairs.items():
        found = ratios(runs, *arms)
        if found:
            rows.append([name, *(found.get(task, "") for task in TASKS)])
    return markdown_table(["acceptance lengths", *TASKS], rows)


def sentence(path: Path = FILE) -> str:
    """What the paper claims, and what was found here."""
    kinds = read(path)
    runs, origin = runs_of(kinds), kinds["provenance"][-1]
    parts = []
    for task, name in zip(
        TASKS, ("on planted facts", "on copies of far passages", "on a text that goes on"), strict=True
    ):
        cells = {cache: counted(runs, task, Arm(cache, 512)) for cache in ("retrieval", "window", "h2o", "oracle")}
        if cells["retrieval"]:
            values = ", ".join(f"{cache} {length(own):.2f}" for cache, own in cells.items() if own)
            parts.append(f"{name} {values}")
    contexts = sorted({context for _, context, _ in runs})
    longest = " and ".join(f"{context:,}" for context in contexts)
    return (
        "The paper claims that chunks retrieved by the query draft better than a window or heavy hitters of the same "
        "size, and that few tokens suffice in all layers but the first two. "
        f"Found here ({origin['model']}, {longest} tokens, 512 kept), tokens per forward: {'; '.join(parts)}."
    )


def table(path: Path = FILE) -> str:
    """All tables, with the picture."""
    kinds = read(path)
    runs, origin = runs_of(kinds), kinds["provenance"][-1]
    texts = kinds.get("text", [])
    rows = sum(len(text["tokens"]) for text in texts)
    tokens = sum(sum(text["tokens"]) for text in texts)
    name = "triforce.svg"
    return "\n".join(
        [
            f"{origin['model']}, greedy, drafts of {origin['gamma']} tokens. Ratios at equal budgets: the range over "
            f"{', '.join(map(str, BUDGETS))} tokens, and with how many the 95 % interval is above 1:",
            "",
            *comparisons(runs),
            "",
            f"![Acceptance length on planted facts by budget: oracle, retrieval, h2o, window](../figures/{name})",
            "",
            "Acceptance length (95 % bootstrap interval over texts) by budget:",
            "",
            *acceptance(runs),
            "",
            "By the tokens of a chunk, all contexts together:",
            "",
            *chunks(runs),
            "",
            "Loss of the target's texts, nats per token, over the whole cache and over 512 tokens selected once; the "
            "share of tokens that repeat what stands far back:",
            "",
            *loss_rows(kinds, runs, 512),
            "",
            "By layer, 512 tokens selected by the same query: the share of attention that they hold, and the relative "
            "error of the attention's output:",
            "",
            *layers(kinds, 512),
            "",
            f"{rows} texts, {tokens:,} tokens. The oracle keeps, for each query, layer and group of heads, the tokens "
            "with the most attention; no drafter can, since it would read the whole cache. Made by "
            f"`{origin['command']}`: {origin_line(origin)}.",
        ]
    )


def values(path: Path = FILE) -> dict[str, list[tuple[int, float]]]:
    """Acceptance length on planted facts by budget, for the caches of the picture."""
    runs = runs_of(read(path))
    found = {name: [(budget, counted(runs, "planted", Arm(name, budget))) for budget in BUDGETS] for name in DRAWN}
    return {name: [(budget, length(own)) for budget, own in points if own] for name, points in found.items()}


def facts(path: Path = FILE) -> str:
    """The values of the picture and where they are from, as text."""
    origin = read(path)["provenance"][-1]
    rows = [f"{name}: " + ", ".join(f"{b} {v:.2f}" for b, v in own) for name, own in values(path).items()]
    return "\n".join([*rows, f"{origin['model']}, planted facts, greedy; {origin_line(origin)}."])


@plots.styled()
def picture(path: Path = FILE) -> str:
    """Acceptance by budget on planted facts."""
    figure, axes = plots.canvas(5.6, 3.2)
    for name, own in values(path).items():
        if not own:
            continue
        axes.plot(*zip(*own, strict=True), "o-", color=plots.color(DRAWN[name]), markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BUDGETS, map(str, BUDGETS))
    axes.set_ylim(1, 8)
    axes.set_yticks(range(1, 9), map(str, range(1, 9)))
    axes.set_xlabel("tokens kept of the cache")
    axes.set_title("Acceptance length, planted facts")
    axes.legend(frameon=False)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    text = grounded(plots.themed_svg(figure, "Acceptance length on planted facts by budget"))
    return described(text, "", facts(path))


# ---- measurement

FACTS = (
    (
        "The secret code of the lighthouse on Gull Island is",
        "48213, and the keeper who guards it is called Ivo Brandt.",
    ),
    ("Doctor Amelia Ravenscroft keeps", "seventeen grey parrots in Lisbon, and each of them can count to forty."),
    ("The treaty of Varnholm was signed on", "14 March 1742 by King Osric and Queen Isolde before nine bishops."),
    ("To open the vault, turn the", "red wheel four times, press the silver button, and whisper the word marzipan."),
    ("The night train to Oszlan leaves from", "platform 11 at 23:47, and its third carriage carries only apples."),
    ("The recipe of Sister Benedicta asks for", "six quinces, two spoons of saffron, and a pinch of blue salt."),
    ("The longest bridge of Tarrenmoor is", "912 metres long and was painted green by the prisoners of Hask."),
    ("Captain Yusuf Almeida lost", "his left glove, three maps of Greenland and a violin in the storm of 1688."),
    ("The password of the chess club is", "octopus umbrella, and new members must bring a jar of honey."),
    ("Professor Lindqvist discovered that", "purple moths of the Zambezi sleep upside down on Thursdays."),
    ("The winner of the Corvina prize was", "Ludmila Petrakis, who sold 7,350 copies of her book on clocks."),
    ("The telephone number of the observatory is", "555-0194, but nobody answers before noon in February."),
    ("In the attic of Number 29 there is", "a stuffed walrus, a cracked mirror and 44 umbrellas of silk."),
    ("The river Ombre was dammed in", "1907 by engineers from Trieste, who used 80,000 blocks of basalt."),
    ("The youngest duke of Brellin married", "a juggler named Rosalba, and they raised ostriches near Padua."),
    ("The medicine of Doctor Hu contains", "ginger, powdered amber and eleven drops of the sap of a cedar."),
)
"""Beginnings, which the end of a text repeats, and what follows."""


ARMS = tuple(
    arm
    for budget in BUDGETS
    for arm in (
        Arm("window", budget),
        Arm("window", budget, whole_layers=2),
        *(Arm("retrieval", budget, chunk) for chunk in CHUNKS),
        Arm("retrieval", budget, score="best"),
        Arm("retrieval", budget, whole_layers=2),
        Arm("retrieval", budget, room=8),
        Arm("oracle", budget),
        Arm("h2o", budget),
    )
)


@final
class Oracle(Selection):
    """The tokens with the most attention of the newest query, summed over the heads of a group."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def choose(self, query: Tensor, keys: Tensor, scale: float) -> Tensor:
        weights = ((query * scale) @ keys.transpose(1, 2)).softmax(-1).sum(1)
        return weights.topk(self.budget, dim=1).indices.sort(dim=1).values


# ---- texts


class Task(NamedTuple):
    """Prompts that begin with ``prefix`` or a part of it, how many tokens the target writes after each, and what they
    are if it repeats what stands far back."""

    prefix: list[int]
    prompts: list[list[int]]
    counts: list[int]
    expected: list[list[int]]


def documents(corpus: Path, name: str) -> Iterator[str]:
    with lzma.open(corpus / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def functions(corpus: Path, encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    """Beginnings of Python functions, one a file."""
    for text in documents(corpus, "the_algorithms_python"):
        begin = text.find("\ndef ")
        ids = encode(text[begin + 1 : begin + 2000]) if begin >= 0 else []
        if len(ids) >= BEGUN + COPIED:
            yield ids[: BEGUN + COPIED]


def task_of(name: str, context: int, number: int, corpus: Path, encode: Callable[[str], list[int]]) -> Task:
    """The rows of one text; the longest prompt has about ``context`` tokens."""
    novels = (text for text in documents(corpus, "english_novels") if len(text) > 6 * context)
    novel = [text for text, _ in zip(novels, range(number + 1), strict=False)][number]
    ids, gap = encode(novel)[200:], encode("\n\n")
    if name == "continue":
        step = context // (4 * ROWS)
        lengths = [context - step * row for row in range(ROWS)]
        return Task(ids[:context], [ids[:length] for length in lengths], [COPIED] * ROWS, [[]] * ROWS)
    first = number * ROWS
    if name == "planted":
        pairs = [FACTS[(first + row) % len(FACTS)] for row in range(ROWS)]
        planted = [(encode(begin), encode(f" {rest}")) for begin, rest in pairs]
    else:
        found = [each for each, _ in zip(functions(corpus, encode), range(first + ROWS), strict=False)][first:]
        planted = [(each[:BEGUN], each[BEGUN:]) for each in found]
    length = context - sum(len(begin + rest + 2 * gap) for begin, rest in planted) - BEGUN
    step, prefix = length // 2 // ROWS, []
    for row, (begin, rest) in enumerate(planted):
        prefix += [*ids[row * step : (row + 1) * step], *gap, *begin, *rest, *gap]
    prefix += ids[ROWS * step : length]
    prompts = [prefix + gap + begin for begin, _ in planted]
    return Task(prefix, prompts, [len(rest) for _, rest in planted], [rest for _, rest in planted])


@dataclass(frozen=True, slots=True)
class Written:
    """The target's greedy texts, with their keys and values in the cache.

    ``history``: [B, L], prompts and texts; row b's text is ``history[b, begins[b] : ends[b]]``. ``loss``: of each
    row's text, in nats a token.
    """

    target: CausalLM
    cache: SlotCache
    history: Tensor
    begins: list[int]
    ends: list[int]
    loss: list[float]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(range(len(self.ends)))

    def view(self, lengths: Sequence[int]) -> View:
        """The rows with so many tokens committed."""
        size, device = self.target.vocab_size, self.history.device
        few = [()] * len(lengths)
        warp = Warp.of(
            [SamplingParams()] * len(few), vocab_size=size, eos_token_ids=few, prompt_lengths=self.begins, device=device
        )
        place = torch.tensor(lengths, device=device)
        return View(self.rows, self.history, place, tuple(lengths), warp, Noise(torch.zeros_like(place), place))

    def tokens(self, lengths: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """[B, count] twice: the root and the tokens after it, and the tokens one further on."""
        index = (
            torch.tensor(lengths, device=self.history.device)[:, None] + torch.arange(count + 1).to(self.history) - 1
        )
        both = self.history.gather(1, index.clamp(max=self.history.shape[1] - 1))
        return both[:, :-1], both[:, 1:]


def losses(logits: Tensor, wanted: Tensor) -> Tensor:
    """[B, N]: of the wanted tokens, in nats."""
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), wanted, reduction="none")


@torch.inference_mode()
def write(target: CausalLM, tasks: Sequence[Task]) -> Written:
    """Decode the texts of these tasks greedily, all rows together."""
    prompts, counts = ([each for task in tasks for each in getattr(task, name)] for name in ("prompts", "counts"))
    cache, rows, device = target.new_cache(), tuple(range(len(prompts))), target.device
    begins = [len(prompt) for prompt in prompts]
    ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
    cache.reserve(rows, max(ends) + 1 + max(*counts, 16))
    first = 0
    for task in tasks:
        own = range(first, first + len(task.prompts))
        prefill(target, cache, own[:1], torch.tensor([task.prefix], device=device), [0])
        if own[1:]:
            cache.fork([own[0]] * len(own[1:]), own[1:], len(task.prefix))
        for row, prompt in zip(own, task.prompts, strict=True):
            shared = min(len(task.prefix), len(prompt) - 1)
            rest = prompt[shared:-1]
            if rest:
                prefill(target, cache, [row], torch.tensor([rest], device=device), [shared])
        first += len(own)
    history = torch.zeros(len(rows), max(ends) + 1, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        history[row, : begins[row]] = torch.tensor(prompt, device=device)
    lengths, total = torch.tensor(begins, device=device), torch.zeros(len(rows), device=device)
    for index in range(max(counts)):
        place = lengths - 1 + index
        where = place[:, None].clamp(max=history.shape[1] - 1)  # rows that are done go on, and nothing is kept of it
        tree = TokenTree.root(history.gather(1, where)[:, 0])
        step = target.address(tree, place, rows, max(begins) + index)
        logits = target.forward(step, cache).logits[:, -1:]
        token = logits.argmax(-1)
        going = index < torch.tensor(counts, device=device)
        total += losses(logits, token)[:, 0] * going
        where = (where + 1).clamp(max=history.shape[1] - 1)
        history.scatter_(1, where, torch.where(going[:, None], token, history.gather(1, where)))
    loss = (total / torch.tensor(counts, device=device)).tolist()
    return Written(target, cache, history, begins, ends, loss)


# ---- replays


class PartialDraft:
    """The ``partial`` drafter's model and selection over the cache of texts."""

    def __init__(self, written: Written, arm: Arm, gamma: int, room: int | None = None) -> None:
        target = written.target
        drafter = Partial(arm.options(gamma, room), target, written.cache, target.vocab_size)
        self._sync, self._written = drafter._cache_sync, written
        self._nodes = 1 if arm.cache == "h2o" else gamma  # attention is counted for the first node of a forward
        for row in written.rows:
            self._sync.admit(row, torch.zeros(0, dtype=torch.long), {})

    def logits(self, lengths: Sequence[int], tokens: Tensor) -> Tensor:
        """[B, N, V]: after each of these tokens, of which the first are the roots."""
        view, model = self._written.view(lengths), self._sync.model
        self._sync.sync(view)
        parts = []
        for begin in range(0, tokens.shape[1], self._nodes):
            chain = TokenTree.chain(tokens[:, begin : begin + self._nodes])
            step = model.address(chain, view.lengths - 1 + begin, view.rows, max(lengths) - 1 + tokens.shape[1])
            parts.append(model.forward(step, model.cache).logits)
        return torch.cat(parts, dim=1)

    def observe(self, lengths: Sequence[int], allowed: Tensor, accepted: Tensor, tokens: Tensor) -> None:
        """Tell the selection how many of the drafted tokens were accepted."""
        tree = TokenTree.chain(torch.nn.functional.pad(tokens, (0, 1)), allowed + 1)
        index = torch.arange(tree.tokens.shape[1], device=tokens.device)
        verdict = Verdict(torch.where(index <= accepted[:, None], index, -1), tokens[:, 0])
        view, nothing = self._written.view(lengths), StepOut(torch.zeros(1, 1, 1))
        self._sync.commit(view, Draft(tree, Law.FIXED), verdict, nothing)


class OracleDraft:
    """The target over the tokens with the most attention of each query."""

    def __init__(self, written: Written, arm: Arm) -> None:
        self._written, self._budget = written, arm.budget

    def logits(self, lengths: Sequence[int], tokens: Tensor) -> Tensor:
        """As ``PartialDraft.logits``."""
        target, cache, rows = self._written.target, self._written.cache, self._written.rows
        index = torch.arange(tokens.shape[1], device=tokens.device)
        roots = (torch.tensor(lengths, device=tokens.device) - 1)[:, None].expand_as(tokens)
        first = self._written.history.shape[1]
        step = address_segments(tokens, roots + index, roots, first, rows, target.layout).within(cache.slots)
        view = PassthroughView(cache, step)
        return target.run(step, view, None, MostAttention(view, step, self._budget, first)).logits

    def observe(self, lengths: Sequence[int], allowed: Tensor, accepted: Tensor, tokens: Tensor) -> None: ...


@final
class MostAttention(AttentionObserver):
    """Hides all slots before ``first`` but those with the most attention of each query, by group of heads."""

    def __init__(self, view: PassthroughView, step: StepIn, budget: int, first: int) -> None:
        self._view, self._budget, self._first = view, budget, first
        self._visible = next(iter(step.masks(torch.float32).values()))
        self._mask = self._visible

    def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys, values = self._view.store.write(layer, key, value, self._view)
        weights = attention_weights(query, keys, self._visible, scale).sum(2)
        best = weights[..., : self._first].topk(self._budget).indices
        kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)
        kept[..., self._first :] = True
        self._mask = self._visible.where(kept, torch.finfo(torch.float32).min)
        return keys, values

    def mask(self, layer: int, mask: Tensor) -> Tensor:
        return self._mask

    def record_weights(self, layer: int, weights: Tensor) -> None: ...


def drafted(written: Written, arm: Arm, gamma: int, room: int | None = None) -> PartialDraft | OracleDraft:
    return OracleDraft(written, arm) if arm.cache == "oracle" else PartialDraft(written, arm, gamma, room)


@torch.inference_mode()
def replay(written: Written, arm: Arm, gamma: int) -> list[list[int]]:
    """For each row its tokens, forwards of the target, drafted tokens and accepted ones."""
    draft, lengths = drafted(written, arm, gamma), list(written.begins)
    counts = [[end - begin, 0, 0, 0] for begin, end in zip(written.begins, written.ends, strict=True)]
    index = torch.arange(gamma, device=written.history.device)
    while lengths != written.ends:
        tokens, wanted = written.tokens(lengths, gamma)
        left = [max(end - length - 1, 0) for length, end in zip(lengths, written.ends, strict=True)]
        allowed = torch.tensor(left, device=tokens.device).clamp(max=gamma)
        guesses = draft.logits(lengths, tokens).argmax(-1)
        right = (guesses == wanted) & (index < allowed[:, None])
        accepted = right.int().cummin(1).values.sum(1)
        draft.observe(lengths, allowed, accepted, tokens)
        for row, (asked, taken) in enumerate(torch.stack([allowed, accepted], 1).tolist()):
            if lengths[row] < written.ends[row]:
                lengths[row] += taken + 1
                counts[row] = [counts[row][0], counts[row][1] + 1, counts[row][2] + asked, counts[row][3] + taken]
    return counts


@torch.inference_mode()
def loss_of(written: Written, arm: Arm) -> list[float]:
    """Of each row's text in one forward after one selection, in nats a token."""
    counts = [end - begin for begin, end in zip(written.begins, written.ends, strict=True)]
    width = max(counts)
    draft = drafted(written, arm, width, room=width)
    if isinstance(draft, PartialDraft):
        draft._nodes = width
    tokens, wanted = written.tokens(written.begins, width)
    found = losses(draft.logits(written.begins, tokens), wanted)
    return [float(found[row, :count].mean()) for row, count in enumerate(counts)]


# ---- reconstruction


@final
class Reconstruction(AttentionObserver):
    """Compares attention over selected tokens with full attention, for one token a row; the layers go on with the full
    one.

    ``held[name][layer]``, ``error[name][layer]``: lists over rows of the share of attention on selected tokens and of
    the relative error of the output, means over heads.
    """

    def __init__(self, view: PassthroughView, lengths: Sequence[int], selections: dict[str, Selection]) -> None:
        self._view, self._lengths, self._selections = view, lengths, selections
        self.held: dict[str, dict[int, list[Tensor]]] = {name: {} for name in selections}
        self.error: dict[str, dict[int, list[Tensor]]] = {name: {} for name in selections}

    def attend_to(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        keys, values = self._view.store.write(layer, key, value, self._view)
        for row, length in enumerate(self._lengths):
            own, of = keys[row, :, :length], values[row, :, :length]
            asked = query[row, :, 0].unflatten(0, (own.shape[0], -1))
            weights = ((asked * scale) @ own.transpose(1, 2)).softmax(-1)
            full = weights @ of
            for name, selection in self._selections.items():
                border = selection.border(length - 1)
                kept = torch.zeros(own.shape[:2], device=own.device)
                kept.scatter_(1, selection.choose(asked, own[:, :border], scale), 1.0)
                kept[:, border:] = 1.0
                some = weights * kept[:, None]
                share = some.sum(-1)
                off = (some @ of / share[..., None] - full).norm(dim=-1) / full.norm(dim=-1)
                self.held[name].setdefault(layer, []).append(share.mean())
                self.error[name].setdefault(layer, []).append(off.mean())
        return keys, values

    def record_weights(self, layer: int, weights: Tensor) -> None: ...


@torch.inference_mode()
def reconstruction(written: Written, budgets: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """By selection and budget, and by layer: share of attention and relative error, means over rows and three places
    of each text."""
    selections: dict[str, Selection] = {}
    for budget in budgets:
        selections |= {f"window {budget}": Window(budget), f"oracle {budget}": Oracle(budget)}
        selections |= {f"retrieval {budget}": Retrieval(budget), f"best {budget}": Retrieval(budget, score="best")}
    target, cache, found = written.target, written.cache, []
    for step in range(3):
        lengths = [b + step * (e - b) // 3 for b, e in zip(written.begins, written.ends, strict=True)]
        tokens, _ = written.tokens(lengths, 1)
        place = torch.tensor(lengths, device=tokens.device) - 1
        inputs = target.address(TokenTree.chain(tokens), place, written.rows, max(lengths)).within(cache.slots)
        view = PassthroughView(cache, inputs)
        found.append(Reconstruction(view, lengths, selections))
        target.run(inputs, view, None, found[-1])
    means = {}
    for name in selections:
        means[name] = {
            kind: [
                round(
                    float(torch.stack([value for each in found for value in getattr(each, kind)[name][layer]]).mean()),
                    4,
                )
                for layer in range(target.layers)
            ]
            for kind in ("held", "error")
        }
    return means


# ---- runs


def cells(args: Namespace) -> list[Cell]:
    kinds = [{"kind": "text"}, {"kind": "reconstruction"}]
    kinds += [{"kind": "run", "arm": list(arm)} for arm in ARMS if arm.cache in args.only]
    return [
        {"task": name, "context": context, **each} for context in args.contexts for name in args.tasks for each in kinds
    ]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    raw = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device)
    target = CausalLM(raw, owned=True)
    if args.device.startswith("cuda"):
        yield {"kind": "provenance", "device": torch.cuda.get_device_name()}

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for (context, name), own in grouped(cells, lambda cell: (cell["context"], cell["task"])).items():
        tasks = [task_of(name, context, text, args.corpus, encode) for text in range(args.count)]
        written = write(target, tasks)
        for cell in own:
            arm = Arm(*cell["arm"]) if "arm" in cell else None
            yield {**cell, **found(cell["kind"], arm, written, tasks, args)}
        del written


def found(kind: str, arm: Arm | None, written: Written, tasks: Sequence[Task], args: Namespace) -> dict:
    """What a line of this kind holds."""
    if kind == "text":
        expected = [each for task in tasks for each in task.expected]
        same = []
        for row, wanted in enumerate(expected):
            text = written.history[row, written.begins[row] : written.ends[row]].tolist()
            same.append(sum(a == b for a, b in zip(text, wanted, strict=False)))
        digest = hashlib.sha256(str(written.history.tolist()).encode()).hexdigest()
        tokens = [end - begin for begin, end in zip(written.begins, written.ends, strict=True)]
        return {"tokens": tokens, "repeated": same, "loss": rounded(written.loss), "sha256": digest}
    if arm is None:
        return {"layers": reconstruction(written, [budget for budget in BUDGETS if budget < min(written.begins) - 8])}
    counts, loss = replay(written, arm, args.gamma), loss_of(written, arm)
    return {"gamma": args.gamma, "counts": counts, "loss": rounded(loss)}


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


EXPERIMENT = Experiment(
    name="retrieval",
    question="what parts of a long context accept on a real model: methods/triforce.md",
    options={
        "model": option(Path, "folder of the target", required=True),
        "name": option("SmolLM2-135M-Instruct", "of the model, in the results"),
        "corpus": option(Path("../shared/data/corpus")),
        "tasks": option(TASKS, choices=TASKS),
        "contexts": option([4000, 8000], "tokens of the longest prompt"),
        "count": option(2, "texts, of eight rows each"),
        "only": option(["window", "retrieval", "h2o", "oracle"], "caches"),
        "gamma": option(8, "drafted tokens a step"),
        "device": option("cpu"),
    },
    cells=cells,
    measure=measure,
    facts=lambda args: {"model": args.name, "dtype": "float32", "count": args.count, "gamma": args.gamma},
    tables={"docs/methods/triforce.md": {"found": sentence, "measured": table}},
    figures={"triforce": picture},
    hours=3.0,
    needs=lambda inputs: (Path(inputs.smollm2), inputs.corpus),
    commands=lambda inputs: [
        measured("retrieval", "--model", inputs.smollm2, "--corpus", inputs.corpus, "--threads", "2")
    ],
)
