"""The supervisor's loop on a node that has ranks of a model, but not the first: no engine and no API.

Its ranks follow the leader on another node, and end with it. On SIGTERM they go on until the leader has gone:
it may still answer requests, for which it needs them. Before the group has served there are none, and the
node ends at once: the leader's pod is not replaced before this one is gone.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire_server import termination
from quire_server.config import ServeConfig
from quire_server.engine.heartbeat_writer import HeartbeatWriter
from quire_server.health.heartbeat import Control, Process, SharedState
from quire_server.health.rank_states import SILENCE_SECONDS
from quire_server.supervisor.children import Children
from quire_server.supervisor.processes import HEALTH, engine_environ, rank_name
from quire_server.supervisor.watch import Ending, LoadLimits, ending_of_child, watch_load
from quire_server.termination import Failure, Reason

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_DRAIN_MARGIN_SECONDS = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class WorkerSupervisor:
    """The processes of one node, and the limits that it enforces."""

    def __init__(self, config: ServeConfig, state: SharedState, children: Children, run_dir: Path) -> None:
        self._config, self._state, self._children, self._run_dir = config, state, children, run_dir
        # The leader gets the progress of loading, and judges it.
        self._limits = LoadLimits(config.startup_timeout_seconds, config.startup_timeout_seconds)
        self._heartbeat = HeartbeatWriter(state, time.monotonic())
        self._is_serving = False
        self._drains_until = float("inf")

    def run(self, arguments: Sequence[str], environ: Mapping[str, str]) -> Ending:
        """Start all processes and watch them until one ends."""
        self._children.spawn(HEALTH, "quire_server.health", arguments, environ)
        for rank in self._config.local_ranks:
            self._children.spawn(
                rank_name(rank),
                "quire_server.engine.rank",
                [str(rank), *arguments],
                engine_environ(len(self._config.local_ranks), environ),
            )
        started_at = time.monotonic()
        while True:
            self._state.beat(Process.SUPERVISOR)
            received = signal.sigtimedwait(_SIGNALS, _TICK_SECONDS)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._drain()
            now = time.monotonic()
            self._report()
            failure = self._silent(now) or watch_load(
                self._state.read_heartbeat(), started_at, now, self._limits
            )
            ending = self._look_at_children() or (None if failure is None else Ending.of(failure))
            if ending is not None:
                return self._end(ending)
            if now >= self._drains_until:
                return Ending(0, None)

    def _drain(self) -> None:
        self._state.write_control(Control(draining=True))
        limit = self._config.drain_timeout_seconds + _DRAIN_MARGIN_SECONDS if self._is_serving else 0.0
        self._drains_until = min(self._drains_until, time.monotonic() + limit)
        logger.info("waiting for the leader to end")

    def _report(self) -> None:
        """The group has done a whole completion, its canary, once every rank here has taken a step."""
        steps = self._state.read_steps()
        if not self._is_serving and all(steps.get(rank) for rank in self._config.local_ranks):
            self._is_serving = True
            self._heartbeat.warming()
            logger.info("serving", extra={"ranks": list(self._config.local_ranks)})
        if self._is_serving:
            self._heartbeat.serving()  # proofs of inference are the leader's

    def _silent(self, now: float) -> Failure | None:
        """The failure of a rank that has stopped while it serves."""
        if not self._is_serving:
            return None
        beats = self._state.read_beats()
        silent = [rank for rank in self._config.local_ranks if now - beats.get(rank, 0.0) >= SILENCE_SECONDS]
        if not silent:
            return None
        names = ", ".join(map(rank_name, silent))
        return Failure(
            Reason.PROCESS_STALLED,
            f"{names} did not run for {SILENCE_SECONDS:g} s. The group restarts; look at the node, which may "
            "be out of CPU or memory.",
        )

    def _look_at_children(self) -> Ending | None:
        exited = self._children.reap()
        if not exited:
            return None
        if self._drains_until < float("inf"):
            return Ending(0, None)  # the leader has ended, as was awaited
        left_behind = termination.find_failure(self._run_dir)
        endings = [ending_of_child(child.name, child.wait_status, left_behind) for child in exited]
        return max(endings, key=lambda ending: ending.failure is None)

    def _end(self, ending: Ending) -> Ending:
        failure = ending.failure
        if failure is not None:
            termination.write_termination_log(self._config.termination_log, failure)
            logger.error(failure.message, extra={"reason": failure.reason.value})
            self._state.write_control(Control(failed=failure.reason.value))
        return ending
