"""Where training runs: the one door to accelerate, which is an extra."""

import datetime
from typing import TYPE_CHECKING

from foredraft.core.errors import OptionError

if TYPE_CHECKING:
    from accelerate import Accelerator

_PATIENCE = datetime.timedelta(days=1)  # the others wait so long while one process reads, writes or validates


def accelerator(cpu: bool = False, partial: bool = False) -> "Accelerator":
    """The process's devices, as ``torchrun`` or ``accelerate launch`` have set them up; one device otherwise.

    Args:
        cpu: stay off a GPU that there is.
        partial: there are steps in which some weights get no gradient.

    Raises:
        OptionError: accelerate is not installed.
    """
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ImportError as error:
        raise OptionError("Training needs the package accelerate: pip install 'foredraft[train]'.") from error
    handlers = [
        InitProcessGroupKwargs(timeout=_PATIENCE),
        DistributedDataParallelKwargs(find_unused_parameters=partial),
    ]
    return Accelerator(cpu=cpu, kwargs_handlers=handlers)
