"""Which operations of a step would wait for a GPU, or copy from memory that is not pinned, which waits too.

Tensors are fake ones of CUDA: they have shapes and a device, and no data. Triton's launches do nothing.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.jit import JITFunction

from bench.gpu.random_model import fill
from quire_server.models.decoder import Decoder
from quire_server.runner.gpu.device import Memory, Outputs

CUDA = torch.device("cuda", 0)
_WAITS = {
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default, torch.ops.aten.unique_dim.default, torch.ops.aten._unique2.default,
}  # fmt: skip


class HostSyncs(TorchDispatchMode):
    """``found``: the names of operations that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [each for each in _flat((*args, *(kwargs or {}).values())) if isinstance(each, Tensor)]
        on_gpu = [each.device.type == "cuda" for each in given]
        if func in _WAITS and any(on_gpu):
            self.found.append(str(func))
        try:
            result = func(*args, **(kwargs or {}))
        except DynamicOutputShapeException:  # as an index of bools, whose places the host has to know
            if func not in _WAITS:
                self.found.append(str(func))
            raise
        if isinstance(result, Tensor) and given and func not in _WAITS:
            on_host = any(each.dim() and each.device.type == "cpu" for each in given)
            if (any(on_gpu) and on_host) or (result.device.type == "cuda") != on_gpu[0]:
                self.found.append(f"{func} between the host and the GPU")
        return result


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


class FakeCudaDevice:
    """Uploads without a wait; what is downloaded is zeros, and waiting for it is a sync."""

    place, capability = CUDA, 90

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.downloads = 0

    def upload(self, array: NDArray[Any]) -> Tensor:
        with _disable_current_modes():
            meta = torch.from_numpy(np.ascontiguousarray(array)).to("meta")
        return FakeTensor(self._mode, meta, CUDA)

    def download(self, tensor: Tensor) -> Callable[[], NDArray[np.int64]]:
        self.downloads += 1
        return lambda: np.zeros(tensor.shape, np.int64)

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        return lambda: None, compute()

    def memory(self) -> Memory:
        return Memory(1 << 40, 1 << 39, 1 << 20, 1 << 20)


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """What the host reads of tensors without data is 1, and all are equal: checks of weights pass."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


def fill_fake(model: Decoder) -> None:
    """``fill`` for a model whose tensors have no data."""
    with _Ones():
        fill(model, CUDA)


def _on_host(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any) -> Tensor:
        with _disable_current_modes():
            return function(*args)

    return made


@contextmanager
def host_syncs() -> Iterator[tuple[FakeCudaDevice, HostSyncs]]:
    """Within it tensors made for ``CUDA`` are fake, and waits are noted."""
    syncs = HostSyncs()
    properties = type("Properties", (), {"multi_processor_count": 132})()
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device: properties))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)))
        stack.enter_context(patch.object(JITFunction, "run", lambda self, *args, **more: None))
        stack.enter_context(patch.object(torch, "from_numpy", _on_host(torch.from_numpy)))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(syncs)
        yield FakeCudaDevice(mode), syncs
