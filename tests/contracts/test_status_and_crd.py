"""Every status that the operator computes has its place in the CRD, and every place is filled by some status.

The API server drops what the schema does not know, without a word: a misspelt key would never be missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from e2e.api import specs
from e2e.operator import pods
from quire_operator import names, spec, status
from quire_operator.observed import Observed, Ref
from quire_operator.reports import (
    INEXACT_DEFAULTS,
    MAX_BYTES,
    MAX_CONTEXT,
    MAX_MESSAGE_CHARS,
    MAX_PARAMETERS,
    AdapterReport,
    Effective,
    RankReport,
    Sample,
)
from quire_operator.status import Failure, reasons
from quire_sizing.model import ModelShape
from tests.operator.status import group_objects

NOW = datetime.now(UTC)
BODY = specs.merged(specs.MINIMAL, {"metadata": {"uid": "u", "generation": 3}})
SCALED = spec.parse(specs.merged(BODY, {"spec": {"autoscaling": {"maxReplicas": 4}}}))
ROLES = spec.parse(specs.merged(BODY, {"spec": {"disaggregation": {"prefill": {}}}}))
SHARED = spec.parse(specs.merged(BODY, {"spec": {"sharing": {"pool": "p" * 63}}}))
_HUB = {"huggingFace": {"repo": "example/lora"}}
ADAPTED = spec.parse(
    specs.merged(
        BODY,
        {
            "spec": {
                "engine": {"maxAdapters": 2},
                "adapters": [{"name": f"{index:0253}", "source": _HUB} for index in range(2)],
            }
        },
    )
)
DOWNLOADED = spec.parse(specs.merged(specs.DOWNLOADED[0], {"metadata": {"name": "minimal", "uid": "u"}}))
STATUS_SCHEMA = specs.SCHEMA["properties"]["status"]


def observed(*pod_statuses: specs.Body, samples: tuple[Sample, ...] = ()) -> Observed:
    """An LLMDeployment with a Deployment, and pods for which the kubelet reports these statuses."""
    deployment = {
        "metadata": {"generation": 1, "annotations": {names.ANNOTATION_RENDER_REVISION: "minimal-0"}},
        "spec": {"template": {"spec": {"containers": [{"name": "server", "image": "i" * 255}]}}},
        "status": {
            "observedGeneration": 1,
            "replicas": len(pod_statuses),
            "updatedReplicas": len(pod_statuses),
        },
    }
    metadata = {"creationTimestamp": pods.at(-60), "ownerReferences": [{"controller": True, "uid": "rs"}]}
    return Observed(
        body=BODY,
        children={Ref("Deployment", "minimal"): deployment},
        replica_sets=({"kind": "ReplicaSet", "metadata": {"name": "rs", "uid": "rs"}},),
        pods=tuple(
            {
                "kind": "Pod",
                "metadata": {"name": f"pod-{i}", "uid": f"uid-{i}", **metadata},
                "spec": {"nodeName": "n", "containers": [{"name": "server"}]},
                "status": entry,
            }
            for i, entry in enumerate(pod_statuses)
        ),
        samples={f"uid-{i}": sample for i, sample in enumerate(samples)},
    )


def scaled() -> Observed:
    """With an autoscaler that has scaled."""
    hpa_status = {
        "desiredReplicas": 3,
        "lastScaleTime": pods.at(-5),
        "conditions": [{"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound"}],
    }
    hpa = {"kind": "HorizontalPodAutoscaler", "metadata": {"name": "minimal"}, "status": hpa_status}
    return replace(observed(pods.ready()), children={Ref("HorizontalPodAutoscaler", "minimal"): hpa})


def adapters() -> Iterator[AdapterReport]:
    """With texts as long as they get."""
    said: dict[str, Any] = {"revision": "r" * 80, "loaded_bytes": 1, "total_bytes": MAX_BYTES}
    for index, state in enumerate(("Failed", "Fetching")):
        yield AdapterReport(name=f"{index:0253}", state=state, message="x" * MAX_MESSAGE_CHARS, **said)


def statuses() -> dict[str, status.Status]:
    """Statuses of all kinds, with texts and numbers as large as they get."""
    model, long = spec.parse(BODY), "x" * MAX_MESSAGE_CHARS
    loading = Sample(phase="loading", loaded_bytes=1, total_bytes=MAX_BYTES, eta_seconds=9, version="v" * 64)
    sizes = ModelShape(**dict.fromkeys((item.name for item in fields(ModelShape)), MAX_PARAMETERS))
    effective = Effective(
        max_model_len=1,
        wanted_model_len=MAX_CONTEXT,
        dtype="bfloat16",
        quantization="compressed-tensors, int8",
        inexact_defaults=INEXACT_DEFAULTS,
        native_kernels="avx512_vnni",
    )
    serving = replace(loading, phase="serving", load_seconds=86_400, model=sizes, effective=effective)
    fetching = replace(loading, phase="downloading", bytes_per_second=MAX_BYTES)
    found = {
        "nothing yet": status.compute_status(model, Observed(body=BODY), now=NOW),
        "loading": status.compute_status(model, observed(pods.loading(), samples=(loading,)), now=NOW),
        "serving": status.compute_status(
            model, observed(pods.ready(), samples=(serving,)), now=NOW, available_revision="minimal-1"
        ),
        "failed": status.compute_status(
            model, observed(pods.terminated(70, "EngineCrashed", message=long)), now=NOW
        ),
        "downloading": status.compute_status(
            DOWNLOADED, observed(pods.fetching(), samples=(fetching,)), now=NOW
        ),
        "downloaded": status.compute_status(DOWNLOADED, observed(pods.fetched()), now=NOW),
        "scaled": status.compute_status(SCALED, scaled(), now=NOW),
        "grouped": group_objects.recreated(5),
        "stalled group": group_objects.compute(
            group_objects.member(pods.ready()),
            group_objects.member(pods.loading(), worker=1),
            samples={
                "uid-m-0-1": Sample(
                    phase="stalled", ranks=(RankReport(rank=1, last_step=6, missing="Silent"),)
                )
            },
        ),
        "waiting for its turn": status.compute_status(
            SHARED,
            observed(),
            now=NOW,
            turn=status.TurnState(
                pool="p" * 63, state="Waiting", awake="a" * 253, turn_at=NOW, swap_seconds=86_400.4
            ),
        ),
        "with adapters": status.compute_status(
            ADAPTED,
            observed(pods.ready(), samples=(Sample(phase="serving", adapters=tuple(adapters())),)),
            now=NOW,
        ),
        "with roles": status.compute_status(ROLES, observed(pods.ready()), now=NOW),
        "invalid": status.compute_refused_status(
            observed(), Failure(reason="InvalidSpec", detail=long), now=NOW
        ),
    }
    for name in reasons.REASONS:
        problem = Failure(reason=name, detail=long)
        found[name] = status.compute_status(model, observed(), now=NOW, problem=problem)
    return found


def closed(schema: specs.Body) -> specs.Body:
    """The schema with unknown fields refused instead of dropped."""
    result: specs.Body = {
        key: value for key, value in schema.items() if key not in ("properties", "items", "default")
    }
    if "properties" in schema:
        result |= {
            "properties": {key: closed(inner) for key, inner in schema["properties"].items()},
            "additionalProperties": False,
        }
    return result | ({"items": closed(schema["items"])} if "items" in schema else {})


def keys(value: Any, path: str = "status") -> set[str]:
    match value:
        case dict():
            return {f"{path}.{key}" for key in value}.union(*(keys(value[k], f"{path}.{k}") for k in value))
        case list():
            return set().union(*(keys(entry, f"{path}[]") for entry in value))
        case _:
            return set()


@pytest.mark.parametrize("name", statuses())
def test_a_status_fits_the_schema(name: str) -> None:
    Draft202012Validator(closed(STATUS_SCHEMA)).validate(statuses()[name])


def test_every_field_of_the_schema_is_written() -> None:
    written = set().union(*(keys(entry) for entry in statuses().values()))
    written = {path for path in written if not path.startswith("status.model.sizes.")}
    known = {path for path, _ in specs.schemas() if path.startswith("status.") and not path.endswith("[]")}
    assert known == written


def test_every_column_shows_a_field_that_some_status_has() -> None:
    columns = specs.CRD["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = {column["jsonPath"].lstrip(".") for column in columns if column["jsonPath"].startswith(".status")}
    written = set().union(*(keys(entry) for entry in statuses().values()))

    assert {path for path in shown if "[?" not in path} <= written
    assert {"status.engine.maxModelLen", "status.engine.dtype", "status.engine.quantization"} <= shown
