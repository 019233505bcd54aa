"""Where the bench runs: a GPU, or in its tiny form Triton's interpreter, which tests the bench itself."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Protocol

import torch
import triton

from quire_server.runner.gpu.cuda_device import CudaDevice
from quire_server.runner.gpu.device import Device
from tests.kernels.gpu.as_cuda import as_cuda
from tests.server.runner.gpu.fake_device import FakeDevice

if (
    not torch.cuda.is_available()
):  # what it replaces is of the pinned versions, which a GPU's machine need not have
    from tests.kernels.gpu.interpreter import interpreted

Launch = Callable[[], object]
_REPLAYS, _MIN_REPLAYS, _MAX_SECONDS = 50, 10, 1.0


class Place(Protocol):
    """A device, and how to measure time on it."""

    runner_device: Device

    @property
    def device(self) -> torch.device: ...

    def fresh_device(self) -> Device:
        """A new device for another model: CUDA graphs share a memory pool while any of them exists."""

    def seconds(self, launches: Sequence[Launch], *, graph: bool = True) -> float:
        """Seconds per launch; ``launches`` do the same on different memory, so that caches do not help."""

    def synchronize(self) -> None:
        """Wait for all launches."""

    def machine(self) -> dict[str, str]:
        """The machine's properties, for the report."""


class Gpu:
    """The first GPU of the machine."""

    def __init__(self) -> None:
        self.runner_device: Device = CudaDevice()

    @property
    def device(self) -> torch.device:
        return self.runner_device.place

    def fresh_device(self) -> Device:
        return CudaDevice()

    def seconds(self, launches: Sequence[Launch], *, graph: bool = True) -> float:
        """The median of replays of one graph that holds all launches, or of launches one by one."""

        def together() -> None:
            for launch in launches:
                launch()

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            together()
        torch.cuda.current_stream().wait_stream(stream)
        run: Launch = together
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                together()
            run = captured.replay
        run()
        torch.cuda.synchronize()
        times: list[float] = []
        until = time.perf_counter() + _MAX_SECONDS
        while len(times) < _MIN_REPLAYS or (len(times) < _REPLAYS and time.perf_counter() < until):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return median(times) / len(launches)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def machine(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "GPU": f"{properties.name}, {properties.total_memory >> 20} MiB, "
            f"{properties.multi_processor_count} multiprocessors, sm_{properties.major}{properties.minor}",
            "CUDA": str(torch.version.cuda),
            **_versions(),
        }


class Interpreter:
    """A CPU with Triton's interpreter; its times are meaningless."""

    def __init__(self) -> None:
        self.runner_device: Device = FakeDevice(total=64 << 30)

    @property
    def device(self) -> torch.device:
        return self.runner_device.place

    def fresh_device(self) -> Device:
        device: Device = FakeDevice(total=64 << 30)
        return device

    def seconds(self, launches: Sequence[Launch], *, graph: bool = True) -> float:
        began = time.perf_counter()
        for launch in launches:
            launch()
        return (time.perf_counter() - began) / len(launches)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def machine(self) -> dict[str, str]:
        return {"GPU": "none: Triton's interpreter on a CPU, whose figures mean nothing", **_versions()}


def _versions() -> dict[str, str]:
    return {
        "host": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "Python": platform.python_version(),
        "torch, triton": f"{torch.__version__}, {triton.__version__}",
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
    }


@contextmanager
def here() -> Iterator[Place]:
    """The GPU of this machine; without one the interpreter, within the context."""
    if torch.cuda.is_available():
        yield Gpu()
        return
    with ExitStack() as stack:
        stack.enter_context(interpreted())
        stack.enter_context(as_cuda())
        yield Interpreter()
