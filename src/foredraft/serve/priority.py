"""How work gives way to the steps of the engine."""

import os

_NICENESS = 10
"""A tenth of the time of a core that something else wants."""


def give_way() -> None:
    """Lower the priority of this thread on Linux, elsewhere that of this process."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
