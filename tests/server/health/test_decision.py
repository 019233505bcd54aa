"""The verdict of the probes, as a table."""

import pytest

from quire_server.health.decision import Thresholds, judge, statusz
from quire_server.health.heartbeat import Control, Heartbeat, Phase, Process

NOW = 1000.0
LIMITS = Thresholds(stall=60.0, canary_interval=60.0)
BEATS = dict.fromkeys(Process, NOW - 0.5)
IDLE = Heartbeat(
    written_at=NOW - 0.5,
    phase=Phase.SERVING,
    work_pending=False,
    queued=0,
    running=0,
    steps=10,
    loaded_bytes=100,
    total_bytes=100,
    started_at=NOW - 100,
    load_seconds=4.0,
    progress_at=NOW - 0.5,
    proof_at=NOW - 10,
    kv_utilization=0.25,
    reason="",
    requested_at=NOW - 30,
)


def beat(**changes):
    return IDLE._replace(**changes)


BUSY = {"work_pending": True, "running": 3}
LOADING = beat(phase=Phase.LOADING, loaded_bytes=25, started_at=NOW - 10, load_seconds=0.0)


@pytest.mark.parametrize(
    ("sample", "control", "startup", "ready", "live", "phase"),
    [
        (None, Control(), 503, "Loading", 200, "loading"),
        (LOADING, Control(), 503, "Loading", 200, "loading"),
        (
            beat(phase=Phase.LOADING, written_at=0.0, progress_at=0.0),
            Control(),
            503,
            "Loading",
            200,
            "loading",
        ),
        (beat(phase=Phase.WARMING), Control(), 503, "Warming", 200, "warming"),
        (IDLE, Control(), 200, "", 200, "serving"),
        (beat(**BUSY, progress_at=NOW - 29), Control(), 200, "", 200, "serving"),
        (beat(**BUSY, progress_at=NOW - 31), Control(), 200, "EngineStalled", 200, "stalled"),
        (beat(**BUSY, progress_at=NOW - 61), Control(), 200, "EngineStalled", 503, "stalled"),
        # An idle engine needs no steps, only its heartbeat.
        (beat(progress_at=NOW - 500), Control(), 200, "", 200, "serving"),
        (beat(written_at=NOW - 61), Control(), 200, "EngineStalled", 503, "stalled"),
        # A full queue stays ready.
        (beat(**BUSY, queued=10_000), Control(), 200, "", 200, "serving"),
        # Proof of inference: stale after the interval and half a stall, or wrong.
        (beat(proof_at=NOW - 89), Control(), 200, "", 200, "serving"),
        (beat(proof_at=NOW - 91), Control(), 200, "CanaryStale", 200, "serving"),
        (beat(reason="CanaryMismatch"), Control(), 200, "CanaryMismatch", 200, "serving"),
        # Draining: not ready and alive, even with an engine that stopped.
        (IDLE, Control(draining=True), 200, "Draining", 200, "draining"),
        (beat(**BUSY, progress_at=NOW - 99), Control(draining=True), 200, "Draining", 200, "draining"),
        (IDLE, Control(failed="EngineCrashed"), 200, "EngineCrashed", 200, "failed"),
        (LOADING, Control(failed="LoadStalled"), 503, "LoadStalled", 200, "failed"),
    ],
)
def test_the_probes_say_what_the_heartbeat_means(sample, control, startup, ready, live, phase):
    verdict = judge(sample, control, BEATS, NOW, LIMITS)
    assert verdict.startup.status == startup
    assert (verdict.ready.reason, verdict.ready.status) == (ready, 503 if ready else 200)
    assert verdict.live.status == live
    assert verdict.phase == phase


@pytest.mark.parametrize(
    ("process", "seconds", "ready", "live"),
    [
        (Process.API, 2.9, "", ""),
        (Process.API, 3.0, "ProcessStalled", ""),
        (Process.API, 60.0, "ProcessStalled", "ProcessStalled"),
        (Process.SUPERVISOR, 60.0, "ProcessStalled", "ProcessStalled"),
        (Process.ENGINE, 3.0, "EngineStalled", ""),
        (Process.ENGINE, 60.0, "EngineStalled", "EngineStalled"),
        (Process.API, NOW, "ProcessStalled", "ProcessStalled"),
    ],
)
def test_each_process_has_to_run(process, seconds, ready, live):
    beats = BEATS | {process: NOW - seconds}
    verdict = judge(IDLE, Control(), beats, NOW, LIMITS)
    assert (verdict.ready.reason, verdict.live.reason) == (ready, live)
    body = statusz(IDLE, verdict, NOW, "1")
    assert (body["reason"], body["silent"]) == (ready, [process.name.lower()] if ready else [])
    if ready:
        del beats[process]
        never = judge(IDLE, Control(), beats, NOW, LIMITS)
        assert (never.ready.status, never.live.status) == (503, 503), "one that never ran is no better"


def test_a_silent_process_does_not_shorten_a_load_or_a_drain():
    assert judge(LOADING, Control(), {}, NOW, LIMITS).live.status == 200
    assert judge(IDLE, Control(draining=True), {}, NOW, LIMITS).live.status == 200


def test_statusz_has_progress_and_an_estimate_while_loading():
    body = statusz(LOADING, judge(LOADING, Control(), BEATS, NOW, LIMITS), NOW, "1")
    assert (body["loadedBytes"], body["totalBytes"], body["etaSeconds"]) == (25, 100, 30.0)
    assert body["loadSeconds"] is None


def test_statusz_has_the_load_once_serving():
    sample = beat(queued=2, running=3, work_pending=True)
    assert statusz(sample, judge(sample, Control(), BEATS, NOW, LIMITS), NOW, "0.1.0") == {
        "phase": "serving",
        "reason": "",
        "silent": [],
        "loadedBytes": 100,
        "totalBytes": 100,
        "etaSeconds": None,
        "loadSeconds": 4.0,
        "queued": 2,
        "running": 3,
        "kvUtilization": 0.25,
        "secondsSinceRequest": 30.0,
        "transferDegraded": False,
        "sampleAge": 0.5,
        "version": "0.1.0",
    }


def test_statusz_has_the_same_fields_before_the_first_heartbeat():
    silent = statusz(None, judge(None, Control(), BEATS, NOW, LIMITS), NOW, "1")
    spoken = statusz(IDLE, judge(IDLE, Control(), BEATS, NOW, LIMITS), NOW, "1")
    assert silent.keys() == spoken.keys()
    assert (silent["phase"], silent["totalBytes"], silent["etaSeconds"]) == ("loading", 0, None)


def test_a_silent_rank_and_one_that_did_not_echo_a_step_are_named():
    limits = Thresholds(stall=60.0, canary_interval=60.0, ranks=range(3))
    beats = {**BEATS, 1: NOW - 0.5, 2: NOW - 4}
    verdict = judge(beat(), Control(), beats, NOW, limits)
    assert (verdict.ready.reason, verdict.live.reason, verdict.silent) == ("ProcessStalled", "", ("rank 2",))
    assert judge(beat(), Control(), {**beats, 2: NOW}, NOW, limits).ready.reason == ""
    ending = judge(beat(lost_rank=1), Control(failed="EngineCrashed"), {**beats, 2: NOW}, NOW, limits)
    assert statusz(beat(), ending, NOW, "1")["silent"] == ["rank 1"]
