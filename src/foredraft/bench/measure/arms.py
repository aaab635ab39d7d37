"""Benchmark arms: our loop with each drafter, and transformers' own generate, behind one interface."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from foredraft.compose.calibration import CALIBRATION, calibrated_folder, check_calibration, store_calibration
from foredraft.compose.load import build_generators
from foredraft.compose.options import LoadOptions
from foredraft.compose.spec import Spec
from foredraft.core.drafter import Background
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.drafters import bundled_drafts
from foredraft.engine.generator import Generator
from foredraft.files.provenance import shortened
from foredraft.files.write import check_writable
from foredraft.model.hf.baseline import HFBaseline
from foredraft.model.loading.contents import contents_of_files
from foredraft.model.loading.load import load_model

STOCK = {
    "transformers": "transformers' generate",
    "transformers_assisted": "its assisted generation, with a draft model: transformers_assisted:PATH",
    "transformers_lookup": "its prompt lookup, with 10 tokens",
}
"""Arms of transformers, by name. They run on a separate, unmodified copy of the model."""
_LOOKUP = 10


@dataclass(frozen=True, slots=True)
class ArmResult:
    """An arm's outputs and statistics. ``decoded``: tokens generated after ``stats.prefill_seconds``."""

    tokens: list[list[int]]
    stats: DecodeStats
    decoded: int


class BenchArm(ABC):
    """A way to generate, limited to ``max_batch`` prompts per call. Subclasses are final."""

    def __init__(self, name: str, max_batch: int, lossless: bool = True) -> None:
        self.name = name
        self.max_batch = max_batch
        self.lossless = lossless

    @abstractmethod
    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> ArmResult:
        """Continue at most ``max_batch`` prompts in one batch. ``stats.seconds`` is wall time of the whole call."""


@final
class LoopArm(BenchArm):
    """Our loop with one drafter."""

    def __init__(self, name: str, generator: Generator, max_batch: int) -> None:
        super().__init__(name, max_batch, generator.kind.lossless)
        self.generator = generator

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> ArmResult:
        started = time.perf_counter()
        sequences = self.generator.submit([list(prompt) for prompt in prompts], params)
        self.generator.engine.run(sequences)
        results = [self.generator.result_of(sequence) for sequence in sequences]
        seconds = time.perf_counter() - started
        if isinstance(drafter := self.generator.engine.drafter, Background):
            drafter.wait()  # so that it does not slow the next arm
        tokens = [result.tokens for result in results]
        total = DecodeStats.together(result.stats for result in results)
        return ArmResult(tokens, replace(total, seconds=seconds), sum(map(len, tokens)))


@final
class StockArm(BenchArm):
    """transformers' generate. Prefill yields each row's first token, which does not count as decoded."""

    def __init__(self, name: str, model: HFBaseline, max_batch: int, assistant: HFBaseline | None, lookup: int) -> None:
        super().__init__(name, 1 if assistant or lookup else max_batch)
        self._model, self._assistant, self._lookup = model, assistant, lookup

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> ArmResult:
        call = self._model.generate(prompts, params, assistant=self._assistant, lookup=self._lookup)
        counts = [len(tokens) for tokens in call.tokens]
        single = len(prompts) == 1
        stats = DecodeStats(
            tokens=sum(counts),
            target_forwards=len(call.blocks) if single else sum(counts),  # batches are plain: one token per forward
            accepted_by_depth=_by_depth(call.blocks) if single else (),
            seconds=call.seconds,
            prefill_seconds=call.first_seconds,
        )
        first = min(call.blocks[0], counts[0]) if single else len(prompts)
        return ArmResult(call.tokens, stats, sum(counts) - first)


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm as the user writes it: SPEC or NAME=SPEC; SPEC is a drafter or one of ``STOCK``."""

    name: str
    spec: str

    @classmethod
    def parse(cls, text: str) -> "ArmSpec":
        """Parse a spec. The default name drops the path: draft_model:PATH,branching=2x2 is draft_model,branching=2x2.

        Raises:
            OptionError: empty name or spec, or a name with a comma or colon.
        """
        head, equals, rest = text.partition("=")
        if equals and not {":", ","} & set(head):
            if not head or not rest:
                raise OptionError(f"Invalid arm {text!r}: write SPEC or NAME=SPEC.")
            return cls(head, rest)
        if equals and (fault := _fault(text)) and not _fault(rest):
            raise OptionError(f"{fault} If {head!r} is the arm's name: names have no comma and no colon.")
        method, comma, options = text.partition(",")
        return cls(method.partition(":")[0] + comma + shortened(options), text)

    @property
    def stock(self) -> bool:
        return self.spec.partition(":")[0] in STOCK


def _fault(spec: str) -> str:
    """What is wrong with an arm's spec; empty if nothing is."""
    if spec.partition(":")[0] in STOCK:
        return ""
    try:
        Spec.parse(spec)
    except OptionError as error:
        return str(error)
    return ""


