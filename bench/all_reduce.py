"""What an all-reduce of CPU ranks costs, by shared memory and by gloo (used by ``bench.distributed``).

The ranks are processes with one thread each, and take the ways in turns, so that a disturbance of the machine
affects all of them. Sizes: one token of SmolLM2 in float32, and up to 256 tokens.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor, distributed

from quire_server.layers.ops import record
from quire_server.layers.shared_memory import SharedMemory

RANKS = (2, 4)
SIZES = {"2.3 KB": 2304, "16 KB": 16 << 10, "64 KB": 64 << 10, "576 KB": 576 << 10}  # bytes
SECONDS = 300  # until the ranks are given up
ROUNDS, CALLS = 25, 61  # of each way and size; 61 is a step of SmolLM2
WAYS = ("shared memory, recorded", "shared memory, call by call", "gloo")


def ways(communicator: SharedMemory, part: Tensor) -> dict[str, Callable[[], object]]:
    """Each makes CALLS calls."""

    def by_shared_memory() -> Tensor:
        for _ in range(CALLS):
            communicator.all_reduce(part)
        return part

    def by_gloo() -> None:
        for _ in range(CALLS):
            distributed.all_reduce(part)

    recording = record(by_shared_memory)
    assert recording is not None
    return dict(zip(WAYS, (lambda: recording.replay(1), by_shared_memory, by_gloo), strict=True))


def rank_main(rank: int, ranks: int, region: str, rendezvous: str, results: Connection) -> None:
    """One rank. Rank 0 sends us per call: size -> way -> one for each round."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    communicator = SharedMemory(os.open(region, os.O_RDWR), rank, deadline=60)
    taken: dict[str, dict[str, list[float]]] = {}
    for name, size in SIZES.items():
        made = ways(communicator, torch.zeros(1, size // 4))
        taken[name] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, make_calls in made.items():
                distributed.barrier()
                start = time.perf_counter()
                make_calls()
                taken[name][way].append((time.perf_counter() - start) / CALLS * 1e6)
    if rank == 0:
        results.send(taken)
    distributed.destroy_process_group()


def measure(ranks: int) -> dict[str, dict[str, list[float]]]:
    """Start the ranks, and return what rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    descriptor = SharedMemory.create(ranks)
    region = f"/proc/{os.getpid()}/fd/{descriptor}"
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, ranks, region, f"{folder}/rendezvous", theirs))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            if not ours.poll(SECONDS):
                raise RuntimeError(f"{ranks} ranks did not end within {SECONDS} s")
            taken: dict[str, dict[str, list[float]]] = ours.recv()
        except EOFError:
            raise RuntimeError(f"{ranks} ranks ended before they had measured: see above") from None
        finally:
            for process in processes:
                process.kill()  # what was measured has come
                process.join()
            os.close(descriptor)
    return taken


def table(ranks: int) -> str:
    """us per call: median of the rounds, and the best round."""
    taken = measure(ranks)
    lines = [
        f"| {ranks} ranks, us per call: median (best) | {' | '.join(SIZES)} |",
        "|---|" + "---:|" * len(SIZES),
    ]
    for way in WAYS:
        cells = [f"{statistics.median(taken[size][way]):.1f} ({min(taken[size][way]):.1f})" for size in SIZES]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    ratios = [
        f"{statistics.median(taken[size]['gloo']) / statistics.median(taken[size][WAYS[0]]):.0f}x"
        for size in SIZES
    ]
    lines.append(f"| gloo / recorded | {' | '.join(ratios)} |")
    return "\n".join(lines)


def tables() -> str:
    """For each number of ranks."""
    notes = f"Rounds of {CALLS} calls, {ROUNDS} of them, in turns."
    return "\n\n".join([*map(table, RANKS), notes])
