"""The output format of transformers' ``generate``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput


def as_generate_output(
    prompts: Tensor, outputs: Sequence[Sequence[int]], pad: int, as_dict: bool
) -> Tensor | GenerateDecoderOnlyOutput:
    """The prompts [B, T] followed by their outputs, padded on the right."""
    width = max(len(output) for output in outputs)
    tail = torch.full((len(outputs), width), pad, dtype=prompts.dtype, device=prompts.device)
    for row, output in enumerate(outputs):
        tail[row, : len(output)] = torch.tensor(list(output), dtype=prompts.dtype)
    sequences: Any = torch.cat([prompts, tail], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if as_dict else sequences
