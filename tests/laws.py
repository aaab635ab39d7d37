"""The law of sampled texts: what it should be, by enumeration, and what a generator says, by counting.

The target has five tokens, and the draft ranks them in reverse, so that almost every rule of rejection is needed all
the time. What is called ``run...`` is called in processes of its own: see ``drafters/test_law.py``.
"""

import functools
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

import random_heads as heads
import specs
import tiny
from foredraft.compose.spec import Spec
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.rng import HashedRng, RandomStream, derive_seeds, draw, exponentials
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths
from foredraft.core.tree import TokenTree
from foredraft.core.verify import RULES
from foredraft.engine import state as batch
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv import cache, masks
from foredraft.model.recording.recorder import Recorder
from foredraft.model.text.tokenizer import Tokenizer

VOCAB = 5
LENGTH = 3
PROMPT = [0, 1, 2, 0, 1, 3, 0, 1]
"""Its end has stood there twice before, with two continuations."""
ROWS = 4000
"""Rows of a batch."""
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 64}

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.85, "min_p": 0.1},
    "cutoffs": {"temperature": 1.0, "typical_p": 0.9, "epsilon_cutoff": 0.03, "eta_cutoff": 0.03},
    "history": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "no_repeat_ngram_size": 3},
}


SOME = torch.tensor([0, 2, 3, 4])
NETS: specs.Heads = {
    "eagle": heads.eagle,
    "eagle3": lambda target: heads.eagle3(target, taps=(0, 1), vocabulary=SOME),
    "medusa": lambda target: heads.medusa(target, heads=2),
    "hydra++": lambda target: heads.hydra(target, heads=2, prefix=True),
    "blockwise": lambda target: heads.blockwise(target, heads=2),
    "glide": heads.glide,
}
HEADS = {
    "eagle1": "eagle1:eagle,tree=3x2",
    "eagle2": "eagle2:eagle,nodes=4,depth=2,top_k=2",
    "eagle3": "eagle3:eagle3,nodes=4,depth=2,top_k=2",
    "medusa": "medusa:medusa,tree=2x2",
    "hydra": "hydra:hydra++,tree=2x2",
    "blockwise": "blockwise:blockwise",
    "glide": "glide:glide,nodes=4,depth=2,top_k=2",
}
"""Methods with heads, whose weights are random."""

LOOKAHEADS = {
    "lookahead": "lookahead,window_size=2,ngram_size=3,guess_set_size=2,pool_size=6",
    "lookahead bigrams": "lookahead,window_size=3,ngram_size=2,guess_set_size=2,pool_size=6",
    "jacobi": "lookahead,window_size=3,ngram_size=2,guess_set_size=0",
}
PARTIAL = {
    **{
        kind: f"partial,num_assistant_tokens=2,cache={kind},budget=3,chunk=1,sinks=1,recent=1,room=1"
        for kind in ("retrieval", "window", "h2o")
    },
    "triforce": "triforce:[draft_model:draft,num_assistant_tokens=2,window=8,sinks=1],"
    "gamma=2,inner_gamma=2,budget=2,chunk=1,room=1",
}
"""Drafters with two or three of the prompt's tokens in their caches, beside the target's own."""

MODEL, COPY = "[draft_model:draft,num_assistant_tokens=1]", "[max_gram,num_assistant_tokens=1]"
NESTED = {
    "cascade": "cascade:draft+[draft_model:target,num_assistant_tokens=1],num_assistant_tokens=2",
    "cascade lookup": f"cascade:draft+{COPY},num_assistant_tokens=2",
    "cascade cascade": f"cascade:draft+[cascade:target+{MODEL},num_assistant_tokens=2],num_assistant_tokens=2",
    "relay": f"relay:{MODEL}+{COPY}",
    "hybrid": f"hybrid:{MODEL}",
    "hybrid tree": "hybrid:[draft_model:draft,branching=2x2]",
    "max_gram": "max_gram,num_assistant_tokens=2,bigrams=yes",
}
"""Drafters made of drafters, and what stands at their bottom."""

