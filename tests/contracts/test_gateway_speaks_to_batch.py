"""The gateway and quire-batch agree on all that each has for itself, and so do batches and model servers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from quire_batch import identity
from quire_batch.lines import ENDPOINTS, MAX_LINE_BYTES
from quire_batch.settings import Settings
from quire_gateway import batch_proxy, delegation, relay, request_signing
from quire_gateway.delegation import Delegations
from quire_gateway.openai.calls import COMPLETION_PATHS, EMBEDDINGS
from quire_gateway.request_signing import RequestSigner
from quire_http.errors import ApiError
from quire_http.signed_token import TrustedKeys
from quire_server.core.policy import CLASSES


@pytest.fixture
def signer(tmp_path: Path) -> RequestSigner:
    key = Ed25519PrivateKey.generate()
    (tmp_path / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "public").mkdir()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public" / "current.pem").write_bytes(public)
    return RequestSigner(tmp_path / "tls.key")


def delegations(signer: RequestSigner, directory: Path, later: float = 0.0) -> Delegations:
    trusted = TrustedKeys(directory / "public", time.monotonic)
    return Delegations(signer, trusted, lambda: time.time() + later)


def test_names_times_and_endpoints_agree() -> None:
    assert identity.TOKEN_HEADER == request_signing.TOKEN_HEADER
    assert identity.DELEGATION_HEADER == delegation.DELEGATION_HEADER
    assert identity.AUDIENCE == batch_proxy.AUDIENCE
    assert set(ENDPOINTS) == {*COMPLETION_PATHS, EMBEDDINGS}
    assert MAX_LINE_BYTES == batch_proxy.MOST_BYTES
    assert CLASSES["low"] == delegation.BATCH_PRIORITY
    assert Settings.window_seconds < delegation.LIFETIME_SECONDS, "a line has its delegation to the end"
    assert delegation.DELEGATION_HEADER not in relay.REQUEST_HEADERS, "it never reaches a replica"


def test_a_delegation_says_which_key_it_is_for_until_its_day_is_over(
    signer: RequestSigner, tmp_path: Path
) -> None:
    token = delegations(signer, tmp_path).delegation("abc")
    headers = [(delegation.DELEGATION_HEADER.encode(), token.encode())]
    assert delegations(signer, tmp_path).key_hash(headers) == "abc"
    assert delegations(signer, tmp_path, later=86_400).key_hash(headers) == "abc"
    assert delegations(signer, tmp_path).key_hash([(b"accept", b"*/*")]) is None
    for wrong, later in ((headers, 26 * 3600), (headers * 2, 0)):
        with pytest.raises(ApiError, match="delegation is not accepted"):
            delegations(signer, tmp_path, later).key_hash(wrong)


def test_no_token_is_taken_for_one_of_another_kind(signer: RequestSigner, tmp_path: Path) -> None:
    """What replicas and quire-batch are sent is no delegation, and a delegation is neither."""
    for audience in ("team-a/qwen", batch_proxy.AUDIENCE):
        token = signer.signed({"aud": audience, "client": "a", "key": "abc"}, 30)
        headers = [(delegation.DELEGATION_HEADER.encode(), token.encode())]
        with pytest.raises(ApiError, match="another audience"):
            delegations(signer, tmp_path).key_hash(headers)
    token = delegations(signer, tmp_path).delegation("abc")
    trusted = identity.GatewayTokens(TrustedKeys(tmp_path / "public", time.monotonic))
    with pytest.raises(ApiError, match="not accepted"):
        trusted.caller([(identity.TOKEN_HEADER.encode(), token.encode())])
