"""/health: what is well and what is not, each with its numbers, for people, dashboards and load balancers.

Called by `app`. Kubernetes asks the health process instead, which answers when this one cannot.
"""

from __future__ import annotations

import time
from urllib.parse import parse_qsl

from quire_server import __version__
from quire_server.api.admission import MEMORY_LIMIT, SHED_FROM
from quire_server.api.auth import require_key
from quire_server.api.deep_check import INTERVAL_SECONDS, NUM_TOKENS, TIMEOUT_SECONDS
from quire_server.api.errors import bad_field
from quire_server.api.house import House
from quire_server.api.reply import Reply
from quire_server.health import decision

Json = dict[str, object]


async def health(house: House, reply: Reply) -> None:
    """200 while requests can be answered, 503 otherwise; `status` says degraded already before."""
    checks, numbers = _checks(house)
    serving = checks["model_loaded"] is True and checks["progress_ok"] is True
    body: Json = {}
    if _is_deep(reply.scope["query_string"]):
        require_key(house.keys, reply.scope)
        outcome = await house.deep_check.outcome()
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
    await reply.json(body, 200 if serving else 503)


def _is_deep(query: bytes) -> bool:
    """A probe that asks for more than it gets would be believed: what is not understood is refused."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    asked = [value for name, value in pairs if name == "deep"]
    if len(asked) > 1 or not set(asked) <= {"true", "false"}:
        raise bad_field("deep", "must be true or false")
    return asked == ["true"]


def _checks(house: House) -> tuple[dict[str, bool | None], dict[str, Json]]:
    now, sample = time.monotonic(), house.state.read_heartbeat()
    verdict = decision.judge(sample, house.state.read_control(), now, house.thresholds)
    connected, stats = house.engine.connected, house.engine.stats
    load = house.admission.load(house.engine.info, stats) if connected else None
    fullness = load.fullness if load is not None else 0.0
    silence = 0.0 if sample is None else max(decision.seconds_without_progress(sample, now), 0.0)
    gpus = int(connected and bool(house.engine.info.gpu_memory))
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
            "kv_blocks": house.engine.info.num_blocks if connected else 0,
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
            "limit": house.thresholds.stall / 2,
        },
    }
    return checks, numbers
