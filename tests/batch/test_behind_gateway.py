"""Files, batches and jobs through the real gateway: whose they are, and what lines may do."""

import base64
import hashlib
import http.client
import json
import socket

import httpx
import openai
import pytest

from e2e.ports import free_port
from tests.batch.launch import CHAT, Batch, http_client, line, lines_of, submit, wait, wait_over
from tests.batch.stub_gateway import StubGateway
from tests.gateway.kube_stub import KubeStub, endpoint_slice, llm_object
from tests.gateway.launch import Gateway
from tests.server.launch import NO_TLS

KEYS = {"alice": "sk-alice", "bob": "sk-bob"}


def client_object(name, **spec):
    digest = hashlib.sha256(KEYS[name].encode()).hexdigest()
    return llm_object("LLMClient", name, {"keyHashes": [digest], **spec})


class Stack:
    """A replica that is a stub, the gateway before it, and quire-batch beside that."""

    def __init__(self, keys, directory, *objects, **settings):
        self.replica = StubGateway()
        self.kube = KubeStub()
        port = int(self.replica.url.rpartition(":")[2])
        self.kube.put(endpoint_slice("s", {"a": "127.0.0.1"}, port=port))
        for each in objects:
            self.kube.put(each)
        batch_port = free_port()
        self.gateway = Gateway(
            self.kube.url,
            directory,
            SIGNING_KEY_FILE=keys / "tls.key",
            PUBLIC_KEYS_DIR=keys / "public",
            BATCH_URL=f"http://127.0.0.1:{batch_port}",
        )
        self.batch = Batch(self.gateway.url, keys, directory / "state", PORT=batch_port, **settings)
        self.batch.url = f"http://127.0.0.1:{batch_port}"

    def __enter__(self):
        self.gateway.wait_replicas(1)
        self.batch.wait_ready()
        return self

    def __exit__(self, *exception):
        self.batch.__exit__(None)
        self.gateway.__exit__(None)
        self.kube.close()
        self.replica.__exit__(None)

    def sdk(self, key="none"):
        url = f"{self.gateway.url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, http_client=http_client(), max_retries=0)


@pytest.fixture
def stack(keys, tmp_path):
    with Stack(keys, tmp_path, client_object("alice"), client_object("bob")) as stack:
        yield stack


@pytest.fixture
def open_stack(keys, tmp_path):
    """Without any LLMClient."""
    with Stack(keys, tmp_path) as stack:
        yield stack


def claims(headers):
    """What the gateway has signed for the replica."""
    body = headers["x-quire-gateway-token"].split(".")[1]
    return json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))


def test_lines_are_their_client_s_at_the_priority_of_batches_and_its_key_is_nowhere(stack):
    alice, bob = stack.sdk("sk-alice"), stack.sdk("sk-bob")
    over = wait_over(alice, submit(alice, *(line(number) for number in range(5))).id)
    assert over.status == "completed" and len(lines_of(alice, over.output_file_id)) == 5

    signed = [claims(one) for one in stack.replica.headers]
    assert {(one["client"], one["cache"], one["priority"]) for one in signed} == {
        ("models/alice", "models/alice", 10)
    }
    assert not any("x-quire-delegation" in one for one in stack.replica.headers)
    with pytest.raises(openai.NotFoundError):
        bob.batches.retrieve(over.id)
    with pytest.raises(openai.AuthenticationError):
        list(stack.sdk("sk-mallory").files.list())
    stored = b"".join(path.read_bytes() for path in stack.batch.directory.rglob("*") if path.is_file())
    assert b"sk-alice" not in stored + stack.batch.log.read_bytes() + stack.gateway.log.read_bytes()
    alice.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "now"}])
    assert claims(stack.replica.headers[-1])["priority"] == 0, "requests come before lines"


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [({"suspended": True}, 403, "client_suspended"), ({"keyHashes": []}, 401, "missing_api_key")],
)
def test_lines_of_a_client_stop_with_its_key(stack, change, status, code):
    alice = stack.sdk("sk-alice")
    stack.replica.answer = lambda content: stack.replica.hold.clear() if content == "question 2" else None
    batch = submit(alice, *(line(number) for number in range(20)))
    wait("lines are in flight", lambda: not stack.replica.hold.is_set() and stack.replica.in_flight)
    stack.kube.put(client_object("alice", **change))
    wait("the gateway knows", lambda: not _may_list(alice))

    def others_are_refused():
        refused = stack.batch.metric("batch_lines_total", status="failed")
        return refused + stack.replica.asked.total() == 20

    wait("the others are refused", others_are_refused)
    asked = stack.replica.asked.total()
    stack.replica.hold.set()
    wait("every line is over", lambda: stack.batch.metric("batch_batches_total", status="completed") == 1)

    assert stack.replica.asked.total() == asked, "nothing was asked for after that"
    stack.kube.put(client_object("alice"))
    wait("the key is back", lambda: _may_list(alice))
    over = alice.batches.retrieve(batch.id)
    failed = lines_of(alice, over.error_file_id)
    assert len(failed) == 20 - asked
    assert {one["response"]["status_code"] for one in failed} == {status}
    assert {one["response"]["body"]["error"]["code"] for one in failed} <= {code, "invalid_api_key"}


def _may_list(client):
    try:
        client.models.list()
    except openai.APIStatusError:
        return False
    return True


