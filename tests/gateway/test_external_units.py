"""The parts of external backends that decide: which URLs, addresses, keys, fields and events."""

import json
import os
from decimal import Decimal
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.client_limits import ClientLimiter
from quire_gateway.external_models import ExternalModels
from quire_gateway.external_secrets import ExternalSecrets, MountedSecret, SecretError
from quire_gateway.llm_client import Budget, LLMClient
from quire_gateway.llm_external_backend import parse
from quire_gateway.llm_route import ObjectError, Prices
from quire_gateway.openai.external import ExternalEvents, request_body
from quire_gateway.outlier_detection import BASE_SECONDS, CONSECUTIVE_FAILURES, Verdict
from quire_gateway.public_addresses import CLUSTER_NETWORKS, AddressGuard
from quire_gateway.usage_ledger import UsageLedger, spending
from quire_http.errors import ApiError
from tests.gateway.kube_stub import llm_object

SPEC = {"baseURL": "https://api.example.com/v1", "model": "gpt"}


def backend(name="x", **spec):
    return parse(llm_object("LLMExternalBackend", name, {**SPEC, **spec}))


@pytest.mark.parametrize(
    "spec",
    [
        {"baseURL": "https://user:secret@api.example.com/v1"},
        {"baseURL": "https://api.example.com/v1?key=1"},
        {"baseURL": "https://api.example.com/v1#x"},
        {"baseURL": "https://api.example.com@169.254.169.254/v1"},
        {"baseURL": "file:///etc/passwd"},
        {"baseURL": "https://api.example.com:0/v1"},
        {"baseURL": "https://api.example.com:65536/v1"},
        {"baseURL": "https:///v1"},
        {"baseURL": "https://api.example.com/v1\r\nhost: x"},
        {"baseURL": "http://api.example.com/v1"},
        {"baseURL": "http://api.example.com/v1", "allowPlainHTTP": True, "apiKeySecretRef": {"name": "k"}},
        {"apiKeySecretRef": {"name": "../../run"}},
        {"apiKeySecretRef": {"name": "k", "key": "../k"}},
        {"apiKeySecretRef": {"name": "k", "key": ".."}},
        {"prices": {"promptPerMillion": "free"}},
        {"requestsPerMinute": "many"},
    ],
)
def test_a_backend_that_the_crd_would_refuse_is_none_where_the_crd_is_another_one(spec):
    with pytest.raises(ObjectError):
        backend(**spec)


def test_plain_http_is_for_those_that_say_so():
    found = backend(baseURL="http://vllm.example.com:8000/v1/", allowPlainHTTP=True)
    assert (found.base_url, found.host) == ("http://vllm.example.com:8000/v1", "vllm.example.com")


PRIVATE = (
    *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "0.0.0.0"),
    *("169.254.169.254", "224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fd00::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::", "::127.0.0.1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "fec0::1", "feff::1"),
    *("64:ff9b:1::808:808", "::ffff:0:127.0.0.1", "192.0.0.8", "192.88.99.1", "5f00::1", "3fff::1"),
)


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_not_connected_to(address):
    assert not AddressGuard().allows(ip_address(address))


