"""Authentication: the front proxy is trusted with its certificate only, all other clients are reviewed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire_metrics_adapter import access
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


async def test_the_front_proxy_speaks_for_its_caller(guard: DelegatedAuth) -> None:
    caller = await guard.caller(ClientPeer("front-proxy-client", HEADERS))

    assert caller == Caller(
        "jane", "", ("team-a", "system:authenticated"), (("example.com/scope", ("one",)),)
    )


@pytest.mark.parametrize("common_name", [None, "quire-admin", "front-proxy-client2", ""])
async def test_no_other_can_speak_for_others(guard: DelegatedAuth, common_name: str | None) -> None:
    assert await code_of(guard.caller(ClientPeer(common_name, HEADERS))) == 401


async def test_headers_count_for_nothing_where_the_api_server_has_no_front_proxy(
    guard: DelegatedAuth,
) -> None:
    guard.front_proxy = access.front_proxy({"data": {"client-ca-file": "CLIENTS"}})

    assert guard.front_proxy is None
    assert await code_of(guard.caller(ClientPeer("front-proxy-client", HEADERS))) == 401


async def test_no_allowed_names_allow_every_holder_of_a_certificate_and_no_other(
    guard: DelegatedAuth,
) -> None:
    data = {**CONFIG["data"], "requestheader-allowed-names": "[]"}
    guard.front_proxy = access.front_proxy({"data": data})

    assert (await guard.caller(ClientPeer("anybody", HEADERS))).user == "jane"
    assert await code_of(guard.caller(ClientPeer(None, HEADERS))) == 401


def test_a_configuration_that_makes_no_sense_is_not_guessed_at() -> None:
    data = {**CONFIG["data"], "requestheader-allowed-names": '"front-proxy-client"'}
    with pytest.raises(ValueError, match="allowed-names"):
        access.front_proxy({"data": data})


async def test_a_bearer_token_is_reviewed_and_remembered_for_a_while(
    guard: DelegatedAuth, api: FakeApi, clock: list[float]
) -> None:
    peer = ClientPeer(None, (("Authorization", "Bearer good"),))

    assert (await guard.caller(peer)).user == (await guard.caller(peer)).user == "bob"
    assert len(api.reviews) == 1
    clock[0] += REMEMBER_SECONDS
    await guard.caller(peer)
    assert len(api.reviews) == 2


async def test_a_token_that_is_not_accepted_and_no_token_at_all_are_refused(guard: DelegatedAuth) -> None:
    assert await code_of(guard.caller(ClientPeer(None, (("Authorization", "Bearer bad"),)))) == 401
    assert await code_of(guard.caller(ClientPeer(None, (("Authorization", "Basic good"),)))) == 401
    assert await code_of(guard.caller(ClientPeer(None, ()))) == 401


async def test_the_api_server_is_asked_what_its_own_rules_say_of_the_path(
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
async def test_anything_but_a_plain_yes_is_a_no(guard: DelegatedAuth, api: FakeApi, allowed: Any) -> None:
    api.allowed = allowed

    assert await code_of(guard.allow(Caller("jane"), QUERY)) == 403


async def test_a_right_of_one_is_no_right_of_another(guard: DelegatedAuth, api: FakeApi) -> None:
    await guard.allow(Caller("jane"), QUERY)
    api.allowed = False

    await guard.allow(Caller("jane"), QUERY)
    assert await code_of(guard.allow(Caller("jane", groups=("x",)), QUERY)) == 403
    assert await code_of(guard.allow(Caller("bob"), QUERY)) == 403
    other = Query("v1beta2", "team-b", "chat", "llm_queue_depth")
    assert await code_of(guard.allow(Caller("jane"), other)) == 403


async def test_no_one_gets_in_while_the_api_server_cannot_be_asked(
    guard: DelegatedAuth, api: FakeApi
) -> None:
    api.is_down = True

    assert await code_of(guard.allow(Caller("jane"), QUERY)) == 503
    assert await code_of(guard.caller(ClientPeer(None, (("Authorization", "Bearer good"),)))) == 503


async def test_many_at_once_ask_the_api_server_a_few_at_a_time(guard: DelegatedAuth, api: FakeApi) -> None:
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
