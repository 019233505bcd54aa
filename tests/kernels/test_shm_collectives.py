"""Ranks that share memory: the same sums everywhere, and an error instead of a hang when one is missing."""

import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire_kernels import (
    CollectiveError,
    ShmGroup,
    create_shm_region,
    record,
    shm_all_reduce,
    shm_gather,
)
from quire_kernels.attention.paged_decode_attention import paged_decode_attention
from quire_kernels.cpu.shm_group import SLOT_BYTES
from quire_kernels.paged_kv_cache import KVCache, PagedKVCache
from quire_kernels.shm_collectives import all_reduce_reference, gather_reference
from tests.kernels.rank_processes import RankProcesses, rank_processes, where_recorded, where_supported

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (1, 1),
    (1, 15),
    (3, 5),
    (1, 16),
    (7, 17),
    (1, 576),
    (4, 576),
    (33, 4099),
    (3, SLOT_BYTES // 4 * 2 + 33),
]
DEADLINE = 1.0
SOON = 30.0  # far below the deadline of those who wait, far above what a busy machine takes


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.deep), 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with rank_processes(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[RankProcesses]:
    with rank_processes(2) as made:
        yield made


def part_of(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of adding them gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(shape, generator=generator)
    return (numbers * 10 ** torch.randint(-3, 4, shape, generator=generator)).to(dtype)


def sums(group: ShmGroup, _: Connection, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    torch.set_num_threads(threads)
    made = [shm_all_reduce(group, part_of(group.rank, shape, dtype)).clone() for shape in SHAPES]
    torch.set_num_threads(1)
    return made


def gathered(group: ShmGroup, _: Connection, dtype: torch.dtype, threads: int = 1) -> list[Tensor]:
    torch.set_num_threads(threads)
    made = [shm_gather(group, part_of(group.rank, shape, dtype)) for shape in SHAPES]
    torch.set_num_threads(1)
    return made


@pytest.mark.one_in(3)
@where_supported
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_hold_the_bits_of_the_parts_added_in_their_order(
    ranks: RankProcesses, dtype: torch.dtype, threads: int
) -> None:
    results = ranks.run(sums, dtype, threads)
    for index, shape in enumerate(SHAPES):
        parts = [part_of(rank, shape, dtype) for rank in range(ranks.size)]
        expected = all_reduce_reference(parts)
        assert all(torch.equal(result[index], expected) for result in results), shape
        if ranks.size > 2 and expected.numel() > 100 and dtype == torch.float32:
            assert not torch.equal(all_reduce_reference(parts[::-1]), expected)  # the order shows


@where_supported
def test_numbers_of_another_type_are_added_in_float32(pair: RankProcesses) -> None:
    results = pair.run(sums, torch.float16)
    expected = all_reduce_reference([part_of(rank, SHAPES[-1], torch.float16) for rank in range(2)])
    assert all(torch.equal(result[-1], expected) for result in results)


@pytest.mark.one_in(3)
@where_supported
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_0_gathers_the_parts_of_all_side_by_side(
    ranks: RankProcesses, dtype: torch.dtype, threads: int
) -> None:
    results = ranks.run(gathered, dtype, threads)
    for index, shape in enumerate(SHAPES):
        parts = [part_of(rank, shape, dtype) for rank in range(ranks.size)]
        assert torch.equal(results[0][index], gather_reference(parts)), shape
        assert all(torch.equal(results[rank][index], parts[rank]) for rank in range(1, ranks.size))


def many_calls(group: ShmGroup, _: Connection, count: int) -> tuple[int, int, int]:
    """Sums and gathers whose numbers say which call, rank and place they are from; one rank is often late."""
    rng, delays, given = random.Random(5), random.Random(group.rank), 0
    for call in range(count):
        size = rng.choice([1, 7, 576, 576, 5000])
        if group.rank == 1 and delays.random() < 0.02:
            time.sleep(delays.random() * 0.003)  # the fault: a rank that is late
        part = torch.arange(size, dtype=torch.float32)[None] + call % 1000 * (group.rank + 1)
        given += part.nbytes
        weights = [call % 1000 * (rank + 1) for rank in range(group.ranks)]
        if call % 16:
            expected = torch.arange(size, dtype=torch.float32)[None] * group.ranks + sum(weights)
            assert torch.equal(shm_all_reduce(group, part), expected), call
        elif group.rank == 0:
            parts = [torch.arange(size, dtype=torch.float32)[None] + weight for weight in weights]
            assert torch.equal(shm_gather(group, part), gather_reference(parts)), call
        else:
            shm_gather(group, part)
    return group.calls, group.bytes, given


@pytest.mark.deep
@where_supported
def test_thousands_of_calls_with_a_rank_that_is_often_late_are_right_and_counted(
    ranks: RankProcesses,
) -> None:
    for calls, counted, given in ranks.run(many_calls, 4000):
        assert (calls, counted) == (4000, given)


def with_a_late_rank(group: ShmGroup, _: Connection, late: float) -> tuple[float, float]:
    shm_all_reduce(group, torch.ones(1, 576))  # all have started
    before = group.waited
    began_at = time.monotonic()
    if group.rank == 1:
        time.sleep(late)  # the fault: a rank that is late
    shm_all_reduce(group, torch.ones(1, 576))
    return group.waited - before, time.monotonic() - began_at


@where_supported
def test_the_time_in_which_a_rank_waits_for_a_late_one_is_counted(pair: RankProcesses) -> None:
    (waited, took), (late, _) = pair.run(with_a_late_rank, 0.5)
    assert 0.4 < waited <= took
    assert late < 0.4 * waited, "the late one itself waits for no other"


def endless(group: ShmGroup, pipe: Connection) -> None:
    for call in range(1 << 60):
        if call == 50:
            pipe.send(("result", "computing"))
        expected = torch.full((1, 600), float(sum(range(group.ranks))))
        assert torch.equal(shm_all_reduce(group, torch.full((1, 600), float(group.rank))), expected)


def assert_rank_1_is_missed(ranks: RankProcesses) -> None:
    start = time.monotonic()
    for rank in range(ranks.size):
        if rank != 1:
            error = ranks.receive(rank)
            assert isinstance(error, CollectiveError) and error.rank == 1 and error.call > 50
            assert f"Rank 1 did not arrive within 1 s (call {error.call} of rank {rank}" in str(error)
    assert time.monotonic() - start < SOON


@where_supported
def test_a_rank_that_is_killed_ends_the_calls_of_the_others_by_its_name() -> None:
    with rank_processes(3) as ranks:
        ranks.start(endless, deadline=DEADLINE)
        assert [ranks.receive(rank) for rank in range(3)] == ["computing"] * 3
        ranks.signal(1, signal.SIGKILL)
        assert_rank_1_is_missed(ranks)


@where_supported
def test_a_rank_that_is_stopped_ends_the_calls_of_the_others_and_its_own(ranks: RankProcesses) -> None:
    ranks.start(endless, deadline=DEADLINE)
    assert [ranks.receive(rank) for rank in range(ranks.size)] == ["computing"] * ranks.size
    ranks.signal(1, signal.SIGSTOP)
    assert_rank_1_is_missed(ranks)
    ranks.signal(1, signal.SIGCONT)  # and it gets no sum in which others have no part
    assert "Rank 1 did not arrive" in str(ranks.receive(1))


def wait_or_abort(group: ShmGroup, pipe: Connection) -> list[str]:
    messages = []
    if group.rank == 1:
        assert pipe.recv() == "abort"
        group.abort()
    for _ in range(2):
        with pytest.raises(CollectiveError) as raised:
            shm_all_reduce(group, torch.ones(1, 32))
        messages.append(str(raised.value))
    return messages


@where_supported
def test_an_abort_ends_all_who_wait_and_every_later_call_at_once(ranks: RankProcesses) -> None:
    ranks.start(wait_or_abort, deadline=3600)
    start = time.monotonic()
    ranks.send(1, "abort")
    for rank in range(ranks.size):
        assert ranks.receive(rank) == [f"Rank 1 gave up (call {call} of rank {rank})." for call in (1, 2)]
    assert time.monotonic() - start < SOON


def another_call(group: ShmGroup, _: Connection, kind: str) -> Tensor:
    part = torch.ones(2, 64 if group.rank == 0 or kind == "gather" else 32)
    return (shm_gather if group.rank and kind == "gather" else shm_all_reduce)(group, part)


@where_supported
@pytest.mark.parametrize("kind", ["gather", "smaller"])
def test_ranks_that_make_different_calls_are_told_so(pair: RankProcesses, kind: str) -> None:
    for error in pair.run(another_call, kind):
        assert isinstance(error, CollectiveError) and "another call than this one, or one of another" in str(
            error
        )


def with_threads(group: ShmGroup, _: Connection) -> None:
    torch.set_num_threads(2)
    try:
        if group.rank:
            shm_all_reduce(group, torch.ones(1 << 20, 1))
    finally:
        torch.set_num_threads(1)


@where_supported
def test_a_rank_with_several_threads_fails_as_a_whole(pair: RankProcesses) -> None:
    assert "Rank 0 did not arrive within 0.2 s" in str(pair.run(with_threads, deadline=0.2)[1])


def recorded(group: ShmGroup, _: Connection) -> Tensor:
    """A sum, a gather, then calls that the other rank leaves out."""
    part = torch.zeros(8, 576)

    def compute() -> Tensor:
        return shm_gather(group, shm_all_reduce(group, part))

    recording = record(compute)
    assert recording is not None
    assert group.calls == 0
    for rows in (8, 1, 5):
        part[:] = part_of(group.rank, (8, 576), torch.float32)
        recording.replay(rows)
        result = recording.result[:rows].clone()
        part[:] = part_of(group.rank, (8, 576), torch.float32)
        assert torch.equal(compute()[:rows], result)
    assert (group.calls, group.bytes) == (12, 2 * (8 + 1 + 5 + 3 * 8) * 576 * 4)
    if group.rank == 0:
        recording.replay(1)
    return result


@where_supported
def test_a_recording_replays_and_fails_as_the_calls_one_by_one(pair: RankProcesses) -> None:
    error, result = pair.run(recorded, deadline=DEADLINE)
    expected = all_reduce_reference([part_of(rank, (8, 576), torch.float32) for rank in range(2)])
    assert torch.equal(result, expected[:5])
    assert str(error) == "Rank 1 did not arrive within 1 s (call 13 of rank 0)."


def without_memory(group: ShmGroup, _: Connection) -> str:
    q, caches = torch.randn(1, 4, 64), torch.randn(2, 4, 2, 16, 64)
    lengths, table = torch.tensor([1 << 50 if group.rank else 20]), torch.zeros(1, 2, dtype=torch.int64)
    kv = PagedKVCache(KVCache(caches[0], caches[1]), table, lengths)
    recording = record(lambda: shm_all_reduce(group, paged_decode_attention(q, kv, 0.125).view(1, 256)))
    assert recording is not None
    try:
        recording.replay(1)
    except MemoryError:
        return "no memory"
    return "a sum"


@where_recorded
def test_what_a_rank_computed_without_memory_reaches_no_other(pair: RankProcesses) -> None:
    error, other = pair.run(without_memory)
    assert other == "no memory"
    assert str(error) == "Rank 1 gave up (call 1 of rank 0)."


@where_supported
def test_a_place_is_taken_once_and_only_if_there_is_one() -> None:
    descriptor = create_shm_region(2)
    ShmGroup(descriptor, 1, deadline=DEADLINE)
    with pytest.raises(ValueError, match="has joined this group as rank 1 before"):
        ShmGroup(descriptor, 1, deadline=DEADLINE)
    for rank in (2, -1):
        with pytest.raises(ValueError, match=f"there is no rank {rank} in a group of 2"):
            ShmGroup(descriptor, rank, deadline=DEADLINE)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    for count in (0, 65):
        with pytest.raises(ValueError, match="1 to 64 ranks"):
            create_shm_region(count)


def mapped(pids: list[int]) -> list[int]:
    """Those of the processes that have a region, a file without a name."""
    return [pid for pid in pids if "/memfd:quire-ranks (deleted)" in Path(f"/proc/{pid}/maps").read_text()]


@where_supported
def test_nothing_is_left_of_a_group_whose_ranks_were_killed() -> None:
    with rank_processes(2) as ranks:
        ranks.start(endless)
        assert [ranks.receive(rank) for rank in range(2)] == ["computing"] * 2
        assert mapped(ranks.pids()) == ranks.pids()
        for rank in range(2):
            ranks.signal(rank, signal.SIGKILL)
    gc.collect()
    assert mapped([os.getpid()]) == []
