"""Speculation inside transformers' own ``generate``, on a model that stays the user's."""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from foredraft.compose import load
from foredraft.core.drafter import Drafter
from foredraft.core.errors import OptionError
from foredraft.core.params import SamplingParams
from foredraft.engine.generate import Generator
from foredraft.engine.sequence import Sequence
from foredraft.model.causal import evaluating
from foredraft.model.output import as_generate_output
from foredraft.model.processors import translate

_UNSUPPORTED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class speculative:
    """Make ``model.generate`` draft: ``model.generate(**inputs, custom_generate=foredraft.speculative(...))``.

    Batches, sampling options, logits processors, stopping criteria and ``num_return_sequences`` work as they do
    without it, and so does transformers' text-generation pipeline. The model is as it was after each call.

    Args:
        drafter: as in ``foredraft.load``; a draft model is loaded once, at the first call.
        tokenizer: needed for ``stop_strings`` and to compare with a draft model's.
        stop_strings: transformers throws its own away where the loop is replaced, so they are given here.
        streamer: for the same reason; transformers' streamers take one text at a time.
        verifier, max_batch_size, kv_cache_memory_bytes, draft_options: as in ``foredraft.load``.
        fast: on a CPU, pack the weights of the model's linear layers. The packed copies stay beside the weights
            between calls, until ``close``; the model can be saved and trained as ever.

    Raises:
        UsageError: what cannot be done, in one sentence (beams, for instance).
    """

    def __init__(
        self,
        drafter: str | Drafter | None = "auto",
        *,
        tokenizer: Any = None,
        stop_strings: Seq[str] | str = (),
        streamer: Any = None,
        verifier: str | None = None,
        max_batch_size: int = 32,
        fast: bool = False,
        kv_cache_memory_bytes: int | None = None,
        draft_options: dict[str, Any] | None = None,
    ) -> None:
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        self._streamer = streamer
        self._verifier = verifier
        self._max_batch_size = max_batch_size
        self._fast = fast
        self._kv_cache_memory_bytes = kv_cache_memory_bytes
        self._draft_options = draft_options
        self._generator: Generator | None = None
        self._model: Any = None
        if self._stop_strings and tokenizer is None:
            raise OptionError("stop_strings need the model's tokenizer: speculative(stop_strings=..., tokenizer=...).")

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls in place of its own loop; it takes further names of ours away from its own."""
        config = generation_config
        if config.num_beams > 1:
            raise OptionError("Speculation extends greedy search and sampling; leave num_beams at 1.")
        for name in _UNSUPPORTED:
            if getattr(config, name, False):
                raise OptionError(f"{name} is not available while drafting; leave it out.")
        width = input_ids.shape[1]
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        seeds = torch.randint(2**62, (len(prompts),)).tolist()  # torch.manual_seed makes it repeatable
        paddings = [row[: len(row) - len(prompt)] for row, prompt in zip(input_ids, prompts, strict=True)]
        params = [self._params(config, logits_processor, width, *each) for each in zip(paddings, seeds, strict=True)]
        sequences: list[Sequence] = []
        with evaluating(model):
            generator = self._attached(model)
            try:
                for prompt, own in zip(prompts, params, strict=True):
                    sequences += generator.submit([prompt], own)
                _run(generator, sequences, input_ids, stopping_criteria, self._streamer)
            finally:
                generator.engine.cancel(sequences)  # whoever raised in between must not leave rows behind
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        texts = [sequence.tokens for sequence in sequences]
        return as_generate_output(input_ids, texts, pad, bool(config.return_dict_in_generate))

    def close(self) -> None:
        """Leave the model as it was found, packed layers included."""
        if self._generator is not None:
            self._generator.close()
        self._generator = self._model = None

    def _attached(self, model: Any) -> Generator:
        """The generator for this model; a new model takes the place of the one before."""
        if self._generator is not None and self._model is model and self._generator.engine.target.ready:
            return self._generator
        self.close()
        self._generator = load(
            model,
            self._drafter,
            tokenizer=self._tokenizer,
            verifier=self._verifier,
            max_batch_size=self._max_batch_size,
            fast=self._fast,
            kv_cache_memory_bytes=self._kv_cache_memory_bytes,
            draft_options=self._draft_options,
        )
        self._model = model
        return self._generator

    def _params(self, config: Any, processors: Any, width: int, padding: Tensor, seed: int) -> SamplingParams:
        """What transformers has prepared for a row that begins with this padding, as our parameters."""
        eos = config.eos_token_id
        fields: dict[str, Any] = {"temperature": 1.0}
        translated = translate(processors, width)
        if translated is None:  # transformers' list as a whole, temperature and all, on the row as it was given

            def whole(input_ids: Tensor, scores: Tensor) -> Tensor:
                return processors(torch.cat([padding.expand(len(input_ids), -1), input_ids], 1), scores)

            fields["logits_processor"] = (whole,)
        else:
            fields |= translated.fields | {"logits_processor": translated.others}
        if not config.do_sample:
            fields["temperature"] = 0.0
        return SamplingParams(
            **fields,
            max_new_tokens=config.max_length - width,
            eos_token_id=() if eos is None else eos,
            stop_strings=self._stop_strings,
            seed=seed,
        )


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Token ids of each row without its padding."""
    if attention_mask is None:
        return input_ids.tolist()
    return [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]


def _run(generator: Generator, sequences: list[Sequence], input_ids: Tensor, criteria: Any, streamer: Any) -> None:
    """Step until all have ended, asking the caller's stopping criteria about every token of every block."""
    seen = [0] * len(sequences)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    while not all(sequence.finished for sequence in sequences):
        generator.engine.step()
        for row, sequence in enumerate(sequences):
            _ask(sequence, seen[row], input_ids[row], criteria)
            if streamer is not None and len(sequence.tokens) > seen[row]:
                streamer.put(torch.tensor(sequence.tokens[seen[row] :]))
            seen[row] = len(sequence.tokens)
    if streamer is not None:
        streamer.end()
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error


def _ask(sequence: Sequence, seen: int, prompt: Tensor, criteria: Any) -> None:
    """Cut a sequence after the first new token at which one of transformers' stopping criteria holds."""
    for count in range(seen + 1, len(sequence.tokens) + 1):
        text = torch.cat([prompt, torch.tensor(sequence.tokens[:count], dtype=prompt.dtype, device=prompt.device)])
        if bool(criteria(text[None], None).all()):
            sequence.cut(count)
            return
