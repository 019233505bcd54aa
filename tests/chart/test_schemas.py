"""The rendered chart against the schemas of a real API server: by kubeconform, and by the server itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.api.client import Client
from e2e.cluster import programs
from tests.chart.helm import BIN, MATRIX, Body, render

pytestmark = pytest.mark.api

CUSTOM = {"AcceleratorProfile", "PodMonitor", "PrometheusRule"}  # see test_monitoring for the last two


@pytest.fixture(scope="module")
def schemas(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One JSON schema per kind, from what the API server publishes; kubeconform would fetch others."""
    folder = tmp_path_factory.mktemp("schemas")
    for path in client.request("GET", "/openapi/v3")["paths"]:
        if path.startswith(("api/", "apis/")):
            document = client.request("GET", f"/openapi/v3/{path}")
            components = json.dumps(_strict(document["components"]))
            for name, schema in document["components"]["schemas"].items():
                for kind in schema.get("x-kubernetes-group-version-kind", []):
                    group = [kind["group"].partition(".")[0]] if kind["group"] else []
                    file = folder / f"{'-'.join([kind['kind'], *group, kind['version']])}.json".lower()
                    reference = json.dumps(f"#/components/schemas/{name}")
                    file.write_text(f'{{"$ref": {reference}, "components": {components}}}', encoding="utf-8")
    return folder


def _strict(node: Any) -> Any:
    """Unknown fields are errors wherever a schema lists the fields that it knows."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(value) for key, value in node.items()}
    is_closed = isinstance(strict.get("properties"), dict) and strict.get("type") == "object"
    if is_closed and "x-kubernetes-preserve-unknown-fields" not in strict:
        strict.setdefault("additionalProperties", False)
    return strict


def conform(schemas: Path, bodies: list[Body], folder: Path) -> subprocess.CompletedProcess[str]:
    programs.build(BIN, ("kubeconform",))
    file = folder / "chart.yaml"
    file.write_text(yaml.safe_dump_all(bodies), encoding="utf-8")
    location = f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    return subprocess.run(
        [str(BIN / "kubeconform"), "-strict", "-summary", "-schema-location", location, str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", MATRIX)
def test_kubeconform_accepts_the_chart(schemas: Path, name: str, tmp_path: Path) -> None:
    bodies = [b for b in render(*MATRIX[name]) if b["kind"] not in CUSTOM]

    done = conform(schemas, bodies, tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Valid: {len(bodies)}" in done.stdout


def test_kubeconform_rejects_a_misspelt_field(schemas: Path, tmp_path: Path) -> None:
    bodies = render()
    deployment = next(b for b in bodies if b["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"

    done = conform(schemas, bodies, tmp_path)

    assert done.returncode != 0
    assert "imagePulPolicy" in done.stdout


@pytest.mark.parametrize("name", MATRIX)
def test_the_api_server_accepts_the_chart(client: Client, name: str) -> None:
    plurals = {
        "NetworkPolicy": "networkpolicies",
        "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    }
    for body in render(*MATRIX[name]):
        if body["kind"] not in CUSTOM:
            version, metadata = body["apiVersion"], body["metadata"]
            base = f"/apis/{version}" if "/" in version else f"/api/{version}"
            namespace = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
            plural = plurals.get(body["kind"], f"{body['kind'].lower()}s")
            path = f"{base}{namespace}/{plural}/{metadata['name']}"
            query = "dryRun=All&fieldManager=helm&fieldValidation=Strict"
            client.request("PATCH", f"{path}?{query}", body, "application/apply-patch+yaml")
