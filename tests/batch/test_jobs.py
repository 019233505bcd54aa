"""Jobs: one request, whose answer is polled, or reported to a webhook that the administrator allows."""

import base64
import hashlib
import hmac
import json
from http.server import BaseHTTPRequestHandler

import pytest

from e2e.http_server import HttpServer
from quire_batch.webhook import MAX_FAILURES, Origin, WebhookError, delay, origin
from tests.batch.launch import CHAT, Signed, http_client, line, wait

SECRET = b"s" * 32


class Receiver:
    """A webhook's receiver. ``statuses``: of its answers, the last one for ever."""

    def __init__(self, *statuses, location=""):
        self.statuses = list(statuses)
        self.received = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.received.append((self.path, dict(self.headers), body))
                self.send_response(outer.statuses.pop(0) if len(outer.statuses) > 1 else outer.statuses[0])
                if location:
                    self.send_header("location", location)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = HttpServer(("127.0.0.1", 0), Handler)
        self.url = self._server.url
        self._server.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._server.stop()


class Jobs:
    """A client of /v1/jobs."""

    def __init__(self, batch, signer, client="models/alice"):
        self._http = http_client(auth=Signed(signer, client), base_url=batch.url)

    def create(self, number=1, **more):
        return self._http.post("/v1/jobs", json={"endpoint": CHAT, "body": line(number)["body"], **more})

    def get(self, id_):
        return self._http.get(f"/v1/jobs/{id_}")

    def delete(self, id_):
        return self._http.delete(f"/v1/jobs/{id_}")

    def wait_over(self, id_):
        def over():
            job = self.get(id_).json()
            return job if job["status"] not in ("queued", "in_progress") else None

        return wait("the job is over", over)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "webhook-secret"
    path.write_text(f"whsec_{base64.b64encode(SECRET).decode()}\n")
    return path


def test_a_job_is_taken_polled_and_answered(start, signer, gateway):
    jobs = Jobs(start(), signer)
    gateway.hold.clear()
    taken = jobs.create(7)
    assert taken.status_code == 202
    job = taken.json()
    assert (job["object"], job["status"], job["response"]) == ("job", "queued", None)
    wait("it is asked for", lambda: jobs.get(job["id"]).json()["status"] == "in_progress")
    gateway.hold.set()
    done = jobs.wait_over(job["id"])
    assert (done["status"], done["response"]["status_code"], done["error"]) == ("completed", 200, None)
    assert done["response"]["body"]["echo"] == "question 7"
    assert jobs.get(job["id"]).json() == done, "its answer can be asked for again"


def test_a_job_that_fails_has_the_answer_that_says_why(start, signer, gateway):
    gateway.answer = lambda content: (400, {"error": {"code": "too_long"}}, {})
    jobs = Jobs(start(), signer)
    job = jobs.wait_over(jobs.create().json()["id"])
    assert (job["status"], job["response"]["body"]["error"]["code"]) == ("failed", "too_long")


def test_a_job_is_cancelled_and_seen_by_its_client_alone(start, signer, gateway):
    batch = start()
    jobs, others = Jobs(batch, signer), Jobs(batch, signer, "models/bob")
    gateway.hold.clear()
    id_ = jobs.create().json()["id"]
    wait("it is asked for", lambda: gateway.in_flight)
    assert others.get(id_).status_code == others.delete(id_).status_code == 404
    assert jobs.delete(id_).json()["status"] == "cancelled"
    gateway.hold.set()
    assert jobs.wait_over(id_)["error"]["code"] == "batch_cancelled"
    assert jobs.get("job_none").status_code == 404
    assert jobs._http.get(f"/v1/batches/{id_}").status_code == 404, "a job is no batch"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "endpoint"),
        ({"endpoint": "/v1/models", "body": {}}, "endpoint"),
        ({"endpoint": CHAT, "body": {}}, "body.model"),
        ({"endpoint": CHAT, "body": {"model": "tiny", "stream": True}}, "body.stream"),
        ({"endpoint": CHAT, "body": {"model": "tiny"}, "priority": "high"}, "priority"),
    ],
)
def test_what_is_no_request_is_refused_and_the_field_named(start, signer, body, param):
    answer = Jobs(start(), signer)._http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_is_no_json_is_refused_and_so_is_a_number_that_has_none(start, signer):
    """It would become null, and ask for something else."""
    jobs, content = Jobs(start(), signer), {"content-type": "application/json"}
    wanted = {"{": (None, None), "[1": (None, None), "\xff": (None, None)}
    for number in ("NaN", "1e400", "-Infinity"):
        body = f'{{"endpoint": "{CHAT}", "body": {{"model": "tiny", "x": [{number}]}}}}'
        wanted[body] = ("body", "invalid_body")
    for text, (param, code) in wanted.items():
        answer = jobs._http.post("/v1/jobs", content=text.encode("latin-1"), headers=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, code), text


