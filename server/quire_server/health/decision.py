"""From a heartbeat to the results of the probes, as pure functions, so that every case is one row of a test
table.

The health process uses it for each probe, the supervisor to recognise a stalled engine before a drain. Knows
no clock, file or socket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire_server.health.heartbeat import Beats, Control, Heartbeat, Phase, Process

# The readiness probe of the pod fails twice, three seconds apart: out of rotation within ten seconds.
_MAX_SILENCE = 3.0


@dataclass(frozen=True)
class Thresholds:
    """Limits in seconds."""

    stall: float
    canary_interval: float
    ranks: range = range(1)  # of this node: processes of the engine

    @property
    def silence(self) -> float:
        """A process without a beat for so long is not ready; for `stall` seconds, it is not alive."""
        return min(_MAX_SILENCE, self.stall / 2)

    @property
    def proof_expiry(self) -> float:
        """Without an answered request for an interval, the engine runs the canary. Half a stall timeout is
        tolerance.
        """
        return self.canary_interval + self.stall / 2


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe; the reason is empty on success."""

    reason: str = ""

    @property
    def status(self) -> int:
        """The HTTP status for the kubelet."""
        return 503 if self.reason else 200


@dataclass(frozen=True)
class Verdict:
    """The results of the three probes, and phase, reason and the processes that are silent for /statusz."""

    startup: ProbeResult
    ready: ProbeResult
    live: ProbeResult
    phase: str
    reason: str
    silent: tuple[str, ...] = ()


_OK = ProbeResult()


def judge(
    sample: Heartbeat | None, control: Control, beats: Beats, now: float, thresholds: Thresholds
) -> Verdict:
    """Evaluate heartbeat and beats at the time `now`."""
    if sample is None or sample.phase is not Phase.SERVING:
        phase = "warming" if sample is not None and sample.phase is Phase.WARMING else "loading"
        waiting = ProbeResult("Loading" if phase == "loading" else "Warming")
        verdict = Verdict(startup=waiting, ready=waiting, live=_OK, phase=phase, reason="")
    else:
        verdict = _judge_serving(sample, beats, now, thresholds)
    lost = [_name(sample.lost_rank)] if sample is not None and sample.lost_rank else []
    lost += [control.killed] if control.killed else []
    if lost:
        verdict = replace(verdict, silent=tuple(dict.fromkeys((*verdict.silent, *lost))))
    if control.failed:
        return replace(verdict, ready=ProbeResult(control.failed), phase="failed", reason=control.failed)
    if control.draining:
        return replace(verdict, ready=ProbeResult("Draining"), live=_OK, phase="draining")
    return verdict


def _judge_serving(sample: Heartbeat, beats: Beats, now: float, thresholds: Thresholds) -> Verdict:
    waited = seconds_without_progress(sample, now)
    silent = _silent(beats, now, thresholds.silence, thresholds.ranks)
    dead = _silent(beats, now, thresholds.stall, thresholds.ranks)
    if stalled := _stall(waited >= thresholds.stall / 2, silent):
        live = ProbeResult(_stall(waited >= thresholds.stall, dead))
        names = tuple(map(_name, silent))
        return Verdict(_OK, ProbeResult(stalled), live, "stalled", stalled, names)
    reason = sample.reason
    if not reason and now - sample.proof_at > thresholds.proof_expiry:
        reason = "CanaryStale"
    return Verdict(_OK, ProbeResult(reason), _OK, "serving", reason)


def _silent(beats: Beats, now: float, seconds: float, ranks: range) -> tuple[Process | int, ...]:
    """The processes without a beat for so long, or without any."""
    # The first rank is the engine itself; a node without it has no API either.
    expected = (*Process, *ranks[1:]) if 0 in ranks else (Process.SUPERVISOR, *ranks)
    return tuple(process for process in expected if now - beats.get(process, 0.0) >= seconds)


def _name(process: Process | int) -> str:
    return f"rank {process}" if isinstance(process, int) else process.name.lower()


def _stall(is_stuck: bool, silent: tuple[Process | int, ...]) -> str:
    """The reason of a stall, "" for none. `is_stuck`: the engine runs, but makes no step."""
    if is_stuck or Process.ENGINE in silent:
        return "EngineStalled"
    return "ProcessStalled" if silent else ""


def seconds_without_progress(sample: Heartbeat, now: float) -> float:
    """Seconds since the last step while there is work, or since the last heartbeat while there is none."""
    return now - (sample.progress_at if sample.work_pending else sample.written_at)


def statusz(sample: Heartbeat | None, verdict: Verdict, now: float, version: str) -> dict[str, object]:
    """The JSON document of /statusz."""
    if sample is None:
        sample = _NO_HEARTBEAT._replace(written_at=now, started_at=now)
    return {
        "phase": verdict.phase,
        "reason": verdict.reason,
        "silent": list(verdict.silent),
        "loadedBytes": sample.loaded_bytes,
        "totalBytes": sample.total_bytes,
        "etaSeconds": _eta(sample, now),
        "loadSeconds": round(sample.load_seconds, 3) if sample.load_seconds else None,
        "queued": sample.queued,
        "running": sample.running,
        "kvUtilization": round(sample.kv_utilization, 4),
        "secondsSinceRequest": _seconds_since_request(sample, now),
        "transferDegraded": sample.transfer_degraded,
        "sampleAge": round(max(0.0, now - sample.written_at), 3),
        "version": version,
    }


def _seconds_since_request(sample: Heartbeat, now: float) -> float | None:
    """Seconds since there was a request, or since the server began to serve."""
    return round(max(0.0, now - sample.requested_at), 1) if sample.phase is Phase.SERVING else None


def _eta(sample: Heartbeat, now: float) -> float | None:
    """Seconds until the weights are loaded, at the mean speed so far."""
    if sample.phase is not Phase.LOADING or not sample.loaded_bytes:
        return None
    seconds_per_byte = (now - sample.started_at) / sample.loaded_bytes
    return round((sample.total_bytes - sample.loaded_bytes) * seconds_per_byte, 1)


_NO_HEARTBEAT = Heartbeat(
    written_at=0.0,
    phase=Phase.LOADING,
    work_pending=False,
    queued=0,
    running=0,
    steps=0,
    loaded_bytes=0,
    total_bytes=0,
    started_at=0.0,
    load_seconds=0.0,
    progress_at=0.0,
    proof_at=0.0,
    kv_utilization=0.0,
    reason="",
)
