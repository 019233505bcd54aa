"""Asks a route's classifier which class a request is of, for 10 ms at most.

A classifier is a Service of the route's namespace that answers `{"class": NAME}`. It never breaks a request:
where it is late, away or wrong the request has no class, and rules that ask for one do not match. Its answers
are counted by how they ended.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import aiohttp
import orjson

from quire_gateway.llm_route import LLMRoute
from quire_gateway.metrics import Metrics
from quire_gateway.openai.calls import Call, estimated_tokens
from quire_gateway.public_addresses import AddressGuard

BUDGET_SECONDS = 0.010
_CHARACTERS = 4096  # of each end of a prompt
_PARTS = 16  # a message has two
_MAX_ANSWER_BYTES = 4096
_IDLE_SECONDS = 60.0
_CLASS = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


class Classifier:
    """The connections to all classifiers of one gateway."""

    def __init__(self, guard: AddressGuard, metrics: Metrics, budget: float = BUDGET_SECONDS) -> None:
        self._metrics = metrics
        self._budget = budget
        self._connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=guard.socket
        )
        self._session = aiohttp.ClientSession(
            connector=self._connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def classify(self, route: LLMRoute | None, call: Call) -> str:
        """The class of a request, "" where it has none."""
        if route is None or route.classifier is None:
            return ""
        try:
            async with asyncio.timeout(self._budget):
                found, outcome = await self._ask(route.classifier.url(route.namespace), call)
        except TimeoutError:
            found, outcome = "", "timeout"
        except aiohttp.ClientError:
            found, outcome = "", "error"
        self._metrics.classified(call.model, outcome)
        return found

    async def _ask(self, url: str, call: Call) -> tuple[str, str]:
        """The class, and how the question ended. Raises TimeoutError, aiohttp.ClientError."""
        async with self._session.post(
            url, data=_question(call), headers={"content-type": "application/json"}, allow_redirects=False
        ) as response:
            answer = b""
            while data := await response.content.read(_MAX_ANSWER_BYTES):
                answer += data
                if len(answer) > _MAX_ANSWER_BYTES:
                    return "", "invalid"
            if response.status != 200:
                return "", "error"
        found = _class_of(answer)
        return found, "classified" if found else "invalid"


def _question(call: Call) -> bytes:
    """What a classifier is asked by: both ends of the prompt, its length, and whether there are tools."""
    return orjson.dumps(
        {
            "model": call.model,
            "promptStart": _text(call.prompt[:_PARTS])[:_CHARACTERS],
            "promptEnd": _text(call.prompt[-_PARTS:])[-_CHARACTERS:],
            "promptTokens": estimated_tokens(call),
            "tools": call.has_tools,
        }
    )


def _text(parts: Sequence[str]) -> str:
    """Parts of a prompt as JSON can have them, which has no halves of characters."""
    ends = (one if len(one) <= 2 * _CHARACTERS else one[:_CHARACTERS] + one[-_CHARACTERS:] for one in parts)
    return "\n".join(ends).encode("utf-8", "replace").decode("utf-8")


def _class_of(answer: bytes) -> str:
    """The class that an answer names, "" of anything else."""
    try:
        document = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return ""
    name = document.get("class") if isinstance(document, dict) else None
    return name if isinstance(name, str) and _CLASS.fullmatch(name) else ""
