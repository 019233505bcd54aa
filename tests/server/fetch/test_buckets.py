"""``quire-server fetch s3://...`` against versitygw, ``gs://...`` against fake-gcs-server."""

import json
from pathlib import Path

import httpx
import pytest

from e2e.cluster import programs
from e2e.ports import free_port
from quire_server.model_dir.files import write_manifest
from tests.server.fetch import published
from tests.server.fetch.bucket_server import BIN, SECRET, publish, running, s3_environment


@pytest.fixture(scope="module")
def gcs(tmp_path_factory):
    """The emulator's address, with a bucket ``models``."""
    programs.build(BIN, ("fakegcs",))
    port = free_port()
    flags = ("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory")
    with running(port, BIN / "fakegcs", *flags):
        address = f"http://127.0.0.1:{port}"
        httpx.post(f"{address}/storage/v1/b?project=p", json={"name": "models"}).raise_for_status()
        for name, data in published.files().items():
            where = f"{address}/upload/storage/v1/b/models/o"
            parameters = {"uploadType": "media", "name": f"tiny/{name}"}
            httpx.post(where, params=parameters, content=data).raise_for_status()
        yield address


def arrived(place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in published.WANTED}


def expected() -> dict[str, bytes]:
    return {name: data for name, data in published.files().items() if name in published.WANTED}


def test_a_model_arrives_from_s3(s3, fetch, tmp_path):
    bucket, endpoint = s3
    publish(bucket, "tiny", published.files())
    outcome = fetch("s3://models/tiny", to=tmp_path / "model", **s3_environment(endpoint))
    assert (outcome.code, outcome.error) == (0, "")
    assert arrived(tmp_path / "model") == expected()
    assert "canary" not in repr(outcome).lower()


def test_the_models_own_manifest_takes_precedence_over_the_bucket(s3, fetch, tmp_path):
    bucket, endpoint = s3
    directory = publish(bucket, "signed", published.files())
    write_manifest(directory)
    assert fetch("s3://models/signed", to=tmp_path / "good", **s3_environment(endpoint)).code == 0
    shard = directory / published.SHARDS[0]
    shard.write_bytes(shard.read_bytes()[::-1])
    outcome = fetch("s3://models/signed", to=tmp_path / "bad", **s3_environment(endpoint))
    assert outcome.code == 65
    assert published.SHARDS[0] in outcome.error


@pytest.mark.parametrize(
    ("source", "secret", "code"),
    [
        ("s3://models/none", SECRET, 66),
        ("s3://no-such-bucket/tiny", SECRET, 66),
        ("s3://models/tiny", "another-canary-secret", 77),
    ],
)
def test_each_s3_error_has_its_exit_code(source, secret, code, s3, fetch):
    bucket, endpoint = s3
    publish(bucket, "tiny", published.files())
    outcome = fetch(source, **s3_environment(endpoint, secret))
    assert outcome.code == code
    assert json.loads(outcome.log)["exitCode"] == code
    assert "canary" not in repr(outcome).lower()


def test_an_unreachable_store_is_a_network_error(fetch):
    outcome = fetch("s3://models/tiny", attempts=1, **s3_environment("http://127.0.0.1:9"))
    assert outcome.code == 69
    assert "Check the endpoint" in outcome.error


def test_a_model_arrives_from_google_cloud_storage(gcs, fetch, tmp_path):
    outcome = fetch("gs://models/tiny", to=tmp_path / "model", STORAGE_EMULATOR_HOST=gcs)
    assert (outcome.code, outcome.error) == (0, "")
    assert arrived(tmp_path / "model") == expected()


def test_a_prefix_that_google_does_not_have_is_not_found(gcs, fetch):
    outcome = fetch("gs://models/none", STORAGE_EMULATOR_HOST=gcs)
    assert outcome.code == 66
