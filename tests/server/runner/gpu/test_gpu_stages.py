"""Stages on GPUs give the answers of the whole model on a GPU, by graphs of each stage's layers, with steps
of other requests in flight. On fake devices, by torch operations; with kernels:
tests/kernels/gpu/test_ranks_triton.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_server.core.config import SpeculationConfig, SpeculativeMethod
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.step import NOT_FINITE, OUT_OF_MEMORY
from quire_server.models.decoder import Decoder
from quire_server.runner import batch_builder
from quire_server.runner.gpu.executor import GpuExecutor
from quire_server.runner.model_runner import ModelRunner
from tests.server.models import families
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.gpu.gpu_ranks import GpuRanks
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.pipelined import PipelinedEngine

PROMPTS = [[(7 * i + 3 * j) % 90 + 5 for j in range(9 + 7 * i)] for i in range(5)]
SAMPLING = [
    greedy(12),
    SamplingParams(12, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(12, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, seed=6, ignore_eos=True),
    greedy(12, repetition_penalty=1.3, presence_penalty=0.5),
    greedy(12, logprobs=2, prompt_logprobs=1),
]
#: The last block is for what graphs write of their padding: torch's operations have no slot that is none.
LIMITS = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "num_blocks": 29}
PADDING_SLOT = 30 * 16 - 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    families.build(path, "Llama", {"num_hidden_layers": 5})
    return path


@pytest.fixture(scope="module")
def whole(directory: Path) -> ModelRunner:
    return load(directory, device="cpu")


@pytest.fixture(params=[(1, 2), (1, 3), (2, 2)], ids=["2 stages", "3 stages", "2 ranks in 2 stages"])
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(autouse=True)
def padding(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = batch_builder.decodes

    def padded(ids: torch.Tensor, at: torch.Tensor, slots: torch.Tensor, *rest: Any, **more: Any) -> object:
        return decodes(ids, at, slots.masked_fill(slots < 0, PADDING_SLOT), *rest, **more)

    monkeypatch.setattr(batch_builder, "decodes", padded)


@pytest.fixture
def started(directory: Path) -> Iterator[Callable[..., GpuRanks]]:
    made = list[GpuRanks]()

    def start(tensor: int, pipeline: int, **options: Any) -> GpuRanks:
        devices = [FakeDevice() for _ in range(tensor * pipeline)]
        settings = {"max_num_batched_tokens": 24, "max_model_len": 96, **options}
        made.append(GpuRanks(directory, devices, pipeline=pipeline, **settings))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def alone(whole: ModelRunner) -> list[list[int]]:
    """The answer to each prompt by itself."""
    return [
        InProcessEngine(whole).generate([prompt], sampling)[0]
        for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
    ]


def executors(ranks: GpuRanks) -> list[GpuExecutor]:
    """Of all ranks."""
    return [ranks.runner._device, *(each._executor for each in ranks.followers)]  # type: ignore[list-item]  # those of GPUs here


def count(ranks: GpuRanks, what: str) -> list[int]:
    """How often each rank's device did it."""
    return [device.log.count(what) for device in ranks.devices]  # type: ignore[attr-defined]  # fake devices


def test_steps_of_other_requests_are_in_flight_and_change_no_answer(
    alone: list[list[int]], started: Callable[..., GpuRanks], sizes: tuple[int, int]
) -> None:
    ranks = started(*sizes)
    engine = PipelinedEngine(ranks.runner, sizes[1], **LIMITS)
    with ranks.leading():
        assert engine.generate(PROMPTS, SAMPLING) == alone
        assert engine.generate(PROMPTS, SAMPLING) == alone, "with prefix hits"
    assert engine.most_in_flight == ranks.runner.max_steps_in_flight == sizes[1]
    shapes = [list(each._graphs._graphs) for each in executors(ranks)]
    assert shapes == [[(5, 1), (4, 1), (2, 1), (1, 1)]] * len(shapes)
    replays = count(ranks, "replay")
    assert replays == [replays[0]] * len(replays) and replays[0] > 10


