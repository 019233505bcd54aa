"""Makes the kernel kill a child process when its supervisor dies, even by SIGKILL.

The supervisor starts each child with `python -m quire_server.parent_death MODULE ARGUMENTS...`, so that this
is in effect before the child imports anything, which may take seconds. In a pod all processes end with pid 1
anyway; on a laptop an orphaned engine would keep memory and ports.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "_QUIRE_SUPERVISOR_PID"


def die_with_parent() -> None:
    """Request SIGKILL at the parent's death; end at once if it has died already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if str(os.getppid()) != os.environ[PARENT_VARIABLE]:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
