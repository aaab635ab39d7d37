"""Memory: sizes of models, and free bytes of devices."""

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from foredraft.model.hf_types import PreTrainedModel

_MEMINFO = Path("/proc/meminfo")


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps much of what a conversion of weights has used."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def zero_pages(size: int) -> Any:
    """A buffer of zeros that takes memory page by page as it is written to, so it may be larger than the memory.

    Its pages are small: one huge page would hold the beginnings of many rows.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return np.zeros(size, dtype=np.uint8)
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # named in new Pythons only
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    with suppress(AttributeError, OSError):  # no huge pages on this system
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


def give_back(address: int, size: int) -> None:
    """Give the whole pages of this part of ``zero_pages`` back to the system; on Linux they are zeros then."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        with suppress(AttributeError, OSError, TypeError):  # Windows
            advise = ctypes.CDLL(None).madvise
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


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
    """Bytes of a module's weights: parameters, and the buffers of quantised layers (as in GPTQ and AWQ).

    Scales that a library keeps outside of both, as bitsandbytes does for 4 bits, are not counted.
    """
    return sum(_stored(each) for each in _weights(module))


def is_plain(weight: object) -> bool:
    """Whether this is a weight of at least 16 bits that is stored as it is, not a quantised one."""
    plain = type(weight) in (Tensor, nn.Parameter)
    return plain and weight.is_floating_point() and weight.dtype.itemsize > 1  # type: ignore[attr-defined]


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
        # only quantised layers have matrices of integers; masks are bool
        if any(each.ndim > 1 and not each.is_floating_point() and each.dtype != torch.bool for each in buffers):
            found += buffers
    return found


def _stored(weight: Tensor) -> int:
    """Bytes of a weight; a tensor subclass (torchao, quanto, a part of a distributed weight) has those of its parts."""
    if not is_traceable_wrapper_subclass(weight):
        return weight.nbytes
    parts = (getattr(weight, name) for name in weight.__tensor_flatten__()[0])
    return sum(_stored(part) for part in parts if isinstance(part, Tensor))


def format_bytes(size: int) -> str:
    """A size with its unit, such as 1.5 GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} GB"
