"""How work gives way to the steps of the engine."""

import os
import sys

_NICENESS = 10
"""A tenth of the time of a core that something else wants."""
_LAST_NICENESS = 19


def give_way(*, last: bool = False) -> None:
    """Lower the priority of this thread on Linux, elsewhere that of this process.

    Args:
        last: it runs where nothing else wants to, and not at all on a machine whose cores are busy.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _LAST_NICENESS if last else _NICENESS)
    if last and sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # ends at once when something else wakes up
