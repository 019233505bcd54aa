"""The supervisor's loop: one thread that waits for signals and checks the heartbeat four times a second.

SIGTERM starts a drain: the API process finishes its streams and exits, then the other processes are ended and
the exit code is 0. If a child ends in any other way, the whole server ends, with a reason in the termination
log.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire_server import termination
from quire_server.config import ServeConfig
from quire_server.errors import DiskError
from quire_server.health import decision
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import Control, Process, SharedState
from quire_server.health.rank_states import RankState, rank_states
from quire_server.supervisor.children import Children
from quire_server.supervisor.processes import API, ENGINE, HEALTH, engine_environ, rank_name
from quire_server.supervisor.run_dir import run_dir
from quire_server.supervisor.watch import Ending, LoadLimits, ending_of_child, watch_load, watch_ranks
from quire_server.supervisor.worker import WorkerSupervisor
from quire_server.termination import Failure, Reason

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")
_TICK_SECONDS = 0.25
_PAUSE_SECONDS = 1.0  # between two ticks: this process was paused, and likely the others too
_DRAIN_MARGIN_SECONDS = 3.0  # the pod's grace period leaves 5 s after the drain timeout
_BETWEEN_SIGNALS_SECONDS = 0.05  # two pending SIGTERMs would be merged into one
# For the API process to answer with an error the requests that it has, and those that arrive before the pod
# is removed from the Service. After SIGTERM it closes its connections within a second.
_ERROR_RESPONSE_SECONDS = 1.0
_HANG_UP_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_ENDING = (signal.SIGTERM, signal.SIGINT)


def serve(config: ServeConfig, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a server until it ends; returns the exit code. `arguments` are what the children parse again."""
    try:
        with run_dir((_MEMORY, Path(tempfile.gettempdir()))) as (directory, state):
            ending = _run(config, arguments, environ, directory, state)
    except DiskError as error:
        ending = Ending.of(termination.failure_of(error))
        termination.write_termination_log(config.termination_log, termination.failure_of(error))
        logger.error("%s", error)
    logger.info("ended", extra={"exit_code": ending.exit_code})
    return ending.exit_code


def _run(
    config: ServeConfig,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    directory: Path,
    state: SharedState,
) -> Ending:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    children = Children()
    kind = Supervisor if config.is_leader else WorkerSupervisor
    try:
        if config.start_delay_seconds and signal.sigtimedwait(_ENDING, config.start_delay_seconds):
            return Ending(0, None)
        return kind(config, state, children, directory).run([str(directory), *arguments], environ)
    finally:
        children.kill_all()


