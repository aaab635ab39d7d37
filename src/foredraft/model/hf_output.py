"""The shape in which transformers' ``generate`` hands out its texts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput


def as_generate_output(
    prompts: Tensor, texts: Sequence[Sequence[int]], pad: int, as_dict: bool
) -> Tensor | GenerateDecoderOnlyOutput:
    """Prompts [B, T] as they were given, with their new tokens behind, padded on the right."""
    width = max(len(text) for text in texts)
    tail = torch.full((len(texts), width), pad, dtype=prompts.dtype, device=prompts.device)
    for row, text in enumerate(texts):
        tail[row, : len(text)] = torch.tensor(list(text), dtype=prompts.dtype)
    sequences: Any = torch.cat([prompts, tail], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if as_dict else sequences
