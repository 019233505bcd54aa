"""What a step launches on a GPU, exactly: one launch more fails here. So do the calls of Python of a layer,
which cost as much where a step is launched kernel by kernel.

Counted on fake tensors, so that no number depends on a machine. A budget that falls is to be lowered.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from bench.gpu import random_model
from bench.gpu.sizes import llama
from quire_server.core import warm_up_steps
from quire_server.core.cuda_graph_shapes import is_uniform
from quire_server.core.step import Step
from quire_server.layers.linear import GpuLinear
from quire_server.models import registry
from quire_server.models.decoder import Decoder
from quire_server.runner import kv_cache
from quire_server.runner.batch_builder import StepLayout
from quire_server.runner.gpu.executor import GpuExecutor
from quire_server.runner.input_batch import InputBatch
from tests.kernels.gpu.as_cuda import as_cuda
from tests.kernels.gpu.host_syncs import CUDA, FakeCudaDevice, fill_fake, host_syncs
from tests.kernels.gpu.launches import calls, launches
from tests.kernels.test_compile_keys import AWQ, FP8, MIXTRAL, W8A8

ROWS, TOKENS, LONGEST, BLOCK = 6, 40, 256, 16
KINDS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "experts": MIXTRAL,
    "AWQ": {"quantization_config": AWQ},
    "FP8": {"quantization_config": FP8},
    "W8A8": {"quantization_config": W8A8},
}
QUANTISED = ("AWQ", "FP8", "W8A8")


class Budget(NamedTuple):
    """Of a step: its launches without those of layers, with what is sampled; those of a layer; calls of a
    layer.
    """

    step: int
    layer: int
    calls: int


DECODE = {
    "dense": Budget(44, 10, 116),
    "experts": Budget(44, 15, 157),
    "AWQ": Budget(44, 14, 208),  # each matrix in two launches, as with the inputs divided (split-K)
    "FP8": Budget(44, 11, 143),
    "W8A8": Budget(44, 18, 168),
}
MIXED = {
    "dense": Budget(45, 11, 141),
    "experts": Budget(45, 16, 182),
    "AWQ": Budget(45, 15, 233),
    "FP8": Budget(45, 12, 168),
    "W8A8": Budget(45, 19, 193),
}


def empty(kind: str, layers: int, device: torch.device) -> Decoder:
    config = registry.parse({**llama(64, 128, layers, (4, 2, 16), 320), **KINDS[kind]}, ())
    return registry.build(config, max_len=LONGEST, dtype=torch.bfloat16, device=device, linear=GpuLinear)


def executor(device: FakeCudaDevice, kind: str, layers: int) -> tuple[GpuExecutor, InputBatch]:
    model = empty(kind, layers, CUDA)
    fill_fake(model)
    caches = kv_cache.allocate(model.config, 8, BLOCK, dtype=torch.bfloat16, device=CUDA)
    batch = InputBatch(ROWS, LONGEST, BLOCK)
    return GpuExecutor(model, caches, batch, device), batch  # type: ignore[arg-type]  # a part of it


@torch.no_grad()  # under which torch's operations arrive in their parts
def counted(device: FakeCudaDevice, kind: str, layers: int, step: Step) -> tuple[Counter[str], int]:
    """(launches by name, calls) of one step, which needs nothing that a first one would."""
    steps, batch = executor(device, kind, layers)
    batch.apply(step)
    steps.apply(step)
    layout = StepLayout.of(step)

    def computed() -> None:
        output = steps.launch(step, layout, None)()
        if output.tokens is None:
            steps.sample(output, layout.sampled_rows, layout.sampled_lengths)

    computed()
    with launches() as found:
        computed()
    return found, calls(computed)


def budget(kind: str, step: Step) -> tuple[Budget, Counter[str]]:
    """With a layer's launches by name, to see which one is new."""
    with as_cuda(), host_syncs() as (device, _):
        (one, calls_of_one), (three, calls_of_three) = (counted(device, kind, n, step) for n in (1, 3))
    of_layers = three - one
    layer, rest = divmod(of_layers.total(), 2)
    assert not rest
    return Budget(one.total() - layer, layer, (calls_of_three - calls_of_one) // 2), of_layers


def steps() -> tuple[Step, Step]:
    """(two decodes, three decodes and a part of a prompt)."""
    made = warm_up_steps.steps(ROWS, TOKENS, LONGEST, BLOCK, 0, has_graphs=False)
    decodes = next(step for step in made if is_uniform(step) and len(step.rows) == 2)
    mixed = next(step for step in made if not is_uniform(step) and len(step.rows) == 4)
    return decodes, mixed


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_and_a_mixed_step_launch_and_call_no_more_than_their_budgets(kind: str) -> None:
    (decode, by_decode), (mixed, by_mixed) = (budget(kind, step) for step in steps())
    assert (decode, mixed) == (DECODE[kind], MIXED[kind]), f"two layers: {by_decode}; {by_mixed}"


@pytest.mark.parametrize("kind", QUANTISED)
def test_weights_without_data_are_converted_to_what_weights_with_data_are(kind: str) -> None:
    def tensors(model: Decoder) -> list[tuple[torch.Size, torch.dtype, tuple[int, ...]]]:
        found = (each for layer in model.layers for linear in layer.linears for each in linear.weights())
        return [(each.shape, each.dtype, each.stride()) for each in found]

    real = empty(kind, 1, torch.device("cpu"))
    random_model.fill(real, torch.device("cpu"))
    with as_cuda(), host_syncs():
        fake = empty(kind, 1, CUDA)
        fill_fake(fake)
        assert all(linear.weights()[0].dtype.itemsize == 1 for linear in fake.layers[0].linears)
        assert tensors(fake) == tensors(real)


def test_an_operation_that_writes_is_a_launch_and_a_view_is_none() -> None:
    with as_cuda(), host_syncs(), torch.no_grad():
        x = torch.zeros(4, 4, device=CUDA)
        with launches() as found:
            x.t()[1:].unsqueeze(0).expand(2, -1, -1).unbind(0)
            torch.empty_like(x).view(-1)
            assert not found
            torch.nn.functional.linear(x, x)
            x.add_(1)
    assert found == {"mm": 1, "add_": 1}


def test_calls_are_counted_in_our_packages_alone() -> None:
    assert calls(lambda: sorted([3, 1, 2])) == 0
    assert calls(lambda: warm_up_steps.sizes(1)) > 3