SPECS = {
    "none": "none",
    "chain": "draft_model:draft,num_assistant_tokens=2",
    "unsure chain": "draft_model:draft,num_assistant_tokens=2",
    "tree": "draft_model:draft,branching=2x2",
    "lookup": "prompt_lookup,prompt_lookup_num_tokens=2",
    "lookup tree": "prompt_lookup,prompt_lookup_num_tokens=2,continuations=2",
    "specinfer": "specinfer:draft+third,expansion=2x2",
    "specinfer apart": "specinfer:draft+third,expansion=2x2,merge=no",
    # families of three and one, the latter below the eldest of the former
    "sequoia": "sequoia:draft,nodes=5,depth=2,acceptance=0.5/0.2/0.1",
    "opt_tree": "opt_tree:draft,nodes=4,depth=2,top_k=2",
    "layer_skip": "layer_skip,num_assistant_tokens=2,skip_mlp=0",  # its one layer without its MLP
    "slem": "universal:draft,num_assistant_tokens=2,method=slem",
    "slrs": "universal:draft,num_assistant_tokens=2,method=slrs",
    "tli": "universal:draft,num_assistant_tokens=2,method=tli",
    **HEADS,
    **LOOKAHEADS,
    **PARTIAL,
    **NESTED,
}


def model(seed: int | None = None, heads: int = 1) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "num_attention_heads": heads, "num_key_value_heads": heads, **SIZES}
    return tiny.build("llama", seed=seed, spread=1.0, tie_word_embeddings=False, **sizes)


@functools.cache
def pair(heads: int = 1) -> tuple[CausalLM, CausalLM]:
    """A target, and a draft whose logits are the target's with the sign turned."""
    target, draft = model(heads=heads), model(heads=heads)
    draft.lm_head.weight.data.neg_()
    return CausalLM(target), CausalLM(draft)


@functools.cache
def third() -> CausalLM:
    """Another draft, which knows nothing of the target."""
    return CausalLM(model(11))


def generator(
    name: str, rule: str | None = None, tokenizer: Tokenizer | None = None, recorder: Recorder | None = None
) -> Generator:
    target, draft = pair()
    full = target.new_cache()
    models = {"draft": draft, "third": third()}
    draws = rule is not None and RULES[rule].draws
    proposer = specs.build(SPECS[name], target, models, NETS, cache=full, draws=draws)
    target.tap(proposer.needs.hidden_layers)
    policy = Constant(proposer.needs.longest, confidence=0.4 if name == "unsure chain" else 0.0)
    options = {"rule": rule, "max_rows": ROWS, "cache": full, "recorder": recorder}
    return tiny.generator(target, proposer, policy, tokenizer=tokenizer, **options)


def ratio_rule(name: str) -> str | None:
    """The best ratio rule for a drafter's drawn drafts; None if it draws none."""
    law = Spec.parse(SPECS[name]).options.law
    return None if law is Law.FIXED else "block" if law is Law.CHAIN else "traversal"


def params(setting: str, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=LENGTH, seed=seed, eos_token_id=(), **SETTINGS[setting])


@torch.inference_mode()
def law(setting: str, heads: int = 1) -> Tensor:
    """The exact probability of each of the V^3 texts, [V, V, V]: stock logits, one warp, all paths."""
    target, _ = pair(heads)
    joint = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([PROMPT])
    for _ in range(LENGTH):
        count = texts.shape[0]
        warp = tiny.warp([params(setting)] * count, VOCAB, [len(PROMPT)] * count)
        lengths = torch.full((count,), texts.shape[1])
        logits = target.stock_logits(texts)[:, -1:].double()
        p = warp(logits, Paths(texts, lengths, TokenTree.root(texts[:, -1]))).p
        assert p is not None
        joint = (joint[:, None] * p[:, 0]).flatten()
        every = torch.arange(VOCAB).expand(count, -1).reshape(-1, 1)
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), every], 1)
    return joint.view([VOCAB] * LENGTH)


def tally(texts: Iterable[list[int]]) -> Tensor:
    """How often each text was said, [V, V, V]."""
    table = torch.tensor(list(texts))
    assert table.shape[1] == LENGTH
    place = (table * torch.tensor([VOCAB**i for i in reversed(range(LENGTH))])).sum(1)
    return place.bincount(minlength=VOCAB**LENGTH).view([VOCAB] * LENGTH)


def p_value(counts: Tensor, joint: Tensor) -> float:
    """Pearson's chi-square of counts against a law; 0 where something was said that never may be.

    Cells that are expected less than five times are one cell.
    """
    counts, expected = counts.flatten().double(), joint.flatten() * counts.sum()
    if counts[expected == 0].sum() > 0:
        return 0.0
    rare = expected < 5
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return float(stats.chi2.sf(statistic, len(wanted) - 1))


@dataclass(frozen=True)
class Counted:
    """What a run said, and how much of it had been drafted."""

    counts: Tensor
    drafted: int
    accepted: int
    first: list[list[int]]
    """The first few texts, for a comparison with those said alone."""


