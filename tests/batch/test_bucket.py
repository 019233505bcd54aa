"""Files in a bucket: a real server of S3, and nothing of them on the claim."""

import openai
import pytest

from e2e.cluster import programs
from e2e.ports import free_port
from tests.batch.launch import line, lines_of, sdk, submit, wait_over
from tests.server.fetch.bucket_server import BIN, KEY, SECRET, running


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """The folder of the bucket `batches`, and the server's address."""
    programs.build(BIN, ("versitygw",))
    root = tmp_path_factory.mktemp("s3")
    (root / "batches").mkdir()
    port = free_port()
    flags = ("--access", KEY, "--secret", SECRET, "--port", f"127.0.0.1:{port}", "--quiet")
    with running(port, BIN / "versitygw", *flags, "posix", "--sidecar", str(root.parent), str(root)):
        yield root / "batches", f"http://127.0.0.1:{port}"


@pytest.fixture
def settings(bucket, monkeypatch):
    """The settings; credentials are in the environment, as a Secret's."""
    for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    return {"BUCKET": "s3://batches/quire", "BUCKET_ENDPOINT": bucket[1]}


def test_files_are_in_the_bucket_and_not_on_the_claim(start, signer, bucket, settings):
    batch = start(**settings)
    client = sdk(batch, signer)
    over = wait_over(client, submit(client, *(line(number) for number in range(3))).id)
    assert len(lines_of(client, over.output_file_id)) == 3
    stored = {path.name for path in (bucket[0] / "quire").iterdir()}
    assert stored == {over.input_file_id, over.output_file_id}
    assert not (batch.directory / "files").exists()
    big = client.files.create(file=("big", b"x" * (12 << 20)), purpose="batch")
    assert len(client.files.content(big.id).read()) == 12 << 20, "in several parts"
    for each in client.files.list():
        client.files.delete(each.id)
    assert not any(path.is_file() for path in (bucket[0] / "quire").rglob("*"))


def test_a_store_that_refuses_is_said_and_keeps_nothing(start, signer, settings, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    batch = start(**settings)
    client = sdk(batch, signer)
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("x", b"{}"), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
    assert list(client.files.list()) == []
    assert "wrong" not in batch.log.read_text()
