"""Speculative decoding inside transformers' own ``generate``, without changing the user's model."""

import inspect
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.compose.arguments import AnyDrafter, taking_method
from foredraft.compose.load import build_generators
from foredraft.compose.options import SharedOptions
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.engine.generator import Generator
from foredraft.engine.inputs import listed
from foredraft.engine.request import Sequence
from foredraft.model.hf.generation import (
    NO_TOKENIZER,
    as_generate_output,
    check_arguments,
    check_config,
    check_inputs,
    configured_stop_strings,
    dropped_arguments,
)
from foredraft.model.hf.processors import check_processors, for_row, translate
from foredraft.model.loading.load import unwrapped
from foredraft.model.loading.tokenizers import as_tokenizer
from foredraft.model.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one call of ``generate`` that transformers does not pass on."""

    streamer: Any
    stop_strings: tuple[str, ...]
    tokenizer: Tokenizer | None

    def decode(self, tokens: list[int]) -> str:
        """Text to search for stop strings; not used otherwise."""
        return self.tokenizer.decode(tokens) if self.tokenizer is not None and self.stop_strings else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(SharedOptions):
    drafter: AnyDrafter = field(default="auto", kw_only=False)
    stop_strings: Seq[str] | str = ()
    streamer: Any = None
    fast: bool = False


class speculative:
    """Make ``model.generate`` draft: ``model.generate(**inputs, custom_generate=foredraft.speculative(...))``.

    Batches, sampling options, logits processors, stopping criteria, ``num_return_sequences`` and transformers'
    text-generation pipeline work as usual. Each call leaves the model unchanged.

    transformers drops ``streamer``, ``tokenizer`` and a few other arguments if ``custom_generate`` is given. Pass them
    to ``generate`` below, or here for all calls.

    Args:
        drafter: as in ``foredraft.load``; a draft model is loaded once, at the first call.
        tokenizer: needed for ``stop_strings``, and compared with a draft model's tokenizer.
        stop_strings: default for calls that give none.
        streamer: default for all calls; see ``generate``.
        verifier, max_batch_size, kv_cache_memory_bytes, draft_options: as in ``foredraft.load``.
        fast: on a CPU, pack the weights of the model's linear layers. The packed copies are kept in addition to the
            weights until ``close``; the model can still be saved and trained.

    Attributes:
        stats: statistics of the last call, summed over its rows.
        total_stats: the same for all calls.

    Raises:
        UsageError: an option that is not supported, such as beams.
    """

    @taking_method(_Options)
    def __init__(self, given: _Options) -> None:
        self._drafter = given.drafter
        self._tokenizer = as_tokenizer(given.tokenizer)
        self._stop_strings = _as_strings(given.stop_strings)
        self._streamer = given.streamer
        self._options = given.for_loading()
        self._generator: Generator | None = None
        self._model: Any = None
        self.stats = DecodeStats()
        self.total_stats = DecodeStats()
        if self._stop_strings and self._tokenizer is None:
            raise OptionError(NO_TOKENIZER)

    def __repr__(self) -> str:
        named = self._drafter is None or isinstance(self._drafter, str)
        drafter = repr(self._drafter) if named else self._drafter.__class__.__name__
        verifier = self._options.verifier
        rule = f", verifier={verifier!r}" if verifier is not None else ""
        return f"foredraft.speculative({drafter}{rule})"

    def generate(
        self,
        model: Any,
        inputs: Tensor | None = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        stop_strings: Seq[str] | str | None = None,
        **options: Any,
    ) -> Any:
        """``model.generate(inputs, **options, custom_generate=self)`` with the arguments that transformers would drop.

        Args:
            model: a transformers model, also one compiled by ``torch.compile`` or wrapped by PEFT.
            inputs, options: as in transformers' ``generate``.
            streamer: receives the prompt, then each token; transformers' streamers take a batch of one.
            tokenizer: needed for ``stop_strings``; by default the one given to the constructor.
            stop_strings: a sequence ends after the token that completes one of them.

        Returns:
            the output of ``model.generate``.

        Raises:
            UsageError: an option that is invalid or would be ignored.
        """
        streamer = self._streamer if streamer is None else streamer
        with _ended(streamer):
            plain: Any = unwrapped(model)
            check_arguments({"inputs": inputs, **options})
            if stop_strings is None and (found := configured_stop_strings(options, plain)):
                stop_strings, options["stop_strings"] = found, None
            call = self._call(streamer, stop_strings, as_tokenizer(tokenizer))
            return plain.generate(inputs, **options, custom_generate=partial(self._decode, call))

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *,
        stop_strings: Seq[str] | str | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by transformers in place of its own decoding loop."""
        frame = inspect.currentframe()
        dropped = dropped_arguments(frame.f_back if frame is not None else None)
        with _ended(dropped.get("streamer") or self._streamer):
            check_arguments(dropped)
            call = self._call(self._streamer, stop_strings, None)
            return self._decode(
                call, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
            )

    def close(self) -> None:
        """Restore the model, packed layers included."""
        if self._generator is not None:
            self._generator.close()
        self._generator = self._model = None

    def _call(self, streamer: Any, stop_strings: Seq[str] | str | None, tokenizer: Tokenizer | None) -> _Call:
        strings = self._stop_strings if stop_strings is None else _as_strings(stop_strings)
        call = _Call(streamer, strings, tokenizer or self._tokenizer)
        if call.stop_strings and call.tokenizer is None:
            raise OptionError(NO_TOKENIZER)
        return call

    def _decode(
        self,
        call: _Call,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Run one call on the inputs prepared by transformers and return its output type."""
        config = generation_config
        check_config(config, model.generation_config)
        check_inputs(model, input_ids, model_kwargs)
        check_processors(logits_processor)
        prompts = listed({"input_ids": input_ids, "attention_mask": model_kwargs.get("attention_mask")}).prompts
        if call.streamer is not None and len(prompts) > 1:
            raise OptionError("A streamer takes one sequence; give one prompt, or stream with foredraft.load(model).")
        width = input_ids.shape[1]
        seeds = torch.randint(2**62, (len(prompts),)).tolist()  # torch.manual_seed makes it repeatable
        paddings = [row[: len(row) - len(prompt)] for row, prompt in zip(input_ids, prompts, strict=True)]
        sequences: list[Sequence] = []
        with _evaluating(model):
            generator = self._generator_for(model, call.tokenizer)
            try:
                for row, (prompt, padding, seed) in enumerate(zip(prompts, paddings, seeds, strict=True)):
                    own = _sampling(config, for_row(logits_processor, row), width, padding)
                    own = replace(own, stop_strings=call.stop_strings, seed=seed)
                    request = generator.engine.request(prompt, own, generator.eos_token_ids)
                    sequences += generator.engine.submit([request], call.decode, [seed])
                _run(generator, sequences, input_ids, stopping_criteria, call.streamer)
            finally:
                generator.engine.cancel(sequences)  # an error above must not leave rows behind
        self._count(generator, sequences)
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        outputs = [sequence.tokens for sequence in sequences]
        return as_generate_output(input_ids, outputs, pad, bool(config.return_dict_in_generate))

    def _count(self, generator: Generator, sequences: list[Sequence]) -> None:
        kind = generator.kind
        rows = [each.counters.stats(len(each.prompt), kind.method, kind.lossless) for each in sequences]
        kept = [replace(row, tokens=len(each.tokens)) for row, each in zip(rows, sequences, strict=True)]
        self.stats = DecodeStats.together(kept)
        self.total_stats += self.stats

    def _generator_for(self, model: Any, tokenizer: Tokenizer | None) -> Generator:
        """The generator for this model; a new model replaces the previous one."""
        if self._generator is not None and self._model is model and self._generator.engine.target.ready:
            return self._generator
        self.close()
        self._generator = build_generators(model, [self._drafter], replace(self._options, tokenizer=tokenizer))[0]
        self._model = model
        return self._generator


def _as_strings(strings: Seq[str] | str) -> tuple[str, ...]:
    return (strings,) if isinstance(strings, str) else tuple(strings)


@contextmanager
def _ended(streamer: Any) -> Iterator[None]:
    """End a streamer even after an error: a reader in another thread would wait forever."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def _sampling(config: Any, processors: Any, width: int, padding: Tensor) -> SamplingParams:
    """Convert the configuration and processors that transformers prepared for a row with this padding."""
    eos = config.eos_token_id
    fields: dict[str, Any] = {"temperature": 1.0}
    translated = translate(processors, width)
    if translated is None:  # run transformers' whole list, temperature included, on the padded row

        def whole(input_ids: Tensor, scores: Tensor) -> Tensor:
            return processors(torch.cat([padding.expand(len(input_ids), -1), input_ids], 1), scores)

        fields["logits_processor"] = (whole,)
    else:
        fields |= translated.fields | {"logits_processor": translated.others}
    if not config.do_sample:
        fields["temperature"] = 0.0
    return SamplingParams(**fields, max_new_tokens=config.max_length - width, eos_token_id=() if eos is None else eos)


def _run(generator: Generator, sequences: list[Sequence], input_ids: Tensor, criteria: Any, streamer: Any) -> None:
    """Step until all have ended, checking the caller's stopping criteria after every token."""
    seen = [0] * len(sequences)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while not all(sequence.finished for sequence in sequences):
        generator.engine.step()
        for row, sequence in enumerate(sequences):
            _apply_criteria(sequence, seen[row], input_ids[row], criteria)
            if streamer is not None:
                for token in sequence.tokens[seen[row] :]:  # one at a time, as transformers does
                    streamer.put(torch.tensor([token]))
            seen[row] = len(sequence.tokens)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error


def _apply_criteria(sequence: Sequence, seen: int, prompt: Tensor, criteria: Any) -> None:
    """Cut a sequence after the first new token at which one of transformers' stopping criteria holds."""
    for count in range(seen + 1, len(sequence.tokens) + 1):
        tokens = torch.cat([prompt, torch.tensor(sequence.tokens[:count], dtype=prompt.dtype, device=prompt.device)])
        if bool(criteria(tokens[None], None).all()):
            sequence.cut(count)
            return


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the context."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
