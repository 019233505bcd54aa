"""/health: the checks of the server, each with its numbers, for people, dashboards and load balancers.

Kubernetes probes the health process instead, which answers when this one cannot.
"""

from __future__ import annotations

import time
from urllib.parse import parse_qsl

from quire_http.errors import bad_field
from quire_http.exchange import HttpExchange
from quire_server import __version__
from quire_server.api.admission import MEMORY_LIMIT, SHED_FROM
from quire_server.api.auth import require_key
from quire_server.api.context import ServerContext
from quire_server.api.deep_check import INTERVAL_SECONDS, NUM_TOKENS, TIMEOUT_SECONDS
from quire_server.health import decision

Json = dict[str, object]


async def health(context: ServerContext, exchange: HttpExchange) -> None:
    """200 while requests can be answered, 503 otherwise; `status` says degraded already before."""
    checks, numbers = _checks(context)
    serving = checks["model_loaded"] is True and checks["progress_ok"] is True
    body: Json = {}
    if _is_deep(exchange.scope["query_string"]):
        require_key(context.keys, exchange.scope)
        outcome = await context.deep_check.outcome()
        checks["completion_ok"] = not outcome.failure
        numbers["completion_ok"] = {
            "tokens": 0 if outcome.failure else NUM_TOKENS,
            "seconds": round(outcome.seconds, 4),
            "age_seconds": round(time.monotonic() - outcome.ended_at, 3),
            "timeout_seconds": TIMEOUT_SECONDS,
            "interval_seconds": INTERVAL_SECONDS,
            "failure": outcome.failure,
        }
        serving &= not outcome.failure
    body["status"] = "degraded" if False in checks.values() else "healthy"
    body |= {"checks": checks, "numbers": numbers, "version": __version__}
    await exchange.json(body, 200 if serving else 503)


def _is_deep(query: bytes) -> bool:
    """A query that is not understood is refused: a probe must not believe that it got more than it did."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    asked = [value for name, value in pairs if name == "deep"]
    if len(asked) > 1 or not set(asked) <= {"true", "false"}:
        raise bad_field("deep", "must be true or false")
    return asked == ["true"]


def _checks(context: ServerContext) -> tuple[dict[str, bool | None], dict[str, Json]]:
    now, sample = time.monotonic(), context.state.read_heartbeat()
    control, beats = context.state.read_control(), context.state.read_beats()
    verdict = decision.judge(sample, control, beats, now, context.thresholds)
    connected, stats = context.engine.connected, context.engine.stats
    load = context.admission.load(context.engine.info, stats) if connected else None
    fullness = load.fullness if load is not None else 0.0
    silence = 0.0 if sample is None else max(decision.seconds_without_progress(sample, now), 0.0)
    gpus = int(connected and bool(context.engine.info.gpu_memory))
    checks: dict[str, bool | None] = {
        "gpu_available": True if gpus else None,  # None: on the CPU; a fault of the GPU ends the engine
        "model_loaded": connected,
        "memory_ok": stats.kv_utilization <= MEMORY_LIMIT,
        "queue_ok": fullness <= SHED_FROM,
        "progress_ok": not verdict.reason,
    }
    numbers: dict[str, Json] = {
        "gpu_available": {"gpus": gpus},
        "model_loaded": {
            "loaded_bytes": sample.loaded_bytes if sample is not None else 0,
            "total_bytes": sample.total_bytes if sample is not None else 0,
        },
        "memory_ok": {
            "kv_utilization": round(stats.kv_utilization, 4),
            "kv_blocks": context.engine.info.num_blocks if connected else 0,
            "limit": MEMORY_LIMIT,
        },
        "queue_ok": {
            "running": stats.running,
            "waiting": load.depth if load is not None else 0,
            "max_queued": load.max_queued if load is not None else 0,
            "fullness": round(fullness, 4),
            "limit": SHED_FROM,
        },
        "progress_ok": {
            "phase": verdict.phase,
            "reason": verdict.reason,
            "seconds_without_progress": round(silence, 3),
            "limit": context.thresholds.stall / 2,
        },
    }
    return checks, numbers
