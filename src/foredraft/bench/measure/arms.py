"""What is compared: our loop with each drafter, and transformers' own generate, behind one face."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from foredraft.compose.load import BUNDLED_DRAFTS, load_many
from foredraft.core.drafter import Background
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.engine.generator import Generator
from foredraft.model.hf_baseline import HFBaseline
from foredraft.model.load import load_model

STOCK = {
    "transformers": "transformers' generate",
    "transformers_assisted": "its assisted generation, with a draft model: transformers_assisted:PATH",
    "transformers_lookup": "its prompt lookup, of 10 tokens",
}
"""Arms that are not ours, by name. Each runs on a copy of the model that nothing was installed on."""
_LOOKUP = 10


@dataclass(frozen=True, slots=True)
class Call:
    """What an arm said, and what that took. ``decoded``: tokens that came after ``stats.prefill_seconds``."""

    tokens: list[list[int]]
    stats: DecodeStats
    decoded: int


class Arm(ABC):
    """One of the things that are compared. Subclasses are final."""

    def __init__(self, name: str, most: int, lossless: bool = True) -> None:
        self.name = name
        self.most = most
        self.lossless = lossless

    @abstractmethod
    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Call:
        """Continue these prompts, at most ``most``, at once. ``stats.seconds`` is wall time of the whole call."""


@final
class LoopArm(Arm):
    """Our loop with one drafter."""

    def __init__(self, name: str, generator: Generator, most: int) -> None:
        super().__init__(name, most, generator.kind.lossless)
        self.generator = generator

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Call:
        started = time.perf_counter()
        results = self.generator.batch([list(prompt) for prompt in prompts], params)
        seconds = time.perf_counter() - started
        if isinstance(drafter := self.generator.engine.drafter, Background):
            drafter.wait()  # so that it does not slow the next arm
        tokens = [result.tokens for result in results]
        together = DecodeStats.together(result.stats for result in results)
        return Call(tokens, replace(together, seconds=seconds), sum(map(len, tokens)))


@final
class StockArm(Arm):
    """transformers' generate. Its first token comes out of the prefill, so one a text is not counted as decoded."""

    def __init__(self, name: str, model: HFBaseline, most: int, assistant: HFBaseline | None, lookup: int) -> None:
        super().__init__(name, 1 if assistant or lookup else most)
        self._model, self._assistant, self._lookup = model, assistant, lookup

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Call:
        call = self._model.generate(prompts, params, assistant=self._assistant, lookup=self._lookup)
        counts = [len(tokens) for tokens in call.tokens]
        alone = len(prompts) == 1
        stats = DecodeStats(
            tokens=sum(counts),
            target_forwards=len(call.blocks) if alone else sum(counts),  # in a batch each forward brings one token
            accepted_by_depth=_by_depth(call.blocks) if alone else (),
            seconds=call.seconds,
            prefill_seconds=call.first_seconds,
        )
        first = min(call.blocks[0], counts[0]) if alone else len(prompts)
        return Call(call.tokens, stats, sum(counts) - first)


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """What to compare, as it is written: SPEC or NAME=SPEC, a drafter or one of ``STOCK``."""

    name: str
    spec: str

    @classmethod
    def parse(cls, text: str) -> "ArmSpec":
        """Read it. Without a NAME the path is left out: draft_model:PATH,branching=2x2 is draft_model,branching=2x2."""
        head, equals, rest = text.partition("=")
        if equals and not {":", ","} & set(head):
            if not head or not rest:
                raise OptionError(f"{text!r}: an arm is written SPEC or NAME=SPEC.")
            return cls(head, rest)
        method, comma, options = text.partition(",")
        return cls(method.partition(":")[0] + comma + options, text)

    @property
    def stock(self) -> bool:
        return self.spec.partition(":")[0] in STOCK


@dataclass(frozen=True, slots=True)
class Ground:
    """Where the arms run: a model, its type of number, its device, and the largest batch."""

    model: str
    dtype: str | None = None
    device: str | None = None
    most: int = 1


def make_arms(specs: Sequence[ArmSpec], ground: Ground) -> list[Arm]:
    """Load what the arms need: our arms share one model, those of transformers another.

    Raises:
        OptionError: no arms, two of one name, or one that cannot be.
        UsageError: as in ``foredraft.load``.
    """
    names = [each.name for each in specs]
    if not names:
        raise OptionError("There is nothing to compare: name at least one drafter.")
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"Two arms are called {name!r}; name them apart, as in {name}-2={name}:PATH.")
    ours = [each for each in specs if not each.stock]
    made: dict[str, Arm] = {}
    if ours:
        generators = load_many(
            ground.model,
            [each.spec for each in ours],
            dtype=ground.dtype,
            device=ground.device,
            max_batch_size=ground.most,
        )
        for each, generator in zip(ours, generators, strict=True):
            made[each.name] = LoopArm(each.name, generator, ground.most)
    if len(ours) < len(specs):
        made |= _stock_arms([each for each in specs if each.stock], ground)
    return [made[name] for name in names]


def _stock_arms(specs: Sequence[ArmSpec], ground: Ground) -> dict[str, Arm]:
    loaded = load_model(ground.model, dtype=ground.dtype, device=ground.device)
    model = HFBaseline(loaded.model, loaded.eos_token_ids, loaded.tokenizer)
    made: dict[str, Arm] = {}
    for each in specs:
        kind, _, path = each.spec.partition(":")
        assistant = None
        if kind == "transformers_assisted":
            path = path or BUNDLED_DRAFTS.get(ground.model, {}).get("draft_model", "")
            if not path:
                raise OptionError(f"{kind} needs a draft model: write {kind}:PATH.")
            draft = load_model(path, dtype=ground.dtype, device=ground.device)
            assistant = HFBaseline(draft.model, draft.eos_token_ids, draft.tokenizer)
        elif path:
            raise OptionError(f"{kind} takes no path.")
        lookup = _LOOKUP if kind == "transformers_lookup" else 0
        made[each.name] = StockArm(each.name, model, ground.most, assistant, lookup)
    return made


def short_name(model: str) -> str:
    """A model without the folders that lead to it."""
    return Path(model).name if Path(model).is_dir() else model


def _by_depth(blocks: Sequence[int]) -> tuple[int, ...]:
    """In how many rounds at least 1, 2, ... tokens were accepted; each round brings one more."""
    return tuple(sum(block > depth for block in blocks) for depth in range(1, max(blocks, default=1)))
