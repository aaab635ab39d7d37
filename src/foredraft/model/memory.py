"""How many bytes a model takes, and how many are free."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a device; None where nobody says."""
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
    except (AttributeError, OSError, ValueError):  # not on this system
        return None


def stored_bytes(module: nn.Module) -> int:
    """The weights of a module: its parameters, and the buffers of quantised layers (GPTQ and AWQ keep theirs there)."""
    return sum(each.nbytes for each in _weights(module))


def has_matrices(module: nn.Module) -> bool:
    return any(each.ndim > 1 for each in _weights(module))


def weight_bytes(model: PreTrainedModel) -> int:
    """What a forward reads of the weights: all but an input embedding that is not the output layer too.

    An upper bound for mixtures of experts, of which a forward reads some.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    apart = output is None or all(each is not embedding.weight for each in output.parameters())
    return stored_bytes(model) - (stored_bytes(embedding) if apart else 0)


def _weights(module: nn.Module) -> list[Tensor]:
    found: list[Tensor] = list(module.parameters())
    for each in module.modules():
        buffers = list(each.buffers(recurse=False))
        if any(_codes(buffer) for buffer in buffers):
            found += buffers
    return found


def _codes(buffer: Tensor) -> bool:
    """Whether this is a matrix of whole numbers, which only quantised layers have; masks are bool."""
    return buffer.ndim > 1 and not buffer.is_floating_point() and buffer.dtype != torch.bool


def readable(size: int) -> str:
    """Bytes for people, such as 1.5 GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"
