"""No child outlives its supervisor: the kernel kills it when the supervisor dies, even by SIGKILL.

Called first thing by each child process. A pod would be cleaned up with its pid 1 anyway; on a laptop a
forgotten engine would hold memory and ports.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "_QUIRE_SUPERVISOR_PID"


def die_with_parent() -> None:
    """Ask for SIGKILL at the parent's death; end at once if it died before we could ask."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if str(os.getppid()) != os.environ.get(PARENT_VARIABLE, str(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)
