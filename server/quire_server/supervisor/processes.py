"""The processes of a server: their names, and what their environment has besides the pod's."""

from __future__ import annotations

import os
from collections.abc import Mapping

API, ENGINE, HEALTH = "API", "engine", "health"

# OpenMP threads of the engine wait for each other some 250 times a step, mostly for microseconds. Sleeping
# each time would cost a third of the speed, so they spin for a fraction of a millisecond first. They do sleep
# after that, so that an idle pod uses no CPU, and the API process finds a free one between two steps.
_OPENMP_SPINS = "10000"


def rank_name(rank: int) -> str:
    """The name of the process of another rank than the first."""
    return f"rank {rank}"


def engine_environ(ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of each of so many ranks on this node."""
    threads = {"OMP_NUM_THREADS": str(threads_of_rank(ranks, environ))} if ranks > 1 else {}
    return {"GOMP_SPINCOUNT": _OPENMP_SPINS, **environ, **threads}


def threads_of_rank(ranks: int, environ: Mapping[str, str]) -> int:
    """Threads of each rank: its share of the CPUs, or of OMP_NUM_THREADS where that is set."""
    given = environ.get("OMP_NUM_THREADS", "")
    total = int(given) if given.isdigit() else len(os.sched_getaffinity(0))
    return max(1, total // ranks)
