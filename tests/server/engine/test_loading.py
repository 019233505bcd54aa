"""Options of the runner and the scheduler that loading derives from the settings."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from quire_server.config import parse_args
from quire_server.engine import loading
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.fault_injection import Faults
from quire_server.health.heartbeat import SharedState
from quire_server.runner.gpu.cuda_device import CudaDevice
from quire_server.runner.model_runner import ModelRunner


class FakeRunner:
    """The part of a runner that loading uses."""

    max_model_len, num_blocks = 64, 8
    num_host_slots = num_disk_slots = num_staging_slots = 0

    def __init__(self, block_size):
        self.block_size = block_size

    def capture(self, on_progress):
        on_progress(1, 1)


@pytest.mark.parametrize(
    ("flags", "has_gpu", "tokens"),
    [
        (["--device", "cpu"], True, 16),
        (["--device", "auto"], False, 16),
        (["--device", "auto"], True, 64),
        (["--device", "cuda"], True, 64),
        (["--device", "cuda", "--block-size", "32"], True, 32),
    ],
)
def test_the_default_block_size_of_a_gpu_is_larger_than_that_of_a_cpu(
    flags, has_gpu, tokens, monkeypatch, tmp_path
):
    monkeypatch.setattr(CudaDevice, "is_there", staticmethod(lambda: has_gpu))
    monkeypatch.setattr(
        ModelRunner, "load", staticmethod(lambda model, options, progress: FakeRunner(options.block_size))
    )
    config = parse_args([str(Path("m")), *flags], {})
    pulse = HeartbeatWriter(SharedState.create(tmp_path), 0.0)
    runner = loading.load(config, tmp_path, pulse, Faults({}, tmp_path))
    assert runner.block_size == tokens
    assert loading.scheduler_config(config, runner).block_size == tokens


class LoadedRunner(FakeRunner):
    """A runner of a model that is stored in one type and computed in another."""

    def __init__(self, stored, dtype, quantization):
        super().__init__(16)
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


def test_the_wanted_context_is_the_one_asked_for_or_the_models_own():
    runner = LoadedRunner("float32", "float32", "none")
    wanted = [
        loading.effective(parse_args(["m", *flags], {}), runner).wanted_model_len
        for flags in ([], ["--max-model-len", "64"])
    ]
    assert wanted == [8192, 64]
