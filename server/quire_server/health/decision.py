"""From a heartbeat to the answers of the probes: pure, so that every case is one row of a table in a test.

Called by the health process for each probe, and by the supervisor to tell a stalled engine when it is asked
to end. Knows no clock, file or socket.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.health.heartbeat import Control, Heartbeat, Phase


@dataclass(frozen=True)
class Thresholds:
    """How long is too long, in seconds."""

    stall: float
    canary_interval: float

    @property
    def proof_expiry(self) -> float:
        """An idle engine proves itself every interval, a busy one by steps. Half a stall later is late."""
        return self.canary_interval + self.stall / 2


@dataclass(frozen=True)
class Answer:
    """One probe's answer; the reason is empty when it is good."""

    reason: str = ""

    @property
    def status(self) -> int:
        """The HTTP status that the kubelet looks at."""
        return 503 if self.reason else 200


@dataclass(frozen=True)
class Verdict:
    """What the three probes say, and the phase and reason that /statusz shows."""

    startup: Answer
    ready: Answer
    live: Answer
    phase: str
    reason: str


_OK = Answer()


def judge(sample: Heartbeat | None, control: Control, now: float, thresholds: Thresholds) -> Verdict:
    """The verdict at the time `now`."""
    if sample is None or sample.phase is not Phase.SERVING:
        phase = "warming" if sample is not None and sample.phase is Phase.WARMING else "loading"
        waiting = Answer("Loading" if phase == "loading" else "Warming")
        verdict = Verdict(startup=waiting, ready=waiting, live=_OK, phase=phase, reason="")
    else:
        verdict = _judge_serving(sample, now, thresholds)
    if control.failed:
        return Verdict(verdict.startup, Answer(control.failed), verdict.live, "failed", control.failed)
    if control.draining:
        return Verdict(verdict.startup, Answer("Draining"), _OK, "draining", verdict.reason)
    return verdict


def _judge_serving(sample: Heartbeat, now: float, thresholds: Thresholds) -> Verdict:
    silence = seconds_without_progress(sample, now)
    live = Answer("EngineStalled") if silence >= thresholds.stall else _OK
    if silence >= thresholds.stall / 2:
        return Verdict(_OK, Answer("EngineStalled"), live, "stalled", "EngineStalled")
    reason = sample.reason
    if not reason and now - sample.proof_at > thresholds.proof_expiry:
        reason = "CanaryStale"
    return Verdict(_OK, Answer(reason), live, "serving", reason)


def seconds_without_progress(sample: Heartbeat, now: float) -> float:
    """How long the engine owes a sign of life: a step when it has work, a heartbeat when it has none."""
    return now - (sample.progress_at if sample.work_pending else sample.written_at)


def statusz(sample: Heartbeat | None, verdict: Verdict, now: float, version: str) -> dict[str, object]:
    """The public status document."""
    if sample is None:
        sample = _UNBORN._replace(written_at=now, started_at=now)
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
    """Seconds until the rest is loaded at the mean speed so far."""
    if sample.phase is not Phase.LOADING or not sample.loaded_bytes:
        return None
    seconds_per_byte = (now - sample.started_at) / sample.loaded_bytes
    return round((sample.total_bytes - sample.loaded_bytes) * seconds_per_byte, 1)


_UNBORN = Heartbeat(
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