def prepare() -> None:
    """For a process that does nothing else: one thread, short texts, no search for garbage among live objects."""
    torch.set_num_threads(1)
    cache.BUCKET = masks.GRAIN = batch._BUCKET = 16
    gc.freeze()
    gc.disable()


def run(name: str, setting: str, count: int, rule: str | None = None, seed: int = 1) -> Counted:
    """So many texts in batches of ``ROWS``, which rows enter and leave at different steps."""
    prepare()
    return sample(generator(name, rule), setting, count, seed)


def run_alone(name: str, setting: str, count: int, seed: int = 1) -> list[list[int]]:
    """The first so many texts of ``run`` again, each in a batch of its own."""
    prepare()
    g = generator(name)
    return [g.generate(PROMPT, params(setting, own)).tokens for own in derive_seeds(seed, count)]


def sample(g: Generator, setting: str, count: int, seed: int) -> Counted:
    counts, drafted, accepted, first = torch.zeros([VOCAB] * LENGTH, dtype=torch.long), 0, 0, []
    for part, begin in enumerate(range(0, count, 5 * ROWS)):
        size = min(5 * ROWS, count - begin)
        results = g.generate([PROMPT], params(setting, seed + part), num_return_sequences=size)
        counts += tally(result.tokens for result in results)
        drafted += sum(result.stats.drafted for result in results)
        accepted += sum(result.stats.accepted for result in results)
        first = first or [result.tokens for result in results[:100]]
    return Counted(counts, drafted, accepted, first)


# Faults that are lossy and that nothing but the law shows.


def argmax_with_softmax_q(view: View, plan: Plan) -> Draft:
    """The likeliest token of the draft, said to be drawn from its softmax (engines.md, section 4)."""
    q = _draft_law(view)
    return _chain(view, q, q.argmax(-1))


def pruned_by_what_was_drawn(view: View, plan: Plan) -> Draft:
    """A token is drawn from q, and thrown away where q was small."""
    q = _draft_law(view)
    token = draw(q, view.noise.bits(RandomStream.DRAFT, torch.ones_like(view.lengths)))
    sure = q.gather(1, token[:, None])[:, 0] > 0.2
    return _chain(view, q, token, 1 + sure.long())


def law_of_another_node(view: View, plan: Plan) -> Draft:
    """A token is drawn from q, but the law handed over is flat."""
    q = _draft_law(view)
    token = draw(q, view.noise.bits(RandomStream.DRAFT, torch.ones_like(view.lengths)))
    return _chain(view, torch.full_like(q, 1 / VOCAB), token)


def sound(view: View, plan: Plan) -> Draft:
    """The same without a fault: what shows that it is the fault that is seen."""
    q = _draft_law(view)
    return _chain(view, q, draw(q, view.noise.bits(RandomStream.DRAFT, torch.ones_like(view.lengths))))


def _draft_law(view: View) -> Tensor:
    """Reversed ranks, from the last token alone."""
    target, _ = pair()
    model = target.model
    weight = model.lm_head.weight
    return (-model.model.embed_tokens(view.roots) @ weight.T).softmax(-1)


def _chain(view: View, q: Tensor, token: Tensor, lengths: Tensor | None = None) -> Draft:
    tree = TokenTree.chain(torch.stack([view.roots, token], 1), lengths)
    return Draft(tree, Law.CHAIN, torch.stack([torch.zeros_like(q), q], 1))


def same_numbers_for_drafting_and_accepting(self: HashedRng, probability: Tensor) -> Tensor:
    """Accept by the exponential number that the first block of tokens had in the race that drew the draft."""
    bits = self.noise.bits(RandomStream.DRAFT, torch.arange(probability.shape[1]).expand_as(probability))
    return (-exponentials(bits, 1)[..., 0]).exp() < probability


FAULTS = {f.__name__: f for f in (argmax_with_softmax_q, pruned_by_what_was_drawn, law_of_another_node)}
SHARED = same_numbers_for_drafting_and_accepting.__name__


def run_faulty(fault: str, count: int, seed: int = 1) -> Counted:
    """``run`` with a planted fault."""
    prepare()
    propose = FAULTS.get(fault, sound)
    g = tiny.generator(pair()[0], tiny.ScriptedDrafter(propose, max_nodes=1), max_rows=ROWS, rule="block")
    before = HashedRng.accept
    if fault == SHARED:
        HashedRng.accept = same_numbers_for_drafting_and_accepting
    try:
        return sample(g, "temperature", count, seed)
    finally:
        HashedRng.accept = before
