"""External backends of a real gateway: a TLS server that is none of ours, as it should be and as it "
"should not."""

import contextlib
import hashlib
import json
import os
import socket
import threading

import httpx
import pytest

from quire_gateway.outlier_detection import CONSECUTIVE_FAILURES
from tests.gateway.conftest import LOOPBACK, outside_alone, put_backend
from tests.gateway.external_server import chunks, event, head, reset, well
from tests.gateway.fault_proxy import FaultProxy
from tests.gateway.kube_stub import llm_object
from tests.gateway.test_fallbacks import broken, full, gone
from tests.gateway.test_relay import CHAT, text_of
from tests.server.launch import NO_TLS

BODY = {**CHAT, "model": "chat"}
PATH = "/v1/chat/completions"
HELLO = "Hello from outside"
KEY = "sk-client"


@pytest.fixture
def proxy(replica):
    """A proxy in front of a replica of ours."""
    with FaultProxy(replica.server_address[1]) as proxy:
        yield proxy


def ask(gateway, *, stream=False, key=KEY, **fields):
    return gateway.post(PATH, {**BODY, "stream": stream, **fields}, key)


@pytest.mark.parametrize("fault", [gone, full, broken])
@pytest.mark.parametrize("stream", [False, True])
def test_where_no_replica_answers_the_external_backend_does_and_the_answer_says_so(
    gateway_for, external, proxy, fault, stream
):
    gateway = gateway_for()
    fault(proxy)
    answer = ask(gateway, stream=stream)
    assert (answer.status_code, answer.headers["x-quire-degraded"]) == (200, "external=outside")
    assert text_of(answer.text) == HELLO
    assert answer.text.endswith("data: [DONE]\n\n") == stream
    line = gateway.wait_requests(1)[-1]
    assert (line["deployment"], line["outcome"]) == ("external/outside", "success")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (11, 7)
    assert gateway.metric("gateway_fallbacks_total", model="chat", step="external=outside") == 1


