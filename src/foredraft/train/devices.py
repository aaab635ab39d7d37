"""Training devices: the only module that imports accelerate, which is an extra."""

import datetime
import os
from typing import TYPE_CHECKING

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
    handlers = [
        InitProcessGroupKwargs(timeout=_TIMEOUT),
        DistributedDataParallelKwargs(find_unused_parameters=partial),
    ]
    made = Accelerator(cpu=cpu, kwargs_handlers=handlers)
    if made.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise OptionError(
            "Training keeps all of the trained weights in every process, and accelerate is set to "
            f"{made.distributed_type.value}: start it with torchrun, without that setting."
        )
    return made


def leads() -> bool:
    """True in the process that reports: the first of those that ``torchrun`` started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def machine() -> str:
    """A suffix for files that the processes of one of several machines share; empty for one machine.

    A mark that one machine writes to a network file system may reach the others before the data that it marks.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"-machine{os.environ.get('GROUP_RANK', '0')}" if several else ""
