"""Training devices: the only module that imports accelerate, which is an extra."""

import datetime
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
        OptionError: accelerate is not installed.
    """
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ImportError as error:
        raise OptionError("Training needs the package accelerate: pip install 'foredraft[train]'.") from error
    handlers = [
        InitProcessGroupKwargs(timeout=_TIMEOUT),
        DistributedDataParallelKwargs(find_unused_parameters=partial),
    ]
    return Accelerator(cpu=cpu, kwargs_handlers=handlers)
