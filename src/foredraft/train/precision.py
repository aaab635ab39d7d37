"""In what precision training computes; weights are float32 throughout."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def autocast(device: torch.device, precision: str) -> Any:
    """bf16 where it is asked for, or where it is fast."""
    wanted = precision == "bf16" or (precision == "auto" and _fast_at_bf16(device))
    return torch.autocast(device.type, dtype=torch.bfloat16) if wanted else nullcontext()


def _fast_at_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type == "cpu":
        return (
            bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and "AVX512" in torch.backends.cpu.get_cpu_capability()
        )
    return False


def even_norms(net: nn.Module) -> None:
    """Hand each RMSNorm of a net its input in the type of its weights.

    Autocast leaves norms alone: torch finds bfloat16 beside float32, warns, and takes the slow way. What reads a
    norm's answer is a matrix product, which autocast rounds anyway.
    """
    for module in net.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(_even)


def _even(norm: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    assert isinstance(norm.weight, Tensor)
    return given[0].to(norm.weight.dtype)
