"""Long contexts: time per token and memory of drafting over a part of the cache, against plain decoding.

Two parts, with one JSON line a run; times are wall times of decoding, without prefill.

4k: trained models on real texts, greedy, near the end of the target's context.

32k: random weights in the target's shape. Attention takes its real time, but acceptance must be forced, because
random models agree on nothing: embeddings and output layers make the next token a fixed function of the last one at
every level, and a wrapper around each drafter spoils its tokens at the assumed rates of RATES, which the file records.
Keys and values of the prompt are random numbers instead of a prefill.
"""

import hashlib
import json
import lzma
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, quartiles, read
from foredraft.core.draft import Draft, Verdict
from foredraft.core.drafter import Drafter, Plan, Rewindable, StepOut, View
from foredraft.core.rng import Noise, RandomStream
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.drafters.common.wrapper import DrafterWrapper
from foredraft.drafters.context import NestedDrafter
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.partial import Options as PartialOptions, Partial
from foredraft.drafters.triforce import Options as TriForceOptions, TriForce
from foredraft.engine.step import StepInputs, Stepper
from foredraft.files.provenance import shortened
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache

RATES = {"inner": 0.75, "outer": 0.9}
"""Probability that a drafted token is right: the small model's for the middle level, and a draft's for the target."""
CONSTANT = "num_assistant_tokens_schedule=constant"


def real(args: Namespace) -> Iterator[Line]:
    """Real models at the target's full context."""
    target, draft = str(args.models / args.target), str(args.models / args.draft)
    chain = f"{CONSTANT},num_assistant_tokens={args.gamma},assistant_confidence_threshold=0"
    arms = {
        "none": None,
        "draft_model": f"draft_model:{draft},window=256,sinks=16,{chain}",
        **{kind: f"partial,cache={kind},budget={args.budget},{chain}" for kind in ("retrieval", "window", "h2o")},
        "triforce": f"triforce:{draft},gamma={args.gamma},budget={args.budget},{CONSTANT}",
    }
    generators = dict(zip(arms, foredraft.load_many(target, list(arms.values())), strict=True))
    length = generators["none"].engine.target.max_length - args.new_tokens
    for number, ids in enumerate(texts(args, target, length)):
        names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
        for name in names:
            spec = arms[name]
            engine = generators[name].engine
            stepper = engine._stepper
            memory = PeakMemory(stepper.drafter, stepper.cache)
            engine._stepper = replace(stepper, drafter=memory)
            result = generators[name].generate(ids, min_new_tokens=args.new_tokens, max_new_tokens=args.new_tokens)
            engine._stepper = stepper
            stats = result.stats.as_dict()
            line = {
                "kind": "run",
                "part": "4k",
                "arm": name,
                "spec": spec and shortened(spec),
                "text": number,
                "prompt_tokens": length,
            }
            line |= {"prompt_sha256": hashlib.sha256(str(ids).encode()).hexdigest()}
            line |= {
                "tokens": len(result.tokens),
                "stats": stats,
                "cache_bytes": memory.full,
                "partial_bytes": memory.part,
            }
            yield line | {"output": result.tokens}


def texts(args: Namespace, target: str, length: int) -> list[list[int]]:
    """Passages of the corpus, as token ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    with lzma.open(args.corpus / "english_novels.jsonl.xz", "rt", encoding="utf-8") as lines:
        books = [json.loads(line)["text"] for line, _ in zip(lines, range(args.count), strict=False)]
    begin = 20_000  # characters; skips title pages and prefaces
    return [tokenizer(book[begin : begin + 8 * length])["input_ids"][:length] for book in books]


@final
class PeakMemory(DrafterWrapper):
    """Records the most bytes of the target's cache (``full``) and of the partial copy (``part``)."""

    def __init__(self, inner: Drafter, cache: SlotCache) -> None:
        super().__init__(inner)
        self.full = self.part = 0
        self._cache = cache

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        super().commit(view, draft, verdict, out)
        self.full = max(self.full, self._cache.nbytes)
        if isinstance(self._inner, Partial | TriForce):
            self.part = max(self.part, self._inner.partial_bytes)