def test_nothing_of_the_client_or_of_ours_goes_outside_but_the_request_itself(gateway_for, external):
    gateway = gateway_for(**outside_alone())
    ours = {"cache_salt": "mine", "priority": -1, "retry_on_timeout": True}
    headers = {
        "authorization": f"Bearer {KEY}",
        "x-quire-priority": "1",
        "x-team": "a",
        "traceparent": "00-1",
    }
    headers |= {"cookie": "a=b", "x-request-id": "mine"}
    body = {**BODY, **ours, "seed": 1, "stream": True, "tools": []}
    assert (
        httpx.post(gateway.url + PATH, json=body, headers=headers, timeout=60, verify=NO_TLS).status_code
        == 200
    )
    (request,) = external.requests
    assert request.line == "POST /v1/chat/completions HTTP/1.1"
    usual = {"host", "accept", "accept-encoding", "content-type", "content-length", "user-agent"}
    assert request.headers.keys() == {*usual, "authorization"}
    assert request.headers["authorization"] == "Bearer sk-outside"
    expected = {**BODY, "model": "gpt-4o-mini", "seed": 1, "stream": True, "tools": []}
    assert request.body == {**expected, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("asked", [False, True])
def test_the_usage_of_a_stream_is_counted_and_shown_to_a_client_that_asked_for_it(gateway_for, asked):
    gateway = gateway_for(**outside_alone())
    options = {"stream_options": {"include_usage": True}} if asked else {}
    answer = ask(gateway, stream=True, **options)
    assert ('"choices": [], "usage": {"prompt_tokens": 11' in answer.text) is asked
    assert gateway.wait_requests(1)[-1]["completion_tokens"] == 7
    assert gateway.metric("gateway_tokens_total", model="chat", type="completion") == 7


def test_conversations_are_divided_between_ours_and_an_external_target(gateway_for, external):
    targets = [{"deployment": "tiny"}, {"external": "outside"}]
    gateway = gateway_for(targets=targets, fallbacks=[])

    def arm(number):
        messages = [{"role": "user", "content": f"Once {number}"}]
        return ask(gateway, messages=messages, max_tokens=1).json().get("model", "").startswith("gpt")

    sides = [arm(number) for number in range(24)]
    assert 3 < sum(sides) < 21
    assert [arm(number) for number in range(6)] == sides[:6], "a conversation stays where it is"


def test_limits_and_errors_of_the_gateways_account_there_are_not_shown(gateway_for, external):
    gateway = gateway_for(**outside_alone())
    assert not [name for name in ask(gateway).headers if name.startswith("x-ratelimit")]
    text = b'{"error": {"message": "organization org-secret", "code": "x"}}'
    expected = {
        b"401 No": 502,
        b"403 No": 502,
        b"404 No": 502,
        b"429 No": 503,
        b"500 No": 502,
        b"529 No": 503,
    }
    for status, ours in expected.items():
        length = b"content-length: %d" % len(text)
        external.answer = lambda connection, _, status=status, length=length: connection.sendall(
            head(status, b"application/json", length, b"retry-after: 9") + text
        )
        answer = ask(gateway)
        assert (answer.status_code, "org-secret" in answer.text) == (ours, False), status


def test_what_the_client_did_wrong_it_is_told_by_the_backend(gateway_for, external):
    gateway = gateway_for(**outside_alone())
    text = b'{"error": {"message": "max_tokens is too large", "code": "x"}}'
    length = b"content-length: %d" % len(text)
    external.answer = lambda connection, _: connection.sendall(
        head(b"400 Bad Request", b"application/json", length) + text
    )
    answer = ask(gateway)
    assert (answer.status_code, answer.content) == (400, text)


@pytest.mark.parametrize(
    ("fault", "kind"), [(full, "Overload"), (broken, "Unavailable"), (gone, "Unavailable")]
)
def test_a_step_is_tried_after_the_failures_that_it_is_for(gateway_for, external, proxy, kube, fault, kind):
    gateway = gateway_for(fallback={"onlyOn": [kind]})
    fault(proxy)
    assert ask(gateway).headers["x-quire-degraded"] == "external=outside"
    other = ({"Overload", "Unavailable"} - {kind}).pop()
    spec = {"models": ["chat"], "rules": [{"targets": [{"deployment": "tiny"}]}]}
    kube.put(llm_object("LLMRoute", "r", {**spec, "fallbacks": [{"external": "outside", "onlyOn": [other]}]}))
    gateway.wait("the step is for others", lambda: ask(gateway).status_code in (502, 503))
    assert "x-quire-degraded" not in ask(gateway).headers


def test_a_new_key_is_used_without_a_restart(gateway_for, external, secret):
    gateway = gateway_for(**outside_alone())
    ask(gateway)
    new = secret.with_name("..new")
    new.write_text("sk-new")
    os.replace(new, secret)
    ask(gateway)
    assert [one.headers["authorization"] for one in external.requests] == [
        "Bearer sk-outside",
        "Bearer sk-new",
    ]
    log = gateway.log.read_text()
    assert not [key for key in ("sk-outside", "sk-new", KEY) if key in log]


def test_the_key_is_not_in_the_log_where_the_head_of_an_answer_cannot_be_read(gateway_for, external):
    too_long = b"x-long: " + b"a" * 9000
    external.answer = lambda connection, _: connection.sendall(
        head(b"200 OK", b"text/event-stream", too_long)
    )
    gateway = gateway_for(**outside_alone())
    answer = ask(gateway)
    assert answer.status_code == 502
    assert external.requests[0].headers["authorization"] == "Bearer sk-outside"
    assert "before the answer" in gateway.wait_requests(1)[-1]["broken"]
    assert not [one for one in ("sk-outside", "authorization", KEY) if one in gateway.log.read_text().lower()]
    assert "sk-outside" not in answer.text


def test_without_its_key_a_backend_is_not_asked_and_its_status_says_why(gateway_for, external, secret, kube):
    secret.unlink()
    own_namespace = {"POD_NAMESPACE": "models", "POD_NAME": "g"}
    gateway = gateway_for(**outside_alone(), environ={**LOOPBACK, **own_namespace})
    assert ask(gateway).status_code == 502
    assert external.num_connections == 0

    def ready():
        status = kube.objects["llmexternalbackends"]["outside"].get("status") or {}
        found = {one["type"]: one["reason"] for one in status.get("conditions", ())}
        return found.get("Ready"), (status.get("gateways") or {}).get("applied")

    gateway.wait("the status says it", lambda: ready() == ("SecretNotMounted", 1))
    secret.write_text("sk-late")
    gateway.wait("it is seen", lambda: ready() == ("Ready", 1))
    assert ask(gateway).status_code == 200


def test_a_request_a_minute_is_one_and_the_next_fallback_answers_then(gateway_for, external):
    fallbacks = [{"external": "outside"}, {"canned": "Later."}]
    gateway = gateway_for(
        targets=[{"deployment": "nowhere"}], backend={"requestsPerMinute": 1}, fallbacks=fallbacks
    )
    steps = [ask(gateway).headers["x-quire-degraded"] for _ in range(3)]
    assert (steps, len(external.requests)) == (["external=outside", "canned", "canned"], 1)


@pytest.mark.deep
def test_a_client_that_hangs_up_ends_the_request_outside(gateway_for, external):
    gateway = gateway_for(**outside_alone())
    goes_on = threading.Event()

    def endless(connection, request):
        connection.sendall(head())
        while True:
            connection.sendall(event(chunks(request, "more ")[0]))
            goes_on.set()

    external.answer = endless
    with httpx.stream(
        "POST", gateway.url + PATH, json={**BODY, "stream": True}, timeout=60, verify=NO_TLS
    ) as answer:
        next(answer.iter_lines())
        assert goes_on.wait(60) and external.num_closed == 0
    gateway.wait("the connection is closed", lambda: external.num_closed == 1)
    assert gateway.wait_requests(1)[-1]["outcome"] == "aborted"


# ---------------------------------------------------------------- where requests may go


METADATA = "https://169.254.169.254/latest"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_that_is_not_public_is_never_connected_to_whatever_its_name(gateway_for, external, host):
    backend = {"baseURL": f"https://{host}:{external.port}/v1", "apiKeySecretRef": None}
    gateway = gateway_for(**outside_alone(), backend=backend, environ={})
    answer = ask(gateway)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
    assert external.num_connections == 0
    assert "is not a public address" in gateway.wait_requests(1)[-1]["broken"]


def test_the_metadata_service_is_not_connected_to_where_private_networks_are_allowed(gateway_for, external):
    backend = {"baseURL": METADATA, "apiKeySecretRef": None}
    gateway = gateway_for(**outside_alone(), backend=backend, environ={"EXTERNAL_NETWORKS": "0.0.0.0/0"})
    assert ask(gateway).status_code == 502
    assert "169.254.169.254 is not a public address" in gateway.wait_requests(1)[-1]["broken"]


def test_a_redirect_is_not_followed(gateway_for, external):
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(socket.create_server(("127.0.0.1", 0))))
        place = b"location: http://127.0.0.1:%d/latest" % listener.getsockname()[1]
        external.answer = lambda connection, _: connection.sendall(
            head(b"307 Temporary Redirect", b"application/json", place, b"content-length: 0")
        )
        gateway = gateway_for(**outside_alone())
        assert ask(gateway).status_code == 502
        assert "redirect" in gateway.wait_requests(1)[-1]["broken"]
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_server_without_a_certificate_of_its_authority_gets_no_request(gateway_for, external):
    gateway = gateway_for(**outside_alone(), backend={"caBundle": None})
    assert ask(gateway).status_code == 502
    assert external.num_connections == 1 and external.requests == []
    assert "certificate verify failed" in gateway.wait_requests(1)[-1]["broken"].lower()