def test_the_end_of_a_job_is_reported_signed_and_says_nothing_of_its_answer(start, signer, secret):
    with Receiver(200) as receiver:
        batch = start(WEBHOOKS=receiver.url, WEBHOOK_SECRET_FILE=secret)
        id_ = Jobs(batch, signer).create(webhook=f"{receiver.url}/done?for=me").json()["id"]
        wait("it is reported", lambda: receiver.received)
        path, headers, body = receiver.received[0]
        wait("it is counted", lambda: batch.metric("batch_webhooks_total", status="delivered") == 1)
    assert path == "/done?for=me"
    headers = {name.lower(): value for name, value in headers.items()}
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(SECRET, text, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    message = json.loads(body)
    assert message["type"] == "job.completed"
    assert message["data"] == {"id": id_, "object": "job", "status": "completed"}
    assert b"question" not in body


def test_a_webhook_that_fails_is_tried_again_and_never_follows_a_redirect(start, signer, secret):
    with Receiver(200) as inner, Receiver(307, 200, location=f"{inner.url}/secret") as receiver:
        batch = start(WEBHOOKS=receiver.url, WEBHOOK_SECRET_FILE=secret)
        Jobs(batch, signer).create(webhook=receiver.url)
        wait("it is tried again", lambda: len(receiver.received) == 2)
        assert not inner.received
        assert receiver.received[0][1]["webhook-id"] == receiver.received[1][1]["webhook-id"]


def test_only_allowed_origins_are_webhooks(start, signer, secret):
    without = Jobs(start(), signer).create(webhook="https://hooks.example.com/x")
    assert (without.status_code, without.json()["error"]["code"]) == (400, "webhooks_disabled")
    jobs = Jobs(start(WEBHOOKS="https://hooks.example.com", WEBHOOK_SECRET_FILE=secret), signer)
    for url, code in (
        ("http://hooks.example.com/", "webhook_not_allowed"),
        ("https://hooks.example.com:8443/", "webhook_not_allowed"),
        ("https://hooks.example.com.evil.test/", "webhook_not_allowed"),
        ("https://hooks.example.com@169.254.169.254/", "invalid_webhook"),
        ("https://169.254.169.254/latest", "webhook_not_allowed"),
        ("https://evil.test\\@hooks.example.com/", "invalid_webhook"),
        ("https://hooks.example.com/\r\nx: y", "invalid_webhook"),
        ("file:///etc/passwd", "invalid_webhook"),
        ("https://[::1", "invalid_webhook"),
    ):
        answer = jobs.create(webhook=url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), url
    assert jobs.create(webhook="https://HOOKS.example.com:443/x").status_code == 202


def test_an_origin_is_compared_whole_and_a_message_is_given_up_in_the_end():
    assert (
        origin("https://A.example/x") == origin("https://a.example:443") == Origin("https", "a.example", 443)
    )
    with pytest.raises(WebhookError):
        origin("https://" + "a" * 3000)
    delays = [delay(failures) for failures in range(1, MAX_FAILURES + 1)]
    assert delays[-1] is None and delays[:-1] == sorted(delays[:-1])
