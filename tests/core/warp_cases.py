"""Cases for the warp, and the slow truth: transformers' own processors on each node's explicit path."""

import math
from dataclasses import dataclass, replace

import torch
import transformers
from transformers import GenerationConfig, LogitsProcessorList

import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import PAD, TokenTree

V = 23
EOS = (1, 4)
# an embedding may be wider than the logits; processors of older transformers fail on such a token
OUTSIDE = V + 2 if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23) else 5
MODEL = tiny.build("llama", vocab_size=V)


class CountPenalty:
    """OpenAI's presence and frequency penalties, which transformers does not have."""

    def __init__(self, prompt: int, presence: float, frequency: float):
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[-1])
        counts = counts[: scores.shape[-1]].to(scores.dtype)
        return scores - self.frequency * counts - self.presence * (counts > 0)


def their_processors(params: SamplingParams, prompt: int, eos: tuple[int, ...] = EOS) -> LogitsProcessorList:
    """What ``model.generate`` of transformers would run for this request."""
    words = [list(word) for word in params.bad_words_ids]
    words = words if any(len(word) > 1 or word[0] not in eos for word in words) else None
    config = GenerationConfig(
        do_sample=not params.greedy,
        temperature=float(params.temperature) or 1.0,
        top_k=params.top_k or 0,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        typical_p=params.typical_p or 1.0,
        epsilon_cutoff=params.epsilon_cutoff or 0.0,
        eta_cutoff=params.eta_cutoff or 0.0,
        repetition_penalty=float(params.repetition_penalty),
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        bad_words_ids=words,
        sequence_bias={(token,): bias for token, bias in params.logit_bias.items()} or None,
        min_new_tokens=params.min_new_tokens,
    )
    config._eos_token_tensor = torch.tensor(eos) if eos else None
    processors = MODEL._get_logits_processor(
        config, input_ids_seq_length=prompt, logits_processor=list(params.logits_processor)
    )
    if params.presence_penalty or params.frequency_penalty:
        before = {"SequenceBiasLogitsProcessor", "RepetitionPenaltyLogitsProcessor"}
        place = sum(type(processor).__name__ in before for processor in processors)
        processors.insert(place, CountPenalty(prompt, params.presence_penalty, params.frequency_penalty))
    return processors


def their_scores(params: SamplingParams, path: list[int], logits: torch.Tensor, prompt: int, eos=EOS):
    ids = torch.tensor([path])
    return their_processors(params, prompt, eos)(ids, logits.to(torch.float32, copy=True)[None])[0]


def their_law(params: SamplingParams, scores: torch.Tensor) -> torch.Tensor:
    if params.greedy:
        return torch.zeros_like(scores).index_fill_(0, scores.argmax(), 1.0)
    return scores.softmax(-1)


@dataclass
class Case:
    paths: Paths
    prompts: list[int]
    logits: torch.Tensor  # [B, N, V], of all nodes

    def path(self, row: int, node: int) -> list[int] | None:
        """The tokens that lead to a node; None for padding."""
        tree, tail = self.paths.tree, []
        parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
        if parents[node] == PAD:
            return None
        while node > 0:
            tail.append(tokens[node])
            node = parents[node]
        return self.paths.history[row, : self.paths.lengths[row]].tolist() + tail[::-1]

    def warp(self, params: list[SamplingParams], eos=EOS) -> Warp:
        return Warp.of(
            params,
            vocab_size=V,
            eos_token_ids=[eos] * len(params),
            prompt_lengths=self.prompts,
            device="cpu",
        )

    def row(self, row: int) -> "Case":
        tree, one = self.paths.tree, slice(row, row + 1)
        tree = replace(tree, tokens=tree.tokens[one], parents=tree.parents[one])
        paths = Paths(self.paths.history[one], self.paths.lengths[one], tree)
        return Case(paths, self.prompts[one], self.logits[one])


