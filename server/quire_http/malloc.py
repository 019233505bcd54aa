"""glibc's allocator, set so that what large bodies took is returned to the system when they are gone.

By default it keeps pieces of up to 32 MiB, in each of many arenas, and one small object behind them keeps
them all.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, and their values.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_VALUES = {_M_MMAP_THRESHOLD: 512 << 10, _M_TRIM_THRESHOLD: 1 << 20, _M_ARENA_MAX: 2}


def return_memory() -> None:
    """Set it for this process. Call it before anything large is allocated."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        for parameter, value in _VALUES.items():
            libc.mallopt(parameter, value)
