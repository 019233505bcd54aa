"""No child outlives its supervisor: the kernel kills it when the supervisor dies, even by SIGKILL.

`python -m quire_server.orphan MODULE ARGUMENTS...` is how the supervisor starts each child: the promise
holds before the child imports anything, and some import for seconds. A pod would be cleaned up with its pid
1 anyway; on a laptop a forgotten engine would hold memory and ports.
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
    """Ask for SIGKILL at the parent's death; end at once if it died before we could ask."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if str(os.getppid()) != os.environ[PARENT_VARIABLE]:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