@final
class Spoiled(Rewindable):
    """A drafter whose tokens are each right with the probability ``rate``, and all wrong after the first wrong one."""

    def __init__(self, inner: Rewindable, rate: float, vocab_size: int) -> None:
        self.inner = inner
        self.needs = inner.needs
        self._rate = rate
        self._vocab_size = vocab_size

    def admit(self, row: int, prompt: Tensor, hidden: Mapping[int, Tensor]) -> None:
        self.inner.admit(row, prompt, hidden)

    def propose(self, view: View, plan: Plan) -> Draft:
        draft = self.inner.propose(view, plan)
        index = torch.arange(1, draft.tree.tokens.shape[1]).expand(len(view.rows), -1)
        right = (view.noise.nested(1).uniform(RandomStream.DRAFT, index) < self._rate).cummin(1).values
        tokens = draft.tree.tokens.clone()
        tokens[:, 1:] = torch.where(right, tokens[:, 1:], (tokens[:, 1:] + 1) % self._vocab_size)
        return replace(draft, tree=replace(draft.tree, tokens=tokens))

    def commit(self, view: View, draft: Draft, verdict: Verdict, out: StepOut) -> None:
        self.inner.commit(view, draft, verdict, out)

    def rewind(self, row: int, length: int) -> None:
        self.inner.rewind(row, length)

    def release(self, row: int) -> None:
        self.inner.release(row)


def shaped(folder: Path, context: int, steps: Tensor) -> CausalLM:
    """A model in the shape of another, with random weights; token t is followed by steps[t], whatever came before."""
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings, config.tie_word_embeddings, config.dtype = context, False, torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    rows = torch.nn.functional.normalize(torch.randn(config.vocab_size, config.hidden_size), dim=1)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(100 * rows)  # no layer can outweigh it
        model.get_output_embeddings().weight[steps] = rows
    return CausalLM(model, verify=False)


def random_text(target: CausalLM, length: int, tokens: Tensor) -> tuple[SlotCache, View]:
    """One row whose cached keys and values are random numbers."""
    cache = target.new_cache()
    cache.reserve([0], length + 2048)
    config = target.model.config
    some = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim)
    for layer in range(target.layers):
        for buffer in cache.buffers(layer, some, some):
            buffer.normal_()
    warp = Warp.of(
        [SamplingParams()], vocab_size=target.vocab_size, eos_token_ids=[()], prompt_lengths=[length], device="cpu"
    )
    place = torch.tensor([length])
    return cache, View((0,), tokens[None, :length], place, (length,), warp, Noise(torch.tensor([7]), place))


def forced(args: Namespace) -> Iterator[Line]:
    """Random weights at 32k, acceptance by ``RATES``."""
    vocab = AutoConfig.from_pretrained(args.models / args.target).vocab_size
    steps = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    target = shaped(args.models / args.target, 65_536, steps)
    small = shaped(args.models / args.draft, 2048, steps)
    prompt = torch.randint(vocab, (args.context,), generator=torch.Generator().manual_seed(2))
    chain = {"num_assistant_tokens": args.gamma, "assistant_confidence_threshold": 0.0}
    for name in ("none", "draft_model", "retrieval", "window", "h2o", "triforce"):
        with torch.inference_mode():
            cache, view = random_text(target, args.context, prompt)
        inner = DraftModel(DraftOptions(**{**chain, "window": 256, "sinks": 16}), small, vocab)
        if name == "triforce":
            inner = DraftModel(DraftOptions(num_assistant_tokens=3, window=256, sinks=16), small, vocab)
            options = TriForceOptions(gamma=args.gamma, budget=args.far_budget)
            bare = TriForce(
                options, target, cache, NestedDrafter(Spoiled(inner, RATES["inner"], vocab), draws=True), vocab
            )
        elif name in ("retrieval", "window", "h2o"):
            bare = Partial(PartialOptions(cache=name, budget=args.far_budget, **chain), target, cache, vocab)
        else:
            bare = inner
        rate = RATES["inner" if name == "draft_model" else "outer"]
        memory = PeakMemory(NoDrafter() if name == "none" else Spoiled(bare, rate, vocab), cache)
        line = decode(Stepper(target, cache, memory), view, 0 if name == "none" else args.gamma, args.far_tokens)
        if isinstance(bare, Partial | TriForce):
            memory.part = bare.partial_bytes
        line |= {"kind": "run", "part": "32k", "arm": name, "prompt_tokens": args.context}
        line |= {"rates": RATES, "cache_bytes": memory.full, "partial_bytes": memory.part}
        yield line


