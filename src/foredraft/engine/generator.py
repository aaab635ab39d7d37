"""The generator that ``foredraft.load`` returns: prompts in, results out, at once or as a stream."""

import weakref
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, overload

import numpy as np
from torch import Tensor
from typing_extensions import Unpack

from foredraft.core.errors import ModelError, OptionError, PromptError, kind_of
from foredraft.core.rng import derive_seeds, derived_seed, resolve_seed
from foredraft.core.sampling.params import (
    SamplingOptions,
    SamplingParams,
    SearchOptions,
    as_number,
    check_count,
    with_defaults,
)
from foredraft.engine import scoring
from foredraft.engine.beam.search import BeamKeywords, BeamOptions, Hypothesis, beam_search
from foredraft.engine.beam.speculative import BeamDrafter, speculative_beam_search
from foredraft.engine.bulk import Progress, completions
from foredraft.engine.driver import Driver
from foredraft.engine.engine import Engine
from foredraft.engine.inputs import Params, Prompt, Prompts, Several, as_params, continuation, encode, listed
from foredraft.engine.request import Piece, Request, Sequence, TokenLogprobs
from foredraft.engine.results import Completed, DrafterInfo, GenerateCall, Result, named, table_html
from foredraft.engine.stream import AsyncStream, Stream, StreamSource
from foredraft.model.base import TargetModel
from foredraft.model.text.tokenizer import Message, Tokenizer

OnePrompt = str | Seq[int] | Seq[Message] | Mapping[str, Any]
"""Types that always hold a single prompt; a tensor may hold one or several."""
_MOST_OUTPUTS = 2**20
"""Outputs of a prompt."""


