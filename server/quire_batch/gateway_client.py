"""Asks the gateway for one line, in the name of the client that has submitted it."""

from __future__ import annotations

import aiohttp
from yarl import URL

from quire_batch.identity import DELEGATION_HEADER
from quire_batch.outcome import Answer
from quire_batch.records import Work

_CONNECT_SECONDS = 5.0
_WHOLE_SECONDS = 1800.0  # the gateway's own limits come first
_MAX_ANSWER_BYTES = 8 << 20  # a worker holds as many answers as it has lines in flight
_KEPT = ("retry-after", "x-should-retry")


class GatewayClient:
    """The connections to the gateway."""

    def __init__(self, url: str) -> None:
        self._url = url
        timeout = aiohttp.ClientTimeout(total=_WHOLE_SECONDS, sock_connect=_CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def ask(self, work: Work) -> Answer:
        """What the gateway answers; of status 0 where it does not."""
        request_id = f"{work.batch_id}-{work.number}"
        headers = {
            "content-type": "application/json",
            DELEGATION_HEADER: work.delegation,
            "x-request-id": request_id,
        }
        url = URL(self._url + work.endpoint, encoded=True)
        try:
            async with self._session.post(
                url, data=work.body, headers=headers, allow_redirects=False
            ) as response:
                body = await response.content.read(_MAX_ANSWER_BYTES + 1)
                while not response.content.at_eof() and len(body) <= _MAX_ANSWER_BYTES:
                    body += await response.content.read(_MAX_ANSWER_BYTES + 1 - len(body))
        except (aiohttp.ClientError, TimeoutError) as error:
            return Answer(0, request_id, repr(error).encode(), {})
        if len(body) > _MAX_ANSWER_BYTES:
            message = b'{"error": {"message": "The answer is too long.", "code": "answer_too_long"}}'
            return Answer(413, request_id, message, {})
        kept = {name: response.headers[name] for name in _KEPT if name in response.headers}
        return Answer(response.status, request_id, body, kept)
