"""Which addresses the programs of a launch touch, in the interpreter, where programs run one after the other
and reads beyond a tensor give whatever is there.

On a GPU programs run at the same time. So within one launch no program may write what another one writes or
reads, except by atomics, and none may leave the memory of the launch's arguments.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.interpreter import launch

_Builder = interpreter.InterpreterBuilder
#: Kernels that read addresses from tables: their arguments' extents are not all that they may touch.
_BY_TABLE = frozenset({"block_copy_kernel", "one_shot_all_reduce_kernel"})
#: Programs that wait for one another, by flags.
_WAITING = frozenset({"one_shot_all_reduce_kernel"})

_ONE_PLACE = "two programs write one place"

Addresses = NDArray[np.uint64]


@dataclass
class _Touched:
    """(addresses, program) of each access."""

    reads: list[tuple[Addresses, int]] = field(default_factory=list)
    writes: list[tuple[Addresses, int]] = field(default_factory=list)
    atomics: list[tuple[Addresses, int]] = field(default_factory=list)


class AddressLog:
    """``faults`` by kernel and kind, of all launches."""

    def __init__(self) -> None:
        self.faults: Counter[tuple[str, str]] = Counter()
        self.launches = 0
        self._unread: Counter[str] = Counter()  # runs within which programs of a kernel may write one place
        self._name = ""
        self._begins: Addresses = np.empty(0, np.uint64)
        self._ends: Addresses = np.empty(0, np.uint64)
        self._touched: _Touched | None = None

    def launch(self, kernel: JITFunction, args: Sequence[Any], grid: Any, more: dict[str, Any]) -> None:
        """Run the launch, and look at what it touched."""
        self._name, self._touched = kernel.fn.__name__, _Touched()
        self.launches += 1
        tensors = [each for each in (*args, *more.values()) if isinstance(each, torch.Tensor)]
        self._begins, self._ends = _extents(tensors)
        try:
            launch(kernel, *args, grid=grid, warmup=False, **more)
        finally:
            touched, self._touched = self._touched, None
            if self._name not in _WAITING:
                for kind in _conflicts(touched):
                    if kind != _ONE_PLACE or not self._unread[self._name]:
                        self.faults[self._name, kind] += 1

    def unread_writes(self, run: Callable[..., None], kernel: str) -> Callable[..., None]:
        """The function, within which nothing reads what programs of this kernel write: it may be one place.
        Ranks are threads, which take turns within it.
        """

        def running(*args: Any, **more: Any) -> None:
            self._unread[kernel] += 1
            try:
                run(*args, **more)
            finally:
                self._unread[kernel] -= 1

        return running

    def note(self, kind: str, builder: Any, pointers: Any, mask: Any) -> Any:
        """An access, before it is made; returns the mask of what may be accessed."""
        if self._touched is None:
            return mask
        data = np.asarray(pointers.data, np.uint64)
        shown = np.broadcast_to(np.asarray(mask.data, bool), data.shape)
        if self._name not in _BY_TABLE:
            size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
            found = np.searchsorted(self._begins, data, side="right") - 1
            inside = (found >= 0) & (data + size <= self._ends[np.maximum(found, 0)])
            if not inside[shown].all():
                self.faults[self._name, f"{kind} outside of the arguments"] += 1
                shown = shown & inside
        addresses = np.unique(data[shown])
        if addresses.size:
            (x, y, z), (_, height, depth) = builder.grid_idx, builder.grid_dim
            getattr(self._touched, kind).append((addresses, (x * height + y) * depth + z))
        return interpreter.TensorHandle(np.ascontiguousarray(shown), tl.int1)


def _extents(tensors: Sequence[torch.Tensor]) -> tuple[Addresses, Addresses]:
    """Begins and ends of the memory that the tensors span, joined where they overlap."""
    joined: list[list[int]] = []
    for begin, end in sorted(map(_extent, (each for each in tensors if each.numel()))):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    begins, ends = zip(*joined, strict=True) if joined else ((), ())
    return np.array(begins, np.uint64), np.array(ends, np.uint64)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _conflicts(touched: _Touched) -> Iterator[str]:
    written, writers = _flat(touched.writes)
    if not written.size:
        return
    order = np.lexsort((writers, written))
    written, writers = written[order], writers[order]
    if ((written[1:] == written[:-1]) & (writers[1:] != writers[:-1])).any():
        yield _ONE_PLACE
    for accesses, kind in (
        (touched.reads, "a program reads what another one writes"),
        (touched.atomics, "a program writes what another one changes by atomics"),
    ):
        addresses, programs = _flat(accesses)
        at = np.minimum(np.searchsorted(written, addresses), len(written) - 1)
        if ((written[at] == addresses) & (writers[at] != programs)).any():
            yield kind


def _flat(entries: Sequence[tuple[Addresses, int]]) -> tuple[Addresses, NDArray[np.int64]]:
    if not entries:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    programs = np.repeat([program for _, program in entries], [len(each) for each, _ in entries])
    return np.concatenate([each for each, _ in entries]), programs


@contextmanager
def address_log() -> Iterator[AddressLog]:
    """Within it, which is within ``interpreted()``, launches are looked at."""
    log = AddressLog()
    load, store = _Builder.create_masked_load, _Builder.create_masked_store
    change = _Builder.create_atomic_rmw

    def noted_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        return load(self, pointers, log.note("reads", self, pointers, mask), *more)

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        return store(self, pointers, value, log.note("writes", self, pointers, mask), *more)

    def noted_change(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        return change(self, op, pointers, value, log.note("atomics", self, pointers, mask), *more)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        log.launch(self, args, grid, more)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (_Builder, "create_masked_load", noted_load),
            (_Builder, "create_masked_store", noted_store),
            (_Builder, "create_atomic_rmw", noted_change),
            (JITFunction, "run", run),
        ):
            stack.enter_context(patch.object(owner, name, replacement))
        yield log
