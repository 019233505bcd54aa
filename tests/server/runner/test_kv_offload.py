"""No answer depends on preemption, prefix cache, host tier, disk tier, aborts, or disks that fail."""

import errno
import logging
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_server.core.config import PreemptionMode
from quire_server.core.request import Request
from quire_server.errors import ConfigError
from quire_server.runner import kv_offload
from quire_server.runner.model_runner import ModelRunner
from tests.server.runner.in_process import InProcessEngine, greedy, load

RNG = random.Random(11)
SHARED = [[RNG.randrange(2, 211) for _ in range(40)] for _ in range(3)]
PROMPTS = [
    SHARED[i % 3][: (0, 20, 40)[i % 5 % 3]] + [RNG.randrange(2, 211) for _ in range(3 + i % 19)]
    for i in range(18)
]
SMALL = {"num_blocks": 9, "max_model_len": 130, "num_host_slots": 6, "num_disk_slots": 60}
SIZE = 1 << 20


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[list[int]]:
    """Each prompt by itself, with nothing cached."""
    runner = load(directory)
    answers = [InProcessEngine(runner).generate([prompt], greedy(12))[0] for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    return answers


@pytest.fixture
def runner(directory: Path, tmp_path: Path) -> Iterator[ModelRunner]:
    runner = load(
        directory, kv_offload_host_bytes=SIZE, kv_offload_disk_path=tmp_path, kv_offload_disk_bytes=SIZE
    )
    yield runner
    runner.close()


def test_no_tier_takes_more_bytes_than_configured(directory: Path, tmp_path: Path) -> None:
    host, disk_bytes = 100_001, 200_001
    runner = load(
        directory,
        kv_offload_host_bytes=host,
        kv_offload_disk_path=tmp_path,
        kv_offload_disk_bytes=disk_bytes,
    )
    try:
        limits = {"num_host_slots": runner.num_host_slots, "num_disk_slots": runner.num_disk_slots}
        engine = InProcessEngine(runner, **(SMALL | limits))
        for start in range(0, 210, 10):
            engine.generate([[start, *range(2, 80)], [start, *range(3, 81)]], greedy(2))
        stats, offload = engine.scheduler.kv.stats(), runner._offload
        assert offload is not None and offload._disk is not None
        each = offload.num_bytes // runner.num_host_slots
        assert (stats.host_used, stats.disk_used) == (runner.num_host_slots, runner.num_disk_slots), "full"
        assert host - each < offload.num_bytes <= host
        assert disk_bytes - each < each * runner.num_disk_slots <= disk_bytes
        assert os.fstat(offload._disk._file.fileno()).st_size <= disk_bytes
    finally:
        runner.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("caching", [True, False])
def test_no_answer_comes_from_anothers_prompt(
    runner: ModelRunner, alone: list[list[int]], mode: PreemptionMode, caching: bool
) -> None:
    limits = SMALL | {"num_host_slots": 20} if mode is PreemptionMode.SWAP else SMALL
    engine = InProcessEngine(runner, **limits, preemption_mode=mode, enable_prefix_caching=caching)
    for turn in range(2):
        for i, prompt in enumerate(PROMPTS[::2]):
            salt = str(turn % 2)
            engine.scheduler.add(
                Request(f"victim{i}", tuple(prompt), greedy(12), 0.0, cache_salt=salt, cache_ttl=60.0)
            )
        for i in range(len(PROMPTS[::2])):
            step = engine.scheduler.schedule()
            assert step is not None
            engine.scheduler.abort(f"victim{i}")
            engine.scheduler.commit(step, runner.run(step))
            engine.scheduler.check()
        assert engine.generate(PROMPTS, greedy(12)) == alone
    kv = engine.scheduler.kv.stats()
    assert engine.scheduler.stats.preemptions > 0 and (kv.swaps > 0) == (mode is PreemptionMode.SWAP)
    assert (kv.prefix_hits > 0) == (kv.disk_loaded > 0) == caching and kv.corrupt == 0


@pytest.mark.parametrize("size", [100, 4096, 5 * 4096, 7 * 4096 + 24])
def test_no_single_fault_of_memory_or_disk_leaves_the_checksum_as_it_was(size: int) -> None:
    rng = random.Random(size)
    block = rng.randbytes(size)
    known = kv_offload.checksum(block)
    faults = [block[: size // 2] + bytes(size - size // 2), block[8:] + block[:8], bytes(size)]
    for bit in rng.sample(range(8 * size), 200):
        faults.append(bytearray(block))
        faults[-1][bit // 8] ^= 1 << bit % 8
    if size > 4096:
        faults += [block[4096:8192] + block[:4096] + block[8192:], block[:4096] * 2 + block[8192:]]
    assert kv_offload.checksum(bytearray(block)) == known
    assert known not in [kv_offload.checksum(bytes(fault)) for fault in faults]


def test_a_block_that_changed_on_the_host_is_computed_again(
    runner: ModelRunner, alone: list[list[int]]
) -> None:
    engine = InProcessEngine(runner, **SMALL | {"num_host_slots": 60, "num_disk_slots": 0})
    assert engine.generate(PROMPTS, greedy(12)) == alone
    assert runner._offload is not None
    runner._offload._bytes[:, 100] ^= 4  # a bit in every block; no public way to damage memory
    assert engine.generate(PROMPTS, greedy(12)) == alone
    assert engine.scheduler.kv.stats().corrupt > 0


def test_a_block_that_changed_on_the_disk_is_computed_again(
    runner: ModelRunner, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread
    engine = InProcessEngine(runner, **SMALL)
    monkeypatch.setattr(kv_offload.os, "pread", lambda *where: bytes(len(read(*where))))
    for _ in range(2):
        assert engine.generate(PROMPTS, greedy(12)) == alone
    stats = engine.scheduler.kv.stats()
    assert stats.corrupt > 0 and not stats.disk_failed


@pytest.mark.parametrize(
    ("call", "code"), [("pwrite", errno.ENOSPC), ("pwrite", errno.EROFS), ("pread", errno.EIO)]
)
def test_a_failing_disk_is_turned_off_with_one_log_line_and_no_request_fails(
    runner: ModelRunner,
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(kv_offload.os, call, fail)
    engine = InProcessEngine(runner, **SMALL)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert engine.generate(PROMPTS, greedy(12)) == alone
    stats = engine.scheduler.kv.stats()
    assert stats.disk_failed and stats.disk_used == 0 and stats.host_loaded > 0
    assert len(caplog.records) == 1 and os.strerror(code) in caplog.records[0].why  # type: ignore[attr-defined]  # extra


def test_a_full_disk_with_partial_writes_is_turned_off(
    runner: ModelRunner, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_offload.os, "pwrite", lambda *_: 1)
    engine = InProcessEngine(runner, **SMALL)
    for _ in range(2):
        assert engine.generate(PROMPTS, greedy(12)) == alone
    assert engine.scheduler.kv.stats().disk_failed


def test_a_hanging_disk_delays_no_request_beyond_its_limit(
    runner: ModelRunner, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    read = os.pread

    def hang(*where: int) -> bytes:
        released.wait()
        return read(*where)

    monkeypatch.setattr(kv_offload.os, "pread", hang)
    monkeypatch.setattr(kv_offload, "_READ_SECONDS", 0.1)
    engine = InProcessEngine(runner, **SMALL)
    for _ in range(2):
        assert engine.generate(PROMPTS, greedy(12)) == alone
    assert engine.scheduler.kv.stats().disk_failed
    released.set()


def test_writes_beyond_the_queue_limit_are_dropped_without_harm(
    runner: ModelRunner, alone: list[list[int]]
) -> None:
    assert runner._offload is not None and runner._offload._disk is not None
    runner._offload._disk._max_waiting = 0
    engine = InProcessEngine(runner, **SMALL)
    for _ in range(2):
        assert engine.generate(PROMPTS, greedy(12)) == alone
    stats = engine.scheduler.kv.stats()
    assert stats.disk_loaded == stats.disk_used == 0 and not stats.disk_failed


def test_the_disk_tiers_file_has_no_name_that_a_crash_could_leave(
    runner: ModelRunner, alone: list[list[int]], tmp_path: Path
) -> None:
    engine = InProcessEngine(runner, **SMALL)
    assert engine.generate(PROMPTS, greedy(12)) == alone and engine.scheduler.kv.stats().disk_stored > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_host_bytes": 100}, "holds no block"),
        ({"kv_offload_disk_path": Path("/proc"), "kv_offload_disk_bytes": SIZE}, "/proc cannot be written"),
    ],
)
def test_tiers_that_cannot_work_say_what_to_do(
    directory: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(directory, **options)


def test_the_bookkeeping_of_a_disk_tier_is_bounded(directory: Path, tmp_path: Path) -> None:
    runner = load(
        directory, kv_offload_host_bytes=SIZE, kv_offload_disk_path=tmp_path, kv_offload_disk_bytes=64 << 40
    )
    assert runner.num_disk_slots == 1 << 22
