"""What the gateway signs the engine accepts, and the two agree on all that each has for itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from quire_gateway import relay, request_signing
from quire_gateway.replicas import Model
from quire_gateway.request_signing import Identity, RequestSigner, SigningKeyError
from quire_gateway.routing.by_load import RoundRobin
from quire_http import signed_token
from quire_http.errors import ApiError
from quire_server.api import gateway_tokens
from quire_server.api.auth import Principal
from quire_server.api.gateway_tokens import GatewayKeys
from quire_server.core.policy import CLASSES, MAX_PRIORITY


def write_pair(directory: Path, key: Ed25519PrivateKey) -> None:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (directory / "tls.key").write_bytes(private)
    (directory / "public").mkdir(exist_ok=True)
    (directory / "public" / "current.pem").write_bytes(public)


def ask(directory: Path, audience: str, token: str) -> Principal | None:
    trusted = GatewayKeys(directory / "public", audience, time.monotonic, time.time)
    return trusted.principal_of({"headers": [(gateway_tokens.TOKEN_HEADER, token.encode())]})


def test_the_engine_accepts_what_the_gateway_signs_and_takes_it_as_it_is_meant(tmp_path: Path) -> None:
    write_pair(tmp_path, Ed25519PrivateKey.generate())
    signer = RequestSigner(tmp_path / "tls.key")
    audience = Model("team-a", "qwen", time.monotonic, lambda _: RoundRobin()).audience

    token = signer.token(audience, Identity("alice", 10, "search"), "chat")
    assert ask(tmp_path, "team-a/qwen", token) == Principal("alice", "gateway/search", 10, model="chat")
    anonymous = ask(tmp_path, "team-a/qwen", signer.token(audience, Identity(), "qwen"))
    assert anonymous == Principal("", "gateway/", CLASSES["normal"], model="qwen")
    with pytest.raises(ApiError, match="another audience"):
        ask(tmp_path, "team-b/qwen", token)


def test_names_and_times_agree() -> None:
    header, lifetime = request_signing.TOKEN_HEADER, request_signing.LIFETIME_SECONDS
    assert header == gateway_tokens.TOKEN_HEADER.decode()
    assert lifetime + signed_token.CLOCK_SKEW_SECONDS <= gateway_tokens.MAX_LIFETIME_SECONDS
    assert CLASSES["normal"] == request_signing.NORMAL_PRIORITY
    assert request_signing.LOWEST_PRIORITY == MAX_PRIORITY
    assert gateway_tokens.TOKEN_HEADER not in relay.REQUEST_HEADERS, "a client's own never reaches a replica"


def test_the_gateway_signs_with_another_key_once_its_secret_has_changed(tmp_path: Path) -> None:
    now = [0.0]
    write_pair(tmp_path, Ed25519PrivateKey.generate())
    signer = RequestSigner(tmp_path / "tls.key", monotonic=lambda: now[0])
    write_pair(tmp_path, Ed25519PrivateKey.generate())
    with pytest.raises(ApiError, match="none of this server's"):
        ask(tmp_path, "a/b", signer.token("a/b", Identity(), "b"))

    now[0] = 11.0
    assert ask(tmp_path, "a/b", signer.token("a/b", Identity(), "b")) is not None

    (tmp_path / "tls.key").write_text("nonsense", encoding="utf-8")
    now[0] = 22.0
    assert ask(tmp_path, "a/b", signer.token("a/b", Identity(), "b")) is not None, "the one from before"
    with pytest.raises(SigningKeyError, match="no private key in PEM"):
        RequestSigner(tmp_path / "tls.key")
