"""transformers' own ``generate``, as it comes: what everything here is compared with."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from foredraft.core.errors import OptionError, PromptError
from foredraft.core.rng import resolve_seed
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.support import context_of
from foredraft.model.tokenizer import Tokenizer

_HANDED_ON = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
"""What of the parameters is handed on; anything else must be as usual."""


@dataclass(frozen=True, slots=True)
class HFCall:
    """What a call said and took. ``first_seconds``: until the first new token was there. ``blocks``: tokens that each
    round of the loop brought, for the longest row."""

    tokens: list[list[int]]
    seconds: float
    first_seconds: float
    blocks: tuple[int, ...]


class HFBaseline:
    """A transformers model that nothing was installed on.

    Args:
        model: in evaluation mode.
        eos_token_ids: all ids that end a text.
        tokenizer: of the model, for an assistant that has another.
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
        """Continue token ids, several at once with padding on the left.

        Args:
            params: lengths, temperature, top-k, top-p, repetition penalty and seed; everything else as usual. Texts end
                with the model's context, all of them where the longest does.
            assistant: for assisted generation, with transformers' own schedule; one prompt at a time. Where its
                tokenizer is another one, it is transformers' universal assisted generation.
            lookup: for prompt lookup: ``prompt_lookup_num_tokens``.

        Raises:
            OptionError: a parameter that is not handed on.
            PromptError: a prompt that leaves no room for a new token.
        """
        longest = max(map(len, prompts))
        room = context_of(self.model) - longest
        if room < 1:
            raise PromptError(f"The prompt has {longest} tokens, and leaves no room in the model's context.")
        device, eos = self.model.device, list(self._eos)
        pad = eos[0] if eos else 0
        rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        extra = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        if assistant is not None:
            extra |= {"assistant_model": assistant.model, **self._tokenizers(assistant)}
        options = _options(params, room) | {"eos_token_id": eos or None, "pad_token_id": pad}
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
        """Those of both, where they differ."""
        own, other = self._tokenizer, assistant._tokenizer
        if own is None or other is None or own.first_difference(other) is None:
            return {}
        return {"tokenizer": own.inner, "assistant_tokenizer": other.inner}


class _Clock(BaseStreamer):
    """Sees when the first token comes, and how many come at once. (Stopping criteria would not do: some versions ask
    them about candidates, too.)"""

    def __init__(self) -> None:
        self.first = 0.0
        self.blocks: list[int] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        """First the prompt, then the tokens of each round: [B], or [1, n] where several come at once."""
        if self._prompt:
            self._prompt = False
            return
        if not self.blocks:
            self.first = time.perf_counter()
        self.blocks.append(value.shape[-1] if value.ndim == 2 else 1)

    def end(self) -> None:
        """Nothing is left to be shown."""


def _options(params: SamplingParams, room: int) -> dict[str, Any]:
    """In transformers' words, for at most ``room`` tokens. What is off here is turned off there: its own defaults and
    the model's are others."""
    usual = SamplingParams()
    for each in fields(params):
        if each.name not in _HANDED_ON and getattr(params, each.name) != getattr(usual, each.name):
            raise OptionError(f"{each.name} is not handed on to transformers' generate: leave it out of a comparison.")
    options: dict[str, Any] = {
        "max_new_tokens": min(params.max_new_tokens, room),
        "min_new_tokens": min(params.min_new_tokens, room) or None,
        "repetition_penalty": params.repetition_penalty,
        "do_sample": not params.greedy,
    }
    if not params.greedy:
        options |= {"temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p or 1.0}
    return options


def _cut(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first end, which counts; what lies behind it is padding."""
    last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]
