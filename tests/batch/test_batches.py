"""OpenAI's SDK submits files and batches to the real program, on SQLite, before a gateway that is a stub."""

import json

import httpx
import openai
import pytest

from quire_gateway.request_signing import Identity
from tests.batch.launch import CHAT, line, lines_of, sdk, submit, wait, wait_over


def test_a_batch_is_done_and_each_custom_id_is_once_in_its_output(start, signer, gateway):
    client = sdk(start(), signer)
    batch = submit(client, *(line(number) for number in range(30)), metadata={"for": "a test"})
    assert (batch.status, batch.completion_window) == ("validating", "24h")

    done = wait_over(client, batch.id)
    assert done.status == "completed", done
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed, done.error_file_id) == (30, 30, 0, None)
    assert done.metadata == {"for": "a test"}
    output = lines_of(client, done.output_file_id)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(30)]
    for number, one in enumerate(output):
        assert one["response"]["status_code"] == 200 and one["error"] is None
        assert one["response"]["body"]["echo"] == f"question {number}"
    assert set(gateway.asked.values()) == {1}, "each line was asked for once"
    assert {one["x-quire-delegation"] for one in gateway.headers} == {"delegation of models/alice"}
    assert not any("authorization" in map(str.lower, one) for one in gateway.headers)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at


def test_files_and_batches_are_listed_page_by_page_and_deleted(start, signer):
    client = sdk(start(), signer)
    made = [client.files.create(file=(f"{n}.jsonl", b"{}\n"), purpose="batch") for n in range(5)]
    assert {one.id for one in client.files.list(limit=2)} == {one.id for one in made}
    assert [one.filename for one in client.files.list(order="asc")] != []
    assert client.files.content(made[0].id).read() == b"{}\n"
    assert client.files.retrieve(made[1].id).bytes == 3
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[0].id)
    batches = [submit(client, line(number)) for number in range(5)]
    assert {one.id for one in client.batches.list(limit=2)} == {one.id for one in batches}


