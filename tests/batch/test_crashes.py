"""Whatever dies when: each custom_id is in the output once, and no more is repeated than was in flight."""

import os
import signal

import httpx
import openai
import pytest

from tests.batch.disk import fill, small_disk
from tests.batch.launch import Batch, line, lines_of, sdk, submit, wait, wait_over
from tests.server.launch import NO_TLS

LINES = int(os.environ.get("BATCH_LINES", "200"))
KILLS = 5


@pytest.fixture
def database(postgres, tmp_path):
    """The file of a Secret with its URL."""
    path = tmp_path / "database-url"
    path.write_text(postgres.url + "\n")
    return {"DATABASE_URL_FILE": path}


def check_once(client, batch_id, gateway, most_repeated):
    over = wait_over(client, batch_id, 300)
    assert over.status == "completed" and over.request_counts.completed == LINES, over
    output = lines_of(client, over.output_file_id)
    assert [one["custom_id"] for one in output] == [f"line-{number}" for number in range(LINES)]
    assert all(one["response"]["body"]["echo"] == f"question {n}" for n, one in enumerate(output))
    repeated = gateway.asked.total() - LINES
    on_their_way = KILLS  # sent, and not read yet when it was counted what is in flight
    assert repeated <= most_repeated + on_their_way, f"{repeated} lines were asked for again"


def is_held(gateway, *batches):
    """Whether every line that these have taken waits at the gateway: other answers are stored."""
    taken = sum(each.metric("batch_lines_in_flight") for each in batches)
    return gateway.in_flight == taken > 0


def kill_five_times(batch, gateway, client):
    """Kill quire-batch in the middle of a batch; the batch, and how many lines were in flight then."""
    gateway.hold_at = LINES // (KILLS + 2)
    submitted = submit(client, *(line(number) for number in range(LINES)))
    in_flight = 0
    for number in range(2, KILLS + 2):
        wait("some lines more", lambda: not gateway.hold.is_set(), 300)
        wait("all that is in flight is held", lambda: is_held(gateway, batch))
        batch.kill()
        held, asked = gateway.counts()
        gateway.hold_at = LINES * number // (KILLS + 2) if number <= KILLS else 0
        gateway.hold.set()
        wait("their connections are over", lambda: not gateway.in_flight)
        in_flight += held + gateway.asked.total() - asked  # what was sent last is read after the kill
        batch.start().wait_ready()
    return submitted, in_flight


def test_a_processor_killed_five_times_does_each_line_once(start, signer, gateway):
    batch = start(CONCURRENCY=8)
    client = sdk(batch, signer)
    submitted, in_flight = kill_five_times(batch, gateway, client)
    assert in_flight >= KILLS
    check_once(client, submitted.id, gateway, in_flight)


@pytest.mark.deep
def test_a_pod_that_ends_puts_back_what_it_cannot_end(start, signer, gateway):
    batch = start(CONCURRENCY=4, DRAIN_SECONDS=1)
    client = sdk(batch, signer)
    gateway.hold.clear()
    submitted = submit(client, *(line(number) for number in range(LINES)))
    wait("all that is in flight is held", lambda: is_held(gateway, batch))
    batch.process.terminate()
    assert batch.process.wait(120) == 0
    in_flight = gateway.in_flight
    gateway.hold.set()
    batch.start().wait_ready()
    check_once(client, submitted.id, gateway, in_flight)


@pytest.mark.deep
def test_so_does_one_on_postgresql(start, signer, gateway, database):
    batch = start(CONCURRENCY=8, **database)
    client = sdk(batch, signer)
    submitted, in_flight = kill_five_times(batch, gateway, client)
    check_once(client, submitted.id, gateway, in_flight)
    assert not list(batch.directory.glob("*sqlite*"))


