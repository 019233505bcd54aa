"""Tokens for replicas: one for each client and model, and each valid for most of its lifetime."""

import base64
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from quire_gateway.request_signing import LIFETIME_SECONDS, Identity, RequestSigner


def signer(directory: Path, now: list[float]) -> RequestSigner:
    key = directory / "tls.key"
    private = Ed25519PrivateKey.generate()
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return RequestSigner(key, clock=lambda: now[0])


def claims(token: str) -> dict[str, object]:
    part = token.split(".")[1]
    found: dict[str, object] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found


def test_a_token_is_never_anothers(tmp_path: Path) -> None:
    tokens = signer(tmp_path, [1000.0])
    alice, bob = Identity("alice", 0, "a"), Identity("bob", 0, "b")
    for _ in range(2):  # made, and used again
        for audience, identity, model in (
            ("ns/chat", alice, "chat"),
            ("ns/chat", bob, "chat"),
            ("ns/chat", Identity("alice", 100, "a"), "chat"),
            ("ns/code", alice, "chat"),
            ("ns/chat", alice, "code"),
        ):
            found = claims(tokens.token(audience, identity, model))
            said = found["aud"], found["client"], found["priority"], found["cache"], found["model"]
            wanted = identity.client, identity.highest_priority, identity.cache_scope
            assert said == (audience, *wanted, model)


def test_a_token_is_valid_for_most_of_its_lifetime_whenever_it_is_sent(tmp_path: Path) -> None:
    now = [1000.0]
    tokens = signer(tmp_path, now)
    seen = set()
    for second in range(60):
        now[0] = 1000.0 + second
        token = tokens.token("ns/chat", Identity("alice"), "chat")
        issued, expires = claims(token)["iat"], claims(token)["exp"]
        assert isinstance(issued, int) and isinstance(expires, int)
        assert issued <= now[0] and expires - now[0] > 0.8 * LIFETIME_SECONDS
        seen.add(token)
    assert len(seen) < 20, "a token is used again"
    now[0] = 900.0  # the clock was set back
    issued = claims(tokens.token("ns/chat", Identity("alice"), "chat"))["iat"]
    assert isinstance(issued, int) and issued <= now[0]