def random_logits(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Half of the numbers are multiples of 1/2, hence ties; one in ten is -inf; the first token never is."""
    logits = torch.randn(*shape, generator=generator) * 3
    coarse = torch.rand(*shape, generator=generator) < 0.5
    logits = torch.where(coarse, (logits * 2).round() / 2, logits)
    banned = torch.rand(*shape, generator=generator) < 0.1
    banned[..., 0] = False
    return logits.masked_fill(banned, -math.inf)


def random_case(seed: int, rows: int = 2, nodes: int = 7, kind: str = "tree", alphabet: int = 6) -> Case:
    """Few different tokens, so that words and n-grams come again; one of them is beyond the vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    lengths = 3 + below(9, rows)
    history = below(alphabet, rows, 14)
    history[:, 1] = OUTSIDE
    beyond = torch.arange(14) >= lengths[:, None]
    history = torch.where(beyond, torch.tensor([-7, V + 50, 2])[below(3, rows, 14)], history)
    root = history.gather(1, lengths[:, None] - 1)
    tokens = torch.cat([root, below(alphabet, rows, nodes - 1)], dim=1)
    if kind == "chain":
        tree = TokenTree.chain(tokens, 1 + below(nodes, rows))
    else:
        parents = torch.tensor([[-1] + [int(below(i, 1)) for i in range(1, nodes)] for _ in range(rows)])
        parents[:, -1] = PAD
        tree = TokenTree(tokens, parents, depth=nodes - 1)
    prompts = [1 + int(below(int(length), 1)) for length in lengths]
    logits = random_logits(rows, nodes, V, generator=generator)
    return Case(Paths(history, lengths, tree), prompts, logits)


def check(case: Case, params: list[SamplingParams], start: int = 0, count: int | None = None, eos=EOS) -> Warp:
    """Law and best of all nodes are those of transformers: supports exactly, probabilities to 1e-6."""
    stop = case.logits.shape[1] if count is None else start + count
    logits, paths = case.logits[:, start:stop], replace(case.paths, start=start)
    warp = case.warp(params, eos)
    law, target, scores = warp.law(logits, paths), warp(logits, paths), warp.scores(logits, paths)
    assert law.dtype == torch.float32
    assert (target.p is None) == all(row.greedy for row in params)
    if target.p is not None:
        assert torch.equal(target.p.nan_to_num(-1.0), law.nan_to_num(-1.0))
    for row in range(len(params)):
        for node in range(start, stop):
            path = case.path(row, node)
            if path is None:  # padding: judged as its root is, but no user's processor sees it
                if params[row].logits_processor:
                    continue
                path = case.path(row, 0)
            theirs = their_scores(params[row], path, case.logits[row, node], case.prompts[row], eos)
            mine = scores[row, node - start]
            assert torch.equal(mine.isfinite(), theirs.isfinite())
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-6)
            assert target.best[row, node - start] == theirs.argmax()
            expected = their_law(params[row], theirs)
            assert torch.equal(law[row, node - start] > 0, expected > 0)
            torch.testing.assert_close(law[row, node - start], expected, atol=1e-6, rtol=0, equal_nan=True)
    return warp


SAMPLING = {
    "temperature": [{"temperature": 0.3}, {"temperature": 1.7}, {"temperature": 1e-3}],
    "top_k": [{"top_k": 1}, {"top_k": 4}, {"top_k": V}, {"top_k": 3 * V}],
    "top_p": [{"top_p": 1e-9}, {"top_p": 0.4}, {"top_p": 0.9}, {"top_p": 1.0}],
    "min_p": [{"min_p": 0.0}, {"min_p": 0.05}, {"min_p": 0.3}, {"min_p": 1.0}],
    "typical_p": [{"typical_p": 0.2}, {"typical_p": 0.8}, {"typical_p": 1.0}],
    "epsilon_cutoff": [{"epsilon_cutoff": 3e-3}, {"epsilon_cutoff": 0.2}, {"epsilon_cutoff": 0.99}],
    "eta_cutoff": [{"eta_cutoff": 3e-3}, {"eta_cutoff": 0.3}, {"eta_cutoff": 0.99}],
}
HISTORY = {
    "logit_bias": [{"logit_bias": {3: 2.5, 0: -4.0, V - 1: 1.0}}],
    "repetition_penalty": [{"repetition_penalty": 1.4}, {"repetition_penalty": 0.6}],
    "presence_penalty": [{"presence_penalty": 1.5}, {"presence_penalty": -1.0}],
    "frequency_penalty": [{"frequency_penalty": 0.7}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": n} for n in (1, 2, 3, 5)],
    "bad_words_ids": [
        {"bad_words_ids": ((2,), (4,), (9,))},
        {"bad_words_ids": ((2, 3), (0, 1, 5), (5, 5, 2, 3, 0), (8,), (1,))},
        {"bad_words_ids": ((3,),), "logit_bias": {3: 9.0, 5: 1.0}},
        {"bad_words_ids": ((1,),)},
    ],
    "min_new_tokens": [{"min_new_tokens": 1}, {"min_new_tokens": 4}, {"min_new_tokens": 30}],
}


def doubled(input_ids, scores):
    """A user's processor that looks at the whole path and writes into what it is given."""
    scores[torch.arange(len(scores)), input_ids[:, 0] + input_ids[:, -1]] += 3.0
    return scores


def shifted(input_ids, scores):
    return scores.roll(input_ids.shape[1], dims=-1)
