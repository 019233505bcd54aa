"""Copies of KV blocks run beside the steps: nothing reads, and nothing overwrites, a block or a buffer before
its copy. On a fake device, which copies as late as it may.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire_server.core.config import PreemptionMode
from quire_server.core.step import Copies, Step
from quire_server.runner.gpu import block_copies
from quire_server.runner.gpu.block_copies import BlockCopies
from quire_server.runner.kv_offload import OffloadWorker
from quire_server.runner.model_runner import ModelRunner, RunnerConfig
from tests.server.runner.gpu.fake_device import FakeDevice
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.test_kv_offload import PROMPTS, SIZE, SMALL

LAYERS, BLOCKS, SLOTS = 3, 12, 9
PAIRS = [(block, (5 * block + 2) % SLOTS) for block in range(8)]


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def caches() -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    return [torch.randn(2, BLOCKS, 2, 4, 8, generator=made) for _ in range(LAYERS)]


def contents(caches: list[Tensor], block: int) -> Tensor:
    return torch.stack([cache[:, block] for cache in caches])


def worker(caches: list[Tensor], device: FakeDevice) -> tuple[OffloadWorker, Tensor]:
    pool = torch.zeros(SLOTS, LAYERS, 2, 2, 4, 8)
    return OffloadWorker(caches, SLOTS, None, pool.view(torch.uint8).view(-1), device=device), pool


def step(*, saves: list[tuple[int, int]] | None = None, loads: list[tuple[int, int]] | None = None) -> Step:
    copies = Copies((), tuple(saves or ()), tuple(loads or ()), ())
    return Step(0, (), (), (0,), (0,), (1,), (1,), copies=copies)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_blocks_are_copied_whatever_number_of_them_a_buffer_holds(
    caches: list[Tensor], device: FakeDevice, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    pool = torch.zeros(SLOTS, LAYERS, 2, 2, 4, 8)
    monkeypatch.setattr(block_copies, "_BUFFER_BYTES", slots * pool[0].nbytes)
    assert block_copies.device_bytes(pool[0].nbytes) == 2 * slots * pool[0].nbytes
    before = [cache.clone() for cache in caches]
    copies = BlockCopies(caches, pool, device)
    saving = copies.save(PAIRS)
    for cache in caches:
        cache.fill_(float("nan"))  # the step that saves blocks overwrites them
    for each in saving:
        each.wait()
    for block, slot in PAIRS:
        assert torch.equal(pool[slot], contents(before, block))
    copies.load([(slot, block + 4) for block, slot in PAIRS])
    for block, _ in PAIRS:
        assert torch.equal(contents(caches, block + 4), contents(before, block)), "without a wait of the host"


def test_a_save_is_awaited_with_the_result_and_a_load_by_the_device_alone(
    caches: list[Tensor], device: FakeDevice
) -> None:
    tiers, pool = worker(caches, device)
    saved = contents(caches, 1)
    copied = tiers.copy(step(saves=[(1, 4)]))
    assert device.log == ["copy"] and pool[4].isnan().all()
    copied.finish()
    assert device.log == ["copy", "landed"] and torch.equal(pool[4], saved)
    device.log.clear()
    loaded = tiers.copy(step(saves=[(2, 3)], loads=[(4, 7)]))
    assert device.log == ["copy", "arrive", "copy", "arrive"], "the first: of its buffer before"
    assert torch.equal(contents(caches, 7), saved)
    loaded.finish()
    assert device.log[4:] == ["landed", "landed"] and loaded.outcome is None


def test_what_a_step_saves_it_may_load_and_a_damaged_slot_it_does_not(
    caches: list[Tensor], device: FakeDevice
) -> None:
    tiers, pool = worker(caches, device)
    saved = contents(caches, 1)
    copied = tiers.copy(step(saves=[(1, 4)], loads=[(4, 7)]))
    copied.finish()
    assert copied.outcome is None and torch.equal(contents(caches, 7), saved)
    pool[4, 1, 0, 1, 2, 3] += 1
    damaged = tiers.copy(step(loads=[(4, 8)]))
    assert damaged.outcome is not None and damaged.outcome.failed == (8,)


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[list[int]]:
    runner = load(directory)
    return [InProcessEngine(runner).generate([prompt], greedy(12))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_no_answer_depends_on_the_host_tier_of_a_gpu(
    directory: Path, alone: list[list[int]], mode: PreemptionMode
) -> None:
    device = FakeDevice()
    settings = {"dtype": "float32", "max_num_seqs": 16, "num_blocks_override": 40, "enforce_eager": True}
    chosen = RunnerConfig(kv_offload_host_bytes=SIZE, **settings)  # type: ignore[arg-type]  # mixed values
    runner = ModelRunner.load(directory, chosen, lambda *_: None, device=device)
    runner.capture(lambda *_: None)
    engine = InProcessEngine(
        runner, **SMALL | {"num_host_slots": 20, "num_disk_slots": 0}, preemption_mode=mode
    )
    for _ in range(2):
        assert engine.generate(PROMPTS, greedy(12)) == alone
    stats = engine.scheduler.kv.stats()
    assert stats.host_loaded > 0 and stats.corrupt == 0
    log = device.log
    assert any(log[at : at + 2] == ["copy", "download"] for at in range(len(log))), "no forward pass waits"
