"""What quire-batch does where its database, its files or what it was given fail, in this process."""

import dataclasses
import tempfile

import aiohttp
import httpx
import pytest
import sqlalchemy as sa
from starlette.requests import Request

from e2e.ports import free_port
from quire_batch.__main__ import main
from quire_batch.api import application
from quire_batch.contents import Contents, ContentsError
from quire_batch.context import Context
from quire_batch.gateway_client import GatewayClient
from quire_batch.metrics import Metrics
from quire_batch.outcome import Verdict, judge
from quire_batch.patience import Patience
from quire_batch.records import Batch, Status, Work
from quire_batch.settings import Settings
from quire_batch.space import Space
from quire_batch.upload import receive
from quire_batch.webhook import origin
from quire_batch.webhook_sender import WebhookSender
from quire_http.errors import ApiError
from tests.batch.launch import CHAT

AWAY = sa.exc.OperationalError("SELECT", {}, OSError("the server closed the connection"))


@pytest.mark.parametrize(
    ("wrong", "content", "code", "text"),
    [
        ({"GATEWAY_URL": ""}, "", 2, "QUIRE_BATCH_GATEWAY_URL is not set"),
        ({"WEBHOOKS": "https://hooks.example.com"}, "", 2, "QUIRE_BATCH_WEBHOOK_SECRET_FILE"),
        ({"WEBHOOKS": "ftp://x"}, "", 2, "http or https"),
        ({"WEBHOOK_SECRET_FILE": "{}"}, "whsec_hunter2!", 2, "must be whsec_"),
        ({"DATABASE_URL_FILE": "/nowhere"}, "", 2, "/nowhere cannot be read"),
        (
            {"DATABASE_URL_FILE": "{}"},
            "mysql://quire:hunter2@db/quire",
            2,
            "it must begin with postgresql://",
        ),
        ({"DATABASE_URL_FILE": "{}"}, "hunter2", 2, "DATABASE_URL_FILE: it is no URL"),
        ({"DATABASE_URL_FILE": "{}"}, "postgresql://quire:hunter2@127.0.0.1:{}/q", 1, "Connection refused"),
    ],
)
def test_a_program_that_cannot_start_says_why_and_no_secret(
    tmp_path, monkeypatch, capsys, wrong, content, code, text
):
    monkeypatch.setattr(tempfile, "tempdir", None)
    file = tmp_path / "secret"
    file.write_text(content.format(free_port()))
    right = {"GATEWAY_URL": "http://127.0.0.1:9", "GATEWAY_KEYS_DIR": tmp_path, "DIR": tmp_path}
    for name, value in {**right, **wrong}.items():
        monkeypatch.setenv(f"QUIRE_BATCH_{name}", str(value).format(file))
    assert main() == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and text in said and "hunter2" not in said


class AwayStore:
    def ping(self):
        raise AWAY

    counts = ping


async def test_without_its_database_it_is_not_ready_and_other_metrics_are_there(tmp_path):
    store = AwayStore()
    settings = Settings(gateway_url="", keys_directory=tmp_path, directory=tmp_path, worker="w")
    parts = {"store": store, "contents": None, "space": Space(None), "tokens": None, "settings": settings}
    shared = Context(**parts, metrics=Metrics(store.counts), wake=lambda: None, is_ready=lambda: True)
    transport = httpx.ASGITransport(application(shared))
    async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
        ready, metrics = await client.get("/readyz"), await client.get("/metrics")
    assert ready.status_code == 503
    assert ready.json() == {"ok": False, "reason": "the server closed the connection"}
    assert metrics.status_code == 200
    assert "batch_lines_in_flight" in metrics.text and "batch_open_batches" not in metrics.text


def test_a_file_that_is_gone_is_missing_when_it_is_read_and_deleted_all_the_same(tmp_path):
    contents = Contents.in_directory(tmp_path)
    with pytest.raises(ContentsError) as raised:
        list(contents.read("file-gone"))
    assert raised.value.is_missing
    contents.delete("file-gone")


def test_a_file_that_cannot_be_read_or_deleted_is_not_taken_for_one_that_is_gone(tmp_path):
    contents = Contents.in_directory(tmp_path)
    (tmp_path / "odd").write_bytes(b"a file, and no directory")
    with pytest.raises(ContentsError) as raised:
        list(contents.read("odd/file"))
    assert not raised.value.is_missing
    with pytest.raises(ContentsError):
        contents.delete("odd/file")


class NotingStore:
    """Of a job. ``tried``: what was noted of its report."""

    def result(self, id_):
        return None

    def webhook_tried(self, *noted):
        self.tried = noted


async def test_a_receiver_that_is_away_is_a_webhook_that_failed(tmp_path):
    url = f"http://127.0.0.1:{free_port()}/done"
    settings = Settings(gateway_url="", keys_directory=tmp_path, directory=tmp_path, worker="w")
    settings = dataclasses.replace(settings, webhooks=frozenset({origin(url)}), webhook_secret=b"s" * 32)
    store = NotingStore()
    metrics = Metrics(lambda: ({}, None))
    job = Batch(
        id="job_1",
        owner="a",
        is_job=True,
        endpoint=CHAT,
        status=Status.COMPLETED,
        delegation="",
        created_at=1,
        expires_at=100,
        webhook=url,
    )
    sender = WebhookSender(store, metrics, settings, Patience(metrics), clock=lambda: 50.0)
    async with aiohttp.ClientSession() as session:
        await sender._report(session, job, 0)
    assert store.tried == ("job_1", 1, 55.0), "it is tried again in five seconds"
    assert metrics.registry.get_sample_value("batch_webhooks_total", {"status": "failed"}) == 1


async def test_a_line_waits_while_the_gateway_is_away():
    client = GatewayClient(f"http://127.0.0.1:{free_port()}")
    work = Work(batch_id="b", number=1, endpoint=CHAT, delegation="d", body=b"{}", take=1, failures=0)
    answer = await client.ask(work)
    await client.close()
    assert answer.status == 0 and judge(answer, 4).verdict is Verdict.REFUSED


async def test_an_upload_whose_parts_cannot_be_told_apart_is_refused():
    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data")]}
    with pytest.raises(ApiError, match="The body cannot be read") as refused:
        await receive(Request(scope, None), 1000, Space(None))
    assert refused.value.status == 400