def make_arms(specs: Sequence[ArmSpec], model: str, options: LoadOptions) -> list[BenchArm]:
    """Load the arms; ours share one copy of the model, those of transformers another.

    The weights of transformers' arms are rounded to those of ours, and run as floats.

    Raises:
        OptionError: no arms, a duplicate name, an invalid spec, or one that runs in one process only.
        UsageError: as in ``foredraft.load``.
    """
    names = [each.name for each in specs]
    if not names:
        raise OptionError("Nothing to compare: name at least one drafter.")
    for number, each in enumerate(specs):
        if each.name in names[:number]:
            raise OptionError(f"Two arms are named {each.name!r}: name one yourself, as in second={each.spec}.")
    ours = [each for each in specs if not each.stock]
    if options.tensor_parallel > 1 and len(ours) < len(specs):
        stock = next(each.spec for each in specs if each.stock)
        raise OptionError(
            f"{stock} runs in one process: with tensor_parallel, name other arms, such as -d none -d auto."
        )
    arms: dict[str, BenchArm] = {}
    if ours:
        generators = build_generators(model, [each.spec for each in ours], options)
        for each, generator in zip(ours, generators, strict=True):
            arms[each.name] = LoopArm(each.name, generator, options.max_batch_size)
    if len(ours) < len(specs):
        arms |= _stock_arms([each for each in specs if each.stock], model, options)
    return [arms[name] for name in names]


def _stock_arms(specs: Sequence[ArmSpec], name: str, options: LoadOptions) -> dict[str, BenchArm]:
    model = _stock_model(name, options)
    arms: dict[str, BenchArm] = {}
    for each in specs:
        kind, _, path = each.spec.partition(":")
        assistant = None
        if kind == "transformers_assisted":
            path = path or bundled_drafts(name, contents_of_files(name)).get("draft_model", "")
            if not path:
                raise OptionError(f"{kind} needs a draft model: use {kind}:PATH.")
            assistant = _stock_model(path, options)
        elif path:
            raise OptionError(f"{kind} takes no path.")
        lookup = _LOOKUP if kind == "transformers_lookup" else 0
        arms[each.name] = StockArm(each.name, model, options.max_batch_size, assistant, lookup)
    return arms


def _stock_model(name: str, options: LoadOptions) -> HFBaseline:
    """A model with the weights that our arms have, as floats."""
    loaded = load_model(name, dtype=options.dtype, device=options.device, weights=options.weights, native=True)
    weights = loaded.quantised_to(options.weights)
    model = loaded.model if weights is None else loaded.rounded(weights)
    return HFBaseline(model, loaded.eos_token_ids, loaded.tokenizer)


def calibrated(specs: Sequence[ArmSpec], model: str) -> dict[str, str]:
    """The folders of the arms that have one for their calibration, by the arm's name.

    Raises:
        OptionError: there are none, or one cannot be written to.
    """
    ours = {each.name: calibrated_folder(model, each.spec) for each in specs if not each.stock}
    found = {name: folder for name, folder in ours.items() if folder is not None}
    if not found:
        raise OptionError("--calibrate needs an arm with a head or draft model in a folder, such as -d eagle3:HEAD.")
    for folder in found.values():
        check_writable(Path(folder) / CALIBRATION)
        check_calibration(folder)
    return found


def store_calibrations(arms: Sequence[BenchArm], folders: Mapping[str, str]) -> list[Path]:
    """Store what the arms' policies have learned of acceptance, with their heads and draft models."""
    stored: list[Path] = []
    for arm in arms:
        if isinstance(arm, LoopArm) and arm.name in folders:
            weights = arm.generator.engine.policy.state().get("weights")
            if weights:
                stored.append(store_calibration(folders[arm.name], arm.generator.kind.method, weights))
    return stored


def short_name(model: str) -> str:
    """A model's name without parent folders."""
    return Path(model).name if Path(model).is_dir() else model


def _by_depth(blocks: Sequence[int]) -> tuple[int, ...]:
    """Number of steps that accepted at least 1, 2, ... tokens; each step yields one more than it accepts."""
    return tuple(sum(block > depth for block in blocks) for depth in range(1, max(blocks, default=1)))
