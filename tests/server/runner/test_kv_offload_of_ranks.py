"""Each rank copies its own heads of a KV block to its own tiers, and a copy that is late, damaged or failed
on one of them changes no answer.
"""

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_server.core.config import PreemptionMode
from quire_server.core.step import Step, StepResult
from quire_server.runner import kv_offload
from quire_server.runner.kv_offload import DiskRead, DiskTier
from tests.server.runner.in_process import InProcessEngine, greedy, load
from tests.server.runner.ranks_in_process import Ranks
from tests.server.runner.test_kv_offload import PROMPTS, SIZE, SMALL

ANSWER = greedy(12)


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[list[int]]:
    """Each prompt by itself, on one rank."""
    runner = load(directory, quantization="none")
    return [InProcessEngine(runner).generate([prompt], ANSWER)[0] for prompt in PROMPTS]


@pytest.fixture
def ranks(directory: Path, tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(
        directory,
        2,
        kv_offload_host_bytes=SIZE,
        kv_offload_disk_path=tmp_path,
        kv_offload_disk_bytes=SIZE,
    )
    yield found
    found.close()


def disk_of(ranks: Ranks, number: int) -> DiskTier:
    disk = ranks.tiers[number]._disk
    assert disk is not None
    return disk


@pytest.mark.parametrize("mode", PreemptionMode)
def test_ranks_keep_their_heads_in_their_tiers(
    ranks: Ranks, alone: list[list[int]], mode: PreemptionMode
) -> None:
    limits = SMALL | {"num_host_slots": 20} if mode is PreemptionMode.SWAP else SMALL
    engine = InProcessEngine(ranks.runner, **limits, preemption_mode=mode)
    for _ in range(2):
        assert engine.generate(PROMPTS, ANSWER) == alone
    kv = engine.scheduler.kv.stats()
    assert engine.scheduler.stats.preemptions > 0 and (kv.swaps > 0) == (mode is PreemptionMode.SWAP)
    assert kv.disk_loaded > 0 and kv.corrupt == 0


def test_the_tiers_of_all_ranks_together_take_the_bytes_that_were_configured(ranks: Ranks) -> None:
    taken = [(tiers.num_bytes, tiers._disk.num_slots) for tiers in ranks.tiers if tiers._disk is not None]
    (each, slots), other = taken
    assert (each, slots) == other and slots == ranks.runner.num_disk_slots
    block = 2 * each // ranks.runner.num_host_slots
    assert SIZE - block < 2 * each <= SIZE
    assert SIZE - block < slots * block <= SIZE


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_changed_on_one_ranks_host_is_computed_again(
    ranks: Ranks, alone: list[list[int]], number: int
) -> None:
    engine = InProcessEngine(ranks.runner, **SMALL | {"num_host_slots": 60, "num_disk_slots": 0})
    assert engine.generate(PROMPTS, ANSWER) == alone
    ranks.tiers[number]._bytes[:, 100] ^= 4
    assert engine.generate(PROMPTS, ANSWER) == alone
    assert engine.scheduler.kv.stats().corrupt > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_changed_on_one_ranks_disk_is_computed_again(
    ranks: Ranks, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = disk_of(ranks, number)
    read = disk.read
    monkeypatch.setattr(disk, "read", lambda slot, tag, its_sum: read(slot, tag, its_sum ^ 1))
    engine = InProcessEngine(ranks.runner, **SMALL)
    for _ in range(2):
        assert engine.generate(PROMPTS, ANSWER) == alone
    stats = engine.scheduler.kv.stats()
    assert stats.corrupt > 0 and stats.disk_loaded == 0 and not stats.disk_failed


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_that_one_rank_reads_late_overwrites_no_other_block(
    ranks: Ranks, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    late: list[DiskRead] = []
    calls = 0
    disk, other = disk_of(ranks, number), disk_of(ranks, 1 - number)
    collect, read = disk.collect, other.read

    def slowly(timeout: float) -> list[DiskRead]:
        nonlocal calls
        late.extend(collect(timeout))
        calls += bool(late)
        if calls % 8:
            return []
        found = late.copy()
        late.clear()
        return found

    monkeypatch.setattr(disk, "collect", slowly)
    # On the other rank every read fails, at once.
    monkeypatch.setattr(other, "read", lambda slot, tag, its_sum: read(slot, tag, its_sum ^ 1))
    engine = InProcessEngine(ranks.runner, **SMALL)
    for _ in range(2):
        assert engine.generate(PROMPTS, ANSWER) == alone
    assert calls > 8 and engine.scheduler.kv.stats().corrupt > 0


def waits(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each step that computes nothing, from now on."""
    run, found = engine.runner.run, list[float]()

    def timed(step: Step) -> StepResult:
        began = time.monotonic()
        result = run(step)
        if not step.rows:
            found.append(time.monotonic() - began)
        return result

    monkeypatch.setattr(engine.runner, "run", timed)
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("slow", [{0}, {1}, {0, 1}])
def test_while_every_request_waits_for_a_slow_disk_there_are_few_steps(
    ranks: Ranks, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, slow: set[int]
) -> None:
    """Also where the disk of one rank alone is slow: steps in a loop would take the CPUs from those who read,
    and send messages to all ranks.
    """
    engine, reads = InProcessEngine(ranks.runner, **SMALL), 0
    assert engine.generate(PROMPTS, ANSWER) == alone

    def slowed(disk: DiskTier, seconds: float) -> None:
        do = disk._do

        def late(job: kv_offload._Job) -> None:
            nonlocal reads
            if job.data is None:
                reads += 1
                time.sleep(seconds)  # a slow disk
            do(job)

        monkeypatch.setattr(disk, "_do", late)

    for number in range(2):
        slowed(disk_of(ranks, number), 0.2 if number in slow else 0.0)
    empty = waits(engine, monkeypatch)
    assert [engine.generate([prompt], ANSWER)[0] for prompt in PROMPTS[:9]] == alone[:9]
    assert sum(empty) > 0.15, "all requests waited"
    assert len(empty) <= reads + 4 + sum(empty) / kv_offload._IDLE_WAIT_SECONDS, "it spins"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [0, 1])
def test_when_one_ranks_disk_fails_the_tier_is_off_and_no_request_fails(
    ranks: Ranks, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_job: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_of(ranks, number), "_do", fail)
    engine = InProcessEngine(ranks.runner, **SMALL)
    for _ in range(2):
        assert engine.generate(PROMPTS, ANSWER) == alone
    stats = engine.scheduler.kv.stats()
    assert stats.disk_failed and stats.disk_used == 0 and stats.host_loaded > 0
