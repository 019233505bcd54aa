"""Makes the ops treat CPU tensors as CUDA tensors, so that they launch the Triton kernels in the interpreter.

Where there is a GPU the launches are only counted.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

import quire_kernels

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]  # a property of C


class _AsCuda(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _IS_CUDA:
            return True
        more = dict(kwargs or {})
        more.pop("pin_memory", None)  # a CPU without a GPU has none
        return func(*args, **more)


@contextmanager
def as_cuda() -> Iterator[list[str]]:
    """Within it every tensor has is_cuda = True; yields the names of the launches that were made."""
    called: list[str] = []
    patches: list[Any] = []
    if not torch.cuda.is_available():
        patches = [
            patch.object(torch.cuda, "get_device_properties", lambda device: _H200),
            patch.object(torch.cuda, "current_stream", lambda device: _STREAM),
            _AsCuda(),
        ]
    names = {found.name for found in pkgutil.walk_packages(quire_kernels.__path__, "quire_kernels.")}
    for name in sorted(names & {f"{op}_triton" for op in names}):
        op = importlib.import_module(name.removesuffix("_triton"))
        for launcher, function in vars(importlib.import_module(name)).items():
            if launcher.endswith("_triton") and getattr(function, "__module__", "") == name:
                patches.append(patch.object(op, launcher, _counted(launcher, function, called), create=True))
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield called


@contextmanager
def as_cuda_in_thread() -> Iterator[None]:
    """What a thread has of its own, for another one than that which is within ``as_cuda`` and interprets.
    Numbers may overflow in lanes and rows that are not read.
    """
    if torch.cuda.is_available():
        yield
        return
    with _AsCuda(), np.errstate(all="ignore"):
        yield


_H200 = SimpleNamespace(multi_processor_count=132)
_STREAM = SimpleNamespace(synchronize=lambda: None)


def _counted(name: str, launcher: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return launcher(*args, **kwargs)

    return launch
