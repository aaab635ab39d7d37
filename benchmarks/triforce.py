"""Long contexts: time per token and memory of drafting over a part of the cache, against plain decoding.

Two parts, with one JSON line a run; times are wall times of decoding, without prefill.

4k: trained models on real texts, greedy, near the end of the target's context.

32k: random weights in the target's shape. Attention takes its real time, but acceptance must be forced, because
random models agree on nothing: embeddings and output layers make the next token a fixed function of the last one at
every level, and a wrapper around each drafter spoils its tokens at the assumed rates of RATES, which the file records.
Keys and values of the prompt are random numbers instead of a prefill.

    python benchmarks/triforce.py --models ../shared/models --corpus ../shared/data/corpus
"""

import argparse
import hashlib
import json
import lzma
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO, final

import torch
import transformers
from origin import provenance
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import foredraft
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


def real(args: argparse.Namespace, out: TextIO) -> None:
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
            out.write(json.dumps(line | {"output": result.tokens}) + "\n")
            out.flush()
            report("4k", name, stats["acceptance_length"], 1 / stats["tokens_per_second"], memory)


def texts(args: argparse.Namespace, target: str, length: int) -> list[list[int]]:
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


def forced(args: argparse.Namespace, out: TextIO) -> None:
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
        out.write(json.dumps(line) + "\n")
        out.flush()
        report("32k", name, line["acceptance_length"], line["seconds_a_token"], memory)


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


def report(part: str, arm: str, length: float, seconds: float, memory: PeakMemory) -> None:
    sizes = f"KV cache {memory.full / 2**20:.0f} MiB, partial copy {memory.part / 2**20:.0f} MiB"
    print(f"{part:4} {arm:12} acceptance length {length:.2f}, {1000 * seconds:.1f} ms a token, {sizes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("../shared/models"))
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--target", default="target-65m")
    parser.add_argument("--draft", default="draft-6m")
    parser.add_argument("--parts", nargs="+", default=["4k", "32k"], choices=["4k", "32k"])
    parser.add_argument("--count", type=int, default=4, help="texts of the 4k part")
    parser.add_argument("--new-tokens", type=int, default=192, help="of the 4k part")
    parser.add_argument("--gamma", type=int, default=8, help="drafted tokens a step")
    parser.add_argument("--budget", type=int, default=512, help="of the 4k part")
    parser.add_argument("--context", type=int, default=32_768, help="of the 32k part")
    parser.add_argument("--far-budget", type=int, default=2048, help="of the 32k part")
    parser.add_argument("--far-tokens", type=int, default=96, help="new tokens of the 32k part")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/triforce.jsonl"))
    args = parser.parse_args()
    if not (args.models / args.target).is_dir() or not args.corpus.is_dir():
        sys.exit(f"Skipped: there are no models in {args.models} or no texts in {args.corpus}.")
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as out:
        facts = {"dtype": "float32", "target": args.target, "draft": args.draft, "rates": RATES}
        command = "python benchmarks/triforce.py --parts " + " ".join(args.parts)
        out.write(json.dumps(provenance(command, **facts)) + "\n")
        for part, run in (("4k", real), ("32k", forced)):
            if part in args.parts:
                run(args, out)


if __name__ == "__main__":
    main()
