"""The whole gateway before a replica that says what it was sent: names, keys and switches over HTTP."""

import hashlib

import httpx
import pytest

from tests.gateway.kube_stub import KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.server.launch import NO_TLS

CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer sk-alice"}
HASH = hashlib.sha256(b"sk-alice").hexdigest()
SPEC = {
    "models": ["chat"],
    "rules": [{"targets": [{"deployment": "tiny"}]}],
    "reliability": {"firstByteTimeoutSeconds": 1, "attempts": 1},
}


@pytest.fixture
def gateway(replica, tmp_path):
    with KubeStub() as kube:
        kube.put(endpoint_slice("s", {"a": "127.0.0.1"}, port=replica.server_address[1]))
        kube.put(llm_object("LLMRoute", "r", SPEC))
        kube.put(llm_object("LLMClient", "alice", {"keyHashes": [HASH]}))
        with Gateway(kube.url, tmp_path) as gateway:
            gateway.kube = kube
            yield gateway.wait_replicas(1)


def ask(gateway, headers=KEY, **body):
    return httpx.post(
        gateway.url + CHAT, json={"model": "chat", **body}, headers=headers, timeout=60, verify=NO_TLS
    )


def test_a_request_goes_to_the_target_under_its_name_and_the_key_goes_no_further(gateway):
    answer = ask(gateway, {**KEY, "x-team": "search"}, temperature=0).json()
    assert answer["body"] == {"model": "tiny", "temperature": 0}
    assert not {"authorization", "x-team"} & {name.lower() for name in answer["headers"]}
    line = gateway.wait_requests(1)[-1]
    assert (line["client"], line["model"], line["deployment"]) == ("models/alice", "chat", "tiny")
    assert (
        gateway.metric("gateway_requests_total", model="chat", client="models/alice", status="success") == 1
    )
    assert "sk-alice" not in gateway.log.read_text()


def test_only_keys_of_clients_are_accepted_until_they_are_revoked_and_probes_need_none(gateway):
    refused = ask(gateway, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "missing_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{gateway.url}/v1/models", verify=NO_TLS).status_code == 401
    names = httpx.get(f"{gateway.url}/v1/models", headers=KEY, verify=NO_TLS).json()["data"]
    assert [one["id"] for one in names] == ["chat", "tiny"]
    assert {
        httpx.get(gateway.url + path, verify=NO_TLS).status_code
        for path in ("/healthz", "/readyz", "/metrics")
    } == {200}
    assert ask(gateway, {**KEY, "x-api-key": "sk-alice"}).status_code == 200
    assert ask(gateway, {**KEY, "x-api-key": "sk-other"}).status_code == 401, "two keys are none"
    gateway.kube.put(llm_object("LLMClient", "alice", {"keyHashes": []}))
    gateway.wait("the key is revoked", lambda: ask(gateway).status_code == 401)


def test_a_kill_switch_is_an_error_with_its_message_that_clients_do_not_try_again(gateway):
    switch = {"enabled": True, "message": "Stopped for an audit."}
    gateway.kube.put(llm_object("LLMRoute", "r", {**SPEC, "killSwitch": switch}))
    gateway.wait("the switch is on", lambda: ask(gateway).status_code == 503)
    answer = ask(gateway)
    assert answer.json()["error"]["message"] == "Stopped for an audit."
    assert answer.headers["x-should-retry"] == "false"
    assert ask(gateway, model="tiny").status_code == 200


def test_a_kill_switch_of_mode_fallback_has_the_fallbacks_answer_and_the_target_gets_nothing(
    gateway, replica
):
    switch = {"enabled": True, "mode": "Fallback", "message": "Stopped for an audit."}
    steps = [{"halveMaxTokens": True}, {"deployment": "tiny"}, {"canned": "Please ask again later."}]
    gateway.kube.put(llm_object("LLMRoute", "r", {**SPEC, "killSwitch": switch, "fallbacks": steps}))
    gateway.wait("the switch is on", lambda: "x-quire-degraded" in ask(gateway, max_tokens=9).headers)
    answer = ask(gateway, max_tokens=9)
    assert (answer.status_code, answer.headers["x-quire-degraded"]) == (200, "canned")
    assert gateway.wait_requests(1)[-1]["replicas"] == []
    gateway.kube.put(llm_object("LLMRoute", "r", {**SPEC, "killSwitch": switch, "fallbacks": steps[:2]}))
    gateway.wait("nothing is left", lambda: ask(gateway, max_tokens=9).status_code == 503)
    answer = ask(gateway, max_tokens=9)
    assert answer.json()["error"]["message"] == "Stopped for an audit."
    assert answer.json()["error"]["code"] == "kill_switch"
    assert answer.headers["x-should-retry"] == "false"


def test_a_route_shortens_the_time_to_the_first_byte(gateway):
    answer = ask(gateway, stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "replica_timeout")
