"""What a gateway has signed is taken as it says, and nothing that only looks like it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from starlette.types import Scope

from quire_http.errors import ApiError
from quire_http.signed_token import key_id
from quire_server.api.auth import PRINCIPAL, Keys, Principal
from quire_server.api.gateway_tokens import TOKEN_HEADER, GatewayKeys, require_access

NOW = 1_800_000_000
AUDIENCE = "team-a/qwen"
CLAIMS = {
    "aud": AUDIENCE, "iat": NOW, "exp": NOW + 30,
    "client": "alice", "priority": 5, "cache": "search", "model": "chat",
}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def public_pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def jwt(sign: Callable[[bytes], bytes], header: dict[str, Any], claims: dict[str, Any]) -> bytes:
    text = encoded(json.dumps(header).encode()) + b"." + encoded(json.dumps(claims).encode())
    return text + b"." + encoded(sign(text))


def signed(key: Ed25519PrivateKey, **claims: Any) -> bytes:
    given = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt(key.sign, {"alg": "EdDSA", "kid": key_id(key.public_key())}, given)


def scope(*tokens: bytes, path: str = "/v1/completions", authorization: bytes = b"") -> Scope:
    headers = [(TOKEN_HEADER, token) for token in tokens]
    if authorization:
        headers.append((b"authorization", authorization))
    return {"type": "http", "path": path, "headers": headers}


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(tmp_path: Path, key: Ed25519PrivateKey, clock: Clock) -> GatewayKeys:
    directory = tmp_path / "gateways"
    directory.mkdir()
    (directory / "current.pem").write_bytes(public_pem(key))
    return GatewayKeys(directory, AUDIENCE, clock, lambda: NOW + clock())


def refusal(keys: GatewayKeys, *tokens: bytes) -> str:
    with pytest.raises(ApiError) as refused:
        keys.principal_of(scope(*tokens))
    assert (refused.value.status, refused.value.code) == (401, "invalid_gateway_token")
    return str(refused.value)


def test_a_signed_request_is_for_whom_its_token_says(keys: GatewayKeys, key: Ed25519PrivateKey) -> None:
    assert keys.principal_of(scope(signed(key))) == Principal("alice", "gateway/search", 5, model="chat")


def test_two_clients_of_a_gateway_share_no_cache_unless_it_says_so(
    keys: GatewayKeys, key: Ed25519PrivateKey
) -> None:
    alice, bob = (keys.principal_of(scope(signed(key, cache=name))) for name in ("alice", "bob"))
    assert alice is not None and bob is not None
    assert alice.cache_salt("") != bob.cache_salt("")


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": NOW - 11, "iat": NOW - 40}, "expired"),
        ({"iat": NOW + 11, "exp": NOW + 40}, "of the future"),
        ({"exp": NOW + 61}, "more than 60 s"),
        ({"exp": NOW}, "more than 60 s"),
        ({"exp": None}, "how long"),
        ({"iat": None}, "how long"),
        ({"exp": float(NOW + 30)}, "how long"),
        ({"iat": True}, "how long"),
        ({"aud": "team-b/qwen"}, "another audience"),
        ({"aud": [AUDIENCE]}, "another audience"),
        ({"aud": None}, "another audience"),
        ({"client": None}, "a name"),
        ({"client": "a\0b"}, "a name"),
        ({"cache": 7}, "a name"),
        ({"model": "m" * 254}, "a name"),
        ({"priority": -101}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": None}, "priority"),
    ],
)
def test_claims_that_are_wrong_are_refused(
    keys: GatewayKeys, key: Ed25519PrivateKey, claims: dict[str, Any], why: str
) -> None:
    assert why in refusal(keys, signed(key, **claims))


@pytest.mark.parametrize("claims", [{"exp": NOW - 9, "iat": NOW - 39}, {"iat": NOW + 9, "exp": NOW + 39}])
def test_clocks_may_differ_by_ten_seconds(
    keys: GatewayKeys, key: Ed25519PrivateKey, claims: dict[str, Any]
) -> None:
    assert keys.principal_of(scope(signed(key, **claims))) is not None


def test_a_token_can_be_used_again_until_it_expires_and_then_no_more(
    keys: GatewayKeys, key: Ed25519PrivateKey, clock: Clock
) -> None:
    token = signed(key)
    for clock.now in (0.0, 39.0):
        assert keys.principal_of(scope(token)) is not None
    clock.now = 40.0
    assert "expired" in refusal(keys, token)


def test_no_other_key_and_no_other_algorithm_is_accepted(keys: GatewayKeys, key: Ed25519PrivateKey) -> None:
    kid = key_id(key.public_key())
    pem = public_pem(key)

    def by_hmac(text: bytes) -> bytes:  # with what is public as its secret
        return hmac.digest(pem, text, hashlib.sha256)

    other = Ed25519PrivateKey.generate()
    assert "none of this server's" in refusal(keys, signed(other))
    assert "signature" in refusal(keys, jwt(other.sign, {"alg": "EdDSA", "kid": kid}, CLAIMS))
    assert "algorithm" in refusal(keys, jwt(by_hmac, {"alg": "HS256", "kid": kid}, CLAIMS))
    assert "signature" in refusal(keys, jwt(by_hmac, {"alg": "EdDSA", "kid": kid}, CLAIMS))
    for none in ("none", "None", "", None, "RS256", "eddsa"):
        assert "algorithm" in refusal(keys, jwt(lambda _: b"", {"alg": none, "kid": kid}, CLAIMS))
    own_key = {"alg": "EdDSA", "jwk": {"kty": "OKP", "x": "x"}, "x5u": "http://example.com"}
    assert "none of this server's" in refusal(keys, jwt(other.sign, own_key, CLAIMS))


def test_changed_claims_and_texts_that_are_no_token_are_refused(
    keys: GatewayKeys, key: Ed25519PrivateKey
) -> None:
    header, claims, signature = signed(key).split(b".")
    changed = encoded(json.dumps({**CLAIMS, "client": "mallory"}).encode())
    assert "signature" in refusal(keys, b".".join((header, changed, signature)))
    assert "signature" in refusal(keys, b".".join((header, claims, b"")))
    for text in (
        b"",
        b".",
        b"..",
        b"a.b.c",
        b"!!.!!.!!",
        header + b".." + signature,
        b"a" * 3000,
        b"W10.W10.W10",
    ):
        refusal(keys, text)
    assert "several" in refusal(keys, signed(key), signed(key))


def test_a_key_is_exchanged_while_the_server_runs(
    tmp_path: Path, keys: GatewayKeys, key: Ed25519PrivateKey, clock: Clock
) -> None:
    following = Ed25519PrivateKey.generate()
    assert "none of this server's" in refusal(keys, signed(following))

    (tmp_path / "gateways/next.pem").write_bytes(public_pem(following))
    clock.now += 3
    for each in (key, following):
        assert keys.principal_of(scope(signed(each))) is not None

    (tmp_path / "gateways/current.pem").unlink()
    clock.now += 3
    assert keys.principal_of(scope(signed(following))) is not None
    assert "none of this server's" in refusal(keys, signed(key))


def test_entries_that_are_no_ed25519_keys_grant_nothing_and_leave_the_others(
    tmp_path: Path, keys: GatewayKeys, key: Ed25519PrivateKey
) -> None:
    (tmp_path / "gateways/a.pem").write_bytes(b"no key")
    (tmp_path / "gateways/b.pem").write_bytes(public_pem(rsa.generate_private_key(65537, 2048)))
    (tmp_path / "gateways/c.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    assert keys.principal_of(scope(signed(key))) is not None


def test_without_api_keys_only_signed_requests_are_served(
    keys: GatewayKeys, key: Ed25519PrivateKey, clock: Clock
) -> None:
    without = Keys(None, clock)
    with pytest.raises(ApiError) as refused:
        require_access(without, keys, scope(authorization=b"Bearer x"))
    assert (refused.value.status, refused.value.code) == (401, "gateway_token_required")

    request = scope(signed(key))
    require_access(without, keys, request)
    assert request[PRINCIPAL].client == "alice"


def test_an_api_key_counts_as_before_and_a_wrong_token_is_not_made_up_for_by_it(
    tmp_path: Path, keys: GatewayKeys, key: Ed25519PrivateKey, clock: Clock
) -> None:
    (tmp_path / "api-keys").mkdir()
    (tmp_path / "api-keys/bob").write_text("k", encoding="utf-8")
    api_keys = Keys(tmp_path / "api-keys", clock)
    request = scope(authorization=b"Bearer k")
    require_access(api_keys, keys, request)
    assert request[PRINCIPAL].client == "bob"

    with pytest.raises(ApiError, match="expired"):
        require_access(
            api_keys, keys, scope(signed(key, exp=NOW - 20, iat=NOW - 40), authorization=b"Bearer k")
        )
    with pytest.raises(ApiError) as refused:
        require_access(api_keys, keys, scope())
    assert refused.value.code == "invalid_api_key"


def test_no_gateway_is_an_admin(keys: GatewayKeys, key: Ed25519PrivateKey, clock: Clock) -> None:
    with pytest.raises(ApiError) as refused:
        require_access(Keys(None, clock), keys, scope(signed(key), path="/reset_prefix_cache"))
    assert refused.value.code == "admin_key_required"


def test_a_directory_without_a_key_denies_every_request_and_none_at_all_changes_nothing(
    tmp_path: Path, key: Ed25519PrivateKey, clock: Clock
) -> None:
    missing = GatewayKeys(tmp_path / "missing", AUDIENCE, clock, lambda: NOW)
    assert "none of this server's" in refusal(missing, signed(key))

    request = scope(b"not even a token")
    require_access(Keys(None, clock), GatewayKeys.none(), request)
    assert request[PRINCIPAL] == Principal()
