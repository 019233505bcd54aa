"""The replica's authority in the APIServices: added under contention, renewed in order, never in others'."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quire_metrics_adapter import certificates, mounted_certificate, publisher
from quire_metrics_adapter.errors import ForeignApiServiceError, SettingsError, UnreachableError
from quire_metrics_adapter.mounted_certificate import MountedPair
from quire_metrics_adapter.publisher import Publisher
from quire_metrics_adapter.settings import Settings
from tests.metrics_adapter.fake_api import FakeApi

SETTINGS = Settings(pod_name="pod-a", namespace="quire-system", service="quire-metrics-adapter")
OTHER = certificates.issue("pod-b", ["x"], datetime.now(UTC), timedelta(days=1))


def bundle(api: FakeApi, version: str = "v1beta2") -> bytes:
    return base64.b64decode(api.services[f"{version}.custom.metrics.k8s.io"]["spec"].get("caBundle", ""))


async def publish(api: FakeApi, settings: Settings = SETTINGS) -> Publisher:
    """Until it was published once."""
    made = Publisher(api, settings)  # type: ignore[arg-type]
    task = asyncio.create_task(made.run(_nothing))
    async with asyncio.timeout(60):
        while not made.published and not task.done():
            await asyncio.sleep(0)
    task.cancel()
    if task.done() and not task.cancelled():
        task.result()
    return made


async def _nothing() -> None:
    return


async def test_the_authority_is_published_once_in_both_versions() -> None:
    api = FakeApi()
    made = await publish(api)
    await made._publish()

    assert bundle(api, "v1beta1") == bundle(api, "v1beta2") == made.credentials.authority
    assert sorted(api.writes) == ["v1beta1.custom.metrics.k8s.io", "v1beta2.custom.metrics.k8s.io"]


async def test_a_concurrent_write_of_another_replica_is_kept() -> None:
    api = FakeApi()
    theirs = base64.b64encode(OTHER.authority).decode()
    api.in_between = [lambda service: api.change(service, theirs)]
    made = await publish(api)

    first = bundle(api)
    assert OTHER.authority in first and made.credentials.authority in first


async def test_a_foreign_api_service_is_not_written_and_raises_an_error() -> None:
    api = FakeApi(service="prometheus-adapter")
    with pytest.raises(ForeignApiServiceError, match="quire-system/prometheus-adapter"):
        await publish(api)
    assert api.writes == []


async def test_a_single_foreign_version_raises_an_error() -> None:
    api = FakeApi()
    api.services["v1beta1.custom.metrics.k8s.io"]["spec"] = {}
    with pytest.raises(ForeignApiServiceError, match="the API server itself"):
        await publish(api)


async def test_a_new_authority_is_published_before_its_certificate_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "PERIOD_SECONDS", 0.01)
    api = FakeApi()
    made = Publisher(api, Settings(**{**vars(SETTINGS), "certificate_seconds": 1}))  # type: ignore[arg-type]
    served: list[bytes] = []

    def renewed() -> None:
        assert made.credentials.authority in bundle(api), "the API server knows it already"
        assert served[-1] in bundle(api), "and still knows the one of a moment ago"
        served.append(made.credentials.authority)

    served.append(made.credentials.authority)
    task = asyncio.create_task(made.run(renewed))
    async with asyncio.timeout(60):
        while len(served) < 3 and not task.done():
            await asyncio.sleep(0.01)
        while served[0] in bundle(api) and not task.done():
            await asyncio.sleep(0.01)
    task.cancel()

    assert len(set(served)) == 3


def write(directory: Path, made: certificates.Credentials) -> None:
    (directory / "tls.crt").write_bytes(made.chain)
    (directory / "tls.key").write_bytes(made.key)


async def test_a_renewed_mounted_certificate_is_loaded_once_certificate_and_key_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted_certificate, "LOOK_SECONDS", 0.01)
    old, new = (certificates.issue("x", ["x"], datetime.now(UTC), timedelta(days=1)) for _ in "ab")
    write(tmp_path, old)
    pair = MountedPair(tmp_path)
    renewals = asyncio.Event()

    def renewed() -> None:
        renewals.set()

    (tmp_path / "tls.crt").write_bytes(new.chain)
    task = asyncio.create_task(pair.run(renewed))
    await asyncio.sleep(0.1)
    assert not renewals.is_set() and pair.credentials.key == old.key, "half of it is new: it does not fit"
    write(tmp_path, new)
    async with asyncio.timeout(60):
        await renewals.wait()
    task.cancel()
    assert (pair.credentials.chain, pair.credentials.key) == (new.chain, new.key)


def test_without_a_usable_mounted_certificate_settings_are_invalid(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tls\.crt"):
        MountedPair(tmp_path)
    (tmp_path / "tls.crt").write_text("x")
    (tmp_path / "tls.key").write_text("x")
    with pytest.raises(SettingsError, match=str(tmp_path)):
        MountedPair(tmp_path)


ENVIRON = {"POD_NAME": "p", "POD_NAMESPACE": "n", "QUIRE_ADAPTER_SERVICE": "s"}


@pytest.mark.parametrize("name", ENVIRON)
def test_every_identity_variable_is_required(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Settings.from_environ({key: value for key, value in ENVIRON.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [("QUIRE_ADAPTER_PORT", "0"), ("QUIRE_ADAPTER_PROBE_PORT", "x"), ("QUIRE_LOG_LEVEL", "loud")],
)
def test_an_invalid_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}="):
        Settings.from_environ({**ENVIRON, name: value})
    assert Settings.from_environ(ENVIRON).hosts == ("s", "s.n", "s.n.svc")


async def test_the_authority_is_published_after_a_request_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(service: object) -> None:
        raise UnreachableError("the database is gone")

    monkeypatch.setattr(publisher, "_RETRY_SECONDS", 0.0)
    api = FakeApi()
    api.in_between = [fail]
    made = await publish(api)

    assert bundle(api) == made.credentials.authority
    assert "cannot publish the certificate authority: the database is gone" in caplog.text