def test_a_bundle_that_is_none_is_reported_where_it_is_used(gateway_for, external):
    gateway = gateway_for(**outside_alone(), backend={"caBundle": "-----BEGIN CERTIFICATE-----\nno"})
    assert ask(gateway).status_code == 502
    assert "spec.caBundle" in gateway.wait_requests(1)[-1]["broken"]


# ---------------------------------------------------------------- servers that break


def whole(connection, request, text=b"<html>", kind=b"text/html", status=b"200 OK"):
    connection.sendall(head(status, kind, b"content-length: %d" % len(text)) + text)


def huge_headers(connection, request):
    connection.sendall(b"HTTP/1.1 200 OK\r\nx-a: " + b"a" * (1 << 20) + b"\r\n\r\n")


def no_http(connection, request):
    connection.sendall(b"\x00\x01\x02 no HTTP\r\n\r\n")


def hang_up(connection, request):
    reset(connection)


def endless_error(connection, request):
    connection.sendall(head(b"503 Broken", b"application/json"))
    while True:
        connection.sendall(b"x" * 65536)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "behave", [whole, huge_headers, no_http, hang_up, endless_error], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_answer_is_one_error_and_another_step_may_answer(
    gateway_for, external, kube, behave, stream
):
    gateway = gateway_for(**outside_alone())
    external.answer = behave
    answer = ask(gateway, stream=stream)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "server_error")
    rules = [{"targets": [{"external": "outside"}]}]
    kube.put(
        llm_object("LLMRoute", "r", {"models": ["chat"], "rules": rules, "fallbacks": [{"canned": "Later."}]})
    )
    gateway.wait("the step answers", lambda: ask(gateway, stream=stream).headers.get("x-quire-degraded"))