def test_clients_do_not_see_each_other(start, signer):
    batch = start()
    alice, bob = sdk(batch, signer), sdk(batch, signer, "models/bob")
    mine = submit(alice, line(1))
    done = wait_over(alice, mine.id)

    assert list(bob.files.list()) == [] and list(bob.batches.list()) == []
    for ask in (
        lambda: bob.files.retrieve(done.output_file_id),
        lambda: bob.files.content(done.input_file_id),
        lambda: bob.files.delete(done.input_file_id),
        lambda: bob.batches.retrieve(mine.id),
        lambda: bob.batches.cancel(mine.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        bob.batches.create(input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h")
    assert list(bob.files.list(after=done.input_file_id)) == []


def test_nothing_is_answered_that_the_gateway_has_not_signed(start, signer):
    batch = start()
    for headers in ({}, {"authorization": "Bearer x"}):
        answer = httpx.get(f"{batch.url}/v1/files", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "gateway_token_required")
    for token in ("a.b.c", signer._signer.token("models/tiny", Identity(), "tiny")):
        answer = httpx.get(f"{batch.url}/v1/files", headers={"x-quire-gateway-token": token})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_gateway_token")
    assert httpx.get(f"{batch.url}/metrics").status_code == 200


def test_a_cancelled_batch_ends_with_what_is_done_and_stops_what_is_in_flight(start, signer, gateway):
    server = start()
    client = sdk(server, signer)
    gateway.answer = lambda content: gateway.hold.clear() if content == "question 3" else None
    batch = submit(client, *(line(number) for number in range(50)))
    wait("lines are in flight that get no answer", lambda: not gateway.hold.is_set() and gateway.in_flight)
    asked = gateway.asked.total()
    assert client.batches.cancel(batch.id).status == "cancelling"

    over = wait_over(client, batch.id)
    assert over.status == "cancelled" and 3 <= over.request_counts.completed < 50
    assert len(lines_of(client, over.output_file_id)) == over.request_counts.completed
    errors = lines_of(client, over.error_file_id)
    assert len(errors) == 50 - over.request_counts.completed
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    wait("nothing is in flight", lambda: server.metric("batch_lines_in_flight") == 0)
    assert gateway.in_flight, "though the gateway has answered none of them"
    assert gateway.asked.total() <= asked + over.request_counts.completed


def refused_once(client, ask, code):
    """A 409, and the SDK does not ask again by itself, as it does without that header."""
    answers = []
    client._client.event_hooks = {"response": [answers.append]}
    with pytest.raises(openai.ConflictError) as caught:
        ask(client.with_options(max_retries=2))
    client._client.event_hooks = {}
    return len(answers) == 1 and caught.value.code == code


def test_what_cannot_be_done_now_or_ever_is_asked_for_once(start, signer):
    """To cancel what is over, and to delete a file that is being validated."""
    server = start()
    client = sdk(server, signer)
    over = wait_over(client, submit(client, line(1)).id)
    assert refused_once(client, lambda it: it.batches.cancel(over.id), "batch_is_over")

    content = server.directory / "files" / over.input_file_id
    content.unlink()
    content.symlink_to(content)  # there, and not to be read
    again = client.batches.create(input_file_id=over.input_file_id, endpoint=CHAT, completion_window="24h")
    wait("it is put off", lambda: "batch cannot be prepared now" in server.log.read_text())
    assert client.batches.retrieve(again.id).status == "validating"
    assert refused_once(client, lambda it: it.files.delete(over.input_file_id), "file_in_use")
    client.batches.cancel(again.id)
    content.unlink()
    assert client.files.delete(over.input_file_id).deleted, "once nothing needs it"


def test_a_batch_that_expires_has_what_is_done_and_says_what_is_not(start, signer, gateway):
    client = sdk(start(WINDOW_SECONDS=3), signer)
    gateway.answer = lambda content: gateway.hold.clear() if content == "question 1" else None
    over = wait_over(client, submit(client, *(line(number) for number in range(9))).id)

    assert over.status == "expired" and over.expired_at >= over.expires_at
    done, left = over.request_counts.completed, over.request_counts.failed
    assert done >= 2 and done + left == 9
    assert len(lines_of(client, over.output_file_id)) == done
    assert {one["error"]["code"] for one in lines_of(client, over.error_file_id)} == {"batch_expired"}


def test_neighbours_share_the_beginning_of_their_prompt(start, signer, gateway):
    client = sdk(start(CONCURRENCY=1), signer)
    topics = ("Docker", "Python", "Rust")
    lines = [line(n, content=f"{topics[n % 3]} is asked about: {n:02}") for n in range(12)]
    assert wait_over(client, submit(client, *lines).id).status == "completed"
    begun = [content.split()[0] for content in gateway.order]
    assert begun == sorted(begun), "lines with one beginning follow one another"


def test_a_line_that_fails_by_itself_is_in_the_error_file_and_holds_up_no_other(start, signer, gateway):
    refused = (404, {"error": {"code": "model_not_found", "message": "?"}}, {})
    spent = (429, {"error": {"code": "insufficient_quota"}}, {"x-should-retry": "false"})
    answers = {"question 1": refused, "question 2": spent}
    gateway.answer = answers.get
    server = start()
    client = sdk(server, signer)
    over = wait_over(client, submit(client, *(line(number) for number in range(5))).id)

    assert over.status == "completed" and over.request_counts.failed == 2
    assert server.metric("batch_lines_total", status="failed") == 2, "by what they ask for"
    assert server.metric("batch_lines_total", status="error") == 0
    errors = {one["custom_id"]: one["response"] for one in lines_of(client, over.error_file_id)}
    assert errors["line-1"]["status_code"] == 404
    assert errors["line-2"]["body"]["error"]["code"] == "insufficient_quota"
    assert gateway.asked["question 1"] == gateway.asked["question 2"] == 1


def test_lines_for_which_there_is_no_room_are_asked_for_until_there_is(start, signer, gateway):
    refusals = iter(
        [(503, {"error": {"code": "queue_full"}}, {}), (429, {"error": {}}, {"retry-after": "1"})]
    )
    gateway.answer = lambda content: next(refusals, None) if content == "question 2" else None
    batch = start()
    client = sdk(batch, signer)
    over = wait_over(client, submit(client, *(line(number) for number in range(6))).id)
    assert over.status == "completed" and over.request_counts.completed == 6
    assert gateway.asked["question 2"] == 3
    assert batch.metric("batch_line_retries_total", reason="refused") == 2
    assert batch.metric("batch_lines_total", status="done") == 6


HOSTILE = {
    b"no json\n": "invalid_json_line",
    b"[1, 2]\n": "invalid_json_line",
    b"\xff\xfe\x00\n": "invalid_json_line",
    b"": "empty_file",
    b"\n\n": "empty_file",
    b'{"custom_id": "a\\u0000", "method": "POST"}\n': "invalid_custom_id",
    b'{"custom_id": 7, "method": "POST"}\n': "invalid_custom_id",
    b'{"a":' * 5000 + b"\n": "invalid_json_line",
    json.dumps(line(1, url="/v1/files")).encode(): "mismatched_url",
    json.dumps(line(1, url="http://169.254.169.254/")).encode(): "mismatched_url",
    json.dumps(line(1, method="GET")).encode(): "invalid_method",
    json.dumps(line(1, stream=True)).encode(): "stream_not_supported",
    json.dumps(line(1, model=None)).encode(): "missing_required_parameter",
    json.dumps({**line(1), "body": "x"}).encode(): "invalid_body",
    json.dumps(line(1)).encode() + b"\n" + json.dumps(line(1)).encode(): "duplicate_custom_id",
    json.dumps(line(1, content="x" * (5 << 20))).encode(): "line_too_long",
}


def test_what_is_no_list_of_requests_fails_and_says_which_line_is_wrong(start, signer, gateway):
    client = sdk(start(OPEN_BATCHES=100), signer)
    for content, code in HOSTILE.items():
        over = wait_over(client, submit(client, content=content).id)
        assert over.status == "failed", (content[:40], over)
        assert over.errors.data[0].code == code, (content[:40], over.errors)
    assert not gateway.asked, "nothing of them is asked for"


def test_errors_of_several_lines_are_said_together(start, signer):
    client = sdk(start(), signer)
    over = wait_over(client, submit(client, line(1), line(2, url="/x"), line(1), line(3, method="PUT")).id)
    assert [(one.line, one.param) for one in over.errors.data] == [
        (2, "url"),
        (3, "custom_id"),
        (4, "method"),
    ]


def test_uploads_that_cannot_be_used_are_refused(start, signer):
    batch = start(FILE_BYTES=1000, CLIENT_BYTES=2500)
    client = sdk(batch, signer)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("x", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="longer than 1000") as caught:
        client.files.create(file=("x", b"x" * 1001), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="longer than 1000"):
        client.files.create(file=("x", b"x" * (2 << 20)), purpose="batch")
    name = "../../../etc/passwd\x00\n"
    traversal = client.files.create(file=(name, b"{}"), purpose="batch")
    assert "/" not in traversal.filename and traversal.filename.startswith("passwd")
    for _ in range(2):
        client.files.create(file=("x", b"x" * 1000), purpose="batch")
    with pytest.raises(openai.RateLimitError, match="2500 bytes"):
        client.files.create(file=("x", b"x" * 1000), purpose="batch")
    files = sorted(path.name for path in (batch.directory / "files").iterdir())
    assert files == sorted(one.id for one in client.files.list()), "what was refused is not kept"
    assert list((batch.directory / "uploads").iterdir()) == []


def test_more_lines_or_batches_than_are_allowed_are_refused(start, signer, gateway):
    client = sdk(start(LINES=3, OPEN_BATCHES=1), signer)
    over = wait_over(client, submit(client, *(line(number) for number in range(4))).id)
    assert (over.status, over.errors.data[0].code) == ("failed", "too_many_requests")
    gateway.hold.clear()
    running = submit(client, line(1))
    with pytest.raises(openai.RateLimitError, match="1 batches that are not over"):
        submit(client, line(2))
    gateway.hold.set()
    wait_over(client, running.id)
    submit(client, line(2))


def test_ids_and_fields_that_are_none_are_refused_and_not_looked_up(start, signer):
    batch = start()
    client = sdk(batch, signer)
    for path in ("files/..%2Fx", "files/%00", "batches/a%20b", f"jobs/{'x' * 99}", "files/x/../../readyz"):
        answer = client._client.get(f"{batch.url}/v1/{path}")
        assert answer.status_code in (400, 404) and answer.json()["error"], path
    for body in ({}, {"input_file_id": "x\0"}, {"endpoint": "/v1/embeddings"}, [], "x"):
        answer = client._client.post(f"{batch.url}/v1/batches", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    answer = client._client.post(f"{batch.url}/v1/batches", content=b"\xff")
    assert answer.status_code == 400


def test_a_pod_that_is_to_end_ends_by_itself(start):
    batch = start()
    batch.process.terminate()
    assert batch.process.wait(60) == 0