def test_equal_batches_have_the_bits_of_the_whole_model_on_a_gpu(
    directory: Path, started: Callable[..., GpuRanks]
) -> None:
    """With log-probabilities, one step at a time."""
    single = GpuRanks(directory, [FakeDevice()], max_num_batched_tokens=24, max_model_len=96)
    sampling = [greedy(12, logprobs=2, prompt_logprobs=1), *SAMPLING[1:]]
    reference = InProcessEngine(single.runner, **LIMITS)
    expected = reference.generate(PROMPTS, sampling)
    ranks = started(1, 3)
    with ranks.leading():
        engine = InProcessEngine(ranks.runner, **LIMITS)
        assert engine.generate(PROMPTS, sampling) == expected
    assert engine.logprobs == reference.logprobs
    assert engine.prompt_logprobs == reference.prompt_logprobs


def test_only_the_largest_logits_of_greedy_rows_come_back_to_rank_0(started: Callable[..., GpuRanks]) -> None:
    ranks = started(2, 2)
    engine = PipelinedEngine(ranks.runner, 2, **LIMITS)
    came, take = list[torch.Size](), ranks.exchange.take

    def noted(sender: int, receiver: int) -> torch.Tensor:
        tensor = take(sender, receiver)
        if receiver == 0:
            came.append(tensor.shape)
        return tensor

    ranks.exchange.take = noted  # type: ignore[method-assign]  # the probe
    with ranks.leading():
        engine.generate(PROMPTS, greedy(6))
    assert len(came) > 10 and {shape[1] for shape in came} == {2}


@pytest.mark.parametrize("method", [SpeculativeMethod.NGRAM, SpeculativeMethod.DRAFT_MODEL])
def test_stages_verify_drafts(
    alone: list[list[int]], directory: Path, started: Callable[..., GpuRanks], method: SpeculativeMethod
) -> None:
    drafts = {"speculative_model": directory} if method is SpeculativeMethod.DRAFT_MODEL else {}
    ranks = started(1, 2, num_speculative_tokens=2, **drafts)
    engine = InProcessEngine(ranks.runner, speculation=SpeculationConfig(method, 2, lookup_min=1), **LIMITS)
    with ranks.leading():
        assert engine.generate(PROMPTS, SAMPLING) == alone
    assert engine.scheduler.stats.speculation.draft_tokens > 0


