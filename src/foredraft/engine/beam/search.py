"""Beam search on forked rows: what transformers' ``generate(num_beams=K, do_sample=False)`` finds.

A beam is a row of the slot cache. A step is one forward of all rows with one node each; then a beam that has
several children is forked over rows whose beams have died, and everything else stays where it is. Rows may have
different lengths, so prompts of any lengths are searched together, each as if it were alone.

The arithmetic of scores, ties and stops follows ``_beam_search`` of transformers 5.23 to the letter
(``generation/utils.py``), in float32, on the device; the host reads one small table a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from foredraft.core.errors import NumericsError, OptionError
from foredraft.core.sampling.params import Processor, SamplingParams, check_known
from foredraft.core.sampling.warp import Paths, Warp, healthy
from foredraft.core.tree import TokenTree
from foredraft.engine.beam.cache import Forks
from foredraft.engine.detokenizer import Decode
from foredraft.model.base import TargetModel

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
    ``num_assistant_tokens``: with a draft model, how far it searches ahead; 0 leaves it out. What is found is the same.
    ``params`` holds lengths, end-of-sequence ids, penalties and bans, which apply to log-probabilities.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1
    num_assistant_tokens: int = 4
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        beams, count, ahead = self.num_beams, self.num_return_sequences, self.num_assistant_tokens
        penalty, early = self.length_penalty, self.early_stopping
        whole = _number(beams, int) and _number(count, int)
        for name, fine, values in (
            ("num_beams", _number(beams, int) and beams >= 2, "a whole number, 2 or more (generate searches with 1)"),
            ("num_return_sequences", whole and 1 <= count <= beams, f"a whole number from 1 to num_beams ({beams})"),
            ("num_assistant_tokens", _number(ahead, int) and ahead >= 0, "a whole number, 0 or more"),
            ("length_penalty", _number(penalty, (int, float)) and -10 <= penalty <= 10, "a number from -10 to 10"),
            ("early_stopping", isinstance(early, bool) or early == "never", 'True, False or "never"'),
        ):
            if not fine:
                raise OptionError(f"{name} must be {values}, not {getattr(self, name)!r}.")
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


class BeamKeywords(TypedDict, total=False):
    """The keywords of ``BeamOptions.from_options``; for type checkers."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_return_sequences: int
    num_assistant_tokens: int
    max_new_tokens: int
    min_new_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: Sequence[Sequence[int]] | None
    logit_bias: Mapping[int, float] | None
    logits_processor: Processor | Sequence[Processor]
    eos_token_id: int | Sequence[int] | None


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
    def start(cls, rules: "Rules") -> "Beams":
        """All beams are equal at first: only the first of each prompt counts."""
        shape = (rules.prompts.shape[0], rules.options.num_beams)
        longest = rules.history.shape[1] - int(rules.prompts.max())
        scores = torch.full(shape, _NEVER, device=rules.prompts.device)
        tokens = torch.zeros(*shape, longest, dtype=torch.long, device=rules.prompts.device)
        first = scores.clone()
        first[:, 0] = 0.0
        return cls(tokens, first, tokens.clone(), scores, torch.zeros_like(tokens[..., 0]))

    def select(self, prompts: Int[Tensor, "C"] | slice) -> "Beams":
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
        cls, target: TargetModel, prompts: Sequence[Sequence[int]], options: BeamOptions, eos: Sequence[int]
    ) -> "Rules":
        """Raises an ``OptionError`` if ``options.params`` name a token that the model does not have."""
        device, count = target.device, len(prompts) * options.num_beams
        sizes = torch.tensor([len(prompt) for prompt in prompts])
        limits = (target.max_length - sizes).clamp(max=options.params.max_new_tokens)
        history = pad_sequence([torch.tensor([*prompt]) for prompt in prompts], batch_first=True)
        warp = Warp.of(
            [options.params] * count,
            vocab_size=target.vocab_size,
            eos_token_ids=[tuple(eos)] * count,
            prompt_lengths=sizes.repeat_interleave(options.num_beams).tolist(),
            device=device,
        )
        ends = torch.tensor([*eos], dtype=torch.long, device=device)
        history = pad(history, (0, int(limits.max()))).to(device)
        return cls(options, ends, history, sizes.to(device), limits.to(device), warp)


class Grown(NamedTuple):
    """The search one token later; which beam each beam continues; which prompts have nothing left to find."""

    beams: Beams
    parents: Int[Tensor, "B K"]
    over: Bool[Tensor, "B"]


