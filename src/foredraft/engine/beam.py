"""Beam search on forked rows: what transformers' ``generate(num_beams=K, do_sample=False)`` finds.

A beam is a row of the slot cache. A step is one forward of all rows with one node each; then a beam that has
several children is forked over rows whose beams have died, and everything else stays where it is. Rows may have
different lengths, so prompts of any lengths are searched together, each as if it were alone.

The arithmetic of scores, ties and stops follows ``_beam_search`` of transformers 5.23 to the letter
(``generation/utils.py``), in float32, on the device; the host reads one small table a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.core.errors import NumericsError, OptionError
from foredraft.core.params import SamplingParams, check_known
from foredraft.core.tree import TokenTree
from foredraft.core.warp import Paths, Warp, healthy
from foredraft.engine.text import Decode
from foredraft.model.cache import SlotCache
from foredraft.model.causal import CausalLM
from foredraft.model.prefill import prefill

_NEVER = -1.0e9
"""transformers' score of what must not be chosen. It is added, so that bans (-inf) stay below it."""

_RULES = (
    *("max_new_tokens", "min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("no_repeat_ngram_size", "bad_words_ids", "logit_bias", "logits_processor", "eos_token_id"),
)
"""The fields of ``SamplingParams`` that mean something where nothing is sampled; others must be left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """What a beam search may be asked for; names and defaults are transformers', but for ``num_beams``.

    A finished text of n new tokens scores its log-probability / n**length_penalty. ``early_stopping``: True ends
    with ``num_beams`` finished texts; False when the best beam, as long as it is now, would not beat the worst of
    them; "never" when it could not, were it of the best length.
    ``params`` holds lengths, end-of-sequence ids, penalties and bans, which apply to log-probabilities.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        if not _whole(self.num_beams) or self.num_beams < 2:
            raise OptionError(
                f"num_beams must be a whole number, 2 or more, not {self.num_beams!r}; generate is the search with one."
            )
        if not _whole(self.num_return_sequences) or not 1 <= self.num_return_sequences <= self.num_beams:
            raise OptionError(
                f"num_return_sequences must be a whole number from 1 to num_beams ({self.num_beams}), "
                f"not {self.num_return_sequences!r}."
            )
        penalty = self.length_penalty
        if not isinstance(penalty, (int, float)) or isinstance(penalty, bool) or not -10 <= penalty <= 10:
            raise OptionError(f"length_penalty must be a number from -10 to 10, not {penalty!r}.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise OptionError(f'early_stopping must be True, False or "never", not {self.early_stopping!r}.')
        idle = SamplingParams()
        for name in (f.name for f in fields(SamplingParams) if f.name not in _RULES):
            if getattr(self.params, name) != getattr(idle, name):
                raise OptionError(f"Beam search has no {name}; of the sampling options it knows {', '.join(_RULES)}.")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "BeamOptions":
        """Build from keywords, those of ``params`` among them; an unknown one is an error that lists the known."""
        own = [f.name for f in fields(cls) if f.name != "params"]
        check_known("beam search option", options, [*own, *_RULES])
        params = SamplingParams.from_options({k: v for k, v in options.items() if k in _RULES})
        return cls(params=params, **{k: v for k, v in options.items() if k in own})


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished text: its new tokens, an end-of-sequence id included, and transformers' ``sequences_scores``."""

    tokens: list[int]
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Beams:
    """The search of B prompts with K beams each, best first. T: most new tokens of any prompt.

    ``finished`` holds the best finished texts so far; a place that none has taken has length 0.
    """

    running: Int[Tensor, "B K T"]
    scores: Float[Tensor, "B K"]
    finished: Int[Tensor, "B K T"]
    finished_scores: Float[Tensor, "B K"]
    finished_lengths: Int[Tensor, "B K"]

    @classmethod
    def start(cls, prompts: int, beams: int, longest: int, device: torch.device) -> "Beams":
        """All beams are equal at first: only the first of each prompt counts."""
        scores = torch.full((prompts, beams), _NEVER, device=device)
        tokens = torch.zeros(prompts, beams, longest, dtype=torch.long, device=device)
        first = scores.clone()
        first[:, 0] = 0.0
        return cls(tokens, first, tokens.clone(), scores, torch.zeros_like(tokens[..., 0]))

    def select(self, prompts: Int[Tensor, "C"]) -> "Beams":
        """The search of these prompts alone."""
        return Beams(*[getattr(self, f.name)[prompts] for f in fields(self)])


@dataclass(frozen=True, slots=True)
class Rules:
    """How B prompts are searched. ``history`` has room for T new tokens behind the longest prompt."""

    options: BeamOptions
    eos: Int[Tensor, "E"]
    history: Int[Tensor, "B L"]
    prompts: Int[Tensor, "B"]  # tokens of each prompt
    limits: Int[Tensor, "B"]  # most new tokens of each prompt
    warp: Warp  # of B * K rows

    @classmethod
    def of(
        cls, target: CausalLM, prompts: Sequence[Sequence[int]], options: BeamOptions, eos: Sequence[int]
    ) -> "Rules":
        """Raises an ``OptionError`` if ``options.params`` name a token that the model does not have."""
        device = target.device
        sizes = [len(prompt) for prompt in prompts]
        limits = [min(options.params.max_new_tokens, target.max_length - size) for size in sizes]
        history = torch.zeros(len(prompts), max(sizes) + max(limits), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            history[row, : len(prompt)] = torch.tensor(prompt)
        count = len(prompts) * options.num_beams
        warp = Warp.of(
            [options.params] * count,
            vocab_size=target.vocab_size,
            eos_token_ids=[tuple(eos)] * count,
            prompt_lengths=[size for size in sizes for _ in range(options.num_beams)],
            device=device,
        )
        ends = torch.tensor(list(eos), dtype=torch.long, device=device)
        return cls(
            options=options,
            eos=ends,
            history=history.to(device),
            prompts=torch.tensor(sizes, device=device),
            limits=torch.tensor(limits, device=device),
            warp=warp,
        )


class Grown(NamedTuple):
    """The search one token later; which beam each beam continues; which prompts have nothing left to find."""

    beams: Beams
    parents: Int[Tensor, "B K"]
    over: Bool[Tensor, "B"]


@torch.inference_mode()
def beam_search(
    target: CausalLM, prompts: Sequence[Sequence[int]], options: BeamOptions, eos: Sequence[int], decode: Decode
) -> list[list[Hypothesis]]:
    """The ``num_return_sequences`` best finished texts of each prompt, best first.

    Args:
        prompts: token ids that ``Engine.request`` has checked; a text ends where the model's context does.
        eos: what ends a text, unless ``options.params.eos_token_id`` says otherwise.
        decode: ids to text.

    Raises:
        OptionError: an option names a token that the model does not have.
        NumericsError: the model returned NaN or +inf.
    """
    if not prompts:
        return []
    ends = options.params.eos_token_id if options.params.eos_token_id is not None else tuple(eos)
    width = options.num_beams
    active = list(range(len(prompts)))
    rules = Rules.of(target, prompts, options, ends)
    beams = Beams.start(len(prompts), width, int(rules.limits.max()), target.device)
    cache = target.new_cache()
    longest = max(map(len, prompts))
    cache.reserve(len(prompts) * width, longest)
    prefill(target, cache, active, rules.history[:, : longest - 1], [0] * len(prompts))
    rows = [row for row in active for _ in range(width)]  # where each beam stands; all children of one at first
    done: list[tuple[list[int], Beams]] = []
    step = 0
    while active:
        bases = [len(prompts[prompt]) - 1 + step for prompt in active for _ in range(width)]
        logprobs, fine = _forward(target, cache, _last(beams, rules, step), rows, bases)
        grown = grow(beams, logprobs, rules, step)
        flags = torch.stack([fine.view(-1, width).all(1), grown.over], dim=1)
        table = torch.cat([grown.parents, flags], dim=1).tolist()  # the one synchronisation of a step
        if not all(line[width] for line in table):
            raise NumericsError(f"The model returned logits that are not numbers at new token {step + 1}.")
        over = [i for i, line in enumerate(table) if line[width + 1]]
        stay = [i for i, line in enumerate(table) if not line[width + 1]]
        beams = grown.beams
        if over:
            done.append(([active[i] for i in over], beams.select(torch.tensor(over, device=target.device))))
            active = [active[i] for i in stay]
            beams = beams.select(torch.tensor(stay, dtype=torch.long, device=target.device))
            rules = Rules.of(target, [prompts[i] for i in active], options, ends) if active else rules
        wanted = [(rows[i * width + k], bases[i * width] + 1) for i in stay for k in table[i][:width]]
        rows = _move(cache, wanted)
        step += 1
    found = {prompt: texts for batch in done for prompt, texts in _hypotheses(*batch, options, decode)}
    return [found[prompt] for prompt in range(len(prompts))]