@pytest.mark.parametrize("num_events", [1, 2, 3, 4])
def test_a_stream_that_is_reset_after_any_event_ends_with_one_error_event_unless_all_was_said(
    gateway_for, external, num_events
):
    sent = threading.Event()

    def cut(connection, request):
        every = [*chunks(request, "one ", "two "), b"[DONE]"]
        connection.sendall(head() + b"".join(map(event, every[:num_events])) + b'data: {"half')
        assert sent.wait(30)
        reset(connection)

    external.answer = cut
    gateway = gateway_for(**outside_alone())
    with httpx.stream(
        "POST", gateway.url + PATH, json={**BODY, "stream": True}, timeout=60, verify=NO_TLS
    ) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        sent.set()
        events = [first, *(line for line in lines if line)]
    assert events[-1] == "data: [DONE]"
    assert '"half' not in "".join(events)
    errors = [line for line in events if '"error"' in line]
    if num_events >= 3:  # with the reason why it finished
        assert errors == []
        assert len(events) == 3 + 1
    else:
        (error,) = errors
        assert error is events[-2]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"


@pytest.mark.parametrize(
    "text",
    [
        b"<html>not events</html>\n\n",
        b"\x00\xff" * 1000 + b"\n\n",
        b"data: {}\n\n",
        b"",
        b"data: " + b"x" * 2**21,
    ],
    ids=["html", "bytes", "no end", "nothing", "too long"],
)
def test_garbage_in_place_of_events_ends_with_an_error_event(gateway_for, external, text):
    gateway = gateway_for(**outside_alone())
    external.answer = lambda connection, request: connection.sendall(
        head() + event(chunks(request, "Hello")[0]) + text
    )
    answer = ask(gateway, stream=True)
    *_, error, done = (line for line in answer.text.splitlines() if line)
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert text == b"" or text.strip() == b"data: {}" or text.strip() not in answer.content
    external.answer = well
    assert ask(gateway).status_code == 200


def test_lines_may_end_as_on_windows(gateway_for, external):
    def windows(connection, request):
        every = [*chunks(request, "Hello ", "there"), b"[DONE]"]
        connection.sendall(head() + b"".join(event(one, b"\r\n\r\n") for one in every))

    external.answer = windows
    answer = ask(gateway_for(**outside_alone()), stream=True)
    assert text_of(answer.text) == "Hello there"
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_body_ends_when_it_is_silent_for_too_long(gateway_for, external, stream):
    released = threading.Event()

    def slow(connection, request):
        start = head() if stream else head(b"200 OK", b"application/json", b"content-length: 500")
        connection.sendall(start + (event(chunks(request, "a")[0]) if stream else b"{"))
        released.wait(60)

    external.answer = slow
    gateway = gateway_for(**outside_alone(), environ={**LOOPBACK, "IDLE_SECONDS": 1})
    answer = ask(gateway, stream=stream)
    released.set()
    assert "replica_timeout" in answer.text
    assert answer.status_code == (200 if stream else 504)


@pytest.mark.deep
def test_one_that_never_answers_is_given_up_in_time_and_left_alone_after_five(gateway_for, external):
    released = threading.Event()
    external.answer = lambda connection, request: released.wait(60)
    gateway = gateway_for(**outside_alone(), environ={**LOOPBACK, "FIRST_BYTE_SECONDS": 2})
    codes = [ask(gateway, stream=True).json()["error"]["code"] for _ in range(CONSECUTIVE_FAILURES + 1)]
    released.set()
    assert codes == ["replica_timeout"] * CONSECUTIVE_FAILURES + ["no_replica"]
    assert 1 <= len(external.requests) <= CONSECUTIVE_FAILURES


# ---------------------------------------------------------------- prices


def test_a_client_whose_budget_is_too_small_for_the_backend_gets_the_next_step(gateway_for, external, kube):
    budget = {"cost": "0.01"}
    kube.put(
        llm_object(
            "LLMClient",
            "alice",
            {"keyHashes": [hashlib.sha256(KEY.encode()).hexdigest()], "budget": budget},
        )
    )
    dear = {"prices": {"completionPerMillion": "1000000"}}
    fallbacks = [{"external": "outside"}, {"canned": "Later."}]
    gateway = gateway_for(targets=[{"deployment": "nowhere"}], backend=dear, fallbacks=fallbacks)
    assert ask(gateway).headers["x-quire-degraded"] == "canned"
    assert external.num_connections == 0
    put_backend(kube, external, prices={"completionPerMillion": "1"})
    gateway.wait("it is cheap", lambda: ask(gateway).headers["x-quire-degraded"] == "external=outside")
