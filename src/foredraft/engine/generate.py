"""What users hold: prompts in, texts out, by the batch or as they come."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any, overload

from foredraft.core.errors import OptionError, PromptError
from foredraft.core.noise import derive_seeds, resolve_seed
from foredraft.core.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.core.stop import FinishReason
from foredraft.engine.beam import BeamOptions, Hypothesis, beam_search
from foredraft.engine.beam_trie import SearchesAhead, speculative_beam_search
from foredraft.engine.engine import Engine
from foredraft.engine.inputs import Params, Prompt, as_params, encode, listed
from foredraft.engine.sequence import Piece, Sequence, TokenLogprobs
from foredraft.model.causal import CausalLM
from foredraft.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Result:
    """One finished text. ``text`` and ``tokens`` are the new ones only; an end-of-sequence id counts as a token.

    ``seed`` gives this output again, also where the call had several outputs or was given no seed.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: DecodeStats
    logprobs: list[TokenLogprobs]
    seed: int


@dataclass(frozen=True, slots=True)
class Kind:
    """What the results are marked with: the drafter's name, and whether its rule keeps the target's law."""

    method: str
    lossless: bool


class Generator:
    """A target with its drafter. Made by ``foredraft.load``.

    Calls may overlap: streams that are open at the same time share one batch. ``close``, the end of a ``with`` block
    and losing the last reference to the generator all leave the models as they were found.

    Args:
        models: those that it holds, until then.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, eos: Seq[int], kind: Kind, models: Seq[CausalLM] = ()
    ) -> None:
        self.engine = engine
        for model in models:
            model.retain()
        self._hold = weakref.finalize(self, _let_go, tuple(models))
        self._hold.atexit = False
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos)
        self.kind = kind

    @overload
    def generate(self, prompt: str, params: Params | None = None, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Seq[Any], params: Params | None = None, **options: Any) -> Any: ...

    def generate(
        self,
        prompt: Prompt | Seq[Prompt],
        params: Params | None = None,
        *,
        num_return_sequences: int = 1,
        **options: Any,
    ) -> Result | list[Result]:
        """Continue a prompt, or several as one ragged batch.

        Args:
            prompt: a string, token ids, chat messages, a tokenizer's output, or a list of any of these.
            params: or its fields as keywords; what is not given is as in ``SamplingParams``. A transformers
                ``GenerationConfig`` is read as these.
            num_return_sequences: so many texts for each prompt, Output i of the call has the stream (seed, i).

        Returns:
            one ``Result`` for one prompt; a list, in order, for several or for several texts.

        Raises:
            UsageError: an option or a prompt that cannot be; the sentence says why.
            NumericsError: the model returned NaN.
        """
        prompts, single = listed(prompt)
        sequences = self.submit(prompts, as_params(params, options), num_return_sequences)
        self.engine.run(sequences)
        results = [self._result(sequence) for sequence in sequences]
        return results[0] if single and num_return_sequences == 1 else results

    def batch(self, prompts: Prompt | Seq[Prompt], params: Params | None = None, **options: Any) -> list[Result]:
        """``generate`` for a list of prompts, whatever they are: always a list of results, in order."""
        sequences = self.submit(listed(prompts).prompts, as_params(params, options))
        self.engine.run(sequences)
        return [self._result(sequence) for sequence in sequences]

    def beam_search(
        self, prompt: Prompt | Seq[Prompt], *, num_beams: int = 4, **options: Any
    ) -> list[Hypothesis] | list[list[Hypothesis]]:
        """The likeliest texts that a search with ``num_beams`` beams finds; nothing is drawn.

        With a draft model the draft searches ahead; what is found is the same. Other drafters are left out.

        Args:
            prompt: as in ``generate``; several are searched as one ragged batch.
            options: those of ``BeamOptions``, and of ``SamplingParams`` lengths, ends, penalties and bans.

        Returns:
            the ``num_return_sequences`` best texts, best first; for several prompts a list of such lists, in order.

        Raises:
            UsageError: an option or a prompt that cannot be; the sentence says why.
            NumericsError: the model returned NaN.
        """
        prompts, single = listed(prompt)
        chosen = BeamOptions.from_options({"num_beams": num_beams, **options})
        encoded = [self.encode(item) for item in prompts]
        for tokens in encoded:
            self.engine.request(tokens, chosen.params, self.eos_token_ids)
        with self.engine.exclusive():
            target, drafter = self.engine.target, self.engine.drafter
            if isinstance(drafter, SearchesAhead) and chosen.num_assistant_tokens:
                draft = drafter.beam_model()
                found = speculative_beam_search(target, draft, encoded, chosen, self.eos_token_ids, self._decode)
            else:
                found = beam_search(target, encoded, chosen, self.eos_token_ids, self._decode)
        return found[0] if single else found

    def stream(self, prompt: Prompt, params: Params | None = None, **options: Any) -> "Stream":
        """Continue one prompt and hand out each piece as soon as it is certain."""
        return Stream(self, self.submit([prompt], as_params(params, options))[0])

    async def astream(self, prompt: Prompt, params: Params | None = None, **options: Any) -> AsyncIterator[Piece]:
        """``stream`` for asyncio: steps run in a thread, and closing the iterator cancels the request."""
        stream = self.stream(prompt, params, **options)
        try:
            while (piece := await asyncio.to_thread(next, stream, None)) is not None:
                yield piece
        finally:
            stream.close()

    def submit(self, prompts: Seq[Prompt], params: SamplingParams, count: int = 1) -> list[Sequence]:
        """Queue prompts without running them; a bad one is refused before any is queued."""
        if count < 1:
            raise OptionError("num_return_sequences must be 1 or more.")
        encoded = [self.encode(prompt) for prompt in prompts]
        if not encoded:
            raise PromptError("There are no prompts.")
        requests = [self.engine.request(tokens, params, self.eos_token_ids) for tokens in encoded]
        outputs = [request for request in requests for _ in range(count)]
        return self.engine.submit(outputs, self._decode, derive_seeds(resolve_seed(params.seed), len(outputs)))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any kind."""
        return encode(prompt, self.tokenizer)

    def close(self) -> None:
        """Cancel what runs, and leave the models as they were found, unless other generators hold them too."""
        self.engine.close()
        self._hold()

    def __enter__(self) -> "Generator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens) if self.tokenizer is not None else ""

    def _result(self, sequence: Sequence) -> Result:
        if sequence.error is not None:
            raise sequence.error
        stats = sequence.tally.stats(len(sequence.prompt), self.kind.method, self.kind.lossless)
        assert sequence.finish_reason is not None
        return Result(sequence.text, sequence.tokens, sequence.finish_reason, stats, sequence.logprobs, sequence.seed)


class Stream(Iterator[Piece]):
    """Pieces of one text as they become certain; ``result`` afterwards, or whenever it was closed."""

    def __init__(self, generator: Generator, sequence: Sequence) -> None:
        self._generator = generator
        self._sequence = sequence

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        sequence = self._sequence
        while not sequence.pieces:
            if sequence.error is not None:
                raise sequence.error
            if sequence.finished:
                raise StopIteration
            try:
                self._generator.engine.step()
            except BaseException:
                self.close()
                raise
        return sequence.pieces.popleft()

    def close(self) -> None:
        """Cancel what is still running; what was generated stays in ``result``."""
        self._generator.engine.cancel([self._sequence])

    @property
    def result(self) -> Result:
        """All of it so far; ends the stream if it is still running."""
        self.close()
        return self._generator._result(self._sequence)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _let_go(models: tuple[CausalLM, ...]) -> None:
    for model in models:
        model.let_go()
