"""What /metrics says of the ranks of a model, from the shared memory in which rank 0 keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from quire_server.config import ServeConfig
from quire_server.health.heartbeat import SharedState
from quire_server.health.rank_states import Group, rank_states
from quire_server.metrics.ranks import RankSample


def read_ranks(
    settings: ServeConfig, state: SharedState, read_hosts: Callable[[], Mapping[int, str]]
) -> tuple[RankSample, ...]:
    """The ranks of all nodes as they are now; none where one process has the whole model."""
    if settings.num_ranks == 1:
        return ()
    echoes, now = state.read_echoes(), time.monotonic()
    group = Group(settings.topology(0), read_hosts(), echoes, state.read_sent_at())
    states = rank_states(state.read_beats(), state.read_steps(), now, settings.local_ranks, group=group)
    return tuple(
        RankSample(
            one.rank,
            one.host,
            echo.number if (echo := echoes.get(one.rank)) else 0,
            echo.busy_seconds if echo else 0.0,
            one.silence,
            echo.exchanged_bytes if echo else 0,
        )
        for one in states
    )
