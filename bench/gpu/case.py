"""One thing that `roofline` and `tuning` measure, and the measuring."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu.ledger import Row
from bench.gpu.place import Launch, Place

_MAX_SETS = 16
SHEET = 4.8e12  # bytes a second that an H200's data sheet names


@dataclass(frozen=True, slots=True)
class Case:
    """``make`` gives a launch over memory of its own. ``bytes`` are what must be moved at least, ``flops``
    what must be computed. ``graph``: whether it can be captured; ``sets`` of memory, where not as many as it
    takes to be cold.
    """

    name: str
    make: Callable[[torch.device], Launch]
    bytes: int
    flops: int = 0
    goal: str = ""
    graph: bool = True
    sets: int | None = None


def measure(place: Place, case: Case, cold: int) -> Row:
    """Seconds of one launch, memory it takes beside its arguments, and what these are per second."""
    sets = case.sets or min(max(2, -(-cold // max(case.bytes, 1))), _MAX_SETS)
    launches = [case.make(place.device) for _ in range(sets)]
    launches[0]()  # compiled, and the workspaces of libraries are there
    peak = place.runner_device.peak_bytes(launches[0])
    seconds = place.seconds(launches, graph=case.graph)
    row: Row = {"us": seconds * 1e6, "peak_bytes": peak}
    if case.bytes:
        row["GB/s"] = case.bytes / seconds / 1e9
    if case.flops:
        row["TFLOP/s"] = case.flops / seconds / 1e12
    return row
