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

    python benchmarks/retrieval.py --model FOLDER --corpus ../shared/data/corpus
    python benchmarks/retrieval.py --plot

A finished arm is not run again. ``--part 2/4`` runs every fourth arm, from the second on; files of parts are joined
with ``cat``. Tables: ``summary.py --write``.
"""

import argparse
import hashlib
import json
import lzma
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import transformers
from origin import provenance
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

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

RESULTS = Path(__file__).resolve().parent / "results" / "retrieval.jsonl"
TASKS = ("planted", "copy", "continue")
BUDGETS = (128, 256, 512, 1024)
CHUNKS = (4, 8, 16, 32)
ROWS = 8
"""Rows of a text."""
BEGUN, COPIED = 32, 48
"""Tokens of a function that the end of a text repeats, and those that follow."""
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


def lines(args: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """What is not done, one line each."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    raw = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device)
    target = CausalLM(raw, owned=True)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    part, parts = (int(number) for number in args.part.split("/"))
    number = 0
    for context in args.contexts:
        for name in args.tasks:
            arms = [("text", None), ("reconstruction", None), *(("run", arm) for arm in ARMS if arm.cache in args.only)]
            mine = []
            for kind, arm in arms:
                if number % parts == part - 1 and (kind, name, context, arm) not in done:
                    mine.append((kind, arm))
                number += 1
            if not mine:
                continue
            tasks = [task_of(name, context, text, args.corpus, encode) for text in range(args.count)]
            written = write(target, tasks)
            for kind, arm in mine:
                yield {"kind": kind, "task": name, "context": context, **found(kind, arm, written, tasks, args)}
            del written


def found(kind: str, arm: Arm | None, written: Written, tasks: Sequence[Task], args: argparse.Namespace) -> dict:
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
    return {"arm": list(arm), "gamma": args.gamma, "counts": counts, "loss": rounded(loss)}


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the target")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="of the model, in the results")
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[4000, 8000], help="tokens of the longest prompt")
    parser.add_argument("--count", type=int, default=2, help="texts, of eight rows each")
    parser.add_argument("--only", nargs="+", default=["window", "retrieval", "h2o", "oracle"], help="caches")
    parser.add_argument("--gamma", type=int, default=8, help="drafted tokens a step")
    parser.add_argument("--part", default="1/1", help="which part of the arms, as 2/4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plot", action="store_true", help="draw the picture of the results, and run nothing")
    args = parser.parse_args()
    if args.plot:
        import retrieval_tables

        retrieval_tables.plot()
        return
    if args.model is None or not args.corpus.is_dir():
        sys.exit(f"Give the target's folder as --model, and a folder of texts (there is none at {args.corpus}).")
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {
        (each["kind"], each["task"], each["context"], Arm(*each["arm"]) if "arm" in each else None)
        for each in made
        if each["kind"] != "provenance"
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as out:
        command = f"python benchmarks/retrieval.py --contexts {' '.join(map(str, args.contexts))}"
        on = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
        facts = {"model": args.name, "dtype": "float32", "count": args.count, "gamma": args.gamma}
        out.write(json.dumps(provenance(command, **facts, **({"device": on} if on else {}))) + "\n")
        for line in lines(args, done):
            out.write(json.dumps(line) + "\n")
            out.flush()
            shown = {key: value for key, value in line.items() if key not in ("counts", "layers", "sha256")}
            if "counts" in line:
                tokens, steps, *_ = (sum(column) for column in zip(*line["counts"], strict=True))
                shown |= {"loss": sum(line["loss"]) / len(line["loss"]), "acceptance_length": round(tokens / steps, 3)}
            print(shown, flush=True)


if __name__ == "__main__":
    main()
