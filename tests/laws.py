"""The law of sampled texts: what it should be, by enumeration, and what a generator says, by counting.

The target has five tokens, and the draft ranks them in reverse, so that almost every rule of rejection is needed all
the time. Runs in processes of their own (``python -m laws`` is not meant for people): see ``test_law.py``.
"""

import functools
import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import tiny
import torch
from scipy import stats
from torch import Tensor

from foredraft.core.drafter import Drafter
from foredraft.core.noise import derive_seeds
from foredraft.core.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.core.warp import Paths, Warp
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.prompt_lookup import Options as LookupOptions, PromptLookup
from foredraft.engine.generate import Generator
from foredraft.model import cache, masks
from foredraft.model.causal import CausalLM

VOCAB = 5
LENGTH = 3
PROMPT = [0, 1, 2, 0, 1, 3, 0, 1]
"""Its end has stood there twice before, with two continuations."""
ROWS = 4000
"""Rows of a batch."""
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.85, "min_p": 0.1},
    "cutoffs": {"temperature": 1.0, "typical_p": 0.9, "epsilon_cutoff": 0.03, "eta_cutoff": 0.03},
    "history": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "no_repeat_ngram_size": 3},
}


@functools.cache
def pair() -> tuple[CausalLM, CausalLM]:
    """A target, and a draft whose logits are the target's with the sign turned."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 64, **SIZES}
    target = tiny.build("llama", spread=1.0, tie_word_embeddings=False, **sizes)
    draft = tiny.build("llama", spread=1.0, tie_word_embeddings=False, **sizes)
    draft.lm_head.weight.data.neg_()
    return CausalLM(target), CausalLM(draft)


DRAFTERS = ("none", "chain", "tree", "lookup", "lookup tree")


def drafter(name: str) -> Drafter:
    target, draft = pair()
    if name == "none":
        return NoDrafter()
    if name.startswith("lookup"):
        return PromptLookup(LookupOptions(prompt_lookup_num_tokens=2, continuations=2 if "tree" in name else 1))
    options = DraftOptions(num_assistant_tokens=2, branching=(2, 2) if name == "tree" else None)
    return DraftModel(options, draft, target.vocab_size)


def generator(name: str, rule: str | None = None, rows: int = ROWS) -> Generator:
    return tiny.generator(pair()[0], drafter(name), rule=rule, max_rows=rows)


def params(setting: str, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=LENGTH, seed=seed, eos_token_id=(), **SETTINGS[setting])


@torch.inference_mode()
def law(setting: str) -> Tensor:
    """The exact probability of each of the V^3 texts, [V, V, V]: stock logits, one warp, all paths."""
    target, _ = pair()
    joint = torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([PROMPT])
    for _ in range(LENGTH):
        count = texts.shape[0]
        warp = Warp.of(
            [params(setting)] * count,
            vocab_size=VOCAB,
            eos_token_ids=[()] * count,
            prompt_lengths=[len(PROMPT)] * count,
            device="cpu",
        )
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


def run(name: str, setting: str, count: int, rule: str | None = None, seed: int = 1) -> Counted:
    """So many texts in batches of ``ROWS``, in batches that rows enter and leave at different steps."""
    torch.set_num_threads(1)
    cache.BUCKET = masks.GRAIN = 16  # texts are short
    return sample(generator(name, rule), setting, count, seed)


def sample(g: Generator, setting: str, count: int, seed: int = 1) -> Counted:
    counts, drafted, accepted, first = torch.zeros([VOCAB] * LENGTH, dtype=torch.long), 0, 0, []
    gc.collect()
    gc.disable()  # thousands of objects live at once and none of them in a cycle
    try:
        for part, size in enumerate(_parts(count, 5 * ROWS)):
            own = replace(params(setting), seed=seed + part)
            results = g.generate([PROMPT], own, num_return_sequences=size)
            counts += tally(result.tokens for result in results)
            drafted += sum(result.stats.drafted for result in results)
            accepted += sum(result.stats.accepted for result in results)
            first = first or [result.tokens for result in results[:100]]
    finally:
        gc.enable()
    return Counted(counts, drafted, accepted, first)


def alone(g: Generator, setting: str, count: int, seed: int = 1) -> list[list[int]]:
    """The first so many texts of ``sample`` again, each in a batch of its own."""
    return [g.generate(PROMPT, params(setting, own)).tokens for own in derive_seeds(seed, count)]


def _parts(count: int, most: int) -> list[int]:
    return [min(most, count - begin) for begin in range(0, count, most)]
