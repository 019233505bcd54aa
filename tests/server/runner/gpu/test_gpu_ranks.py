"""Ranks on GPUs give the answers of the whole model on a CPU, and end a pass for which one of them has no
memory together. On fake devices, each rank's part by torch operations; with kernels and graphs:
tests/kernels/gpu/test_ranks_triton.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.rank_step import EchoStatus, RankStep
from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOT_FINITE, OUT_OF_MEMORY, CopyOutcome, StartedRow, Step
from quire_server.core.topology import Topology
from quire_server.errors import ConfigError, DeviceError, RankLostError
from quire_server.layers.parallel import STAGE_DEADLINE
from quire_server.runner.gpu.cuda_device import CudaDevice
from quire_server.runner.gpu.device import Memory
from quire_server.runner.model_runner import ModelRunner, RunnerConfig, device_of
from tests.server.models import families
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.gpu.gpu_ranks import GpuRanks
from tests.server.runner.in_process import InProcessEngine, greedy, load

PROMPTS = [[(7 * i + 3 * j) % 90 + 5 for j in range(9 + 7 * i)] for i in range(5)]
SAMPLING = [
    greedy(12),
    SamplingParams(12, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(12, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, seed=6, ignore_eos=True),
    greedy(12, repetition_penalty=1.3, presence_penalty=0.5),
    greedy(12, logprobs=2, prompt_logprobs=1),
]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
TIGHT = {"max_num_seqs": 5, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module", params=list(FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    prefix, settings = FAMILIES[request.param]
    families.build(path, prefix, {"num_hidden_layers": 2, **settings})
    return path


@pytest.fixture(scope="module")
def whole(directory: Path) -> ModelRunner:
    return load(directory, device="cpu")


@pytest.fixture
def started(directory: Path) -> Iterator[Callable[..., GpuRanks]]:
    made = list[GpuRanks]()

    def start(*devices: FakeDevice, **options: Any) -> GpuRanks:
        chosen = devices or (FakeDevice(), FakeDevice())
        settings = {"max_num_batched_tokens": 24, "max_model_len": 96, "enforce_eager": True}
        made.append(GpuRanks(directory, chosen, **(settings | options)))
        return made[-1]

    yield start
    for each in made:
        each.close()


def answers(runner: ModelRunner, **limits: object) -> list[list[int]]:
    engine = InProcessEngine(runner, **(TIGHT | limits))
    return engine.generate(PROMPTS, SAMPLING)


def test_ranks_on_gpus_give_the_answers_of_the_whole_model(
    whole: ModelRunner, started: Callable[..., GpuRanks]
) -> None:
    ranks = started()
    with ranks.leading():
        assert answers(ranks.runner) == answers(whole)


def test_a_greedy_step_gathers_8_bytes_of_each_row_and_another_one_all_logits(
    whole: ModelRunner, started: Callable[..., GpuRanks]
) -> None:
    ranks = started()
    part = 4 * ranks.models[0].config.vocab_rows
    for sampling, each in ((greedy(6), 8), (SAMPLING[1], part), (SAMPLING[3], part), (SAMPLING[4], part)):
        ranks.exchange.calls.clear()
        with ranks.leading():
            tokens = InProcessEngine(ranks.runner).generate(PROMPTS[:3], sampling)
        assert tokens == InProcessEngine(whole).generate(PROMPTS[:3], sampling)
        gathers = [size for kind, size in ranks.exchange.calls if kind == "gather"]
        assert gathers[-1] == 3 * each


@pytest.mark.parametrize("number", [0, 1])
def test_a_request_whose_logits_are_not_finite_on_any_rank_fails_alone(
    whole: ModelRunner, started: Callable[..., GpuRanks], number: int
) -> None:
    ranks = started()
    own_logits, seen = ranks.models[number].own_logits, list[int]()

    def damaged(*arguments: Any) -> torch.Tensor:
        logits = own_logits(*arguments)
        if len(logits) == 2:
            logits[0, 3] = float("nan")
            seen.append(1)
        return logits

    ranks.models[number].own_logits = damaged  # type: ignore[method-assign]  # the fault
    engine = InProcessEngine(ranks.runner)
    errors, tokens = dict[str, str | None](), list[int]()
    for name, prompt in enumerate(PROMPTS[:2]):
        engine.scheduler.add(Request(str(name), tuple(prompt), greedy(6), 0.0))
    with ranks.leading():
        while (step := engine.scheduler.schedule()) is not None:
            for event in engine.scheduler.commit(step, ranks.runner.run(step)):
                tokens += event.token_ids if event.request_id == "1" else ()
                if event.error is not None:
                    errors[event.request_id] = event.error
    assert seen and errors == {"0": NOT_FINITE}
    assert [tokens] == InProcessEngine(whole).generate(PROMPTS[1:2], greedy(6))


def test_drafts_are_verified_by_all_ranks(whole: ModelRunner, started: Callable[..., GpuRanks]) -> None:
    limits = {"speculation": SpeculationConfig(SpeculativeMethod.NGRAM, 2, lookup_min=1)}
    ranks = started(num_speculative_tokens=2)
    with ranks.leading():
        assert answers(ranks.runner, **limits) == answers(whole, **limits)


def test_rank_0_drafts_with_a_model_on_its_gpu(
    directory: Path, whole: ModelRunner, started: Callable[..., GpuRanks]
) -> None:
    limits = {"speculation": SpeculationConfig(SpeculativeMethod.DRAFT_MODEL, 2)}
    ranks = started(speculative_model=directory, num_speculative_tokens=2)
    with ranks.leading():
        engine = InProcessEngine(ranks.runner, **TIGHT, **limits)
        assert engine.generate(PROMPTS, SAMPLING) == answers(whole)
    assert engine.scheduler.stats.speculation.accepted_tokens > 10


def test_each_rank_streams_its_part_of_the_layers_that_stay_on_the_host(tmp_path: Path) -> None:
    families.build(tmp_path, "Llama", {"num_hidden_layers": 3})
    devices = FakeDevice(), FakeDevice()
    limits = {"max_num_batched_tokens": 24, "max_model_len": 96}
    ranks = GpuRanks(tmp_path, devices, cpu_offload_gb=1.0, **limits)
    whole = load(tmp_path, device="cpu")
    with ranks.leading():
        assert answers(ranks.runner) == answers(whole)
    ranks.close()
    streamed = [model.streamed_bytes for model in ranks.models]
    matrices = sum(w.nbytes for one in whole._model.layers for part in one.linears for w in part.weights())
    assert streamed[0] == streamed[1] and matrices / 2 <= streamed[0] < 0.75 * matrices
    arrived = [device.log.count("arrive") for device in devices]
    assert arrived[0] == arrived[1] > 10


def test_a_step_is_not_scheduled_ahead_of_tokens_that_the_other_ranks_need(
    started: Callable[..., GpuRanks],
) -> None:
    assert started().runner.max_steps_in_flight == 1


def test_all_ranks_have_the_fewest_blocks_that_one_has_room_for(started: Callable[..., GpuRanks]) -> None:
    with_room = started().runner
    taken = 81 << 20  # by others, weights and a step, as the fake device says
    small = round((taken + 20.5 * with_room.kv_cache_bytes / with_room.num_blocks) / 0.9)
    assert with_room.num_blocks > 20
    for devices in ((FakeDevice(), FakeDevice(small)), (FakeDevice(small), FakeDevice())):
        ranks = started(*devices)
        assert [ranks.runner.num_blocks, ranks.followers[0].limits.num_blocks] == [20, 20]


def test_what_ranks_take_while_they_compute_is_not_given_to_the_kv_cache(
    started: Callable[..., GpuRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room, memory = started().runner, FakeDevice.memory
    each = with_room.kv_cache_bytes / with_room.num_blocks
    total = round(((81 << 20) + 25.5 * each) / 0.9)  # with what the fake device says, room for 25 blocks

    def with_buffers(device: FakeDevice) -> Memory:
        found = memory(device)
        return found._replace(free=found.free - round(5 * each) * ("peak" in device.log))

    def peak_bytes(device: FakeDevice, compute: Callable[[], object]) -> int:
        device.log.append("peak")
        compute()
        return 1 << 20

    monkeypatch.setattr(FakeDevice, "memory", with_buffers)
    monkeypatch.setattr(FakeDevice, "peak_bytes", peak_bytes)
    assert started(FakeDevice(total), FakeDevice(total)).runner.num_blocks == 20


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [0, 1])
def test_when_one_gpu_has_no_memory_all_ranks_drop_the_same_request(
    whole: ModelRunner,
    started: Callable[..., GpuRanks],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    ranks = started()
    device, failed = ranks.devices[number], []
    upload = device.upload

    def hungry(array: Any) -> torch.Tensor:
        if not failed and array.ndim == 1 and array.size == 24:
            failed.append(array.shape)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return upload(array)

    prompts = [[9] * 40, *PROMPTS[:2]]
    expected = [InProcessEngine(whole).generate([prompt], greedy(12))[0] for prompt in prompts]
    monkeypatch.setattr(device, "upload", hungry)
    engine = InProcessEngine(ranks.runner, **TIGHT)
    for name, prompt in enumerate(prompts):
        engine.scheduler.add(Request(str(name), tuple(prompt), greedy(12), 0.0))
    tokens: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    with ranks.leading():
        while (step := engine.scheduler.schedule()) is not None:
            for event in engine.scheduler.commit(step, ranks.runner.run(step)):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.error is not None:
                    errors[event.request_id] = event.error
    assert failed, "an upload failed for real"
    assert errors == {"0": OUT_OF_MEMORY}
    assert [tokens["1"], tokens["2"]] == expected[1:]


def test_a_rank_whose_gpu_does_not_end_a_pass_reports_a_lost_peer(
    started: Callable[..., GpuRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = started()
    echoed, asked = list[EchoStatus](), list[float]()
    execute = ranks.followers[0].execute

    def noted(message: RankStep) -> tuple[EchoStatus, CopyOutcome | None]:
        echoed.append((result := execute(message))[0])
        return result

    monkeypatch.setattr(ranks.followers[0], "execute", noted)
    monkeypatch.setattr(ranks.devices[1], "finish", lambda seconds: asked.append(seconds))
    engine = InProcessEngine(ranks.runner, **TIGHT)
    engine.scheduler.add(Request("0", (5, 6, 7), greedy(1), 0.0))
    step = engine.scheduler.schedule()
    assert step is not None
    with ranks.leading(), pytest.raises(RankLostError, match="rank 1 waited in vain for another rank's part"):
        ranks.runner.run(step)
    assert echoed == [EchoStatus.LOST_PEER]
    assert asked == [STAGE_DEADLINE]


def test_a_recording_that_a_rank_lacks_is_refused(started: Callable[..., GpuRanks]) -> None:
    follower = started().followers[0]
    row = StartedRow(0, "", (5, 6), 2, (0,), greedy(1), 0)
    with pytest.raises(ValueError, match=r"the shape \(4, 1\), which this rank lacks"):
        follower.execute(RankStep(Step(1, (row,), (), (0,), (0,), (2,), (1,)), graph=(4, 1)))


class _Cuda:
    """What CudaDevice asks about the machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.chosen: list[torch.device] = []
        for name, function in {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "set_device": self.chosen.append,
            "get_device_capability": lambda place: (9, 0),
            "Stream": lambda place: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)


