"""Tells the other gateways of the install which prompts were sent where, and hears it from them.

Every 200 ms what was chosen since goes to each peer by HTTP, to a port of its own that no client needs. No
message is sent twice and none is waited for: while a peer is slow it gets none, and what does not fit is left
out. What is lost costs a prefill, nothing else. The peers are the pods of the gateway's own headless Service.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aiohttp

from quire_gateway import peer_messages
from quire_gateway.peer_messages import MessageError
from quire_gateway.replicas import ReplicaTable
from quire_http.asgi import Receive, Scope, Send

logger = logging.getLogger(__name__)

PATH = "/peers/v1/prompts"
PORT_NAME = "peers"
PERIOD_SECONDS = 0.2
_MAX_RECORDS = 4096  # that wait; the oldest are left out
TIMEOUT_SECONDS = 5.0  # that a message may take
SAY_SECONDS = 60.0  # between two log lines about messages that are dropped


class Outbox:
    """The choices that peers were not sent yet."""

    def __init__(self) -> None:
        self._records: deque[bytes] = deque(maxlen=_MAX_RECORDS)

    def publish(self, uid: str, digests: Sequence[int]) -> None:
        """A prompt of these blocks was sent to this pod."""
        self._records.append(peer_messages.encode_record(uid, digests))

    def take(self, most_bytes: int) -> list[bytes]:
        """The newest that fit; the others are left out."""
        taken: list[bytes] = []
        while self._records and (most_bytes := most_bytes - len(self._records[-1])) >= 0:
            taken.append(self._records.pop())
        self._records.clear()
        return taken[::-1]


class Peers:
    """Where the other gateways listen, from the EndpointSlices of their Service. ``own``: this pod's name."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._slices: dict[str, frozenset[str]] = {}

    def urls(self) -> frozenset[str]:
        """Of all."""
        return frozenset().union(*self._slices.values())

    def replace(self, slices: Iterable[Mapping[str, Any]], namespace: str) -> None:
        """These are all slices."""
        self._slices = {}
        for body in slices:
            self.put(body)

    def put(self, body: Mapping[str, Any]) -> None:
        """A slice is new or has changed."""
        ports = {one.get("name"): one.get("port") for one in body.get("ports") or ()}
        found = []
        for each in body.get("endpoints") or ():
            ready = (each.get("conditions") or {}).get("ready")
            is_own = (each.get("targetRef") or {}).get("name") == self._own
            if ready and not is_own and each.get("addresses") and PORT_NAME in ports:
                address = each["addresses"][0]
                host = f"[{address}]" if ":" in address else address
                found.append(f"http://{host}:{ports[PORT_NAME]}{PATH}")
        self._slices[body["metadata"]["name"]] = frozenset(found)

    def remove(self, body: Mapping[str, Any]) -> None:
        """A slice is deleted."""
        self._slices.pop(body["metadata"]["name"], None)


class PeerSender:
    """Sends what is in the outbox."""

    def __init__(self, peers: Peers, outbox: Outbox, key: bytes) -> None:
        self._peers = peers
        self._outbox = outbox
        self._key = key
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(PERIOD_SECONDS)
                if records := self._outbox.take(peer_messages.MAX_BYTES // 2):
                    self._send(session, tasks, peer_messages.encode(records, self._key))

    def _send(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup, message: bytes) -> None:
        self._sending = {url: task for url, task in self._sending.items() if not task.done()}
        for url in self._peers.urls() - self._sending.keys():
            self._sending[url] = tasks.create_task(self._post(session, url, message))

    async def _post(self, session: aiohttp.ClientSession, url: str, message: bytes) -> None:
        try:
            async with session.post(url, data=message) as response:
                if response.status != 204:
                    logger.warning("the gateway at %s refuses what it is sent: %d", url, response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.debug("the gateway at %s cannot be sent to: %r", url, error)


class PeerReceiver:
    """The ASGI application of the port for peers."""

    def __init__(self, table: ReplicaTable, key: bytes) -> None:
        self._table = table
        self._key = key
        self._num_dropped, self._said_at = 0, -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one message: 204, or 404, 400 and 408 for what is none."""
        status = 404
        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", PATH):
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    message = await _body(receive)
            except TimeoutError:
                status = 408
            else:
                status = self._apply(message)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    def _apply(self, message: bytes) -> int:
        try:
            records = peer_messages.decode(message, self._key)
        except MessageError as error:
            self._say_dropped(error)
            return 400
        models = {uid: model for model in self._table.all_models() for uid in model.replicas}
        for uid, digests in records:
            if (model := models.get(uid)) is not None:
                model.learn(uid, digests)
        return 204

    def _say_dropped(self, error: MessageError) -> None:
        """Now and then, because who sends such messages may send any number of them."""
        self._num_dropped += 1
        if time.monotonic() - self._said_at >= SAY_SECONDS:
            text = "messages at the port for gateways that were dropped: %d; the last one: %s"
            logger.warning(text, self._num_dropped, error)
            self._num_dropped, self._said_at = 0, time.monotonic()


async def _body(receive: Receive) -> bytes:
    """The body; no more of a long one is kept than shows that it is too long."""
    body = bytearray()
    is_more = True
    while is_more and len(body) <= peer_messages.MAX_BYTES:
        message = await receive()
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
    return bytes(body)
