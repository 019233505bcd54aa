"""KV blocks of a model on a GPU go through the host to another server's GPU, and the answers are those of one
server. On fake devices, whose memory is the CPU's: the decisions, copies and layouts are those of a GPU, and
nothing of CUDA runs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from quire_server.errors import ConfigError
from quire_server.runner import kv_cache
from quire_server.runner.gpu import memory_profile
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from tests.server.models import families
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.gpu.gpu_ranks import GpuRanks
from tests.server.runner.in_process import InProcessEngine, greedy, load

SIZE = 16
PROMPT = [(7 * at) % 90 + 5 for at in range(5 * SIZE + 3)]
PREFIX = tuple(PROMPT[: 5 * SIZE])
SHARED = {"shares_kv_cache": True, "kv_staging_bytes": 1 << 20, "max_model_len": 128, "enforce_eager": True}
SIZES = [(1, 1), (2, 1), (1, 2), (4, 1)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    families.build(path, "Llama", {"num_hidden_layers": 2})
    return path


@pytest.fixture(scope="module")
def wanted(directory: Path) -> list[int]:
    return InProcessEngine(load(directory, device="cpu")).generate([PROMPT], greedy(12))[0]


class Side:
    """A server on fake devices, with its scheduler and without a network."""

    def __init__(self, directory: Path, tensor: int, pipeline: int, **options: object) -> None:
        self._ranks: GpuRanks | None = None
        settings = {"dtype": "float32", "max_num_seqs": 4, "num_blocks_override": 24, **SHARED, **options}
        if tensor * pipeline == 1:
            config = RunnerConfig(**settings)  # type: ignore[arg-type]  # mixed values
            self.runner = ModelRunner.load(directory, config, lambda *_: None, device=FakeDevice())
        else:
            devices = [FakeDevice() for _ in range(tensor * pipeline)]
            self._ranks = GpuRanks(directory, devices, pipeline=pipeline, **settings)
            self.runner = self._ranks.runner
        limits = {"num_staging_slots": self.runner.num_staging_slots, "max_num_seqs": 4}
        self.engine = InProcessEngine(self.runner, pipeline_size=pipeline, **limits)
        self.scheduler = self.engine.scheduler

    def leading(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.leading()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        with self.leading():
            return self.engine.generate([prompt], greedy(count))[0]

    def run_until(self, num_committed: int) -> None:
        """The steps that copy, which compute nothing."""
        with self.leading():
            while self.scheduler.num_committed < num_committed:
                step = self.scheduler.schedule()
                assert step is not None and not step.rows
                self.scheduler.commit(step, self.runner.run(step))

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


def transfer(producer: Side, consumer: Side) -> None:
    """What two connectors do, without their wire."""
    producer.generate(list(PREFIX), 1)
    held = producer.scheduler.kv.hold(PREFIX, "")
    assert held is not None
    slots = producer.scheduler.kv.take_slots(len(held.block_ids))
    producer.run_until(producer.scheduler.stage_prefix(held, slots))
    producer.scheduler.release_prefix(held)

    reserved = consumer.scheduler.reserve_prefix(PREFIX, "")
    assert reserved is not None and reserved.num_cached == 0
    theirs, ours = producer.runner.kv_blocks, consumer.runner.kv_blocks
    assert theirs is not None and ours is not None
    for there, here in zip(slots, reserved.slots, strict=True):
        data = b"".join(theirs.pieces(there))
        assert any(data)
        for piece in ours.pieces(here):
            piece[:], data = data[: piece.nbytes], data[piece.nbytes :]
        assert not data
        ours.replicate(here)
    producer.scheduler.kv.free_slots(slots)
    consumer.run_until(consumer.scheduler.unstage_prefix(reserved))
    consumer.scheduler.kv.publish_reserved(reserved)
    consumer.scheduler.release_prefix(reserved)


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., Side]]:
    made = list[Side]()

    def make(tensor: int = 1, pipeline: int = 1, **options: object) -> Side:
        made.append(Side(directory, tensor, pipeline, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("prefill", SIZES, ids=str)
@pytest.mark.parametrize("decode", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_a_prefix_of_another_server_gives_the_answer_of_one_server(
    start: Callable[..., Side], wanted: list[int], prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    producer, consumer = start(*prefill), start(*decode)
    transfer(producer, consumer)
    assert consumer.generate(PROMPT, 12) == wanted
    assert consumer.engine.last["0"].num_cached_tokens == len(PREFIX)
    for side in (producer, consumer):
        side.scheduler.check()
        assert side.scheduler.kv.stats().host_used == 0
        assert not side.scheduler.has_work


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_blocks_with_scales_are_staged_byte_for_byte(start: Callable[..., Side], stored: str) -> None:
    producer, consumer = start(kv_cache_dtype=stored), start(kv_cache_dtype=stored)
    transfer(producer, consumer)
    assert consumer.generate(PROMPT, 12) == producer.generate(PROMPT, 12)
    assert consumer.engine.last["0"].num_cached_tokens == len(PREFIX)


def test_the_caches_stay_on_the_device_and_the_host_has_room_for_as_much_as_was_given(
    start: Callable[..., Side],
) -> None:
    side = start()
    blocks = side.runner.kv_blocks
    assert blocks is not None and side.runner.kv_cache_bytes == 24 * blocks.block_bytes
    assert side.runner.num_staging_slots == min(24, (1 << 20) // blocks.block_bytes)
    assert side.runner.num_host_slots == 0, "nothing that is evicted goes there"
    assert start(kv_staging_bytes=1 << 40 >> 10).runner.num_staging_slots == 24, "no more than the device has"


def test_what_is_staged_is_pinned_once(directory: Path) -> None:
    device, settings = FakeDevice(), {**SHARED, "num_blocks_override": 24, "max_num_seqs": 4}
    ModelRunner.load(directory, RunnerConfig(**settings), lambda *_: None, device=device)  # type: ignore[arg-type]  # mixed values
    assert [line.split()[-1] for line in device.log if line.startswith("pin")] == ["--kv-staging-bytes"]


@pytest.mark.parametrize(
    ("given", "why"), [(1, "kv-staging-bytes 1 holds no block"), (1 << 24, "needs?|takes .* MiB of the host")]
)
def test_a_host_without_room_for_it_is_named_at_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch, given: int, why: str
) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 4096)
    settings = {**SHARED, "kv_staging_bytes": given, "num_blocks_override": 24, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match=why):
        ModelRunner.load(directory, RunnerConfig(**settings), lambda *_: None, device=FakeDevice())  # type: ignore[arg-type]  # mixed values


def test_the_memory_profile_counts_what_copies_need_of_the_device(directory: Path) -> None:
    runner = load(directory, device="cpu")

    def workspace(**options: object) -> int:
        chosen = RunnerConfig(max_num_seqs=2, max_num_batched_tokens=8, **options)  # type: ignore[arg-type]  # mixed values
        stored = kv_cache.storage_dtype("auto", runner._kv_caches[0].dtype)
        return memory_profile.measure(runner._model, chosen, FakeDevice(), stored, 32).workspace

    plain, staged = workspace(), workspace(shares_kv_cache=True)
    assert plain == 1 << 20 and staged - plain == pytest.approx(64 << 20, rel=0.01)
    assert workspace(kv_offload_host_bytes=1 << 20) == staged, "the host tier copies alike"
