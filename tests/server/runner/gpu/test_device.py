"""Errors of a GPU (out of memory, device faults) are reported with their cause and a remedy."""

from pathlib import Path

import pytest
import torch

from quire_server.core.request import Request
from quire_server.core.topology import Topology
from quire_server.errors import ConfigError, DeviceError
from quire_server.layers.linear import Linear
from quire_server.runner import model_runner
from quire_server.runner.loader import dtype_name, load_model
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from quire_server.runner.structured_outputs import Grammars
from quire_server.termination import Reason, failure_of
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.gpu.test_executor import gpu_runner, outputs_of
from tests.server.runner.in_process import greedy


def capture_graphs(device: FakeDevice, directory: Path) -> None:
    options = RunnerConfig(dtype="float32", max_num_seqs=2)
    parts = load_model(directory, options, lambda loaded, total: None, device)
    ModelRunner(parts, options, Grammars(lambda: pytest.fail("no grammar is used"))).capture(
        lambda captured, wanted: None
    )


@pytest.mark.parametrize("when", ["waiting", "launching"])
def test_a_device_error_names_its_cause_and_the_remedy(
    directory: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    device = FakeDevice()
    runner = gpu_runner(device, directory)
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
        outputs_of(runner, [Request("a", (5, 6), greedy(4), 0.0)])
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
def test_out_of_memory_while_loading_or_capturing_is_explained(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, reason: Reason
) -> None:
    class Broken(FakeDevice):
        def capture(self, compute: object) -> object:  # type: ignore[override]  # it never returns
            raise fault

    said = "no memory left" if reason is Reason.GPU_OUT_OF_MEMORY else "The GPU failed"
    with pytest.raises(DeviceError, match=f"{said} while kernels are compiled and graphs captured") as caught:
        capture_graphs(Broken(), directory)
    assert failure_of(caught.value).reason is reason

    def no_gpu(topology: Topology) -> None:
        raise fault

    monkeypatch.setattr(model_runner, "CudaDevice", no_gpu)
    with pytest.raises(DeviceError, match=f"{said} while the model is loaded") as caught:
        ModelRunner.load(directory, RunnerConfig(device="cuda"), lambda loaded, total: None)
    assert failure_of(caught.value).reason is reason


def test_a_kernel_that_is_too_large_for_the_gpu_is_explained(directory: Path) -> None:
    class OutOfResources(Exception):
        __module__ = "triton.runtime.errors"

    class Small(FakeDevice):
        def capture(self, compute: object) -> object:  # type: ignore[override]  # it never returns
            raise OutOfResources("out of resource: shared memory, Required: 147456, Hardware limit: 101376")

    with pytest.raises(
        DeviceError,
        match=r"more of the GPU than it has \(while kernels .*limit: 101376.* take an A100",
    ):
        capture_graphs(Small(), directory)


def test_float32_is_refused_on_a_gpu_and_auto_is_bfloat16_there(directory: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype float32 is for --device cpu.*Use bfloat16 or auto"):
        model_runner.device_of(RunnerConfig(device="cuda", dtype="float32"), Topology())
    assert dtype_name("auto", "float32", Linear, for_gpu=True) == "bfloat16"
    assert dtype_name("auto", "float32", Linear, for_gpu=False) == "float32"


def test_other_errors_are_not_translated(directory: Path) -> None:
    class Wrong(FakeDevice):
        def capture(self, compute: object) -> object:  # type: ignore[override]  # it never returns
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="^shapes do not match$"):
        capture_graphs(Wrong(), directory)