def decode(stepper: Stepper, view: View, length: int, tokens: int) -> dict:
    """Run steps until ``tokens`` are emitted; the first one, which fills caches, is timed separately."""
    stepper.drafter.admit(0, view.history[0, :-1], {})
    emitted, seconds = [], []
    while sum(emitted) < tokens:
        started = time.perf_counter()
        done = stepper(StepInputs(view, Plan((length,))))
        seconds.append(time.perf_counter() - started)
        emitted.append(len(done.rows[0].emitted))
        view = view.followed_by(done.end.emitted, [emitted[-1]])
    return {
        "tokens": sum(emitted),
        "steps": len(emitted),
        "acceptance_length": sum(emitted) / len(emitted),
        "first_seconds": seconds[0],
        "seconds_a_token": sum(seconds[1:]) / sum(emitted[1:]),
    }


MIB = 2**20


def table() -> str:
    """Time per token and memory at two context lengths, one line per arm."""
    kinds = read(RESULTS / "triforce.jsonl")
    origin, parts = kinds["provenance"][0], list[str]()
    for part, title in (("4k", "trained models, greedy"), ("32k", "random weights, acceptance forced by a table")):
        runs = [run for run in kinds["run"] if run["part"] == part]
        names = list(dict.fromkeys(run["arm"] for run in sorted(runs, key=lambda run: run["arm"] != "none")))
        plain = [_seconds(run) for run in runs if run["arm"] == "none"]
        lines = []
        for name in names:
            own = [run for run in runs if run["arm"] == name]
            seconds = [_seconds(run) for run in own]
            ratios = [slow / fast for slow, fast in zip(plain, seconds, strict=True)]
            length = statistics.mean((run.get("stats") or run)["acceptance_length"] for run in own)
            memory = [max(run[key] for run in own) / MIB for key in ("cache_bytes", "partial_bytes")]
            speed = quartiles(ratios) if len(ratios) > 1 else f"{ratios[0]:.2f}"
            row = [name, f"{1e3 * statistics.median(seconds):.1f}", speed, f"{length:.2f}"]
            lines.append([*row, *(f"{mebibytes:.0f}" for mebibytes in memory)])
        samples = f"{len(plain)} prompts" if len(plain) > 1 else "one prompt"
        parts += [f"{runs[0]['prompt_tokens']:,} tokens of context, {title} ({samples}):", ""]
        head = ["arm", "ms per token", "speed-up", "acceptance length", "KV cache, MiB", "partial copy, MiB"]
        parts += [*markdown_table(head, lines), ""]
    rates = origin["rates"]
    about = (
        f"Times: {origin['target']} with {origin['draft']}, **older than [shared noise](shared_noise.md) and the "
        "present loop**, and not measured again."
    )
    made = (
        f"Forced acceptance rates: {rates['inner']} per token of the small model, {rates['outer']} per token "
        f"of a draft. Made by `{origin['command']}`: {origin_line(origin)}."
    )
    return "\n".join([about, "", *parts, made])


def _seconds(run: Line) -> float:
    return run["seconds_a_token"] if "seconds_a_token" in run else 1 / run["stats"]["tokens_per_second"]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for part in args.parts:
        yield from {"4k": real, "32k": forced}[part](args)


EXPERIMENT = Experiment(
    name="triforce",
    question="long contexts: methods/triforce.md",
    options={
        "models": option(Path("../shared/models")),
        "corpus": option(Path("../shared/data/corpus")),
        "target": option("target-65m"),
        "draft": option("draft-6m"),
        "parts": option(["4k", "32k"], choices=["4k", "32k"]),
        "count": option(4, "texts of the 4k part"),
        "new_tokens": option(192, "of the 4k part"),
        "gamma": option(8, "drafted tokens a step"),
        "budget": option(512, "of the 4k part"),
        "context": option(32_768, "of the 32k part"),
        "far_budget": option(2048, "of the 32k part"),
        "far_tokens": option(96, "new tokens of the 32k part"),
    },
    measure=measure,
    facts=lambda args: {"dtype": "float32", "target": args.target, "draft": args.draft, "rates": RATES},
    threads=None,
    tables={"docs/methods/triforce.md": {"measured": table}},
    rank=6,
    hours=0.5,
    needs=lambda inputs: (inputs.models, inputs.corpus),
    commands=lambda inputs: [measured("triforce", "--models", inputs.models, "--corpus", inputs.corpus)],
)
