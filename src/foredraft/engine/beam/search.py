"""Beam search with the results of transformers' ``generate(num_beams=K, do_sample=False)``.

A beam is a row of the slot cache. A step is one forward of all rows with one node each; then a beam with several
children is forked to rows whose beams were dropped, and all other rows stay. Rows may have different lengths, so
prompts of any lengths are searched together, independently of each other.

Scores, ties and stops follow ``_beam_search`` of transformers 5.23 (``generation/utils.py``) exactly, in float32, on
the device; the host reads one small table per step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from foredraft.core.errors import NumericsError, OptionError
from foredraft.core.sampling.params import SamplingParams, SearchOptions, as_number, check_known
from foredraft.core.sampling.warp import Paths, Warp
from foredraft.core.tree import TokenTree
from foredraft.engine.beam.cache import BeamCache
from foredraft.engine.detokenizer import Decode, text_after
from foredraft.model.base import TargetModel

_NEVER = -1.0e9
"""transformers' penalty for candidates that must not be chosen. It is added, so banned tokens (-inf) stay below it."""

_RULES = tuple(SearchOptions.__annotations__)
"""The fields of ``SamplingParams`` that apply; the others must keep their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """Options of a beam search; names and defaults are transformers', except for ``num_beams``.

    A finished hypothesis of n new tokens scores its log-probability / n**length_penalty. ``early_stopping``: True
    stops at ``num_beams`` finished hypotheses; False when the best beam at its current length does not beat the worst
    of them; "never" when it could not beat it at the most favourable length. One beam is greedy decoding: it stops at
    the first end, whatever ``early_stopping``.
    ``num_assistant_tokens``: how far a draft model searches ahead; 0 does not use it. The result is the same.
    ``params`` holds lengths, end-of-sequence ids, penalties and bans, which apply to log-probabilities.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    num_assistant_tokens: int = 4
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        for name in ("num_beams", "num_return_sequences", "num_assistant_tokens", "length_penalty"):
            object.__setattr__(self, name, as_number(getattr(self, name)))
        beams, count, ahead = self.num_beams, self.num_return_sequences, self.num_assistant_tokens
        penalty, early = self.length_penalty, self.early_stopping
        whole = _number(beams, int) and _number(count, int)
        for name, valid, values in (
            ("num_beams", _number(beams, int) and beams >= 1, "a whole number, 1 or more"),
            ("num_return_sequences", whole and 1 <= count <= beams, f"a whole number from 1 to num_beams ({beams})"),
            ("num_assistant_tokens", _number(ahead, int) and ahead >= 0, "a whole number, 0 or more"),
            ("length_penalty", _number(penalty, (int, float)) and -10 <= penalty <= 10, "a number from -10 to 10"),
            ("early_stopping", isinstance(early, bool) or early == "never", 'True, False or "never"'),
        ):
            if not valid:
                raise OptionError(f"{name} must be {values}, not {getattr(self, name)!r}.")
        default = SamplingParams()
        for name in (f.name for f in fields(SamplingParams) if f.name not in _RULES):
            if getattr(self.params, name) != getattr(default, name):
                raise OptionError(f"Beam search has no {name}; its sampling options are {', '.join(_RULES)}.")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "BeamOptions":
        """Build from keywords, those of ``params`` included; the error for an unknown one lists the known."""
        own = [f.name for f in fields(cls) if f.name != "params"]
        check_known("beam search option", options, [*own, *_RULES])
        params = SamplingParams.from_options({k: v for k, v in options.items() if k in _RULES})
        return cls(params=params, **{k: v for k, v in options.items() if k in own})


class BeamKeywords(SearchOptions, total=False):
    """The keywords of ``BeamOptions.from_options``; for type checkers."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_return_sequences: int
    num_assistant_tokens: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output: its new tokens with any end-of-sequence id, and transformers' ``sequences_scores``."""

    tokens: list[int]
    score: float
    text: str