class Supervisor:
    """The processes of one server, and the limits that it enforces."""

    def __init__(self, config: ServeConfig, state: SharedState, children: Children, run_dir: Path) -> None:
        self._config = config
        self._state = state
        self._children = children
        self._run_dir = run_dir
        self._ticked_at = self._watched_since = time.monotonic()
        self._limits = LoadLimits(config.startup_timeout_seconds, config.load_stall_timeout_seconds)
        self._thresholds = Thresholds(
            config.stall_timeout_seconds, config.canary_interval_seconds, config.local_ranks
        )

    def run(self, arguments: Sequence[str], environ: Mapping[str, str]) -> Ending:
        """Start all processes and watch them until the server ends."""
        ranks = self._config.local_ranks
        of_engine = engine_environ(len(ranks), environ)
        self._children.spawn(HEALTH, "quire_server.health", arguments, environ)
        self._children.spawn(ENGINE, "quire_server.engine", arguments, of_engine)
        for rank in ranks[1:]:
            rank_arguments = [str(rank), *arguments]
            self._children.spawn(rank_name(rank), "quire_server.engine.rank", rank_arguments, of_engine)
        self._children.spawn(API, "quire_server.api", arguments, environ)
        started_at = time.monotonic()
        while True:
            self._state.beat(Process.SUPERVISOR)
            if self._wait_for_signal(_TICK_SECONDS):
                return self._drain()
            ending = self._look_at_children() or self._look_at_ranks()
            if ending is None:
                sample = self._state.read_heartbeat()
                now = time.monotonic()
                failure = watch_load(sample, started_at, now, self._limits, self._rank_states(now))
                ending = None if failure is None else Ending.of(failure)
            if ending is not None:
                return self._end(ending)

    def _drain(self) -> Ending:
        """Let the streams finish. A server with a stalled process finishes none, so that ends it at once."""
        self._state.beat(Process.SUPERVISOR)
        now = time.monotonic()
        sample, beats = self._state.read_heartbeat(), self._state.read_beats()
        verdict = decision.judge(sample, Control(), beats, now, self._thresholds)
        if verdict.live.reason:
            return self._end(Ending.of(self._stalled(Reason(verdict.live.reason), verdict.silent)))
        self._state.write_control(Control(draining=True))
        logger.info("draining", extra={"seconds": self._config.drain_timeout_seconds})
        if not verdict.startup.reason:
            return self._wait_for_drain(now + self._config.drain_timeout_seconds + _DRAIN_MARGIN_SECONDS)
        return Ending(0, None)

    def _wait_for_drain(self, deadline: float) -> Ending:
        self._children.signal(API, signal.SIGTERM)
        while self._children.alive(API):
            if time.monotonic() >= deadline:
                return self._end(Ending.of(self._undrained()))
            if self._wait_for_signal(_TICK_SECONDS):
                self._children.signal(API, signal.SIGTERM)  # a second SIGTERM: end now
            for exited in self._children.reap():
                if exited.name != API or exited.wait_status != 0:
                    left_behind = termination.find_failure(self._run_dir)
                    return self._end(ending_of_child(exited.name, exited.wait_status, left_behind))
            if (ending := self._look_at_ranks()) is not None:
                return self._end(ending)
        return Ending(0, None)

    def _look_at_children(self) -> Ending | None:
        """The ending of the server if a child has ended. SIGKILL explains the end of the others, so it takes
        precedence.
        """
        exited = self._children.reap()
        left_behind = termination.find_failure(self._run_dir) if exited else None
        endings = [ending_of_child(child.name, child.wait_status, left_behind) for child in exited]
        return max(endings, key=lambda ending: ending.failure is None, default=None)

    def _look_at_ranks(self) -> Ending | None:
        """The ending of the server if a rank of its model has stopped."""
        if self._config.num_ranks == 1:
            return None
        now = time.monotonic()
        if now - self._ticked_at > _PAUSE_SECONDS:
            self._watched_since = now
        self._ticked_at = now
        sample = self._state.read_heartbeat()
        failure = watch_ranks(sample, self._rank_states(now), now - self._watched_since)
        return None if failure is None else Ending.of(failure)

    def _rank_states(self, now: float) -> Sequence[RankState]:
        beats, steps = self._state.read_beats(), self._state.read_steps()
        return rank_states(beats, steps, now, self._config.local_ranks)

    def _end(self, ending: Ending) -> Ending:
        """Write the reason at once (the kubelet may kill the pod within two seconds), and become unready. The
        API process gets a moment to answer its requests, and those that still arrive, with an error.
        """
        failure = ending.failure
        if failure is not None:
            termination.write_termination_log(self._config.termination_log, failure)
            logger.error(failure.message, extra={"reason": failure.reason.value})
        else:
            logger.error(
                "the %s process was ended by SIGKILL: most likely the container is out of memory",
                ending.killed,
            )
        reason = "Killed" if failure is None else failure.reason.value
        self._state.write_control(Control(failed=reason, killed=ending.killed.lower()))
        for name in (ENGINE, *map(rank_name, self._config.local_ranks[1:])):
            self._children.signal(name, signal.SIGKILL)  # requests would wait for a stalled one
        self._wait_for_api(_ERROR_RESPONSE_SECONDS)
        for _ in range(2):
            self._children.signal(API, signal.SIGTERM)
            self._wait_for_api(_BETWEEN_SIGNALS_SECONDS)
        self._wait_for_api(_HANG_UP_SECONDS)
        return ending

    def _wait_for_api(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._children.alive(API) and time.monotonic() < deadline:
            time.sleep(0.02)
            self._children.reap()

    def _wait_for_signal(self, timeout: float) -> bool:
        """Wait for a signal; True when it is SIGTERM or SIGINT."""
        received = signal.sigtimedwait(_SIGNALS, timeout)
        return received is not None and received.si_signo in _ENDING

    def _stalled(self, reason: Reason, silent: Sequence[str]) -> Failure:
        seconds = f"{self._config.stall_timeout_seconds:g} s"
        if silent:
            what = f"These processes of the server did not run for {seconds}: {', '.join(silent)}."
            remedy = "look at the node; it may be out of CPU or memory."
        else:
            what = f"The engine did no step for {seconds} while work was pending."
            remedy = "if steps are merely slow, raise stallTimeoutSeconds or give the pod more CPU."
        return Failure(reason, f"{what} The pod restarts; {remedy}")

    def _undrained(self) -> Failure:
        return Failure(
            Reason.ENGINE_STALLED,
            f"The drain did not end within {self._config.drain_timeout_seconds:g} s and was cut off. "
            "If it comes back, report it with the log.",
        )
