"""Thirty hostile requests: each is small for its sender, and was, or could be, expensive for everyone else.

What a client may send with a valid key, in the amounts that one machine can send. A corpus and nothing else:
what the server must hold while they run is in `test_one_request_stalls_nobody`.

`python -m tests.server.serving.hostile_requests PORT KEY NAME SECONDS` sends one of them and prints what came
back, as JSON. Elsewhere such a client has a machine of its own, so here it gives way to the server.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

BODY = 4 << 20  # the longest body there is
EMOJI = "\N{GRINNING FACE}"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
READ_SECONDS = 20.0
MAX_TIMES = 20


@dataclass
class Target:
    """The server that is attacked, as a client with this key, and what came back."""

    port: int
    key: str
    statuses: Counter = field(default_factory=Counter)
    num_sent: int = 0  # requests, or connections, that were sent as far as they go

    def head(self, path, length=None, method="POST"):
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        lines = [f"{method} {path} HTTP/1.1", "host: quire", f"authorization: Bearer {self.key}", framing]
        return "\r\n".join([*lines, "", ""]).encode()

    @contextlib.asynccontextmanager
    async def connected(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def read_status(self, reader):
        """The status of one answer, which is read to the end of its head."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            self.statuses[int(head.split()[1])] += 1

    async def post(self, path, body):
        """A whole request; its answer is read only as far as its status."""
        async with self.connected() as (reader, writer):
            with contextlib.suppress(ConnectionError):
                writer.write(self.head(path, len(body)) + body)
                await writer.drain()
            self.num_sent += 1
            await self.read_status(reader)


Attack = Callable[[Target], Awaitable[None]]


@dataclass(frozen=True)
class HostileRequest:
    """`attack` sends it once; so many clients do so side by side, again and again."""

    name: str
    attack: Attack
    clients: int = 4


def completion(prompt, **more):
    return json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": 1, **more}, ensure_ascii=False
    ).encode()


def filled(prefix, unit, suffix):
    """A body of almost the greatest length, filled with `unit`."""
    times = (BODY - len(prefix) - len(suffix)) // len(unit)
    return prefix + unit * times + suffix


def prompt_of(unit, before=b""):
    return filled(b'{"model":"tiny","max_tokens":1,"prompt":"' + before, unit, b'"}')


def field_of(name, unit, opening=b"[", closing=b"]"):
    head = b'{"model":"tiny","prompt":"x","max_tokens":1,"%s":%s' % (name, opening)
    return filled(head, unit, unit.rstrip(b",") + closing + b"}")


def posting(path, make):
    """An attack that posts one body, which is made on first use."""
    made = []

    async def attack(target):
        if not made:
            made.append(make())
        await target.post(path, made[0])

    return attack


def unfinished(body, count, path=COMPLETIONS, framed=True):
    """An attack that opens connections and never ends their bodies."""

    async def attack(target):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                _, writer = await stack.enter_async_context(target.connected())
                with contextlib.suppress(ConnectionError, TimeoutError):
                    writer.write(target.head(path, BODY if framed else None))
                    if body and not framed:
                        writer.write(b"%x\r\n" % BODY)
                    for start in range(0, len(body), 1 << 18):
                        writer.write(body[start : start + (1 << 18)])
                        async with asyncio.timeout(0.2):  # refused ones may not be read
                            await writer.drain()
                target.num_sent += 1
            await asyncio.sleep(0.5)

    return attack


def silent(sent, count):
    """An attack that opens connections, sends the beginning of a head, and waits."""

    async def attack(target):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    _, writer = await stack.enter_async_context(target.connected())
                    writer.write(sent)
                target.num_sent += 1
            await asyncio.sleep(0.5)

    return attack


async def _one_byte_chunks(target):
    chunks = b"1\r\n \r\n" * 40_000
    async with target.connected() as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(target.head(COMPLETIONS) + chunks + b"0\r\n\r\n")
            await writer.drain()
        target.num_sent += 1
        await target.read_status(reader)


async def _pipelined(target):
    async with target.connected() as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(target.head("/v1/models", 0, "GET") * 4000)
            target.num_sent += 1
            await target.read_status(reader)


async def _many_headers(target):
    head = target.head("/v1/models", 0, "GET")[:-2] + b"a:b\r\n" * 12_000 + b"\r\n"
    async with target.connected() as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            await writer.drain()
        target.num_sent += 1
        await target.read_status(reader)


async def _cut_bodies(target):
    body = prompt_of(b"word ")
    for _ in range(20):
        async with target.connected() as (_, writer):
            with contextlib.suppress(ConnectionError):
                writer.write(target.head(COMPLETIONS, len(body)) + body[: 1 << 20])
                await asyncio.sleep(0.01)
            target.num_sent += 1


async def _unread_answers(target):
    body = json.dumps({"model": "tiny", "prompt": "x" * 100_000}).encode()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(16):
            _, writer = await stack.enter_async_context(target.connected())
            writer.transport.pause_reading()
            writer.write(target.head("/tokenize", len(body)) + body)
            target.num_sent += 1
        await asyncio.sleep(1.0)


def _bytes_object(count):
    return b"{" + b",".join(b'"%d":0' % number for number in range(count)) + b"}"


