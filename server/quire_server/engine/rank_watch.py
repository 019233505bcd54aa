"""Ends a process of the engine when its connection to a rank on another node ends: rank 0 watches all others,
and they watch rank 0.

Within a node the supervisor sees the end of a process. That of another node shows only as the end of its
connection, which is looked at without taking a byte of it, whatever the process waits for meanwhile: a rank
may wait for the hidden states of another stage for minutes, by a connection that does not end.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Mapping
from pathlib import Path

from quire_server import termination
from quire_server.errors import RankLostError

logger = logging.getLogger(__name__)


def start(descriptors: Mapping[int, int], run_dir: Path) -> None:
    """Watch the connections of these ranks, by a thread, until this process ends."""
    threading.Thread(target=_watch, args=(dict(descriptors), run_dir), name="rank-watch", daemon=True).start()


def _watch(descriptors: Mapping[int, int], run_dir: Path) -> None:
    poll, ranks = select.poll(), {descriptor: rank for rank, descriptor in descriptors.items()}
    for descriptor in ranks:
        poll.register(descriptor, select.POLLRDHUP)
    lost = ranks[poll.poll()[0][0]]
    failure = termination.failure_of(
        RankLostError(f"Rank {lost} on another node has ended. Its pod's log says why; the group restarts.")
    )
    logger.error(failure.message, extra={"reason": failure.reason.value, "rank": lost})
    termination.leave_failure(run_dir, failure)
    os._exit(failure.exit_code)
