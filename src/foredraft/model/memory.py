"""Memory: sizes of models, and free bytes of devices."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not available on this system
        return None


def stored_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights: parameters, and the buffers of quantised layers (as in GPTQ and AWQ)."""
    return sum(each.nbytes for each in _weights(module))


def has_matrices(module: nn.Module) -> bool:
    return any(each.ndim > 1 for each in _weights(module))


def weight_bytes(model: PreTrainedModel) -> int:
    """Weight bytes that a forward reads: all but an input embedding that is not tied to the output layer.

    An upper bound for mixtures of experts.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    untied = output is None or all(each is not embedding.weight for each in output.parameters())
    return stored_bytes(model) - (stored_bytes(embedding) if untied else 0)


def _weights(module: nn.Module) -> list[Tensor]:
    found: list[Tensor] = list(module.parameters())
    for each in module.modules():
        buffers = list(each.buffers(recurse=False))
        if any(_is_quantised(buffer) for buffer in buffers):
            found += buffers
    return found


def _is_quantised(buffer: Tensor) -> bool:
    """Whether this is an integer matrix, which only quantised layers have (masks are bool)."""
    return buffer.ndim > 1 and not buffer.is_floating_point() and buffer.dtype != torch.bool


def format_bytes(size: int) -> str:
    """A size with its unit, such as 1.5 GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"
