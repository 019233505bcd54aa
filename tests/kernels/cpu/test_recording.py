"""A replayed recording gives the same results as the calls one by one."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire_kernels import NATIVE, add_rmsnorm, int8_linear, quantise_int8, record, silu_mul, take_rows
from quire_kernels.cpu.call_recorder import Recorder

pytestmark = pytest.mark.usefixtures("each_isa")

MAX_ROWS = 7


def chain(index: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Callable[[], Tensor]:
    """Table rows, a residual that is updated in place, and intermediate results that are used once."""
    table, norm = torch.randn(50, 128).to(dtype), torch.randn(128).to(dtype)
    up, down = quantise_int8(torch.randn(256, 128)), quantise_int8(torch.randn(128, 128))

    def compute() -> Tensor:
        stream = take_rows(table, index)
        hidden = add_rmsnorm(stream, None, norm, 1e-5)
        for _ in range(3):
            hidden = int8_linear(silu_mul(int8_linear(hidden, up, None)), down, None)
            hidden = add_rmsnorm(hidden, stream, norm, 1e-5)
        return hidden

    return compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_of_any_number_of_rows_equals_the_calls_one_by_one(dtype: torch.dtype) -> None:
    index = torch.zeros(MAX_ROWS, dtype=torch.int64)
    compute = chain(index, dtype=dtype)
    recording = record(compute)
    assert (recording is None) == (NATIVE is None)
    for rows in (MAX_ROWS, 1, 4) if recording else ():
        index[:] = torch.randint(50, index.shape)
        recording.replay(rows)
        assert torch.equal(recording.result[:rows], compute()[:rows])


def test_a_computation_by_torch_cannot_be_recorded() -> None:
    x = torch.randn(2, 64)
    assert record(lambda: silu_mul(x) + 1) is None
    assert record(lambda: silu_mul(x.clone())) is None
    # A failed attempt has no side effects.
    torch.testing.assert_close(silu_mul(x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:])


def test_memory_is_reused_once_no_tensor_refers_to_it_and_not_before() -> None:
    recorder = Recorder()
    whole = recorder.empty((4, 16), torch.bfloat16)
    place, part = whole.data_ptr(), whole.view(-1)[5:9]
    del whole
    other = recorder.empty((4, 16), torch.bfloat16)
    assert other.data_ptr() != place
    del part
    assert recorder.empty((2, 16), torch.float32).data_ptr() == place


def test_recording_does_not_load_the_compiler_of_torch() -> None:
    """It would take most of a server's start and a fifth of its memory."""
    program = (
        "import sys, torch, quire_kernels as k\n"
        "x = torch.ones(2, 64)\n"
        "assert (k.record(lambda: k.silu_mul(x)) is None) == (k.NATIVE is None)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