@torch.inference_mode()
def beam_search(
    target: TargetModel, prompts: Sequence[Sequence[int]], options: BeamOptions, eos: Sequence[int], decode: Decode
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
    rules = Rules.of(target, prompts, options, ends)
    beams = Beams.start(rules)
    forks = Forks(target, rules.history, [len(prompt) for prompt in prompts], width)
    active = list(range(len(prompts)))
    done: list[tuple[int, Beams]] = []
    for step in range(int(rules.limits.max())):
        text, lengths = texts_of(beams, rules, step)
        root = TokenTree.root(text.gather(1, lengths[:, None] - 1)[:, 0])
        logits = forks.forward(root)
        fine = healthy(logits, root.valid).view(-1, width).all(1)
        scores = rules.warp.scores(logits.float().log_softmax(-1), Paths(text, lengths, root))
        grown = grow(beams, scores[:, 0], rules, step)
        beams = grown.beams
        table = torch.cat([grown.parents, grown.over[:, None], fine[:, None]], dim=1).tolist()  # the only reading
        if not all(line[width + 1] for line in table):
            raise NumericsError(f"The model returned logits that are not numbers, {step} tokens behind the prompts.")
        over = [i for i, line in enumerate(table) if line[width]]
        stay = [i for i, line in enumerate(table) if not line[width]]
        done += [(active[i], beams.select(slice(i, i + 1))) for i in over]
        if not stay:
            break
        forks.move([i * width + parent for i in stay for parent in table[i][:width]])
        if over:
            active = [active[i] for i in stay]
            beams = beams.select(torch.tensor(stay, device=target.device))
            rules = Rules.of(target, [prompts[i] for i in active], options, ends)
    return [hypotheses(found, options.num_return_sequences, decode) for _, found in sorted(done, key=lambda d: d[0])]


def grow(beams: Beams, logprobs: Float[Tensor, "N V"], rules: Rules, step: int) -> Grown:
    """One more token for every prompt: ``_beam_search`` b to g, with a limit of its own for each prompt.

    ``did_top_num_beams_just_finished``, ``is_sent_finished`` and ``is_early_stop_heuristic_unsatisfied`` are what
    transformers calls ``ending``, ``full`` and not ``over``. Its batch goes on until all are over, and keeps those
    that are from changing; here they leave.
    """
    count, width, _ = beams.running.shape
    vocabulary, length, penalty = logprobs.shape[1], step + 1, rules.options.length_penalty
    total = (logprobs.view(count, width, -1) + beams.scores[..., None]).flatten(1)
    kept = min(max(2, 1 + rules.eos.shape[0]) * width, total.shape[1])  # enough if all but ``width`` of them end
    scores, index = total.topk(kept)
    parents, tokens = index // vocabulary, index % vocabulary
    texts = _pick(beams.running, parents)
    texts[:, :, step] = tokens
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
    finished = _pick(torch.cat([beams.finished, texts], dim=1), top)

    full = finished_lengths > 0
    if rules.options.early_stopping == "never" and penalty > 0.0:
        hope = running_scores[:, :1] / (rules.limits[:, None].double() ** penalty).float()
    else:
        hope = running_scores[:, :1] / length**penalty
    worst = torch.where(full, finished_scores.amin(1, keepdim=True), _NEVER)
    over = ~(hope > worst).any(1) | ended.all(1)
    if rules.options.early_stopping is True:
        over = over | full.all(1)
    running = _pick(texts, best)
    return Grown(
        Beams(running, running_scores, finished, finished_scores, finished_lengths), parents.gather(1, best), over
    )


def texts_of(beams: Beams, rules: Rules, step: int) -> tuple[Int[Tensor, "N L"], Int[Tensor, "N"]]:
    """Each beam's text, prompt included, and its length; what stands beyond is rubbish."""
    width = rules.options.num_beams
    lengths = rules.prompts.repeat_interleave(width)
    index = lengths[:, None] + torch.arange(step, device=lengths.device)
    text = rules.history.repeat_interleave(width, dim=0)
    return text.scatter_(1, index, beams.running.flatten(0, 1)[:, :step]), lengths + step


def _pick(texts: Int[Tensor, "B C T"], index: Int[Tensor, "B K"]) -> Int[Tensor, "B K T"]:
    return texts.gather(1, index[..., None].expand(-1, -1, texts.shape[2]))


def hypotheses(found: Beams, count: int, decode: Decode) -> list[Hypothesis]:
    """The best texts of one prompt. Bans may leave fewer texts than beams: what is left then is empty."""
    tokens, lengths, scores = found.finished[0], found.finished_lengths[0].tolist(), found.finished_scores[0].tolist()
    texts = [line[:length] for line, length in zip(tokens.tolist(), lengths, strict=True)]
    return [Hypothesis(text, score, decode(text)) for text, score in zip(texts[:count], scores, strict=False)]


def _number(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
