"""Options of the runner and the scheduler that loading derives from the settings."""

from types import SimpleNamespace

import pytest

from quire_server.config import parse_args
from quire_server.engine import loading
from quire_server.runner.gpu.cuda_device import CudaDevice


class FakeRunner:
    """The part of a runner that loading uses."""

    max_model_len, num_blocks = 64, 8
    num_host_slots = num_disk_slots = num_staging_slots = 0

    def __init__(self, block_size):
        self.block_size = block_size

    def capture(self, on_progress):
        on_progress(1, 1)


@pytest.mark.parametrize(
    ("flags", "gpu_bytes", "limits"),
    [
        ([], None, (64, 512)),
        (["--max-num-seqs", "600"], None, (600, 600)),
        (["--max-num-batched-tokens", "40"], None, (40, 40)),
        ([], 24 << 30, (256, 2048)),
        ([], 80 << 30, (256, 8192)),
        (["--max-num-seqs", "8"], 80 << 30, (8, 8192)),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "99"], 80 << 30, (8, 99)),
        (["--task", "embed"], 24 << 30, (256, 8192)),
    ],
)
def test_the_limits_of_a_step_are_those_of_what_computes_where_no_flag_says_so(
    flags, gpu_bytes, limits, monkeypatch
):
    monkeypatch.setattr(CudaDevice, "is_there", staticmethod(lambda: gpu_bytes is not None))
    monkeypatch.setattr(CudaDevice, "total_bytes", staticmethod(lambda: gpu_bytes))
    config = parse_args(["m", *flags], {})
    options = loading.runner_config(config)
    assert (options.max_num_seqs, options.max_num_batched_tokens) == limits
    if config.task == "generate":
        scheduled = loading.scheduler_config(config, FakeRunner(options.block_size))
        assert (scheduled.max_num_seqs, scheduled.max_num_batched_tokens) == limits


class LoadedRunner(FakeRunner):
    """A runner of a model that is stored in one type and computed in another."""

    def __init__(self, stored, dtype, quantization, *, is_on_gpu=False):
        super().__init__(16)
        self.is_on_gpu = is_on_gpu
        self.model_config = SimpleNamespace(dtype=stored, max_position=8192)
        self.dtype, self.quantization = dtype, quantization


@pytest.mark.parametrize(
    ("flags", "runner", "inexact"),
    [
        ([], ("bfloat16", "bfloat16", "int8"), ("quantization",)),
        (["--quantization", "int8"], ("bfloat16", "bfloat16", "int8"), ()),
        ([], ("bfloat16", "bfloat16", "none"), ()),
        ([], ("bfloat16", "bfloat16", "compressed-tensors, int8"), ()),
        ([], ("float16", "bfloat16", "int8"), ("dtype", "quantization")),
        ([], ("float16", "float32", "none"), ()),
        (["--dtype", "bfloat16"], ("float16", "bfloat16", "none"), ()),
    ],
)
def test_a_default_that_rounds_what_the_files_hold_is_named_and_a_choice_is_not(flags, runner, inexact):
    config = parse_args(["m", *flags], {})
    assert loading.effective(config, LoadedRunner(*runner)).inexact_defaults == inexact


def test_the_kernels_that_run_are_named_on_a_cpu_and_not_on_a_gpu(monkeypatch):
    monkeypatch.setattr(loading, "native_kernels", lambda: "avx2")
    named = [
        loading.effective(
            parse_args(["m"], {}), LoadedRunner("float32", "float32", "none", is_on_gpu=is_on_gpu)
        ).native_kernels
        for is_on_gpu in (False, True)
    ]
    assert named == ["avx2", ""]


def test_the_wanted_context_is_the_one_asked_for_or_the_models_own():
    runner = LoadedRunner("float32", "float32", "none")
    wanted = [
        loading.effective(parse_args(["m", *flags], {}), runner).wanted_model_len
        for flags in ([], ["--max-model-len", "64"])
    ]
    assert wanted == [8192, 64]
