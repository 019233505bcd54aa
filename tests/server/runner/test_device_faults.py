"""A GPU that cannot go on says what it was, and what to do: its memory, or a fault of its own."""

from pathlib import Path

import pytest
import torch

from quire_server.core.errors import DeviceError
from quire_server.core.request import Request
from quire_server.exits import Reason, failure_of
from quire_server.runner import model_runner
from quire_server.runner.grammars import Grammars
from quire_server.runner.model_runner import ModelRunner, RunnerOptions
from quire_server.runner.parts import assemble
from tests.server.runner.in_process import greedy
from tests.server.runner.pretend_device import PretendDevice
from tests.server.runner.test_device_runner import on, play


def graphed(device: PretendDevice, directory: Path) -> None:
    options = RunnerOptions(dtype="float32", max_num_seqs=2)
    parts = assemble(directory, options, lambda loaded, total: None, device)
    ModelRunner(parts, options, Grammars(lambda: pytest.fail("no grammar is used"))).capture(
        lambda captured, wanted: None
    )


@pytest.mark.parametrize("when", ["waiting", "launching"])
def test_a_fault_of_the_device_says_what_it_was_and_what_to_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    device = PretendDevice()
    runner = on(device, directory)
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore\nlines")

    def broken(*_: object) -> None:
        raise fault

    if when == "waiting":
        device.fault = fault
    else:
        monkeypatch.setattr(runner, "_forward", broken)
    with pytest.raises(
        DeviceError, match=r"illegal memory access was encountered\. The pod starts again"
    ) as it:
        play(runner, [Request("a", (5, 6), greedy(4), 0.0)])
    assert failure_of(it.value).reason is Reason.ENGINE_CRASHED


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
            Reason.GPU_OUT_OF_MEMORY,
        ),
        (torch.AcceleratorError("CUDA error: out of memory"), Reason.GPU_OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), Reason.GPU_OUT_OF_MEMORY),
        (RuntimeError("Triton Error [CUDA]: an illegal instruction"), Reason.ENGINE_CRASHED),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), Reason.ENGINE_CRASHED),
    ],
)
def test_a_gpu_that_cannot_even_hold_the_model_or_its_graphs_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, reason: Reason
) -> None:
    class Broken(PretendDevice):
        def capture(self, compute: object) -> object:  # type: ignore[override]  # it never returns
            raise fault

    said = "no memory left" if reason is Reason.GPU_OUT_OF_MEMORY else "The GPU failed"
    with pytest.raises(DeviceError, match=f"{said} while graphs are captured") as caught:
        graphed(Broken(), directory)
    assert failure_of(caught.value).reason is reason

    def no_gpu() -> None:
        raise fault

    monkeypatch.setattr(model_runner, "CudaDevice", no_gpu)
    with pytest.raises(DeviceError, match=f"{said} while the model is loaded") as caught:
        ModelRunner.load(directory, RunnerOptions(device="cuda"), lambda loaded, total: None)
    assert failure_of(caught.value).reason is reason


def test_what_is_no_fault_of_the_device_stays_what_it_was(directory: Path) -> None:
    class Wrong(PretendDevice):
        def capture(self, compute: object) -> object:  # type: ignore[override]  # it never returns
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="^shapes do not match$"):
        graphed(Wrong(), directory)
