"""Compute precision of training; weights stay float32."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def autocast(device: torch.device, precision: str) -> Any:
    """Autocast to bf16 if requested, or with ``auto`` if the device is fast at it."""
    bf16 = precision == "bf16" or (precision == "auto" and _fast_at_bf16(device))
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def _fast_at_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type == "cpu":
        return (
            bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and "AVX512" in torch.backends.cpu.get_cpu_capability()
        )
    return False


def cast_norm_inputs(net: nn.Module) -> None:
    """Cast each RMSNorm's input to the dtype of its weights.

    Autocast does not cast norms, so torch would mix bfloat16 and float32, warn, and take a slow path. The matrix
    product after a norm is autocast anyway.
    """
    for module in net.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(_cast_input)


def _cast_input(norm: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    assert isinstance(norm.weight, Tensor)
    return given[0].to(norm.weight.dtype)
