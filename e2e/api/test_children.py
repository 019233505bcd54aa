"""What the operator renders, judged by a real API server: accepted, and found again unchanged afterwards.

The second half guards the operator's silence: were the live object to differ from the desired one after
defaulting, every look at it would end in a write.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from e2e import yaml_files
from e2e.api import profiles, specs
from e2e.api.client import Client, RefusedError
from quire_operator import plan, resources, spec
from quire_operator.settings import Settings

pytestmark = [pytest.mark.api, pytest.mark.timeout(300)]

SETTINGS = Settings(
    engine_image="registry.example/quire-server:1", allow_faults=True, credential_hosts=("*.example.com",)
)
EXAMPLES = sorted((specs.ROOT / "examples").glob("*.yaml"))


def _assert_children_are_kept(api: Client, body: specs.Body) -> None:
    stored = {**body, "metadata": {**body["metadata"], "uid": "0e3c1f5e-0000-4000-8000-000000000000"}}
    measured, named = resources.PodMeasurements(), profiles.named_by(stored)
    for manifest in resources.build(spec.parse(stored), SETTINGS, measured, **named):
        with_applied_hash = plan.with_applied_hash(manifest)
        live = api.try_apply(with_applied_hash)
        assert plan.lost_fields(with_applied_hash, live) == [], manifest["kind"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted_and_so_are_its_children(api: Client, path: Path) -> None:
    bodies = list(yaml_files.load_all(path.read_text(encoding="utf-8")))
    for body in bodies:
        api.try_create(body)
    ours = [body for body in bodies if body["kind"] == "LLMDeployment"]
    assert ours
    for body in ours:
        _assert_children_are_kept(api, body)


def test_the_autoscaler_that_the_documentation_gives_is_accepted(api: Client) -> None:
    page = (specs.ROOT / "docs" / "autoscaling.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(apiVersion.*?)```", page, flags=re.DOTALL)
    api.try_create(yaml_files.load(text))


@pytest.mark.parametrize(
    "body",
    [
        specs.MINIMAL,
        specs.FULL,
        specs.AUTOSCALED,
        specs.IDLING,
        specs.SHARDED,
        specs.ADAPTED,
        specs.GROUPED,
        specs.GROUPED_ON_GPUS,
        *specs.DISAGGREGATED,
        *specs.DOWNLOADED,
    ],
    ids=specs.name_of,
)
def test_children_are_accepted_and_kept(api: Client, body: specs.Body) -> None:
    _assert_children_are_kept(api, body)


@pytest.fixture(scope="module")
def restricted(api: Client) -> str:
    """A namespace that takes pods only as Pod Security's `restricted` has them."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "restricted", "labels": labels}})
    with pytest.raises(RefusedError, match="violates PodSecurity"):
        _try_pod(api, "restricted", {"spec": {"containers": [{"name": "c", "image": "i"}]}})
    return "restricted"


def _try_pod(api: Client, namespace: str, template: specs.Body) -> None:
    # Classes of the cluster's own, which is not there.
    pod_spec = {
        k: v for k, v in template["spec"].items() if k not in ("priorityClassName", "runtimeClassName")
    }
    body = {"metadata": {**template.get("metadata", {}), "name": "tried"}, "spec": pod_spec}
    api.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", body)


@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=specs.random_bodies())
def test_whatever_the_schema_admits_becomes_children_that_are_accepted_and_kept_and_restricted_pods(
    api: Client, restricted: str, body: specs.Body
) -> None:
    admitted = api.try_create(body)
    assert plan.lost_fields(body, admitted) == []
    _assert_children_are_kept(api, admitted)
    children = resources.build(spec.parse(admitted), SETTINGS)
    for template in specs.pod_templates(children):
        _try_pod(api, restricted, template)