def test_each_stage_streams_those_of_its_layers_that_stay_on_the_host(tmp_path: Path) -> None:
    families.build(tmp_path, "Llama", {"num_hidden_layers": 7})
    devices = FakeDevice(), FakeDevice()
    ranks = GpuRanks(tmp_path, devices, pipeline=2, cpu_offload_gb=1.0, max_model_len=96)
    expected = InProcessEngine(load(tmp_path, device="cpu")).generate(PROMPTS, greedy(12))
    with ranks.leading():
        assert PipelinedEngine(ranks.runner, 2, **LIMITS).generate(PROMPTS, greedy(12)) == expected
    ranks.close()
    assert all(model.streamed_bytes for model in ranks.models) and min(count(ranks, "arrive")) > 10


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["before a replay", "in a prompt"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_stage_without_memory_fails_one_request_and_no_other_step(
    directory: Path,
    whole: ModelRunner,
    started: Callable[..., GpuRanks],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    where: str,
) -> None:
    ranks = started(2, 2, max_num_batched_tokens=64)
    device, failed = ranks.devices[number], []
    upload = device.upload
    is_due = {
        "before a replay": lambda array: array.shape == (3, 2, 1),
        "in a prompt": lambda array: array.ndim == 1 and array.size > 40,
    }[where]

    def hungry(array: Any) -> torch.Tensor:
        if not failed and is_due(array):
            failed.append(array.shape)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return upload(array)

    prompts = [PROMPTS[0], PROMPTS[1], [9] * 40]
    expected = [InProcessEngine(whole).generate([prompt], greedy(12))[0] for prompt in prompts]
    monkeypatch.setattr(device, "upload", hungry)
    engine = PipelinedEngine(ranks.runner, 2, max_num_seqs=5, max_num_batched_tokens=64)
    with ranks.leading():
        for name, prompt in enumerate(prompts):
            engine.add(str(name), prompt, greedy(12))
        engine.drain()
    assert failed, "an upload failed for real"
    assert list(engine.errors.values()) == [OUT_OF_MEMORY]
    kept = {str(name) for name in range(3)} - set(engine.errors)
    assert len(kept) == 2 and all(engine.tokens[name] == expected[int(name)] for name in kept)


def test_no_memory_to_sample_what_the_last_stage_sent_fails_one_request(
    alone: list[list[int]], started: Callable[..., GpuRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = started(1, 2)
    sample, failed = GpuExecutor.sample, list[int]()

    def hungry(self: GpuExecutor, computed: Any, row_ids: Any, *more: Any) -> Any:
        if not failed and len(row_ids) == 2:
            failed.append(2)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(self, computed, row_ids, *more)

    monkeypatch.setattr(GpuExecutor, "sample", hungry)
    engine = PipelinedEngine(ranks.runner, 2, **LIMITS)
    with ranks.leading():
        engine.generate(PROMPTS, SAMPLING)
    assert failed and list(engine.errors.values()) == [OUT_OF_MEMORY]
    kept = set(engine.tokens) - set(engine.errors)
    assert len(kept) == 4 and all(engine.tokens[name] == alone[int(name)] for name in kept)


def test_a_row_that_is_aborted_in_flight_gives_nothing_to_the_next_request(
    alone: list[list[int]], started: Callable[..., GpuRanks]
) -> None:
    ranks = started(1, 3)
    engine = PipelinedEngine(ranks.runner, 3, **LIMITS)
    with ranks.leading():
        for number in (0, 1, 2):
            engine.add(str(number), PROMPTS[number], SAMPLING[number])
        for round_ in range(6):
            engine.step()
            engine.scheduler.abort(f"a{round_ - 1}" if round_ else "2")
            engine.add(f"a{round_}", PROMPTS[4], SAMPLING[3])
        engine.add("3", PROMPTS[3], SAMPLING[3])
        engine.drain()
    assert [engine.tokens[name] for name in ("0", "1", "3")] == [alone[0], alone[1], alone[3]]


def test_logits_of_the_last_stage_that_are_not_finite_fail_their_request_alone(
    whole: ModelRunner, started: Callable[..., GpuRanks]
) -> None:
    ranks = started(1, 2)
    last = ranks.models[-1]
    whole_logits, seen = last.whole_logits, list[int]()

    def damaged(own: torch.Tensor, *, only_largest: bool) -> torch.Tensor:
        if not seen and only_largest and len(own):
            seen.append(1)
            own[0, 3] = float("nan")
        return whole_logits(own, only_largest=only_largest)

    last.whole_logits = damaged  # type: ignore[method-assign,assignment]  # the fault
    engine = PipelinedEngine(ranks.runner, 2, **LIMITS)
    with ranks.leading():
        engine.generate(PROMPTS, greedy(12))
    assert seen and list(engine.errors.values()) == [NOT_FINITE]
    kept = set(engine.tokens) - set(engine.errors)
    for name in kept:
        assert [engine.tokens[name]] == InProcessEngine(whole).generate([PROMPTS[int(name)]], greedy(12))


def test_a_gpu_has_room_for_blocks_of_its_own_layers_and_all_have_as_many_as_the_fullest(
    directory: Path,
) -> None:
    block = 2 * 2 * 16 * 16 * 4  # keys and values of 2 heads in one layer
    taken = 81 << 20  # by others, weights and a step, as the fake device says
    room = [round((taken + blocks * layers * block) / 0.9) + 64 for blocks, layers in ((25.5, 3), (20.5, 2))]
    for totals, count in ((room, 20), ([1 << 30, 1 << 30], 30)):
        ranks = GpuRanks(
            directory,
            [FakeDevice(total) for total in totals],
            pipeline=2,
            max_model_len=96,
            enforce_eager=True,
        )
        ranks.close()
        assert [model.config.num_layers for model in ranks.models] == [3, 2]
        assert [ranks.runner.num_blocks, ranks.followers[0].limits.num_blocks] == [count, count]


def test_a_stage_measures_its_memory_without_the_other_stages(directory: Path) -> None:
    ranks = GpuRanks(directory, [FakeDevice(), FakeDevice()], pipeline=2, max_model_len=96)
    ranks.close()
    assert [place.calls for place in ranks.exchange.communicators] == [0, 0]
    assert not any(model.is_apart for model in ranks.models)


def test_where_one_stage_has_no_graphs_no_rank_replays(
    alone: list[list[int]], started: Callable[..., GpuRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Decoder, "needs_host_sync", property(lambda model: not model.config.topology.is_first_stage)
    )
    ranks = started(1, 2)
    assert [ranks.runner.can_replay, ranks.followers[0].can_replay] == [True, False]
    ranks.runner.disable_replay()  # as rank 0 does then
    with ranks.leading():
        assert PipelinedEngine(ranks.runner, 2, **LIMITS).generate(PROMPTS, SAMPLING) == alone
    assert count(ranks, "replay") == [0, 0]
