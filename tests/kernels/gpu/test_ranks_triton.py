"""The shards of a model by the Triton kernels, one after the other and with captured graphs, give the answers
of the whole model by torch.

On a GPU both shards are on the same one, without graphs: their exchange is the test's, which no graph has.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_server.core.request import Request
from quire_server.core.step import OUT_OF_MEMORY
from quire_server.runner.gpu.cuda_device import CudaDevice
from quire_server.runner.gpu.device import Device
from tests.kernels.gpu.as_cuda import as_cuda, as_cuda_in_thread
from tests.server.models import families
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.gpu.gpu_ranks import GpuRanks
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.pipelined import PipelinedEngine

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"num_hidden_layers": 1, "head_dim": 16}),
    "Mixtral": ("Mixtral", {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [30, 31], [40] * 4]
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 12}
HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    families.build(path, *MODELS[request.param])
    return path


@pytest.fixture
def started(directory: Path) -> Iterator[Callable[..., GpuRanks]]:
    made = list[GpuRanks]()

    def start(**options: Any) -> GpuRanks:
        devices: list[Device] = [CudaDevice() if HAS_GPU else FakeDevice() for _ in range(2)]
        settings = {"max_model_len": 32, "enforce_eager": HAS_GPU, **LIMITS}
        made.append(GpuRanks(directory, devices, as_cuda_in_thread, **(settings | options)))
        return made[-1]

    yield start
    for each in made:
        each.close()


def answers(ranks: GpuRanks, count: int) -> list[list[int]]:
    with ranks.leading():
        return InProcessEngine(ranks.runner, **LIMITS).generate(PROMPTS, greedy(count))


@pytest.mark.kernels
def test_shards_give_the_answers_of_the_whole_model_by_replays_of_the_same_graphs(
    directory: Path, started: Callable[..., GpuRanks]
) -> None:
    whole = load(directory, device="cpu")
    expected = [InProcessEngine(whole).generate([prompt], greedy(5))[0] for prompt in PROMPTS]
    with as_cuda() as called:
        ranks = started()
        called.clear()
        for device in ranks.devices:
            getattr(device, "log", []).clear()
        ranks.exchange.calls.clear()
        given = answers(ranks, 5)
    assert given == expected
    assert {"rope_kv_write_triton", "paged_decode_attention_triton", "add_rmsnorm_triton"} <= set(called)
    assert (whole.model_config.experts is not None) is ("moe_triton" in called)
    executors = [ranks.runner._device, *(each._executor for each in ranks.followers)]
    shapes = [list(each._graphs._graphs) for each in executors]  # type: ignore[union-attr]
    assert shapes[0] == shapes[1] == ([] if HAS_GPU else [(4, 1), (2, 1), (1, 1)])
    replays = [getattr(device, "log", []).count("replay") for device in ranks.devices]
    assert replays[0] == replays[1] and (replays[0] > 0) is not HAS_GPU
    gathers = {size for kind, size in ranks.exchange.calls if kind == "gather"}
    assert gathers <= {0, 8, 16, 24}, "of each row the largest logit and its token, not of padding"


@pytest.mark.kernels
def test_stages_give_the_answers_of_the_whole_model_each_by_graphs_of_its_layers(tmp_path: Path) -> None:
    families.build(tmp_path, "Llama", {"num_hidden_layers": 2, "head_dim": 16})
    whole = load(tmp_path, device="cpu")
    expected = [InProcessEngine(whole).generate([prompt], greedy(5))[0] for prompt in PROMPTS]
    devices: list[Device] = [CudaDevice() if HAS_GPU else FakeDevice() for _ in range(2)]
    with as_cuda() as called:
        ranks = GpuRanks(
            tmp_path,
            devices,
            as_cuda_in_thread,
            pipeline=2,
            max_model_len=32,
            enforce_eager=HAS_GPU,
            **LIMITS,
        )
        called.clear()
        with ranks.leading():
            engine = PipelinedEngine(ranks.runner, 2, **LIMITS)
            given = engine.generate(PROMPTS, greedy(5))
        ranks.close()
    assert given == expected and engine.most_in_flight == 2
    assert {"rope_kv_write_triton", "paged_decode_attention_triton", "add_rmsnorm_triton"} <= set(called)
    replays = [getattr(device, "log", []).count("replay") for device in devices]
    assert replays[0] == replays[1] and (replays[0] > 0) is not HAS_GPU


@pytest.mark.kernels
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_without_memory_before_a_replay_takes_part_in_it_with_padding(
    directory: Path, started: Callable[..., GpuRanks], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    if HAS_GPU:
        return  # nothing is captured
    whole = load(directory, device="cpu")
    expected = [InProcessEngine(whole).generate([prompt], greedy(5))[0] for prompt in PROMPTS]
    failed = list[tuple[int, ...]]()
    with as_cuda():
        ranks = started()
        device = ranks.devices[number]
        upload = device.upload

        def hungry(array: Any) -> torch.Tensor:
            if not failed and array.shape == (3, 4, 1):  # the entries of three rows, padded to four
                failed.append(array.shape)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return upload(array)

        monkeypatch.setattr(device, "upload", hungry)
        engine = InProcessEngine(ranks.runner, **LIMITS)
        tokens: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        with ranks.leading():
            for name, prompt in enumerate(PROMPTS):
                engine.scheduler.add(Request(str(name), tuple(prompt), greedy(5), 0.0))
            while (step := engine.scheduler.schedule()) is not None:
                for event in engine.scheduler.commit(step, ranks.runner.run(step)):
                    tokens.setdefault(event.request_id, []).extend(event.token_ids)
                    if event.error is not None:
                        errors[event.request_id] = event.error
    assert failed, "an upload failed for real"
    assert errors == {"0": OUT_OF_MEMORY}, "the longest one, on all ranks"
    assert [tokens["1"], tokens["2"]] == expected[1:]
    replays = [getattr(each, "log", []).count("replay") for each in ranks.devices]
    assert replays[0] == replays[1]
