"""Uploads are refused before their bytes come, and what is new leaves room on the disk to delete."""

import contextlib
import http.client
import json
import shutil
import socket

import openai
import pytest

from quire_batch.contents import ContentsError
from quire_batch.space import NEW, RUNNING, Space, reserve
from tests.batch.disk import MIB, fill, small_disk
from tests.batch.launch import CHAT, Batch, Signed, http_client, line, lines_of, sdk, submit, wait, wait_over


def begin(batch, signer, length):
    """An upload of which only the head is sent."""
    connection = socket.create_connection(("127.0.0.1", batch.port), timeout=60)
    token = signer.for_batch("models/alice")
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nx-quire-gateway-token: {token}\r\n"
    head += "content-type: multipart/form-data; boundary=b\r\n"
    connection.sendall(f"{head}content-length: {length}\r\n\r\n".encode())
    return connection


def test_an_upload_over_the_quota_is_refused_before_it_is_sent(start, signer):
    batch = start(CLIENT_BYTES=1000)
    with begin(batch, signer, 1 << 20) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (429, "quota_exceeded")


def test_a_client_sends_four_files_at_once(start, signer):
    batch = start()
    alice, bob = sdk(batch, signer), sdk(batch, signer, "models/bob")

    def is_refused():
        try:
            alice.files.create(file=("x", b"x"), purpose="batch")
        except openai.RateLimitError as error:
            assert error.response.headers["retry-after"], "which is worth a second try"
            return True
        return False

    with contextlib.ExitStack() as open_:
        for _ in range(4):
            open_.enter_context(begin(batch, signer, 1000))
        wait("the four have begun", is_refused)
        assert bob.files.create(file=("x", b"x"), purpose="batch").id
    wait("they are over", lambda: not is_refused())


def is_full(ask):
    """Whether the answer is a 507."""
    with pytest.raises(openai.APIStatusError) as caught:
        ask()
    answer = caught.value
    return (answer.status_code, answer.code) == (507, "storage_full")


def test_what_is_new_leaves_room_to_end_what_runs_and_to_delete(keys, signer, gateway, tmp_path):
    size = 256  # of whose reserve a half has room for the log of SQLite
    with small_disk(tmp_path / "disk", size) as disk, Batch(gateway.url, keys, disk / "state") as batch:
        client = sdk(batch.wait_ready(), signer)
        gateway.hold.clear()
        running = submit(client, *(line(number) for number in range(50)))
        wait("a line is in flight", lambda: gateway.in_flight)
        unused = client.files.create(file=("unused", b"x" * 100_000), purpose="batch")

        ballast = fill(disk, free=int(0.8 * reserve(size * MIB)))
        again = {"input_file_id": running.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert is_full(lambda: client.files.create(file=("x", b"x"), purpose="batch"))
        assert is_full(lambda: client.batches.create(**again))
        job = {"endpoint": CHAT, "body": line(1)["body"]}
        jobs = http_client(auth=Signed(signer, "models/alice"), base_url=batch.url)
        assert jobs.post("/v1/jobs", json=job).status_code == 507
        gateway.hold.set()
        assert len(lines_of(client, wait_over(client, running.id).output_file_id)) == 50

        ballast.unlink()
        gateway.hold.clear()
        waiting = submit(client, *(line(number) for number in range(100, 150)))
        wait("a line is in flight", lambda: gateway.in_flight)
        ballast = fill(disk, free=int(0.4 * reserve(size * MIB)))
        asked = gateway.asked.total()
        gateway.hold.set()
        wait("no more are asked for", lambda: "the store fails" in batch.log.read_text())
        assert client.files.delete(unused.id).deleted
        assert client.batches.retrieve(waiting.id).status == "in_progress"
        assert gateway.asked.total() == asked, "lines wait for room"
        ballast.unlink()
        assert wait_over(client, waiting.id).request_counts.completed == 50


def test_an_upload_of_which_no_length_is_known_ends_before_the_disk_is_full(keys, signer, gateway, tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk, Batch(gateway.url, keys, disk / "state") as batch:
        client = http_client(auth=Signed(signer, "models/alice"), base_url=batch.wait_ready().url)
        least = shutil.disk_usage(disk).free

        def body():
            nonlocal least
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            for _ in range(80):
                yield b"x" * MIB
                least = min(least, shutil.disk_usage(disk).free)

        headers = {"content-type": "multipart/form-data; boundary=b"}
        with contextlib.suppress(OSError):  # what is sent after the answer has come may be cut off
            answer = client.post("/v1/files", content=body(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (507, "storage_full")
        assert MIB < least < 40 * MIB, "it was spooled, and ended"
        wait("the spooled bytes are gone", lambda: shutil.disk_usage(disk).free > 60 * MIB)
        assert list(sdk(batch, signer).files.list()) == []


def test_of_a_small_disk_a_twentieth_is_left_and_of_none_nothing(tmp_path, monkeypatch):
    assert reserve(20 << 30) == 512 * MIB and reserve(1000 * MIB) == 50 * MIB
    usage = shutil._ntuple_diskusage(1000 * MIB, 960 * MIB, 40 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    space = Space(tmp_path)
    space.check(RUNNING)
    space.check(RUNNING, 15 * MIB)
    for share, more in ((NEW, 0), (RUNNING, 16 * MIB)):
        with pytest.raises(ContentsError) as caught:
            space.check(share, more)
        assert caught.value.is_full
    Space(None).check(NEW, 1 << 40)
    assert list(space.guarded(RUNNING, [b"a"], len)) == [b"a"]
    with pytest.raises(ContentsError):
        list(space.guarded(NEW, [b"a"], len))
