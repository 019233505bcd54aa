"""Authentication: the front proxy is trusted with its certificate only, all other clients are reviewed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire_metrics_adapter import access, delegated_auth
from quire_metrics_adapter.access import Caller
from quire_metrics_adapter.delegated_auth import REMEMBER_SECONDS, ClientPeer, DelegatedAuth
from quire_metrics_adapter.errors import RefusedError, UnreachableError
from quire_metrics_adapter.queries import Query

CONFIG = {
    "data": {
        "client-ca-file": "CLIENTS",
        "requestheader-client-ca-file": "PROXY",
        "requestheader-allowed-names": '["front-proxy-client"]',
        "requestheader-username-headers": '["X-Remote-User"]',
        "requestheader-group-headers": '["X-Remote-Group"]',
        "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
    }
}
HEADERS = (
    ("x-remote-user", "jane"),
    ("X-Remote-Group", "team-a"),
    ("X-Remote-Group", "system:authenticated"),
    ("X-Remote-Extra-Example.com%2fscope", "one"),
)
QUERY = Query("v1beta2", "team-a", "chat", "llm_queue_depth")


class FakeApi:
    """Answers reviews; counts them."""

    def __init__(self) -> None:
        self.reviews: list[dict[str, Any]] = []
        self.is_down = False
        self.allowed: Any = True

    async def request(self, method: str, path: str, *, body: dict[str, Any]) -> dict[str, Any]:
        if self.is_down:
            raise UnreachableError("down")
        self.reviews.append(body)
        if body["kind"] == "SubjectAccessReview":
            return {"status": {"allowed": self.allowed}}
        known = body["spec"]["token"] == "good"
        return {"status": {"authenticated": known, "user": {"username": "bob", "groups": ["x"]}}}


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def guard(api: FakeApi, clock: list[float]) -> DelegatedAuth:
    guard = DelegatedAuth(api, lambda: clock[0])  # type: ignore[arg-type]
    guard.front_proxy = access.front_proxy(CONFIG)
    return guard


async def code_of(call: Any) -> int:
    with pytest.raises(RefusedError) as refused:
        await call
    return refused.value.code


async def test_the_caller_is_read_from_the_headers_of_the_front_proxy(guard: DelegatedAuth) -> None:
    caller = await guard.caller(ClientPeer("front-proxy-client", HEADERS))

    assert caller == Caller(
        "jane", "", ("team-a", "system:authenticated"), (("example.com/scope", ("one",)),)
    )


@pytest.mark.parametrize("common_name", [None, "quire-admin", "front-proxy-client2", ""])
async def test_other_certificates_cannot_set_the_callers_identity(
    guard: DelegatedAuth, common_name: str | None
) -> None:
    assert await code_of(guard.caller(ClientPeer(common_name, HEADERS))) == 401


async def test_identity_headers_are_ignored_without_a_configured_front_proxy(guard: DelegatedAuth) -> None:
    guard.front_proxy = access.front_proxy({"data": {"client-ca-file": "CLIENTS"}})

    assert guard.front_proxy is None
    assert await code_of(guard.caller(ClientPeer("front-proxy-client", HEADERS))) == 401


async def test_empty_allowed_names_accept_any_client_certificate_and_no_request_without_one(
    guard: DelegatedAuth,
) -> None:
    data = {**CONFIG["data"], "requestheader-allowed-names": "[]"}
    guard.front_proxy = access.front_proxy({"data": data})

    assert (await guard.caller(ClientPeer("anybody", HEADERS))).user == "jane"
    assert await code_of(guard.caller(ClientPeer(None, HEADERS))) == 401


def test_a_malformed_front_proxy_configuration_raises_an_error() -> None:
    data = {**CONFIG["data"], "requestheader-allowed-names": '"front-proxy-client"'}
    with pytest.raises(ValueError, match="allowed-names"):
        access.front_proxy({"data": data})


async def test_a_token_review_is_cached_for_a_limited_time(
    guard: DelegatedAuth, api: FakeApi, clock: list[float]
) -> None:
    peer = ClientPeer(None, (("Authorization", "Bearer good"),))

    assert (await guard.caller(peer)).user == (await guard.caller(peer)).user == "bob"
    assert len(api.reviews) == 1
    clock[0] += REMEMBER_SECONDS
    await guard.caller(peer)
    assert len(api.reviews) == 2


async def test_an_invalid_or_missing_token_is_refused_with_401(guard: DelegatedAuth) -> None:
    assert await code_of(guard.caller(ClientPeer(None, (("Authorization", "Bearer bad"),)))) == 401
    assert await code_of(guard.caller(ClientPeer(None, (("Authorization", "Basic good"),)))) == 401
    assert await code_of(guard.caller(ClientPeer(None, ()))) == 401


async def test_a_subject_access_review_contains_the_attributes_of_the_request(
    guard: DelegatedAuth, api: FakeApi
) -> None:
    await guard.allow(Caller("jane", groups=("team-a",)), QUERY)

    assert api.reviews[0]["spec"]["resourceAttributes"] == {
        "group": "custom.metrics.k8s.io",
        "version": "v1beta2",
        "resource": "llmdeployments.serving.quire.dev",
        "subresource": "llm_queue_depth",
        "namespace": "team-a",
        "name": "chat",
        "verb": "get",
    }


@pytest.mark.parametrize("allowed", [False, None, "yes", 1])
async def test_a_review_allows_only_when_allowed_is_true(
    guard: DelegatedAuth, api: FakeApi, allowed: Any
) -> None:
    api.allowed = allowed

    assert await code_of(guard.allow(Caller("jane"), QUERY)) == 403


async def test_a_cached_decision_applies_only_to_the_same_caller_and_request(
    guard: DelegatedAuth, api: FakeApi
) -> None:
    await guard.allow(Caller("jane"), QUERY)
    api.allowed = False

    await guard.allow(Caller("jane"), QUERY)
    assert await code_of(guard.allow(Caller("jane", groups=("x",)), QUERY)) == 403
    assert await code_of(guard.allow(Caller("bob"), QUERY)) == 403
    other = Query("v1beta2", "team-b", "chat", "llm_queue_depth")
    assert await code_of(guard.allow(Caller("jane"), other)) == 403


async def test_requests_are_refused_with_503_while_the_api_server_is_unreachable(
    guard: DelegatedAuth, api: FakeApi
) -> None:
    api.is_down = True

    assert await code_of(guard.allow(Caller("jane"), QUERY)) == 503
    assert await code_of(guard.caller(ClientPeer(None, (("Authorization", "Bearer good"),)))) == 503


async def test_at_most_16_reviews_run_concurrently(guard: DelegatedAuth, api: FakeApi) -> None:
    running, most = 0, 0

    async def slow(method: str, path: str, *, body: dict[str, Any]) -> dict[str, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return {"status": {}}

    api.request = slow  # type: ignore[method-assign]
    calls = [guard.caller(ClientPeer(None, (("Authorization", f"Bearer {i}"),))) for i in range(100)]
    await asyncio.gather(*calls, return_exceptions=True)

    assert most == 16


async def test_the_front_proxy_is_learnt_after_a_request_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delegated_auth, "_RETRY_SECONDS", 0.0)
    answers: list[Any] = [CONFIG, UnreachableError("down")]

    class Api:
        async def request(self, method: str, path: str) -> Any:
            answer = answers.pop()
            if isinstance(answer, Exception):
                raise answer
            return answer

    changed = asyncio.Event()
    auth = DelegatedAuth(Api())  # type: ignore[arg-type]
    following = asyncio.create_task(auth.follow(changed.set))
    async with asyncio.timeout(60):
        while auth.front_proxy is None or answers:
            await asyncio.sleep(0)
    following.cancel()
    assert changed.is_set() and "cannot learn how the API server's front proxy shows itself" in caplog.text
