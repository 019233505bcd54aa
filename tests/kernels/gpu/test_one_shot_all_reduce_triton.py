"""The one-shot all-reduce gives all ranks the reference's bits, call after call and whatever the sizes; a
rank waits for all others.
"""

import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from quire_kernels.one_shot_all_reduce_triton import one_shot_all_reduce_triton
from quire_kernels.one_shot_place import MAX_BYTES, OneShotPlace, can_one_shot, one_shot_region_bytes
from quire_kernels.shm_collectives import all_reduce_reference
from tests.kernels.gpu.one_shot_ranks import (
    Interpreted,
    InterpretedRank,
    Ranks,
    one_shot_ranks,
    sums_of_a_rank,
)

SIZES = ((1, 1), (3, 5), (1, 2048), (1, 2049), (4, 1500), (1, 1), (2, 4096))
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(scope="module", params=[2, 3])
def group(request: pytest.FixtureRequest) -> Iterator[tuple[int, Ranks]]:
    with one_shot_ranks(request.param) as ranks:
        yield request.param, ranks


def calls_of(ranks: int) -> list[list[Tensor]]:
    """Parts of all ranks for each call; the types and sizes alternate."""
    generator = torch.Generator().manual_seed(ranks)
    made = []
    for number, shape in enumerate(SIZES * 2):
        dtype = DTYPES[number % len(DTYPES)]
        made.append([torch.randn(shape, generator=generator).to(dtype) for _ in range(ranks)])
    return made


@pytest.mark.kernels
def test_all_ranks_have_the_bits_of_the_reference_after_every_call(group: tuple[int, Ranks]) -> None:
    size, ranks = group
    calls = calls_of(size)
    expected = [all_reduce_reference(parts) for parts in calls]
    for given in ranks.sums(calls):
        for mine, wanted in zip(given, expected, strict=True):
            assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)


@pytest.mark.kernels
def test_nan_and_infinity_stay_in_their_elements(group: tuple[int, Ranks]) -> None:
    size, ranks = group
    parts = [torch.arange(8.0) for _ in range(size)]
    parts[0][1], parts[-1][2] = float("nan"), float("inf")
    for ((mine,),) in ((each,) for each in ranks.sums([parts])):
        torch.testing.assert_close(mine, all_reduce_reference(parts), equal_nan=True, atol=0, rtol=0)
        assert mine[3:].isfinite().all()


def rank_with_flags(
    rank: InterpretedRank, pipe: Connection, parts: list[Tensor]
) -> tuple[bool, list[Tensor]]:
    """On rank 0 the sum at once; on others when the test lets them, and whether rank 0's flag was set."""
    if rank.place.rank == 0:
        return True, sums_of_a_rank(rank, pipe, [parts])
    mine = rank.place.flags
    before = int(mine[0, rank.place.rank])
    while int(mine[0, 0]) == before:
        pass
    pipe.send(("result", "rank 0 waits"))
    pipe.recv()
    return True, sums_of_a_rank(rank, pipe, [parts])


@pytest.mark.kernels
def test_a_rank_waits_until_the_others_have_come(group: tuple[int, Ranks]) -> None:
    size, ranks = group
    if not isinstance(ranks, Interpreted):
        return  # what a stream waits for cannot be seen from outside
    parts = [torch.full((4,), float(rank + 1)) for rank in range(size)]
    processes = ranks.processes
    processes.start(rank_with_flags, parts)
    for rank in range(1, size):
        assert processes.receive(rank) == "rank 0 waits"
    assert not processes.has_said(0)
    for rank in range(1, size):
        processes.send(rank, "go")
    results = [processes.receive(rank) for rank in range(size)]
    assert all(torch.equal(mine, all_reduce_reference(parts)) for _, (mine,) in results)


def sum_that_is_released(rank: InterpretedRank, pipe: Connection, parts: list[Tensor]) -> list[list[Tensor]]:
    """The sum of rank 0, to which no other rank comes; released as soon as it has announced its part."""
    if rank.place.rank:
        return []
    place = rank.place
    before = int(place.flags[0, 0])

    def release() -> None:
        while int(place.flags[0, 0]) == before:
            pass
        place.release()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        return [sums_of_a_rank(rank, pipe, [parts])]
    finally:
        thread.join()


@pytest.mark.kernels
def test_a_call_that_waits_for_a_rank_that_is_gone_ends_when_it_is_released() -> None:
    with one_shot_ranks(2) as ranks:
        if isinstance(ranks, Interpreted):
            parts = [torch.ones(4), torch.ones(4)]
            released, _ = ranks.processes.run(sum_that_is_released, parts)
            assert len(released) == 1


def test_messages_that_are_too_large_or_not_in_one_piece_are_refused(device: str) -> None:
    place = OneShotPlace.of([0, 0], 0, torch.empty(0, dtype=torch.uint8, device=device))
    large = torch.empty(MAX_BYTES // 4 + 1, device=device)
    assert can_one_shot(large[1:]) and not can_one_shot(large) and not can_one_shot(large[:2].double())
    for part in (large, torch.empty(4, 4, device=device).T, large[:2].double()):
        with pytest.raises(ValueError, match="must be contiguous, of at most 524288 bytes"):
            one_shot_all_reduce_triton(part, place)
    assert one_shot_region_bytes(2) > 2 * MAX_BYTES
    empty = torch.empty(0, 4, device=device)
    assert one_shot_all_reduce_triton(empty, place) is empty
