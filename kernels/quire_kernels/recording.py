"""What a model computes by native kernels alone, kept as a list of calls that a single one makes again:
nothing runs between the kernels of a step then, and one team of threads goes through all of them.

Called by ``runner.static_decode``. Like a CUDA graph, a recording is the same calls over the same memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from quire_kernels.native import NATIVE, Native
from quire_kernels.recorder import Recorder


class Recording:
    """``result`` [rows, ...], of which ``replay`` fills the first ones."""

    def __init__(self, native: Native, recorder: Recorder, result: Tensor) -> None:
        self.result = result
        self._native, self._recorder = native, recorder
        self._calls = native.array_of(recorder.calls)
        self._is_large = any(call.is_large for call in recorder.calls)

    def replay(self, rows: int) -> None:
        """Compute the first ``rows`` from what now lies in the memory that was recorded."""
        self._native.run(self._calls, rows, is_large=self._is_large)


def record(compute: Callable[[], Tensor]) -> Recording | None:
    """The calls that ``compute`` makes, none of them executed; None where it computes by anything but native
    kernels.

    Every tensor of it has the same number of rows, the first dimension, and whatever it reads must stay where
    it is as long as the recording is used.
    """
    if NATIVE is None:
        return None
    recorder = Recorder()
    try:
        with _NativeOnly(), NATIVE.recorded_by(recorder):
            result = compute()
    except _NotNative:
        return None
    return Recording(NATIVE, recorder, result)


class _NotNative(Exception):
    pass


class _NativeOnly(TorchDispatchMode):
    """Torch may look at tensors, and neither compute nor allocate."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler to keep it away from here: a second and 120 MB of every start."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            raise _NotNative(func)
        return func(*args, **(kwargs or {}))
