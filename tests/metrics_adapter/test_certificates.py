"""The replica's own authority, the bundle that the replicas share, and TLS with both."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from quire_metrics_adapter import certificates
from quire_metrics_adapter.certificates import MAX_AUTHORITIES, Credentials, bundle
from quire_metrics_adapter.listener import Listener

NOW = datetime(2026, 1, 2, tzinfo=UTC)
HOST = "adapter.quire-system.svc"
DAY = timedelta(days=1)


def issue(pod: str, now: datetime = NOW) -> Credentials:
    return certificates.issue(pod, [HOST], now, DAY)


def authorities(pem: bytes) -> set[bytes]:
    return {one.public_bytes(Encoding.PEM) for one in x509.load_pem_x509_certificates(pem)}


def test_the_first_replica_fills_an_empty_bundle_and_then_leaves_it_unchanged() -> None:
    mine = issue("pod-a").authority
    first = bundle(b"", [mine], "pod-a", NOW)

    assert first == mine
    assert bundle(first, [mine], "pod-a", NOW) == first


def test_replicas_keep_each_others_authorities_and_agree_on_one_bundle() -> None:
    a, b = issue("pod-a").authority, issue("pod-b").authority
    both = bundle(bundle(b"", [a], "pod-a", NOW), [b], "pod-b", NOW)

    assert authorities(both) == {a, b}
    assert bundle(both, [a], "pod-a", NOW) == bundle(both, [b], "pod-b", NOW) == both
    assert bundle(bundle(b"", [b], "pod-b", NOW), [a], "pod-a", NOW) == both


def test_authorities_of_a_pod_from_before_its_restart_are_removed() -> None:
    old, new, other = issue("pod-a").authority, issue("pod-a").authority, issue("pod-b").authority

    assert authorities(bundle(old + other, [new], "pod-a", NOW)) == {new, other}


def test_during_a_renewal_a_replica_has_two_authorities_in_the_bundle() -> None:
    old, new = issue("pod-a").authority, issue("pod-a", NOW + DAY / 2).authority

    assert authorities(bundle(old, [old, new], "pod-a", NOW)) == {old, new}
    assert authorities(bundle(old + new, [new], "pod-a", NOW)) == {new}


def test_expired_foreign_and_unreadable_certificates_are_removed() -> None:
    mine, other = issue("pod-a").authority, issue("pod-b").authority
    no_authority = issue("pod-b").chain

    assert authorities(bundle(mine + other, [mine], "pod-a", NOW + DAY)) == {mine}
    assert authorities(bundle(mine + no_authority, [mine], "pod-a", NOW)) == {mine}
    assert authorities(bundle(b"nonsense", [mine], "pod-a", NOW)) == {mine}


def test_the_bundle_is_bounded_and_keeps_the_newest_authority() -> None:
    pem = b""
    for number in range(MAX_AUTHORITIES + 5):
        now = NOW + timedelta(seconds=number)
        newest = issue(f"pod-{number}", now).authority
        pem = bundle(pem, [newest], f"pod-{number}", now)

    assert len(authorities(pem)) == MAX_AUTHORITIES
    assert newest in authorities(pem)


def test_long_pod_names_stay_distinct() -> None:
    name = "quire-" * 20
    a, b = issue(f"{name}abcde").authority, issue(f"{name}fghij").authority

    assert authorities(bundle(a, [b], f"{name}fghij", NOW)) == {a, b}


def test_the_private_key_is_in_neither_the_authority_nor_the_chain() -> None:
    made = issue("pod-a")

    assert b"PRIVATE" not in made.authority + made.chain
    assert b"PRIVATE" in made.key


async def test_a_renewed_certificate_is_served_without_closing_open_connections() -> None:
    now = datetime.now(UTC)
    old, new = issue("pod-a", now), issue("pod-a", now)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, handle_signals=False)
    await runner.setup()
    listener = Listener(runner, 0)
    port = listener.port
    taking = asyncio.create_task(listener.run())
    try:
        listener.serve(old, "")
        kept = await _connect(port, old)
        listener.serve(new, "")

        assert await _ask(*kept) == b"HTTP/1.1 200 OK\r\n", "an open connection goes on"
        assert await _ask(*await _connect(port, new)) == b"HTTP/1.1 200 OK\r\n"
        with pytest.raises(ssl.SSLCertVerificationError):
            await _connect(port, old)
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        listener.close()
        await runner.cleanup()


async def _connect(port: int, trusted: Credentials) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    tls = ssl.create_default_context(cadata=trusted.authority.decode())
    return await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=HOST)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    first = await reader.readline()
    await reader.read()
    writer.close()
    return first