CLOUD = (  # services for the machines of a cloud
    *("168.63.129.16", "192.0.0.192", "100.100.100.200", "169.254.169.254", "169.254.170.23"),
    *("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
)


@pytest.mark.parametrize("address", CLOUD)
def test_services_of_clouds_for_their_machines_are_never_connected_to_in_any_form(address):
    everything = AddressGuard([ip_network("0.0.0.0/0"), ip_network("::/0")])
    guards = AddressGuard(), AddressGuard(CLUSTER_NETWORKS), everything
    assert everything.allows(ip_address("10.1.2.3")) and everything.allows(ip_address("fd00::1"))
    forms = [address]
    if "." in address:
        high, low = (format(int(ip_address(address)) >> shift & 0xFFFF, "04x") for shift in (16, 0))
        flipped = [format(int(word, 16) ^ 0xFFFF, "x") for word in (high, low)]
        forms += [f"::ffff:{address}", f"::{address}", f"::ffff:0:{address}", f"64:ff9b::{address}"]
        forms += [f"64:ff9b:1::{address}", f"64:ff9b:1:{high}:{low[:2]}:{low[2:]}00::"]
        forms += [
            f"2002:{high}:{low}::1",
            f"2001:0:{high}:{low}::f7f7:f7f7",
            f"2001:0:808:808:0:0:{':'.join(flipped)}",
        ]
    for form in forms:
        assert not any(guard.allows(ip_address(form)) for guard in guards), form


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_public_addresses_are(address):
    assert AddressGuard().allows(ip_address(address))


def test_a_network_can_be_allowed_but_never_link_local_addresses():
    guard = AddressGuard([ip_network("10.0.0.0/8"), ip_network("0.0.0.0/0"), ip_network("::/0")])
    assert all(guard.allows(ip_address(one)) for one in ("10.1.2.3", "64:ff9b:1::808:808", "fec0::1"))
    refused = ("169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "fe80::1", "224.0.0.1")
    assert not any(guard.allows(ip_address(one)) for one in refused)


def test_a_translators_own_prefix_can_be_allowed_for_what_is_public_itself():
    guard = AddressGuard([ip_network("64:ff9b:1::/48")])
    assert guard.allows(ip_address("64:ff9b:1::808:808"))
    assert guard.allows(ip_address("64:ff9b:1:808:8:800::"))
    for private in (
        "64:ff9b:1::7f00:1",
        "64:ff9b:1:7f00:0:100::",
        "64:ff9b:1:7f:0:1::",
        "64:ff9b:1:0:a:0:100::",
    ):
        assert not guard.allows(ip_address(private)), private


@pytest.fixture
def mounted(tmp_path):
    (tmp_path / "openai").mkdir()
    (tmp_path / "openai" / "api-key").write_text("sk-one\n")
    hosts = ("api.example.com", "*.azure.example.com")
    return ExternalSecrets(tmp_path, [MountedSecret("openai", hosts, ("models",))])


def reason(secrets, **spec):
    with pytest.raises(SecretError) as error:
        secrets.key(backend(**spec))
    assert secrets.problem(backend(**spec)) == (error.value.reason, str(error.value))
    return error.value.reason


REF = {"apiKeySecretRef": {"name": "openai"}}


def test_a_key_is_read_again_when_its_file_changes(mounted, tmp_path):
    assert mounted.key(backend()) == ""
    assert mounted.key(backend(**REF)) == "sk-one"
    path = tmp_path / "openai" / "new"
    path.write_text("sk-two")
    os.replace(path, tmp_path / "openai" / "api-key")
    assert mounted.key(backend(**REF)) == "sk-two"
    assert mounted.problem(backend(**REF)) is None


def test_a_key_goes_to_the_hosts_and_namespaces_that_it_is_for(mounted):
    assert mounted.key(backend(baseURL="https://mine.azure.example.com/openai/v1", **REF)) == "sk-one"
    for host in ("evil.example.com", "azure.example.com", "api.example.com.evil.com", "xapi.example.com"):
        assert reason(mounted, baseURL=f"https://{host}/v1", **REF) == "SecretNotAllowed"
    other = parse(llm_object("LLMExternalBackend", "x", {**SPEC, **REF}, namespace="others"))
    with pytest.raises(SecretError, match="namespace others"):
        mounted.key(other)


def test_a_secret_that_is_not_there_and_a_value_that_is_no_key_are_named(mounted, tmp_path):
    assert reason(mounted, apiKeySecretRef={"name": "unknown"}) == "SecretNotMounted"
    assert reason(mounted, apiKeySecretRef={"name": "openai", "key": "other"}) == "SecretNotMounted"
    for text in ("", "two lines\nsk", "with space", "a\x00b"):
        (tmp_path / "openai" / "bad").write_text(text)
        assert reason(mounted, apiKeySecretRef={"name": "openai", "key": "bad"}) == "SecretInvalid"
    (tmp_path / "openai" / "bad").write_bytes(b"\xff")
    assert reason(mounted, apiKeySecretRef={"name": "openai", "key": "bad"}) == "SecretNotMounted"


def test_fields_of_ours_stay_here_and_all_others_go():
    ours = {"resume": {"id": "x"}, "cache_salt": "s", "priority": 3, "cache_control": {}, "timeout": 1}
    body = {"model": "chat", "temperature": 0, "tools": [{"type": "function"}], "logit_bias": {"5": 1}}
    sent = json.loads(request_body(json.dumps({**body, **ours}).encode(), "gpt"))
    assert sent == {**body, "model": "gpt"}


def test_a_body_that_is_nested_too_deep_to_be_written_is_the_clients_error():
    deep = b'{"model": "chat", "a": ' + b"[" * 300 + b"]" * 300 + b"}"
    with pytest.raises(ApiError) as refused:
        request_body(deep, "gpt")
    assert refused.value.status == 400


def test_a_stream_is_asked_for_its_usage_and_keeps_its_other_options():
    options = {"include_obfuscation": False, "continuous_usage_stats": True, "include_usage": False}
    sent = json.loads(request_body(json.dumps({"stream": True, "stream_options": options}).encode(), "gpt"))
    assert sent["stream_options"] == {"include_obfuscation": False, "include_usage": True}


CHUNKS = [
    b'data: {"choices":[{"delta":{"content":"\\"usage\\""},"finish_reason":null}],"usage":null}',
    b": a comment",
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":null}',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}',
    b"data: [DONE]",
]


@given(st.lists(st.integers(0, 400)), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans())
def test_however_a_stream_is_split_all_events_come_but_the_usage_that_was_not_asked_for(
    cuts, line_end, keeps_usage, ends_whole
):
    text = b"".join(each + line_end * 2 for each in CHUNKS)
    text = text if ends_whole else text.removesuffix(line_end * 2)
    cuts = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    events = ExternalEvents(keeps_usage=keeps_usage)
    got = b""
    for start, end in zip(cuts, cuts[1:], strict=False):
        kept, fault = events.take(events.add(text[start:end]))
        assert not fault
        got += kept
    got += events.rest()
    expected = [each for each in CHUNKS if keeps_usage or b'"choices":[],' not in each]
    assert got == b"".join(each + b"\n\n" for each in expected)
    assert events.is_finished and events.is_done


@pytest.mark.parametrize("text", [b"<html>no</html>\n\n", b"x" * (2 << 20), b"data: " + b"x" * (2 << 20)])
def test_what_is_no_event_or_too_long_is_a_fault(text):
    events = ExternalEvents(keeps_usage=False)
    good = CHUNKS[0] + b"\n\n"
    kept, fault = events.take(events.add(good + text + b"\n\n"))
    assert (kept, bool(fault)) == (good, True)
    assert not events.is_finished


@pytest.mark.parametrize(
    "text",
    [
        b'data: {"error": {"message": "organization org-secret"}}',
        b'event: error\ndata: {"message": "org-secret"}',
        b'id: 3\ndata: {"error": "org-secret", "choices": []}',
    ],
)
def test_an_error_in_a_stream_is_a_fault_and_nothing_of_it_is_shown(text):
    events = ExternalEvents(keeps_usage=False)
    kept, fault = events.take(events.add(CHUNKS[0] + b"\n\n" + text + b"\n\n"))
    assert kept == CHUNKS[0] + b"\n\n"
    assert fault and "org-secret" not in fault
    ended = ExternalEvents(keeps_usage=False)
    ended.add(text)
    assert b"org-secret" not in ended.rest()


def test_a_text_about_errors_is_none():
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "\\"error\\""}}], "error": null}\n\n'
    assert ExternalEvents(keeps_usage=False).take(event) == (event, "")


