"""Speculative decoding inside transformers' own ``generate``, without changing the user's model."""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from foredraft.compose.arguments import AnyDrafter, from_keywords
from foredraft.compose.load import build_generators
from foredraft.compose.options import SharedKeywords, SharedOptions
from foredraft.core.errors import OptionError, PromptError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.core.verify import rule_of
from foredraft.engine.generator import Generator
from foredraft.engine.inputs import listed
from foredraft.engine.request import Request, Sequence
from foredraft.engine.results import named
from foredraft.model.hf.criteria import are_of_rows, new_tokens, prepared, stop_string_criterion
from foredraft.model.hf.generation import (
    NO_TOKENIZER,
    as_generate_output,
    check_arguments,
    check_config,
    check_inputs,
    configured_stop_strings,
    dropped_arguments,
    pad_of,
)
from foredraft.model.hf.processors import Prepared, check_processors, translate
from foredraft.model.hf.sample_loop import SampleLoop
from foredraft.model.loading.load import unwrapped
from foredraft.model.loading.tokenizers import as_tokenizer
from foredraft.model.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one call of ``generate`` that transformers does not pass on."""

    streamer: Any
    stop_strings: tuple[str, ...]
    tokenizer: Tokenizer | None

    def with_stop_strings(self, criteria: Any) -> Any:
        """The call's stopping criteria, with transformers' own for its stop strings."""
        if not self.stop_strings or self.tokenizer is None:
            return criteria
        return criteria.__class__([*criteria, stop_string_criterion(self.stop_strings, self.tokenizer)])


class speculative:
    """Make ``model.generate`` draft: ``model.generate(**inputs, custom_generate=foredraft.speculative(...))``.

    Batches, sampling options, logits processors, stopping criteria, ``num_return_sequences`` and transformers'
    text-generation pipeline work as usual. Each call leaves the model unchanged. Calls of several threads take turns.

    Processors and criteria of your own see what transformers shows them: the whole batch, padding included, once a
    position, in order. So all rows then advance as far as each of them can.

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

    def __init__(
        self,
        drafter: AnyDrafter = "auto",
        *,
        stop_strings: Seq[str] | str = (),
        streamer: Any = None,
        fast: bool = False,
        **options: Unpack[SharedKeywords],
    ) -> None:
        own = ("drafter", "stop_strings", "streamer")
        given = from_keywords(SharedOptions, "speculative", own, {**options, "fast": fast})
        self._drafter = drafter
        self._tokenizer = as_tokenizer(given.tokenizer)
        self._stop_strings = _as_strings(stop_strings)
        self._streamer = streamer
        self._options = given.for_loading()
        self._generator: Generator | None = None
        self._model: Any = None
        self._lock = threading.RLock()
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
        mask = model_kwargs.get("attention_mask")
        prompts = listed({"input_ids": input_ids, "attention_mask": mask}).prompts
        if call.streamer is not None and len(prompts) > 1:
            raise OptionError("A streamer takes one sequence; give one prompt, or stream with foredraft.load(model).")
        criteria = call.with_stop_strings(stopping_criteria)
        seeds = torch.randint(2**62, (len(prompts),)).tolist()  # torch.manual_seed makes it repeatable
        pad = pad_of(config)
        sequences: list[Sequence] = []
        with self._lock, _evaluating(model):
            generator = self._generator_for(model, call.tokenizer)
            engine = generator.engine
            given = prepared(config, input_ids, mask, criteria, engine.target.vocab_size)
            params, complete = _sampling(given, logits_processor, criteria)
            loop = None
            if not (complete and are_of_rows(criteria, len(prompts))):
                loop = SampleLoop(input_ids, logits_processor, criteria, do_sample=given.do_sample, pad=pad)
                self._check_choices(given)
                params = replace(params, eos_token_id=())  # the loop knows the ends
            try:
                requests = [_request(generator, prompts, row, params) for row in range(len(prompts))]
                sequences = engine.submit(requests, _no_text, seeds, choices=loop)
                _run(generator, sequences, partial(_after_step, input_ids, criteria, loop), input_ids, call.streamer)
            finally:
                engine.cancel(sequences)  # an error above must not leave rows behind
            self._count(generator, sequences)
        outputs = [sequence.tokens for sequence in sequences]
        return as_generate_output(input_ids, outputs, pad, bool(config.return_dict_in_generate))

    def _check_choices(self, given: Prepared) -> None:
        """Raise an ``OptionError`` for a rule that cannot be in order of the tokens."""
        rule = self._options.verifier
        if rule is not None and (given.do_sample or rule_of(rule).relaxed):
            raise OptionError(
                f"verifier={rule!r} judges a draft by the laws at all of its tokens, and processors and criteria of "
                "your own, or such as transformers alone has, are asked for one token after another: leave it out."
            )

    def _count(self, generator: Generator, sequences: list[Sequence]) -> None:
        kind = generator.kind
        rows = [each.counters.stats(len(each.prompt), kind.method, kind.lossless) for each in sequences]
        self.stats = DecodeStats.together(rows)
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


def _sampling(given: Prepared, processors: Any, criteria: Any) -> tuple[SamplingParams, bool]:
    """The parameters of a call, and whether they are all that its processors do; else drafts follow them alone."""
    found = translate(processors, given)
    fields: dict[str, Any] = {"temperature": 1.0, **found.fields}
    if not given.do_sample:
        fields["temperature"] = 0.0
    own = {"max_new_tokens": new_tokens(criteria, given.width), "eos_token_id": tuple(sorted(given.ends))}
    try:
        return SamplingParams(**fields, **own), found.complete
    except OptionError:  # beyond the ranges of ours
        return SamplingParams(temperature=float(given.do_sample), **own), False


def _request(generator: Generator, prompts: Seq[Any], row: int, params: SamplingParams) -> Request:
    try:
        return generator.engine.request(prompts[row], params, generator.eos_token_ids)
    except PromptError as error:
        raise named(error, row) if len(prompts) > 1 else error  # noqa: B904 - ``named`` sets the cause


def _no_text(tokens: list[int]) -> str:
    """Stop strings are a criterion, so no text is needed."""
    return ""


def _run(
    generator: Generator,
    sequences: list[Sequence],
    after_step: Callable[[int, Sequence, int], None],
    input_ids: Tensor,
    streamer: Any,
) -> None:
    """Step until all have ended. After each step, ``after_step(row, sequence, seen)`` is called for each row, which had
    ``seen`` tokens before."""
    seen = [0] * len(sequences)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while not all(sequence.finished for sequence in sequences):
        generator.engine.step()
        for row, sequence in enumerate(sequences):
            after_step(row, sequence, seen[row])
            if streamer is not None:
                for token in sequence.tokens[seen[row] :]:  # one at a time, as transformers does
                    streamer.put(torch.tensor([token]))
            seen[row] = len(sequence.tokens)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error


def _after_step(
    prompts: Tensor, criteria: Any, loop: SampleLoop | None, row: int, sequence: Sequence, seen: int
) -> None:
    """End a sequence where the loop has ended it, or after the first new token at which a criterion holds."""
    if loop is not None:
        if not loop.open[row]:
            sequence.cut(len(sequence.tokens))
        return
    prompt = prompts[row]
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