def test_each_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(monkeypatch, 4)
    assert [CudaDevice(Topology(4, rank)).place.index for rank in range(4)] == [0, 1, 2, 3]
    stages = [device_of(RunnerConfig(device="cuda"), Topology(2, rank, 2)) for rank in range(4)]
    assert [device.place.index for device in stages if device is not None] == [0, 1, 2, 3]
    assert [place.index for place in cuda.chosen] == [0, 1, 2, 3] * 2


def test_torchs_attention_is_not_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    _Cuda(monkeypatch, 1)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        CudaDevice()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_each_rank_of_a_group_of_nodes_has_the_gpu_of_its_number_on_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Cuda(monkeypatch, 4)  # each pod sees its own four
    for sizes in ((8, 1), (2, 4), (4, 2)):
        places = [CudaDevice(Topology(sizes[0], rank, sizes[1], 2)).place for rank in range(8)]
        assert [place.index for place in places] == [0, 1, 2, 3] * 2
    assert [CudaDevice(Topology(2, rank, nodes=2)).place.index for rank in range(2)] == [0, 0]


def test_gpus_of_different_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _Cuda(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8 + int(place), 0))
    with pytest.raises(
        ConfigError, match=r"compute capabilities 8\.0 and 9\.0, and ranks must compute alike"
    ):
        CudaDevice(Topology(2, 0))


def test_too_few_gpus_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    _Cuda(monkeypatch, 1)
    with pytest.raises(
        ConfigError, match="size 2 needs 2 GPUs, one for each rank of a node, and there are 1: give the"
    ):
        CudaDevice(Topology(2, 0))
    with pytest.raises(ConfigError, match="size 2 times --pipeline-parallel-size 3 needs 6 GPUs, one for"):
        CudaDevice(Topology(2, 0, 3))
    with pytest.raises(ConfigError, match="size 6 on --nodes 3 needs 2 GPUs, one for each rank of a node, "):
        CudaDevice(Topology(6, 4, nodes=3))


def test_an_error_of_the_device_on_another_rank_names_the_device(
    started: Callable[..., GpuRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = started()
    follower = ranks.followers[0]

    def fail(step: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(follower._executor, "apply", fail)
    with pytest.raises(DeviceError, match="illegal memory access"):
        follower.execute(RankStep(Step(1, (), (), (), (), (), ())))
