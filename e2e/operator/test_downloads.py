"""A model that the pods download: how far it is, why it fails and what was brought, all in the status."""

from __future__ import annotations

import pytest

from e2e.operator import pods
from e2e.operator.statusz import speaking
from e2e.operator.world import World, eventually

pytestmark = [pytest.mark.api, pytest.mark.usefixtures("operator")]

HUB = {
    "model": {"source": {"huggingFace": {"repo": "org/tiny", "tokenSecretRef": {"name": "hub", "key": "t"}}}},
    "cache": {"mode": "PerReplica", "size": "1Gi"},
}


def test_a_download_shows_its_progress_its_failure_and_what_it_brought(world: World, namespace: str) -> None:
    world.deploy(namespace, "m", **HUB)
    said = {"phase": "downloading", "loadedBytes": 4, "totalBytes": 16, "etaSeconds": 3}
    with speaking(said) as fetcher:
        address = {"podIP": fetcher.ip, "podIPs": [{"ip": fetcher.ip}]}
        pod = world.make_pod(namespace, "m", pods.fetching() | address)
        name = pod["metadata"]["name"]
        world.wait_condition(namespace, "m", "Ready", "False", "Downloading")
        eventually(
            "the progress", lambda: world.status(namespace, "m").get("model", {}).get("bytesLoaded") == 4
        )
    status = world.status(namespace, "m")
    assert (status["phase"], status["model"]["bytesTotal"]) == ("Downloading", 16)

    denied = pods.fetch_failed(77, "ModelAccessDenied", "the hub says no", restarts=2)
    world.patch("Pod", namespace, name, {"status": denied}, status=True)
    world.wait_condition(namespace, "m", "Stalled", "True", "ModelAccessDenied")
    assert world.status(namespace, "m")["lastFailure"]["container"] == "fetch"

    world.patch("Pod", namespace, name, {"status": pods.fetched()}, status=True)
    world.wait_condition(namespace, "m", "Ready", "False", "Loading")
    found = world.status(namespace, "m")["model"]
    assert found["files"] == [{"name": "config.json", "sha256": "b" * 64}]
    assert found["digest"] == f"sha256:{'a' * 64}"
