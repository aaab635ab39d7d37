"""transformers' own ``generate``, the baseline of benchmarks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from foredraft.core.errors import OptionError, PromptError
from foredraft.core.rng import resolve_seed
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.hf.support import context_of
from foredraft.model.hf_types import PreTrainedModel
from foredraft.model.text.tokenizer import Tokenizer

_SUPPORTED = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
"""The parameters that are passed on; all others must have their defaults."""


@dataclass(frozen=True, slots=True)
class HFCall:
    """Outputs and times of a call. ``first_seconds``: time to the first new token. ``blocks``: new tokens of each
    iteration, for the longest row."""

    tokens: list[list[int]]
    seconds: float
    first_seconds: float
    blocks: tuple[int, ...]


class HFBaseline:
    """A stock transformers model.

    Args:
        model: in evaluation mode.
        eos_token_ids: all end-of-sequence ids.
        tokenizer: of the model, needed for an assistant with another tokenizer.
    """

    def __init__(
        self, model: PreTrainedModel, eos_token_ids: Sequence[int], tokenizer: Tokenizer | None = None
    ) -> None:
        self.model: Any = model.eval()
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        assistant: "HFBaseline | None" = None,
        lookup: int = 0,
    ) -> HFCall:
        """Generate for a batch of prompts, padded on the left.

        Args:
            params: lengths, temperature, top-k, top-p, repetition penalty and seed; all others must have their
                defaults. All outputs end when the longest row reaches the model's context.
            assistant: for assisted generation with transformers' schedule, one prompt at a time. If its tokenizer
                differs, this is transformers' universal assisted generation.
            lookup: ``prompt_lookup_num_tokens`` for prompt lookup; 0 means off.

        Raises:
            OptionError: a parameter that is not supported here.
            PromptError: a prompt that leaves no room for a new token.
        """
        longest = max(map(len, prompts))
        remaining = context_of(self.model.config) - longest
        if remaining < 1:
            raise PromptError(f"The prompt has {longest} tokens, which leaves no room in the model's context.")
        device, eos = self.model.device, list(self._eos)
        pad = eos[0] if eos else 0
        rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        extra = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        if assistant is not None:
            extra |= {"assistant_model": assistant.model, **self._tokenizers(assistant)}
        options = _options(params, remaining) | {"eos_token_id": eos or None, "pad_token_id": pad}
        clock = _Clock()
        torch.manual_seed(resolve_seed(params.seed))
        started = time.perf_counter()
        found = self.model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            streamer=clock,
            **options,
            **extra,
        )
        tokens = [_cut(row[longest:], self._eos) for row in found.tolist()]
        seconds = time.perf_counter() - started
        return HFCall(tokens, seconds, clock.first - started, tuple(clock.blocks))

    def _tokenizers(self, assistant: "HFBaseline") -> dict[str, Any]:
        """Both tokenizers as arguments, if they differ."""
        own, other = self._tokenizer, assistant._tokenizer
        if own is None or other is None or own.first_difference(other) is None:
            return {}
        return {"tokenizer": own.inner, "assistant_tokenizer": other.inner}


class _Clock(BaseStreamer):
    """Streamer that records the time of the first token and the tokens per iteration. (Some transformers versions call
    stopping criteria for candidate tokens too, so those would not do.)"""

    def __init__(self) -> None:
        self.first = 0.0
        self.blocks: list[int] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        """Called first with the prompt, then with the tokens of each iteration: [B], or [1, n] for several."""
        if self._prompt:
            self._prompt = False
            return
        if not self.blocks:
            self.first = time.perf_counter()
        self.blocks.append(value.shape[-1] if value.ndim == 2 else 1)

    def end(self) -> None:
        """Nothing to flush."""


def _options(params: SamplingParams, remaining: int) -> dict[str, Any]:
    """transformers' options for at most ``remaining`` tokens. Options that are off here are turned off explicitly,
    since transformers and the model have other defaults."""
    defaults = SamplingParams()
    for each in fields(params):
        if each.name not in _SUPPORTED and getattr(params, each.name) != getattr(defaults, each.name):
            raise OptionError(
                f"{each.name} is not supported for transformers' generate: remove it from the comparison."
            )
    options: dict[str, Any] = {
        "max_new_tokens": min(params.max_new_tokens, remaining),
        "min_new_tokens": min(params.min_new_tokens, remaining) or None,
        "repetition_penalty": params.repetition_penalty,
        "do_sample": not params.greedy,
    }
    if not params.greedy:
        options |= {"temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p or 1.0}
    return options


def _cut(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to and including the first end-of-sequence id; the rest is padding."""
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]
