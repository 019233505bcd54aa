"""The status of a model that is downloaded: progress, failures, result."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from e2e.api import specs
from e2e.operator import pods as kubelet
from quire_operator import reports, spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.reports import Sample
from tests.operator.status import objects

SOURCE = specs.DOWNLOADED[0]["spec"]
MODEL = spec.parse(objects.model_body(model=SOURCE["model"], cache=SOURCE["cache"]))


def compute(pod: objects.Body, *samples: Sample, old: status.Status | None = None) -> status.Status:
    observed = Observed(
        body=objects.model_body() | {"status": old or {}},
        children={Ref("Deployment", "m"): objects.deployment()},
        replica_sets=(objects.replica_set("rs2", 2),),
        pods=(objects.pod(pod),),
        samples=dict(zip(("uid-m-0",), samples, strict=False)),
    )
    return status.compute_status(MODEL, observed, now=datetime.now(UTC))


def ready(found: status.Status) -> tuple[str, str]:
    condition = next(c for c in found["conditions"] if c["type"] == "Ready")
    return condition["status"], condition["reason"]


def test_a_download_reports_its_progress() -> None:
    sample = Sample(phase="downloading", loaded_bytes=4, total_bytes=16, eta_seconds=3)
    found = compute(kubelet.fetching(), sample)
    assert found["phase"] == "Downloading"
    assert ready(found) == ("False", "Downloading")
    assert found["model"] == {"bytesTotal": 16, "bytesLoaded": 4, "etaSeconds": 3}


@pytest.mark.parametrize(
    ("code", "reason", "phase"),
    [
        (77, "ModelAccessDenied", "Failed"),
        (66, "ModelNotFound", "Failed"),
        (73, "OutOfDisk", "Failed"),
        (69, "ModelDownloadFailed", "Degraded"),
    ],
)
def test_a_failed_download_reports_its_cause_and_whether_a_retry_may_help(
    code: int, reason: str, phase: str
) -> None:
    found = compute(kubelet.fetch_failed(code, reason, "the hub says no", restarts=3))
    assert ready(found) == ("False", reason)
    assert found["phase"] == phase
    failure = found["lastFailure"]
    assert (failure["container"], failure["exitCode"]) == ("fetch", code)
    assert "the hub says no" in failure["message"]


def test_digest_and_files_of_a_download_stay_in_the_status() -> None:
    found = compute(kubelet.fetched())
    assert found["phase"] == "Loading"
    assert found["model"]["digest"] == f"sha256:{'a' * 64}"
    assert found["model"]["files"] == [{"name": "config.json", "sha256": "b" * 64}]
    later = compute(kubelet.ready(), old=found)
    assert later["model"]["files"] == found["model"]["files"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "not json",
        '{"digest": "sha256:1"}',
        '{"digest": 7}',
        '{"digest": "' + "x" * 9000 + '"}',
    ],
)
def test_an_invalid_report_of_the_fetcher_is_dropped(text: object) -> None:
    assert reports.parse_fetched(text) is None


def test_only_valid_files_of_a_download_are_reported() -> None:
    digest = f"sha256:{'a' * 64}"
    files = '{"../x": "' + "b" * 64 + '", "ok.json": "' + "c" * 64 + '", "y": 7}'
    fetched = reports.parse_fetched(f'{{"digest": "{digest}", "files": {files}, "totalBytes": -1}}')
    assert fetched is not None
    assert (dict(fetched.files), fetched.total_bytes, fetched.revision) == ({"ok.json": "c" * 64}, 0, "")
