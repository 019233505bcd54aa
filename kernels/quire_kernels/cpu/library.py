"""The library that csrc/ is compiled to: how kernels are called, and recorded instead of called.

What the kernels compute, and on which CPUs, is in their bindings: ``native`` and ``collectives``. The library
runs on torch's OpenMP threads, so `torch.set_num_threads` applies to both.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire_kernels.cpu.call_recorder import Call, Recorder
from quire_kernels.cpu.shm_group import Group

_LIBRARY = Path(__file__).with_name("libquire_cpu.so")
_LACKED_MEMORY = 1
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

#: A kernel's address, and the structure of its arguments.
Kernel = tuple[int, type[ctypes.Structure]]


def arguments(pointers: str, numbers: str, floats: str = "") -> type[ctypes.Structure]:
    """The kernel's argument struct as its .c file declares it: pointers, then integers, then floats."""
    typed = ((pointers, _P), (numbers, _I), (floats, _F))
    fields = [(name, kind) for names, kind in typed for name in names.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


class _Loaded(ctypes.CDLL):
    """A library that was compiled of other sources than these says so."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not name.startswith("quire_"):
                raise
            build = Path(__file__).with_name("native_build.py")
            raise ImportError(
                f"{self._name} has no {name}: it was compiled of other sources than these. Run "
                f"`python {build}` (in a clone `make setup`), or delete it, and torch does its work."
            ) from None


class _Call(ctypes.Structure):
    _fields_ = (("kernel", _P), ("arguments", _P))


class Library:
    """Calls kernels, which check nothing."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        loaded.quire_run.argtypes = [_P, _I, _I, ctypes.c_int]
        loaded.quire_run.restype = ctypes.c_int
        loaded.quire_shm_create.argtypes = [_P, _I, _I]
        loaded.quire_shm_create.restype = _I
        loaded.quire_shm_failed_group.restype = ctypes.POINTER(Group)
        self.loaded = loaded
        self._recorder: Recorder | None = None

    def runs(self, instructions: str) -> bool:
        """Whether the CPU has this instruction set, for which some kernels are compiled."""
        return bool(getattr(self.loaded, f"quire_has_{instructions}")())

    def kernels(
        self, structures: Mapping[str, type[ctypes.Structure]], instructions: str | None = None
    ) -> dict[str, Kernel]:
        """Those of these names; ``instructions``: as compiled for that set."""
        end = "" if instructions is None else f"_{instructions}"
        return {name: (self._address(f"quire_{name}{end}"), each) for name, each in structures.items()}

    def _address(self, name: str) -> int:
        address = ctypes.cast(getattr(self.loaded, name), _P).value
        assert address is not None
        return address

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """A context in which calls are recorded instead of made; they return uninitialized memory."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the result of the next call."""
        if self._recorder is not None:
            return self._recorder.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def call(self, kernel: Kernel, rows: int, is_large: bool, *values: float | None) -> None:
        """Call the kernel with these arguments, or record the call."""
        address, structure = kernel
        given = structure(*values)
        if self._recorder is not None:
            self._recorder.calls.append(Call(address, given, is_large))
        else:
            self._run(ctypes.byref(_Call(address, ctypes.addressof(given))), 1, rows, is_large)

    def array_of(self, calls: Sequence[Call]) -> "ctypes.Array[_Call]":
        """The C array for ``run``. It points to the calls' arguments, which must outlive it."""
        made = [_Call(call.kernel, ctypes.addressof(call.arguments)) for call in calls]
        return (_Call * len(made))(*made)

    def run(self, calls: "ctypes.Array[_Call]", rows: int, *, is_large: bool) -> None:
        """Make the calls in order, each over the same number of rows."""
        self._run(calls, len(calls), rows, is_large)

    def _run(self, calls: object, count: int, rows: int, is_large: bool) -> None:
        failures = self.loaded.quire_run(calls, count, rows, is_large)
        if failures & _LACKED_MEMORY:
            raise MemoryError("a CPU kernel got no memory to work in")
        if failures:
            raise self.loaded.quire_shm_failed_group().contents.error()


def open_library(path: Path) -> Library | None:
    """The library at a path; None where there is none. Raises ImportError where it is another one's."""
    return Library(_Loaded(str(path))) if path.exists() else None


LIBRARY = open_library(_LIBRARY)
