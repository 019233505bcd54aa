"""A sum between GPUs, by the one-shot kernel and by NCCL: each rank is a process, and its calls are a graph.
And what a stage sends to the next one, by NCCL.

Without a GPU the ranks are interpreters, whose times mean nothing, and there is no NCCL.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import multiprocessing

from bench.gpu.ledger import Row
from bench.gpu.place import Place
from quire_server.core.topology import Topology
from quire_server.layers.parallel import GpuStages, Meeting, Nccl, SingleRank
from tests.kernels.gpu.one_shot_ranks import one_shot_ranks

_CALLS, _REPLAYS = 61, 30
_ONE_SHOT, _NCCL = "one-shot, us", "NCCL, us"


def measure(place: Place, ranks: int, size: int) -> Row:
    """Microseconds of one call on the slowest rank. Raises RuntimeError where there are too few GPUs."""
    if place.device.type != "cuda":
        return _interpreted(ranks, size)
    return _by_processes(_rank_main, ranks, size)


def measure_states(place: Place, size: int) -> Row:
    """Microseconds that a stage takes to send so many bytes to the next one, as ``measure``."""
    if place.device.type != "cuda":
        began = time.perf_counter()
        torch.zeros(size, dtype=torch.uint8).clone()
        return {_NCCL: (time.perf_counter() - began) * 1e6}
    return _by_processes(_stage_main, 2, size)


def _by_processes(main: Callable[[int, int, int, str], None], ranks: int, size: int) -> Row:
    if (count := torch.cuda.device_count()) < ranks:
        raise RuntimeError(f"an exchange between GPUs needs {ranks}, and here is {count}")
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]  # not in the stubs
            main, (ranks, size, directory), nprocs=ranks
        )
        found = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {key: _slowest([each[key] for each in found]) for key in found[0]}


def _stage_main(rank: int, ranks: int, size: int, directory: str) -> None:
    device = torch.device("cuda", rank)
    joined = GpuStages(SingleRank(), Topology(1, rank, ranks), Meeting(Path(directory)), device)
    part = torch.zeros(2, 1, size // 4, dtype=torch.bfloat16, device=device)
    times: list[float] = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(_CALLS):
            if rank == 0:
                joined.send(part, 1)
            else:
                joined.recv(part.shape, part.dtype, 0)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    found = {_NCCL: median(times) / _CALLS * 1e6}
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))


def _rank_main(rank: int, ranks: int, size: int, directory: str) -> None:
    topology, device = Topology(ranks, rank), torch.device("cuda", rank)
    joined = Nccl.join(topology, Meeting(Path(directory)), device)
    found: dict[str, float | None] = {_ONE_SHOT: None}
    if joined.has_one_shot:
        found[_ONE_SHOT] = _seconds(joined, size, device) * 1e6
    found[_NCCL] = _seconds(joined.without_one_shot(), size, device) * 1e6
    (Path(directory) / f"{rank}.json").write_text(json.dumps(found))


def _seconds(communicator: Nccl, size: int, device: torch.device) -> float:
    """Of one call: the same number of replays on each rank, since each of them waits for the others."""
    part = torch.zeros(1, size // 2, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # not typed in torch
    with torch.cuda.stream(stream):
        communicator.all_reduce(part)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_CALLS):
            communicator.all_reduce(part)
    times: list[float] = []
    for _ in range(_REPLAYS):
        events = torch.cuda.Event
        begin, end = (events(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # as above
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times) / _CALLS


def _interpreted(ranks: int, size: int) -> Row:
    parts = [torch.zeros(1, size // 2, dtype=torch.bfloat16) for _ in range(ranks)]
    with one_shot_ranks(ranks) as group:
        began = time.perf_counter()
        group.sums([parts])
        return {_ONE_SHOT: (time.perf_counter() - began) * 1e6, _NCCL: None}


def _slowest(times: list[float | None]) -> float | None:
    """None where the GPUs cannot reach each other's memory: on all ranks."""
    return max((each for each in times if each is not None), default=None)