@pytest.mark.deep
def test_workers_share_a_batch_and_one_that_is_lost_is_done_without(
    keys, signer, gateway, database, tmp_path
):
    shared = {**database, "CONCURRENCY": 4, "LEASE_SECONDS": 2}
    state = tmp_path / "state"
    with Batch(gateway.url, keys, state, WORKER="one", **shared) as one:
        one.wait_ready()
        with Batch(gateway.url, keys, state, WORKER="two", **shared) as two:
            two.wait_ready()
            client = sdk(one, signer)
            gateway.hold_at = LINES // 2
            submitted = submit(client, *(line(number) for number in range(LINES)))
            wait("half of the lines", lambda: not gateway.hold.is_set(), 300)
            wait("the second has lines in flight", lambda: two.metric("batch_lines_in_flight"))
            wait("all that is in flight is held", lambda: is_held(gateway, one, two))
            two.kill()
            in_flight = gateway.in_flight
            gateway.hold.set()
            check_once(client, submitted.id, gateway, in_flight)
            assert "lines of a lost worker wait again" in one.log.read_text()


@pytest.mark.deep
def test_a_worker_that_comes_back_beside_its_old_process_does_each_line_once(
    keys, signer, gateway, database, tmp_path
):
    """As after its node was cut off, and the pod deleted by force."""
    shared = {**database, "CONCURRENCY": 4, "WORKER": "one"}
    state = tmp_path / "state"
    with Batch(gateway.url, keys, state, **shared) as before:
        client = sdk(before.wait_ready(), signer)
        gateway.hold_at = LINES // 2
        submitted = submit(client, *(line(number) for number in range(LINES)))
        wait("half of the lines", lambda: not gateway.hold.is_set(), 300)
        wait("all that is in flight is held", lambda: is_held(gateway, before))
        before.process.send_signal(signal.SIGSTOP)
        in_flight, asked = gateway.counts()
        with Batch(gateway.url, keys, state, **shared) as after:
            client = sdk(after.wait_ready(), signer)
            wait("they are asked for again", lambda: gateway.asked.total() > asked)
            assert "lines of a process of this worker that died wait again" in after.log.read_text()
            before.process.send_signal(signal.SIGCONT)
            gateway.hold.set()
            check_once(client, submitted.id, gateway, in_flight)


@pytest.mark.deep
def test_postgresql_restarts_in_the_middle_and_nothing_is_lost_or_repeated(
    start, signer, gateway, database, postgres
):
    batch = start(CONCURRENCY=8, **database)
    client = sdk(batch, signer)
    gateway.hold_at = LINES // 4
    submitted = submit(client, *(line(number) for number in range(LINES)))
    wait("some lines", lambda: not gateway.hold.is_set(), 300)
    wait("lines are in flight", lambda: is_held(gateway, batch))
    postgres.stop()
    gateway.hold.set()
    wait("their answers cannot be stored", lambda: batch.metric("batch_store_errors_total") > 0)
    answer = httpx.get(f"{batch.url}/readyz", verify=NO_TLS)
    assert answer.status_code == 503
    with pytest.raises(openai.APIStatusError) as caught:
        client.batches.retrieve(submitted.id)
    assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
    postgres.start()
    check_once(client, submitted.id, gateway, 0)
    assert batch.log.read_text().count("the store is back") == 1


def test_a_full_disk_is_said_and_loses_nothing(keys, signer, gateway, tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk, Batch(gateway.url, keys, disk / "state") as batch:
        batch.wait_ready()
        client = sdk(batch, signer)
        gateway.hold.clear()
        submitted = submit(client, *(line(number) for number in range(LINES)))
        wait("a line is in flight", lambda: gateway.in_flight)
        ballast = fill(disk)
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("x", b"x" * (1 << 20)), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        gateway.hold.set()
        wait("an answer cannot be stored", lambda: "the store fails" in batch.log.read_text())
        assert client.batches.retrieve(submitted.id).status == "in_progress", "what is stored can be read"
        ballast.unlink()
        check_once(client, submitted.id, gateway, 0)
        names = {one.filename for one in client.files.list()}
        assert names == {f"{submitted.id}_output.jsonl", "input.jsonl"}, "the upload left nothing"