@dataclass(frozen=True, slots=True)
class Beams:
    """The search state of B prompts with K beams each, best first. T: most new tokens of any prompt.

    ``finished`` holds the best finished hypotheses so far; empty entries have length 0.
    """

    running: Int[Tensor, "B K T"]
    scores: Float[Tensor, "B K"]
    finished: Int[Tensor, "B K T"]
    finished_scores: Float[Tensor, "B K"]
    finished_lengths: Int[Tensor, "B K"]

    @classmethod
    def start(cls, rules: "Rules") -> "Beams":
        """The initial state: all beams are equal, so only the first of each prompt has a score."""
        shape = (rules.prompts.shape[0], rules.options.num_beams)
        longest = rules.history.shape[1] - int(rules.prompts.max())
        scores = torch.full(shape, _NEVER, device=rules.prompts.device)
        tokens = torch.zeros(*shape, longest, dtype=torch.long, device=rules.prompts.device)
        first = scores.clone()
        first[:, 0] = 0.0
        return cls(tokens, first, tokens.clone(), scores, torch.zeros_like(tokens[..., 0]))

    def select(self, prompts: Int[Tensor, "C"] | slice) -> "Beams":
        return Beams(*[getattr(self, f.name)[prompts] for f in fields(self)])


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of a search of B prompts. ``history`` has room for T new tokens after the longest prompt."""

    options: BeamOptions
    eos: Int[Tensor, "E"]
    history: Int[Tensor, "B L"]
    prompts: Int[Tensor, "B"]  # tokens of each prompt
    limits: Int[Tensor, "B"]  # most new tokens of each prompt
    warp: Warp  # of B * K rows

    @classmethod
    def of(
        cls, target: TargetModel, prompts: Sequence[Sequence[int]], options: BeamOptions, eos: Sequence[int]
    ) -> "Rules":
        """Build the rules; raises an ``OptionError`` if ``options.params`` name a token outside the vocabulary.

        Args:
            eos: end-of-sequence ids, unless ``options.params.eos_token_id`` is given.
        """
        eos = options.params.eos_token_id if options.params.eos_token_id is not None else tuple(eos)
        device, count = target.device, len(prompts) * options.num_beams
        sizes = torch.tensor([len(prompt) for prompt in prompts])
        limits = (target.max_length - sizes).clamp(max=options.params.max_new_tokens)
        history = pad_sequence([torch.tensor([*prompt]) for prompt in prompts], batch_first=True)
        warp = Warp.of(
            [options.params] * count,
            vocab_size=target.vocab_size,
            eos_token_ids=[eos] * count,
            prompt_lengths=sizes.repeat_interleave(options.num_beams).tolist(),
            device=device,
        )
        eos_ids = torch.tensor(eos, dtype=torch.long, device=device)
        history = pad(history, (0, int(limits.max()))).to(device)
        return cls(options, eos_ids, history, sizes.to(device), limits.to(device), warp)


class Grown(NamedTuple):
    """The state one token later; the parent of each beam; which prompts are finished; for which prompts the best logit
    of every beam was finite."""

    beams: Beams
    parents: Int[Tensor, "B K"]
    over: Bool[Tensor, "B"]
    sound: Bool[Tensor, "B"]


@torch.inference_mode()
def beam_search(
    target: TargetModel, prompts: Sequence[Sequence[int]], options: BeamOptions, eos: Sequence[int], decode: Decode
) -> list[list[Hypothesis]]:
    """The ``num_return_sequences`` best finished hypotheses of each prompt, best first.

    Args:
        prompts: token ids checked by ``Engine.request``; a hypothesis ends at the model's context length.
        eos: see ``Rules.of``.
        decode: ids to text.

    Raises:
        OptionError: an option names a token that the model does not have.
        NumericsError: the model returned NaN or +inf.
    """
    if not prompts:
        return []
    width = options.num_beams
    rules = Rules.of(target, prompts, options, eos)
    beams = Beams.start(rules)
    cache = BeamCache(target, rules.history, [len(prompt) for prompt in prompts], width)
    active = list(range(len(prompts)))
    ended: list[tuple[int, Beams]] = []
    for step in range(int(rules.limits.max())):
        paths = beam_paths(beams, rules, step)
        grown = grow(beams, cache.forward(paths.tree), paths, rules, step)
        beams = grown.beams
        flags = torch.stack([grown.over, grown.sound], dim=1)
        table = torch.cat([grown.parents, flags], dim=1).tolist()  # the only read-back
        if not all(line[width + 1] for line in table):
            raise NumericsError(f"The model returned NaN or +inf logits {step} tokens after the prompts.")
        over = [i for i, line in enumerate(table) if line[width]]
        stay = [i for i, line in enumerate(table) if not line[width]]
        ended += [(active[i], beams.select(slice(i, i + 1))) for i in over]
        if not stay:
            break
        cache.move([i * width + parent for i in stay for parent in table[i][:width]])
        if over:
            active = [active[i] for i in stay]
            beams = beams.select(torch.tensor(stay, device=target.device))
            rules = Rules.of(target, [prompts[i] for i in active], options, eos)
    best = sorted(ended, key=lambda each: each[0])
    return [hypotheses(found, options.num_return_sequences, decode, prompts[index]) for index, found in best]


def grow(beams: Beams, logits: Float[Tensor, "N 1 V"], paths: Paths, rules: Rules, step: int) -> Grown:
    """Extend every prompt by one token: steps b to g of ``_beam_search``, with a length limit for each prompt.

    ``logits`` are those after each beam, whose tokens are ``paths``; see ``beam_paths``.

    ``ending``, ``full`` and not ``over`` are ``did_top_num_beams_just_finished``, ``is_sent_finished`` and
    ``is_early_stop_heuristic_unsatisfied`` in transformers. There, finished prompts stay in the batch unchanged; here
    they leave it.
    """
    count, width, _ = beams.running.shape
    vocabulary, length, penalty = logits.shape[2], step + 1, rules.options.length_penalty
    sound = logits.amax(-1).isfinite().view(count, width).all(1)  # neither NaN, nor +inf, nor -inf alone
    if width == 1:  # as greedy decoding, which processes logits
        logprobs = rules.warp.scores(logits.float(), paths).log_softmax(-1).nan_to_num(nan=-torch.inf)
    else:
        logprobs = rules.warp.scores(logits.float().log_softmax(-1), paths)
    total = (logprobs.view(count, width, -1) + beams.scores[..., None]).flatten(1)
    kept = min(max(2, 1 + rules.eos.shape[0]) * width, total.shape[1])  # enough if all but ``width`` of them end
    scores, index = total.topk(kept)
    parents, tokens = index // vocabulary, index % vocabulary
    outputs = beams.running.take_along_dim(parents[..., None], 1)
    outputs[:, :, step] = tokens
    ended = torch.isin(tokens, rules.eos) | (length >= rules.limits)[:, None]

    alive = scores + ended.float() * _NEVER
    best = alive.topk(width).indices
    running_scores = alive.gather(1, best)

    ending = ended & (torch.arange(kept, device=ended.device) < width)
    scores = scores / length**penalty + (~ending) * _NEVER
    merged = torch.cat([beams.finished_scores, scores], dim=1)
    lengths = torch.cat([beams.finished_lengths, ending * length], dim=1)
    top = merged.topk(width).indices
    finished_scores, finished_lengths = merged.gather(1, top), lengths.gather(1, top)
    finished = torch.cat([beams.finished, outputs], dim=1).take_along_dim(top[..., None], 1)

    full = finished_lengths > 0
    if rules.options.early_stopping == "never" and penalty > 0.0:
        bound = running_scores[:, :1] / (rules.limits[:, None].double() ** penalty).float()
    else:
        bound = running_scores[:, :1] / length**penalty
    worst = torch.where(full, finished_scores.amin(1, keepdim=True), _NEVER)
    over = ~(bound > worst).any(1) | ended.all(1)
    if rules.options.early_stopping is True or width == 1:
        over = over | full.all(1)
    running = outputs.take_along_dim(best[..., None], 1)
    grown = Beams(running, running_scores, finished, finished_scores, finished_lengths)
    return Grown(grown, parents.gather(1, best), over, sound)


def beam_paths(beams: Beams, rules: Rules, step: int) -> Paths:
    """The tokens of each of N beams, prompt included; the tree holds the last one, which is not in the cache yet."""
    width = rules.options.num_beams
    lengths = rules.prompts.repeat_interleave(width)
    index = lengths[:, None] + torch.arange(step, device=lengths.device)
    history = rules.history.repeat_interleave(width, dim=0)
    history.scatter_(1, index, beams.running.flatten(0, 1)[:, :step])
    lengths = lengths + step
    return Paths(history, lengths, TokenTree.root(history.gather(1, lengths[:, None] - 1)[:, 0]))


def hypotheses(found: Beams, count: int, decode: Decode, prompt: Sequence[int]) -> list[Hypothesis]:
    """The best hypotheses of one prompt. Bans may leave fewer than there are beams; the others are empty."""
    tokens, lengths, scores = found.finished[0], found.finished_lengths[0].tolist(), found.finished_scores[0].tolist()
    outputs = [line[:length] for line, length in zip(tokens.tolist(), lengths, strict=True)]
    best = zip(outputs[:count], scores, strict=False)
    return [Hypothesis(output, score, text_after(decode, prompt, output)) for output, score in best]


def _number(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
