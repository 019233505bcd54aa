"""What a step launches on a GPU, by name, and how many calls of Python and C its modules make for that.

On fake tensors of CUDA, as in ``host_syncs``. An operation of torch that writes a tensor counts as one
launch: some of them are several kernels. Views and allocations are none.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default,
}  # fmt: skip
_PACKAGES = ("quire_server", "quire_kernels")


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "aten" and not (func in _ALLOCATIONS or func.is_view):
            self._found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Within ``host_syncs``: the launches by the names of torch's operations and of Triton's kernels."""
    found = Counter[str]()

    def note(self: JITFunction, *args: Any, **more: Any) -> None:
        found[self.fn.__name__] += 1

    with patch.object(JITFunction, "run", note), _Operations(found):
        yield found


def calls(compute: Callable[[], object]) -> int:
    """Of functions of our packages, and by these of any function written in C: what Python costs a launch,
    in a number that does not depend on the machine.
    """
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        if event in ("call", "c_call") and frame.f_globals.get("__name__", "").startswith(_PACKAGES):
            count += 1

    sys.setprofile(note)
    try:
        compute()
    finally:
        sys.setprofile(None)
    return count