class Generator(StreamSource):
    """A target with its drafter, made by ``foredraft.load``.

    Calls may overlap: all requests in flight share one batch.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        eos: Seq[int],
        kind: DrafterInfo,
        models: Seq[TargetModel] = (),
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.engine = engine
        self.driver = Driver(engine)
        for model in models:
            model.retain()
        self._release_models = weakref.finalize(self, _release_all, tuple(models))
        self._release_models.atexit = False
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos)
        self.kind = kind
        self.defaults = defaults
        """Options of ``SamplingParams`` that the model's generation config sets, for requests that do not."""

    def params(self, params: Params | None = None, **options: Any) -> SamplingParams:
        """The parameters of a request with these options: ``params`` or the model's ``defaults``, then ``options``.

        Raises:
            OptionError: an option is unknown, out of range, or cannot be expressed by ``SamplingParams``.
        """
        return as_params(params, options, self.defaults)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self,
        prompt: OnePrompt,
        params: Params | None = None,
        *,
        num_return_sequences: None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Prompt | Seq[Prompt],
        params: Params | None = None,
        *,
        num_return_sequences: int,
        **options: Unpack[SamplingOptions],
    ) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompt: OnePrompt | Tensor | np.ndarray,
        params: Params | None = None,
        *,
        num_return_sequences: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result | list[Result]: ...
    @overload
    def generate(
        self,
        prompt: Seq[Prompt],
        params: Params | None = None,
        *,
        num_return_sequences: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Prompt | Seq[Prompt],
        params: Params | None = None,
        *,
        num_return_sequences: int | None = None,
        **options: Any,
    ) -> Result | list[Result]:
        """Continue a prompt, or several as one ragged batch.

        Args:
            prompt: a string, token ids, chat messages, a tokenizer's output, or a list of any of these.
            params: ``SamplingParams`` or a transformers ``GenerationConfig``; its fields may also be keywords. Without
                it, options that are not given are those of the model's generation config (``defaults``).
            num_return_sequences: the number of outputs for each prompt. Output i of the call draws from the random
                stream (seed, i).

        Returns:
            one ``Result`` for one prompt; a list, in order, for several prompts or if ``num_return_sequences`` is
            given.

        Raises:
            UsageError: an option or a prompt is invalid; the message names the prompt if there are several.
            NumericsError: the model returned NaN.
        """
        call = self._call(prompt, self.params(params, **options), num_return_sequences)
        self.engine.run(call.sequences)
        return call.answer(self.kind)

    @overload
    async def agenerate(
        self,
        prompt: OnePrompt,
        params: Params | None = None,
        *,
        num_return_sequences: None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result: ...
    @overload
    async def agenerate(
        self,
        prompt: Prompt | Seq[Prompt],
        params: Params | None = None,
        *,
        num_return_sequences: int,
        **options: Unpack[SamplingOptions],
    ) -> list[Result]: ...
    @overload
    async def agenerate(
        self,
        prompt: OnePrompt | Tensor | np.ndarray,
        params: Params | None = None,
        *,
        num_return_sequences: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Result | list[Result]: ...
    @overload
    async def agenerate(
        self,
        prompt: Seq[Prompt],
        params: Params | None = None,
        *,
        num_return_sequences: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[Result]: ...

    async def agenerate(
        self,
        prompt: Prompt | Seq[Prompt],
        params: Params | None = None,
        *,
        num_return_sequences: int | None = None,
        **options: Any,
    ) -> Result | list[Result]:
        """``generate`` for asyncio; concurrent calls share one batch.

        Steps run in a thread. Cancelling the task cancels its requests at the next step.
        """
        call = self._call(prompt, self.params(params, **options), num_return_sequences)
        await self.driver.ended(call.sequences)
        return call.answer(self.kind)

    def batch(self, prompts: Several, params: Params | None = None, **options: Unpack[SamplingOptions]) -> list[Result]:
        """``generate`` for a list of prompts of any kind; always returns a list of results, in order."""
        empty = isinstance(prompts, Seq) and not len(prompts)
        several = [] if empty else listed(prompts).prompts
        sequences = self.submit(several, self.params(params, **options))
        self.engine.run(sequences)
        return GenerateCall(sequences, len(several), single=False).results(self.kind)

    def as_completed(
        self,
        prompts: Prompts,
        params: Params | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Completed]:
        """Run any number of prompts and yield each result, with the prompt's index, as soon as it is done.

        Prompts are read only as rows become free, so the iterable may be of any length; at most one batch is held. A
        prompt that is invalid or fails is yielded with its error, and the others continue. Leaving the loop cancels
        running requests. Each prompt has its own random stream, derived from the seed and the prompt's index.

        Args:
            progress: called after each prompt with the numbers of prompts done and of their new tokens.
        """
        if isinstance(prompts, (str, Mapping)):
            raise PromptError("as_completed runs many prompts: give a list or another iterable of them.")
        try:
            several = iter(prompts)
        except TypeError:
            raise PromptError(f"Prompts are a list or another iterable, not {kind_of(prompts)}.") from None
        if progress is not None and not callable(progress):
            raise OptionError(f"progress must be a function of (done, tokens), not {kind_of(progress)}.")
        chosen = self.params(params, **options)
        seed = chosen.seed

        def submit(number: int, prompt: Prompt) -> Sequence:
            own = chosen if seed is None else replace(chosen, seed=derived_seed(seed, number))
            return self.submit([prompt], own)[0]

        return completions(self, submit, several, progress)

    @overload
    def beam_search(  # type: ignore[overload-overlap]  # a str is a sequence of str
        self, prompt: OnePrompt, **options: Unpack[BeamKeywords]
    ) -> list[Hypothesis]: ...
    @overload
    def beam_search(
        self, prompt: Tensor | np.ndarray, **options: Unpack[BeamKeywords]
    ) -> list[Hypothesis] | list[list[Hypothesis]]: ...
    @overload
    def beam_search(self, prompt: Seq[Prompt], **options: Unpack[BeamKeywords]) -> list[list[Hypothesis]]: ...

    def beam_search(
        self, prompt: Prompt | Seq[Prompt], *, num_beams: int = 4, **options: Any
    ) -> list[Hypothesis] | list[list[Hypothesis]]:
        """Find the likeliest outputs with a beam search of ``num_beams`` beams.

        A draft model speeds the search up without changing its result. Other drafters are not used.

        Args:
            prompt: as in ``generate``; several are searched as one ragged batch.
            options: those of ``BeamOptions``; of ``SamplingParams`` lengths, end-of-sequence ids, penalties and bans.

        Returns:
            the ``num_return_sequences`` best outputs, best first; for several prompts a list of such lists, in order.

        Raises:
            UsageError: an option or a prompt is invalid.
            NumericsError: the model returned NaN.
        """
        prompts, single = listed(prompt)
        rules = {name: value for name, value in self.defaults.items() if name in SearchOptions.__annotations__}
        own = {name: value for name, value in options.items() if name in SearchOptions.__annotations__}
        chosen = BeamOptions.from_options({"num_beams": num_beams, **options, **with_defaults(rules, own)})
        encoded = [list(request.prompt) for request in self.requests(prompts, chosen.params)]
        with self.engine.exclusive():
            target, drafter = self.engine.target, self.engine.drafter
            if isinstance(drafter, BeamDrafter) and chosen.num_assistant_tokens:
                draft = drafter.beam_model()
                found = speculative_beam_search(target, draft, encoded, chosen, self.eos_token_ids, self.decode)
            else:
                found = beam_search(target, encoded, chosen, self.eos_token_ids, self.decode)
        return found[0] if single else found

    def score(self, prompt: Prompt, top: int = 0) -> list[TokenLogprobs | None]:
        """Log-probabilities of a prompt's own tokens under the model's law, before temperature and truncation.

        Args:
            top: how many of the likeliest tokens to return at each place, up to the size of the vocabulary.

        Returns:
            one entry per token of the prompt; None for the first, which follows nothing.

        Raises:
            UsageError: the prompt is invalid or longer than the context, ``top`` is out of range, or the target runs
                on several processes.
            NumericsError: the model returned NaN.
        """
        top = as_number(top)
        if not isinstance(top, int) or not 0 <= top <= self.engine.target.vocab_size:
            raise OptionError(f"top must be a whole number from 0 to {self.engine.target.vocab_size}, not {top!r}.")
        tokens = encode(prompt, self.tokenizer)
        scoring.check(self.engine, tokens)
        return [each for part in scoring.score(self.engine, tokens, top) for each in part]

    def stream(self, prompt: Prompt, params: Params | None = None, **options: Unpack[SamplingOptions]) -> Stream:
        """Continue one prompt and yield each piece as soon as its text is final."""
        return Stream(self, self.submit([prompt], self.params(params, **options))[0])

    def astream(self, prompt: Prompt, params: Params | None = None, **options: Unpack[SamplingOptions]) -> AsyncStream:
        """``stream`` for asyncio."""
        return AsyncStream(self, self.submit([prompt], self.params(params, **options))[0])

    def submit(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams,
        count: int = 1,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> list[Sequence]:
        """Queue prompts without running them; all are checked before any is queued.

        Args:
            priority: requests with a lower one are admitted first.
            tenant: only requests of one tenant share the keys and values of prompts that begin alike.
        """
        check_count("num_return_sequences", count, most=_MOST_OUTPUTS)
        return self.queue(self.requests(prompts, params), count, priority=priority, tenant=tenant)

    def queue(self, requests: Seq[Request], count: int, *, priority: int = 0, tenant: str = "") -> list[Sequence]:
        """``submit`` for requests of one call that have been checked; it takes no time, however long their prompts."""
        outputs = [request for request in requests for _ in range(count)]
        seeds = derive_seeds(resolve_seed(requests[0].params.seed), len(outputs))
        shown = requests[0].shown
        decode = partial(self.decode, shown=shown) if shown else self.decode
        return self.engine.submit(outputs, decode, seeds, priority=priority, tenant=tenant)

    def requests(
        self, prompts: Seq[Prompt], params: SamplingParams, shown: frozenset[int] = frozenset()
    ) -> list[Request]:
        """Check prompts and make requests of them; an error names the prompt if there are several.

        Args:
            shown: special tokens that are part of the text.
        """
        if not prompts:
            raise PromptError("There are no prompts.")
        if (given := params.prediction) is not None:
            ids = continuation(given, self.tokenizer) if isinstance(given, str) else given
            params = replace(params, prediction=ids[: self.engine.target.max_length])  # no output is longer
        requests: list[Request] = []
        for number, prompt in enumerate(prompts):
            try:
                request = self.engine.request(self.encode(prompt), params, self.eos_token_ids)
                requests.append(replace(request, shown=shown) if shown else request)
            except PromptError as error:
                raise named(error, number) if len(prompts) > 1 else error  # noqa: B904 - ``named`` sets the cause
        return requests

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any kind."""
        return encode(prompt, self.tokenizer)

    def clear_cache(self) -> None:
        """Forget all that was computed from the weights: cached prefixes, with what heads and drafts read of them, and
        copies of weights in other layouts.

        After a change that torch shows, the next request does so by itself: a training step, ``load_state_dict``,
        other modules, hooks or adapters. Writes through ``Tensor.data`` are not shown. Waits for a step in progress;
        requests that run keep what they have read.
        """
        self.engine.clear_cache()

    def close(self) -> None:
        """Cancel running requests, and restore the models unless other generators use them too."""
        self.engine.close()
        self._release_models()

    def __enter__(self) -> "Generator":
        if self.engine.closed:
            raise ModelError("This generator is closed: make a new one with foredraft.load.")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Generator has threads and memory of its own, so it can be neither pickled nor copied: load the model in "
            "each process; generators of one process can share a model (foredraft.load(model, ...))."
        )

    def decode(self, tokens: list[int], *, shown: frozenset[int] = frozenset()) -> str:
        """The text of token ids, without special tokens but for those ``shown``; empty without a tokenizer."""
        return self.tokenizer.decode(tokens, shown=shown) if self.tokenizer is not None else ""

    def result_of(self, sequence: Sequence, taken: Seq[Piece] = ()) -> Result:
        return Result.of(sequence, self.kind, taken)

    def _call(self, prompt: Prompt | Seq[Prompt], params: SamplingParams, count: int | None) -> GenerateCall:
        prompts, single = listed(prompt)
        sequences = self.submit(prompts, params, 1 if count is None else count)
        return GenerateCall(sequences, len(prompts), single=single and count is None)

    def _facts(self) -> dict[str, str]:
        target = self.engine.target
        dtype = target.weights or str(target.dtype).removeprefix("torch.")
        known = {"target": target.name, "drafter": self.kind.method, "device": str(target.device), "dtype": dtype}
        return {**known, "lossless": str(self.kind.lossless)}

    def __repr__(self) -> str:
        return f"Generator({', '.join(f'{name}={value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return table_html("foredraft.Generator", self._facts())


def _release_all(models: tuple[TargetModel, ...]) -> None:
    for model in models:
        model.release()
