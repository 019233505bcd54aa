"""Asks every replica each second for its load, which has the requests of other gateways too, for the states
of its LoRA adapters, and for the length of its context.

A replica that does not answer in time is asked again a second later; numbers that are old do not count.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping

import aiohttp
import orjson

from quire_gateway.replica import STALE_SECONDS, Replica
from quire_gateway.replicas import ReplicaTable

PERIOD_SECONDS = 1.0
TIMEOUT_SECONDS = 0.2


class LoadPoller:
    """The polls of all replicas."""

    def __init__(self, table: ReplicaTable, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                await asyncio.gather(*(self._poll(session, one) for one in self._table.replicas()))
                await asyncio.sleep(PERIOD_SECONDS * random.uniform(0.8, 1.2))

    async def _poll(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        try:
            async with session.get(f"{replica.endpoint.health_url}/statusz") as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError):
            return
        if (total := total_load(text)) is not None:
            replica.polled(total, self._clock())
        if (states := adapter_states(text)) is not None:
            replica.polled_adapters(states, self._clock())
        replica.context_length = context_length(text) or replica.context_length


def total_load(text: bytes) -> int | None:
    """The requests that wait or run at a replica, by its /statusz; None where that is not known now."""
    try:
        status = orjson.loads(text)
        if status["sampleAge"] > STALE_SECONDS:
            return None
        return max(0, int(status["queued"]) + int(status["running"]))
    except (ValueError, KeyError, TypeError):
        return None


def adapter_states(text: bytes) -> Mapping[str, str] | None:
    """The states of the adapters of a replica by their names, by its /statusz; None where it does not say."""
    try:
        return {str(one["name"]): str(one["state"]) for one in orjson.loads(text)["adapters"]}
    except (ValueError, KeyError, TypeError):
        return None


def context_length(text: bytes) -> int | None:
    """Tokens that a prompt and its answer have together at most, by /statusz; None where it does not say."""
    try:
        return max(0, int(orjson.loads(text)["effective"]["maxModelLen"])) or None
    except (ValueError, KeyError, TypeError):
        return None
