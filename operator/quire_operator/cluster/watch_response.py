"""The HTTP responses that kopf reads lists and watches from: every object in them can be decoded.

kopf decodes with `json.loads` and ends the process where that raises RecursionError, so what it cannot decode
is flattened before kopf sees it. Knows no kopf.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
from aiohttp.connector import Connection

from quire_operator import json_decoder
from quire_operator.json_decoder import Report


def response_class(report: Report) -> type[aiohttp.ClientResponse]:
    """The class of a session's responses. `report` gets each object that has lost a part."""

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Connection) -> Self:
            await super().start(connection)
            self.content = _Lines(self.content, report)  # type: ignore[assignment]  # it delegates to a StreamReader
            return self

        async def json(self, **_: Any) -> Any:
            return json_decoder.loads(await self.read(), report)

    return Response


class _Lines:
    """A response's content; iterated in chunks, each chunk is whole lines of a watch."""

    def __init__(self, content: aiohttp.StreamReader, report: Report) -> None:
        self._content = content
        self._report = report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """One line with its line feed a chunk; what follows the last line feed comes last."""
        rest = bytearray()
        async for chunk in self._content.iter_chunked(size):
            *lines, last = chunk.split(b"\n")
            for line in lines:
                rest += line
                yield json_decoder.decodable(bytes(rest), self._report) + b"\n"
                rest.clear()
            rest += last
        if rest:
            yield json_decoder.decodable(bytes(rest), self._report)
