"""``quire-server fetch --adapter`` and ``file://``: two files arrive and no other, or the reason why not."""

import json
import os

import pytest

from tests.server.fetch.bucket_server import publish, s3_environment
from tests.server.fetch.hub_server import COMMIT, HubServer
from tests.server.fetch.test_oci_registry import RegistryServer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = {CONFIG: b'{"peft_type": "LORA"}', WEIGHTS: b"w" * 100_000}
REPOSITORY = {
    **ADAPTER,
    "config.json": b"{}",
    "model.safetensors": b"m",
    "tokenizer.json": b"{}",
    "README.md": b"#",
}


def files(place):
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "quire-manifest.json"}


@pytest.fixture
def hub():
    server = HubServer(dict(REPOSITORY))
    yield server
    server.close()


@pytest.fixture
def place(tmp_path):
    return tmp_path / "volume" / "model"


@pytest.fixture
def claims(tmp_path):
    """Two volumes below one root, with an adapter in the first."""
    directory = tmp_path / "claims" / "one" / "support"
    directory.mkdir(parents=True)
    (tmp_path / "claims" / "two").mkdir()
    for name, data in REPOSITORY.items():
        (directory / name).write_bytes(data)
    return tmp_path / "claims"


def test_of_an_adapter_its_two_files_arrive_from_a_hub(hub, fetch, place):
    outcome = fetch("hf://org/tiny", "--adapter", HF_ENDPOINT=hub.endpoint)
    assert (outcome.code, outcome.error) == (0, "")
    assert files(place) == ADAPTER
    assert json.loads(outcome.log)["revision"] == COMMIT
    assert fetch("hf://org/tiny", "--adapter", HF_ENDPOINT="http://127.0.0.1:9").code == 0  # it is there


def test_of_an_adapter_its_two_files_arrive_from_a_bucket(s3, fetch, place):
    bucket, endpoint = s3
    publish(bucket, "support", REPOSITORY)
    assert fetch("s3://models/support", "--adapter", **s3_environment(endpoint)).code == 0
    assert files(place) == ADAPTER


def test_of_an_adapter_its_two_files_arrive_from_a_registry(fetch, place):
    server = RegistryServer(REPOSITORY, tokens=False)
    outcome = fetch(f"oci://{server.address}/models/tiny:v1", "--adapter")
    server.close()
    assert (outcome.code, outcome.error) == (0, "")
    assert files(place) == ADAPTER


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        ({CONFIG: None}, 66, "no adapter_config.json in its root"),
        ({WEIGHTS: None}, 66, "no adapter_model.safetensors in its root"),
        ({WEIGHTS: None, "adapter_model.bin": b"pickle"}, 2, "A pickle can run code"),
        (
            {"quire-manifest.json": b'{"files": {"x": {"size": 1, "sha256": ""}}}'},
            65,
            "does not name adapter_",
        ),
    ],
)
def test_what_is_no_adapter_is_refused_with_a_sentence(hub, fetch, place, change, code, reason):
    for name, data in change.items():
        hub.files[name] = data
    hub.files = {name: data for name, data in hub.files.items() if data is not None}
    outcome = fetch("hf://org/tiny", "--adapter", HF_ENDPOINT=hub.endpoint)
    assert outcome.code == code
    assert reason in json.loads(outcome.log)["message"]
    assert not place.exists()


def test_an_adapter_larger_than_any_is_refused_before_its_download(hub, fetch):
    hub.announced[WEIGHTS] = (8 << 30) + 1
    outcome = fetch("hf://org/tiny", "--adapter", HF_ENDPOINT=hub.endpoint)
    assert outcome.code == 2
    assert "more than 8589934592 are not taken" in outcome.error
    assert not hub.sent


def test_a_file_listed_twice_is_refused(hub, fetch):
    hub.extra_siblings = [{"rfilename": WEIGHTS, "size": 1}]
    outcome = fetch("hf://org/tiny", "--adapter", HF_ENDPOINT=hub.endpoint)
    assert outcome.code == 65
    assert "twice" in outcome.error


def test_an_adapter_is_copied_from_a_directory(claims, fetch, place):
    (claims / "latest").symlink_to("one")
    outcome = fetch(f"file://{claims}/latest/support", "--adapter", "--root", str(claims))
    assert (outcome.code, outcome.error) == (0, "")
    assert files(place) == ADAPTER


def test_no_link_leads_out_of_the_root(claims, fetch, place, tmp_path):
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name, data in ADAPTER.items():
        (secrets / name).write_bytes(data)
    (claims / "one" / "out").symlink_to(secrets)
    root = ("--root", str(claims))
    outcome = fetch(f"file://{claims}/one/out", "--adapter", *root)
    assert outcome.code == 2
    assert "leads out of" in outcome.error
    weights = claims / "one" / "support" / WEIGHTS
    weights.unlink()
    weights.symlink_to(secrets / WEIGHTS)
    outcome = fetch(f"file://{claims}/one/support", "--adapter", *root)
    assert outcome.code == 65
    assert "a link that leads out" in outcome.error
    assert not place.exists()


def test_not_even_the_blobs_of_a_hubs_cache_may_lie_outside_of_the_root(claims, fetch, place, tmp_path):
    one, blobs = claims / "one", tmp_path / "blobs"
    blobs.mkdir()
    (blobs / WEIGHTS).write_bytes(b"secret")
    (one / WEIGHTS).symlink_to(blobs / WEIGHTS)
    (one / CONFIG).write_bytes(b"{}")
    outcome = fetch(f"file://{one}", "--adapter", "--root", str(one))
    assert outcome.code == 2
    assert "leads out of" in outcome.error
    assert not place.exists()


@pytest.mark.parametrize(
    ("source", "code", "reason"),
    [
        ("file:///nowhere/at/all", 66, "no directory /nowhere/at/all"),
        ("file:///models/../etc", 2, "names no model"),
        ("file://relative", 2, "names no model"),
        ("file:///a%00b", 2, "names no model"),
    ],
)
def test_a_directory_that_is_none_is_refused(source, code, reason, fetch):
    outcome = fetch(source)
    assert outcome.code == code
    assert reason in outcome.error


def test_a_directory_that_cannot_be_read_is_tried_again(claims, fetch, monkeypatch):
    def stale(path):  # what root, as whom a test may run, is never refused
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(os, "scandir", stale)
    outcome = fetch(f"file://{claims}/one/support", "--adapter", attempts=1)
    assert outcome.code == 69
    assert "cannot be read (Stale file handle)" in outcome.error
