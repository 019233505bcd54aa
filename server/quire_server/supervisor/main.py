"""The supervisor's loop: one thread that waits for signals and looks at the heartbeat four times a second.

Called by `quire-server serve`. SIGTERM drains: the API process finishes its streams and exits, then the
rest is ended and the exit code is 0. Any other end of a child ends the server, with a reason in the
termination log.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire_server import exits
from quire_server.config import ServeConfig
from quire_server.exits import Failure, Reason
from quire_server.health import decision
from quire_server.health.decision import Thresholds
from quire_server.health.heartbeat import Control, SharedState
from quire_server.supervisor.children import Children
from quire_server.supervisor.watch import Ending, LoadLimits, ending_of_child, watch_load

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_DRAIN_MARGIN_SECONDS = 3.0  # of the 5 s that the pod's grace period leaves after the drain's own time
_BETWEEN_SIGNALS_SECONDS = 0.05  # two pending SIGTERMs would be one
# A thread of the engine waits for the others some 250 times a step, mostly for microseconds: to fall asleep
# each time costs a third of the speed. After a fraction of a millisecond it does, so that a pod that waits
# costs nothing, and the API process finds a free CPU between two steps.
_OPENMP_SPINS = "10000"
# For the API process to tell its clients that the engine is gone: those that wait, and those that still come
# because nobody has told them yet. Asked to end, it hangs up within a second.
_LAST_WORDS_SECONDS = 1.0
_CUT_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_ENDING = (signal.SIGTERM, signal.SIGINT)

API, ENGINE, HEALTH = "API", "engine", "health"


def serve(config: ServeConfig, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a server until it ends; returns the exit code. `arguments` are what the children parse again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # Memory-backed where there is such a place, so that a heartbeat never waits for a disk.
    shm = Path("/dev/shm")
    run_dir = Path(tempfile.mkdtemp(prefix="quire-", dir=shm if shm.is_dir() else None))
    children = Children()
    try:
        supervisor = Supervisor(config, SharedState.create(run_dir), children, run_dir)
        ending = supervisor.run([str(run_dir), *arguments], environ)
    finally:
        children.kill_all()
        shutil.rmtree(run_dir, ignore_errors=True)
    logger.info("ended", extra={"exit_code": ending.exit_code})
    return ending.exit_code


class Supervisor:
    """The processes of one server and what they agreed on."""

    def __init__(self, config: ServeConfig, state: SharedState, children: Children, run_dir: Path) -> None:
        self._config = config
        self._state = state
        self._children = children
        self._run_dir = run_dir
        self._limits = LoadLimits(config.startup_timeout_seconds, config.load_stall_timeout_seconds)
        self._thresholds = Thresholds(config.stall_timeout_seconds, config.canary_interval_seconds)

    def run(self, arguments: Sequence[str], environ: Mapping[str, str]) -> Ending:
        """Start everything and watch it to its end."""
        patient = {"GOMP_SPINCOUNT": _OPENMP_SPINS, **environ}
        self._children.spawn(HEALTH, "quire_server.health", arguments, environ)
        self._children.spawn(ENGINE, "quire_server.engine", arguments, patient)
        self._children.spawn(API, "quire_server.api", arguments, environ)
        started_at = time.monotonic()
        while True:
            if self._wait_for_signal(_TICK_SECONDS):
                return self._drain()
            ending = self._look_at_children()
            if ending is None:
                sample = self._state.read_heartbeat()
                failure = watch_load(sample, started_at, time.monotonic(), self._limits)
                ending = None if failure is None else Ending.of(failure)
            if ending is not None:
                return self._end(ending)

    def _drain(self) -> Ending:
        """Let the streams finish; but an engine that is stalled has nothing to finish."""
        now = time.monotonic()
        sample = self._state.read_heartbeat()
        verdict = decision.judge(sample, Control(), now, self._thresholds)
        if verdict.live.reason:
            return self._end(Ending.of(self._stalled()))
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
                self._children.signal(API, signal.SIGTERM)  # asked twice: now
            for exited in self._children.reap():
                if exited.name != API or exited.wait_status != 0:
                    left_behind = exits.find_failure(self._run_dir)
                    return self._end(ending_of_child(exited.name, exited.wait_status, left_behind))
        return Ending(0, None)

    def _look_at_children(self) -> Ending | None:
        """The ending that a dead child asks for; SIGKILL explains the others, so it comes first."""
        exited = self._children.reap()
        left_behind = exits.find_failure(self._run_dir) if exited else None
        endings = [ending_of_child(child.name, child.wait_status, left_behind) for child in exited]
        return max(endings, key=lambda ending: ending.failure is None, default=None)

    def _end(self, ending: Ending) -> Ending:
        """Write the reason down at once (the kubelet may leave us two seconds); readiness falls, and the API
        process gets a moment to answer with an error what it holds, and what still comes."""
        failure = ending.failure
        if failure is not None:
            exits.write_termination_log(self._config.termination_log, failure)
            logger.error(failure.message, extra={"reason": failure.reason.value})
        else:
            logger.error("a process was ended by SIGKILL: most likely the container is out of memory")
        self._state.write_control(Control(failed="Killed" if failure is None else failure.reason.value))
        self._children.signal(ENGINE, signal.SIGKILL)  # a stalled one would keep them waiting
        self._wait_for_api(_LAST_WORDS_SECONDS)
        for _ in range(2):
            self._children.signal(API, signal.SIGTERM)
            self._wait_for_api(_BETWEEN_SIGNALS_SECONDS)
        self._wait_for_api(_CUT_SECONDS)
        return ending

    def _wait_for_api(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._children.alive(API) and time.monotonic() < deadline:
            time.sleep(0.02)
            self._children.reap()

    def _wait_for_signal(self, timeout: float) -> bool:
        """Wait for a signal; True when it asks us to end."""
        received = signal.sigtimedwait(_SIGNALS, timeout)
        return received is not None and received.si_signo in _ENDING

    def _stalled(self) -> Failure:
        return Failure(
            Reason.ENGINE_STALLED,
            f"The engine did no step for {self._config.stall_timeout_seconds:g} s while work was pending. "
            "The pod restarts; if steps are merely slow, raise stallTimeoutSeconds or give the pod more CPU.",
        )

    def _undrained(self) -> Failure:
        return Failure(
            Reason.ENGINE_STALLED,
            f"The drain did not end within {self._config.drain_timeout_seconds:g} s and was cut off. "
            "If it comes back, report it with the log.",
        )
