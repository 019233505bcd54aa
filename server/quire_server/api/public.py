"""The small routes: models, tokenize, detokenize, health, metrics, version.

Called by `app`. `/health` is for people, dashboards and load balancers; Kubernetes asks the health process.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from quire_server import __version__, metrics
from quire_server.api.admission import MEMORY_LIMIT, SHED_FROM, Newcomer
from quire_server.api.chat_messages import parse_messages
from quire_server.api.errors import ApiError
from quire_server.api.fields import Fields, parse_object
from quire_server.api.house import House
from quire_server.api.reply import MAX_BODY_BYTES, Reply
from quire_server.core.request import Request, SamplingParams
from quire_server.engine.client import EngineGoneError
from quire_server.health import decision

_DEEP_TOKENS = 4
_DEEP_TIMEOUT_SECONDS = 30.0


async def models(house: House, reply: Reply) -> None:
    """/v1/models and /v1/models/NAME."""
    max_model_len = house.engine.info.max_model_len if house.engine.connected else None
    cards = {
        name: {
            "id": name,
            "object": "model",
            "created": house.created,
            "owned_by": "quire",
            "max_model_len": max_model_len,
        }
        for name in house.served_names
    }
    wanted = reply.scope["path"].removeprefix("/v1/models").strip("/")
    if not wanted:
        await reply.json({"object": "list", "data": list(cards.values())})
        return
    house.check_model(wanted)
    await reply.json(cards[wanted])


async def tokenize(house: House, reply: Reply) -> None:
    """/tokenize: a prompt, or the messages of a chat, as the model sees it."""
    fields = Fields(parse_object(await reply.body()))
    _check_model(house, fields)
    prompt = fields.take("prompt")
    if prompt is None:
        messages = parse_messages(fields)
        fields.end()
        async with house.side_door.pass_through():
            tokens = await house.tokenize_chat(messages)
    else:
        if not isinstance(prompt, str):
            raise fields.error("prompt", "must be a string")
        special = fields.boolean("add_special_tokens", default=True)
        fields.end()
        async with house.side_door.pass_through():
            tokens = await house.tokenize(prompt, special=special)
    limit = house.engine.info.max_model_len if house.engine.connected else None
    await reply.json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})


async def detokenize(house: House, reply: Reply) -> None:
    """/detokenize: the text of token ids, special tokens included."""
    fields = Fields(parse_object(await reply.body()))
    _check_model(house, fields)
    tokens = fields.integers("tokens", MAX_BODY_BYTES, house.tokenizer.vocab_size)
    fields.end()
    async with house.side_door.pass_through():
        text = await house.detokenize(tokens, skip_special_tokens=False)
    await reply.json({"prompt": text})


def _check_model(house: House, fields: Fields) -> None:
    model = fields.text("model", "", 256)
    if model:
        house.check_model(model)


async def version(house: House, reply: Reply) -> None:
    """/version."""
    await reply.json({"version": __version__})


async def reset_prefix_cache(house: House, reply: Reply) -> None:
    """/reset_prefix_cache: no later request finds what was computed before, in any tier."""
    house.engine.reset_prefix_cache()
    await reply.json({})


async def exposition(house: House, reply: Reply) -> None:
    """/metrics."""
    await reply.whole(200, house.metrics.exposition(), metrics.CONTENT_TYPE)


async def health(house: House, reply: Reply) -> None:
    """/health: 200 while requests can be answered, 503 otherwise; `status` says degraded already before."""
    checks = _checks(house)
    body: dict[str, object] = {
        "status": "degraded" if False in checks.values() else "healthy",
        "checks": checks,
        "version": __version__,
    }
    serving = checks["model_loaded"] is True and checks["progress_ok"] is True
    if b"deep=true" in reply.scope["query_string"].split(b"&"):
        _require_key(house, reply)
        try:
            body["completion"] = await _complete_now(house)
        except (EngineGoneError, TimeoutError):
            serving, body["status"] = False, "degraded"
            body["completion"] = None
    await reply.json(body, 200 if serving else 503)


def _require_key(house: House, reply: Reply) -> None:
    headers = dict(reply.scope["headers"])
    if house.keys.required and house.keys.client_of(headers.get(b"authorization", b"")) is None:
        raise unauthorized()


def unauthorized() -> ApiError:
    """The answer to a request without a valid key."""
    return ApiError(
        401,
        "A valid API key is needed: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )


def _checks(house: House) -> dict[str, bool | None]:
    sample = house.state.read_heartbeat()
    verdict = decision.judge(sample, house.state.read_control(), time.monotonic(), house.thresholds)
    connected, stats = house.engine.connected, house.engine.stats
    queue_ok = True
    if connected:
        load = house.admission.load(house.engine.info, stats)
        queue_ok = load.fullness <= SHED_FROM
    return {
        "gpu_available": None,  # no device is used but the CPU
        "model_loaded": connected,
        "memory_ok": stats.kv_utilization <= MEMORY_LIMIT,
        "queue_ok": queue_ok,
        "progress_ok": not verdict.reason,
    }


async def _complete_now(house: House) -> dict[str, object]:
    """A real completion through scheduler and model, admitted like any other."""
    begun_at = time.monotonic()
    info = house.engine.info
    place = house.admission.reserve(Newcomer(), info, house.engine.stats)
    try:
        sampling = SamplingParams(max_tokens=_DEEP_TOKENS, temperature=0.0, ignore_eos=True)
        request = Request(f"health-{uuid.uuid4().hex}", (info.vocab_size // 2,), sampling, arrival=begun_at)
        num_tokens = 0
        async with asyncio.timeout(_DEEP_TIMEOUT_SECONDS), house.engine.submit(request) as events:
            while num_tokens < _DEEP_TOKENS:
                num_tokens += len((await events.next()).token_ids)
    finally:
        place.leave()
    return {"tokens": num_tokens, "seconds": round(time.monotonic() - begun_at, 4)}
