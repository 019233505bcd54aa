"""A connection to Valkey, or another server that speaks Redis' protocol, with a deadline for each exchange.

One exchange runs at a time and has all that waits for it. A connection on which anything went wrong is
dropped: what is late on it must not be read as the next reply. The URL with its password is read from a file
for each new connection, and is in no message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as ServerGoneError
from redis.exceptions import TimeoutError as LateError

from quire_gateway.limit_store_url import CA, LimitStoreEmptyError, LimitStoreError, read_url

CONNECT_SECONDS = 1.0  # requests do not wait for this

Call = tuple[str, Sequence[str | int]]  # a key, and the arguments of the script


class LimitStore:
    """The store with one script. ``deadline``: seconds of an exchange.

    The certificate authority of a TLS connection may be beside the URL, as ``ca.crt``; those of the system
    count as well. Certificates are verified always, and an option in the URL cannot change that.
    """

    def __init__(self, url_file: Path, script: str, deadline: float) -> None:
        self._url_file = url_file
        self._deadline = deadline
        self._script = script
        self._client: Redis | None = None
        self._sha = ""

    async def run_script(self, calls: Sequence[Call]) -> list[Any]:
        """The reply to each call; without any, whether the store is there.

        Raises LimitStoreError, and LimitStoreEmptyError where the script is gone that had been loaded.
        """
        seconds = max(CONNECT_SECONDS, self._deadline) if self._client is None else self._deadline
        exchange = asyncio.ensure_future(self._exchange(calls))
        try:
            await asyncio.wait({exchange}, timeout=seconds)
            for _ in range(5):  # where this process was late and not the store, what has arrived is read
                if not exchange.done():
                    await asyncio.sleep(0)
            if not exchange.done():
                raise LimitStoreError("timeout", f"no answer in {seconds:g} s")
            return exchange.result()
        except LateError as error:
            raise LimitStoreError("timeout", str(error)) from None
        except NoScriptError:
            raise LimitStoreEmptyError("empty", "it has lost its data") from None
        except (AuthenticationError, NoPermissionError) as error:
            raise LimitStoreError("auth", str(error)) from None
        except (
            ServerGoneError,
            OSError,
            EOFError,
            RuntimeError,
        ) as error:  # the last: of uvloop, when closed
            raise LimitStoreError("connection", type(error).__name__) from None
        except (RedisError, ValueError, TypeError, AttributeError) as error:  # of odd URLs
            raise LimitStoreError("error", type(error).__name__) from None
        finally:
            if not exchange.done() or exchange.cancelled() or exchange.exception() is not None:
                exchange.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await exchange
                await self.close()

    async def close(self) -> None:
        """Drop the connection."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError, RuntimeError):
                await client.aclose()

    async def _exchange(self, calls: Sequence[Call]) -> list[Any]:
        client = self._client
        if client is None:
            client = self._client = self._new()
            self._sha = await client.script_load(self._script)
        if not calls:
            await client.ping()
            return []
        pipeline = client.pipeline(transaction=False)
        for key, arguments in calls:
            pipeline.evalsha(self._sha, 1, key, *arguments)
        return list(await pipeline.execute())

    def _new(self) -> Redis:
        url, authority = read_url(self._url_file), self._url_file.with_name(CA)
        tls: dict[str, Any] = {}
        if url.startswith("rediss") and authority.exists():
            tls["ssl_ca_certs"] = str(authority)
        return Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=max(CONNECT_SECONDS, self._deadline),
            **tls,
        )