@pytest.mark.parametrize("first", [b"event: message\n", b"id: 7\n", b": a comment\n", b":\n"])
def test_a_stream_is_complete_whatever_lines_its_events_begin_with(first):
    events = ExternalEvents(keeps_usage=False)
    kept, fault = events.take(b"".join(first + CHUNKS[at] + b"\n\n" for at in (0, 2, 3)))
    assert not fault and events.is_finished and not events.is_done
    assert b'"choices":[],' not in kept
    events.take(first + CHUNKS[4] + b"\n\n")
    assert events.is_done


def test_a_stream_of_two_answers_is_complete_when_both_are():
    events = ExternalEvents(keeps_usage=False, num_answers=2)
    for index, is_finished in ((1, False), (1, False), (0, True)):
        chunk = {"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}
        events.take(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        assert events.is_finished is is_finished


def test_a_backend_that_fails_is_left_alone_then_tried_by_one_request_and_starts_anew_when_changed(clock):
    models = ExternalModels(clock)
    model = models.of(backend(), [backend()])
    uid = backend().uid
    for _ in range(CONSECUTIVE_FAILURES):
        assert model.candidates([])
        model.outliers.begin(uid)
        model.outliers.end(uid, Verdict.FAILURE, model.replicas)
    assert models.of(backend(), [backend()]) is model
    assert model.candidates([]) == []
    clock.now += BASE_SECONDS
    assert model.candidates([]) and not model.candidates([uid])
    model.outliers.begin(uid)
    assert model.candidates([]) == [], "one request tries it"
    changed = backend(model="other")
    assert models.of(changed, [changed]).candidates([])


def test_a_dearer_fallback_is_said_where_limits_are_shared(clock):
    said = []

    class Charges:
        def spend(self, client, num_tokens):
            said.append((client, num_tokens))

    alice = LLMClient("models", "alice", "u", "", (), budget=Budget("Month", cost=Decimal(9)))
    ledger = UsageLedger(lambda place: {"metadata": {"uid": "u"}, "spec": {}}, clock)
    limiter = ClientLimiter(lambda: 1, ledger, clock)
    prices = [Prices(Decimal(each), Decimal(each)) for each in (1, 2)]
    reservation = limiter.reserve(alice, spending(500_000, 500_000, prices[0]), prices[0])
    limiter.charges = Charges()
    reservation.reprice(prices[1])
    assert said == [("u", 0)]
    reservation.reprice(prices[0])
    assert said == [("u", 0)], "it holds no more than before"


def test_a_client_is_charged_the_prices_of_what_answers_and_refused_where_its_budget_has_no_room(clock):
    alice = LLMClient("models", "alice", "u", "", (), budget=Budget("Month", cost=Decimal(3)))
    ledger = UsageLedger(lambda place: {"metadata": {"uid": "u"}, "spec": {}}, clock)
    limiter = ClientLimiter(lambda: 1, ledger, clock)
    prices = [Prices(Decimal(each), Decimal(each)) for each in (1, 2, 4)]
    reservation = limiter.reserve(alice, spending(500_000, 500_000, prices[0]), prices[0])
    with pytest.raises(ApiError) as refused:
        reservation.reprice(prices[2])
    assert refused.value.code == "insufficient_quota"
    reservation.reprice(prices[1])
    with pytest.raises(ApiError):
        limiter.reserve(alice, spending(1_000_000, 500_000, prices[0]), prices[0])
    reservation.settle(1000, 0)
    assert ledger.spent(alice).cost == Decimal("0.002")
    limiter.reserve(alice, spending(1_000_000, 1_000_000, prices[0]), prices[0]).release()
    unread = limiter.reserve(alice, spending(500_000, 500_000, prices[1]), prices[1])
    unread.reprice(prices[0])
    unread.settle_whole()
    assert ledger.spent(alice).cost == Decimal("1.002")
