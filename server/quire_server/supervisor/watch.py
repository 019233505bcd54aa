"""The supervisor's decisions, as pure functions: when loading has taken too long, and how the server ends
when a child has ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from quire_server.health.heartbeat import Heartbeat, Phase
from quire_server.health.rank_states import SILENCE_SECONDS, RankState
from quire_server.termination import KILLED_EXIT_CODE, Failure, Reason

# Before its first heartbeat the engine imports gigabytes of libraries; loading has not begun yet.
_IMPORT_SECONDS = 120.0
# While a model warms up no stream waits for a rank, and a busy node is no reason to begin again.
_WARMING_SILENCE_SECONDS = 10.0


@dataclass(frozen=True)
class LoadLimits:
    """Seconds that loading may take in total, and without progress."""

    startup: float
    stall: float


@dataclass(frozen=True)
class Ending:
    """How the container ends: the exit code, and the content of the termination log (None: nothing).
    `killed`: the process that was ended by SIGKILL.
    """

    exit_code: int
    failure: Failure | None
    killed: str = ""

    @classmethod
    def of(cls, failure: Failure) -> Ending:
        """The ending of a server with this failure."""
        return cls(failure.exit_code, failure)


def watch_load(
    sample: Heartbeat | None,
    started_at: float,
    now: float,
    limits: LoadLimits,
    states: Sequence[RankState] = (),
) -> Failure | None:
    """The failure of a server that has been loading for too long, or None. Times are monotonic seconds.
    ``states``: of the ranks; one that does not run is named, since all others wait for it.
    """
    if sample is not None and sample.phase is Phase.SERVING:
        return None
    loaded = "" if sample is None else f" ({sample.loaded_bytes} of {sample.total_bytes} bytes loaded)"
    absent = _absent(states)
    loaded += f", and {absent}" if absent else ""
    node = "look at the node's CPU and memory, " if absent else ""
    if now - started_at >= limits.startup:
        return Failure(
            Reason.STARTUP_TIMEOUT,
            f"The model was not ready after {limits.startup:g} s{loaded}: {node}raise startupTimeoutSeconds, "
            "give the pod more CPU, or use faster storage.",
        )
    if sample is None:
        is_stalled = now - started_at >= max(limits.stall, _IMPORT_SECONDS)
    else:
        is_stalled = now - sample.progress_at >= limits.stall
    if is_stalled:
        return Failure(
            Reason.LOAD_STALLED,
            f"Loading made no progress for {limits.stall:g} s{loaded}: {node}check the volume that "
            "holds the model, or raise loadStallTimeoutSeconds.",
        )
    return None


def _absent(states: Sequence[RankState]) -> str:
    """Which ranks do not run, and since when."""
    absent = []
    for state in states:
        if state.missing == "NotStarted":
            absent.append(f"rank {state.rank} has not started")
        elif state.missing == "Silent":
            absent.append(f"rank {state.rank} did not run for {state.beat_age or 0.0:.0f} s")
    return ", ".join(absent)


def watch_ranks(sample: Heartbeat | None, states: Sequence[RankState], watched: float) -> Failure | None:
    """The failure of a server one of whose ranks has stopped after the load, or None. ``watched``: seconds
    for which the supervisor has run itself without a pause. Where all processes of a pod were paused, none
    beat, and none is lost.
    """
    if sample is None or sample.phase is Phase.LOADING:
        return None
    limit = SILENCE_SECONDS if sample.phase is Phase.SERVING else _WARMING_SILENCE_SECONDS
    silent = [state for state in states if state.missing == "Silent" and (state.beat_age or 0.0) >= limit]
    if not silent or watched < limit:
        return None
    names = ", ".join(f"rank {state.rank} (last step {state.last_step})" for state in silent)
    return Failure(
        Reason.PROCESS_STALLED,
        f"Of the {len(states)} ranks of the model, this did not run for {limit:g} s: {names}. The "
        "pod restarts; if it comes back, look at the node's CPU and memory.",
    )


def ending_of_child(name: str, wait_status: int, left_behind: Failure | None) -> Ending:
    """How the container ends after the end of a child."""
    if os.WIFSIGNALED(wait_status) and os.WTERMSIG(wait_status) == signal.SIGKILL:
        # Most likely out of memory. The kubelet reports that as OOMKilled unless the termination log hides
        # it.
        return Ending(KILLED_EXIT_CODE, None, killed=name)
    if left_behind is not None:
        return Ending.of(left_behind)
    if os.WIFSIGNALED(wait_status):
        how = f"was ended by {signal.Signals(os.WTERMSIG(wait_status)).name}"
    else:
        how = f"exited with code {os.waitstatus_to_exitcode(wait_status)}"
    return Ending.of(
        Failure(
            Reason.ENGINE_CRASHED,
            f"The {name} process {how} without a reason. The pod restarts; "
            "if it comes back, report it with the log.",
        )
    )
