"""Nothing in a step on a GPU waits for it until the sampled tokens are asked for."""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch

from bench.gpu.sizes import llama
from quire_server.core import warm_up_steps
from quire_server.core.step import Step
from quire_server.layers.linear import GpuLinear
from quire_server.layers.ops import apply_token_bitmask
from quire_server.models import registry
from quire_server.runner import kv_cache
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.gpu.executor import GpuExecutor
from quire_server.runner.input_batch import InputBatch
from tests.kernels.gpu.as_cuda import as_cuda
from tests.kernels.gpu.host_syncs import CUDA, FakeCudaDevice, HostSyncs, fill_fake, host_syncs
from tests.kernels.test_compile_keys import AWQ, FP8, W8A8

ROWS, LONGEST, BLOCK, VOCAB = 6, 256, 16, 320
EXPERTS = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def fake() -> Iterator[tuple[FakeCudaDevice, HostSyncs]]:
    with as_cuda(), host_syncs() as both:
        yield both


def executor(device: FakeCudaDevice, more: dict[str, object]) -> tuple[GpuExecutor, InputBatch]:
    config = registry.parse({**llama(64, 128, 2, (4, 2, 16), VOCAB), **more}, ())
    model = registry.build(config, max_len=LONGEST, dtype=torch.bfloat16, device=CUDA, linear=GpuLinear)
    fill_fake(model)
    caches = kv_cache.allocate(config, 8, BLOCK, dtype=torch.bfloat16, device=CUDA)
    input_batch = InputBatch(ROWS, LONGEST, BLOCK)
    return GpuExecutor(model, caches, input_batch, device), input_batch  # type: ignore[arg-type]  # a part of it


@torch.inference_mode()
def computed(steps: GpuExecutor, input_batch: InputBatch, step: Step) -> None:
    input_batch.apply(step)
    steps.apply(step)
    layout = StepLayout.of(step)
    output = steps.launch(step, layout, steps.graph_for(step, layout))()

    def masked(logits: torch.Tensor) -> None:
        masks = np.full((1, -(-logits.shape[1] // 32)), -1, np.int32)
        apply_token_bitmask(logits, steps.upload(masks), steps.upload(np.zeros(1, np.int64)), out=logits)

    steps.sample(output, layout.sampled_rows, layout.sampled_lengths, masked)


KINDS: dict[str, dict[str, object]] = {
    "dense": {},
    "experts": EXPERTS,
    "AWQ": {"quantization_config": AWQ},
    "FP8": {"quantization_config": FP8},
    "W8A8": {"quantization_config": W8A8},
}


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_no_step_waits_for_the_gpu(fake: tuple[FakeCudaDevice, HostSyncs], more: dict[str, object]) -> None:
    device, syncs = fake
    steps, input_batch = executor(device, more)
    chosen = warm_up_steps.steps(ROWS, 40, LONGEST, BLOCK, 0, has_graphs=False)
    syncs.found.clear()
    for is_replay in (False, True):
        for step in chosen:
            computed(steps, input_batch, step)
        assert syncs.found == []
        if not is_replay:
            steps.capture(lambda done, wanted: None)
    assert device.downloads == 2 * len(chosen), "which the host waits for later"


def test_waits_are_found(fake: tuple[FakeCudaDevice, HostSyncs]) -> None:
    device, syncs = fake
    x, places = torch.zeros(4, 5, device=CUDA), device.upload(np.arange(3))
    assert x[places].shape == (3, 5) and (x @ x.T).is_cuda
    assert syncs.found == []
    for wait in (
        lambda: x.sum().item(),
        lambda: x[x[:, 0] > 0],
        lambda: x.cpu(),
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: x[torch.arange(2)],
    ):
        before = len(syncs.found)
        with suppress(RuntimeError):  # there is no data that the result could be of
            wait()
        assert len(syncs.found) == before + 1, syncs.found
