"""One rank's state in a group of csrc/shm_collectives.c, and the errors for the failures that it records."""

import ctypes

#: Bytes of a slot; each rank has two. Larger messages are moved in chunks of this size.
SLOT_BYTES = 1 << 18
_ABORTED, _LATE, _DIFFERS = 1, 2, 3


class CollectiveError(RuntimeError):
    """The ranks cannot go on together: ``rank``, where it is known, did not arrive in time, made another call
    than the others, or gave up. All calls of all ranks fail from then on.
    """

    def __init__(self, message: str, rank: int | None = None, call: int = 0) -> None:
        super().__init__(message)
        self.rank, self.call = rank, call


class Group(ctypes.Structure):
    """`struct group`."""

    _fields_ = (
        ("region", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("deadline_ns", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("failure", ctypes.c_int64),
        ("failed_rank", ctypes.c_int64),
        ("finder", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
        ("slot_size", ctypes.c_int64),
        ("left_ns", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    )

    def error(self) -> CollectiveError:
        """Why the last call failed."""
        happened = {
            _ABORTED: "gave up",
            _LATE: f"did not arrive within {self.deadline_ns / 1e9:g} s",
            _DIFFERS: "made another call than this one, or one of another size",
        }[self.failure]
        message = f"Rank {self.failed_rank} {happened} (call {self.calls} of rank {self.rank}"
        if self.finder not in (self.rank, self.failed_rank):
            message += f", found by rank {self.finder}"
        return CollectiveError(message + ").", self.failed_rank, self.calls)