def _chat(messages):
    return json.dumps({"model": "tiny", "max_tokens": 1, "messages": messages}).encode()


CORPUS = (
    # Long texts.
    HostileRequest("a prompt of 4 MiB of words", posting(COMPLETIONS, lambda: prompt_of(b"word "))),
    HostileRequest("a prompt of 4 MiB of one letter", posting(COMPLETIONS, lambda: prompt_of(b"a"))),
    HostileRequest("a prompt of 4 MiB of emoji", posting(COMPLETIONS, lambda: prompt_of(EMOJI.encode()))),
    HostileRequest("a prompt of 4 MiB of escapes", posting(COMPLETIONS, lambda: prompt_of(b"\\u0041"))),
    HostileRequest("a prompt of 4 MiB of quotes", posting(COMPLETIONS, lambda: prompt_of(b'\\"'))),
    HostileRequest(
        "64 prompts of 60 KiB", posting(COMPLETIONS, lambda: completion(["word " * 12_000] * 64)), 2
    ),
    HostileRequest(
        "a message of 4 MiB",
        posting(CHAT, lambda: _chat([{"role": "user", "content": "word " * (BODY // 5 - 50)}])),
    ),
    HostileRequest(
        "4,096 messages of 900 bytes",
        posting(CHAT, lambda: _chat([{"role": "user", "content": "word " * 180}] * 4096)),
    ),
    HostileRequest(
        "200,000 parts of a message",
        posting(CHAT, lambda: _chat([{"role": "user", "content": [{"type": "text", "text": ""}] * 130_000}])),
    ),
    HostileRequest(
        "4 MiB to tokenize",
        posting("/tokenize", lambda: prompt_of(b"word ").replace(b'"max_tokens":1,', b"")),
    ),
    HostileRequest(
        "as much to tokenize as is taken",
        posting("/tokenize", lambda: json.dumps({"model": "tiny", "prompt": "x" * 131_000}).encode()),
    ),
    # Many values.
    HostileRequest(
        "a prompt of 1.9 million token ids", posting(COMPLETIONS, lambda: field_of(b"prompt", b"1,"))
    ),
    HostileRequest(
        "64 prompts of 2,000 token ids", posting(COMPLETIONS, lambda: completion([[65] * 2000] * 64)), 2
    ),
    HostileRequest("1.3 million empty lists", posting(COMPLETIONS, lambda: field_of(b"stop", b"[],"))),
    HostileRequest("a million strings", posting(COMPLETIONS, lambda: field_of(b"bad_words", b'"a",'))),
    HostileRequest(
        "an object of 300,000 names",
        posting(
            COMPLETIONS, lambda: b'{"model":"tiny","prompt":"x","logit_bias":' + _bytes_object(300_000) + b"}"
        ),
    ),
    HostileRequest("lists four million deep", posting(COMPLETIONS, lambda: b"[" * (BODY - 1))),
    HostileRequest(
        "1.9 million ids to detokenize",
        posting("/detokenize", lambda: filled(b'{"model":"tiny","tokens":[', b"1,", b"1]}")),
    ),
    HostileRequest(
        "as many ids to detokenize as are taken",
        posting("/detokenize", lambda: json.dumps({"model": "tiny", "tokens": [65] * 131_000}).encode()),
    ),
    # Bodies in flight.
    HostileRequest("100 bodies that lack their last byte", unfinished(prompt_of(b"a"), 100), 1),
    HostileRequest(
        "30 bodies with one emoji", posting(COMPLETIONS, lambda: prompt_of(b"a", EMOJI.encode())), 30
    ),
    HostileRequest("100 bodies of 4 MiB, announced and not sent", unfinished(b"", 100), 1),
    HostileRequest("100 bodies in an endless chunk", unfinished(prompt_of(b"a"), 100, framed=False), 1),
    HostileRequest("bodies in chunks of one byte", _one_byte_chunks, 16),
    HostileRequest("bodies that are cut off", _cut_bodies),
    # Connections.
    HostileRequest("6,000 connections that say nothing", silent(b"", 6000), 1),
    HostileRequest(
        "6,000 connections with half a head", silent(b"GET /v1/models HTTP/1.1\r\nhost: q", 6000), 1
    ),
    HostileRequest("4,000 requests in one packet", _pipelined, 8),
    HostileRequest("12,000 headers in a request", _many_headers, 16),
    HostileRequest("answers that nobody reads", _unread_answers, 2),
)


async def run(hostile, target, seconds):
    """Send it from all its clients until the time is over, or as long as the first one takes."""

    async def client():
        while True:
            await hostile.attack(target)

    clients = [asyncio.create_task(client()) for _ in range(hostile.clients)]
    for _ in range(MAX_TIMES):
        done, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        if done or target.num_sent:
            break
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for one in done:
        one.result()  # an attack that fails is no attack


def main(port, key, name, seconds):
    os.nice(10)
    target = Target(int(port), key)
    hostile = next(one for one in CORPUS if one.name == name)
    asyncio.run(run(hostile, target, float(seconds)))
    sys.stdout.write(json.dumps({"statuses": target.statuses, "num_sent": target.num_sent}))


if __name__ == "__main__":
    main(*sys.argv[1:])
