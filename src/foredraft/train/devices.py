"""Training devices and their precision: the only module that imports accelerate, which is an extra."""

import datetime
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from accelerate import Accelerator

_TIMEOUT = datetime.timedelta(days=1)  # how long processes wait while one reads, writes or validates


def accelerator(cpu: bool = False, partial: bool = False) -> "Accelerator":
    """The accelerator of this process, as ``torchrun`` or ``accelerate launch`` set it up; else one device.

    Args:
        cpu: do not use a GPU.
        partial: some weights get no gradient in some steps.

    Raises:
        OptionError: accelerate is not installed, or set to split models among processes.
    """
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ImportError as error:
        raise OptionError("Training needs the package accelerate: pip install 'foredraft[train]'.") from error
    handlers = [InitProcessGroupKwargs(timeout=_TIMEOUT), DistributedDataParallelKwargs(find_unused_parameters=partial)]
    accelerator = Accelerator(cpu=cpu, kwargs_handlers=handlers)
    if accelerator.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise OptionError(
            "Training keeps all of the trained weights in every process, and accelerate is set to "
            f"{accelerator.distributed_type.value}: start it with torchrun, without that setting."
        )
    return accelerator


def leads() -> bool:
    """True in the process that reports: the first of those that ``torchrun`` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def machine() -> str:
    """A suffix for files that the processes of one of several machines share; empty for one machine.

    A mark that one machine writes to a network file system may reach the others before the data that it marks.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"-machine{os.environ.get('GROUP_RANK', '0')}" if several else ""


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
