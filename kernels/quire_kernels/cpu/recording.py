"""Records a computation that uses native kernels only, and replays it in one call: a CUDA graph for the CPU.

A replay makes the same calls over the same memory, with no Python between them and with one team of threads
for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from quire_kernels.cpu.call_recorder import Recorder
from quire_kernels.cpu.library import LIBRARY, Library


class Recording:
    """A recorded computation; ``replay`` fills the first rows of ``result`` [rows, ...]."""

    def __init__(self, library: Library, recorder: Recorder, result: Tensor) -> None:
        self.result = result
        self._library, self._recorder = library, recorder
        self._calls = library.array_of(recorder.calls)
        self._is_large = any(call.is_large for call in recorder.calls)

    def replay(self, rows: int) -> None:
        """Compute the first ``rows`` from the current contents of the recorded memory."""
        self._library.run(self._calls, rows, is_large=self._is_large)


def record(compute: Callable[[], Tensor]) -> Recording | None:
    """Record the calls that ``compute`` makes, without executing them; None if it uses any other computation.

    All its tensors have the same number of rows, their first dimension, and all the memory that it reads must
    stay in place as long as the recording is used.
    """
    if LIBRARY is None:
        return None
    recorder = Recorder()
    try:
        with _NativeOnly(), LIBRARY.recorded_by(recorder):
            result = compute()
    except _NotNative:
        return None
    return Recording(LIBRARY, recorder, result)


class _NotNative(Exception):
    pass


class _NativeOnly(TorchDispatchMode):
    """Allows torch views, and raises on any op that computes or allocates."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, torch imports its compiler to disable it here: one second and 120 MB per start."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            raise _NotNative(func)
        return func(*args, **(kwargs or {}))