def test_limits_of_the_client_hold_for_its_lines(stack):
    stack.kube.put(client_object("alice", limits={"concurrentRequests": 1}, allowedModels=["tiny"]))
    alice = stack.sdk("sk-alice")
    other = {**line(9), "body": {**line(9)["body"], "model": "another"}}
    over = wait_over(alice, submit(alice, *(line(number) for number in range(6)), other).id)

    assert over.status == "completed" and over.request_counts.completed == 6
    assert stack.replica.most_in_flight == 1
    (failed,) = lines_of(alice, over.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"


def test_without_keys_all_clients_are_one(open_stack):
    client = open_stack.sdk()
    over = wait_over(client, submit(client, line(1)).id)
    assert over.status == "completed"
    assert [one.id for one in open_stack.sdk("other").batches.list()] == [over.id]


@pytest.mark.deep
def test_no_fallback_of_a_route_answers_a_line_which_waits_for_the_model(stack):
    """One that is switched off, with a text that interactive clients get."""
    spec = {
        "models": ["routed"],
        "rules": [{"targets": [{"deployment": "tiny"}]}],
        "fallbacks": [{"canned": "Later."}],
    }
    switch = {"enabled": True, "mode": "Fallback", "message": "off"}
    stack.kube.put(llm_object("LLMRoute", "r", {**spec, "killSwitch": switch}))
    alice = stack.sdk("sk-alice")

    def asked():
        messages = [{"role": "user", "content": "now"}]
        return alice.chat.completions.create(model="routed", messages=messages)

    wait("the gateway knows the route", lambda: "routed" in {one.id for one in alice.models.list()})
    assert asked().choices[0].message.content == "Later.", "to a client that does not wait"
    batch = submit(alice, {**line(1), "body": {**line(1)["body"], "model": "routed"}})
    wait("the line waits", lambda: stack.batch.metric("batch_line_retries_total", reason="refused"))
    stack.kube.put(llm_object("LLMRoute", "r", spec, generation=2))
    over = wait_over(alice, batch.id)
    (answer,) = lines_of(alice, over.output_file_id)
    assert answer["response"]["body"]["echo"] == "question 1"


def test_a_delegation_is_no_key_for_anything_else_and_is_not_made_up(stack):
    alice = stack.sdk("sk-alice")
    stack.replica.hold.clear()
    submit(alice, line(1))
    wait("the line is in flight", lambda: stack.replica.in_flight)
    stored = b"".join(path.read_bytes() for path in stack.batch.directory.glob("*sqlite*"))
    begin = stored.index(b"eyJhbGci")
    delegation = stored[begin : begin + 600].split(b'"')[0]
    delegation = bytes(one for one in delegation if chr(one).isalnum() or one in b"-_.")[:400]

    def ask(path, **headers):
        return httpx.get(stack.gateway.url + path, headers=headers, verify=NO_TLS)

    text = delegation.decode()
    for path in ("/v1/files", "/v1/batches"):
        assert ask(path, **{"x-quire-delegation": text}).status_code == 401
    forged = httpx.post(
        stack.gateway.url + CHAT, json=line(1)["body"], headers={"x-quire-delegation": "a.b.c"}, verify=NO_TLS
    )
    assert (forged.status_code, forged.json()["error"]["code"]) == (401, "invalid_delegation")
    stack.replica.hold.set()


def test_nothing_else_of_quire_batch_is_reached_through_the_gateway(open_stack):
    for path in ("/v1/files/../../metrics", "/v1/files/x/y", "/v1/files/%2e%2e", "/v1/batches/a/content/b"):
        connection = http.client.HTTPConnection("127.0.0.1", open_stack.gateway.port)
        connection.request("GET", path)  # as it is: other clients tidy it up
        answer = connection.getresponse()
        assert answer.status == 404 and b"batch_lines" not in answer.read(), path
        connection.close()
    put = httpx.put(f"{open_stack.gateway.url}/v1/files", verify=NO_TLS)
    assert (put.status_code, put.headers["allow"]) == (405, "GET, POST, DELETE")


def test_uploads_and_downloads_of_any_length_pass_the_gateway(open_stack):
    client = open_stack.sdk()
    content = b"x" * (9 << 20)
    file = client.files.create(file=("big.jsonl", content), purpose="batch")
    assert file.bytes == len(content)
    assert client.files.content(file.id).read() == content
    line_of_log = open_stack.gateway.wait_requests(2)[0]
    assert (line_of_log["path"], line_of_log["status"]) == ("/v1/files", 200)


def test_a_file_that_is_too_long_is_refused_as_that_while_it_is_sent(keys, tmp_path):
    with Stack(keys, tmp_path, FILE_BYTES=1 << 20) as stack:
        with pytest.raises(openai.APIStatusError) as caught:
            stack.sdk().files.create(file=("big.jsonl", b"x" * (32 << 20)), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (413, "file_too_long")


def test_an_upload_that_its_client_leaves_is_no_file(open_stack):
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n"
    head += b"content-type: multipart/form-data; boundary=b\r\n\r\n"
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nxxxx'
    with socket.create_connection(("127.0.0.1", open_stack.gateway.port)) as connection:
        connection.sendall(head + part)
    line_of_log = open_stack.gateway.wait_requests(1)[0]
    assert line_of_log["path"] == "/v1/files"
    assert list(open_stack.sdk().files.list()) == []
    assert list((open_stack.batch.directory / "files").iterdir()) == []


def test_while_quire_batch_is_away_clients_are_asked_to_come_back_and_lose_nothing(stack):
    alice = stack.sdk("sk-alice")
    stack.replica.hold.clear()
    batch = submit(alice, *(line(number) for number in range(5)))
    wait("lines are in flight", lambda: stack.replica.in_flight)
    stack.batch.kill()
    answer = httpx.get(
        f"{stack.gateway.url}/v1/batches", headers={"authorization": "Bearer sk-alice"}, verify=NO_TLS
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "batch_unavailable")
    assert answer.headers["retry-after"]
    stack.replica.hold.set()
    stack.batch.start().wait_ready()
    assert wait_over(alice, batch.id).request_counts.completed == 5
