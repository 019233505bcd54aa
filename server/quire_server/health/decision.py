"""From a heartbeat to the results of the probes, as pure functions, so that every case is one row of a test
table.

The health process uses it for each probe, the supervisor to recognise a stalled engine before a drain. Knows
no clock, file or socket.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.health.heartbeat import Control, Heartbeat, Phase


@dataclass(frozen=True)
class Thresholds:
    """Limits in seconds."""

    stall: float
    canary_interval: float

    @property
    def proof_expiry(self) -> float:
        """An idle engine runs the canary once per interval, a busy one does steps. Half a stall timeout is
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
    """The results of the three probes, and phase and reason for /statusz."""

    startup: ProbeResult
    ready: ProbeResult
    live: ProbeResult
    phase: str
    reason: str


_OK = ProbeResult()


def judge(sample: Heartbeat | None, control: Control, now: float, thresholds: Thresholds) -> Verdict:
    """Evaluate the heartbeat at the time `now`."""
    if sample is None or sample.phase is not Phase.SERVING:
        phase = "warming" if sample is not None and sample.phase is Phase.WARMING else "loading"
        waiting = ProbeResult("Loading" if phase == "loading" else "Warming")
        verdict = Verdict(startup=waiting, ready=waiting, live=_OK, phase=phase, reason="")
    else:
        verdict = _judge_serving(sample, now, thresholds)
    if control.failed:
        return Verdict(verdict.startup, ProbeResult(control.failed), verdict.live, "failed", control.failed)
    if control.draining:
        return Verdict(verdict.startup, ProbeResult("Draining"), _OK, "draining", verdict.reason)
    return verdict


def _judge_serving(sample: Heartbeat, now: float, thresholds: Thresholds) -> Verdict:
    silence = seconds_without_progress(sample, now)
    live = ProbeResult("EngineStalled") if silence >= thresholds.stall else _OK
    if silence >= thresholds.stall / 2:
        return Verdict(_OK, ProbeResult("EngineStalled"), live, "stalled", "EngineStalled")
    reason = sample.reason
    if not reason and now - sample.proof_at > thresholds.proof_expiry:
        reason = "CanaryStale"
    return Verdict(_OK, ProbeResult(reason), live, "serving", reason)


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
        "loadedBytes": sample.loaded_bytes,
        "totalBytes": sample.total_bytes,
        "etaSeconds": _eta(sample, now),
        "loadSeconds": round(sample.load_seconds, 3) if sample.load_seconds else None,
        "queued": sample.queued,
        "running": sample.running,
        "kvUtilization": round(sample.kv_utilization, 4),
        "sampleAge": round(max(0.0, now - sample.written_at), 3),
        "version": version,
    }


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
